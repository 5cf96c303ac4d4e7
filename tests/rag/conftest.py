"""Real small parts for the tests of pipelines: the packaged encoder, an index on disk, an engine over a random tiny Llama that
can copy. Where an answer must quote, its tokens are forced; everything else runs as in production.
"""

from collections.abc import Iterator

import pytest
from small_parts import CONTEXT, DOCUMENTS, Switch, copying_engine
from tiny_target import save_model

from ragspec.config import EncoderConfig, IndexConfig, RetrieverConfig, TargetConfig
from ragspec.engine.engine import Engine
from ragspec.engine.target import Target
from ragspec.rag.pipeline import Pipeline
from ragspec.rag.prompt import PromptBuilder
from ragspec.retrieval.encoder import Encoder
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.retriever import Retriever, build_index


@pytest.fixture(scope="session")
def encoder() -> Encoder:
    return Encoder.load(EncoderConfig())


@pytest.fixture(scope="session")
def opened_index(tmp_path_factory: pytest.TempPathFactory, encoder: Encoder) -> Store:
    index = tmp_path_factory.mktemp("index")
    build_index(DOCUMENTS, index, encoder, IndexConfig())
    return Store.open(index, encoder.identity)


@pytest.fixture(scope="session")
def retriever(opened_index: Store, encoder: Encoder) -> Retriever:
    return Retriever(encoder, opened_index)


@pytest.fixture(scope="session")
def abstaining_retriever(opened_index: Store, encoder: Encoder) -> Retriever:
    return Retriever(encoder, opened_index, RetrieverConfig(abstain_below=0.2))


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = save_model("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=CONTEXT)
    return Target.load(TargetConfig(model=str(folder)), num_kv_slots=4096)


@pytest.fixture(scope="session")
def switch(target: Target) -> Switch:
    return Switch(target)


@pytest.fixture
def engine(target: Target, switch: Switch) -> Iterator[Engine]:
    """New for every test, so that no test teaches the next one's drafters."""
    switch.answer = ""
    with copying_engine(target, switch) as engine:
        yield engine


@pytest.fixture
def pipeline(retriever: Retriever, engine: Engine, target: Target) -> Pipeline:
    return Pipeline(retriever, engine, PromptBuilder(target.tokenizer, CONTEXT), num_passages=2)

"""An index of which a part cannot be searched: the answer says so, and what it came from is not remembered as the whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from iterative_parts import CONTEXT, DOCUMENTS, Always, Around, wide_target
from letter_encoder import LetterEncoder
from tiny_target import tiny_engine

from ragspec.config import RetrieverConfig, SpeculationConfig
from ragspec.core import SamplingParams
from ragspec.engine.engine import Engine
from ragspec.rag.iterative.pipeline import IterativePipeline
from ragspec.rag.pipeline import Pipeline
from ragspec.rag.prompt import PromptBuilder
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.retriever import RetrievalResult, Retriever, build_index
from ragspec.retrieval.search.index_types import SearchResult
from ragspec.retrieval.speculative.stride import StridePlan

MISSING = ("segment-000002",)
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, seed=1)
QUESTION = "When was the bridge built?"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with tiny_engine(wide_target(tmp_path_factory.mktemp("partial")), [], num_kv_slots=8192) as made:
        yield made


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Retriever:
    folder = tmp_path_factory.mktemp("partial") / "index"
    build_index(DOCUMENTS, folder, LetterEncoder())
    return Retriever(LetterEncoder(), Store.open(folder), RetrieverConfig(mode="dense"))


class Partial(Around):
    """The first `count` lookups find no passage but the last, and say that a segment is missing."""

    def __init__(self, index: Retriever, count: int) -> None:
        super().__init__(index)
        self._count = count

    def search(self, queries: Any, *args: Any, **options: Any) -> SearchResult:
        found = super().search(queries, *args, **options)
        if self.num_calls > self._count:
            return found
        return found._replace(passages=[some[-1:] for some in found.passages], missing=MISSING)

    def retrieve(self, queries: Any, k: int, scope: Any) -> RetrievalResult:
        found = self.search(self.encode(queries), k, scope)
        return RetrievalResult(found.passages, found.generation, found.missing)


def test_an_answer_says_what_was_missing(engine: Engine, index: Retriever) -> None:
    """An answer from half an index that looks like any other."""
    prompts = PromptBuilder(engine.target.tokenizer, CONTEXT)
    pipeline = Pipeline(Partial(index, 1), engine, prompts)
    partial, whole = (pipeline.ask(QUESTION, PARAMS) for _ in range(2))
    assert partial.is_partial and partial.stats.missing_segments == MISSING
    assert partial.to_dict()["stats"]["missing_segments"] == MISSING
    assert not whole.is_partial and whole.stats.missing_segments == () and len(whole.passages) > len(partial.passages)


@pytest.mark.parametrize("guessing", [True, False])
def test_a_lookup_with_parts_missing_is_not_remembered(engine: Engine, index: Retriever, guessing: bool) -> None:
    """Guesses and verified answers from half an index, used after all of it has come back."""

    def ask(count: int) -> Any:
        around = Partial(index, count)
        config = SpeculationConfig(enabled=guessing)
        prompts = PromptBuilder(engine.target.tokenizer, CONTEXT)
        pipeline = IterativePipeline(
            around, engine, prompts, speculation=config, scheduler=Always(StridePlan(1, 0, 1.0))
        )
        return pipeline.ask(QUESTION, PARAMS), around

    whole, _ = ask(0)
    partial, _ = ask(1000)
    first, around = ask(1)
    assert whole.stats.missing_segments == () and partial.stats.missing_segments == MISSING
    assert first.stats.missing_segments == MISSING and around.num_calls > 1
    assert first.stats.iterative.num_right + first.stats.iterative.num_wrong == 0 or guessing

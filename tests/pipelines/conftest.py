"""What the tests of batch jobs run on."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from batch_files import SEED
from tiny_target import SENTENCES, save_model

from pipelines.batch import backend as batch_backend
from pipelines.batch.backend import BackendSpec, Runtime, open_backend
from ragspec.config import EncoderConfig, PipelineConfig, load_config
from ragspec.core import Document


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny target, an index of five sentences, and a configuration that names both."""
    from ragspec.retrieval.encoder import Encoder
    from ragspec.retrieval.retriever import build_index

    folder = tmp_path_factory.mktemp("batch")
    save_model("llama", folder / "target", max_position_embeddings=1024)
    documents = [Document(f"d{n}", sentence) for n, sentence in enumerate(SENTENCES)]
    build_index(documents, folder / "index", Encoder.load(EncoderConfig()))
    config = {
        "retriever": {"index_dir": str(folder / "index"), "num_passages": 2, "abstain_below": 0.0},
        "target": {"model": str(folder / "target")},
        "engine": {"max_kv_tokens": 8192, "max_num_batched_tokens": 64, "max_num_seqs": 16},
        "generation": {"max_tokens": 24, "temperature": 0.8, "seed": SEED},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture(scope="module")
def served(place: Path) -> Iterator[Runtime]:
    """What a job of `place` loads, loaded once."""
    config = load_config(place / "config.yaml")
    with open_backend(BackendSpec(address="local"), config) as backend, backend.load(config) as served:
        yield served


@pytest.fixture
def loaded(served: Runtime, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """Jobs in this process find everything loaded already."""

    @contextlib.contextmanager
    def load(config: PipelineConfig) -> Iterator[Runtime]:
        yield served

    monkeypatch.setattr(batch_backend, "_load_in_process", load)
    return served

"""A small service for the soak commands: a target of random weights, a few documents, the real encoder.

>>> with small_backend(folder) as backend, service_here(backend, ("ann",)) as service: ...
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipelines.benchmarks.gpu import SMALL, engine_over, random_target
from ragspec.config import EngineConfig, RetrieverConfig, TargetConfig
from ragspec.core import Document
from ragspec.drafting.cost_model import CostTable
from ragspec.retrieval.encoder import Encoder
from ragspec.retrieval.retriever import Retriever, build_index
from services.backend import ServiceBackend
from services.settings import ServiceConfig, ServiceSettings

DOCUMENTS = [
    Document("ferry", "The ferry crosses the river at dawn."),
    Document("inn", "The inn has been closed since 1921."),
]
MODEL = "small"


@contextmanager
def small_backend(folder: Path, costs: CostTable | None = None, **service: Any) -> Iterator[ServiceBackend]:
    """Over the index and the data in `folder`, which are made if they are missing. `service`: further settings.

    Raises: SaveError, StoreCorrupt.
    """
    settings = ServiceConfig(
        retriever=RetrieverConfig(index_dir=str(folder / "index")),
        service=ServiceSettings(**{"port": 0, "model": MODEL, "data_dir": str(folder / "data")} | service),
    )
    encoder = Encoder.load(settings.encoder)
    if not (folder / "index").exists():
        build_index(DOCUMENTS, folder / "index", encoder)
    retriever = Retriever.from_config(settings.retriever, encoder)
    target = random_target(SMALL._replace(hidden=64), TargetConfig(quantization="none"))
    engine = engine_over(target, EngineConfig(max_kv_tokens=16_384, num_threads=1), costs)
    with ServiceBackend(engine, target.tokenizer, retriever, settings, engine.close) as backend:
        yield backend

"""The suite `iterative` with its slow indexes in other processes. Needs a Ray that is running."""

from __future__ import annotations

from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path

from pipelines.benchmarks.remote_actors import RemoteDatastore, remote_index
from ragspec.config import RetrieverConfig
from ragspec.evaluation.suite import Outcome, Settings
from ragspec.evaluation.suites.iterative.suite import SUITE as LIBRARY_SUITE
from ragspec.evaluation.suites.iterative.suite import RemoteOpeners
from ragspec.evaluation.timing import Tick
from ragspec.retrieval.encoder import TextEncoder
from ragspec.retrieval.search.index_types import IndexLike


def open_index(folder: Path, encoder: TextEncoder, service_s: float) -> AbstractContextManager[IndexLike]:
    """Exact dense search in an actor, each call `service_s` seconds slower."""
    return remote_index(RetrieverConfig(index_dir=str(folder), mode="dense"), encoder, service_s)


def open_datastore(folder: Path, service_s: float) -> closing[RemoteDatastore]:
    """A datastore in an actor, each call `service_s` seconds slower."""
    return closing(RemoteDatastore(folder, service_s))


def run_iterative(settings: Settings, tick: Tick) -> Outcome:
    """Raises: the errors of the library's suite, EngineError."""
    return LIBRARY_SUITE.run(replace(settings, elsewhere=RemoteOpeners(open_index, open_datastore)), tick)


SUITE = replace(LIBRARY_SUITE, run=run_iterative)

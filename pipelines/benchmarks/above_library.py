"""The suites that need more than the library: Ray, which each of them has for itself on this machine and ends with, or a service.

Why imports within: Ray wants its session set up first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from pathlib import Path

from pipelines.batch.ray_session import ray_session
from ragspec.config import RetrieverConfig
from ragspec.evaluation.suite import Outcome, Settings, run_as, run_suite
from ragspec.evaluation.suites.iterative.suite import Elsewhere
from ragspec.evaluation.timing import Tick
from ragspec.retrieval.encoder import TextEncoder
from ragspec.retrieval.search.index_types import IndexLike

ABOVE_THE_LIBRARY = ("iterative", "cluster", "chaos", "chat", "load")


def run_above(name: str, settings: Settings, tick: Tick) -> Outcome:
    """One of `ABOVE_THE_LIBRARY`. Raises: what the suite raises."""
    if name == "iterative":
        with elsewhere() as there:
            return run_suite(name, replace(settings, elsewhere=there), tick)
    suites = {"cluster": _cluster, "chaos": _chaos, "chat": _chat, "load": _load}
    return run_as(name, suites[name], settings, tick)


def _cluster(settings: Settings, tick: Tick) -> Outcome:
    with ray_session("local"):
        from pipelines.benchmarks.cluster.suite import cluster_suite

        return cluster_suite(settings, tick)


def _chaos(settings: Settings, tick: Tick) -> Outcome:
    from pipelines.benchmarks.chaos.suite import chaos_suite

    return chaos_suite(settings, tick)


def _chat(settings: Settings, tick: Tick) -> Outcome:
    with ray_session("local"):
        from pipelines.benchmarks.chat.suite import chat_suite

        return chat_suite(settings, tick)


def _load(settings: Settings, tick: Tick) -> Outcome:
    from pipelines.benchmarks.load import load_suite

    return load_suite(settings, tick)


@contextmanager
def elsewhere() -> Iterator[Elsewhere]:
    """What the suite iterative opens in other processes."""
    with ray_session("local"):
        from pipelines.benchmarks.remote_actors import RemoteDatastore, remote_index

        def index(folder: Path, encoder: TextEncoder, service_s: float) -> AbstractContextManager[IndexLike]:
            return remote_index(RetrieverConfig(index_dir=str(folder), mode="dense"), encoder, service_s)

        yield Elsewhere(index, lambda folder, service_s: closing(RemoteDatastore(folder, service_s)))

"""The suite `iterative` with an index and a KNN-LM datastore in actors, as if they were larger or further away. Needs
a running Ray.

>>> with open_index("index", encoder) as (index, slow_down): slow_down(0.1)
>>> with contextlib.closing(RemoteDatastore("datastore")) as store: store.slow_down(0.1)
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ragspec.cluster.actors import ActorPool, WorkerActor
from ragspec.cluster.ray_calls import wait_for_all
from ragspec.cluster.remote_retrieval.cluster_retriever import ClusterRetriever
from ragspec.cluster.remote_retrieval.hedged_call import RetryPolicy, hedged_call
from ragspec.cluster.remote_retrieval.shards import ShardActor
from ragspec.cluster.remote_retrieval.worker_pool import WorkerPool
from ragspec.config import RetrieverConfig
from ragspec.errors import StoreCorrupt
from ragspec.evaluation.suite import Outcome, Settings
from ragspec.evaluation.suites.iterative.suite import SUITE as LIBRARY_SUITE
from ragspec.evaluation.suites.iterative.suite import RemoteIndex, RemoteOpeners
from ragspec.evaluation.timing import Tick
from ragspec.retrieval.encoder import EncoderIdentity, FloatArray, TextEncoder
from ragspec.retrieval.knnlm.datastore import Datastore, DatastoreManifest, read_datastore_manifest
from ragspec.retrieval.knnlm.neighbours import Neighbours, PrefetchRequest
from ragspec.retrieval.search.index_types import SearchResult

_OPEN_TIMEOUT_S = 600.0
"""Also for `slow_down`: a timeout of searches may be shorter than the call takes."""


class SlowShardActor(ShardActor):
    def __init__(self) -> None:
        super().__init__()
        self._service_s = 0.0

    def slow_down(self, service_s: float) -> None:
        self._service_s = service_s

    def search(self, *arguments: Any) -> Any:
        answer = super().search(*arguments)
        time.sleep(self._service_s)
        return answer

    def look_up(self, *arguments: Any) -> SearchResult:
        lookup = super().look_up(*arguments)
        time.sleep(self._service_s)
        return lookup


@contextlib.contextmanager
def remote_index(config: RetrieverConfig, encoder: TextEncoder, timeout_s: float = 30.0) -> Iterator[RemoteIndex]:
    """One shard with the whole index. A restarted actor forgets `slow_down`.

    Raises: ConfigError, ModelError, StoreError or RetrievalError.
    """
    with ActorPool(SlowShardActor, prefix="shard") as actors:

        def slow_down(service_s: float) -> None:
            told = [replica.actor.slow_down.remote(service_s) for replica in actors.replicas]
            wait_for_all(told, _OPEN_TIMEOUT_S, "the index")

        retriever = ClusterRetriever(config, encoder, actors.replicas, timeout_s=timeout_s, late_s=timeout_s / 2)
        with contextlib.closing(retriever):
            yield RemoteIndex(retriever, slow_down)


class RemoteDatastore:
    """`DatastoreLike` with the same answers, bit for bit, as the `Datastore` of that folder. Safe to call from several threads.

    It keeps to the datastore that it was built with: a restarted actor that finds another one refuses. States: open -> closed.
    """

    def __init__(self, folder: str | Path, timeout_s: float = 30.0) -> None:
        """Waits until the actor has opened the datastore. `timeout_s` bounds the wait for an answer.

        Raises: StoreError or RetrievalError; then there is no actor.
        """
        folder = Path(folder).resolve()
        manifest = read_datastore_manifest(folder)
        self.target: EncoderIdentity = manifest.target
        self._timeout_s = timeout_s
        self.actors = ActorPool(_DatastoreActor, (str(folder), manifest), prefix="datastore")
        self._pool = WorkerPool(self.actors.replicas, "the datastore")
        try:
            self._call(_OPEN_TIMEOUT_S, "load")
        except BaseException:
            self.close()
            raise

    def search(self, queries: FloatArray, k: int, wanted: PrefetchRequest | None = None) -> Neighbours:
        """As `Datastore.search`.

        Raises: RetrievalError if the datastore is lost, closed or late; StoreError if a restarted actor cannot read it any more;
        ModelError if a query is not finite.
        """
        found: Neighbours = self._call(self._timeout_s, "search", queries, k, wanted)
        return found

    def slow_down(self, service_s: float) -> None:
        """As `SlowDatastore.slow_down`; a restarted actor forgets it."""
        self._call(_OPEN_TIMEOUT_S, "slow_down", service_s)

    def close(self) -> None:
        """End the actor; running calls get a RetrievalError."""
        self._pool.close()
        self.actors.close()

    def _call(self, timeout_s: float, method: str, *arguments: Any) -> Any:
        """A call whose actor dies is made again."""
        given, failed = hedged_call(
            self._pool,
            {method: tuple(self._pool.names)},
            lambda actor, _: getattr(actor, method).remote(*arguments),
            RetryPolicy(timeout_s),
        )
        for error in failed.values():
            raise error
        return given[0][1]


class _DatastoreActor(WorkerActor):
    def __init__(self, folder: str, manifest: DatastoreManifest) -> None:
        self._folder, self._manifest, self._service_s = folder, manifest, 0.0

    def slow_down(self, service_s: float) -> None:
        self._service_s = service_s

    def load(self) -> None:
        _ = self._store

    def search(self, queries: FloatArray, k: int, wanted: PrefetchRequest | None) -> Neighbours:
        found = self._store.search(np.array(queries), k, wanted)  # Why a copy: arrays from Ray are read-only
        time.sleep(self._service_s)
        return found

    @cached_property
    def _store(self) -> Datastore:
        store = Datastore.open(self._folder)
        if store.manifest != self._manifest:
            raise StoreCorrupt(f"{self._folder} holds another datastore by now: open that one")
        return store


def run_iterative(settings: Settings, tick: Tick) -> Outcome:
    """Raises: the errors of the library's suite, EngineError."""
    elsewhere = RemoteOpeners(open_index, lambda folder: contextlib.closing(RemoteDatastore(folder)))
    return LIBRARY_SUITE.run(replace(settings, elsewhere=elsewhere), tick)


def open_index(folder: Path, encoder: TextEncoder) -> contextlib.AbstractContextManager[RemoteIndex]:
    """Exact dense search in an actor."""
    return remote_index(RetrieverConfig(index_dir=str(folder), mode="dense"), encoder)


SUITE = replace(LIBRARY_SUITE, run=run_iterative)

"""The suite `iterative` with an index and a KNN-LM datastore in actors, as if they were larger or further away. Needs
a running Ray.

`service_s`: seconds that every call takes on top of its work, however many queries it brings.

>>> with remote_index("index", encoder, service_s=0.1) as index: ...
>>> with contextlib.closing(RemoteDatastore("datastore")) as store: ...
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
from ragspec.cluster.remote_retrieval.cluster_retriever import ClusterRetriever
from ragspec.cluster.remote_retrieval.hedged_call import RetryPolicy, hedged_call
from ragspec.cluster.remote_retrieval.shards import ShardActor
from ragspec.cluster.remote_retrieval.worker_pool import WorkerPool
from ragspec.config import RetrieverConfig
from ragspec.errors import StoreCorrupt
from ragspec.evaluation.suite import Outcome, Settings
from ragspec.evaluation.suites.iterative.suite import SUITE as LIBRARY_SUITE
from ragspec.evaluation.suites.iterative.suite import RemoteOpeners
from ragspec.evaluation.timing import Tick
from ragspec.retrieval.encoder import EncoderIdentity, FloatArray, TextEncoder
from ragspec.retrieval.knnlm.datastore import Datastore, DatastoreManifest, read_datastore_manifest
from ragspec.retrieval.knnlm.neighbours import Neighbours, PrefetchRequest
from ragspec.retrieval.search.index_types import IndexLike, SearchResult

_OPEN_TIMEOUT_S = 600.0


class SlowShardActor(ShardActor):
    def __init__(self, service_s: float) -> None:
        super().__init__()
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
def remote_index(
    config: RetrieverConfig, encoder: TextEncoder, service_s: float = 0.0, timeout_s: float = 30.0
) -> Iterator[ClusterRetriever]:
    """One shard with the whole index. Raises: ConfigError, ModelError, StoreError or RetrievalError."""
    with ActorPool(SlowShardActor, (service_s,), prefix="shard") as actors:
        retriever = ClusterRetriever(config, encoder, actors.replicas, timeout_s=timeout_s, late_s=timeout_s / 2)
        with contextlib.closing(retriever):
            yield retriever


class RemoteDatastore:
    """`DatastoreLike` with the same answers, bit for bit, as the `Datastore` of that folder. Safe to call from several threads.

    It keeps to the datastore that it was built with: a restarted actor that finds another one refuses. States: open -> closed.
    """

    def __init__(self, folder: str | Path, service_s: float = 0.0, timeout_s: float = 30.0) -> None:
        """Waits until the actor has opened the datastore. `timeout_s` bounds the wait for an answer.

        Raises: StoreError or RetrievalError; then there is no actor.
        """
        folder = Path(folder).resolve()
        manifest = read_datastore_manifest(folder)
        self.target: EncoderIdentity = manifest.target
        self._timeout_s = timeout_s
        self.actors = ActorPool(_DatastoreActor, (str(folder), manifest, service_s), prefix="datastore")
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
    def __init__(self, folder: str, manifest: DatastoreManifest, service_s: float) -> None:
        self._folder, self._manifest, self._service_s = folder, manifest, service_s

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


def open_index(folder: Path, encoder: TextEncoder, service_s: float) -> contextlib.AbstractContextManager[IndexLike]:
    """Exact dense search in an actor, each call `service_s` seconds slower."""
    return remote_index(RetrieverConfig(index_dir=str(folder), mode="dense"), encoder, service_s)


def open_datastore(folder: Path, service_s: float) -> contextlib.closing[RemoteDatastore]:
    """A datastore in an actor, each call `service_s` seconds slower."""
    return contextlib.closing(RemoteDatastore(folder, service_s))


def run_iterative(settings: Settings, tick: Tick) -> Outcome:
    """Raises: the errors of the library's suite, EngineError."""
    return LIBRARY_SUITE.run(replace(settings, elsewhere=RemoteOpeners(open_index, open_datastore)), tick)


SUITE = replace(LIBRARY_SUITE, run=run_iterative)

"""A datastore of KNN-LM in an actor of its own. On a cluster, its folder must be readable on every node.

>>> with contextlib.closing(RemoteDatastore("datastore")) as store:
...     KnnGenerator(target, store).generate(request)
"""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np

from ragspec.cluster.own_actors import Alive
from ragspec.cluster.sole import SoleActor
from ragspec.errors import ConfigError, StoreCorrupt
from ragspec.retrieval.encoder import EncoderIdentity, FloatArray
from ragspec.retrieval.knnlm.datastore import Datastore, DatastoreManifest, read_datastore_manifest, target_of
from ragspec.retrieval.knnlm.neighbours import Neighbours, PrefetchRequest

_OPEN_TIMEOUT_S = 600.0


class RemoteDatastore:
    """`DatastoreLike` with the same answers, bit for bit, as the `Datastore` of that folder. Safe to call from several threads.

    It stays with the datastore that was there when it was built: once another is in its place, an actor that had to start again
    cannot answer, and says so. States: open -> closed.
    """

    def __init__(
        self,
        folder: str | Path,
        service_s: float = 0.0,
        timeout_s: float = 30.0,
        open_timeout_s: float = _OPEN_TIMEOUT_S,
    ) -> None:
        """Needs Ray to be initialised; waits until the actor has opened the datastore, for at most `open_timeout_s` seconds.

        `service_s` is a stated constant service time: every call takes that many seconds more than its work, however many
        queries it brings, as if the datastore were that much larger or further away. For measuring; 0 in any service.
        `timeout_s` bounds the wait for an answer. Raises: ConfigError, StoreError or RetrievalError; then there is no actor.
        """
        if not (0.0 <= service_s < math.inf and 0.0 < timeout_s < math.inf and 0.0 < open_timeout_s < math.inf):
            raise ConfigError(
                "a datastore elsewhere needs finite seconds: a service time from 0 on, time limits above 0"
            )
        folder = Path(folder).resolve()
        manifest = read_datastore_manifest(folder)
        self._target = target_of(manifest)
        self._timeout_s = timeout_s
        self._actor = SoleActor(_DatastoreActor, (str(folder), manifest, service_s), what="the datastore")
        try:
            self._actor.ask("load", timeout_s=open_timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def target(self) -> EncoderIdentity:
        return self._target

    def search(self, queries: FloatArray, k: int, wanted: PrefetchRequest | None = None) -> Neighbours:
        """As `Datastore.search`. Never waits for longer than the time limit.

        Raises: RetrievalError if the datastore is lost, was closed, or does not answer in time; StoreError if an actor that
        started again cannot read it any more; ModelError if a query is not finite.
        """
        found: Neighbours = self._actor.ask("search", queries, k, wanted, timeout_s=self._timeout_s)
        return found

    def close(self) -> None:
        """End the actor; calls that run get a RetrievalError."""
        self._actor.close()


class _DatastoreActor(Alive):
    """What `RemoteDatastore` asks. Light to build: what goes wrong in a constructor reaches nobody."""

    def __init__(self, folder: str, manifest: DatastoreManifest, service_s: float) -> None:
        self._folder = folder
        self._manifest = manifest
        self._service_s = service_s
        self._store: Datastore | None = None

    def load(self) -> None:
        self._opened()

    def search(self, queries: FloatArray, k: int, wanted: PrefetchRequest | None) -> Neighbours:
        found = self._opened().search(np.array(queries), k, wanted)  # Why a copy: what Ray hands over is read-only
        time.sleep(self._service_s)
        return found

    def _opened(self) -> Datastore:
        if self._store is None:
            store = Datastore.open(self._folder)
            if store.manifest != self._manifest:
                raise StoreCorrupt(f"{self._folder} holds another datastore by now: open that one")
            self._store = store
        return self._store

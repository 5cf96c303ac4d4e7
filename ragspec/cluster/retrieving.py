"""An index in an actor of its own: searches take none of the asker's processor time and can run while it does other things.

Texts are encoded where they are asked; what crosses are vectors, words and passages. On a cluster, the index's folder must be
readable on every node.

    >>> with contextlib.closing(RemoteIndex(RetrieverConfig(index_dir="index"), encoder)) as index:
    ...     index.look_up(index.encode(["When did it rain?"]), k=3).passages
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from ragspec.cluster.calls import SoleActor
from ragspec.cluster.shards import OpenGenerations
from ragspec.config import RetrieverConfig
from ragspec.errors import ConfigError, StoreError
from ragspec.retrieval.encoder import TextEncoder
from ragspec.retrieval.lookup import Lookup, Mode, PassageKey, Query
from ragspec.retrieval.manifest import read_generation, read_pointer
from ragspec.retrieval.rerank import Reranker, RerankerConfig, in_turn
from ragspec.retrieval.retriever import index_folder
from ragspec.retrieval.search import EVERYTHING, Scope
from ragspec.retrieval.store import Store, check_encoder
from ragspec.retrieval.view import Terms, View, encoded, terms_of

_OPEN_TIMEOUT_S = 600.0


class _Generation(NamedTuple):
    """One that the actor has opened."""

    pointer: str
    id: str
    terms: Terms


class RemoteIndex:
    """`IndexLike` with the same answers, bit for bit, as a `Retriever` of these settings. Safe to call from several threads.

    States: open -> closed, together with everything that is `pinned`.
    """

    def __init__(
        self,
        config: RetrieverConfig,
        encoder: TextEncoder,
        *,
        service_s: float = 0.0,
        timeout_s: float = 30.0,
        open_timeout_s: float = _OPEN_TIMEOUT_S,
    ) -> None:
        """Needs Ray to be initialised; waits until the actor has opened the index, for at most `open_timeout_s` seconds.

        `service_s` is a stated constant service time: every call takes that many seconds more than its work, however many
        queries it brings, as if the index were that much larger or further away. For measuring; 0 in any service.
        `timeout_s` bounds the wait for an answer, in which an actor that died must open the index anew.
        Raises: ConfigError, ModelError, StoreError or RetrievalError; then there is no actor.
        """
        if not (0.0 <= service_s < math.inf and 0.0 < timeout_s < math.inf and 0.0 < open_timeout_s < math.inf):
            raise ConfigError("an index elsewhere needs finite seconds: a service time from 0 on, time limits above 0")
        self._index_dir = index_folder(config).resolve()
        self._config, self._encoder = config, encoder
        self._timeout_s, self._open_timeout_s = timeout_s, open_timeout_s
        self._follow = not config.pointer
        self._lock = threading.Lock()
        read_pointer(self._index_dir)  # Why first: a missing index is told before an actor is started
        self._actor = SoleActor(_IndexActor, (str(self._index_dir), config, service_s), what="the index")
        try:
            self._current = self._opened(config.pointer) if config.pointer else self._newest(None)
        except BaseException:
            self.close()
            raise

    @property
    def mode(self) -> Mode:
        return self._config.mode

    @property
    def is_elsewhere(self) -> bool:
        return True

    @property
    def generation(self) -> str:
        """Names the current generation and its content; equal generations give equal passages."""
        return self._generation().id

    def encode(self, texts: Sequence[str]) -> list[Query]:
        """Raises: InputError if a text is empty or not text, or if its vector is not finite."""
        return encoded(texts, self.mode, self._encoder, self._generation().terms)

    def look_up(
        self,
        queries: Sequence[Query],
        k: int,
        scope: Scope = EVERYTHING,
        *,
        prefetch_k: int = 0,
        known: frozenset[PassageKey] = frozenset(),
    ) -> Lookup:
        """As `Retriever.look_up`. Never waits for longer than the time limits.

        Raises: RetrievalError if the index is lost, was closed, or does not answer in time; StoreError if its generation cannot
        be read (any more).
        """
        generation = self._generation()
        arguments = queries, k, scope, prefetch_k, known
        try:
            return self._asked(generation, arguments)
        except StoreError as cause:  # an actor that was started again was too late for it
            newer = self._generation()
            if newer is generation:
                raise type(cause)(f"generation {generation.id} of the index cannot be read: {cause}") from cause
            return self._asked(newer, arguments)

    def pinned(self) -> RemoteIndex:
        """The generation that is current now, whatever is committed later, in the same actor.

        It keeps the last two that were asked for; an older one is answered from as long as it is on the disk.
        """
        generation = self._generation()
        pinned = copy.copy(self)
        pinned._current, pinned._follow = generation, False
        return pinned

    def close(self) -> None:
        """End the actor; calls that run get a RetrievalError."""
        self._actor.close()

    def _asked(self, generation: _Generation, arguments: tuple[Any, ...]) -> Lookup:
        found: Lookup = self._actor.ask("look_up", generation.pointer, *arguments, timeout_s=self._timeout_s)
        return found

    def _generation(self) -> _Generation:
        if not self._follow:
            return self._current
        with self._lock:
            self._current = self._newest(self._current)
            return self._current

    def _newest(self, last: _Generation | None) -> _Generation:
        """The current generation, opened if it is not `last`."""
        while True:
            pointer = read_pointer(self._index_dir)
            if last is not None and pointer == last.pointer:
                return last
            try:
                return self._opened(pointer)
            except StoreError:
                if read_pointer(self._index_dir) == pointer:  # or there is a newer one, and this one is gone
                    raise

    def _opened(self, pointer: str) -> _Generation:
        """Raises: StoreError, ConfigError, ModelError, RetrievalError."""
        _, manifest = read_generation(self._index_dir, pointer)
        check_encoder(manifest, self._encoder.identity)
        generation = _Generation(pointer, manifest.generation_id, terms_of(manifest, self.mode))
        self._actor.ask("load", pointer, timeout_s=self._open_timeout_s)
        return generation


class _IndexActor:
    """What `RemoteIndex` asks. Light to build: what goes wrong in a constructor reaches nobody."""

    def __init__(self, index_dir: str, config: RetrieverConfig, service_s: float) -> None:
        self._index_dir = index_dir
        self._config = config
        self._service_s = service_s
        self._reranker: Reranker | None = None
        self._opened = OpenGenerations(self._view)

    def load(self, pointer: str) -> None:
        self._opened.get(self._index_dir, pointer)

    def look_up(
        self,
        pointer: str,
        queries: Sequence[Query],
        k: int,
        scope: Scope,
        prefetch_k: int,
        known: frozenset[PassageKey],
    ) -> Lookup:
        view = self._opened.get(self._index_dir, pointer)
        found = view.look_up(queries, k, scope, prefetch_k=prefetch_k, known=known)
        time.sleep(self._service_s)
        return found

    def _view(self, store: Store) -> View:
        if self._config.reranker and self._reranker is None:
            self._reranker = Reranker.load(RerankerConfig(model=self._config.reranker))
        return View(store, self._config, scoring=in_turn(self._reranker))

"""An index on the shards of a deployment: the answers of a `Retriever` in this process, whatever dies meanwhile.

Queries are encoded by encoder actors or here; what crosses are vectors, words and passages.

    >>> retriever = ClusterRetriever(RetrieverConfig(index_dir="index"), EncoderConfig(), directory, shard_replicas=2)
    >>> retriever.retrieve(["When did it rain?"], k=3).passages
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import weakref
from concurrent.futures import Future, wait

from ragspec.cluster.calls import Patience
from ragspec.cluster.cluster_view import ClusterView
from ragspec.cluster.crew import Crew
from ragspec.cluster.directory import Directory, Member
from ragspec.cluster.encoding import RemoteEncoder
from ragspec.cluster.own_actors import OwnActors
from ragspec.cluster.shards import ShardActor
from ragspec.config import EncoderConfig, RetrieverConfig
from ragspec.errors import ConfigError, RetrievalError
from ragspec.retrieval.encoder import TextEncoder
from ragspec.retrieval.index.manifest import read_pointer
from ragspec.retrieval.index.reader_lock import reader_lock
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.retriever import GenerationView, Retriever, configured_index_dir

_OPEN_TIMEOUT_S = 600.0
_LOOK_S = 0.5
_SWAP_WAIT_S = 2.0
"""How long a query waits for a new generation before it is answered from the one before."""

_log = logging.getLogger(__name__)


class ClusterRetriever(Retriever):
    """Finds passages in the generation that is current, or was until its successor is open on the shards.

    A generation in use is on lease: no writer removes its files. Safe to call from several threads.
    States: open -> closed, together with everything that is `pinned`.
    """

    def __init__(
        self,
        config: RetrieverConfig,
        encoder: EncoderConfig | TextEncoder,
        directory: Directory,
        *,
        shard_replicas: int = 1,
        timeout_s: float = 30.0,
        late_s: float = 2.0,
        open_timeout_s: float = _OPEN_TIMEOUT_S,
    ) -> None:
        """Needs Ray to be initialised; waits until the shards have opened the index, for at most `open_timeout_s` seconds.

        `encoder`: which one the members of kind "encoder" have, or one in this process. Each segment is held by `shard_replicas`
        of the members of kind "shard". `timeout_s` bounds the wait for an answer; a call that takes `late_s` goes to another
        member, and one that hangs is reported to the directory.
        Raises: ConfigError, ModelError, StoreError or RetrievalError.
        """
        if not all(0.0 < seconds < math.inf for seconds in (timeout_s, late_s, open_timeout_s)) or shard_replicas < 1:
            raise ConfigError(
                "an index elsewhere needs finite time limits above 0, and at least one holder of a segment"
            )
        self._index_dir = configured_index_dir(config).resolve()
        read_pointer(self._index_dir)  # Why first: a missing index is told before anybody is waited for
        self._replicas, self._open_timeout_s = shard_replicas, open_timeout_s
        self._patience = Patience(timeout_s, late_s, for_lost=config.fail_closed)
        self._swap_wait_s = min(_SWAP_WAIT_S, timeout_s)
        self._opening: Future[None] | None = None
        self._opening_since = 0.0
        self._remote_encoder: RemoteEncoder | None = None
        self._is_ready = threading.Event()
        self._crew = Crew(directory, "shard", "a shard of the index", self._warm)
        try:
            own = self._text_encoder(encoder, directory)
            store = Store.open(self._index_dir, own.identity, pointer=config.pointer, only=frozenset())
            super().__init__(own, store, config, follow=not config.pointer)
            self._is_ready.set()
        except BaseException:
            self.close()
            raise

    @property
    def is_elsewhere(self) -> bool:
        return True

    def close(self) -> None:
        """Calls that run get a RetrievalError. The actors are their directory's."""
        self._crew.close()
        if self._remote_encoder is not None:
            self._remote_encoder.close()

    def _text_encoder(self, encoder: EncoderConfig | TextEncoder, directory: Directory) -> TextEncoder:
        if not isinstance(encoder, EncoderConfig):
            return encoder
        self._remote_encoder = RemoteEncoder(directory, self._patience._replace(for_lost=True))
        if self._remote_encoder.identity.id != encoder.model:
            raise ConfigError(f"the encoders elsewhere are {self._remote_encoder.identity.id}, not {encoder.model}")
        return self._remote_encoder

    def _current(self) -> GenerationView:
        """The current generation once the shards have it open; until then, and for longer than a moment, the one before."""
        if not self._follow:
            return self._view
        self._crew.check_open()
        with self._lock:
            if self._opening is None and read_pointer(self._index_dir) != self._view.store.pointer:
                self._opening, self._opening_since = Future(), time.monotonic()
                threading.Thread(target=self._move_on, args=(self._opening,), name="ragspec-swap", daemon=True).start()
            opening = self._opening
        if opening is not None:
            wait([opening], max(0.0, self._opening_since + self._swap_wait_s - time.monotonic()))
            if opening.done():
                opening.result()
        return self._view

    def _warm(self, member: Member) -> None:
        """Why: a shard that was started again would open its segments while the first query waits."""
        while not self._is_ready.wait(_LOOK_S):
            self._crew.check_open()
        view = self._view
        if isinstance(view, ClusterView):
            view.warm(member)

    def _move_on(self, opening: Future[None]) -> None:
        """In a thread of its own. Why a lost shard is no error here: the generation before is still open elsewhere."""
        failed: Exception | None = None
        try:
            self._view = self._opened(self._view.store.refreshed())
        except RetrievalError as error:
            _log.warning("a new generation of the index could not be opened yet: %s", error)
        except Exception as error:
            failed = error
        with self._lock:
            self._opening = None
        opening.set_exception(failed) if failed else opening.set_result(None)

    def _view_of(self, store: Store) -> GenerationView:
        """Locked for reading as long as a query in flight or a pinned retriever holds the view."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(reader_lock(self._index_dir, store.pointer))
            view = ClusterView(store, self._config, self._crew, self._replicas, self._patience)
            view.open(self._open_timeout_s)
            weakref.finalize(view, stack.pop_all().close)
        return view


class RemoteIndex(ClusterRetriever):
    """An index in an actor of one's own: searches take none of the asker's processor time and run while it does other things."""

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
        if not 0.0 <= service_s < math.inf:
            raise ConfigError("a service time is finite seconds from 0 on")
        read_pointer(configured_index_dir(config))  # Why first: a missing index is told before an actor is started
        self._own = OwnActors("shard", ShardActor, (service_s,))
        try:
            super().__init__(
                config,
                encoder,
                self._own,
                timeout_s=timeout_s,
                late_s=timeout_s / 2,
                open_timeout_s=open_timeout_s,
            )
        except BaseException:
            self._own.close()
            raise

    def close(self) -> None:
        """End the actor; calls that run get a RetrievalError."""
        super().close()
        self._own.close()

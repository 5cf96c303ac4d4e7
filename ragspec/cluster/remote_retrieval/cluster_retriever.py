"""An index on the shards of a deployment, with the answers of a `Retriever` in this process, whatever shard dies.

Queries are encoded by encoder actors or here; vectors, words and passages cross to the actors.

    >>> retriever = ClusterRetriever(config, EncoderConfig(), deployment.replicas_of("shard"), deployment.replicas_of("encoder"))
    >>> retriever.retrieve(["When did it rain?"], k=3).passages
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, wait

from ragspec.cluster.actors import Replica
from ragspec.cluster.remote_retrieval.cluster_view import ClusterView
from ragspec.cluster.remote_retrieval.encoders import RemoteEncoder
from ragspec.cluster.remote_retrieval.hedged_call import RetryPolicy
from ragspec.cluster.remote_retrieval.worker_pool import HANG_S, Worker, WorkerPool
from ragspec.config import EncoderConfig, RetrieverConfig
from ragspec.errors import ConfigError, RetrievalError
from ragspec.retrieval.encoder import TextEncoder
from ragspec.retrieval.index.index_directory import reader_lock
from ragspec.retrieval.index.pointer import configured_index_dir, read_pointer
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.retriever import GenerationView, Retriever

_OPEN_TIMEOUT_S = 600.0
_LOOK_S = 0.5
_SWAP_WAIT_S = 2.0
"""How long a query waits for a new generation before the one before answers it."""

_log = logging.getLogger(__name__)


class ClusterRetriever(Retriever):
    """Finds passages in the current generation, or in the one before while the shards open the current one.

    A generation in use is on lease: no writer removes its files. Safe to call from several threads.
    States: open -> closed, together with everything that is `pinned`.
    """

    def __init__(
        self,
        config: RetrieverConfig,
        encoder: EncoderConfig | TextEncoder,
        shards: Sequence[Replica],
        encoders: Sequence[Replica] = (),
        *,
        shard_replicas: int = 1,
        timeout_s: float = 30.0,
        late_s: float = 2.0,
        open_timeout_s: float = _OPEN_TIMEOUT_S,
        hang_s: float = HANG_S,
    ) -> None:
        """Waits until the shards have opened the index, for at most `open_timeout_s`. Needs Ray to be initialised.

        `encoder`: the configuration of `encoders`, or an encoder in this process. `shard_replicas` shards hold each segment.
        `timeout_s` bounds the wait for an answer; a call that takes `late_s` is made again to another shard, and a shard that
        answers no health check for `hang_s` is killed.
        Raises: ConfigError, ModelError, StoreError or RetrievalError.
        """
        limits = (timeout_s, late_s, open_timeout_s, hang_s)
        if not all(0.0 < seconds < math.inf for seconds in limits) or shard_replicas < 1:
            raise ConfigError(
                "an index elsewhere needs finite time limits above 0, and at least one holder of a segment"
            )
        self._index_dir = configured_index_dir(config).resolve()
        read_pointer(self._index_dir)  # Why first: a missing index fails before any wait
        self._replicas, self._open_timeout_s = shard_replicas, open_timeout_s
        self._policy = RetryPolicy(timeout_s, late_s, wait_for_lost=config.fail_closed)
        self._swap_wait_s = min(_SWAP_WAIT_S, timeout_s)
        self._opening: Future[None] | None = None
        self._opening_since = 0.0
        self._remote_encoder: RemoteEncoder | None = None
        self._is_ready = threading.Event()
        self._pool = WorkerPool(shards, "a shard of the index", self._warm, hang_s)
        try:
            text_encoder = self._text_encoder(encoder, encoders, hang_s)
            store = Store.open(self._index_dir, text_encoder.identity, pointer=config.pointer, only=frozenset())
            super().__init__(text_encoder, store, config, follow=not config.pointer)
            self._is_ready.set()
        except BaseException:
            self.close()
            raise

    @property
    def is_elsewhere(self) -> bool:
        return True

    def close(self) -> None:
        """Calls that run get a RetrievalError. The actors live on."""
        self._pool.close()
        if self._remote_encoder is not None:
            self._remote_encoder.close()

    def _text_encoder(
        self, encoder: EncoderConfig | TextEncoder, encoders: Sequence[Replica], hang_s: float
    ) -> TextEncoder:
        if not isinstance(encoder, EncoderConfig):
            return encoder
        self._remote_encoder = RemoteEncoder(encoders, self._policy._replace(wait_for_lost=True), hang_s)
        if self._remote_encoder.identity.id != encoder.model:
            raise ConfigError(f"the encoders elsewhere are {self._remote_encoder.identity.id}, not {encoder.model}")
        return self._remote_encoder

    def _current(self) -> GenerationView:
        """The current generation once the shards have it open; queries wait for that only a moment."""
        if not self._follow:
            return self._view
        self._pool.check_open()
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

    def _warm(self, worker: Worker) -> None:
        """A restarted shard opens its segments before queries wait for it."""
        while not self._is_ready.wait(_LOOK_S):
            self._pool.check_open()
        view = self._view
        if isinstance(view, ClusterView):
            view.warm(worker)

    def _move_on(self, opening: Future[None]) -> None:
        """In a thread of its own. A lost shard is no error here, because the generation before is still open on others."""
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
        """The generation is on lease as long as a query or a pinned retriever holds the view."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(reader_lock(self._index_dir, store.pointer))
            view = ClusterView(store, self._config, self._pool, self._replicas, self._policy)
            view.open(self._open_timeout_s)
            weakref.finalize(view, stack.pop_all().close)
        return view

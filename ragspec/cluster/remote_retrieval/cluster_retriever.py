"""An index on the shards of a deployment, with the answers of a `Retriever` in this process, whatever shard dies.

Queries are encoded by encoder actors or here; vectors, words and passages cross to the actors. Where every shard holds the whole
index, one shard does a whole look-up in one call; else the steps of the search run here, each on all shards at once.

    >>> retriever = ClusterRetriever(config, EncoderConfig(), deployment.replicas_of("shard"), deployment.replicas_of("encoder"))
    >>> retriever.retrieve(["When did it rain?"], k=3).passages
"""

import contextlib
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

import ray

from ragspec.cluster.actors import Replica
from ragspec.cluster.remote_retrieval.encoders import RemoteEncoder
from ragspec.cluster.remote_retrieval.shards import SegmentSet, place_segments, rotated
from ragspec.cluster.remote_retrieval.worker_pool import HANG_S, HedgedCall, RetryPolicy, WorkerPool, call_free_workers
from ragspec.config import EncoderConfig, RetrieverConfig
from ragspec.errors import ConfigError, RagspecError, RetrievalError, StoreError
from ragspec.retrieval.encoder import TextEncoder
from ragspec.retrieval.index.index_directory import reader_lock
from ragspec.retrieval.index.pointer import configured_index_dir, read_pointer
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.rerank import PairScoring, PairsToScore
from ragspec.retrieval.retriever import GenerationView, Retriever
from ragspec.retrieval.search.index_searcher import IndexSearcher, analyzer_of, term_function
from ragspec.retrieval.search.segment_search import Lookup, SearchHit, SearchResult, SplitShard

_OPEN_TIMEOUT_S = 600.0
_LOOK_S = 0.5
_SWAP_WAIT_S = 2.0
"""How long a query waits for a new generation before the one before answers it."""

_MISSING_KEPT_S = 5.0
"""How long segments that no shard could search are left out before they are tried again."""

_log = logging.getLogger(__name__)


class SegmentsMissing(RetrievalError):
    """Segments that no shard could search; `reason`: the error of the first of them."""

    def __init__(self, errors: Mapping[str, RagspecError]) -> None:
        names = sorted(errors)
        self.segments, self.reason = frozenset(names), errors[names[0]]
        super().__init__(f"of the index, {', '.join(names)} cannot be searched: {self.reason}")


class ShardedSearch(SplitShard):
    """A `SplitShard` whose segments are searched remotely, each by the first of its shards that answers."""

    def __init__(
        self,
        pool: WorkerPool,
        segments: SegmentSet,
        orders: Mapping[str, Sequence[str]],
        num_replicas: int,
        policy: RetryPolicy,
    ) -> None:
        """`orders`: for each segment the shards to call, the `num_replicas` that hold it first; calls alternate between those."""
        self._pool, self._segments, self._orders, self._policy = pool, segments, orders, policy
        self._num_replicas = num_replicas

    def ask_all(self, method: str, *arguments: Any) -> list[Any]:
        """The answers of all segments; shards work at the same time."""
        return list(self._call(method, dict.fromkeys(self._orders, arguments)).values())

    def read_hits(self, method: str, hits: Sequence[SearchHit], *arguments: Any) -> list[Any]:
        own: dict[str, list[SearchHit]] = {}
        for hit in hits:
            own.setdefault(hit.segment, []).append(hit)
        found = self._call(method, {segment: (some, *arguments) for segment, some in own.items()})
        by_hit = {hit: one for segment, some in own.items() for hit, one in zip(some, found[segment], strict=True)}
        return [by_hit[hit] for hit in hits]

    def _call(self, method: str, arguments: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Each segment's answer to its own arguments. Raises: SegmentsMissing."""
        turn = next(self._pool.turns)

        def send(actor: Any, names: Sequence[str]) -> Any:
            segments = self._segments._replace(names=tuple(names))
            return actor.search.remote(segments, method, [arguments[name] for name in names])

        orders = {segment: rotated(self._orders[segment], self._num_replicas, turn) for segment in arguments}
        answers, errors = HedgedCall(self._pool, orders, send, self._policy).run()
        if errors:
            raise SegmentsMissing(errors)
        return answers


class ClusterView:
    """One generation of an index. Owns the answer to missing segments: an error, or an answer of the rest that names them.

    Safe to call from several threads. `open` comes first.
    """

    def __init__(
        self, store: Store, config: RetrieverConfig, pool: WorkerPool, num_replicas: int, policy: RetryPolicy
    ) -> None:
        """`store` needs only its manifest open, no segment. Raises: ConfigError."""
        self.store = store
        self.terms = term_function(analyzer_of(store.manifest, config.mode))
        self._config, self._pool, self._policy = config, pool, policy
        self._num_replicas = max(1, min(num_replicas, len(pool.names)))
        sizes = {record.name: record.num_passages for record in store.manifest.segments}
        self._segments = SegmentSet(
            str(store.index_dir), store.pointer, tuple(sizes), config.device, config.gpu_memory_bytes
        )
        self._orders = place_segments(sizes, pool.names, num_replicas)
        self._missing, self._missing_until_s = frozenset[str](), 0.0
        self._searchers: dict[frozenset[str], IndexSearcher] = {}  # by the segments that are left out

    def open(self, timeout_s: float) -> None:
        """Open all segments on all their holders, so that no query waits for it.

        Raises: StoreError, ConfigError, RetrievalError; for missing segments only if they are an error for queries too.
        """
        copies = itertools.product(self._orders, range(self._num_replicas))
        orders = {(name, turn): rotated(self._orders[name], self._num_replicas, turn) for name, turn in copies}

        def send(actor: Any, items: Sequence[tuple[str, int]]) -> Any:
            segments = self._segments._replace(names=tuple(name for name, _ in items))
            return actor.open.remote(segments, self._config.reranker)

        policy = self._policy._replace(timeout_s=timeout_s, hedge=False)
        opened, errors = HedgedCall(self._pool, orders, send, policy).run()
        names = {name for name, _ in opened}
        if missing := {name: error for (name, _), error in errors.items() if name not in names}:
            self._leave_out(SegmentsMissing(missing))

    def warm(self, worker: Replica) -> None:
        """Open the segments that a restarted shard holds; returns when they are open, or the shard died.

        Raises: RetrievalError if the pool was closed.
        """
        names = tuple(name for name, order in self._orders.items() if worker.name in order[: self._num_replicas])
        opening, opened = worker.actor.open.remote(self._segments._replace(names=names), self._config.reranker), False
        while not opened:
            self._pool.check_open()
            opened = bool(ray.wait([opening], timeout=_LOOK_S)[0])

    def search(self, lookup: Lookup) -> SearchResult:
        """As `GenerationView`."""
        if self._config.fail_closed and self._num_replicas == len(self._pool.names):
            return self._look_up_on_one(lookup)
        while True:
            missing = self._missing if time.monotonic() < self._missing_until_s else frozenset()
            try:
                found = self._searcher(missing).search(lookup)
                return found._replace(missing=tuple(sorted(missing)))
            except SegmentsMissing as error:
                self._leave_out(error)

    def _look_up_on_one(self, lookup: Lookup) -> SearchResult:
        order = rotated(self._pool.names, self._num_replicas, next(self._pool.turns))

        def send(actor: Any, _: object) -> Any:
            return actor.look_up.remote(self._segments, self._config, lookup)

        answers, errors = HedgedCall(self._pool, {self._segments: order}, send, self._policy).run()
        if errors:
            raise self._user_error(SegmentsMissing(dict.fromkeys(self._segments.names, errors[self._segments])))
        found: SearchResult = answers[self._segments]
        return found

    def _searcher(self, missing: frozenset[str]) -> IndexSearcher:
        searcher = self._searchers.get(missing)
        if searcher is None:
            orders = {name: order for name, order in self._orders.items() if name not in missing}
            sharded = ShardedSearch(self._pool, self._segments, orders, self._num_replicas, self._policy)
            scoring = _scoring(self._config.reranker, self._pool, self._policy) if self._config.reranker else None
            searcher = IndexSearcher(self.store, self._config, scoring=scoring, shard=sharded)
            self._searchers = {missing: searcher}  # a race with another thread costs only a second searcher
        return searcher

    def _leave_out(self, error: SegmentsMissing) -> None:
        """Raises: the error, unless the answer may be partial and some segment is left to search."""
        is_recent = time.monotonic() < self._missing_until_s
        missing = (self._missing | error.segments) if is_recent else error.segments
        if self._config.fail_closed or missing >= set(self._segments.names):
            raise self._user_error(error) from error
        self._missing, self._missing_until_s = missing, time.monotonic() + _MISSING_KEPT_S

    def _user_error(self, error: SegmentsMissing) -> Exception:
        """An error of the index's files is raised as such; a newer generation may be there."""
        reason = error.reason
        if isinstance(reason, StoreError):
            return type(reason)(f"generation {self.store.generation} of the index cannot be read: {reason}")
        return error if isinstance(reason, RetrievalError) else reason


def _scoring(reranker: str, pool: WorkerPool, policy: RetryPolicy) -> PairScoring:
    """Each query's passages are scored by whichever shard is free. Not a method, so that it does not keep a view's lease."""

    def send(actor: Any, pairs: PairsToScore) -> Any:
        return actor.scores.remote(reranker, pairs)

    return lambda asked: call_free_workers(pool, asked, send, policy)


class ClusterRetriever(Retriever):
    """Finds passages in the current generation, or in the one before while the shards open the current one.

    A generation in use is on lease: no writer removes its files. Safe to call from several threads.
    States: open -> closed, together with everything that is `pinned`.
    """

    is_elsewhere = True

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
        hang_s: float = HANG_S,
    ) -> None:
        """Waits until the shards have opened the index, for at most ten minutes. Needs Ray to be initialised.

        `encoder`: the configuration of `encoders`, or an encoder in this process. `shard_replicas` shards hold each segment.
        `timeout_s` bounds the wait for an answer; a call that takes `late_s` is made again to another shard, and a shard that
        answers no health check for `hang_s` is killed.
        Raises: ConfigError, ModelError, StoreError or RetrievalError.
        """
        self._index_dir = configured_index_dir(config).resolve()
        read_pointer(self._index_dir)  # Why first: a missing index fails before any wait
        self._num_replicas = shard_replicas
        self._policy = RetryPolicy(timeout_s, late_s, wait_for_lost=config.fail_closed)
        self._swap_wait_s = min(_SWAP_WAIT_S, timeout_s)
        self._opening: Future[None] | None = None
        self._opening_since_s = 0.0
        self._remote_encoder: RemoteEncoder | None = None
        self._is_ready = threading.Event()
        self._pool = WorkerPool(shards, "a shard of the index", self._warm, hang_s)
        try:
            if isinstance(encoder, EncoderConfig):
                encoder = self._remote_encoder = self._open_encoder(encoder, encoders, hang_s)
            store = Store.open(self._index_dir, encoder.identity, pointer=config.pointer, only=frozenset())
            super().__init__(encoder, store, config, follow=not config.pointer)
            self._is_ready.set()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Calls that run get a RetrievalError. The actors live on."""
        self._pool.close()
        if self._remote_encoder is not None:
            self._remote_encoder.close()

    def _open_encoder(self, config: EncoderConfig, encoders: Sequence[Replica], hang_s: float) -> RemoteEncoder:
        encoder = RemoteEncoder(encoders, self._policy._replace(wait_for_lost=True), hang_s)
        if encoder.identity.id != config.model:
            encoder.close()
            raise ConfigError(f"the encoders elsewhere are {encoder.identity.id}, not {config.model}")
        return encoder

    def _current(self) -> GenerationView:
        """The current generation once the shards have it open; queries wait for that only a moment."""
        if not self._follow:
            return self._view
        self._pool.check_open()
        with self._lock:
            if self._opening is None and read_pointer(self._index_dir) != self._view.store.pointer:
                self._opening, self._opening_since_s = Future(), time.monotonic()
                threading.Thread(target=self._move_on, args=(self._opening,), name="ragspec-swap", daemon=True).start()
            opening = self._opening
        if opening is not None:
            wait([opening], max(0.0, self._opening_since_s + self._swap_wait_s - time.monotonic()))
            if opening.done():
                opening.result()
        return self._view

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

    def _warm(self, worker: Replica) -> None:
        """A restarted shard opens its segments before queries wait for it."""
        while not self._is_ready.wait(_LOOK_S):
            self._pool.check_open()
        view = self._view
        if isinstance(view, ClusterView):
            view.warm(worker)

    def _view_of(self, store: Store) -> GenerationView:
        """The generation is on lease as long as a query or a pinned retriever holds the view."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(reader_lock(self._index_dir, store.pointer))
            view = ClusterView(store, self._config, self._pool, self._num_replicas, self._policy)
            view.open(_OPEN_TIMEOUT_S)
            weakref.finalize(view, stack.pop_all().close)
        return view

"""One generation of an index as queries search it on the shards of a deployment.

Where every shard holds everything, one shard does a whole look-up in one call; else the steps run here, each on all shards at
once. Owns the answer to missing segments: an error, or an answer of the rest that names them.

>>> view = ClusterView(store, config, pool, num_replicas=2, policy=RetryPolicy(30.0))
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import ray

from ragspec.cluster.remote_retrieval.hedged_call import RetryPolicy, call_free_workers, hedged_call
from ragspec.cluster.remote_retrieval.segment_cache import SegmentSet
from ragspec.cluster.remote_retrieval.shards import SegmentsMissing, ShardedSearch, place_segments, rotated
from ragspec.cluster.remote_retrieval.worker_pool import Worker, WorkerPool
from ragspec.config import RetrieverConfig
from ragspec.errors import RetrievalError, StoreError
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.rerank import PairScoring, PairsToScore
from ragspec.retrieval.search.index_searcher import IndexSearcher, term_function
from ragspec.retrieval.search.index_types import PassageKey, Query, SearchResult
from ragspec.retrieval.search.segment_search import PUBLIC_SCOPE, SearchScope

_VIEWS_KEPT = 8
_LOOK_S = 0.5
_MISSING_KEPT_S = 5.0
"""How long segments that no shard could search are left out before they are tried again."""


class ClusterView:
    """Safe to call from several threads. `open` comes first."""

    def __init__(
        self, store: Store, config: RetrieverConfig, pool: WorkerPool, num_replicas: int, policy: RetryPolicy
    ) -> None:
        """`store` needs only its manifest open, no segment. Raises: ConfigError."""
        self.store = store
        self.terms = term_function(store.manifest, config.mode)
        sizes = {record.name: record.num_passages for record in store.manifest.segments}
        self._names = pool.names
        self._replicas = max(1, min(num_replicas, len(self._names)))
        self._segments = SegmentSet(
            str(store.index_dir), store.pointer, tuple(sizes), config.device, config.gpu_memory_bytes
        )
        orders = place_segments(sizes, self._names, num_replicas)
        self._search = ShardedSearch(pool, self._segments, orders, policy)
        self._config, self._pool, self._policy = config, pool, policy
        self._turns = itertools.count()
        self._missing, self._missing_until = frozenset[str](), (0, 0.0)  # pool version, time
        self._views: dict[tuple[int, frozenset[str]], IndexSearcher] = {}

    def open(self, timeout_s: float) -> None:
        """Raises: StoreError, ConfigError, RetrievalError; for missing segments only if they are an error for queries too."""
        try:
            self._search.open(self._replicas, timeout_s, self._config.reranker)
        except SegmentsMissing as error:
            self._leave_out(error)

    def warm(self, worker: Worker) -> None:
        """Open a restarted shard's segments; returns when they are open, or the shard died. Raises: RetrievalError if closed."""
        opening, opened = self._search.opening(worker, self._replicas, self._config.reranker), False
        while not opened:
            self._pool.check_open()
            opened = bool(ray.wait([opening], timeout=_LOOK_S)[0])

    def search(
        self,
        queries: Sequence[Query],
        k: int,
        scope: SearchScope = PUBLIC_SCOPE,
        *,
        prefetch_k: int = 0,
        known: frozenset[PassageKey] = frozenset(),
    ) -> SearchResult:
        """As `ragspec.retrieval.search.index_types.IndexLike`."""
        turn = next(self._turns)
        if self._config.fail_closed and self._replicas == len(self._names):
            return self._look_up_on_one(turn, queries, k, scope, prefetch_k, known)
        while True:
            missing = self._known_missing()
            try:
                view = self._view(turn % self._replicas, missing)
                lookup = view.search(queries, k, scope, prefetch_k=prefetch_k, known=known)
                return lookup._replace(missing=tuple(sorted(missing)))
            except SegmentsMissing as error:
                self._leave_out(error)

    def _look_up_on_one(self, turn: int, *arguments: Any) -> SearchResult:
        order = rotated(self._names, self._replicas, turn)
        given, failed = hedged_call(
            self._pool,
            {self._segments: order},
            lambda actor, _: actor.look_up.remote(self._segments, self._config, *arguments),
            self._policy,
        )
        if failed:
            raise self._user_error(SegmentsMissing(self._segments.names, failed[self._segments]))
        lookup: SearchResult = given[0][1]
        return lookup

    def _view(self, turn: int, missing: frozenset[str]) -> IndexSearcher:
        view = self._views.get((turn, missing))
        if view is None:
            search = self._search.rotated(self._replicas, turn, missing)
            scoring = _scoring(self._config.reranker, self._pool, self._policy) if self._config.reranker else None
            if len(self._views) >= _VIEWS_KEPT:
                self._views = {}
            view = IndexSearcher(self.store, self._config, scoring=scoring, shard=lambda _: search)
            self._views[turn, missing] = view  # a race with another thread costs only a second view
        return view

    def _leave_out(self, error: SegmentsMissing) -> None:
        """Raises: the error, unless the answer may be partial and some segment is left to search."""
        missing = self._known_missing() | error.segments
        if self._config.fail_closed or missing >= set(self._segments.names):
            raise self._user_error(error) from error
        self._missing = missing
        self._missing_until = (self._pool.version, time.monotonic() + _MISSING_KEPT_S)

    def _known_missing(self) -> frozenset[str]:
        """Segments that were missing lately, unless a shard was lost or came back since."""
        version, until = self._missing_until
        is_current = version == self._pool.version and time.monotonic() < until
        return self._missing if is_current else frozenset()

    def _user_error(self, error: SegmentsMissing) -> Exception:
        """An error of the index's files is raised as such; a newer generation may be there."""
        reason = error.reason
        if isinstance(reason, StoreError):
            return type(reason)(f"generation {self.store.generation} of the index cannot be read: {reason}")
        return error if isinstance(reason, RetrievalError) else reason


def _scoring(reranker: str, pool: WorkerPool, policy: RetryPolicy) -> PairScoring:
    """Each query's passages are scored by whichever shard is free. Not a method, so that it does not keep a view's lease."""

    def scores(asked: Sequence[PairsToScore]) -> list[Any]:
        parts = [[pairs] for pairs in asked]
        scored = call_free_workers(pool, parts, lambda actor, part: actor.scores.remote(reranker, part), policy)
        return [scores_of_one for (scores_of_one,) in scored]

    return scores

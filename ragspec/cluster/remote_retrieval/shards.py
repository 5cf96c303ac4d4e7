"""An index searched by several actors, each called for some of its segments: the same hits and scores as in one process.

The index's folder must be readable on every node. Which shards hold a segment follows from names alone (rendezvous hashing), so
every client computes the same placement, and a lost or added shard moves only its own segments. Shards know no clients.

>>> ShardedSearch(pool, segments, place_segments(...), RetryPolicy(30.0)).dense(queries, k=10, scope=SearchScope())
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ragspec.cluster.actors import ORDERED, WorkerActor, ended_if_lost, in_group
from ragspec.cluster.remote_retrieval.hedged_call import RetryPolicy, hedged_call
from ragspec.cluster.remote_retrieval.segment_cache import SegmentCache, SegmentSet
from ragspec.cluster.remote_retrieval.worker_pool import Worker, WorkerPool
from ragspec.cluster.routing.policy import rendezvous_order
from ragspec.config import RetrieverConfig
from ragspec.core import Passage
from ragspec.errors import RagspecError, RetrievalError
from ragspec.retrieval.encoder import FloatArray
from ragspec.retrieval.rerank import PairScoring, PairsToScore, Reranker, RerankerConfig
from ragspec.retrieval.search.bm25 import SparseQuery, TermStatistics
from ragspec.retrieval.search.index_types import PassageKey, Query, SearchResult
from ragspec.retrieval.search.segment_search import SearchHit, SearchScope, gather_by_shard, merge_hits, sum_statistics


def place_segments(sizes: Mapping[str, int], names: Sequence[str], num_replicas: int) -> dict[str, tuple[str, ...]]:
    """For each segment all shards: first the `num_replicas` that hold it, then those to fall back on.

    The first holders of all segments share the passages evenly, and so do the second ones: queries may alternate between them.
    `sizes`: passages of each segment.
    """
    ranked = {segment: rendezvous_order(segment.encode(), names) for segment in sizes}
    holders: dict[str, list[str]] = {segment: [] for segment in sizes}
    for _ in range(min(num_replicas, len(names))):
        _place_once(sizes, ranked, holders)
    return {
        segment: (*held, *(name for name in ranked[segment] if name not in held)) for segment, held in holders.items()
    }


def rotated(order: Sequence[str], num_replicas: int, turn: int) -> tuple[str, ...]:
    """The same shards, beginning with another holder of the segment."""
    num_replicas = max(1, min(num_replicas, len(order)))
    turn %= num_replicas
    return (*order[turn:num_replicas], *order[:turn], *order[num_replicas:])


def _place_once(
    sizes: Mapping[str, int], ranked: Mapping[str, Sequence[str]], holders: Mapping[str, list[str]]
) -> None:
    """Add a holder to every segment: the first in its ranking with room, else the one with the fewest passages."""
    loads = dict.fromkeys(next(iter(ranked.values()), ()), 0)
    share = sum(sizes.values()) / max(1, len(loads))
    for segment in sorted(sizes, key=lambda segment: (-sizes[segment], segment)):
        free = [name for name in ranked[segment] if name not in holders[segment]]
        fitting = [name for name in free if loads[name] + sizes[segment] <= share]
        chosen = fitting[0] if fitting else min(free, key=loads.__getitem__)
        holders[segment].append(chosen)
        loads[chosen] += sizes[segment]


class SegmentsMissing(RetrievalError):
    """Segments that no shard could search; `reason`: the error of the first of them."""

    def __init__(self, segments: Sequence[str], reason: RagspecError) -> None:
        super().__init__(f"of the index, {', '.join(segments)} cannot be searched: {reason}")
        self.segments = frozenset(segments)
        self.reason = reason


class ShardedSearch:
    """A `Shard` whose segments are searched remotely, each by the first of its shards that answers."""

    def __init__(
        self, pool: WorkerPool, segments: SegmentSet, orders: Mapping[str, Sequence[str]], policy: RetryPolicy
    ) -> None:
        """`orders`: for each segment the shards to call, as `place_segments` gives them."""
        self._pool, self._segments, self._orders, self._policy = pool, segments, orders, policy

    @property
    def segment_names(self) -> frozenset[str]:
        return frozenset(self._orders)

    def rotated(self, num_replicas: int, turn: int, missing: frozenset[str]) -> ShardedSearch:
        """The same segments without the missing ones, searched first by other holders."""
        found = {segment: order for segment, order in self._orders.items() if segment not in missing}
        orders = {segment: rotated(order, num_replicas, turn) for segment, order in found.items()}
        return ShardedSearch(self._pool, self._segments, orders, self._policy)

    def open(self, num_replicas: int, timeout_s: float, reranker: str = "") -> None:
        """Open all segments on all their holders, so that no search waits for it.

        Raises: SegmentsMissing if no holder of a segment can.
        """
        orders = {
            (segment, turn): rotated(order, num_replicas, turn)
            for segment, order in self._orders.items()
            for turn in range(num_replicas)
        }

        def send(actor: Any, parts: Sequence[tuple[str, int]]) -> Any:
            names = tuple(dict.fromkeys(segment for segment, _ in parts))
            return actor.open.remote(self._segments._replace(names=names), reranker)

        policy = self._policy._replace(timeout_s=timeout_s, hedge=False)
        given, failed = hedged_call(self._pool, orders, send, policy)
        opened = {segment for parts, _ in given for segment, _ in parts}
        if missing := sorted(self._orders.keys() - opened):
            raise SegmentsMissing(missing, failed[missing[0], 0])

    def opening(self, worker: Worker, num_replicas: int, reranker: str) -> Any:
        """Ray's reference to a call that opens all segments the shard holds."""
        names = tuple(segment for segment, order in self._orders.items() if worker.name in order[:num_replicas])
        return worker.actor.open.remote(self._segments._replace(names=names), reranker)

    def dense(self, queries: FloatArray, k: int, scope: SearchScope) -> list[list[SearchHit]]:
        return merge_hits(self._search_all("dense", queries, k, scope), len(queries), k)

    def statistics(self, terms: Sequence[str], tenant: str) -> TermStatistics:
        return sum_statistics(self._search_all("statistics", terms, tenant))

    def sparse(self, queries: Sequence[SparseQuery], k: int, scope: SearchScope) -> list[list[SearchHit]]:
        return merge_hits(self._search_all("sparse", queries, k, scope), len(queries), k)

    def passages(self, hits: Sequence[SearchHit], num_neighbours: int = 0) -> list[Passage]:
        return self._read_hits("passages", hits, num_neighbours)

    def vectors(self, hits: Sequence[SearchHit]) -> list[FloatArray]:
        return self._read_hits("vectors", hits)

    def _search_all(self, method: str, *arguments: Any) -> list[Any]:
        """The answers for all segments; shards work at the same time."""
        given = self._call(self._orders, lambda actor, segments: actor.search.remote(segments, method, *arguments))
        return [answer for _, answer in given]

    def _read_hits(self, method: str, hits: Sequence[SearchHit], *arguments: Any) -> list[Any]:
        orders = {segment: self._orders[segment] for segment in dict.fromkeys(hit.segment for hit in hits)}

        def hits_in(names: Sequence[str]) -> list[SearchHit]:
            return [hit for hit in hits if hit.segment in names]

        given = self._call(
            orders, lambda actor, segments: actor.search.remote(segments, method, hits_in(segments.names), *arguments)
        )
        return gather_by_shard(hits, [hits_in(names) for names, _ in given], [answer for _, answer in given])

    def _call(
        self, orders: Mapping[str, Sequence[str]], send: Callable[[Any, SegmentSet], Any]
    ) -> list[tuple[list[str], Any]]:
        given, failed = hedged_call(
            self._pool,
            orders,
            lambda actor, names: send(actor, self._segments._replace(names=tuple(names))),
            self._policy,
        )
        if failed:
            raise SegmentsMissing(sorted(failed), next(iter(failed.values())))
        return given


class ShardActor(WorkerActor):
    """Searches the segments that each call names."""

    def __init__(self) -> None:
        self._cache = SegmentCache()
        self._scorings: dict[str, PairScoring] = {}
        self._loading = threading.Lock()

    @in_group(ORDERED)
    def open(self, segments: SegmentSet, reranker: str = "") -> None:
        """Raises: StoreError, ConfigError, ModelError."""
        self._cache.get(segments)
        if reranker:
            self._scoring(reranker)

    def search(self, segments: SegmentSet, method: str, *arguments: Any) -> Any:
        """The answer of a `Shard` of these segments. Raises: StoreError, ConfigError."""
        shard = self._cache.get(segments).shard(segments.names)
        writable = (np.array(each) if isinstance(each, np.ndarray) else each for each in arguments)  # Ray's are not
        return getattr(shard, method)(*writable)

    def look_up(
        self,
        segments: SegmentSet,
        config: RetrieverConfig,
        queries: Sequence[Query],
        k: int,
        scope: SearchScope,
        prefetch_k: int,
        known: frozenset[PassageKey],
    ) -> SearchResult:
        """The answer of an `IndexSearcher` of these segments, in one call.

        Raises: StoreError, ConfigError, ModelError, InputError.
        """
        scoring = self._scoring(config.reranker) if config.reranker else None
        view = self._cache.get(segments).view(segments.names, config, scoring)
        return view.search(queries, k, scope, prefetch_k=prefetch_k, known=known)

    def scores(self, reranker: str, asked: Sequence[PairsToScore]) -> list[Any]:
        """Raises: ModelError, ConfigError."""
        return self._scoring(reranker)(asked)

    def _scoring(self, reranker: str) -> PairScoring:
        with self._loading:
            if reranker not in self._scorings:
                loaded = Reranker.load(RerankerConfig(model=reranker))

                def scoring(asked: Sequence[PairsToScore]) -> list[Any]:
                    with ended_if_lost(loaded):
                        return [loaded.scores(*each) for each in asked]

                self._scorings = {reranker: scoring}
            return self._scorings[reranker]

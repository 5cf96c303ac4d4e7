"""An index searched by several actors, each asked for some of its segments: the same hits and scores as in one process.

The index's folder must be readable on every node. An actor maps what it is asked for and keeps it; it knows no clients.

>>> SpreadShard(crew, placement, places(...), Patience(30.0)).dense(queries, k=10, scope=SearchScope())
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import ray

from ragspec.cluster.calls import Patience, ask
from ragspec.cluster.crew import Crew
from ragspec.cluster.directory import Member
from ragspec.cluster.opened import OpenGenerations, Placement
from ragspec.cluster.own_actors import OPENING, Alive
from ragspec.cluster.placing import in_turn
from ragspec.config import RetrieverConfig
from ragspec.core import Passage
from ragspec.errors import RagspecError, RetrievalError
from ragspec.retrieval.encoder import FloatArray
from ragspec.retrieval.rerank import PairScoring, PairsToScore, Reranker, RerankerConfig, score_in_turn
from ragspec.retrieval.search.bm25 import SparseQuery, TermStatistics
from ragspec.retrieval.search.index_types import PassageKey, Query, SearchResult
from ragspec.retrieval.search.segment_search import SearchHit, SearchScope, gather_by_shard, merge_hits, sum_statistics


class Unsearched(RetrievalError):
    """Segments that nobody could search; `reason` is why the first of them could not be."""

    def __init__(self, segments: Sequence[str], reason: RagspecError) -> None:
        super().__init__(f"of the index, {', '.join(segments)} cannot be searched: {reason}")
        self.segments = frozenset(segments)
        self.reason = reason


class SpreadShard:
    """Segments of one generation, each searched by the first of its members that answers."""

    def __init__(
        self, crew: Crew, placement: Placement, orders: Mapping[str, Sequence[str]], patience: Patience
    ) -> None:
        """`orders`: for each of the placement's segments the members to ask, as `ragspec.cluster.placing` ranks them."""
        self._crew, self._placement, self._orders, self._patience = crew, placement, orders, patience

    @property
    def segment_names(self) -> frozenset[str]:
        return frozenset(self._orders)

    def turned(self, num_replicas: int, turn: int) -> SpreadShard:
        """The same segments, asked first of other members that hold them."""
        orders = {segment: in_turn(order, num_replicas, turn) for segment, order in self._orders.items()}
        return SpreadShard(self._crew, self._placement, orders, self._patience)

    def without(self, missing: frozenset[str]) -> SpreadShard:
        orders = {segment: order for segment, order in self._orders.items() if segment not in missing}
        return SpreadShard(self._crew, self._placement, orders, self._patience)

    def open(self, num_replicas: int, timeout_s: float, reranker: str = "") -> None:
        """Have all who hold a segment open what its first search would otherwise wait for.

        Raises: Unsearched if somewhere nobody can.
        """
        orders = {
            (segment, turn): in_turn(order, num_replicas, turn)
            for segment, order in self._orders.items()
            for turn in range(num_replicas)
        }

        def send(actor: Any, parts: Sequence[tuple[str, int]]) -> Any:
            names = tuple(dict.fromkeys(segment for segment, _ in parts))
            return actor.open.remote(self._placement._replace(segments=names), reranker)

        patience = self._patience._replace(timeout_s=timeout_s, elsewhere=False)
        given, unanswered = ask(self._crew, orders, send, patience)
        opened = {segment for parts, _ in given for segment, _ in parts}
        if missing := sorted(self._orders.keys() - opened):
            raise Unsearched(missing, unanswered[missing[0], 0])

    def opening(self, member: Member, num_replicas: int, reranker: str) -> Any:
        """Ray's reference to what ends when the member has opened all that it holds."""
        names = tuple(segment for segment, order in self._orders.items() if member.name in order[:num_replicas])
        return member.actor.open.remote(self._placement._replace(segments=names), reranker)

    def dense(self, queries: FloatArray, k: int, scope: SearchScope) -> list[list[SearchHit]]:
        return merge_hits(self._ask_all("dense", queries, k, scope), len(queries), k)

    def statistics(self, terms: Sequence[str], tenant: str) -> TermStatistics:
        return sum_statistics(self._ask_all("statistics", terms, tenant))

    def sparse(self, queries: Sequence[SparseQuery], k: int, scope: SearchScope) -> list[list[SearchHit]]:
        return merge_hits(self._ask_all("sparse", queries, k, scope), len(queries), k)

    def passages(self, hits: Sequence[SearchHit]) -> list[Passage]:
        return self._ask_owners("passages", hits)

    def vectors(self, hits: Sequence[SearchHit]) -> list[FloatArray]:
        return self._ask_owners("vectors", hits)

    def _ask_all(self, method: str, *arguments: Any) -> list[Any]:
        """The answers of all, who work at the same time."""
        given = self._ask(
            self._orders, lambda actor, where: actor.search.remote(where, method, *arguments), self._patience
        )
        return [answer for _, answer in given]

    def _ask_owners(self, method: str, hits: Sequence[SearchHit]) -> list[Any]:
        orders = {segment: self._orders[segment] for segment in dict.fromkeys(hit.segment for hit in hits)}

        def own(segments: Sequence[str]) -> list[SearchHit]:
            return [hit for hit in hits if hit.segment in segments]

        given = self._ask(
            orders, lambda actor, where: actor.search.remote(where, method, own(where.segments)), self._patience
        )
        return gather_by_shard(hits, [own(segments) for segments, _ in given], [answer for _, answer in given])

    def _ask(
        self, orders: Mapping[str, Sequence[str]], send: Callable[[Any, Placement], Any], patience: Patience
    ) -> list[tuple[list[str], Any]]:
        given, unanswered = ask(
            self._crew,
            orders,
            lambda actor, names: send(actor, self._placement._replace(segments=tuple(names))),
            patience,
        )
        if unanswered:
            raise Unsearched(sorted(unanswered), next(iter(unanswered.values())))
        return given


class ShardActor(Alive):
    """Searches what its calls name. `service_s`: a stated time that every search takes on top, for measuring."""

    def __init__(self, service_s: float = 0.0) -> None:
        self._service_s = service_s
        self._opened = OpenGenerations()
        self._scorings: dict[str, PairScoring] = {}
        self._loading = threading.Lock()

    def load(self) -> None:
        """Nothing: what this module imports is all that there is before an index is named."""

    @ray.method(concurrency_group=OPENING)
    def open(self, placement: Placement, reranker: str = "") -> None:
        """Raises: StoreError, ConfigError, ModelError."""
        self._opened.get(placement)
        if reranker:
            self._scoring(reranker)

    def search(self, placement: Placement, method: str, *arguments: Any) -> Any:
        """What a `Shard` of these segments answers. Raises: StoreError, ConfigError."""
        shard = self._opened.get(placement).shard(placement.segments)
        own = (np.array(each) if isinstance(each, np.ndarray) else each for each in arguments)  # Ray's are read-only
        found = getattr(shard, method)(*own)
        time.sleep(self._service_s)
        return found

    def look_up(
        self,
        placement: Placement,
        config: RetrieverConfig,
        queries: Sequence[Query],
        k: int,
        scope: SearchScope,
        prefetch_k: int,
        known: frozenset[PassageKey],
    ) -> SearchResult:
        """What a `View` of these segments answers, in one call. Raises: StoreError, ConfigError, ModelError, InputError."""
        scoring = self._scoring(config.reranker) if config.reranker else None
        view = self._opened.get(placement).view(placement.segments, config, scoring)
        found = view.search(queries, k, scope, prefetch_k=prefetch_k, known=known)
        time.sleep(self._service_s)
        return found

    def scores(self, reranker: str, asked: Sequence[PairsToScore]) -> list[Any]:
        """Raises: ModelError, ConfigError."""
        return self._scoring(reranker)(asked)

    def _scoring(self, reranker: str) -> PairScoring:
        with self._loading:
            if reranker not in self._scorings:
                scoring = score_in_turn(Reranker.load(RerankerConfig(model=reranker)))
                assert scoring is not None
                self._scorings = {reranker: scoring}
            return self._scorings[reranker]

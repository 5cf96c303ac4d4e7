"""One generation of an index as queries meet it on the shards of a deployment.

Where every shard holds everything, one of them does all of a look-up in one call; else the steps are done here, each asked of all
shards at once. Owns what is done when a part cannot be searched: an error, or an answer of the rest that says so.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import ray

from ragspec.cluster.calls import Patience, ask
from ragspec.cluster.crew import Crew
from ragspec.cluster.directory import Member
from ragspec.cluster.opened import Placement
from ragspec.cluster.placing import in_turn, places
from ragspec.cluster.shards import SpreadShard, Unsearched
from ragspec.config import RetrieverConfig
from ragspec.errors import RetrievalError, StoreError
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.rerank import PairScoring, PairsToScore
from ragspec.retrieval.search.index_searcher import IndexSearcher, term_function
from ragspec.retrieval.search.index_types import PassageKey, Query, SearchResult
from ragspec.retrieval.search.segment_search import SearchScope

_VIEWS_KEPT = 8
_LOOK_S = 0.5
_MISSING_KEPT_S = 5.0
"""How long segments that nobody could search are left out before they are asked for again."""


class ClusterView:
    """Safe to call from several threads. `open` comes first."""

    def __init__(
        self, store: Store, config: RetrieverConfig, crew: Crew, num_replicas: int, patience: Patience
    ) -> None:
        """`store` need hold no segment, only the manifest. Raises: ConfigError."""
        self.store = store
        self.terms = term_function(store.manifest, config.mode)
        sizes = {record.name: record.num_passages for record in store.manifest.segments}
        self._names = crew.names()
        self._replicas = max(1, min(num_replicas, len(self._names)))
        self._placement = Placement(str(store.index_dir), store.pointer, tuple(sizes), config.device)
        self._spread = SpreadShard(crew, self._placement, places(sizes, self._names, num_replicas), patience)
        self._config, self._crew, self._patience = config, crew, patience
        self._turns = itertools.count()
        self._missing, self._missing_key = frozenset[str](), (0, 0.0)
        self._views: dict[tuple[int, frozenset[str]], IndexSearcher] = {}

    def open(self, timeout_s: float) -> None:
        """Raises: StoreError, ConfigError, RetrievalError; of a generation with parts missing only if that is to be an error."""
        try:
            self._spread.open(self._replicas, timeout_s, self._config.reranker)
        except Unsearched as error:
            self._leave_out(error)

    def warm(self, member: Member) -> None:
        """Have one that came to life open what it holds; returns when it has, or has died. Raises: RetrievalError if closed."""
        opening, opened = self._spread.opening(member, self._replicas, self._config.reranker), False
        while not opened:
            self._crew.check_open()
            opened = bool(ray.wait([opening], timeout=_LOOK_S)[0])

    def search(
        self,
        queries: Sequence[Query],
        k: int,
        scope: SearchScope,
        *,
        prefetch_k: int = 0,
        known: frozenset[PassageKey] = frozenset(),
    ) -> SearchResult:
        """As `ragspec.retrieval.search.index_types.IndexLike`."""
        turn = next(self._turns)
        if self._config.fail_closed and self._replicas == len(self._names):
            return self._by_one(turn, queries, k, scope, prefetch_k, known)
        while True:
            missing = self._known_missing()
            try:
                view = self._view(turn % self._replicas, missing)
                found = view.search(queries, k, scope, prefetch_k=prefetch_k, known=known)
                return found._replace(missing=tuple(sorted(missing)))
            except Unsearched as error:
                self._leave_out(error)

    def _by_one(self, turn: int, *arguments: Any) -> SearchResult:
        order = in_turn(self._names, self._replicas, turn)
        given, unanswered = ask(
            self._crew,
            {self._placement: order},
            lambda actor, _: actor.look_up.remote(self._placement, self._config, *arguments),
            self._patience,
        )
        if unanswered:
            raise self._told(Unsearched(self._placement.segments, unanswered[self._placement]))
        found: SearchResult = given[0][1]
        return found

    def _view(self, turn: int, missing: frozenset[str]) -> IndexSearcher:
        view = self._views.get((turn, missing))
        if view is None:
            shard = self._spread.turned(self._replicas, turn).without(missing)
            scoring = _scoring(self._config.reranker, self._crew, self._patience) if self._config.reranker else None
            if len(self._views) >= _VIEWS_KEPT:
                self._views = {}
            view = IndexSearcher(self.store, self._config, scoring=scoring, shard=lambda _: shard)
            self._views[turn, missing] = view  # another thread may have put them all away, or made the same
        return view

    def _leave_out(self, error: Unsearched) -> None:
        """Raises: the error, unless the answer may be partial and something is left to search."""
        missing = self._known_missing() | error.segments
        if self._config.fail_closed or missing >= set(self._placement.segments):
            raise self._told(error) from error
        self._missing = missing
        self._missing_key = (self._crew.watch.table.version, time.monotonic() + _MISSING_KEPT_S)

    def _known_missing(self) -> frozenset[str]:
        """What was missing lately, unless somebody has come or gone since."""
        version, until = self._missing_key
        still = version == self._crew.watch.table.version and time.monotonic() < until
        return self._missing if still else frozenset()

    def _told(self, error: Unsearched) -> Exception:
        """What is wrong with the files is told as such; a caller may find that there is a newer generation."""
        reason = error.reason
        if isinstance(reason, StoreError):
            return type(reason)(f"generation {self.store.generation} of the index cannot be read: {reason}")
        return error if isinstance(reason, RetrievalError) else reason


def _scoring(reranker: str, crew: Crew, patience: Patience) -> PairScoring:
    """Each query's passages are scored by whichever shard is free. Why no method: a view on lease must end with its last user."""

    def scores(asked: Sequence[PairsToScore]) -> list[Any]:
        given, unanswered = ask(
            crew,
            dict.fromkeys(range(len(asked)), ()),
            lambda actor, numbers: actor.scores.remote(reranker, [asked[n] for n in numbers]),
            patience,
        )
        for error in unanswered.values():
            raise error
        found = {number: each for numbers, some in given for number, each in zip(numbers, some, strict=True)}
        return [found[number] for number in range(len(asked))]

    return scores

"""Guessing what an index would say: the cache of one request, and lookups shared by all.

A request's queries resemble each other, so the best passage of the next one is often among those that earlier lookups brought.
The cache scores them as the index's search does, bit for bit (the same query record serves the guess and its check), so a guess
is right whenever an exact index's answer is in the cache; fused, approximate and reranked ones are guessed worse. They are only
ever compared with what the index says: they cost or save time and decide nothing.

    >>> cache = SpeculationCache(index.mode)
    >>> cache.insert(index.search([query], 1, scope, prefetch_k=8))
    >>> cache.guess(next_query, k=1)

Source: Zhang et al. 2024 (arXiv 2401.14021), section 3.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ragspec.config import RetrieverConfig
from ragspec.core import Passage
from ragspec.retrieval.request_batcher import RequestBatcher
from ragspec.retrieval.search.bm25 import SparseConfig, SparseQuery, TermStatistics, sparse_query
from ragspec.retrieval.search.dense import canonical_scores
from ragspec.retrieval.search.fusion import reciprocal_rank_fusion
from ragspec.retrieval.search.index_types import (
    IndexLike,
    PassageKey,
    Query,
    RetrievalMode,
    ScorablePassage,
    SearchResult,
)
from ragspec.retrieval.search.segment_search import SearchHit, SearchScope

_MAX_PASSAGES = 512
_FUSION_DEPTH = RetrieverConfig().fusion_depth
"""As most indexes have it; with another, a guess is worse and no text is."""


def passage_keys(passages: Sequence[Passage]) -> tuple[PassageKey, ...]:
    """What names passages in any generation: two retrievals are equal if these are."""
    return tuple((passage.document_id, passage.ordinal) for passage in passages)


class SpeculationCache:
    """Passages that one request has met, of one generation and under one scope; never shared between requests."""

    def __init__(self, mode: RetrievalMode) -> None:
        self._mode = mode
        self._candidates: dict[PassageKey, ScorablePassage] = {}  # the latest met last
        self._vectors: NDArray[np.float64] | None = None  # [C, E], in that order; made when needed
        self._statistics = TermStatistics()
        self._filled = False

    @property
    def known(self) -> frozenset[PassageKey]:
        return frozenset(self._candidates)

    @property
    def can_guess(self) -> bool:
        """Whether anything was brought, or there is nothing to bring."""
        return self._filled

    def insert(self, lookup: SearchResult) -> None:
        """What a lookup brought. Beyond some hundred passages the oldest are forgotten."""
        self._filled = self._filled or bool(lookup.candidates) or not any(lookup.passages)
        if not lookup.candidates:
            return
        again = {
            key: self._candidates.pop(key)
            for p in lookup.passages
            for key in passage_keys(p)
            if key in self._candidates
        }
        self._candidates |= again | lookup.candidates
        for key in list(self._candidates)[:-_MAX_PASSAGES]:
            del self._candidates[key]
        self._vectors = None
        given = lookup.statistics
        frequencies = {**self._statistics.frequencies, **given.frequencies}
        self._statistics = TermStatistics(given.num_rows, given.total_length, frequencies)

    def guess(self, query: Query, k: int) -> list[Passage]:
        """The `k` passages that the index would most likely name, best first, with the scores of its search."""
        if not self._candidates:
            return []
        candidates = list(self._candidates.values())
        if self._mode == "dense":
            best = heapq.nsmallest(k, self._by_meaning(query))
        elif self._mode == "sparse":
            best = heapq.nsmallest(k, self._by_words(query))
        else:
            rankings = [sorted(self._by_meaning(query)), sorted(self._by_words(query))]
            best = reciprocal_rank_fusion(rankings, _FUSION_DEPTH)[:k]
        return [replace(candidates[hit.row].passage, score=hit.score) for hit in best]

    def _by_meaning(self, query: Query) -> list[SearchHit]:
        assert query.vector is not None
        if self._vectors is None:
            self._vectors = np.array([each.vector for each in self._candidates.values()], np.float64)  # [C, E]
        scores = canonical_scores(query.vector, self._vectors).tolist()
        return [
            SearchHit(-score, *key, "", row)
            for row, (key, score) in enumerate(zip(self._candidates, scores, strict=True))
        ]

    def _by_words(self, query: Query) -> list[SearchHit]:
        """Those that hold a word of the query. A word of unknown frequency is in none of them."""
        asked = sparse_query(query.terms, self._statistics, SparseConfig())
        hits = []
        for row, (key, candidate) in enumerate(self._candidates.items()):
            if score := bm25_score(asked, candidate):
                hits.append(SearchHit(-score, *key, "", row))
        return hits


def bm25_score(query: SparseQuery, candidate: ScorablePassage) -> float:
    """As the postings give it, operation by operation; 0.0 without a common word."""
    counts = candidate.term_counts
    terms = [(counts[term], weight) for term, weight in zip(query.terms, query.weights, strict=True) if term in counts]
    if not terms:
        return 0.0
    norm = query.k1 * ((1.0 - query.b) + query.b * float(sum(counts.values())) / query.average_length)
    score = 0.0
    for count, weight in terms:
        score += weight * count / (count + norm)
    return score


@dataclass(frozen=True, slots=True, eq=False)
class SearchParams:
    """What the lookups of one call have in common."""

    index: IndexLike
    k: int
    scope: SearchScope
    prefetch_k: int

    def __eq__(self, other: object) -> bool:
        """The same object: an index pinned twice is asked twice. Why repr: filters for 1 and for True are equal."""
        return (
            isinstance(other, SearchParams)
            and self.index is other.index
            and (self.k, self.prefetch_k) == (other.k, other.prefetch_k)
            and self.scope.key == other.scope.key
        )


@dataclass(frozen=True, slots=True)
class PendingQuery:
    """A guessed query of a request whose cache holds `known`."""

    query: Query
    known: frozenset[PassageKey]


class SearchBatcher:
    """Encoding and looking up for all requests in flight, each in a thread of its own, so that decoding goes on meanwhile.

    Queries of one generation and scope that come while a call runs are the next call, at most `max_queries` of them.
    """

    def __init__(self, max_queries: int) -> None:
        self._encoding: RequestBatcher[IndexLike, str, list[Query]] = RequestBatcher(_encode, max_queries)
        self._looking: RequestBatcher[SearchParams, PendingQuery, SearchResult] = RequestBatcher(_look_up, max_queries)

    def encode(self, index: IndexLike, texts: Sequence[str]) -> Future[list[Query]]:
        return self._encoding.submit(index, texts)

    def search(self, asked: SearchParams, checks: Sequence[PendingQuery]) -> Future[SearchResult]:
        """The passages of these queries alone; the candidates of all that shared the call."""
        return self._looking.submit(asked, checks)

    def close(self) -> None:
        self._encoding.close()
        self._looking.close()


def _encode(index: IndexLike, parts: list[Sequence[str]]) -> list[list[Query]]:
    queries = iter(index.encode([text for part in parts for text in part]))
    return [[next(queries) for _ in part] for part in parts]


def _look_up(asked: SearchParams, parts: list[Sequence[PendingQuery]]) -> list[SearchResult]:
    checks = [check for part in parts for check in part]
    known = frozenset.intersection(*(check.known for check in checks))
    queries = [check.query for check in checks]
    whole = asked.index.search(queries, asked.k, asked.scope, prefetch_k=asked.prefetch_k, known=known)
    passages = iter(whole.passages)
    return [whole._replace(passages=[next(passages) for _ in part]) for part in parts]

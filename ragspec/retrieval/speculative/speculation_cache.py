"""The speculation cache of one request: guesses the passages that an index would find.

The queries of a request resemble each other, so earlier searches often brought the best passage of the next query. The cache
scores passages as the index does, bit for bit (the same query record serves the guess and its verification). So a guess is right
whenever the cache holds the answer of an exact index; guesses of fused, approximate and reranked answers are less often right. A
guess is only compared with the answer of the index: it costs or saves time and decides nothing.

    >>> cache = SpeculationCache(index.mode, index.relevance)
    >>> cache.insert(index.search([query], 1, scope, prefetch_k=8))
    >>> cache.guess(next_query, k=1)

Source: Zhang et al. 2024 (arXiv 2401.14021), section 3.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ragspec.core import Passage
from ragspec.retrieval.search.bm25 import SparseQuery, TermStatistics, sparse_query
from ragspec.retrieval.search.dense import canonical_scores
from ragspec.retrieval.search.index_searcher import FUSION_DEPTH, reciprocal_rank_fusion
from ragspec.retrieval.search.relevance import QueryWeights, Relevance, hits_to_read
from ragspec.retrieval.search.segment_search import (
    PassageKey,
    Query,
    RetrievalMode,
    ScorablePassage,
    SearchHit,
    SearchResult,
)

_MAX_PASSAGES = 512


def passage_keys(passages: Sequence[Passage]) -> tuple[PassageKey, ...]:
    """The passages' names in any generation: two retrievals are equal if their keys are."""
    return tuple((passage.document_id, passage.ordinal) for passage in passages)


class SpeculationCache:
    """Passages that one request has retrieved, of one generation and one scope. Never shared between requests."""

    def __init__(self, mode: RetrievalMode, relevance: Relevance | None = None) -> None:
        """As the index ranks."""
        self._mode, self._relevance = mode, relevance
        self._candidates: dict[PassageKey, ScorablePassage] = {}  # the latest last
        self._vectors: NDArray[np.float32] | None = None  # [C, E], in the same order; computed when needed
        self._statistics = TermStatistics()
        self.can_guess = False
        """Whether a search has filled the cache, or found that the index has no passage."""

    @property
    def known(self) -> frozenset[PassageKey]:
        return frozenset(self._candidates)

    def insert(self, result: SearchResult) -> None:
        """Add the candidates of a search. Beyond 512 passages the oldest are dropped."""
        self.can_guess = self.can_guess or bool(result.candidates) or not any(result.passages)
        if not result.candidates:
            return
        seen = (key for passages in result.passages for key in passage_keys(passages))
        seen_again = {key: self._candidates.pop(key) for key in seen if key in self._candidates}
        self._candidates |= seen_again | result.candidates
        for key in list(self._candidates)[:-_MAX_PASSAGES]:
            del self._candidates[key]
        self._vectors = None
        statistics = result.statistics
        frequencies = {**self._statistics.frequencies, **statistics.frequencies}
        self._statistics = TermStatistics(statistics.num_rows, statistics.total_length, frequencies)

    def guess(self, query: Query, k: int) -> list[Passage]:
        """The `k` passages that the index would most likely return, best first, with its scores."""
        if not self._candidates:
            return []
        candidates = list(self._candidates.values())
        if self._mode == "hybrid":
            rankings = [sorted(self._dense_hits(query)), sorted(self._sparse_hits(query))]
            best = self._by_relevance(query, rankings, reciprocal_rank_fusion(rankings, FUSION_DEPTH), k)
        else:
            best = heapq.nsmallest(k, (self._dense_hits if self._mode == "dense" else self._sparse_hits)(query))
        return [replace(candidates[hit.row].passage, score=hit.score) for hit in best]

    def _by_relevance(
        self, query: Query, rankings: Sequence[list[SearchHit]], fused: list[SearchHit], k: int
    ) -> list[SearchHit]:
        if self._relevance is None:
            return fused[:k]
        hits, candidates = hits_to_read(fused, FUSION_DEPTH), list(self._candidates.values())
        weights = QueryWeights.of(query.text, query.terms, self._statistics)
        passages = [candidates[hit.row].passage for hit in hits]
        read = self._relevance.read(weights, hits, passages, [ranking[:FUSION_DEPTH] for ranking in rankings])
        return self._relevance.ordered(read, fused, k)

    def _dense_hits(self, query: Query) -> list[SearchHit]:
        assert query.vector is not None
        if self._vectors is None:
            self._vectors = np.array([each.vector for each in self._candidates.values()], np.float32)  # [C, E]
        return self._hits(canonical_scores(query.vector, self._vectors).tolist())

    def _sparse_hits(self, query: Query) -> list[SearchHit]:
        """Passages that hold a word of the query. No cached passage holds a word of unknown frequency."""
        scored_query = sparse_query(query.terms, self._statistics)
        hits = self._hits(bm25_score(scored_query, candidate) for candidate in self._candidates.values())
        return [hit for hit in hits if hit.score]

    def _hits(self, scores: Iterable[float]) -> list[SearchHit]:
        """Shapes: scores [C]."""
        pairs = zip(self._candidates, scores, strict=True)
        return [SearchHit(-score, *key, "", row) for row, (key, score) in enumerate(pairs)]


def bm25_score(query: SparseQuery, candidate: ScorablePassage) -> float:
    """The score that the postings give, by the same operations in the same order; 0.0 without a common word."""
    counts = candidate.term_counts
    terms = [(counts[term], weight) for term, weight in zip(query.terms, query.weights, strict=True) if term in counts]
    if not terms:
        return 0.0
    norm = query.norm(float(sum(counts.values())))
    score = 0.0
    for count, weight in terms:
        score += weight * count / (count + norm)
    return score

"""Searches the segments of one generation: dense or sparse, under a scope, in one canonical order.

A shard holds some of the segments. Every shard searches a segment the same way, and hits are merged by (-score, document id,
ordinal), so one shard with all segments and many shards with one segment each give the same hits and scores.

    >>> Shard.open(store.segments).dense(queries, k=10, scope=SearchScope(tenant="alice"))
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from ragspec.core import Passage
from ragspec.errors import ConfigError
from ragspec.retrieval.encoder import FloatArray
from ragspec.retrieval.index.segment_files import unchanged
from ragspec.retrieval.index.store import LiveSegment
from ragspec.retrieval.search.bm25 import SparseQuery, TermStatistics
from ragspec.retrieval.search.dense import Mask, ScoredRows, top_k
from ragspec.retrieval.search.faiss_index import fits, num_gpus
from ragspec.retrieval.search.filters import Filter

_SCOPES_KEPT = 64
_FREQUENCIES_KEPT = 65_536


@dataclass(frozen=True, slots=True)
class SearchScope:
    """The documents a search may see: documents of `tenant` and documents without an owner, where `filter` holds for them."""

    tenant: str = ""
    filter: Filter | None = None


PUBLIC_SCOPE = SearchScope()
"""Documents without an owner."""


class SearchHit(NamedTuple):
    """The passage and score of a result. Hits compare by rank: the best is the smallest."""

    negative_score: float
    document_id: str
    ordinal: int
    segment: str
    row: int

    @property
    def score(self) -> float:
        return -self.negative_score

    @property
    def passage(self) -> tuple[str, int]:
        """The passage's name in any generation."""
        return self.document_id, self.ordinal


RetrievalMode = Literal["dense", "sparse", "hybrid"]
Device = Literal["auto", "cpu", "gpu"]

PassageKey = tuple[str, int]
"""(document id, ordinal), which names a passage in any generation."""


@dataclass(frozen=True, slots=True)
class Query:
    """An encoded query. The same record serves a guess and its verification.

    `terms` hold repetitions, and are empty in mode dense. Queries of one index are equal if their texts are.
    Shapes: vector [E] float32, L2-normalised; None in mode sparse.
    """

    text: str
    vector: FloatArray | None = field(compare=False)
    terms: tuple[str, ...]


class Lookup(NamedTuple):
    """Queries to search for together: the `k` best passages of each, and `prefetch_k` candidates but those `known`."""

    queries: Sequence[Query]
    k: int
    scope: SearchScope = PUBLIC_SCOPE
    prefetch_k: int = 0
    known: frozenset[PassageKey] = frozenset()


class ScorablePassage(NamedTuple):
    """A passage with all that scoring it needs. It belongs to no query: the passage's score is 0.

    `term_counts` count the terms of `ragspec.retrieval.chunking.embedded_text`; empty in mode dense.
    Shapes: vector [E] float32, as stored; None in mode sparse.
    """

    passage: Passage
    vector: FloatArray | None
    term_counts: Mapping[str, int]


class SearchResult(NamedTuple):
    """The result of a search for some queries.

    `passages`: the best k of each query, best first, with scores. `candidates`: the best max(k, prefetch_k) of each query, query
    by query, without known passages; empty for a prefetch_k of 0. `statistics` count the passages that the scope's tenant may
    read, their lengths, and the frequency of every term of `candidates`; empty in mode dense and for a prefetch_k of 0. `missing`
    names segments that could not be searched; the other fields are then the answer without them, which no cache may keep. Empty
    unless `RetrieverConfig.fail_closed` is off. `closeness`: the calibrated score of each query's best passage, which is the
    probability that the index holds an answer; empty but in mode hybrid, and with `prefetch_k`.
    """

    passages: list[list[Passage]]
    candidates: dict[PassageKey, ScorablePassage]
    statistics: TermStatistics
    generation: str
    missing: tuple[str, ...] = ()
    closeness: tuple[float, ...] = ()


class SegmentSearcher:
    """Searches one segment. Caches the allowed rows of recent scopes."""

    def __init__(self, live: LiveSegment, on_gpu: bool) -> None:
        """Load all that the first search would otherwise wait for. Raises: StoreCorrupt."""
        self._segment, self.name = live.segment, live.segment.name
        self._nearest = live.segment.nearest(on_gpu)
        _ = live.segment.ids, live.segment.owners
        self._live_rows = None if live.is_live.all() else live.live_rows()
        self._allowed = lru_cache(_SCOPES_KEPT)(self._allowed_rows)
        self._frequency = lru_cache(_FREQUENCIES_KEPT)(self._frequency_of)
        self._size = lru_cache(_SCOPES_KEPT)(self._size_of)

    def dense(self, queries: FloatArray, k: int, scope: SearchScope) -> list[list[SearchHit]]:
        return [self._hits(scored, k) for scored in self._nearest.search(queries, k, self._allowed(scope))]

    def statistics(self, terms: Sequence[str], tenant: str) -> TermStatistics:
        return self._size(tenant) + TermStatistics(frequencies={term: self._frequency(term, tenant) for term in terms})

    def sparse(self, queries: Sequence[SparseQuery], k: int, scope: SearchScope) -> list[list[SearchHit]]:
        allowed = self._allowed(scope)
        return [self._hits(top_k(ScoredRows(*self._segment.postings.scores(q, allowed)), k), k) for q in queries]

    def passages(self, hits: Sequence[SearchHit], num_neighbours: int = 0) -> list[Passage]:
        return [self._segment.passage(hit.row, hit.score, num_neighbours) for hit in hits]

    def vectors(self, hits: Sequence[SearchHit]) -> list[FloatArray]:
        return [np.array(self._segment.vectors[hit.row]) for hit in hits]  # Why copies: views keep the mapped file open

    def _hits(self, scored: ScoredRows, k: int) -> list[SearchHit]:
        scored = self._without_surplus_ties(scored, k)
        name, ids, keys = self._segment.name, self._segment.ids, self._segment.spans[scored.rows, :2].tolist()
        found = zip(scored.scores.tolist(), scored.rows.tolist(), keys, strict=True)
        return sorted(SearchHit(-score, ids[document], at, name, row) for score, row, (document, at) in found)[:k]

    def _without_surplus_ties(self, scored: ScoredRows, k: int) -> ScoredRows:
        """Drops surplus rows that tie with the k-th score: the first by document id and ordinal stay."""
        if len(scored.rows) <= k:
            return scored
        kth = scored.scores.min()
        tied = np.flatnonzero(scored.scores == kth)
        better = np.flatnonzero(scored.scores > kth)
        first = np.argpartition(self._segment.order[scored.rows[tied]], k - len(better) - 1)[: k - len(better)]
        kept = np.concatenate([better, tied[first]])
        return ScoredRows(scored.rows[kept], scored.scores[kept])

    def _frequency_of(self, term: str, tenant: str) -> int:
        return self._segment.postings.frequency(term, self._allowed(SearchScope(tenant)))

    def _size_of(self, tenant: str) -> TermStatistics:
        return self._segment.postings.statistics([], self._allowed(SearchScope(tenant)))

    def _allowed_rows(self, scope: SearchScope) -> Mask | None:
        """Rows that a search may return; None: all. Shapes: [K]."""
        seen = self._segment.readable(scope.tenant)
        if scope.filter is not None:
            with unchanged(self._segment.folder):
                seen &= self._segment.columns.matches(scope.filter)
        rows: Mask = seen[self._segment.document_of]
        if self._live_rows is not None:
            rows &= self._live_rows
        return None if rows.all() else rows


class SplitShard(ABC):
    """Some segments of one generation, each in a part."""

    @abstractmethod
    def ask_all(self, method: str, *arguments: Any) -> list[Any]:
        """The answer of every part."""

    @abstractmethod
    def read_hits(self, method: str, hits: Sequence[SearchHit], *arguments: Any) -> list[Any]:
        """The answer to each hit, of the part that holds it."""

    def dense(self, queries: FloatArray, k: int, scope: SearchScope) -> list[list[SearchHit]]:
        """The nearest passages of each query, best first. Shapes: queries [B, E] float32, L2-normalised."""
        return _merged(self.ask_all("dense", queries, k, scope), len(queries), k)

    def statistics(self, terms: Sequence[str], tenant: str) -> TermStatistics:
        """Counts over the documents that the tenant may read. A filter does not change them."""
        return sum(self.ask_all("statistics", terms, tenant), TermStatistics())

    def sparse(self, queries: Sequence[SparseQuery], k: int, scope: SearchScope) -> list[list[SearchHit]]:
        """The passages that hold a term of the query, best first by BM25."""
        return _merged(self.ask_all("sparse", queries, k, scope), len(queries), k)

    def passages(self, hits: Sequence[SearchHit], num_neighbours: int = 0) -> list[Passage]:
        """With neighbours, each is a `ragspec.retrieval.expansion.WidePassage`."""
        return self.read_hits("passages", hits, num_neighbours)

    def vectors(self, hits: Sequence[SearchHit]) -> list[FloatArray]:
        """The stored vectors of the passages. Shapes: each [E] float32."""
        return self.read_hits("vectors", hits)


def _merged(parts: Sequence[list[list[SearchHit]]], num_queries: int, k: int) -> list[list[SearchHit]]:
    """The best `k` of each query over several parts."""
    return [sorted(hit for part in parts for hit in part[number])[:k] for number in range(num_queries)]


class Shard(SplitShard):
    """Some segments of one generation, in this process. Safe to call from several threads."""

    def __init__(self, parts: Sequence[SegmentSearcher]) -> None:
        self.part_of = {part.name: part for part in parts}

    @classmethod
    def open(
        cls, segments: Iterable[LiveSegment], device: Device = "cpu", gpu_memory_bytes: int | None = None
    ) -> Shard:
        """Segments beyond `gpu_memory_bytes` are searched on the CPU.

        Raises: ConfigError if there is no `gpu`, "auto" takes one if there is; StoreCorrupt.
        """
        on_gpu = device != "cpu" and num_gpus() > 0
        if device == "gpu" and not on_gpu:
            raise ConfigError("retriever.device is gpu, but FAISS finds none: it needs ragspec[gpu] and a CUDA device")
        return cls(
            [SegmentSearcher(live, on_gpu and fits(live.segment.vectors, gpu_memory_bytes)) for live in segments]
        )

    def ask_all(self, method: str, *arguments: Any) -> list[Any]:
        return [getattr(part, method)(*arguments) for part in self.part_of.values()]

    def read_hits(self, method: str, hits: Sequence[SearchHit], *arguments: Any) -> list[Any]:
        return [found for hit in hits for found in getattr(self.part_of[hit.segment], method)([hit], *arguments)]

"""Encoding and searching for many requests at once: queries that arrive during a call share the next call.

Owns the two threads that call the index. Results are bit for bit those of separate calls.

    >>> retriever = BatchingRetriever(index)
    >>> retriever.retrieve(["When did it rain?"], k=3).passages
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from ragspec.retrieval.request_batcher import RequestBatcher
from ragspec.retrieval.retriever import PUBLIC_SCOPE, RetrievalResult
from ragspec.retrieval.search.index_types import IndexLike, PassageKey, Query, SearchResult
from ragspec.retrieval.search.segment_search import SearchScope

MAX_QUERIES = 32


@dataclass(frozen=True, slots=True)
class SearchParams:
    """The arguments that all queries of one search share. Indexes are equal if they are the same object."""

    index: IndexLike
    k: int
    scope: SearchScope
    prefetch_k: int


@dataclass(frozen=True, slots=True)
class PendingQuery:
    """A query of a request whose speculation cache holds the passages `known`."""

    query: Query
    known: frozenset[PassageKey] = frozenset()


class SearchBatcher:
    """Encodes and searches for all requests in flight, each in a thread of its own, while decoding goes on.

    A call holds queries of one generation and scope, at most `max_queries`.
    """

    def __init__(self, max_queries: int) -> None:
        self._encoding: RequestBatcher[IndexLike, str, list[Query]] = RequestBatcher(_encode, max_queries)
        self._searching: RequestBatcher[SearchParams, PendingQuery, SearchResult] = RequestBatcher(_search, max_queries)

    def encode(self, index: IndexLike, texts: Sequence[str]) -> Future[list[Query]]:
        return self._encoding.submit(index, texts)

    def search(self, params: SearchParams, queries: Sequence[PendingQuery]) -> Future[SearchResult]:
        """The passages of these queries, and the candidates of all queries that shared the call."""
        return self._searching.submit(params, queries)

    def close(self) -> None:
        self._encoding.close()
        self._searching.close()


class BatchingRetriever:
    """A `RetrieverLike` over an index in this process.

    Why not for a remote index: one call runs at a time, and a call may wait for a machine that other queries do not need.
    """

    def __init__(self, index: IndexLike, max_queries: int = MAX_QUERIES) -> None:
        self._index, self._batcher = index, SearchBatcher(max_queries)

    def retrieve(self, queries: Sequence[str], k: int, scope: SearchScope = PUBLIC_SCOPE) -> RetrievalResult:
        """Blocks. Raises: the errors of the index, and EngineClosed."""
        encoded = self._batcher.encode(self._index, queries).result()
        params = SearchParams(self._index, k, scope, prefetch_k=0)
        found = self._batcher.search(params, [PendingQuery(query) for query in encoded]).result()
        return RetrievalResult(found.passages, found.generation, found.missing)

    def close(self) -> None:
        """Waiting callers get `EngineClosed` as soon as the running call has ended. The index stays open."""
        self._batcher.close()


def _encode(index: IndexLike, parts: list[Sequence[str]]) -> list[list[Query]]:
    queries = iter(index.encode([text for part in parts for text in part]))
    return [[next(queries) for _ in part] for part in parts]


def _search(params: SearchParams, parts: list[Sequence[PendingQuery]]) -> list[SearchResult]:
    pending = [each for part in parts for each in part]
    known = frozenset.intersection(*(each.known for each in pending))
    queries = [each.query for each in pending]
    whole = params.index.search(queries, params.k, params.scope, prefetch_k=params.prefetch_k, known=known)
    passages = iter(whole.passages)
    return [whole._replace(passages=[next(passages) for _ in part]) for part in parts]

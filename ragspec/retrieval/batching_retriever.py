"""Retrieval for many threads at once: what comes while an index encodes or searches shares the next call.

>>> joined = BatchingRetriever(retriever)
>>> joined.retrieve(["When did it rain?"], k=3).passages      # as the retriever says, bit for bit
"""

from __future__ import annotations

from collections.abc import Sequence

from ragspec.retrieval.retriever import PUBLIC_SCOPE, RetrievalResult
from ragspec.retrieval.search.index_types import IndexLike
from ragspec.retrieval.search.segment_search import SearchScope
from ragspec.retrieval.speculative.speculation_cache import PendingQuery, SearchBatcher, SearchParams

MAX_QUERIES = 32


class BatchingRetriever:
    """A `RetrieverLike` over an index in this process. Queries of equal scope and `k` are searched together, all are encoded
    together; one call runs at a time, so not for an index elsewhere, where one may wait for a machine that others do not need."""

    def __init__(self, index: IndexLike, max_queries: int = MAX_QUERIES) -> None:
        self._index, self._lookups = index, SearchBatcher(max_queries)

    def retrieve(self, queries: Sequence[str], k: int, scope: SearchScope = PUBLIC_SCOPE) -> RetrievalResult:
        """Blocks. Raises: as the index, and EngineClosed."""
        encoded = self._lookups.encode(self._index, queries).result()
        asked = SearchParams(self._index, k, scope, prefetch_k=0)
        found = self._lookups.search(asked, [PendingQuery(query, frozenset()) for query in encoded]).result()
        return RetrievalResult(found.passages, found.generation, found.missing)

    def close(self) -> None:
        """Whoever waits is told `EngineClosed`, once the call that runs has ended. The index stays open."""
        self._lookups.close()

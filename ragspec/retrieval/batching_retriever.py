"""Encoding and searching for many requests: queries that arrive during a call share the next call, and recent queries are
answered from memory.

Owns the two threads that call the index. Results are bit for bit those of separate calls.

    >>> retriever = BatchingRetriever(index)
    >>> retriever.retrieve(["When did it rain?"], k=3).passages
"""

import threading
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain, islice
from typing import Generic, NamedTuple, TypeVar

from ragspec.errors import EngineClosed, InputError
from ragspec.retrieval.retriever import FROM_MEMORY, RetrievalResult, Retriever
from ragspec.retrieval.search.segment_search import PUBLIC_SCOPE, Lookup, PassageKey, Query, SearchResult, SearchScope

MAX_QUERIES = 32
_KEPT_OF_TENANT, _KEPT_IN_ALL = 1000, 8192
"""Results that are kept of a tenant, and of all tenants."""
_MOST_PASSAGES, _MOST_CHARS = 16, 4096
"""Passages of such a result, and characters of its query and filter."""

Key = TypeVar("Key")
Item = TypeVar("Item")
Result = TypeVar("Result")


class _Submission(NamedTuple, Generic[Item, Result]):
    items: Sequence[Item]
    future: Future[Result]


class RequestBatcher(Generic[Key, Item, Result]):
    """One thread that calls `call(key, parts)` with the items of submissions of equal keys. A call returns one result per part.

    A call holds at most `max_items` items, unless a single submission has more. Keys take turns, a call each: a key with many
    submissions delays the others by one call.
    """

    def __init__(self, call: Callable[[Key, list[Sequence[Item]]], list[Result]], max_items: int) -> None:
        self._call = call
        self._max_items = max_items
        self._waiting: dict[Key, deque[_Submission[Item, Result]]] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ragspec-request-batcher", daemon=True)
        self._thread.start()

    def submit(self, key: Key, items: Sequence[Item]) -> Future[Result]:
        """Raises: EngineClosed. The future raises the error of the call. Cancelled submissions are dropped."""
        future: Future[Result] = Future()
        with self._changed:
            if self._closed:
                raise EngineClosed("the pipeline is closed")
            self._waiting.setdefault(key, deque()).append(_Submission(items, future))
            self._changed.notify()
        return future

    def close(self) -> None:
        """Accept no further submissions; waiting submissions fail with EngineClosed. Does not wait for a running call."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        while call := self._next_call():
            key, parts = call
            parts = [part for part in parts if part.future.set_running_or_notify_cancel()]
            if parts:
                _settle(parts, partial(self._call, key))
        for part in chain.from_iterable(self._waiting.values()):
            if part.future.set_running_or_notify_cancel():
                part.future.set_exception(EngineClosed("the pipeline was closed"))

    def _next_call(self) -> tuple[Key, list[_Submission[Item, Result]]] | None:
        """Waits for a submission; the key that waits longest for its turn, and of its submissions the oldest that fit into one
        call. None once it is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return None
            key = next(iter(self._waiting))
            waiting = self._waiting.pop(key)
            chosen = [waiting.popleft()]
            num_items = len(chosen[0].items)
            while waiting and num_items + len(waiting[0].items) <= self._max_items:
                num_items += len(waiting[0].items)
                chosen.append(waiting.popleft())
            if waiting:
                self._waiting[key] = waiting
            return key, chosen


def _settle(parts: list[_Submission[Item, Result]], call: Callable[[list[Sequence[Item]]], list[Result]]) -> None:
    """Set the results of a call. If the input of one submission fails a call of several, each is called alone."""
    try:
        results = call([part.items for part in parts])
    except Exception as error:
        is_shared = isinstance(error, InputError) and len(parts) > 1
        for part in parts:
            if is_shared:
                _settle([part], call)
            else:
                part.future.set_exception(error)
    else:
        for part, result in zip(parts, results, strict=True):
            part.future.set_result(result)


_Pending = tuple[Query, frozenset[PassageKey]]
"""A query of a request whose speculation cache holds those passages."""

_Searched = tuple[Retriever, int, SearchScope, int]
"""What the queries of one search share: the index, k, the scope and prefetch_k of their look-ups."""


class SearchBatcher:
    """Encodes and searches for all requests in flight, each in a thread of its own, while decoding goes on.

    A call holds queries of one generation and scope, at most `max_queries`.
    """

    def __init__(self, max_queries: int) -> None:
        self._encoding: RequestBatcher[Retriever, str, list[Query]] = RequestBatcher(_encode, max_queries)
        self._searching: RequestBatcher[_Searched, _Pending, SearchResult] = RequestBatcher(_search, max_queries)

    def encode(self, index: Retriever, texts: Sequence[str]) -> Future[list[Query]]:
        return self._encoding.submit(index, texts)

    def search(self, index: Retriever, lookup: Lookup) -> Future[SearchResult]:
        """The passages of these queries, and the candidates of all queries that shared the call."""
        shared = index, lookup.k, lookup.scope, lookup.prefetch_k
        return self._searching.submit(shared, [(query, lookup.known) for query in lookup.queries])

    def close(self) -> None:
        self._encoding.close()
        self._searching.close()


class BatchingRetriever:
    """A `RetrieverLike` over an index in this process.

    Why not for a remote index: one call runs at a time, and a call may wait for a machine that other queries do not need.
    """

    def __init__(self, index: Retriever, max_queries: int = MAX_QUERIES) -> None:
        self._index, self._batcher = index, SearchBatcher(max_queries)

    def retrieve(self, queries: Sequence[str], k: int, scope: SearchScope = PUBLIC_SCOPE) -> RetrievalResult:
        """Blocks. Raises: the errors of the index, and EngineClosed."""
        begin_s, encoded = time.perf_counter(), self._batcher.encode(self._index, queries).result()
        encoded_s = time.perf_counter()
        found = self._batcher.search(self._index, Lookup(encoded, k, scope)).result()
        return RetrievalResult.of(found, begin_s, encoded_s)

    def close(self) -> None:
        """Waiting callers get `EngineClosed` as soon as the running call has ended. The index stays open."""
        self._batcher.close()


class CachingRetriever:
    """A `RetrieverLike` that keeps the results of each tenant's latest queries, of one generation of the index.

    Queries are equal if text, number of passages, tenant and filter are. Safe to call from several threads.
    """

    def __init__(self, retriever: BatchingRetriever | Retriever, generation: Callable[[], str]) -> None:
        """`generation`: names the generation that the retriever would search now."""
        self._retriever, self._current, self._generation = retriever, generation, ""
        self._lock, self._num_kept = threading.Lock(), 0
        self._results: defaultdict[str, OrderedDict[str, RetrievalResult]] = defaultdict(OrderedDict)

    def retrieve(self, queries: Sequence[str], k: int, scope: SearchScope = PUBLIC_SCOPE) -> RetrievalResult:
        """As the retriever, whose errors it raises."""
        key, generation = repr((queries, k, scope.filter)), self._current()
        with self._lock:
            if generation != self._generation:  # deleted passages leave the memory, too
                self._generation, self._num_kept = generation, 0
                self._results.clear()
            own = self._results.get(scope.tenant, OrderedDict[str, RetrievalResult]())
            if kept := own.get(key):
                own.move_to_end(key)
                return kept._replace(passages=[*map(list, kept.passages)], times=FROM_MEMORY)
        result = self._retriever.retrieve(queries, k, scope)
        if not result.missing and k * len(queries) <= _MOST_PASSAGES and len(key) <= _MOST_CHARS:
            self._keep(scope.tenant, key, result)
        return result._replace(passages=[*map(list, result.passages)])

    def _keep(self, tenant: str, key: str, result: RetrievalResult) -> None:
        with self._lock:
            if result.generation != self._generation or key in self._results[tenant]:
                return
            self._results[tenant][key] = result
            self._num_kept += 1
            if len(self._results[tenant]) > _KEPT_OF_TENANT or self._num_kept > _KEPT_IN_ALL:
                fullest = max(self._results, key=lambda each: len(self._results[each]))
                self._results[fullest].popitem(last=False)
                self._num_kept -= 1
                if not self._results[fullest]:
                    del self._results[fullest]


def _encode(index: Retriever, parts: list[Sequence[str]]) -> list[list[Query]]:
    queries = iter(index.encode([text for part in parts for text in part]))
    return [[next(queries) for _ in part] for part in parts]


def _search(shared: _Searched, parts: list[Sequence[_Pending]]) -> list[SearchResult]:
    index, k, scope, prefetch_k = shared
    queries, known = zip(*(each for part in parts for each in part), strict=True)
    whole = index.search(queries, k, scope, prefetch_k=prefetch_k, known=frozenset.intersection(*known))
    passages, closeness = iter(whole.passages), iter(whole.closeness)
    return [
        whole._replace(passages=[next(passages) for _ in part], closeness=tuple(islice(closeness, len(part))))
        for part in parts
    ]

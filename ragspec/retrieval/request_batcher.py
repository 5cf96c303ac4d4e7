"""Batches calls of many requests: submissions that arrive while a call runs share the next call.

>>> calls = RequestBatcher(lambda index, parts: [index.encode(part) for part in parts], max_items=16)
>>> calls.submit(index, ["When did it rain?"]).result()
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, NamedTuple, TypeVar

from ragspec.errors import EngineClosed, InputError

Key = TypeVar("Key")
Item = TypeVar("Item")
Result = TypeVar("Result")


class _Submission(NamedTuple, Generic[Key, Item, Result]):
    key: Key
    items: Sequence[Item]
    future: Future[Result]


class RequestBatcher(Generic[Key, Item, Result]):
    """One thread that calls `call(key, parts)` with the items of submissions of equal keys. A call returns one result per part.

    A call holds at most `max_items` items, unless a single submission has more.
    """

    def __init__(self, call: Callable[[Key, list[Sequence[Item]]], list[Result]], max_items: int) -> None:
        self._call = call
        self._max_items = max_items
        self._queue: queue.SimpleQueue[_Submission[Key, Item, Result] | None] = queue.SimpleQueue()
        self._waiting: list[_Submission[Key, Item, Result]] = []
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ragspec-request-batcher", daemon=True)
        self._thread.start()

    def submit(self, key: Key, items: Sequence[Item]) -> Future[Result]:
        """Raises: EngineClosed. The future raises the error of the call. Cancelled submissions are dropped."""
        future: Future[Result] = Future()
        with self._lock:
            if self._closed:
                raise EngineClosed("the pipeline is closed")
            self._queue.put(_Submission(key, items, future))
        return future

    def close(self) -> None:
        """Accept no further submissions; waiting submissions fail with EngineClosed. Does not wait for a running call."""
        with self._lock:
            self._closed = True
            self._queue.put(None)

    def _run(self) -> None:
        while self._take():
            parts = self._next_call()
            parts = [part for part in parts if part.future.set_running_or_notify_cancel()]
            if parts:
                _settle(parts, self._call)
        for part in self._waiting:
            if part.future.set_running_or_notify_cancel():
                part.future.set_exception(EngineClosed("the pipeline was closed"))

    def _take(self) -> bool:
        """Move all submissions from the queue to the waiting list; wait for one if there is none. False: closed."""
        while not self._waiting or not self._queue.empty():
            part = self._queue.get()
            if part is None:
                return False
            self._waiting.append(part)
        return True

    def _next_call(self) -> list[_Submission[Key, Item, Result]]:
        """The oldest submission and the submissions of its key that fit into one call, in the order of arrival."""
        first = self._waiting[0]
        chosen, num_items = [first], len(first.items)
        for part in self._waiting[1:]:
            if part.key == first.key and num_items + len(part.items) <= self._max_items:
                chosen.append(part)
                num_items += len(part.items)
        self._waiting = [part for part in self._waiting if part not in chosen]
        return chosen


def _settle(
    parts: list[_Submission[Key, Item, Result]], call: Callable[[Key, list[Sequence[Item]]], list[Result]]
) -> None:
    """Set the results of a call. If the input of one submission fails a call of several, each is called alone."""
    try:
        results = call(parts[0].key, [part.items for part in parts])
    except InputError as error:
        for part in parts if len(parts) > 1 else ():
            _settle([part], call)
        if len(parts) == 1:
            parts[0].future.set_exception(error)
    except Exception as error:
        for part in parts:
            part.future.set_exception(error)
    else:
        for part, result in zip(parts, results, strict=True):
            part.future.set_result(result)

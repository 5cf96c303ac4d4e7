"""Calls that any of several workers can answer: they end in time, with an answer or with an error that names the loss.

A call that fails, is lost with its worker or is late goes to another worker. It never matters which worker answers, because each
call carries all its input.

    >>> pool = WorkerPool(replicas, what="a shard of the index")
    >>> hedged_call(pool, {"segment-1": ("shard-1", "shard-0")}, lambda actor, names: actor.search.remote(...), RetryPolicy(9.0))
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from ragspec.cluster.ray_calls import last_line
from ragspec.cluster.remote_retrieval.worker_pool import Worker, WorkerPool
from ragspec.errors import ConfigError, InputError, RagspecError, RetrievalError

Item = TypeVar("Item", bound=Hashable)
Part = TypeVar("Part")
Send = Callable[[Any, list[Item]], Any]
"""Calls an actor for some items at once; gives Ray's reference to the answer."""

_LOOK_S = 0.1
_MAX_CALLS = 2
_CHECK_AGAIN_S = 3.0


class RetryPolicy(NamedTuple):
    """`timeout_s`: of the whole call. `late_s`: after it a call is late; None: half the timeout.

    `hedge`: a late call is made again, to another worker. `wait_for_lost`: wait for workers that restart, as long as there is
    time; otherwise an item is given up when every worker that is alive has failed it.
    """

    timeout_s: float
    late_s: float | None = None
    hedge: bool = True
    wait_for_lost: bool = True


class HedgedAnswers(NamedTuple, Generic[Item]):
    """`given`: each answer with the items it is for; no item is in two answers. `failed`: the error of each other item."""

    given: list[tuple[list[Item], Any]]
    failed: dict[Item, RagspecError]


def hedged_call(
    pool: WorkerPool, items: Mapping[Item, Sequence[str]], send: Send[Item], policy: RetryPolicy
) -> HedgedAnswers[Item]:
    """Call the first available worker of each item's order, then the others; no worker twice for one item.

    Items for the same worker share a call. An item with an empty order gets a call of its own, to whichever worker is free.
    Raises: InputError or ConfigError of an actor's code; RetrievalError if the pool was closed.
    """
    return _HedgedCall(pool, items, send, policy).run()


def call_free_workers(
    pool: WorkerPool, parts: Sequence[Part], send: Callable[[Any, Part], Any], policy: RetryPolicy
) -> list[Any]:
    """The answer to each part, which goes to any free worker in a call of its own. Raises: the error of the first part lost."""
    orders: dict[int, Sequence[str]] = dict.fromkeys(range(len(parts)), ())
    given, failed = hedged_call(pool, orders, lambda actor, numbers: send(actor, parts[numbers[0]]), policy)
    for error in failed.values():
        raise error
    return [answer for _, answer in sorted(given, key=lambda each: each[0])]


@dataclass(slots=True)
class _Call(Generic[Item]):
    worker: Worker
    items: list[Item]
    late_at: float
    check_at: float


class _HedgedCall(Generic[Item]):
    """The state of one `hedged_call`."""

    def __init__(
        self, pool: WorkerPool, items: Mapping[Item, Sequence[str]], send: Send[Item], policy: RetryPolicy
    ) -> None:
        self._pool, self._orders, self._send, self._policy = pool, items, send, policy
        self._deadline = time.monotonic() + policy.timeout_s
        self._late_s = policy.timeout_s / 2 if policy.late_s is None else policy.late_s
        self._open = dict.fromkeys(items)
        self._called: dict[Item, set[tuple[str, int]]] = {item: set() for item in items}
        self._alone: set[Item] = set()
        self._errors: dict[Item, RagspecError] = {}
        self._calls: dict[Any, _Call[Item]] = {}
        self._given: list[tuple[list[Item], Any]] = []

    def run(self) -> HedgedAnswers[Item]:
        failed: dict[Item, RagspecError] = {}
        while self._open and time.monotonic() < self._deadline:
            self._pool.check_open()
            self._calls = {ref: call for ref, call in self._calls.items() if not self._pool.is_lost(call.worker)}
            self._start_calls()
            failed |= self._failed_everywhere()
            for item in failed:
                self._open.pop(item, None)
            if self._open:
                self._wait()
        return HedgedAnswers(self._given, failed | {item: self._timeout_error(item) for item in self._open})

    def _start_calls(self) -> None:
        groups: dict[tuple[str, int, Item | None], tuple[Worker, list[Item]]] = {}
        available = self._pool.available()
        busy = {call.worker[:2] for call in self._calls.values()}
        for item in self._open:
            worker = self._next_worker(item, available, busy) if self._is_due(item) else None
            if worker is None:
                continue
            self._called[item].add(worker[:2])
            groups.setdefault((*worker[:2], item if item in self._alone else None), (worker, []))[1].append(item)
            busy.add(worker[:2])
        late_at = time.monotonic() + self._late_s
        for worker, items in groups.values():
            self._calls[self._send(worker.actor, items)] = _Call(worker, items, late_at, late_at)

    def _is_due(self, item: Item) -> bool:
        running = [call for call in self._calls.values() if item in call.items]
        if not running:
            return True
        is_late = all(call.late_at <= time.monotonic() for call in running)
        return is_late and self._policy.hedge and len(running) < _MAX_CALLS

    def _next_worker(self, item: Item, available: Iterable[Worker], busy: set[tuple[str, int]]) -> Worker | None:
        order = self._orders[item]
        rank = {name: number for number, name in enumerate(order)}
        fresh = [w for w in available if w[:2] not in self._called[item] and (order or w[:2] not in busy)]
        if fresh and not order:
            return fresh[next(self._pool.turns) % len(fresh)]
        return min(fresh, key=lambda worker: rank.get(worker.name, len(rank)), default=None)

    def _wait(self) -> None:
        """Until a call is answered or late, or a moment has passed."""
        now, version = time.monotonic(), self._pool.version
        for call in self._calls.values():
            if call.check_at <= now:
                self._pool.suspect(call.worker)
                call.check_at = now + max(self._late_s, _CHECK_AGAIN_S)
        left_s = max(0.0, min(self._deadline - now, _LOOK_S))
        if not self._calls:
            self._pool.wait(version, left_s)
            return
        answered, _ = ray.wait(list(self._calls), timeout=left_s)
        for reference in answered:
            self._take(self._calls.pop(reference), reference)

    def _take(self, call: _Call[Item], reference: Any) -> None:
        try:
            value = ray.get(reference)
        except RayTaskError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, InputError | ConfigError):
                raise cause from None
            self._fail(call, cause if isinstance(cause, RagspecError) else self._error("failed", error))
        except RayError as error:
            self._pool.lose(call.worker, f"a call was lost: {last_line(error)}")
            self._errors |= dict.fromkeys(call.items, self._error("is lost", error))
        else:
            self._accept(call.items, value)

    def _fail(self, call: _Call[Item], error: RagspecError) -> None:
        """Items that failed together are tried again one by one: only the faulty item fails."""
        self._errors |= dict.fromkeys(call.items, error)
        if len(call.items) > 1:
            self._alone |= set(call.items)
            for item in call.items:
                self._called[item].discard(call.worker[:2])

    def _accept(self, items: list[Item], value: Any) -> None:
        """Answers of two workers may overlap: a new answer replaces those it contains, else it is dropped."""
        if all(item not in self._open for item in items):
            return
        overlapping = [each for each in self._given if not set(each[0]).isdisjoint(items)]
        if all(set(each[0]) <= set(items) for each in overlapping):
            self._given = [each for each in self._given if each not in overlapping]
            self._given.append((items, value))
            for item in items:
                self._open.pop(item, None)

    def _failed_everywhere(self) -> dict[Item, RagspecError]:
        """Items that every worker has failed."""
        alive = self._pool.alive()
        if not alive or (self._policy.wait_for_lost and len(alive) < len(self._pool.names)):
            return {}
        running = {item for call in self._calls.values() for item in call.items}
        return {
            item: self._errors[item]
            for item in self._open
            if item not in running
            and item in self._errors
            and all(worker[:2] in self._called[item] for worker in alive)
        }

    def _timeout_error(self, item: Item) -> RagspecError:
        self._pool.check_open()
        if item in self._errors:
            return self._errors[item]
        waited = f"within {self._policy.timeout_s:g} s"
        if not self._called[item]:
            return RetrievalError(f"{self._pool.what} is lost: none came to life {waited}")
        return RetrievalError(f"{self._pool.what} did not answer {waited}")

    def _error(self, verb: str, error: RayError) -> RetrievalError:
        failed = RetrievalError(f"{self._pool.what} {verb}: {last_line(error)}")
        failed.__cause__ = error.with_traceback(None)  # Why: its frames would keep the caller's generation on lease
        return failed

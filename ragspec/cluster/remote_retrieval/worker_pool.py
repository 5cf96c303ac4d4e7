"""Interchangeable actors as one client sees them, and calls that any of them can answer.

A call that fails, is lost with its worker or is late goes to another worker; it ends in time, with an answer or with an error
that names the loss. It never matters which worker answers, because each call carries all its input. A worker that was lost or
late is not called again until it answers a health check. Workers that nobody calls are checked too: a second copy of a shard may
hang for hours before the first is lost.

    >>> policy = RetryPolicy(timeout_s=9.0, late_s=2.0)
    >>> pool = WorkerPool(deployment.replicas_of("shard"), what="a shard of the index")
    >>> send = lambda actor, names: actor.search.remote(...)
    >>> answers, errors = HedgedCall(pool, {"segment-1": ("shard-1", "shard-0")}, send, policy).run()
"""

import itertools
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from ragspec.cluster.actors import Replica, last_line, wait_until_healthy
from ragspec.errors import ConfigError, InputError, RagspecError, RetrievalError

Item = TypeVar("Item", bound=Hashable)
Part = TypeVar("Part")

HANG_S = 8.0
_LOOK_S = 0.1
_MAX_CALLS = 2
_CHECK_AGAIN_S = 3.0

_log = logging.getLogger(__name__)


class WorkerPool:
    """Workers of one kind. Safe to use from several threads.

    States of a worker: up -> away, when a call is lost or late or a health check is not answered -> warming, when it answers a
    health check -> up.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        what: str,
        warm: Callable[[Replica], None] | None = None,
        hang_s: float = HANG_S,
    ) -> None:
        """`what` names a worker in errors. `warm` prepares a worker that was away; until it returns, other workers are preferred.
        `hang_s`: a worker that answers no health check for so long is killed, and Ray restarts it."""
        self.what = what
        self.turns = itertools.count()
        self._closed = threading.Event()
        self._workers = {replica.name: replica for replica in replicas}
        self._states: dict[str, Literal["up", "away", "warming"]] = dict.fromkeys(self._workers, "up")
        self._warm, self._hang_s = warm, hang_s
        self._lock = threading.Lock()
        watched = weakref.ref(self), self._closed, hang_s
        threading.Thread(target=_watch, args=watched, name="ragspec-watch", daemon=True).start()

    @property
    def names(self) -> list[str]:
        """Of all workers, those that are away included: they come back under the same name."""
        return list(self._workers)

    def available(self) -> list[Replica]:
        """Workers to call; those that are still being prepared only if there is no other."""
        states = dict(self._states)
        wanted = "up" if "up" in states.values() else "warming"
        return [self._workers[name] for name, state in states.items() if state == wanted]

    def present(self) -> set[str]:
        """The names of workers that are not away."""
        return {name for name, state in list(self._states.items()) if state != "away"}

    def leave(self, worker: Replica, why: str) -> None:
        """Call others until the worker answers a health check."""
        with self._lock:
            if self._states[worker.name] == "away":
                return
            self._states[worker.name] = "away"
        _log.warning("%s: %s", worker.name, why)
        threading.Thread(target=self._recover, args=(worker,), name="ragspec-recover", daemon=True).start()

    def close(self) -> None:
        """Calls that run end with a RetrievalError; the actors live on."""
        self._closed.set()

    def check_open(self) -> None:
        """Raises: RetrievalError."""
        if self._closed.is_set() or not ray.is_initialized():
            why = "was closed" if self._closed.is_set() else "is lost: Ray was shut down"
            raise RetrievalError(f"{self.what} {why}")

    def check_health(self) -> None:
        """Workers that do not answer within `hang_s` leave. Raises: RetrievalError if the pool is closed.

        Why in slices: as `wait_for` of `ragspec.cluster.actors`.
        """
        calls = {worker.actor.ping.remote(): worker for worker in self.available()}
        for _ in range(math.ceil(self._hang_s / _LOOK_S)):
            self.check_open()
            answered = ray.wait(list(calls), num_returns=len(calls), timeout=_LOOK_S)[0] if calls else []
            for call in answered:
                del calls[call]
            if not calls:
                return
        for worker in calls.values():
            self.leave(worker, f"it answered no health check for {self._hang_s:g} s")

    def _recover(self, worker: Replica) -> None:
        """Wait until the worker answers, prepare it, then use it again. A worker that Ray does not restart stays away."""
        try:
            wait_until_healthy(worker.actor, self._hang_s, self.check_open)
        except (Exception, SystemExit):  # the latter: Ray raises it while it is shut down
            return
        self._states[worker.name] = "warming"
        try:
            if self._warm is not None:
                self._warm(worker)
        except (Exception, SystemExit) as error:
            _log.warning("%s could not be prepared: %s", worker.name, error)
        with self._lock:
            if self._states[worker.name] == "warming":
                self._states[worker.name] = "up"


def _watch(pool: Callable[[], WorkerPool | None], closed: threading.Event, interval_s: float) -> None:
    """Until the pool is closed, nobody refers to it, or Ray is shut down."""
    while not closed.is_set() and (found := pool()) is not None:
        try:
            found.check_health()
        except (RetrievalError, SystemExit):  # the latter: Ray raises it while it is shut down
            return
        except Exception:
            _log.exception("%s: a health check failed", found.what)
        del found
        closed.wait(interval_s)


class RetryPolicy(NamedTuple):
    """`timeout_s`: of the whole call. `late_s`: after it a call is late.

    `hedge`: a late call is made again, to another worker. `wait_for_lost`: wait for workers that are away, as long as there is
    time; otherwise an item is given up when every worker that is present has failed it.
    """

    timeout_s: float
    late_s: float
    hedge: bool = True
    wait_for_lost: bool = True


def call_free_workers(
    pool: WorkerPool, parts: Sequence[Part], send: Callable[[Any, Part], Any], policy: RetryPolicy
) -> list[Any]:
    """The answer to each part, which goes to any free worker in a call of its own; `send` gives the reference to a list of one
    answer. Raises: the error of the first part lost."""
    orders: dict[int, Sequence[str]] = dict.fromkeys(range(len(parts)), ())
    answers, errors = HedgedCall(pool, orders, lambda actor, numbers: send(actor, parts[numbers[0]]), policy).run()
    for error in errors.values():
        raise error
    return [answers[number] for number in orders]


@dataclass
class _Call(Generic[Item]):
    worker: Replica
    items: list[Item]
    check_at: float
    is_late: bool = False


class HedgedCall(Generic[Item]):
    """One call for many items, each of which any worker can answer.

    Calls the first available worker of each item's order, then the others. `send` calls an actor for some items and gives Ray's
    reference to the list of their answers. Items for the same worker share a call; an item with an empty order gets a call of its
    own, to whichever worker is free.
    """

    def __init__(
        self,
        pool: WorkerPool,
        orders: Mapping[Item, Sequence[str]],
        send: Callable[[Any, list[Item]], Any],
        policy: RetryPolicy,
    ) -> None:
        self._pool, self._orders, self._send, self._policy = pool, orders, send, policy
        self._deadline = time.monotonic() + policy.timeout_s
        self._open = dict.fromkeys(orders)
        self._called: dict[Item, set[str]] = {item: set() for item in orders}
        self._alone: set[Item] = {item for item, order in orders.items() if not order}
        self._errors: dict[Item, RagspecError] = {}
        self._calls: dict[Any, _Call[Item]] = {}
        self._answers: dict[Item, Any] = {}

    def run(self) -> tuple[dict[Item, Any], dict[Item, RagspecError]]:
        """The answer of each item, and the error of each item without an answer.

        Raises: InputError or ConfigError of an actor's code; RetrievalError if the pool was closed.
        """
        failed: dict[Item, RagspecError] = {}
        while self._open and time.monotonic() < self._deadline:
            self._pool.check_open()
            self._start_calls()
            for item in self._failed_everywhere():
                failed[item] = self._errors[item]
                del self._open[item]
            if self._open:
                self._wait()
        return self._answers, failed | {item: self._timeout_error(item) for item in self._open}

    def _start_calls(self) -> None:
        available = self._pool.available()
        busy = {call.worker.name for call in self._calls.values()}
        groups: dict[tuple[str, Item | None], tuple[Replica, list[Item]]] = {}
        for item in self._open:
            worker = self._next_worker(item, available, busy) if self._is_due(item) else None
            if worker is not None:
                self._called[item].add(worker.name)
                busy.add(worker.name)
                key = worker.name, item if item in self._alone else None
                groups.setdefault(key, (worker, []))[1].append(item)
        for worker, items in groups.values():
            self._calls[self._send(worker.actor, items)] = _Call(worker, items, time.monotonic() + self._policy.late_s)

    def _is_due(self, item: Item) -> bool:
        """Whether no call for it runs, or only a late one."""
        running = [call for call in self._calls.values() if item in call.items]
        is_hedged = self._policy.hedge and len(running) < _MAX_CALLS
        return not running or (is_hedged and all(call.is_late for call in running))

    def _next_worker(self, item: Item, available: Sequence[Replica], busy: set[str]) -> Replica | None:
        order = self._orders[item]
        fresh = [worker for worker in available if worker.name not in self._called[item]]
        if order:
            rank = {name: number for number, name in enumerate(order)}
            return min(fresh, key=lambda worker: rank.get(worker.name, len(rank)), default=None)
        free = [worker for worker in fresh if worker.name not in busy]
        return free[next(self._pool.turns) % len(free)] if free else None

    def _wait(self) -> None:
        """Until a call is answered or late, or a moment has passed."""
        now = time.monotonic()
        for call in self._calls.values():
            if call.check_at <= now:
                call.is_late, call.check_at = True, now + max(self._policy.late_s, _CHECK_AGAIN_S)
                self._pool.leave(call.worker, "it is late")
        left_s = max(0.0, min(self._deadline - now, _LOOK_S))
        if not self._calls:
            time.sleep(left_s)
            return
        answered, _ = ray.wait(list(self._calls), timeout=left_s)
        for reference in answered:
            self._take(self._calls.pop(reference), reference)

    def _take(self, call: _Call[Item], reference: Any) -> None:
        try:
            answers = ray.get(reference)
        except RayTaskError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, InputError | ConfigError):
                raise cause from None
            self._fail(call, cause if isinstance(cause, RagspecError) else self._error("failed", error))
        except RayError as error:
            self._pool.leave(call.worker, f"a call was lost: {last_line(error)}")
            self._errors |= dict.fromkeys(call.items, self._error("is lost", error))
            self._forget(call)
        else:
            for item, answer in zip(call.items, answers, strict=True):
                if item in self._open:
                    self._answers[item] = answer
                    del self._open[item]

    def _fail(self, call: _Call[Item], error: RagspecError) -> None:
        """Items that failed together are tried again one by one: only the faulty item fails."""
        self._errors |= dict.fromkeys(call.items, error)
        if len(call.items) > 1:
            self._alone |= set(call.items)
            self._forget(call)

    def _forget(self, call: _Call[Item]) -> None:
        """The worker may be called again for these items."""
        for item in call.items:
            self._called[item].discard(call.worker.name)

    def _failed_everywhere(self) -> list[Item]:
        """Items that every worker has failed."""
        present = self._pool.present()
        if not present or (self._policy.wait_for_lost and len(present) < len(self._pool.names)):
            return []
        running = {item for call in self._calls.values() for item in call.items}
        waiting = [item for item in self._open if item in self._errors and item not in running]
        return [item for item in waiting if present <= self._called[item]]

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

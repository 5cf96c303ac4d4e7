"""How many threads the kernels use. The count changes speed, never a bit of a result (the self-test compares).

Under OpenMP every computing thread has workers of its own. Once a process has more workers than processors, all workers sleep
between two products instead of spinning, which doubles the time of a small model's step. So only the engine's thread keeps
workers; all other computations run in threads that end together with their workers (`run_in_thread`), or have none
(`compute_threads`).

Beside another busy program, workers that wait for each other can lose a hundredfold (measured: a step of 250 ms instead of 2.5
beside a training run on two cores). No signal announces such load, so `AdaptiveThreads` keeps measuring.
"""

import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_FIRST_TRIAL = 1
_LEAST_BETWEEN_TRIALS = 32
_TRIAL_SHARE = 0.01
_DEAR = 1.5
"""A forward of more than so many average forwards is no trial: reading a prompt takes as long as twenty tokens."""
_CLEARLY, _BY_FAR = 0.8, 0.25
_WINS = 2
"""A trial wins below this share of the usual time; two wins in a row change the count, or a single win by far."""
_STEP_WEIGHT = 0.2
_BEGIN_S = 60.0
"""Threads that have not begun after this never will."""


def num_processors() -> int:
    """Processors this process may use."""
    return max(1, len(os.sched_getaffinity(0)))


def set_num_threads(num_threads: int) -> None:
    """Set the count of the calling thread: OpenMP keeps one count for each thread, and compiled steps use it too."""
    torch.get_num_threads()  # Why: a thread's first product takes the count that any thread set last, unless this has been asked
    torch.set_num_threads(num_threads)


class AdaptiveThreads:
    """Chooses all threads or one, whichever has lately been faster for forwards of the same size. Used by one engine thread.

    Now and then a forward that takes no longer than most tries the other count. The more a trial loses, the later is the next,
    so that trials cost about one hundredth of the time. A forward that suddenly takes twice as long triggers a trial. `most`
    None: all processors. Without `adaptive` the first count stays.
    """

    def __init__(
        self,
        most: int | None,
        first: int | None = None,
        apply: Callable[[int], None] = set_num_threads,
        *,
        adaptive: bool = True,
    ) -> None:
        self._apply = apply
        most = most or num_processors()
        self._current, self._other = (1, most) if first == 1 else (most, 1)
        if not adaptive:
            self._other = self._current
        self._trying = False
        self._steps_left, self._seconds_left = _FIRST_TRIAL, 0.0  # until the next trial
        self._is_alarmed = False
        self._wins = 0
        self._seconds: dict[int, float] = {}  # by size: a running mean, with the current count
        self._average_s = 0.0  # of forwards of any size

    def begin(self, num_rows: int) -> None:
        """Call before a forward of so many rows: sets the thread count."""
        usual = self._seconds.get(_size(num_rows), math.inf)
        is_due = self._is_alarmed or (self._steps_left <= 0 and self._seconds_left <= 0)
        self._trying = is_due and usual <= _DEAR * self._average_s and self._other != self._current
        self._apply(self._other if self._trying else self._current)

    def end(self, num_rows: int, seconds: float) -> None:
        """Call after the forward, with its seconds."""
        self._steps_left -= 1
        self._seconds_left -= seconds
        self._average_s += _STEP_WEIGHT * (seconds - self._average_s) if self._average_s else seconds
        if self._trying:
            self._apply(self._current)
            self._judge(self._seconds[_size(num_rows)], seconds)
            return
        usual = self._seconds.get(_size(num_rows))
        self._is_alarmed = usual is not None and seconds > 2 * usual
        self._seconds[_size(num_rows)] = seconds if usual is None else usual + _STEP_WEIGHT * (seconds - usual)

    def _judge(self, usual: float, seconds: float) -> None:
        self._is_alarmed = False
        if seconds > _CLEARLY * usual:
            self._wins = 0
            lost_s = max(0.0, seconds - usual)
            self._seconds_left = lost_s / _TRIAL_SHARE
            self._steps_left = max(_LEAST_BETWEEN_TRIALS, round(lost_s / usual / _TRIAL_SHARE))
            return
        self._wins += _WINS if seconds < _BY_FAR * usual else 1
        self._steps_left, self._seconds_left = 1, 0.0
        if self._wins >= _WINS:
            self._current, self._other = self._other, self._current
            self._wins, self._seconds = 0, {}
            self._steps_left = _LEAST_BETWEEN_TRIALS


def _size(num_rows: int) -> int:
    """Equal for numbers of rows that take about as long."""
    return round(4 * math.log2(num_rows))


def run_in_thread(call: Callable[[], T], num_threads: int) -> T:
    """Run `call` in a thread of its own that ends with it. Returns its result, raises its exception."""

    def run() -> T:
        set_num_threads(num_threads)
        return call()

    with ThreadPoolExecutor(1, "ragspec-compute") as thread:
        return thread.submit(run).result()


def compute_threads(num_threads: int) -> ThreadPoolExecutor:
    """Threads that compute side by side, each with one thread inside its products. They stay, with the caller's priority.

    A call in one of them must not wait for another of them.
    """
    return _compute_threads(num_threads, os.getpriority(os.PRIO_PROCESS, 0))  # on Linux that of the calling thread


@lru_cache
def _compute_threads(num_threads: int, niceness: int) -> ThreadPoolExecutor:
    return started_threads(num_threads, "ragspec-compute", set_num_threads, (1,))  # as nice as their creator


os.register_at_fork(after_in_child=_compute_threads.cache_clear)  # a fork has none of its parent's threads


def started_threads(
    num_threads: int, name: str, initializer: Callable[..., None] | None = None, initargs: tuple[Any, ...] = ()
) -> ThreadPoolExecutor:
    """A pool whose threads all run when this returns. Raises: RuntimeError if the system starts no more threads.

    Why: if memory runs out, a new thread can die before it runs, and `Thread.start` then waits for it for ever.
    """
    threads = ThreadPoolExecutor(num_threads, name, initializer, initargs)
    everyone_runs = threading.Barrier(num_threads + 1, timeout=_BEGIN_S)
    try:
        for _ in range(num_threads):
            threads.submit(everyone_runs.wait)
        everyone_runs.wait()
    except BaseException:
        everyone_runs.abort()  # else its threads, and so the process, would never end
        threads.shutdown(wait=False)
        raise
    return threads

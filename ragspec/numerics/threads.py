"""How many threads the kernels use. The count changes speed, never a bit of a result (the self-test compares).

Every thread that computes has workers of its own under OpenMP, and once a process has more of them than processors, all of
them sleep between two products instead of waiting for the next one: twice the time of a small model's step. So the engine's
thread is the only one that keeps workers; everything else computes in a thread that ends, and its workers with it.

Where another program wants the processors, workers that wait for each other lose a hundredfold (measured: a step of 250 ms
instead of 2.5 beside a training run on two cores). Nothing announces that, so `AdaptiveThreads` keeps trying.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from typing import TypeVar

import numba
import torch

T = TypeVar("T")

_FIRST_TRIAL = 1
_LEAST_BETWEEN_TRIALS = 32
_TRIAL_SHARE = 0.01
_CLEARLY, _BY_FAR = 0.8, 0.25
_WINS = 2
"""A trial wins when it takes less than this part of the usual time; two wins in a row change the count, or one by far."""
_STEP_WEIGHT = 0.2


def num_processors() -> int:
    """Processors this process may use."""
    return max(1, len(os.sched_getaffinity(0)))


def set_num_threads(num_threads: int) -> None:
    """For the calling thread: the OpenMP libraries under torch and numba keep the count for each thread apart."""
    torch.set_num_threads(num_threads)
    numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))


class AdaptiveThreads:
    """All threads or one, whichever has lately been faster for forwards of the same size; of one thread, for one engine.

    Now and then a forward runs with the other count. A trial that loses is paid for before the next: together they take about
    one part in a hundred of the time. A forward that suddenly takes twice as long brings the next trial forward.
    `most` None: all processors. Not `adaptive`: always the first count.
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
        self._steps_left = _FIRST_TRIAL
        self._wins = 0
        self._seconds: dict[int, float] = {}  # by size: a running mean, with the current count

    def begin(self) -> None:
        """Before a forward."""
        self._trying = self._steps_left <= 0 and self._other != self._current
        self._apply(self._other if self._trying else self._current)

    def end(self, num_rows: int, seconds: float) -> None:
        """After it, with what it took."""
        size = round(4 * math.log2(num_rows))
        usual = self._seconds.get(size)
        self._steps_left -= 1
        if self._trying:
            self._apply(self._current)
            self._judge(usual, seconds)
            return
        if usual is not None and seconds > 2 * usual:
            self._steps_left = 0
        self._seconds[size] = seconds if usual is None else usual + _STEP_WEIGHT * (seconds - usual)

    def _judge(self, usual: float | None, seconds: float) -> None:
        if usual is None:  # nothing to compare with: take turns until there is
            self._steps_left = 1
            return
        if seconds > _CLEARLY * usual:
            self._wins = 0
            lost_steps = max(0.0, seconds / usual - 1)
            self._steps_left = max(_LEAST_BETWEEN_TRIALS, round(lost_steps / _TRIAL_SHARE))
            return
        self._wins += _WINS if seconds < _BY_FAR * usual else 1
        self._steps_left = 1
        if self._wins >= _WINS:
            self._current, self._other = self._other, self._current
            self._wins, self._seconds = 0, {}
            self._steps_left = _LEAST_BETWEEN_TRIALS


def run_in_thread(call: Callable[[], T], num_threads: int) -> T:
    """Run `call` in a thread of its own that ends with it; its result or its exception is the caller's."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            set_num_threads(num_threads)
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="ragspec-compute")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]

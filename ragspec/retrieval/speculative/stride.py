"""How many retrievals to guess before they are verified, from what is measured while answers are written.

Stride 1 without overlap is no speculation at all: that is what is chosen where the best of the others would gain too little.
`ragspec.retrieval.speculative.stride_costs` has the formulas.

    >>> scheduler = StrideScheduler(StrideConfig(), asynchronous=True)
    >>> plan = scheduler.choose()       # then tell it what happened: note_step, note_verification, note_guesses

Source: Zhang et al. 2024 (arXiv 2401.14021), section 4.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import mean, median

from ragspec.config import StrideConfig
from ragspec.retrieval.speculative.stride_costs import (
    NEVER_PAYS,
    NO_SPECULATION,
    ONE_REQUEST,
    Concurrency,
    StrideCosts,
    StridePlan,
    StrideTiming,
    best_plan,
)

_APART_AT_MOST = 512
_LEAST_BESIDE = 8
"""Steps beside verifications that must have been timed before they are believed to be slower than others."""
_LOOKED_OVER_EVERY = 4


class StrideScheduler:
    """Chooses from what it is told; shared by all requests of one index. Safe to call from several threads."""

    def __init__(self, config: StrideConfig | None = None, *, asynchronous: bool = True) -> None:
        self._config = config or StrideConfig()
        self._asynchronous = asynchronous
        window = self._config.window
        self._steps_s: deque[float] = deque(maxlen=window)
        self._verifications: deque[tuple[int, float]] = deque(maxlen=window)  # of one query
        self._batches: deque[tuple[int, float]] = deque(
            maxlen=window
        )  # of more: apart, or singles would drive them out
        self._writing: deque[tuple[float, float]] = deque(maxlen=window)  # how many at once, seconds
        self._in_flight: deque[int] = deque(maxlen=window)
        self._steps_beside_s: deque[float] = deque(maxlen=window)
        self._verifications_beside: deque[tuple[int, float]] = deque(maxlen=window)
        self._num_apart = 0  # verifications since the last one beside decoding
        self._guesses: deque[tuple[int, int]] = deque(maxlen=window)
        self._chosen: StridePlan | None = None
        self._num_new = 0  # verifications since it was chosen
        self._lock = threading.RLock()

    def note_step(
        self, seconds: float, beside: bool = False, *, num_writing: float = 1.0, num_in_flight: int = 1
    ) -> None:
        """A step took so long; `beside` a verification, and together with so many others, itself counted."""
        with self._lock:
            (self._steps_beside_s if beside else self._steps_s).append(seconds)
            self._writing.append((num_writing, seconds))
            self._in_flight.append(num_in_flight)

    def note_verification(self, num_queries: int, seconds: float, beside: bool = False) -> None:
        """One lookup of some queries took so long; `beside` decoding.

        What decoding beside it costs is tried again after some hundred without: the machine may be another's no more.
        """
        with self._lock:
            waiting = self._verifications if num_queries == 1 else self._batches
            (self._verifications_beside if beside else waiting).append((num_queries, seconds))
            self._num_new += 1
            self._num_apart = 0 if beside else self._num_apart + 1
            if self._num_apart >= _APART_AT_MOST:
                self._steps_beside_s.clear()
                self._verifications_beside.clear()
                self._num_apart = 0

    def note_guesses(self, num_right: int, num_wrong: int) -> None:
        """Of one round: the guesses up to the first wrong one, and 1 if there was one."""
        with self._lock:
            self._guesses.append((num_right, num_wrong))

    @property
    def gamma(self) -> float:
        """The likeliest chance of a right guess, at most `gamma_max`; 0 before the first guess.

        Half a success and half a failure in advance (Jeffreys' prior) keep a few lucky guesses from being taken for certainty.
        """
        with self._lock:
            right = sum(some for some, _ in self._guesses)
            wrong = sum(some for _, some in self._guesses)
        return min(self._config.gamma_max, (right + 0.5) / (right + wrong + 1.0)) if right + wrong else 0.0

    def costs(self) -> StrideCosts | None:
        """None before the first step and the first verification."""
        with self._lock:
            apart = _timing(self._steps_s, [*self._verifications, *self._batches])
            beside = None
            if min(len(self._steps_beside_s), len(self._verifications_beside)) >= _LEAST_BESIDE:
                beside = _timing(self._steps_beside_s, self._verifications_beside)
            crowd = _crowd(self._writing, self._in_flight)
            return StrideCosts(apart, self.gamma, beside, crowd) if apart is not None else None

    def choose(self) -> StridePlan:
        """The plan of the next round; looked over after every few verifications."""
        with self._lock:
            if self._chosen is None or self._num_new >= _LOOKED_OVER_EVERY:
                self._chosen, self._num_new = self._best(), 0
            return self._chosen or NO_SPECULATION

    def _best(self) -> StridePlan | None:
        costs, least = self.costs(), 1.0 + self._config.least_gain
        if costs is None:
            return None
        if self._plan(replace(costs, gamma=self._config.gamma_max)).gain < least:
            return NEVER_PAYS
        if costs.gamma == 0.0:
            return None
        plan = self._plan(costs)
        return plan if plan.gain >= least else NO_SPECULATION

    def _plan(self, costs: StrideCosts) -> StridePlan:
        """The fixed stride, or the best, whether it pays or not."""
        if (stride := self._config.stride) is not None:
            overlap = self._overlap(costs.gamma, stride)
            return StridePlan(stride, overlap, costs.gain(stride, overlap))
        beside = best_plan(costs, self._config.max_stride, lambda stride: self._overlap(costs.gamma, stride))
        waiting = best_plan(costs, self._config.max_stride, lambda _: 0)
        return beside if beside.gain > waiting.gain else waiting

    def _overlap(self, gamma: float, stride: int) -> int:
        """Steps worth taking beside the verification of `stride` guesses, one at least: the i-th stands if those and i - 1 more
        are right."""
        if not self._asynchronous:
            return 0
        return max(1, sum(gamma ** (stride + i) >= self._config.least_survival for i in range(stride)))


def _timing(steps_s: Sequence[float], verifications: Sequence[tuple[int, float]]) -> StrideTiming | None:
    """Medians: what is rare and slow (a compilation, another program) must not hide the rest."""
    return StrideTiming(median(steps_s), _by_size(verifications)) if steps_s and verifications else None


def _crowd(writing: Sequence[tuple[float, float]], in_flight: Sequence[int]) -> Concurrency:
    if not in_flight or max(in_flight) == 1:
        return ONE_REQUEST
    seconds, slope, numbers = _line(writing)
    alone_s = max(seconds / 64, seconds - slope * (numbers - 1.0))
    return Concurrency(mean(in_flight), min(1.0, slope / alone_s), numbers)


def _by_size(timed: Sequence[tuple[int, float]]) -> Callable[[int], float]:
    """Seconds by size, on a line; never less than half of what was ever seen."""
    seconds, slope, sizes = _line(timed)
    least = min(seconds for _, seconds in timed) / 2
    return lambda size: max(least, seconds + slope * (size - sizes))


def _line(timed: Iterable[tuple[float, float]]) -> tuple[float, float, float]:
    """The line through the usual seconds of each size, which never falls: seconds of the mean size, its slope, that size."""
    by_size: dict[float, list[float]] = {}
    for size, seconds in timed:
        by_size.setdefault(size, []).append(seconds)
    points = [(size, median(times), len(times)) for size, times in by_size.items()]
    weight = sum(count for _, _, count in points)
    mean_size = sum(size * count for size, _, count in points) / weight
    mean_s = sum(seconds * count for _, seconds, count in points) / weight
    spread = sum(count * (size - mean_size) ** 2 for size, _, count in points)
    rise = sum(count * (size - mean_size) * (seconds - mean_s) for size, seconds, count in points)
    return mean_s, max(0.0, rise / spread) if spread else 0.0, mean_size

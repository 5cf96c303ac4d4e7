"""The stride scheduler: how many retrievals to guess per verification, from times measured while answers are written.

A step decodes under one retrieval. `a` is the time of a step, `b(s)` the time to verify s retrievals at once, and `gamma` the
probability of a right guess. A round is s steps, the first under a verified document, and one verification. It verifies

    1 + gamma + ... + gamma^(s - 1)   documents on average, in
    s a + b(s)                        seconds if decoding waits for the verification, and if it goes on for o steps meanwhile in
    gamma^s ((s - o) a + max(o a, b(s))) + (1 - gamma^s) (s a + b(s)).

The paper's asynchronous objective is o = 1; here decoding goes on while its text is likely enough to stand. `Concurrency` extends
the paper: it models other answers that are written at the same time. Stride 1 without overlap means no speculation. The scheduler
chooses it if every other plan would gain too little.

    >>> best_plan(StrideCosts(StrideTiming(1.0, lambda _: 40.0), gamma=0.8), 32, lambda _: 0).stride
    11
    >>> scheduler = StrideScheduler(asynchronous=True)
    >>> plan = scheduler.choose()       # then report: note_step, note_verification, note_guesses

Source: Zhang et al. 2024, Accelerating Retrieval-Augmented Language Model Serving with Speculation (arXiv 2401.14021), section 4
and appendix A.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Literal, NamedTuple

_TURNS = 24


class StridePlan(NamedTuple):
    """`stride` guesses a verification, `overlap` steps beside it; `gain`: predicted speed against no speculation.

    `learns` False: even perfect guesses would not pay, so measuring the hit rate is useless.
    """

    stride: int = 1
    overlap: int = 0
    gain: float = 1.0
    learns: bool = True


NO_SPECULATION = StridePlan()
NEVER_PAYS = StridePlan(learns=False)


def verified_documents(gamma: float, stride: int) -> float:
    """Documents that one round verifies on average."""
    return float(stride) if gamma == 1.0 else (1.0 - gamma**stride) / (1.0 - gamma)


class StrideTiming(NamedTuple):
    """Seconds of one step, and of one verification by its number of queries."""

    step_s: float
    verification_s: Callable[[int], float]


class Concurrency(NamedTuple):
    """`num_in_flight` answers at a time. Each step that runs beside a step lengthens it by the factor `slowdown`: 0 if decoding
    together costs nothing, 1 if it saves nothing. `num_writing`: steps that ran at once on average when steps were timed."""

    num_in_flight: float = 1.0
    slowdown: float = 0.0
    num_writing: float = 1.0

    def factor(self, num_writing: float) -> float:
        """The time of a step among `num_writing` steps, relative to the measured time."""
        seen = 1.0 + self.slowdown * (self.num_writing - 1.0)
        return (1.0 + self.slowdown * max(0.0, num_writing - 1.0)) / seen


ONE_REQUEST = Concurrency()


@dataclass(frozen=True, slots=True)
class StrideCosts:
    """Measured times: `apart` when decoding waits for verifications, `beside` when both run and may share processors; None: not
    measured. `gamma`: the probability of a right guess.

    While one answer waits, others are written. So with concurrent requests waiting costs less, and discarded steps cost more.
    """

    apart: StrideTiming
    gamma: float
    beside: StrideTiming | None = None
    crowd: Concurrency = ONE_REQUEST

    def round_s(self, stride: int, overlap: int) -> float:
        """Average seconds of one round with `overlap` steps during the verification."""
        factor = 1.0
        seconds = self._round_s(stride, overlap, factor)
        for _ in range(_TURNS if self.crowd.num_in_flight > 1.0 and self.crowd.slowdown else 0):
            writing = self.crowd.num_in_flight * stride * factor * self.apart.step_s / seconds
            factor = self.crowd.factor(writing)
            # Why the geometric mean: plain iteration may oscillate
            seconds = (seconds * self._round_s(stride, overlap, factor)) ** 0.5
        return seconds

    def _round_s(self, stride: int, overlap: int, factor: float) -> float:
        step_s = factor * self.apart.step_s
        if not overlap:
            return stride * step_s + self.apart.verification_s(stride)
        beside = self.beside or self.apart
        verification_s, success = beside.verification_s(stride), self.gamma**stride
        together_s = (stride - overlap) * step_s + max(overlap * factor * beside.step_s, verification_s)
        return success * together_s + (1.0 - success) * (stride * step_s + verification_s)

    def gain(self, stride: int, overlap: int) -> float:
        """Verified documents per second, relative to no speculation."""
        return verified_documents(self.gamma, stride) * self.round_s(1, 0) / self.round_s(stride, overlap)


def best_plan(costs: StrideCosts, max_stride: int, overlap_of: Callable[[int], int]) -> StridePlan:
    """The stride with the greatest gain. The gain has one peak, so the search ends behind it.

    `overlap_of`: steps during the verification, by stride.
    """
    best = StridePlan(1, overlap_of(1), costs.gain(1, overlap_of(1)))
    for stride in range(2, max_stride + 1):
        gain = costs.gain(stride, overlap_of(stride))
        if gain < best.gain:
            break
        best = StridePlan(stride, overlap_of(stride), gain)
    return best


_APART_AT_MOST = 512
_LEAST_BESIDE = 8
"""Overlapped steps, and overlapped verifications, to time before their times are used."""
_LOOKED_OVER_EVERY = 4
WINDOW = 64
"""Recent steps and rounds that the estimates use."""
GAMMA_MAX = 0.97
"""The greatest probability of a right guess that is assumed."""
MAX_STRIDE = 32
_LEAST_GAIN = 0.03
"""Speculation is off while its predicted gain is smaller."""
_LEAST_SURVIVAL = 0.25
"""While a verification runs, decoding continues as long as its text stands with at least this probability."""


class StrideScheduler:
    """Chooses plans from measured times and hit rates. Shared by all requests of one index. Safe to call from several threads."""

    def __init__(self, stride: int | None = None, *, asynchronous: bool = True, window: int = WINDOW) -> None:
        """`stride`: a fixed one; None: the best one. `asynchronous`: decoding may continue during verification."""
        self._stride, self._asynchronous = stride, asynchronous
        self._steps_s: deque[float] = deque(maxlen=window)
        self._verifications: deque[tuple[int, float]] = deque(maxlen=window)  # of one query
        # of several queries; kept apart, or single queries would push them out
        self._batches: deque[tuple[int, float]] = deque(maxlen=window)
        self._writing: deque[tuple[float, float]] = deque(maxlen=window)  # (steps at once, seconds)
        self._in_flight: deque[int] = deque(maxlen=window)
        self._steps_beside_s: deque[float] = deque(maxlen=window)
        self._verifications_beside: deque[tuple[int, float]] = deque(maxlen=window)
        self._num_apart = 0  # verifications since the last overlapped verification
        self._guesses: deque[tuple[int, int]] = deque(maxlen=window)
        self._chosen: StridePlan | None = None
        self._num_new = 0  # verifications since it was chosen
        self._counts = Counter[str]()
        self._lock = threading.RLock()

    def count(self, name: Literal["in_flight", "writing"], change: int) -> int:
        """Answers in flight, or answers that decode at the moment, after the change."""
        with self._lock:
            self._counts[name] += change
            return self._counts[name]

    def note_step(
        self, seconds: float, beside: bool = False, *, num_writing: float = 1.0, num_in_flight: int = 1
    ) -> None:
        """Record the time of a step. `beside`: during a verification. `num_writing`: steps at once, this step included."""
        with self._lock:
            (self._steps_beside_s if beside else self._steps_s).append(seconds)
            self._writing.append((num_writing, seconds))
            self._in_flight.append(num_in_flight)

    def note_verification(self, num_queries: int, seconds: float, beside: bool = False) -> None:
        """Record the time of one verification. `beside`: during decoding.

        After some hundred verifications without overlap, the times of overlapped ones are dropped: other load may have ended.
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
        """Record one round: right guesses before the first wrong guess, and 1 if there was a wrong guess."""
        with self._lock:
            self._guesses.append((num_right, num_wrong))

    @property
    def gamma(self) -> float:
        """The estimated probability of a right guess, at most `GAMMA_MAX`; 0 before the first guess.

        Jeffreys' prior, half a success and half a failure, keeps a few lucky guesses from counting as certainty.
        """
        with self._lock:
            right = sum(some for some, _ in self._guesses)
            wrong = sum(some for _, some in self._guesses)
        return min(GAMMA_MAX, (right + 0.5) / (right + wrong + 1.0)) if right + wrong else 0.0

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
        """The plan of the next round. Recomputed after every few verifications."""
        with self._lock:
            if self._chosen is None or self._num_new >= _LOOKED_OVER_EVERY:
                self._chosen, self._num_new = self._best(), 0
            return self._chosen or NO_SPECULATION

    def _best(self) -> StridePlan | None:
        costs, least = self.costs(), 1.0 + _LEAST_GAIN
        if costs is None:
            return None
        if self._plan(replace(costs, gamma=GAMMA_MAX)).gain < least:
            return NEVER_PAYS
        if costs.gamma == 0.0:
            return None
        plan = self._plan(costs)
        return plan if plan.gain >= least else NO_SPECULATION

    def _plan(self, costs: StrideCosts) -> StridePlan:
        """The configured stride, or the best stride, even if it does not pay."""
        if (stride := self._stride) is not None:
            overlap = self._overlap(costs.gamma, stride)
            return StridePlan(stride, overlap, costs.gain(stride, overlap))
        beside = best_plan(costs, MAX_STRIDE, lambda stride: self._overlap(costs.gamma, stride))
        waiting = best_plan(costs, MAX_STRIDE, lambda _: 0)
        return beside if beside.gain > waiting.gain else waiting

    def _overlap(self, gamma: float, stride: int) -> int:
        """Steps worth taking during the verification of `stride` guesses, at least one: the i-th step stands if those guesses and
        i - 1 more are right."""
        if not self._asynchronous:
            return 0
        return max(1, sum(gamma ** (stride + i) >= _LEAST_SURVIVAL for i in range(stride)))


def _timing(steps_s: Sequence[float], verifications: Sequence[tuple[int, float]]) -> StrideTiming | None:
    """Medians: rare slow steps (a compilation, another program) must not hide the others."""
    return StrideTiming(median(steps_s), _by_size(verifications)) if steps_s and verifications else None


def _crowd(writing: Sequence[tuple[float, float]], in_flight: Sequence[int]) -> Concurrency:
    if not in_flight or max(in_flight) == 1:
        return ONE_REQUEST
    seconds, slope, numbers = _line(writing)
    alone_s = max(seconds / 64, seconds - slope * (numbers - 1.0))
    return Concurrency(mean(in_flight), min(1.0, slope / alone_s), numbers)


def _by_size(timed: Sequence[tuple[int, float]]) -> Callable[[int], float]:
    """Seconds by size, on a line; at least half of the shortest measured time."""
    seconds, slope, sizes = _line(timed)
    least = min(seconds for _, seconds in timed) / 2
    return lambda size: max(least, seconds + slope * (size - sizes))


def _line(timed: Iterable[tuple[float, float]]) -> tuple[float, float, float]:
    """A rising line through the median seconds of each size: seconds at the mean size, slope, and the mean size."""
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

"""How many retrievals to guess before they are verified: OS3, RaLMSpec's optimal speculation stride scheduler.

A step decodes under one retrieval; `a` is its time and `b(s)` that of verifying s retrievals at once, `gamma` the chance that a
guess is right. A round is s steps, the first under a verified document, and one verification; it verifies

    1 + gamma + ... + gamma^(s - 1)   documents on average, in
    s a + b(s)                        seconds if decoding waits for the verification, and if it goes on for o steps meanwhile in
    gamma^s ((s - o) a + max(o a, b(s))) + (1 - gamma^s) (s a + b(s)).

The paper's asynchronous objective is o = 1; here decoding goes on as long as what it writes is likely enough to stand. Stride 1
without overlap is no speculation at all: that is what is chosen where the best of the others would gain too little.

    >>> scheduler = StrideScheduler(StrideConfig(), asynchronous=True)
    >>> plan = scheduler.choose()       # then tell it what happened: note_step, note_verification, note_guesses

Source: Zhang et al. 2024, Accelerating Iterative Retrieval-augmented Language Model Serving with Speculation (arXiv 2401.14021),
section 4 and appendix A.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from ragspec.config import StrideConfig

_APART_AT_MOST = 512
_LEAST_BESIDE = 8
"""Steps beside verifications that must have been timed before they are believed to be slower than others."""
_LOOKED_OVER_EVERY = 4


class Plan(NamedTuple):
    """`stride` guesses a verification, `overlap` steps beside it; `gain`: predicted speed against no speculation.

    Not `learns`: even guesses that are always right would not pay, so there is no use in finding out how often they are.
    """

    stride: int = 1
    overlap: int = 0
    gain: float = 1.0
    learns: bool = True

    @property
    def speculates(self) -> bool:
        return self.stride > 1 or self.overlap > 0


OFF = Plan()
HOPELESS = Plan(learns=False)


def verified_documents(gamma: float, stride: int) -> float:
    """Documents that one round verifies, on average; `gamma` is less than 1."""
    return (1.0 - gamma**stride) / (1.0 - gamma)


class Timing(NamedTuple):
    """Seconds of one step, and of one verification by the number of its queries."""

    step_s: float
    verification_s: Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Costs:
    """What was measured: `apart`, when decoding waits for verifications; `beside`, when both go on, which may want the same
    processors; None: not known. `gamma`: the chance that a guess is right."""

    apart: Timing
    gamma: float
    beside: Timing | None = None

    def round_s(self, stride: int, overlap: int) -> float:
        """Seconds of one round on average, with `overlap` steps beside the verification; 0: none."""
        step_s = self.apart.step_s
        if not overlap:
            return stride * step_s + self.apart.verification_s(stride)
        beside = self.beside or self.apart
        verification_s, success = beside.verification_s(stride), self.gamma**stride
        together_s = (stride - overlap) * step_s + max(overlap * beside.step_s, verification_s)
        return success * together_s + (1.0 - success) * (stride * step_s + verification_s)

    def gain(self, stride: int, overlap: int) -> float:
        """Documents a second against those without speculation."""
        without_s = self.apart.step_s + self.apart.verification_s(1)
        return verified_documents(self.gamma, stride) * without_s / self.round_s(stride, overlap)


def best_plan(costs: Costs, max_stride: int, overlap_of: Callable[[int], int]) -> Plan:
    """The stride of the greatest gain, which rises to one peak, so that the search ends behind it.

    `overlap_of`: steps beside the verification, by stride.
    """
    best = Plan(1, overlap_of(1), costs.gain(1, overlap_of(1)))
    for stride in range(2, max_stride + 1):
        gain = costs.gain(stride, overlap_of(stride))
        if gain < best.gain:
            break
        best = Plan(stride, overlap_of(stride), gain)
    return best


def published_optimum(costs: Costs, max_stride: int, asynchronous: bool) -> Plan:
    """What the paper's scheduler would choose from the same measurements, and its gain."""
    return best_plan(costs, max_stride, lambda _: int(asynchronous))


class StrideScheduler:
    """Chooses from what it is told; shared by all requests of one index. Safe to call from several threads."""

    def __init__(self, config: StrideConfig | None = None, *, asynchronous: bool = True) -> None:
        self._config = config or StrideConfig()
        self._asynchronous = asynchronous
        window = self._config.window
        self._steps_s: deque[float] = deque(maxlen=window)
        self._verifications: deque[tuple[int, float]] = deque(maxlen=window)
        self._steps_beside_s: deque[float] = deque(maxlen=window)
        self._verifications_beside: deque[tuple[int, float]] = deque(maxlen=window)
        self._num_apart = 0  # verifications since the last one beside decoding
        self._guesses: deque[tuple[int, int]] = deque(maxlen=window)
        self._chosen: Plan | None = None
        self._num_new = 0  # verifications since it was chosen
        self._lock = threading.Lock()

    def note_step(self, seconds: float, beside: bool = False) -> None:
        """A step took so long; `beside` a verification."""
        with self._lock:
            (self._steps_beside_s if beside else self._steps_s).append(seconds)

    def note_verification(self, num_queries: int, seconds: float, beside: bool = False) -> None:
        """One lookup of some queries took so long; `beside` decoding.

        What decoding beside it costs is tried again after some hundred without: the machine may be another's no more.
        """
        with self._lock:
            (self._verifications_beside if beside else self._verifications).append((num_queries, seconds))
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

        Laplace's half a success and half a failure keep a few lucky guesses from being taken for certainty.
        """
        right = sum(some for some, _ in self._guesses)
        wrong = sum(some for _, some in self._guesses)
        return min(self._config.gamma_max, (right + 0.5) / (right + wrong + 1.0)) if right + wrong else 0.0

    def costs(self) -> Costs | None:
        """None before the first step and the first verification."""
        with self._lock:
            apart = _timing(self._steps_s, self._verifications)
            beside = None
            if min(len(self._steps_beside_s), len(self._verifications_beside)) >= _LEAST_BESIDE:
                beside = _timing(self._steps_beside_s, self._verifications_beside)
            return Costs(apart, self.gamma, beside) if apart is not None else None

    def choose(self) -> Plan:
        """The plan of the next round; looked over after every few verifications."""
        if self._chosen is None or self._num_new >= _LOOKED_OVER_EVERY:
            self._chosen, self._num_new = self._best(), 0
        return self._chosen or OFF

    def _best(self) -> Plan | None:
        costs, least = self.costs(), 1.0 + self._config.least_gain
        if costs is None:
            return None
        if self._plan(replace(costs, gamma=self._config.gamma_max)).gain < least:
            return HOPELESS
        if costs.gamma == 0.0:
            return None
        plan = self._plan(costs)
        return plan if plan.gain >= least else OFF

    def _plan(self, costs: Costs) -> Plan:
        """The fixed stride, or the best, whether it pays or not."""
        if (stride := self._config.stride) is not None:
            overlap = self._overlap(costs.gamma, stride)
            return Plan(stride, overlap, costs.gain(stride, overlap))
        beside = best_plan(costs, self._config.max_stride, lambda stride: self._overlap(costs.gamma, stride))
        waiting = best_plan(costs, self._config.max_stride, lambda _: 0)
        return beside if beside.gain > waiting.gain else waiting

    def _overlap(self, gamma: float, stride: int) -> int:
        """Steps worth taking beside the verification of `stride` guesses: the i-th stands if those and i - 1 more are right."""
        if not self._asynchronous:
            return 0
        return sum(gamma ** (stride + i) >= self._config.least_survival for i in range(stride))


def _timing(steps_s: Sequence[float], verifications: Sequence[tuple[int, float]]) -> Timing | None:
    """Medians: what is rare and slow (a compilation, another program) must not hide the rest."""
    return Timing(median(steps_s), _by_size(verifications)) if steps_s and verifications else None


def _by_size(verifications: Iterable[tuple[int, float]]) -> Callable[[int], float]:
    """Seconds of a verification by its size: a line through the usual times of small and large ones, never falling."""
    by_size: dict[int, list[float]] = {}
    for size, seconds in verifications:
        by_size.setdefault(size, []).append(seconds)
    points = sorted((size, median(times), len(times)) for size, times in by_size.items())
    weight = sum(count for _, _, count in points)
    mean_size = sum(size * count for size, _, count in points) / weight
    mean_s = sum(seconds * count for _, seconds, count in points) / weight
    spread = sum(count * (size - mean_size) ** 2 for size, _, count in points)
    rise = sum(count * (size - mean_size) * (seconds - mean_s) for size, seconds, count in points)
    slope = max(0.0, rise / spread) if spread else 0.0
    least = min(seconds for _, seconds, _ in points) / 2
    return lambda size: max(least, mean_s + slope * (size - mean_size))

"""The gain of speculation from the times of steps and verifications: OS3's objectives, and the best stride.

A step decodes under one retrieval. `a` is the time of a step, `b(s)` the time to verify s retrievals at once, and `gamma` the
probability of a right guess. A round is s steps, the first under a verified document, and one verification. It verifies

    1 + gamma + ... + gamma^(s - 1)   documents on average, in
    s a + b(s)                        seconds if decoding waits for the verification, and if it goes on for o steps meanwhile in
    gamma^s ((s - o) a + max(o a, b(s))) + (1 - gamma^s) (s a + b(s)).

The paper's asynchronous objective is o = 1; here decoding goes on while its text is likely enough to stand. `Concurrency` extends
the paper: it models other answers that are written at the same time.

    >>> best_plan(StrideCosts(StrideTiming(1.0, lambda _: 40.0), gamma=0.8), 32, lambda _: 0).stride
    11

Source: Zhang et al. 2024, Accelerating Iterative Retrieval-augmented Language Model Serving with Speculation (arXiv 2401.14021),
section 4 and appendix A.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

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


def paper_optimal_plan(costs: StrideCosts, max_stride: int, asynchronous: bool) -> StridePlan:
    """The plan of the paper's scheduler for the same measurements."""
    return best_plan(costs, max_stride, lambda _: int(asynchronous))

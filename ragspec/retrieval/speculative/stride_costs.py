"""What speculation gains, from what steps and verifications take: OS3's objectives, and the stride at their peak.

A step decodes under one retrieval; `a` is its time and `b(s)` that of verifying s retrievals at once, `gamma` the chance that a
guess is right. A round is s steps, the first under a verified document, and one verification; it verifies

    1 + gamma + ... + gamma^(s - 1)   documents on average, in
    s a + b(s)                        seconds if decoding waits for the verification, and if it goes on for o steps meanwhile in
    gamma^s ((s - o) a + max(o a, b(s))) + (1 - gamma^s) (s a + b(s)).

The paper's asynchronous objective is o = 1; here decoding goes on as long as what it writes is likely enough to stand. Where
other answers are written meanwhile, `Concurrency` says what that changes, which is not in the paper.

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

    Not `learns`: even guesses that are always right would not pay, so there is no use in finding out how often they are.
    """

    stride: int = 1
    overlap: int = 0
    gain: float = 1.0
    learns: bool = True

    @property
    def speculates(self) -> bool:
        return self.stride > 1 or self.overlap > 0


NO_SPECULATION = StridePlan()
NEVER_PAYS = StridePlan(learns=False)


def verified_documents(gamma: float, stride: int) -> float:
    """Documents that one round verifies, on average; `gamma` is less than 1."""
    return (1.0 - gamma**stride) / (1.0 - gamma)


class StrideTiming(NamedTuple):
    """Seconds of one step, and of one verification by the number of its queries."""

    step_s: float
    verification_s: Callable[[int], float]


class Concurrency(NamedTuple):
    """`num_in_flight` answers at a time; each step written beside another takes `slowdown` times longer for it: 0 where decoding
    together costs nothing, 1 where it saves nothing. Steps were timed with `num_writing` of them at once on average."""

    num_in_flight: float = 1.0
    slowdown: float = 0.0
    num_writing: float = 1.0

    def factor(self, num_writing: float) -> float:
        """How long a step takes beside others, against how long it was seen to take."""
        seen = 1.0 + self.slowdown * (self.num_writing - 1.0)
        return (1.0 + self.slowdown * max(0.0, num_writing - 1.0)) / seen


ONE_REQUEST = Concurrency()


@dataclass(frozen=True, slots=True)
class StrideCosts:
    """What was measured: `apart`, when decoding waits for verifications; `beside`, when both go on, which may want the same
    processors; None: not known. `gamma`: the chance that a guess is right.

    While one answer waits, others are written. So in a crowd waiting costs less, and what was written in vain costs more.
    """

    apart: StrideTiming
    gamma: float
    beside: StrideTiming | None = None
    crowd: Concurrency = ONE_REQUEST

    def round_s(self, stride: int, overlap: int) -> float:
        """Seconds of one round on average, with `overlap` steps beside the verification; 0: none."""
        factor = 1.0
        seconds = self._round_s(stride, overlap, factor)
        for _ in range(_TURNS if self.crowd.num_in_flight > 1.0 and self.crowd.slowdown else 0):
            writing = self.crowd.num_in_flight * stride * factor * self.apart.step_s / seconds
            factor = self.crowd.factor(writing)
            seconds = (
                seconds * self._round_s(stride, overlap, factor)
            ) ** 0.5  # Why not at once: that may swing for ever
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
        """Documents a second against those without speculation."""
        return verified_documents(self.gamma, stride) * self.round_s(1, 0) / self.round_s(stride, overlap)


def best_plan(costs: StrideCosts, max_stride: int, overlap_of: Callable[[int], int]) -> StridePlan:
    """The stride of the greatest gain, which rises to one peak, so that the search ends behind it.

    `overlap_of`: steps beside the verification, by stride.
    """
    best = StridePlan(1, overlap_of(1), costs.gain(1, overlap_of(1)))
    for stride in range(2, max_stride + 1):
        gain = costs.gain(stride, overlap_of(stride))
        if gain < best.gain:
            break
        best = StridePlan(stride, overlap_of(stride), gain)
    return best


def paper_optimal_plan(costs: StrideCosts, max_stride: int, asynchronous: bool) -> StridePlan:
    """What the paper's scheduler would choose from the same measurements, and its gain."""
    return best_plan(costs, max_stride, lambda _: int(asynchronous))

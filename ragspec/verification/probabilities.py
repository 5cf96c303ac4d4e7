"""Whole rows of probabilities and keyed random numbers, for the published acceptance rules.

The default sampler (`sampling`) needs neither. Everything here is float64; no function changes its input.

    >>> token_probs(np.array([0.0, 0.0, -9.0], np.float32), SamplingParams(temperature=1.0, top_k=2))
    array([0.5, 0.5, 0. ])
"""

import enum
import math

import numpy as np
from numpy.typing import NDArray

from ragspec.core import SamplingParams
from ragspec.numerics.backend import LogitRows
from ragspec.numerics.noise import output_key
from ragspec.numerics.torch.sampling import KeyedDraw, Probs
from ragspec.verification.sampling import Logits, TokenCounts, logit_edits, warp

Floats = NDArray[np.float64]

_TWO_TO_MINUS_53 = 2.0**-53


def token_probs(
    logits: Logits, params: SamplingParams, counts: TokenCounts | None = None, forbidden: tuple[int, ...] = ()
) -> Floats:
    """Warped probabilities of the next token, of a target or of a drafter. Shapes: float32 [V] -> float64 [V], sum 1.

    Survivors are as in `sampling`; where a sum meets top_p to its last bits, the order of additions decides. At temperature 0,
    and without a finite maximum, the greatest logit gets probability 1 (ties to the lower id).
    """
    x = warp(logits, params, counts, forbidden).astype(np.float64)
    best = int(x.argmax())
    if params.greedy or not math.isfinite(x[best]):
        one_hot = np.zeros_like(x)
        one_hot[best] = 1.0
        return one_hot
    mass = np.exp(x - x[best])
    if params.min_p:
        mass[x < x[best] + math.log(params.min_p)] = 0.0
    if params.top_k or params.top_p < 1.0:
        mass[_ranked_out(x, params)] = 0.0
    return np.asarray(mass / mass.sum())


def row_probs(
    logits: LogitRows,
    row: int,
    params: SamplingParams,
    counts: TokenCounts | None = None,
    forbidden: tuple[int, ...] = (),
) -> Probs:
    """As `token_probs` for one row, computed and kept where the logits are. Shape: [N, V] -> float64 [V]."""
    if isinstance(logits, np.ndarray):
        return token_probs(logits[row], params, counts, forbidden)
    return logits.probs(row, KeyedDraw(params, None, logit_edits(params, counts, forbidden)))


def _ranked_out(x: Floats, params: SamplingParams) -> NDArray[np.int64]:
    """Ids that fail top-k, or top-p among the top k. Shape: [V] -> [up to V - 1]."""
    order = np.argsort(-x, kind="stable")
    num_kept = min(params.top_k or len(x), len(x))
    if params.top_p < 1.0:
        mass = np.cumsum(np.exp(x[order[:num_kept]] - x[order[0]]))
        num_kept = 1 + int((mass[:-1] < params.top_p * mass[-1]).sum())  # the mass above rank r is mass[r - 1]
    return order[num_kept:]


class RandomStream(enum.IntEnum):
    """The purpose of a random number. Streams of one output token are independent of each other and of its Gumbel noise."""

    VERIFY = 1
    DRAFT = 2


class KeyedRandom:
    """The only source of randomness of a rule; a test can replace it and follow every branch.

    Number n is a pure function of (seed, choice, output index, stream, n), so a repeated step draws the same numbers.

    Every step decides at least one token, so no two steps share a number.
    """

    def __init__(self, seed: int, choice: int, index: int, stream: RandomStream) -> None:
        self._key = int(output_key(seed, choice, index))
        self._stream = int(stream)
        self._number = 0

    def uniform(self) -> float:
        """53 bits in [0, 1)."""
        bits = int(output_key(self._key, self._stream, self._number)) >> 11
        self._number += 1
        return bits * _TWO_TO_MINUS_53

    def bernoulli(self, threshold: float) -> bool:
        """True with probability `threshold`: never at 0, always at 1."""
        return self.uniform() < threshold

    def categorical(self, weights: Probs) -> int:
        """A token with a probability in proportion to its weight; never one of weight 0. Shape: [V], sum above 0."""
        if not isinstance(weights, np.ndarray):
            return weights.index_at(self.uniform())
        mass = np.cumsum(weights)
        return int(np.searchsorted(mass, self.uniform() * mass[-1], side="right"))


def draw_iid(draft_probs: Probs, count: int, random: KeyedRandom) -> tuple[int, ...]:
    """`count` independent draws; a token may come more than once. Shape: [V] -> [count]."""
    return tuple(random.categorical(draft_probs) for _ in range(count))


def draw_without_replacement(draft_probs: Probs, count: int, random: KeyedRandom) -> tuple[int, ...]:
    """Distinct tokens in the order drawn; fewer than `count` if fewer have a probability. Shape: [V] -> [up to count].

    The same distribution as ranking by log probability plus Gumbel noise, with one random number a token instead of one an id.
    """
    left = draft_probs.copy()
    tokens: list[int] = []
    while len(tokens) < count and left.max() > 0.0:
        tokens.append(random.categorical(left))
        left[tokens[-1]] = 0.0
    return tuple(tokens)

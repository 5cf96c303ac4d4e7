"""Keyed Gumbel noise: the randomness of output token i is a pure function of (seed, choice, i, token id).

No state advances: rolling back, resuming after a crash or verifying twice gives the same noise. Each of the
four parts goes through a full 64-bit mixing step, so neighbouring keys share no structure; 53 bits become
`u = (h + 0.5) * 2**-53` in float64 and `G = -log(-log(u))`. (24 bits in float32 would round some u to 1, where G is infinite.)

    >>> gumbel(bits(output_key(seed=7, choice=0, index=3), np.uint64(5))) < LARGEST_GUMBEL
    True

Source: the mixing step is the finaliser of SplitMix64 (Steele, Lea, Flood 2014); sampling by argmax of logits plus Gumbel
noise goes back to Gumbel 1954.
"""

import hashlib
import math
import secrets

import numba
import numpy as np
from numpy.typing import NDArray

from ragspec.numerics.compiled import compiled

STEP = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)
_30, _27, _31, _11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)
_TWO_TO_MINUS_53 = 2.0**-53
_TWO_TO_52, _TWO_TO_53 = np.uint64(2**52), np.uint64(2**53)
LARGEST_GUMBEL = -math.log(-math.log1p(-(2.0**-54)))
"""The greatest noise, about 37.4."""
ABOVE_ANY_GUMBEL = 38.0
MOST_REST = np.array([int(2**53 * math.exp(-noise) * (1 + 1e-8)) + 2 for noise in range(39)], np.uint64)
"""By whole noise n: a token whose (1 - u) * 2**53, rounded up, is greater has noise below n. The slack exceeds every rounding."""


@numba.njit(inline="always")
def mix(x: np.uint64) -> np.uint64:
    x = (x ^ (x >> _30)) * MIX_1
    x = (x ^ (x >> _27)) * MIX_2
    return x ^ (x >> _31)


@compiled()
def _key(seed: np.uint64, choice: np.uint64, index: np.uint64) -> np.uint64:
    key = mix(seed + STEP)
    key = mix(key + STEP * (choice + np.uint64(1)))
    return mix(key + STEP * (index + np.uint64(1)))


@compiled()
def _keys(seed: np.uint64, choice: np.uint64, first: np.uint64, count: int) -> NDArray[np.uint64]:
    keys = np.empty(count, np.uint64)
    for n in range(count):
        keys[n] = _key(seed, choice, first + np.uint64(n))
    return keys


def output_keys(seed: int, choice: int, first: int, count: int) -> list[int]:
    """As `output_key`, of `count` tokens in a row."""
    keys: list[int] = _keys(np.uint64(seed), np.uint64(choice), np.uint64(first), count).tolist()
    return keys


def output_key(seed: int, choice: int, index: int) -> np.uint64:
    """The key of one output token. Each part is mixed before the next part is added."""
    return np.uint64(_key(np.uint64(seed), np.uint64(choice), np.uint64(index)))


@numba.njit(inline="always")
def bits(key: np.uint64, token_id: np.uint64) -> np.uint64:
    """53 uniform bits for one token id."""
    return mix(key + STEP * (token_id + np.uint64(1))) >> _11


@numba.njit(inline="always")
def gumbel(h: np.uint64) -> float:
    """Above u = 1/2 float64 loses the half of `h + 0.5` and the largest h would give u = 1; 1 - u is exact there."""
    if h < _TWO_TO_52:
        return -math.log(-math.log((np.float64(h) + 0.5) * _TWO_TO_MINUS_53))
    return -math.log(-math.log1p((0.5 - np.float64(_TWO_TO_53 - h)) * _TWO_TO_MINUS_53))


def random_seed() -> int:
    """64 random bits, for a request without a seed."""
    return secrets.randbits(64)


def portable_seed() -> int:
    """53 random bits: a client in JavaScript can send the seed of an answer back unrounded."""
    return secrets.randbits(53)


def row_seed(job_seed: int, row_id: str) -> int:
    """The seed of one row of a batch job: independent of the row's place in the input."""
    digest = hashlib.sha256(f"{job_seed}\0{row_id}".encode()).digest()
    return int.from_bytes(digest[:8], "little")

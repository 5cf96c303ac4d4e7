"""Near ties: tokens that another rounding of the same logits could change.

With `exactness: fast` the bits of a row depend on the other rows of its batch. Two runs of one request can then differ only at a
near tie, as long as logits differ by at most `slack`; the count of near ties says how reproducible a text is.

    >>> is_near_tie(np.array([2.0, 1.9, 0.0], np.float32), SamplingParams(temperature=0.0), np.uint64(0), 0, slack=0.1)
    True
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from ragspec.core import SamplingParams
from ragspec.numerics.compiled import compiled
from ragspec.numerics.noise import ABOVE_ANY_GUMBEL, MOST_REST, bits, gumbel


def is_near_tie(
    warped: NDArray[np.float32], params: SamplingParams, key: np.uint64, token_id: int, slack: float
) -> bool:
    """Whether changing every warped logit by at most `slack` might decide another token. Shape: float32 [V].

    Never wrong when False; sometimes True without need, because the bounds of several conditions are combined.
    """
    if params.greedy:
        return int(np.count_nonzero(warped >= np.float64(warped[token_id]) - 2.0 * slack)) > 1
    return bool(_is_near(warped, token_id, params.top_k, params.top_p, params.min_p, key, slack))


@compiled(nogil=True)
def _is_near(x: Any, token_id: int, top_k: int, top_p: float, min_p: float, key: Any, slack: float) -> bool:
    size = x.shape[0]
    maximum = np.float64(x.max())
    last = below = -np.inf
    if 0 < top_k < size:
        ranked = np.partition(x, size - top_k)
        last, below = np.float64(ranked[size - top_k]), np.float64(ranked[: size - top_k].max())
    if not _survives(x, token_id, maximum, below, top_k, top_p, min_p, -slack):
        return True
    failed = last - 2.0 * slack  # no lower logit survives either
    least = np.float64(x[token_id]) + gumbel(bits(key, np.uint64(token_id))) - 2.0 * slack
    for v in range(size):
        wanted = least - np.float64(x[v])
        if v == token_id or wanted > ABOVE_ANY_GUMBEL or np.float64(x[v]) < failed:
            continue
        h = bits(key, np.uint64(v))
        if wanted >= 1.0 and np.uint64(2**53) - h > MOST_REST[int(wanted)]:
            continue
        if np.float64(x[v]) + gumbel(h) >= least:
            if _survives(x, v, maximum, last, top_k, top_p, min_p, slack):
                return True
            failed = max(failed, np.float64(x[v]))
    return False


@numba.njit(nogil=True)
def _survives(
    x: Any, v: int, maximum: float, edge: float, top_k: int, top_p: float, min_p: float, slack: float
) -> bool:
    """Whether a token may survive the warps if logits are off by `slack`; with a negative slack, whether it surely survives.

    `edge`: the logit ranked `top_k`-th, which may drop out; with a negative slack the next logit, which may come in.
    """
    if min_p > 0.0 and np.float64(x[v]) + 2.0 * slack < maximum + math.log(min_p):
        return False
    if top_p >= 1.0 and not 0 < top_k < x.shape[0]:
        return True
    limit = np.float64(x[v]) + 2.0 * slack
    num_above, above, rest = 0, 0.0, math.exp(np.float64(x[v]) - maximum)
    for u in range(x.shape[0]):
        logit = np.float64(x[u])
        if u == v:
            continue
        if logit > limit or (slack < 0.0 and logit == limit):
            num_above += 1
            above += math.exp(logit - maximum) if top_p < 1.0 else 0.0
        elif top_p >= 1.0:
            continue
        elif logit > edge - 2.0 * slack or (slack > 0.0 and logit == edge - 2.0 * slack):
            rest += math.exp(logit - maximum)
    if 0 < top_k < x.shape[0] and num_above >= top_k:
        return False
    if top_p >= 1.0:
        return True
    above, rest = above * math.exp(-slack), rest * math.exp(slack)
    return above < top_p * (above + rest)

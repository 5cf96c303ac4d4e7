"""What a token means, as far as its neighbours tell: vectors of the training texts' own statistics.

Tokens with similar neighbours get similar vectors, so that a year, a name or a verb in the past looks like others of its kind
before the first step; a small model with few tokens to learn from does not find that out for rare words. Counts of the two tokens
before and after, as positive pointwise mutual information, in few dimensions by singular values.

>>> vectors = count_meanings(tokenised_texts, vocab_size=6144, size=17)
>>> vectors.shape
torch.Size([6144, 17])

Source: Levy et al. 2015 (doi 10.1162/tacl_a_00134): smoothed contexts, square root of the singular values.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

PLACES = (-2, -1, 1, 2)
MAX_NEIGHBOURS = 1_500
"""The most frequent tokens are what the others are known by."""
SMOOTHING = 0.75
_SPARE, _ITERATIONS = 16, 6


def count_meanings(texts: Iterable[Sequence[int]], vocab_size: int, size: int, seed: int = 0) -> Tensor:
    """A row for each token, [vocab_size, size], of mean square 1 for those that occur; zeros for others."""
    flat = np.concatenate([np.asarray([*ids, -1, -1], np.int64) for ids in texts])  # -1: nothing beyond a text's end
    frequency = np.bincount(flat[flat >= 0], minlength=vocab_size)
    neighbours = np.argsort(-frequency, kind="stable")[:MAX_NEIGHBOURS]
    column = np.full(vocab_size + 1, -1)
    column[neighbours] = np.arange(len(neighbours))
    blocks = [_information(_counts(flat, place, column, vocab_size, len(neighbours))) for place in PLACES]
    table = torch.from_numpy(np.concatenate(blocks, axis=1))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        left, values, _ = torch.svd_lowrank(table, min(size + _SPARE, *table.shape), niter=_ITERATIONS)
    rows = left[:, :size] * values[:size].sqrt()
    norms = rows.norm(dim=1, keepdim=True)
    return torch.where(norms > 1e-6, rows / norms.clamp_min(1e-6) * size**0.5, 0.0)


def _counts(flat: np.ndarray, place: int, column: np.ndarray, num_rows: int, num_columns: int) -> np.ndarray:
    """How often each neighbour stands at `place` from each token. Shape: [num_rows, num_columns], float32."""
    here, there = (flat[:-place], flat[place:]) if place > 0 else (flat[-place:], flat[:place])
    at = column[there]
    kept = (here >= 0) & (at >= 0)
    pairs = here[kept] * num_columns + at[kept]
    return np.bincount(pairs, minlength=num_rows * num_columns).reshape(num_rows, num_columns).astype(np.float32)


def _information(counts: np.ndarray) -> np.ndarray:
    """Positive pointwise mutual information with smoothed contexts; same shape."""
    of_row, of_column = counts.sum(1, keepdims=True), counts.sum(0, keepdims=True) ** SMOOTHING
    expected = of_row * (of_column / max(1.0, float(of_column.sum())))
    ratio = np.divide(counts, expected, out=np.zeros_like(counts), where=expected > 0)
    logarithms: np.ndarray = np.log(np.maximum(ratio, 1.0))
    return logarithms

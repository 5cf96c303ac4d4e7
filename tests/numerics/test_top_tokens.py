"""The compiled search for the largest logits against a stable sort."""

from __future__ import annotations

import numpy as np
import pytest

from ragspec.numerics.cpu.top_tokens import _BLOCK, top_tokens

EVERY_OTHER = np.arange(1, 12, 2, dtype=np.int32)


@pytest.mark.parametrize(
    ("num_values", "count"), [(10 * _BLOCK, 8), (10 * _BLOCK, 1), (8 * _BLOCK, 8), (1_000, 8), (5, 8), (_BLOCK - 1, 5)]
)
def test_tokens_fall_by_logit(num_values: int, count: int) -> None:
    """Several of the best in one block, equal values, rising and falling rows, a row that ends inside a block, few tokens."""
    logits = np.random.default_rng(0).random((6, num_values), np.float32)
    logits[1, : 2 * _BLOCK] += 1
    logits[2] = logits[2].round(1)
    logits[3].sort()
    logits[4] = np.sort(logits[4])[::-1]
    logits[5, count // 2 :] = -np.inf
    expected = np.full((13, count), -1)
    expected[EVERY_OTHER, :num_values] = np.argsort(-logits, 1, kind="stable")[:, :count]
    assert (top_tokens(logits, EVERY_OTHER, 13, count) == expected).all()
    assert (top_tokens(np.asfortranarray(logits), EVERY_OTHER, 13, count) == expected).all()


def test_logits_that_are_no_numbers_end_the_search_too() -> None:
    logits = np.full((2, 200), np.nan, np.float32)
    logits[1, 7] = 1
    tokens = top_tokens(logits, EVERY_OTHER[:2], 4, 8)[[1, 3]]
    assert ((tokens >= 0) & (tokens < 200)).all()


def test_a_forward_without_logits_has_no_tokens() -> None:
    assert (top_tokens(np.empty((0, 200), np.float32), EVERY_OTHER[:0], 4, 8) == -1).all()

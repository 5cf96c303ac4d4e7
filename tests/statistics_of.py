"""Chi-square without a table: how many standard deviations a count is from what was expected."""

import numpy as np


def surprise(counts: np.ndarray, expected: np.ndarray) -> float:
    """(chi-square - degrees of freedom) / its standard deviation; above 6 is no accident.

    Cells that cannot occur must be empty.
    """
    assert not counts[expected == 0].any()
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = max(1, len(counts) - 1)
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - x.max())
    return e / e.sum()

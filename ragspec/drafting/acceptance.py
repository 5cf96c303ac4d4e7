"""Learned acceptance: how often a guess of some kind is right, as an estimate that follows the load.

Only counts are kept, never text, so what one request teaches may serve every tenant.
"""

from __future__ import annotations

import numpy as np

_MEMORY = 400.0
"""Guesses after which old ones weigh 1/e."""


class AcceptanceTable:
    """Acceptance of a node given its parent's, per (kind, match length); Beta prior of weight 4, exponential forgetting."""

    def __init__(self, priors: dict[str, tuple[float, float]], max_length: int = 16) -> None:
        self._max_length = max_length
        self._rows = {kind: i for i, kind in enumerate(priors)}
        first = np.array([short for short, _ in priors.values()])[:, None]
        last = np.array([long for _, long in priors.values()])[:, None]
        share = 1.0 - 0.6 ** np.arange(max_length + 1)[None]
        self._prior = first + (last - first) * share  # [kinds, lengths]
        self._accepted = 4.0 * self._prior
        self._seen = np.full_like(self._prior, 4.0)

    def probability(self, kind: str, length: int) -> float:
        row, column = self._rows[kind], min(length, self._max_length)
        return float(self._accepted[row, column] / self._seen[row, column])

    def learn(self, kind: str, length: int, accepted: bool) -> None:
        row, column = self._rows[kind], min(length, self._max_length)
        keep = 1.0 - 1.0 / _MEMORY
        self._seen[row, column] = self._seen[row, column] * keep + 1.0
        self._accepted[row, column] = self._accepted[row, column] * keep + float(accepted)

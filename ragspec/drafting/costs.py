"""What a forward costs: seconds by number of rows and length of context."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence

_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256)
_NUM_ROUNDS = 4
_STEP_WEIGHT = 0.05
"""Weight of one step against what was measured before."""
_STALE_STEPS, _STALE_WEIGHT = 20, 0.02
"""A size not used for so many steps drifts with the one in use: a bad spell must not keep a size of tree from being tried."""


class CostTable:
    """Measured at start, linear in between, refined while running. More rows never cost less."""

    def __init__(self, seconds: dict[int, list[float]], rows: Sequence[int] = _BUCKETS) -> None:
        """`seconds[context]` has one entry for each number of rows."""
        self._rows = list(rows)
        self._measured = seconds
        self._drift = {context: [1.0] * len(self._rows) for context in seconds}
        self._unused_steps = {context: [0] * len(self._rows) for context in seconds}
        self._seconds = {context: _rising(column) for context, column in seconds.items()}

    @classmethod
    def measure(cls, forward_s: Callable[[int, int], float], contexts: Sequence[int], max_rows: int) -> CostTable:
        """`forward_s(rows, context)` runs one forward and returns its seconds; the fastest of a few is what it costs.

        All sizes take turns, so that a moment of other load does not fall on one of them.
        """
        rows = [n for n in _BUCKETS if n <= max_rows]
        rounds = [{c: [forward_s(n, c) for n in rows] for c in contexts} for _ in range(_NUM_ROUNDS)]
        return cls({c: [min(times) for times in zip(*(r[c] for r in rounds), strict=True)] for c in contexts}, rows)

    def cost_s(self, num_rows: int, context: int) -> float:
        """Expected seconds of one forward."""
        column = self._seconds[self._nearest(context)]
        at = bisect_left(self._rows, num_rows)
        if at == 0 or len(column) == 1:
            return column[0]
        at = min(at, len(column) - 1)  # beyond the last bucket the last slope goes on
        low, high = self._rows[at - 1], self._rows[at]
        share = (num_rows - low) / (high - low)
        return column[at - 1] + (column[at] - column[at - 1]) * share

    def refine(self, num_rows: int, context: int, seconds: float) -> None:
        """Move the nearest measurements a little towards what a forward has just taken."""
        nearest = self._nearest(context)
        drift = self._drift[nearest]
        ratio = min(2.0, max(0.5, seconds / self.cost_s(num_rows, context)))
        at = min(bisect_left(self._rows, num_rows), len(self._rows) - 1)
        used = {at, at - 1} if at > 0 and self._rows[at] != num_rows else {at}
        unused_steps = self._unused_steps[nearest]
        for i in range(len(drift)):
            unused_steps[i] = 0 if i in used else unused_steps[i] + 1
            if i in used:
                drift[i] *= ratio**_STEP_WEIGHT
            elif unused_steps[i] > _STALE_STEPS:
                drift[i] += _STALE_WEIGHT * (drift[at] - drift[i])
        self._seconds[nearest] = _rising([s * d for s, d in zip(self._measured[nearest], drift, strict=True)])

    def _nearest(self, context: int) -> int:
        return min(self._measured, key=lambda c: abs(c - context))


def _rising(seconds: Sequence[float]) -> list[float]:
    """The largest rising sequence under the measurements: noise only adds."""
    return list(itertools.accumulate(reversed(seconds), min))[::-1]

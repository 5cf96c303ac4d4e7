"""How probable it is that the target accepts a picked child: learned, as a score says little about it by itself.

Given the noise, a child's chance is no longer its probability under the drafter's law. What tells is its rank among its
siblings and how far its score lies behind the best one's (of the best: how far it leads). The estimate is that of the child given
that its parent was accepted and no better sibling was. Only counts are kept.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

_MARGINS = (0.1, 0.25, 0.5, 0.8, 1.2, 1.7, 2.4, 3.3, 4.5, 6.5)
_NUM_MODES, _NUM_RANKS, _NUM_DEPTHS = 4, 8, 4
_PRIOR_WEIGHT = 2.0
_MEMORY = 1.0 - 1.0 / 600.0


class Cell(int):
    """The number of an estimate; a type of its own, so that no other drafter's note is taken for one."""


class Calibration:
    """Acceptance by cell, with a prior that falls with rank and distance; older outcomes fade.

    Plain lists: one number of a NumPy array takes longer to read than a cell's estimate to compute.
    """

    def __init__(self) -> None:
        margin = np.array([0.0, *_MARGINS])
        prior = np.empty((_NUM_MODES, _NUM_DEPTHS, _NUM_RANKS, len(margin)))
        prior[:, :, 0] = 0.85 - 0.5 * np.exp(-0.7 * margin)
        for rank in range(1, _NUM_RANKS):
            prior[:, :, rank] = 0.4 / rank**0.5 * np.exp(-0.6 * margin)
        self._strides = [int(np.prod(prior.shape[i + 1 :])) for i in range(3)]
        self._accepted: list[float] = (prior * _PRIOR_WEIGHT).ravel().tolist()
        self._seen = [_PRIOR_WEIGHT] * prior.size
        self.typical = 0.7
        """The chance that one of an accepted node's children is accepted too, of late."""

    def cell(self, mode: int, depth: int, rank: int, margin: float) -> Cell:
        """What a child's estimate is learned by. `mode`: greedy, with the noise, without it, or drawn by chance.

        `margin`: for rank 0 its score less that of rank 1, else the best score less its own.
        """
        by_mode, by_depth, by_rank = self._strides
        deep, low = min(depth, _NUM_DEPTHS) - 1, min(rank, _NUM_RANKS - 1)
        return Cell(mode * by_mode + deep * by_depth + low * by_rank + bisect_right(_MARGINS, margin))

    def probability(self, cell: Cell) -> float:
        return self._accepted[cell] / self._seen[cell]

    def learn(self, cell: Cell, accepted: bool) -> None:
        self._seen[cell] = self._seen[cell] * _MEMORY + 1.0
        self._accepted[cell] = self._accepted[cell] * _MEMORY + accepted

    def note_children(self, chance: float, weight: float) -> None:
        """One of a node's children is accepted with this chance, if the node is, whose own chance is `weight`."""
        self.typical += 0.02 * weight * (chance - self.typical)

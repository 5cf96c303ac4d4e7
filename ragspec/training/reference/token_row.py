"""One row of a training batch: texts that are computed side by side, and what is known about each of their tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ragspec.training.reference.guidance import Guide

Looks = list[tuple[int, list[int]]]
"""(query row, right keys)."""


@dataclass
class Row:
    """`segments`: 0 for what all turns see, then one number a turn; `weights`: of predicting each token."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    looks: dict[Guide, Looks] = field(default_factory=lambda: {guide: [] for guide in Guide})

    def extend(self, ids: Sequence[int], weights: Sequence[float], first_position: int, segment: int) -> int:
        """Append a text; returns where it begins."""
        begin = len(self.ids)
        self.ids += ids
        self.weights += weights
        self.positions += range(first_position, first_position + len(ids))
        self.segments += [segment] * len(ids)
        return begin

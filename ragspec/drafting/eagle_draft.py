"""One sequence's draft while it grows, level by level: its proposals, and which of them are drafted further."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragspec.drafting.calibration import Calibration
from ragspec.drafting.drafter import Drafted
from ragspec.drafting.eagle_memory import HeadMemory, Pairs
from ragspec.drafting.eagle_shapes import Branch, TreeShape
from ragspec.numerics.kv_cache import OutOfSlots
from ragspec.tree import Origin, Proposal

Ints = NDArray[np.int32]

GREEDY, WITH_NOISE, WITHOUT_NOISE = range(3)


class Open(NamedTuple):
    """A node to be drafted further. `number` in the proposals (-1: the root), `row` of the level's states that it came from.

    `path`: the places of its keys and of its ancestors' in the draft's own slots, its own last.
    """

    number: int
    token_id: int
    branch: Branch
    row: int
    path: tuple[int, ...]


class Draft:
    """Starts as the root alone. `scratch`: slots for the nodes' keys, given back by `close`."""

    def __init__(self, sequence: Drafted, memory: HeadMemory, mode: int) -> None:
        self.sequence, self.memory, self.mode = sequence, memory, mode
        self.pairs: Pairs = memory.pairs(sequence.tokens)
        self.proposals: list[Proposal] = []
        self.open: list[Open] = [Open(-1, sequence.tokens[-1], Branch((), 1.0), 0, ())]
        self._num_keys = 0
        self._reserved: tuple[Ints, Ints] | None = None

    @property
    def scratch(self) -> Ints:
        return np.empty(0, np.int32) if self._reserved is None else self._reserved[0]

    def reserve(self, num_slots: int) -> None:
        """Room for the keys of so many nodes, or for none if the pool has none: the draft then ends with its first level."""
        try:
            self._reserved = self.memory.slots.reserve(num_slots)
        except OutOfSlots:
            self._reserved = None

    def close(self) -> None:
        if self._reserved is not None:
            self.memory.slots.keep(*self._reserved, [])
            self._reserved = None

    def extend(
        self, columns: NDArray[np.int64], scores: NDArray[np.float64], tokens: NDArray[np.int64], look: Look
    ) -> list[Open]:
        """Propose the children of the open nodes; returns those that the shape would draft further.

        Shapes: one row an open node: columns [N, k] with -1 for none, scores [N, k], tokens [N, k].
        """
        children: list[Open] = []
        for row, node in enumerate(self.open):
            left = 1.0
            behind = scores[row, 0] - scores[row]
            if len(behind) > 1:
                behind[0] = behind[1]
            for rank in range(columns.shape[1]):
                ranks = (*node.branch.ranks, rank)
                if columns[row, rank] < 0 or not look.shape.takes(ranks):
                    break
                cell = look.calibration.cell(self.mode, len(ranks), rank, float(behind[rank]))
                chance = look.calibration.probability(cell)
                path_prob = node.branch.path_prob * left * chance
                left *= 1.0 - chance
                if path_prob < look.least_prob:
                    continue
                token = int(tokens[row, rank])
                self.proposals.append(Proposal(token, node.number, path_prob, Origin(look.name, feedback=cell)))
                children.append(Open(len(self.proposals) - 1, token, Branch(ranks, path_prob), row, node.path))
            look.calibration.note_children(1.0 - left, node.branch.path_prob)
        return [children[i] for i in look.shape.frontier([child.branch for child in children])]

    def descend(self, chosen: list[Open]) -> None:
        """These are the next level; each gets a place for its keys."""
        places = range(self._num_keys, self._num_keys + len(chosen))
        self.open = [node._replace(path=(*node.path, at)) for node, at in zip(chosen, places, strict=True)]
        self._num_keys += len(chosen)


class Look(NamedTuple):
    """What every draft of one drafter goes by."""

    name: str
    shape: TreeShape
    calibration: Calibration
    least_prob: float

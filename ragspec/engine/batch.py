"""One step's work of many sequences as one forward: tokens, rows, and which rows' logits are wanted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragspec.engine.sequence import Sequence
from ragspec.numerics.rows import Part, StepRows
from ragspec.tree import DraftTree

Floats = NDArray[np.float32]


class Work(NamedTuple):
    """One sequence's part of a step: the next `num_chain` known tokens and, if they are the last ones, a tree on top.

    The tree's root is the last chain token. `tree` None: a chunk of a prompt that goes on in the next step.
    """

    sequence: Sequence
    num_chain: int
    tree: DraftTree | None


class Batch:
    """Slots are reserved here; `keep` settles them when the step is decided."""

    def __init__(self, works: list[Work]) -> None:
        self.works = works
        parts: list[Part] = []
        token_ids: list[int] = []
        wanted: list[int] = []
        self._first_wanted: list[int] = []
        for sequence, num_chain, tree in works:
            assert sequence.slots is not None
            parts.append(Part(sequence.slots, num_chain, tree.parents if tree else (-1,)))
            start = sequence.slots.length
            token_ids += sequence.tokens[start : start + num_chain]
            self._first_wanted.append(len(wanted))
            if tree is not None:
                wanted += range(len(token_ids) - 1, len(token_ids) + tree.num_drafted)
                token_ids += tree.token_ids[1:]
        self.longest_context = max(part.slots.length + part.num_chain for part in parts)
        self._step = StepRows(parts)
        self.rows = self._step.rows
        self.token_ids = np.array(token_ids, np.int32)
        self.wanted = np.array(wanted, np.int32)

    def logits_of(self, i: int, logits: Floats) -> Floats:
        """Rows of the i-th work's tree, node by node. Shapes: [W, V] -> [N, V]."""
        tree = self.works[i].tree
        assert tree is not None
        first = self._first_wanted[i]
        return logits[first : first + len(tree)]

    def features_of(self, i: int, features: Mapping[int, Floats], path: list[int]) -> dict[int, Floats]:
        """Rows of the i-th work's chain and of a path through its tree, in order. Shapes: [N, H] -> [T, H]."""
        if not features:
            return {}
        first, num_chain = int(self._step.row_start[i]), self.works[i].num_chain
        rows = [*range(first, first + num_chain), *(first + num_chain - 1 + node for node in path)]
        return {tap: stream[rows] for tap, stream in features.items()}

    def keep(self, i: int, path: list[int]) -> None:
        """Keep the chain of the i-th work and the accepted nodes of its tree."""
        self._step.keep(i, path)

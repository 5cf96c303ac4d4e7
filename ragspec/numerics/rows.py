"""The rows of one step: for each sequence a chain of known tokens and a tree of guesses on top, flattened for one forward.

Slots are reserved when a step is built and settled by `keep` when it is decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragspec.numerics.attention import Rows, make_tiles
from ragspec.numerics.kv_cache import SequenceSlots

Ints = NDArray[np.int32]


class Part(NamedTuple):
    """One sequence's share: `num_chain` >= 1 tokens after what is kept, then tree nodes.

    `parents` are those of a tree whose node 0 is the last chain token: parents[0] is -1, the rest lower numbers.
    """

    slots: SequenceSlots
    num_chain: int
    parents: Sequence[int] = (-1,)

    @property
    def num_rows(self) -> int:
        return self.num_chain + len(self.parents) - 1


class StepRows:
    """Rows in the order of parts; within a part the chain, then nodes 1, 2, ... Raises: OutOfSlots."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._reserved = [part.slots.reserve(part.num_rows) for part in parts]
        paths = [_paths(part.parents) for part in parts]
        flat = [_flat(part.num_chain, own) for part, own in zip(parts, paths, strict=True)]
        self.row_start = _starts([part.num_rows for part in parts])
        path_lengths = [
            length
            for part, own in zip(parts, paths, strict=True)
            for length in [0] * part.num_chain + [len(p) for p in own]
        ]
        self.rows = Rows(
            slots=np.concatenate([slots for slots, _ in self._reserved]),
            positions=np.concatenate([_positions(part, own) for part, own in zip(parts, paths, strict=True)]),
            row_start=self.row_start,
            pages=np.concatenate([np.array(part.slots.pages, np.int32) for part in parts]),
            page_start=_starts([len(part.slots.pages) for part in parts]),
            context_slots=self._context("slots", 0),
            context_index=self._context("index", 1),
            context_start=_starts([part.slots.length + part.num_chain for part in parts]),
            context_end=np.concatenate([_context_end(part) for part in parts]),
            path_slots=np.concatenate([slots[own] for (slots, _), own in zip(self._reserved, flat, strict=True)]),
            path_index=np.concatenate([index[own] for (_, index), own in zip(self._reserved, flat, strict=True)]),
            path_start=_starts(path_lengths),
            tiles=make_tiles(self.row_start),
        )

    def keep(self, i: int, path: Sequence[int] = ()) -> None:
        """Keep the chain of part i and these nodes of its tree, in order; its other slots are spare again."""
        slots, index = self._reserved[i]
        num_chain = self._parts[i].num_chain
        self._parts[i].slots.keep(slots, index, [*range(num_chain), *(num_chain - 1 + node for node in path)])

    def drop(self, i: int) -> None:
        """Keep nothing of part i."""
        slots, index = self._reserved[i]
        self._parts[i].slots.keep(slots, index, [])

    def _context(self, name: str, which: int) -> Ints:
        """What is kept and the new chain, sequence after sequence."""
        pieces: list[Ints] = []
        for part, reserved in zip(self._parts, self._reserved, strict=True):
            pieces += [getattr(part.slots, name), reserved[which][: part.num_chain]]
        return np.concatenate(pieces)


def _paths(parents: Sequence[int]) -> list[list[int]]:
    """For nodes 1, 2, ...: the nodes from the root's child down to it."""
    paths: list[list[int]] = [[]]
    for node in range(1, len(parents)):
        paths.append([*paths[parents[node]], node])
    return paths[1:]


def _flat(num_chain: int, paths: list[list[int]]) -> Ints:
    return np.fromiter((num_chain - 1 + node for path in paths for node in path), np.int32)


def _positions(part: Part, paths: list[list[int]]) -> Ints:
    start = part.slots.length
    chain = np.arange(start, start + part.num_chain)
    return np.concatenate([chain, [start + part.num_chain - 1 + len(path) for path in paths]]).astype(np.int32)


def _context_end(part: Part) -> Ints:
    start, end = part.slots.length, part.slots.length + part.num_chain
    return np.concatenate([np.arange(start + 1, end + 1), np.full(len(part.parents) - 1, end)]).astype(np.int32)


def _starts(lengths: Sequence[int]) -> Ints:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)

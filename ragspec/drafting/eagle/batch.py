"""The rows of a head's forwards while one draft grows: what each sequence may settings back on, and the nodes drafted so far.

Each sequence looks back on a list of slots (the last positions of its text that the head has seen) and has slots of its own for
nodes. Pages are found once; a level only adds its nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragspec.numerics.attention import PAGE, AttentionMetadata, make_tiles

Ints = NDArray[np.int32]


class ScheduledDraft(NamedTuple):
    """One sequence: `context` slots in the order of their positions, the last `num_new` of them to be computed first.

    `end`: the position after the last one. `scratch`: slots for nodes.
    """

    context: Ints
    num_new: int
    end: int
    scratch: Ints


class DraftBatch:
    """Of several sequences. A node is (its place in `scratch`, the places of its path, itself last)."""

    def __init__(self, parts: Sequence[ScheduledDraft]) -> None:
        self._parts = parts
        pages = [np.unique(np.concatenate([part.context, part.scratch]) // PAGE) for part in parts]
        context_index = [_index(own, part.context) for own, part in zip(pages, parts, strict=True)]
        self._scratch_index = [_index(own, part.scratch) for own, part in zip(pages, parts, strict=True)]
        self._fixed = {
            "pages": np.concatenate(pages).astype(np.int32),
            "page_start": _starts([len(own) for own in pages]),
            "context_slots": np.concatenate([part.context for part in parts]),
            "context_index": np.concatenate(context_index),
            "context_start": _starts([len(part.context) for part in parts]),
        }

    def chains(self) -> AttentionMetadata:
        """The new positions of every sequence, each seeing what stands before it."""
        parts = self._parts
        num_rows = sum(part.num_new for part in parts)
        nothing = np.empty(0, np.int32)
        ends = [np.arange(len(p.context) - p.num_new + 1, len(p.context) + 1) for p in parts]
        return self._rows(
            [part.num_new for part in parts],
            np.concatenate([part.context[len(part.context) - part.num_new :] for part in parts]),
            np.concatenate([np.arange(part.end - part.num_new, part.end) for part in parts]),
            np.concatenate(ends),
            (nothing, nothing, np.zeros(num_rows + 1, np.int32)),
        )

    def level(self, paths: Sequence[Sequence[Sequence[int]]]) -> AttentionMetadata:
        """One level of every sequence's tree; `paths[b]` are those of its new nodes, places in the sequence's scratch."""
        own = [(b, path) for b, those in enumerate(paths) for path in those]
        slots = np.array([self._parts[b].scratch[path[-1]] for b, path in own], np.int32)
        positions = np.array([self._parts[b].end + len(path) - 1 for b, path in own])
        ends = np.array([len(self._parts[b].context) for b, _ in own])
        path_slots = np.array([self._parts[b].scratch[node] for b, path in own for node in path], np.int32)
        path_index = np.array([self._scratch_index[b][node] for b, path in own for node in path], np.int32)
        path_rows = (path_slots, path_index, _starts([len(path) for _, path in own]))
        return self._rows([len(those) for those in paths], slots, positions, ends, path_rows)

    def _rows(
        self,
        counts: Sequence[int],
        slots: Ints,
        positions: NDArray[np.int64],
        ends: NDArray[np.int64],
        paths: tuple[Ints, Ints, Ints],
    ) -> AttentionMetadata:
        row_start = _starts(counts)
        return AttentionMetadata(
            slots=slots,
            positions=positions.astype(np.int32),
            row_start=row_start,
            context_end=ends.astype(np.int32),
            path_slots=paths[0],
            path_index=paths[1],
            path_start=paths[2],
            tiles=make_tiles(row_start),
            **self._fixed,
        )


def _index(pages: Ints, slots: Ints) -> Ints:
    """Slots as rank of their page * 16 + lane."""
    return (np.searchsorted(pages, slots // PAGE) * PAGE + slots % PAGE).astype(np.int32)


def _starts(lengths: Sequence[int]) -> Ints:
    return np.fromiter(itertools.accumulate(lengths, initial=0), np.int32)

"""The attention metadata of a drafter's forwards while drafts grow.

Each sequence attends to a list of slots (the positions that the network has read) and has slots of its own for nodes. Pages are
collected once for a draft; a level only adds its nodes.

    >>> batch = DraftBatch(scheduled)
    >>> batch.chains()              # the metadata of the first forward; then batch.level(paths) for each level
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ragspec.numerics.attention import PAGE, AttentionMetadata, Ints, make_tiles


class NewRows(NamedTuple):
    """Rows of the context that the first forward computes, rising: their indices in the context, and their rotary positions."""

    indices: NDArray[np.integer[Any]]
    positions: NDArray[np.integer[Any]]


class ScheduledDraft(NamedTuple):
    """One sequence's part: `context` slots in the order of positions; `num_new` of them are computed by the first forward.

    `end`: the position after the context. `scratch`: slots for nodes. `rows`: the new rows; None: the last of the context.
    """

    context: Ints
    num_new: int
    end: int
    scratch: Ints
    rows: NewRows | None = None

    @property
    def new_rows(self) -> NewRows:
        if self.rows is not None:
            return self.rows
        num_read = len(self.context) - self.num_new
        return NewRows(np.arange(num_read, len(self.context)), np.arange(self.end - self.num_new, self.end))


class DraftBatch:
    """Several sequences. A node is given by the path to it, as indices in its sequence's `scratch`, its own index last."""

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

    def chains(self, rows: Sequence[NewRows] = (), is_causal: bool = True) -> AttentionMetadata:
        """Metadata of some rows of every sequence's context, the new ones unless given. Each row sees the positions before it, or
        all of the context."""
        parts, nothing = self._parts, np.empty(0, np.int32)
        rows = rows or [part.new_rows for part in parts]
        num_rows = [len(own.indices) for own in rows]
        return self._metadata(
            num_rows,
            slots=np.concatenate([part.context[own.indices] for part, own in zip(parts, rows, strict=True)]),
            positions=np.concatenate([own.positions for own in rows]),
            context_end=np.concatenate([own.indices + 1 for own in rows])
            if is_causal
            else np.repeat([len(part.context) for part in parts], num_rows),
            path_slots=nothing,
            path_index=nothing,
            path_start=np.zeros(sum(num_rows) + 1),
        )

    def level(self, paths: Sequence[Sequence[Sequence[int]]], path_slots: Tensor | None = None) -> AttentionMetadata:
        """Metadata of one level of every sequence's tree. `paths[b]`: the paths of sequence b's new nodes.

        `path_slots`: their slots on the device, where `paths` has only their number and each node's own index right.
        """
        parts = self._parts
        nodes = [(b, path) for b, own in enumerate(paths) for path in own]
        metadata = self._metadata(
            [len(own) for own in paths],
            slots=np.array([parts[b].scratch[path[-1]] for b, path in nodes]),
            positions=np.array([parts[b].end + len(path) - 1 for b, path in nodes]),
            context_end=np.array([len(parts[b].context) for b, _ in nodes]),
            path_slots=np.array([parts[b].scratch[node] for b, path in nodes for node in path]),
            path_index=np.array([self._scratch_index[b][node] for b, path in nodes for node in path]),
            path_start=_starts([len(path) for _, path in nodes]),
        )
        return metadata if path_slots is None else metadata._replace(path_slots=path_slots)

    def _metadata(self, num_rows: Sequence[int], **arrays: NDArray[Any]) -> AttentionMetadata:
        """`num_rows`: of each sequence."""
        row_start = _starts(num_rows)
        own = {name: array.astype(np.int32, copy=False) for name, array in arrays.items()}
        return AttentionMetadata(row_start=row_start, tiles=make_tiles(row_start), **own, **self._fixed)


def _index(pages: Ints, slots: Ints) -> Ints:
    """Slots as indices into the pages: rank of the page * 16 + lane."""
    return (np.searchsorted(pages, slots // PAGE) * PAGE + slots % PAGE).astype(np.int32)


def _starts(lengths: Sequence[int]) -> Ints:
    return np.fromiter(itertools.accumulate(lengths, initial=0), np.int32)

"""What rank 0 tells the others: one small broadcast a step, from which they run the same forward over pools of their own.

A message is int32 words, the first `_CAPACITY` of them in one broadcast and the rest, where a prompt is long, in a second.
Contexts go as runs of consecutive indices, since nearly all of them are; what follows from the rest is computed again.

    >>> send_step(ranks, Step(token_ids, rows, wanted), num_threads)        # rank 0
    >>> message = receive(ranks)                                            # the others
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ragspec.numerics.attention import PAGE, Rows, make_tiles
from ragspec.numerics.ranks import Ranks

Ints = NDArray[np.int32]

_CAPACITY = 2048
"""Words of the first broadcast, 8 KiB: a decode step of a few sequences with their trees fits."""

_NUM_SECTIONS = 11


class Kind(IntEnum):
    """STEP: a forward. BEAT: nothing to do, are you there? STOP: the group ends."""

    STEP = 1
    BEAT = 2
    STOP = 3


class Step(NamedTuple):
    """One forward: int32 [N] tokens, their rows, int32 [W] numbers of the rows whose logits are wanted."""

    token_ids: Ints
    rows: Rows
    wanted: Ints


class Message(NamedTuple):
    """`num_threads`: with how many rank 0 computes. `step`: None unless `kind` says so."""

    kind: Kind
    num_threads: int
    step: Step | None


def send_step(ranks: Ranks, step: Step, num_threads: int) -> None:
    """Raises: RankLost."""
    _send(ranks, Kind.STEP, num_threads, _sections(step))


def send(ranks: Ranks, kind: Kind) -> None:
    """A message without a step. Raises: RankLost."""
    _send(ranks, kind, 0, [np.empty(0, np.int32)] * _NUM_SECTIONS)


def receive(ranks: Ranks) -> Message:
    """The next message; waits for it. Raises: RankLost."""
    first = np.empty(_CAPACITY, np.int32)
    ranks.broadcast(torch.from_numpy(first))
    kind, num_threads, *lengths = first[: 2 + _NUM_SECTIONS].tolist()
    num_words = 2 + _NUM_SECTIONS + sum(lengths)
    rest = np.empty(max(0, num_words - _CAPACITY), np.int32)
    if len(rest):
        ranks.broadcast(torch.from_numpy(rest))
    if kind != Kind.STEP:
        return Message(Kind(kind), num_threads, None)
    words = np.concatenate([first, rest])[2 + _NUM_SECTIONS : num_words]
    return Message(Kind.STEP, num_threads, _step(np.split(words, np.cumsum(lengths)[:-1])))


def _send(ranks: Ranks, kind: Kind, num_threads: int, sections: list[Ints]) -> None:
    head = np.array([kind, num_threads, *map(len, sections)], np.int32)
    words = np.concatenate([head, *sections])
    first = np.zeros(_CAPACITY, np.int32)
    first[: len(words)] = words[:_CAPACITY]
    ranks.broadcast(torch.from_numpy(first))
    if len(words) > _CAPACITY:
        ranks.broadcast(torch.from_numpy(words[_CAPACITY:]))


def _sections(step: Step) -> list[Ints]:
    token_ids, rows, wanted = step
    starts, ends = _runs(rows.context_index)
    return [
        token_ids, wanted, rows.slots, rows.positions, rows.row_start, rows.pages, rows.page_start, starts, ends,
        np.concatenate([rows.context_start, rows.context_end, rows.path_start]), rows.path_index,
    ]  # fmt: skip


def _step(sections: list[Ints]) -> Step:
    token_ids, wanted, slots, positions, row_start, pages, page_start, starts, ends, bounds, path_index = sections
    num_rows, num_sequences = len(slots), len(row_start) - 1
    context_start, context_end, path_start = np.split(bounds, [num_sequences + 1, num_sequences + 1 + num_rows])
    context_index = _joined(starts, ends)
    context_of = np.repeat(np.arange(num_sequences), np.diff(context_start))
    row_of_path = np.repeat(np.arange(num_rows), np.diff(path_start))
    path_of = np.searchsorted(row_start, row_of_path, side="right") - 1
    rows = Rows(
        slots=slots,
        positions=positions,
        row_start=row_start,
        pages=pages,
        page_start=page_start,
        context_slots=_slots(context_index, context_of, pages, page_start),
        context_index=context_index,
        context_start=context_start,
        context_end=context_end,
        path_slots=_slots(path_index, path_of, pages, page_start),
        path_index=path_index,
        path_start=path_start,
        tiles=make_tiles(row_start),
    )
    return Step(token_ids, rows, wanted)


def _slots(index: Ints, sequence_of: NDArray[np.int64], pages: Ints, page_start: Ints) -> Ints:
    """Where positions lie in the pool, from their index in their sequence's own pages."""
    slots: Ints = (pages[page_start[sequence_of] + index // PAGE] * PAGE + index % PAGE).astype(np.int32)
    return slots


def _runs(index: Ints) -> tuple[Ints, Ints]:
    """Ranges [start, end) of consecutive numbers. Shapes: [n] -> [runs] twice."""
    if not len(index):
        return index, index
    breaks = np.flatnonzero(np.diff(index) != 1) + 1
    starts = index[np.concatenate([[0], breaks])]
    lasts = index[np.concatenate([breaks - 1, [len(index) - 1]])]
    return starts, (lasts + 1).astype(np.int32)


def _joined(starts: Ints, ends: Ints) -> Ints:
    """The numbers that `_runs` came from."""
    lengths = ends - starts
    before = np.cumsum(lengths) - lengths
    index: Ints = (np.arange(lengths.sum()) + np.repeat(starts - before, lengths)).astype(np.int32)
    return index

"""Messages from rank 0 to the other ranks of its group: one broadcast a step, from which they run the same forward.

A message is int32 words, the first `_CAPACITY` of them in one broadcast and the rest (a long prompt) in a second. Context
indices are sent as runs of consecutive numbers; fields that follow from others are computed again.

    >>> send_forward(ranks, ForwardInput(token_ids, metadata, logit_rows), num_threads)        # rank 0
    >>> message = receive(ranks)                                                               # the other ranks
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ragspec.errors import RankLost
from ragspec.numerics.attention import PAGE, AttentionMetadata, Ints, make_tiles
from ragspec.numerics.ranks import Ranks

_CAPACITY = 2048
"""Words of the first broadcast, 8 KiB: a decode step of a few sequences with their trees fits."""

_NUM_SECTIONS = 12
_NO_SECTIONS = [np.empty(0, np.int32)] * _NUM_SECTIONS


class MessageKind(IntEnum):
    FORWARD = 1
    HEARTBEAT = 2
    STOP = 3
    COPY_BLOCKS = 4
    READ_KEYS = 5


class ForwardInput(NamedTuple):
    """The arguments of `Target.compute`. Shapes: token_ids int32 [N], logit_rows int32 [W].

    `taps`: rank 0's. Why: it decides which captured graph a rank replays, and NCCL needs all ranks to replay the same one.
    """

    token_ids: Ints | torch.Tensor
    metadata: AttentionMetadata
    logit_rows: Ints
    taps: Sequence[int] = ()


class BlockCopy(NamedTuple):
    """Blocks by number, and the slots of their positions in order; `first` positions of the first block are left out, and the
    last block may end early. `is_read`: from the store into the pool. Without slots, the store forgets the blocks."""

    numbers: Ints
    slots: Ints
    first: int = 0
    is_read: bool = False


class KeyRead(NamedTuple):
    """The keys of a KV head of the whole target in some slots. Shapes: slots int32 [T]."""

    layer: int
    kv_head: int
    slots: Ints


class Message(NamedTuple):
    """`num_threads`: how many threads rank 0 computes with. `content`: of all kinds but HEARTBEAT and STOP."""

    kind: MessageKind
    num_threads: int
    content: ForwardInput | BlockCopy | KeyRead | None = None


def send_forward(ranks: Ranks, forward: ForwardInput, num_threads: int) -> None:
    """Raises: RankLost."""
    _send(ranks, MessageKind.FORWARD, num_threads, _to_sections(forward))


def send_blocks(ranks: Ranks, blocks: BlockCopy) -> None:
    """Raises: RankLost."""
    how = np.array([blocks.first, blocks.is_read], np.int32)
    _send(ranks, MessageKind.COPY_BLOCKS, 0, [blocks.numbers, blocks.slots, how, *_NO_SECTIONS[3:]])


def send_key_read(ranks: Ranks, read: KeyRead) -> None:
    """Raises: RankLost."""
    place = np.array([read.layer, read.kv_head], np.int32)
    _send(ranks, MessageKind.READ_KEYS, 0, [place, read.slots, *_NO_SECTIONS[2:]])


def send(ranks: Ranks, kind: MessageKind) -> None:
    """Send a message of its kind alone. Raises: RankLost."""
    _send(ranks, kind, 0, _NO_SECTIONS)


@contextmanager
def in_step(ranks: Ranks) -> Iterator[None]:
    """What rank 0 does after such a message. A failure inside leaves the other ranks out of step, so it ends the group."""
    try:
        yield
    except RankLost:
        raise
    except Exception as cause:
        if ranks.size == 1:
            raise
        ranks.close()
        raise RankLost(f"rank 0 failed inside a step: {cause}") from cause


def receive(ranks: Ranks) -> Message:
    """Wait for the next message. Raises: RankLost."""
    first = np.empty(_CAPACITY, np.int32)
    ranks.broadcast(torch.from_numpy(first))
    kind, num_threads, *lengths = first[: 2 + _NUM_SECTIONS].tolist()
    num_words = 2 + _NUM_SECTIONS + sum(lengths)
    rest = np.empty(max(0, num_words - _CAPACITY), np.int32)
    if len(rest):
        ranks.broadcast(torch.from_numpy(rest))
    words = np.concatenate([first, rest])[2 + _NUM_SECTIONS : num_words]
    sections = np.split(words, np.cumsum(lengths)[:-1])
    if kind == MessageKind.FORWARD:
        return Message(MessageKind.FORWARD, num_threads, _from_sections(sections))
    if kind == MessageKind.COPY_BLOCKS:
        numbers, slots, (left_out, is_read), *_ = sections
        blocks = BlockCopy(numbers, slots, int(left_out), bool(is_read))
        return Message(MessageKind.COPY_BLOCKS, num_threads, blocks)
    if kind == MessageKind.READ_KEYS:
        (layer, kv_head), slots, *_ = sections
        return Message(MessageKind.READ_KEYS, num_threads, KeyRead(int(layer), int(kv_head), slots))
    return Message(MessageKind(kind), num_threads)


def _send(ranks: Ranks, kind: MessageKind, num_threads: int, sections: list[Ints]) -> None:
    head = np.array([kind, num_threads, *map(len, sections)], np.int32)
    words = np.concatenate([head, *sections])
    first = np.zeros(_CAPACITY, np.int32)
    first[: len(words)] = words[:_CAPACITY]
    ranks.broadcast(torch.from_numpy(first))
    if len(words) > _CAPACITY:
        ranks.broadcast(torch.from_numpy(words[_CAPACITY:]))


def _to_sections(forward: ForwardInput) -> list[Ints]:
    token_ids, m, logit_rows, taps = forward
    assert isinstance(token_ids, np.ndarray), "other ranks get tokens that the host knows"
    starts, ends = _runs(m.context_index)
    return [
        token_ids, logit_rows, m.slots, m.positions, m.row_start, m.pages, m.page_start, starts, ends,
        np.concatenate([m.context_start, m.context_end, m.path_start]), m.path_index,
        np.array(taps, np.int32),
    ]  # fmt: skip


def _from_sections(sections: list[Ints]) -> ForwardInput:
    token_ids, logit_rows, slots, positions, row_start, pages, page_start, starts, ends, *others = sections
    bounds, path_index, taps = others
    num_rows, num_sequences = len(slots), len(row_start) - 1
    context_start, context_end, path_start = np.split(bounds, [num_sequences + 1, num_sequences + 1 + num_rows])
    context_index = _join_runs(starts, ends)
    context_of = np.repeat(np.arange(num_sequences), np.diff(context_start))
    row_of_path = np.repeat(np.arange(num_rows), np.diff(path_start))
    path_of = np.searchsorted(row_start, row_of_path, side="right") - 1
    metadata = AttentionMetadata(
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
    return ForwardInput(token_ids, metadata, logit_rows, taps.tolist())


def _slots(index: Ints, sequence_of: NDArray[np.int64], pages: Ints, page_start: Ints) -> Ints:
    """Slots of positions given as indices into their sequence's own pages."""
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


def _join_runs(starts: Ints, ends: Ints) -> Ints:
    """The inverse of `_runs`."""
    lengths = ends - starts
    before = np.cumsum(lengths) - lengths
    index: Ints = (np.arange(lengths.sum()) + np.repeat(starts - before, lengths)).astype(np.int32)
    return index

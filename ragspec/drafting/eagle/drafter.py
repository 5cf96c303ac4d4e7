"""The EAGLE drafter: a small head that reads the target's hidden states and drafts a tree of likely continuations.

All sequences share each forward of the head. The head reads lazily: a sequence without drafts costs only the memory of the
states in its window.

The head's keys and values of position t lie under the target's slot of t and belong to the pair (state of t, token t + 1). They
are valid while the slot holds that position and that token follows: a shared prefix may branch off there. The states of a shared
prefix are never computed again, so the head cannot attend to pairs of it that it has not read.

Sources: see `ragspec.drafting.eagle.network`; drafts grow in `ragspec.drafting.growing`, the noise is in
`ragspec.drafting.children`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from collections.abc import Sequence as SequenceOf
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.drafting.block.network import BlockNetwork
from ragspec.drafting.cost_model import CostTable
from ragspec.drafting.drafter import Features, SequenceView
from ragspec.drafting.eagle.network import EagleNetwork
from ragspec.drafting.growing.draft import (
    DraftBatch,
    DraftSettings,
    GrowingDraft,
    NewRows,
    OpenRows,
    ScheduledDraft,
    TreeShape,
)
from ragspec.drafting.growing.drafter import AttendingDrafter
from ragspec.drafting.medusa.network import PrefixNetwork
from ragspec.numerics.attention import PAGE, AttentionMetadata, Ints
from ragspec.numerics.backend import LogitRows
from ragspec.numerics.kv_cache import KvPool, SequenceSlots

_NONE = -1
MOST_DRAFTS = 256
_MOST_VIEWS = 16
"""Most steps whose states are kept as views; then they are copied."""


class SlotMemory:
    """A head's keys beside one pool, and the pair that each slot's keys belong to.

    Has room for the nodes of `MOST_DRAFTS` drafts at once, `num_nodes` each.
    """

    def __init__(self, pool: KvPool, make_cache: Callable[[KvPool, int], KvPool], num_nodes: int) -> None:
        self.pool = pool
        self._pages_a_draft = -(-num_nodes // PAGE)
        self.cache = make_cache(pool, MOST_DRAFTS * self._pages_a_draft * PAGE)
        self._next_tokens = np.full(pool.num_slots, _NONE, np.int64)
        self._stamps = np.full(pool.num_slots, _NONE, np.int64)

    def scratch(self, number: int, num_nodes: int) -> Ints:
        """Slots for the nodes of one draft. A draft beyond the last gets none and ends with its first level."""
        first = self.pool.num_slots + number * self._pages_a_draft * PAGE
        return np.arange(first, first + (num_nodes if number < MOST_DRAFTS else 0), dtype=np.int32)

    def mark(self, slots: Ints, next_tokens: Sequence[int]) -> None:
        """Record that these slots hold the head's keys of pairs with these tokens."""
        self._next_tokens[slots], self._stamps[slots] = next_tokens, self.pool.stamps[slots]

    def known(self, slots: Ints, next_tokens: Sequence[int]) -> NDArray[np.bool_]:
        """Which slots hold the keys of exactly these pairs."""
        same = self._next_tokens[slots] == np.asarray(next_tokens, np.int64)
        return np.asarray(same & (self._stamps[slots] == self.pool.stamps[slots]))


class Pairs(NamedTuple):
    """Pairs that a head has yet to read. Shapes: positions [T], rising, features float32 [T, F], T next tokens."""

    positions: NDArray[np.int64]
    features: Tensor
    next_tokens: list[int]


class Piece(NamedTuple):
    """States of the positions from `start` to before `end`. Shape: float32 [T, H] a tap."""

    start: int
    end: int
    states: tuple[Tensor, ...]

    def last(self, count: int) -> Piece:
        num_left_out = self.end - self.start - count
        return Piece(self.end - count, self.end, tuple(s[num_left_out:] for s in self.states)) if num_left_out else self


def _joined(run: Sequence[Piece]) -> Piece:
    states = tuple(torch.cat(parts) for parts in zip(*(piece.states for piece in run), strict=True))
    return Piece(run[0].start, run[-1].end, states)


class HeadMemory:
    """One sequence: which positions of [0, end) are read, and the states that wait. `window`: positions attended to.

    One draft reads at most `max_read` pairs, the last first: the end of a long prompt is enough to begin with. Later drafts read
    the pairs before, until the window is read.
    """

    def __init__(self, slots: SequenceSlots, memory: SlotMemory, window: int, max_read: int) -> None:
        self.slots = slots
        self._memory = memory
        self._window, self._max_read = window, max_read
        self._read = np.zeros(256, np.bool_)
        self._pieces: list[Piece] = []  # rising
        self._num_states = self._num_views = 0  # of all pieces; steps since states were copied together
        self.end = 0

    def share(self, tokens: Sequence[int], length: int) -> None:
        """Start from a shared prefix, with the pairs of it that the head has read."""
        self._grow(length)
        if length:
            self._read[:length] = self._memory.known(self.slots.slots[:length], tokens[1 : length + 1])
        self.end = length

    def append(self, states: tuple[Tensor, ...]) -> None:
        """Add states of the next positions, without a copy. States beyond the window are dropped.

        After some steps they are copied together, since a view keeps the states of its step's other sequences in memory. Shape:
        float32 [T, H] a tap.
        """
        end = self.end + states[0].shape[0]
        if end > self.end + self._window:
            states = tuple(part[-self._window :].clone() for part in states)
        count = states[0].shape[0]
        self._pieces.append(Piece(end - count, end, states))
        self._num_states += count
        self._num_views, self.end = self._num_views + 1, end
        self._grow(end)
        if self._num_views == _MOST_VIEWS:
            self._copy_views()
        while self._pieces[0].end <= end - self._window:
            first = self._pieces.pop(0)
            self._num_states -= first.end - first.start

    def _copy_views(self) -> None:
        """Make one piece of each run of positions without a gap among the last pieces."""
        runs: list[list[Piece]] = []
        for piece in self._pieces[-_MOST_VIEWS:]:
            if runs and runs[-1][-1].end == piece.start:
                runs[-1].append(piece)
            else:
                runs.append([piece])
        self._pieces[-_MOST_VIEWS:], self._num_views = [_joined(run) for run in runs], 0

    @property
    def num_waiting(self) -> int:
        """Pairs of the window that are not read; 0 also where the last pair is read."""
        if not self._pieces or self._pieces[-1].end < self.end:
            return 0
        return self._num_states - max(0, self.end - self._window - self._pieces[0].start)

    def pairs(self, tokens: Sequence[int]) -> Pairs:
        """The last waiting pairs; the last pair is that of the last token."""
        left, pieces = min(self.num_waiting, self._max_read), list[Piece]()
        for piece in reversed(self._pieces):
            if left == 0:
                break
            pieces.append(piece.last(min(left, piece.end - piece.start)))
            left -= pieces[-1].end - pieces[-1].start
        pieces.reverse()
        at = np.concatenate([np.arange(piece.start, piece.end) for piece in pieces])
        features = torch.cat([torch.cat(piece.states, 1) for piece in pieces])
        return Pairs(at, features, [tokens[position + 1] for position in at.tolist()])

    def context(self, pairs: Pairs) -> tuple[Ints, NewRows]:
        """Slots that the head attends to when these pairs are read too, in order, and the pairs' places among them."""
        first = max(0, self.end - self._window)
        slots, indices = self.slots.slots[first : self.end], pairs.positions - first
        attended = self._read[first : self.end].copy()
        attended[indices] = True
        if not attended.all():
            slots, indices = slots[attended], np.cumsum(attended)[indices] - 1
        return slots, NewRows(indices, pairs.positions)

    def read(self, pairs: Pairs) -> None:
        """Record that the head has computed these pairs, the last that wait."""
        self._memory.mark(self.slots.slots[pairs.positions], pairs.next_tokens)
        self._read[pairs.positions] = True
        left = len(pairs.positions)
        self._num_states -= left
        while left:
            piece = self._pieces.pop()
            num_kept = max(0, piece.end - piece.start - left)
            left -= piece.end - piece.start - num_kept
            if num_kept:  # copied, since a view would keep the whole piece
                states = tuple(part[:num_kept].clone() for part in piece.states)
                self._pieces.append(Piece(piece.start, piece.start + num_kept, states))

    def _grow(self, length: int) -> None:
        if length > len(self._read):
            self._read = np.concatenate([self._read, np.zeros(max(length, len(self._read)), np.bool_)])


Network = TypeVar("Network", EagleNetwork, PrefixNetwork, BlockNetwork)
"""A network that keeps keys and reads pairs (state of the target, next token)."""
HEAD_WINDOW = 256
"""Positions that a head attends to, unless it is configured otherwise."""


class HeadDraft(GrowingDraft):
    """A draft that begins with the pairs that the head has yet to read."""

    memory: HeadMemory

    def __init__(self, sequence: SequenceView, memory: HeadMemory, settings: DraftSettings, num_levels: int) -> None:
        super().__init__(sequence, memory, settings, num_levels)
        self.pairs = memory.pairs(sequence.tokens)

    def scheduled(self) -> ScheduledDraft:
        context, rows = self.memory.context(self.pairs)
        return ScheduledDraft(context, len(rows.indices), self.memory.end, self.scratch, rows)


class PairDrafter(AttendingDrafter[HeadDraft], Generic[Network]):
    """Reads pairs lazily and keeps their keys. `window`: positions that the head attends to; `max_read`: pairs that one draft
    reads. `name`: of the drafter, where there are several of its class."""

    draft_class = HeadDraft

    def __init__(
        self,
        network: Network,
        shape: TreeShape,
        costs: CostTable,
        *,
        window: int = HEAD_WINDOW,
        max_read: int = 48,
        name: str = "",
    ) -> None:
        self.name = name or self.name
        super().__init__(network.draft_ids, network.vocab_size, shape, costs)
        self.network: Network = network
        self.taps = network.taps
        self._window, self._max_read = window, max_read
        self._slots: SlotMemory | None = None
        self._memories: dict[tuple[str, int], HeadMemory] = {}

    def observe(self, sequence: SequenceView, tokens: SequenceOf[int], features: Features) -> None:
        slots, states = sequence.slots, tuple(features[tap] for tap in self.taps)
        if slots is None or not states[0].shape[0]:
            return
        memory = self._memories.get(sequence.key)
        start = slots.length - states[0].shape[0]
        if memory is None or memory.slots is not slots or memory.end != start:
            memory = HeadMemory(slots, self._slot_memory(slots.pool), self._window, self._max_read)
            memory.share(sequence.tokens, start)
            self._memories[sequence.key] = memory
        memory.append(states)
        self._note_states(sequence, start, states)

    def _note_states(self, sequence: SequenceView, start: int, states: tuple[Tensor, ...]) -> None:
        """States of the positions from `start`. Shape: float32 [T, H] a tap."""

    def finish(self, sequence: SequenceView) -> None:
        super().finish(sequence)
        self._memories.pop(sequence.key, None)

    def _memory(self, sequence: SequenceView) -> HeadMemory | None:
        """A sequence's memory, if it is complete."""
        memory = self._memories.get(sequence.key)
        if memory is None or memory.slots is not sequence.slots or memory.end != len(sequence.tokens) - 1:
            return None
        return memory if memory.num_waiting > 0 else None

    @property
    def num_own_slots(self) -> int:
        """Slots for the nodes of one draft."""
        return 0

    def _slot_memory(self, pool: KvPool) -> SlotMemory:
        if self._slots is None or self._slots.pool is not pool:
            self._slots = SlotMemory(pool, self.network.make_cache, self.num_own_slots)
        return self._slots

    def _scheduled(self, drafts: list[HeadDraft]) -> tuple[list[ScheduledDraft], KvPool]:
        assert self._slots is not None
        for number, draft in enumerate(drafts):
            draft.scratch = self._slots.scratch(number, draft.num_nodes)
        return [draft.scheduled() for draft in drafts], self._slots.cache

    def _read(self, drafts: list[HeadDraft], rows: DraftBatch, cache: KvPool) -> torch.Tensor:
        """The head's first forward, over all unread pairs. Returns the state of each sequence's last pair. Shape: [B, H]."""
        token_ids = np.array([token for draft in drafts for token in draft.pairs.next_tokens], np.int32)
        features = torch.cat([draft.pairs.features for draft in drafts])
        hidden = self.network.first(token_ids, features, cache, rows.chains())
        for draft in drafts:
            draft.memory.read(draft.pairs)
        ends = np.cumsum([len(draft.pairs.next_tokens) for draft in drafts]) - 1
        return hidden.index_select(0, self.network.backend.tokens(ends))


class EagleDrafter(PairDrafter[EagleNetwork]):
    """See the module."""

    name = "eagle"

    @property
    def num_own_slots(self) -> int:
        shape = self._settings.shape
        return max(1, (shape.max_depth - 1) * shape.max_width)

    def _logits(self, states: torch.Tensor) -> LogitRows:
        return self.network.logits(states)

    def _descend(self, nodes: OpenRows, states: Tensor, metadata: AttentionMetadata, cache: KvPool) -> Tensor:
        """The head's forward over the open nodes. Shapes: [N of the level above, H] -> [N, H]."""
        above = states.index_select(0, self.network.backend.tokens(nodes.above))
        return self.network.outputs(nodes.token_ids, above, cache, metadata, nodes.depth)


class PairTimer(Generic[Network]):
    """Times a network's forwards over a context of zeros. Keys that it writes are never read."""

    def __init__(self, network: Network, pool: KvPool) -> None:
        self.network: Network = network
        self._num_slots = pool.num_slots
        self._cache = network.make_cache(pool)

    def seconds(self, num_rows: int, context: int) -> float:
        """Seconds of one forward of so many rows, logits included."""
        network, slots = self.network, np.arange(context + num_rows, dtype=np.int32)
        assert len(slots) <= self._num_slots, "the kernel would write beside the cache"
        rows = DraftBatch([ScheduledDraft(slots, num_rows, len(slots), slots[:0])]).chains()
        features = torch.zeros(num_rows, network.num_features, device=network.backend.device)
        token_ids = np.zeros(num_rows, np.int32)
        begin = time.perf_counter()
        network.first_logits(network.first(token_ids, features, self._cache, rows), token_ids)
        network.backend.wait()
        return time.perf_counter() - begin

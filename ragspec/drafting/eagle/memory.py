"""A head's memory of each running sequence: the target's states that the head has yet to read, and the slots of its own keys.

The head's keys and values of position t lie under the target's slot of t and belong to the pair (state of t, token t + 1). They
are valid while the slot holds that position and that token follows: a shared prefix may branch off there. The states of a shared
prefix are never computed again, so the head cannot attend to pairs of it that it has not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.drafting.growing.batch import NewRows
from ragspec.numerics.attention import PAGE, Ints
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

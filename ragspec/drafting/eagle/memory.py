"""A head's memory of each running sequence: the target's states that the head has yet to read, and the slots of its own keys.

The head's keys and values of position t lie under the target's slot of t and belong to the pair (state of t, token t + 1). They
are valid while the slot holds that position and that token follows: a shared prefix may branch off there. The states of a shared
prefix are never computed again, so the head cannot attend to pairs of it that it has not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.numerics.attention import PAGE, Ints
from ragspec.numerics.kv_cache import KvPool, SequenceSlots

_NONE = -1
_MOST_DRAFTS = 256
_MOST_READ = 48
"""The most pairs that one draft reads. The end of a long prompt is enough to begin with; reading all takes a step's time."""


class KeepsKeys(Protocol):
    def make_cache(self, pool: KvPool, num_own_slots: int = 0) -> KvPool: ...


class SlotMemory:
    """A head's keys beside one pool, and the pair that each slot's keys belong to.

    Has room for the nodes of `_MOST_DRAFTS` drafts at once, `num_nodes` each.
    """

    def __init__(self, pool: KvPool, network: KeepsKeys, num_nodes: int) -> None:
        self.pool = pool
        self._pages_a_draft = -(-num_nodes // PAGE)
        self.cache = network.make_cache(pool, _MOST_DRAFTS * self._pages_a_draft * PAGE)
        self._next_tokens = np.full(pool.num_slots, _NONE, np.int64)
        self._stamps = np.full(pool.num_slots, _NONE, np.int64)

    def scratch(self, number: int, num_nodes: int) -> Ints:
        """Slots for the nodes of one draft. A draft beyond the last gets none and ends with its first level."""
        first = self.pool.num_slots + number * self._pages_a_draft * PAGE
        return np.arange(first, first + (num_nodes if number < _MOST_DRAFTS else 0), dtype=np.int32)

    def mark(self, slots: Ints, next_tokens: Sequence[int]) -> None:
        """Record that these slots hold the head's keys of pairs with these tokens."""
        self._next_tokens[slots], self._stamps[slots] = next_tokens, self.pool.stamps[slots]

    def known(self, slots: Ints, next_tokens: Sequence[int]) -> NDArray[np.bool_]:
        """Which slots hold the keys of exactly these pairs."""
        same = self._next_tokens[slots] == np.asarray(next_tokens, np.int64)
        return np.asarray(same & (self._stamps[slots] == self.pool.stamps[slots]))


class Pairs(NamedTuple):
    """Pairs that a head has yet to read. `start`: position of the first pair. Shapes: features float32 [T, F], T next tokens."""

    start: int
    features: Tensor
    next_tokens: list[int]


class HeadMemory:
    """One sequence. Positions [0, length) are read or given up; states of [length, end) wait. `window`: positions attended to."""

    def __init__(self, slots: SequenceSlots, memory: SlotMemory, window: int) -> None:
        self.slots = slots
        self._memory = memory
        self._window = window
        self._read = np.zeros(256, np.bool_)
        self._pieces: list[Tensor] = []
        self.length = self.end = 0

    def share(self, tokens: Sequence[int], length: int) -> None:
        """Start from a shared prefix, with the pairs of it that the head has read."""
        self._grow(length)
        if length:
            self._read[:length] = self._memory.known(self.slots.slots[:length], tokens[1 : length + 1])
        self.length = self.end = length

    def append(self, features: Tensor) -> None:
        """Add states of the next positions. States beyond the window are dropped. Shape: float32 [T, F]."""
        self._pieces.append(features)
        self.end += len(features)
        self._grow(self.end)
        while self._pieces and self.end - self.length - len(self._pieces[0]) >= self._window:
            self.length += len(self._pieces.pop(0))

    @property
    def num_waiting(self) -> int:
        return min(self.end - self.length, self._window, _MOST_READ)

    def pairs(self, tokens: Sequence[int]) -> Pairs:
        """The last waiting pairs; the last pair is that of the last token."""
        features = self._pieces[0] if len(self._pieces) == 1 else torch.cat(self._pieces)
        start = self.end - self.num_waiting
        return Pairs(start, features[start - self.length :], list(tokens[start + 1 : self.end + 1]))

    def context(self, start: int) -> Ints:
        """Slots before position `start` that the head may attend to, in order."""
        first = max(0, self.end - self._window)
        return np.asarray(self.slots.slots[first:start][self._read[first:start]])

    def read(self, pairs: Pairs) -> None:
        """Record that the head has computed these pairs."""
        self._memory.mark(self.slots.slots[pairs.start : self.end], pairs.next_tokens)
        self._read[pairs.start : self.end] = True
        self._pieces, self.length = [], self.end

    def _grow(self, length: int) -> None:
        if length > len(self._read):
            self._read = np.concatenate([self._read, np.zeros(max(length, len(self._read)), np.bool_)])

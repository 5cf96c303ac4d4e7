"""The EAGLE drafter: a small head that reads the target's hidden states and drafts a tree of likely continuations.

All sequences share each forward of the head. The head reads lazily: a sequence without drafts costs only the memory of the
states in its window.

Sources: see `ragspec.drafting.eagle.network`; drafts grow in `ragspec.drafting.growing`, the noise is in
`ragspec.drafting.children`.
"""

import time
from collections.abc import Sequence as SequenceOf
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from ragspec.drafting.block.network import BlockNetwork
from ragspec.drafting.cost_model import CostTable
from ragspec.drafting.drafter import Features, SequenceView
from ragspec.drafting.eagle.memory import HeadMemory, SlotMemory
from ragspec.drafting.eagle.network import EagleNetwork
from ragspec.drafting.growing.batch import DraftBatch, ScheduledDraft
from ragspec.drafting.growing.draft import DraftSettings, GrowingDraft, OpenRows
from ragspec.drafting.growing.drafter import AttendingDrafter
from ragspec.drafting.growing.shapes import TreeShape
from ragspec.drafting.medusa.network import PrefixNetwork
from ragspec.numerics.attention import AttentionMetadata
from ragspec.numerics.backend import LogitRows
from ragspec.numerics.kv_cache import KvPool

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

    def _draft(self, sequence: SequenceView, memory: HeadMemory, settings: DraftSettings, num_levels: int) -> HeadDraft:
        return HeadDraft(sequence, memory, settings, num_levels)

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
        return self.network.further(nodes.token_ids, above, cache, metadata, nodes.depth)


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

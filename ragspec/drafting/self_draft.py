"""The target as its own drafter: some of its layers draft, all of them verify.

The layers read the target's own keys of the text, so nothing is read twice and no weight or key is kept beside the target's; keys
of a draft's nodes take free slots of the target's pool until the draft is complete. Leaving out all layers behind one is early
exit. `drafting.self_draft.keep` names the layers to keep.

    >>> drafter = SelfDrafter(target, keep=(0, 1, 2, 29), shape=make_shape("chain", 1, 1, 4), costs=costs)

Source: self-speculative decoding (Zhang et al. 2023, arXiv 2309.08168); here coupled with the target's noise.
"""

from collections.abc import Sequence as SequenceOf

import numpy as np
from torch import Tensor

from ragspec.drafting.cost_model import CostTable
from ragspec.drafting.drafter import Budget, SequenceView
from ragspec.drafting.growing.draft import DraftBatch, DraftSettings, GrowingDraft, OpenRows, ScheduledDraft, TreeShape
from ragspec.drafting.growing.drafter import AttendingDrafter
from ragspec.drafting.heads.layer import DraftTarget
from ragspec.numerics.attention import AttentionMetadata
from ragspec.numerics.backend import LogitRows
from ragspec.numerics.kv_cache import KvPool, SequenceSlots
from ragspec.tree import Proposal


class SelfMemory:
    """The last token has no keys yet; the target's keys of all others are in the sequence's slots."""

    num_waiting = 1

    def __init__(self, sequence: SequenceView) -> None:
        self.end = len(sequence.tokens)


class SelfDraft(GrowingDraft):
    """Its first slot is the last token's, the others are its nodes'."""

    def __init__(
        self, sequence: SequenceView, memory: SelfMemory, settings: DraftSettings, num_levels: int, slots: SequenceSlots
    ) -> None:
        super().__init__(sequence, memory, settings, num_levels)
        self.slots, _ = slots.reserve(1 + self.num_nodes)
        self.scratch = self.slots[1:]

    def scheduled(self) -> ScheduledDraft:
        assert self.sequence.slots is not None
        context = np.concatenate([self.sequence.slots.slots, self.slots[:1]])
        return ScheduledDraft(context, 1, self.memory.end, self.scratch)


class SelfDrafter(AttendingDrafter[SelfDraft]):
    """See the module. `keep`: the layers that draft, rising."""

    name = "self"

    def __init__(self, target: DraftTarget, keep: SequenceOf[int], shape: TreeShape, costs: CostTable) -> None:
        super().__init__(np.arange(target.vocab_size), target.vocab_size, shape, costs)
        self._target, self._keep = target, tuple(keep)
        self._slots = SequenceSlots(target.pool)

    def propose(self, sequences: SequenceOf[SequenceView], budget: Budget) -> list[list[Proposal]]:
        if self._slots.pool is not self._target.pool:  # the target has a pool of another size now
            self._slots = SequenceSlots(self._target.pool)
        try:
            return super().propose(sequences, budget)
        finally:
            self._slots.release()

    def _memory(self, sequence: SequenceView) -> SelfMemory | None:
        """None at the end of a prompt: the target reads its last tokens in the very step that a draft would be for."""
        slots = sequence.slots
        has_keys = slots is not None and 0 < slots.length == len(sequence.tokens) - 1
        return SelfMemory(sequence) if has_keys else None

    def _draft(
        self, sequence: SequenceView, memory: SelfMemory, settings: DraftSettings, num_levels: int
    ) -> SelfDraft | None:
        num_slots = 1 + settings.shape.max_depth * settings.shape.max_width
        has_room = self._slots.num_new_pages(num_slots) <= self._target.pool.num_free_pages
        return SelfDraft(sequence, memory, settings, num_levels, self._slots) if has_room else None

    def _scheduled(self, drafts: list[SelfDraft]) -> tuple[list[ScheduledDraft], KvPool]:
        return [draft.scheduled() for draft in drafts], self._target.pool

    def _read(self, drafts: list[SelfDraft], rows: DraftBatch, cache: KvPool) -> Tensor:
        token_ids = np.array([draft.sequence.tokens[-1] for draft in drafts], np.int32)
        return self._target.states_through(self._keep, token_ids, rows.chains())

    def _descend(self, nodes: OpenRows, states: Tensor, metadata: AttentionMetadata, cache: KvPool) -> Tensor:
        return self._target.states_through(self._keep, nodes.token_ids, metadata)

    def _logits(self, states: Tensor) -> LogitRows:
        return self._target.backend.logits(self._target.logits_of(states))

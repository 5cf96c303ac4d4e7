"""Drafters whose network attends to the text: it keeps the keys of text and nodes.

    draft = read the tokens decided since the last draft, then one forward over each level's open nodes

A network reads lazily, when its draft is wanted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from torch import Tensor

from ragspec.drafting.drafter import SequenceView
from ragspec.drafting.growing.batch import DraftBatch, ScheduledDraft
from ragspec.drafting.growing.draft import DraftMemory, OpenRows
from ragspec.drafting.growing.drafter import D, GrowingDrafter, Level, Levels
from ragspec.numerics.attention import AttentionMetadata
from ragspec.numerics.backend import LogitRows
from ragspec.numerics.kv_cache import KvPool

_CATCH_UP_STEPS = 24
"""Steps over which the reading of a prompt is counted, if so many are to come."""


class ReadingMemory(DraftMemory, Protocol):
    """What a network has read of one sequence."""

    @property
    def num_waiting(self) -> int:
        """Tokens that this draft and later drafts have yet to read."""


class AttendingDrafter(GrowingDrafter[D]):
    """See the module."""

    def _ready(self, sequence: SequenceView) -> ReadingMemory | None:
        """A sequence's memory, if a draft can be grown from it and be of use."""
        raise NotImplementedError

    def _scheduled(self, drafts: list[D]) -> tuple[list[ScheduledDraft], KvPool]:
        """Each draft's part of the forwards, and the pool of their keys."""
        raise NotImplementedError

    def _read(self, drafts: list[D], rows: DraftBatch, cache: KvPool) -> Tensor:
        """The first forward, over all unread tokens. Returns the state of each sequence's last token. Shape: [B, H]."""
        raise NotImplementedError

    def _descend(self, nodes: OpenRows, states: Tensor, metadata: AttentionMetadata, cache: KvPool) -> Tensor:
        """The forward over the open nodes. Shapes: [N of the level above, H] -> [N, H]."""
        raise NotImplementedError

    def _logits(self, states: Tensor) -> LogitRows:
        """Logits of the token after each state, over the draft vocabulary. Shapes: [N, H] -> float32 [N, Vd]."""
        raise NotImplementedError

    def cost_s(self, sequences: SequenceOf[SequenceView]) -> float:
        """One forward a level, and a share of the reading that must come first."""
        ready = [memory for s in sequences if (memory := self._ready(s)) is not None]
        if not ready:
            return math.inf
        longest = max(memory.end for memory in ready)
        behind = sum(max(0, memory.num_waiting - 4) for memory in ready)
        num_steps = min(_CATCH_UP_STEPS, 1 + max(s.most_tokens for s in sequences) // 2)
        reading_s = self._costs.cost_s(behind, longest) / num_steps if behind else 0.0
        rows = len(ready) * self._settings.shape.max_width
        first_s = self._costs.cost_s(4 * len(ready), longest)
        return reading_s + first_s + (self._num_levels - 1.0) * self._costs.cost_s(rows, longest)

    def _levels(self, drafts: list[D]) -> Levels:
        parts, cache = self._scheduled(drafts)
        for draft in drafts:
            if not len(draft.scratch):  # no slots, no second level
                draft.max_depth = min(draft.max_depth, 1)
        rows = DraftBatch(parts)
        states = self._read(drafts, rows, cache)
        nodes = yield Level(self._logits(states), sum(part.num_new for part in parts))
        while True:
            states = self._descend(nodes, states, rows.level(nodes.paths, nodes.path_slots), cache)
            nodes = yield Level(self._logits(states), len(nodes.token_ids))

"""The drafter of heads that draft a whole block in one forward (P-EAGLE, DFlash, DSpark).

A draft's forward has a row for each level of the tree; levels below the first cost a choice of children, no forward. With a bias
by the previous token each node has logits of its own, else all nodes of a level share them.

Sources: see `ragspec.drafting.block.network`; drafts grow in `ragspec.drafting.growing`.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ragspec.drafting.block.network import BlockNetwork
from ragspec.drafting.cost_model import CostTable
from ragspec.drafting.drafter import Budget, SequenceView
from ragspec.drafting.eagle.drafter import HeadDraft, PairDrafter
from ragspec.drafting.eagle.memory import MOST_DRAFTS, HeadMemory
from ragspec.drafting.growing.batch import DraftBatch, NewRows, ScheduledDraft
from ragspec.drafting.growing.draft import DraftSettings
from ragspec.drafting.growing.drafter import Level, Levels
from ragspec.drafting.growing.shapes import TreeShape
from ragspec.numerics.attention import Ints


class BlockDrafter(PairDrafter[BlockNetwork]):
    """See the module."""

    name = "eagle"

    def __init__(self, network: BlockNetwork, shape: TreeShape, costs: CostTable, **options: Any) -> None:
        super().__init__(network, shape, costs, **options)
        self.nodes_share_rows = not network.block.markov_rank
        self._num_guesses = network.block.num_guesses or shape.max_depth
        self._num_own = network.block.block_size or self._num_guesses - 1
        self.first_rows = 4 + self._num_own

    @property
    def num_own_slots(self) -> int:
        return self._num_own

    def _draft(self, sequence: SequenceView, memory: HeadMemory, settings: DraftSettings, num_levels: int) -> HeadDraft:
        return super()._draft(sequence, memory, settings, min(num_levels, self._num_guesses))

    def _grow(self, drafts: list[HeadDraft], budget: Budget) -> None:
        super()._grow(drafts[:MOST_DRAFTS], budget)  # further drafts have no slots for their blocks, and stay empty

    def _level_s(self, num_rows: int, longest: int) -> float:
        return 0.0

    def _refine_costs(self, rows: list[int], longest: int, seconds: float) -> None:
        if rows[0]:
            super()._refine_costs(rows[:1], longest, seconds)

    def _levels(self, drafts: list[HeadDraft]) -> Levels:
        backend, num_levels = self.network.backend, max(draft.max_depth for draft in drafts)
        states, num_rows = self._states(drafts)
        base = self.network.base_logits(states[:, :num_levels].flatten(0, 1)).unflatten(0, (len(drafts), num_levels))
        owners = torch.arange(len(drafts), device=base.device)
        previous = backend.tokens(np.array([draft.sequence.tokens[-1] for draft in drafts], np.int32))
        for level in range(num_levels):
            nodes = yield Level(self.network.level_logits(base[owners, level], previous), num_rows)
            owners, previous, num_rows = owners[backend.tokens(nodes.above)], backend.tokens(nodes.token_ids), 0

    def _states(self, drafts: SequenceOf[HeadDraft]) -> tuple[Tensor, int]:
        """The states of each draft's guesses, and the rows of the forwards. Shape: [B, guesses, H]."""
        assert self._slots is not None
        network, cache = self.network, self._slots.cache
        is_causal, mask = network.block.is_causal, network.block.mask_token_id
        texts = [draft.scheduled() for draft in drafts]
        features = [draft.pairs.features for draft in drafts]
        blocks, token_ids = [], list[int]()
        for number, (draft, text) in enumerate(zip(drafts, texts, strict=True)):
            blocks.append(_block(text, self._slots.scratch(number, self._num_own), is_causal))
            token_ids += draft.pairs.next_tokens if is_causal else draft.sequence.tokens[-1:]
            token_ids += [mask] * (self._num_own - (not is_causal))
        if is_causal:
            masks = network.mask_hidden.expand(self._num_own, -1)
            features = [part for own in features for part in (own, masks)]
        joined = torch.cat(features)
        if not is_causal:
            network.read(joined, cache, DraftBatch(texts).chains())
        rows = DraftBatch(blocks).chains(is_causal=is_causal)
        hidden = network.first(np.array(token_ids, np.int32), joined, cache, rows)
        for draft in drafts:
            draft.memory.read(draft.pairs)
        ends = np.cumsum([part.num_new for part in blocks])
        guesses = ends[:, None] - np.arange(self._num_guesses, 0, -1)
        num_rows = len(token_ids) + (0 if is_causal else sum(part.num_new for part in texts))
        return hidden[network.backend.tokens(guesses)], num_rows


def _block(text: ScheduledDraft, slots: Ints, joins_text: bool) -> ScheduledDraft:
    """The rows of a block behind the text. `joins_text`: the text's new rows are rows of the same forward."""
    places = np.arange(len(slots))
    rows = NewRows(len(text.context) + places, text.end + places)
    if joins_text:
        rows = NewRows(*map(np.concatenate, zip(text.new_rows, rows, strict=True)))
    context = np.concatenate([text.context, slots])
    return ScheduledDraft(context, len(rows.indices), text.end + len(slots), slots[:0], rows)

"""The drafters with one head for each position ahead, which read the target's last hidden state: Medusa and Hydra.

Head i guesses the token at distance i + 2 from the state, so level i + 1 of the tree. A Medusa head reads nothing else: its level
is the same below all nodes. A grounded Hydra head also reads the path to its node. These heads keep no keys, so there is no
window, and every state is enough to draft from; Hydra++ keeps its prefix layer's keys as an EAGLE head does.

Sources: see `ragspec.drafting.medusa.network`; drafts grow in `ragspec.drafting.growing`, the noise is in
`ragspec.drafting.children`.
"""

import math
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ragspec.drafting.cost_model import CostTable
from ragspec.drafting.drafter import Features, SequenceView
from ragspec.drafting.eagle.drafter import HeadDraft, PairDrafter
from ragspec.drafting.growing.draft import DraftBatch, GrowingDraft, TreeShape
from ragspec.drafting.growing.drafter import GrowingDrafter, Level, Levels
from ragspec.drafting.medusa.network import PositionNetwork, PrefixNetwork


class LastState(NamedTuple):
    """The target's state after `end` tokens. Shape: float32 [1, H]."""

    end: int
    state: Tensor


class MedusaDrafter(GrowingDrafter[GrowingDraft]):
    """See the module."""

    name = "medusa"
    draft_class = GrowingDraft

    def __init__(self, network: PositionNetwork, shape: TreeShape, costs: CostTable) -> None:
        super().__init__(np.arange(network.vocab_size), network.vocab_size, shape, costs)
        self.network, self.taps, self.nodes_share_rows = network, network.taps, not network.is_grounded
        self._most_levels = network.num_heads
        self._states: dict[tuple[str, int], LastState] = {}

    def observe(self, sequence: SequenceView, tokens: SequenceOf[int], features: Features) -> None:
        states = features[self.taps[0]]
        if sequence.slots is not None and states.shape[0]:
            self._states[sequence.key] = LastState(sequence.slots.length, states[-1:].clone())

    def finish(self, sequence: SequenceView) -> None:
        super().finish(sequence)
        self._states.pop(sequence.key, None)

    def cost_s(self, sequences: SequenceOf[SequenceView]) -> float:
        """One forward a level."""
        num_rows = sum(self._ready(sequence) is not None for sequence in sequences)
        if not self.nodes_share_rows:
            num_rows *= self._settings.shape.max_width
        return self._num_levels * self._costs.cost_s(num_rows, 0) if num_rows else math.inf

    def _memory(self, sequence: SequenceView) -> LastState | None:
        """The state before the sequence's last token."""
        last = self._states.get(sequence.key)
        return last if last is not None and last.end == len(sequence.tokens) - 1 else None

    def _levels(self, drafts: list[GrowingDraft]) -> Levels:
        return levels_of(self.network, torch.cat([draft.memory.state for draft in drafts]), drafts)


class HydraDrafter(MedusaDrafter):
    """As `MedusaDrafter`, under Hydra's name."""

    name = "hydra"


class PrefixHydraDrafter(PairDrafter[PrefixNetwork]):
    """Hydra++: a draft first reads the states that are new through the prefix layer."""

    name = "hydra"

    def __init__(self, network: PrefixNetwork, shape: TreeShape, costs: CostTable, **options: Any) -> None:
        super().__init__(network, shape, costs, **options)
        self.nodes_share_rows, self._most_levels = not network.is_grounded, network.num_heads

    def _levels(self, drafts: list[HeadDraft]) -> Levels:
        assert self._slots is not None
        parts = [draft.scheduled() for draft in drafts]
        states = self._read(drafts, DraftBatch(parts), self._slots.cache)
        yield from levels_of(self.network, states, drafts)


def levels_of(network: PositionNetwork, states: Tensor, drafts: SequenceOf[GrowingDraft]) -> Levels:
    """One head a level. Shape: states float32 [B, H], of one draft each."""
    inputs = network.inputs(states, np.array([draft.sequence.tokens[-1] for draft in drafts], np.int32))
    for head in range(network.num_heads):
        nodes = yield Level(network.logits(inputs, head), len(inputs))
        inputs = inputs.index_select(0, network.backend.tokens(nodes.above))
        if network.is_grounded:
            inputs = network.grounded(inputs, nodes.token_ids)

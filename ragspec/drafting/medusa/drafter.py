"""The Medusa drafter: heads that each read the target's last hidden state and guess one position ahead.

Head i guesses the token at distance i + 2 from the state, so level i + 1 of the tree, the same for all nodes of that level. Heads
read nothing else: neither keys nor text, so there is no window, and every state is enough to draft from.

Sources: see `ragspec.drafting.medusa.network`; drafts grow in `ragspec.drafting.growing`, the noise is in
`ragspec.drafting.coupling`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ragspec.drafting.cost_model import CostTable
from ragspec.drafting.drafter import Features, SequenceView
from ragspec.drafting.growing.draft import DraftSettings, GrowingDraft
from ragspec.drafting.growing.drafter import GrowingDrafter, Level
from ragspec.drafting.growing.shapes import TreeShape
from ragspec.drafting.medusa.network import MedusaNetwork


class LastState(NamedTuple):
    """The target's state after `end` tokens. Shape: float32 [1, H]."""

    end: int
    state: Tensor


class MedusaDraft(GrowingDraft):
    """A draft that grows from one state alone."""

    memory: LastState


class MedusaDrafter(GrowingDrafter[MedusaDraft]):
    """See the module. `coupled`: whether drafts use the sampling noise."""

    name = "medusa"
    nodes_share_rows = True

    def __init__(self, network: MedusaNetwork, shape: TreeShape, costs: CostTable, *, coupled: bool = True) -> None:
        super().__init__(np.arange(network.vocab_size), network.vocab_size, shape, costs, coupled=coupled)
        self.network, self.taps = network, network.taps
        self._states: dict[tuple[str, int], LastState] = {}

    def observe(self, sequence: SequenceView, tokens: SequenceOf[int], features: Features) -> None:
        states = features[self.taps[0]]
        if sequence.slots is not None and len(states):
            self._states[sequence.key] = LastState(sequence.slots.length, states[-1:].clone())

    def finish(self, sequence: SequenceView) -> None:
        super().finish(sequence)
        self._states.pop(sequence.key, None)

    def cost_s(self, sequences: SequenceOf[SequenceView]) -> float:
        """One forward a level."""
        num_ready = sum(self._ready(sequence) is not None for sequence in sequences)
        return self._num_levels * self._costs.cost_s(self._num_rows(num_ready), 0) if num_ready else math.inf

    def _num_rows(self, num_sequences: int) -> int:
        return num_sequences if self.nodes_share_rows else num_sequences * self._settings.shape.max_width

    def _ready(self, sequence: SequenceView) -> LastState | None:
        """The state before the sequence's last token, if a draft can be of use."""
        last = self._states.get(sequence.key)
        fits = last is not None and last.end == len(sequence.tokens) - 1
        return last if fits and sequence.most_tokens > 1 and sequence.key not in self._failed else None

    def _draft(self, sequence: SequenceView, settings: DraftSettings, num_levels: int) -> MedusaDraft | None:
        last, num_levels = self._ready(sequence), min(num_levels, self.network.num_heads)
        return None if last is None else MedusaDraft(sequence, last, settings, num_levels)

    def _levels(self, drafts: list[MedusaDraft]) -> Iterator[Level]:
        states = torch.cat([draft.memory.state for draft in drafts])
        for head in range(self.network.num_heads):
            yield Level(self.network.logits(states, head), len(states))
            rows = list(dict.fromkeys(node.row for draft in drafts for node in draft.open))
            states = states[self.network.backend.tokens(np.array(rows))]

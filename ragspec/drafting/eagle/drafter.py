"""The EAGLE drafter: a small head that reads the target's hidden states and drafts a tree of likely continuations.

    draft = read the pairs decided since the last draft, then level by level:
            logits -> children (with the request's own noise) -> the most probable paths -> one forward of the head

All sequences share each forward of the head. The head reads lazily: a sequence without drafts costs only the memory of the
states in its window. Drafting stops where another level would take more time than it is likely to save.

Sources: see `ragspec.drafting.eagle.network`; tree shapes are in `shapes`, the noise in `ragspec.drafting.coupling`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from numpy.typing import NDArray

from ragspec.drafting.acceptance import Cell, ChildAcceptance
from ragspec.drafting.cost_model import CostTable
from ragspec.drafting.coupling import Coupling
from ragspec.drafting.drafter import Budget, Drafter, Features, SequenceView
from ragspec.drafting.eagle.batch import DraftBatch, ScheduledDraft
from ragspec.drafting.eagle.draft_tree import (
    DRAWN,
    GREEDY,
    WITH_NOISE,
    WITHOUT_NOISE,
    DraftSettings,
    GrowingDraft,
    OpenNode,
)
from ragspec.drafting.eagle.memory import HeadMemory, SlotMemory
from ragspec.drafting.eagle.network import EagleNetwork
from ragspec.drafting.eagle.shapes import TreeShape, make_shape
from ragspec.drafting.stochastic_drafts import ChildSampler, draws_children, needs_chain
from ragspec.errors import EngineError
from ragspec.numerics.backend import LogitRows
from ragspec.numerics.kv_cache import KvPool
from ragspec.tree import Proposal

log = logging.getLogger(__name__)

_CATCH_UP_STEPS = 24
"""Steps over which the reading of a prompt is counted, if so many are to come."""
_LEVELS_MEMORY = 0.95


class EagleDrafter(Drafter):
    """See the module. `window`: positions that the head attends to; `coupled`: whether drafts use the sampling noise."""

    name = "eagle"

    def __init__(
        self, network: EagleNetwork, shape: TreeShape, costs: CostTable, *, window: int = 256, coupled: bool = True
    ) -> None:
        self.network = network
        self.taps = network.taps
        self.acceptance = ChildAcceptance()
        self._settings = DraftSettings(self.name, shape, self.acceptance, least_prob=0.004)
        self._chain = self._settings._replace(shape=make_shape("chain", 1, 1, shape.max_depth))
        self._costs = costs
        self._window = window
        self._coupling = Coupling(network.draft_ids, network.config.vocab_size, coupled)
        self._slots: SlotMemory | None = None
        self._memories: dict[tuple[str, int], HeadMemory] = {}
        self._failed: set[tuple[str, int]] = set()
        self._num_levels = 2.0

    def observe(self, sequence: SequenceView, tokens: SequenceOf[int], features: Features) -> None:
        slots, states = sequence.slots, torch.cat([features[tap] for tap in self.taps], 1)
        if slots is None or not len(states):
            return
        memory = self._memories.get(sequence.key)
        start = slots.length - len(states)
        if memory is None or memory.slots is not slots or memory.end != start:
            memory = HeadMemory(slots, self._slot_memory(slots.pool), self._window)
            memory.share(sequence.tokens, start)
            self._memories[sequence.key] = memory
        memory.append(states)

    def learn(self, feedback: object, accepted: bool) -> None:
        if isinstance(feedback, Cell):
            self.acceptance.learn(feedback, accepted)

    def finish(self, sequence: SequenceView) -> None:
        self._memories.pop(sequence.key, None)
        self._failed.discard(sequence.key)

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

    def propose(self, sequences: SequenceOf[SequenceView], budget: Budget) -> list[list[Proposal]]:
        drafts: list[GrowingDraft | None] = []
        for sequence, depth in zip(sequences, budget.depths, strict=True):
            memory = self._ready(sequence)
            settings = self._chain if needs_chain(sequence) else self._settings
            if budget.token_s == 0.0:  # time does not count, so no node is too improbable
                settings = settings._replace(least_prob=0.0)
            drafts.append(
                None if memory is None else GrowingDraft(sequence, memory, self._mode(sequence), settings, depth)
            )
        self._grow([draft for draft in drafts if draft is not None], budget)
        return [[] if draft is None or draft.sequence.key in self._failed else draft.proposals for draft in drafts]

    def _mode(self, sequence: SequenceView) -> int:
        if sequence.request.params.greedy:
            return GREEDY
        if draws_children(sequence):
            return DRAWN
        return WITH_NOISE if self._coupling.uses_noise(sequence) else WITHOUT_NOISE

    def _ready(self, sequence: SequenceView) -> HeadMemory | None:
        """A sequence's memory, if it is complete and a draft can be of use."""
        memory = self._memories.get(sequence.key)
        decided = len(sequence.tokens) - 1
        fits = (
            memory is not None and memory.slots is sequence.slots and memory.end == decided and memory.num_waiting > 0
        )
        return memory if fits and sequence.most_tokens > 1 and sequence.key not in self._failed else None

    def _slot_memory(self, pool: KvPool) -> SlotMemory:
        if self._slots is None or self._slots.pool is not pool:
            shape = self._settings.shape
            num_nodes = (shape.max_depth - 1) * shape.max_width
            self._slots = SlotMemory(pool, self.network, max(1, num_nodes))
        return self._slots

    def _grow(self, drafts: list[GrowingDraft], budget: Budget) -> None:
        """Grow all drafts level by level, until another level would not pay."""
        if not drafts:
            return
        assert self._slots is not None
        for number, draft in enumerate(drafts):
            draft.scratch = self._slots.scratch(number, draft.num_nodes)
        rows = DraftBatch([_scheduled(draft) for draft in drafts])
        depth, begin, num_rows = 1, time.perf_counter(), sum(len(draft.pairs.next_tokens) for draft in drafts)
        states = self._read(drafts, rows, self._slots.cache)
        while True:
            goes_on = self._extend(drafts, states, depth, budget)
            self._costs.refine(num_rows, _longest(drafts), time.perf_counter() - begin)
            if not goes_on:
                break
            depth, begin, num_rows = depth + 1, time.perf_counter(), sum(len(draft.open) for draft in drafts)
            states = self._descend(drafts, states, rows, self._slots.cache)
        if max(draft.max_depth for draft in drafts) > 1:
            self._num_levels += (1.0 - _LEVELS_MEMORY) * (depth - self._num_levels)

    def _read(self, drafts: list[GrowingDraft], rows: DraftBatch, cache: KvPool) -> torch.Tensor:
        """The head's first forward, over all unread pairs. Returns the state of each sequence's last pair. Shape: [B, H]."""
        token_ids = np.array([token for draft in drafts for token in draft.pairs.next_tokens], np.int32)
        features = torch.cat([draft.pairs.features for draft in drafts])
        hidden = self.network.first(token_ids, features, cache, rows.chains())
        for draft in drafts:
            draft.memory.read(draft.pairs)
        ends = np.cumsum([len(draft.pairs.next_tokens) for draft in drafts]) - 1
        return hidden[self.network.backend.tokens(ends)]

    def _extend(self, drafts: list[GrowingDraft], states: torch.Tensor, depth: int, budget: Budget) -> bool:
        """Propose the children of all open nodes. False: no node goes on, or another level would not pay."""
        logits = self.network.logits(states)  # [N, Vd]
        first, chosen = 0, []
        for draft, going_on in zip(drafts, self._children(drafts, logits, depth), strict=True):
            room = len(draft.scratch) > 0 and depth < draft.max_depth
            chosen.append([node._replace(row=node.row + first) for node in going_on] if room else [])
            first += len(draft.open)
        gain = sum(node.branch.path_prob for those in chosen for node in those)
        num_rows = sum(map(len, chosen))
        for draft, those in zip(drafts, chosen, strict=True):
            draft.descend(those)
        saved_s = gain * self.acceptance.typical * budget.token_s
        return num_rows > 0 and (budget.token_s == 0.0 or saved_s > self._costs.cost_s(num_rows, _longest(drafts)))

    def _drop_failed(self, drafts: list[GrowingDraft], finite: NDArray[np.bool_]) -> None:
        """End drafting for sequences with logits that are not finite. Raises: EngineError if no logits are finite."""
        if finite.all():
            return
        first = 0
        for draft in drafts:
            own = slice(first, first := first + len(draft.open))
            if not finite[own].all():
                log.warning(
                    "request %r: the head's logits are not finite; no more drafts for it", draft.sequence.request.id
                )
                self._failed.add(draft.sequence.key)
        if not finite.any():
            raise EngineError("the head's logits are not finite")

    def _children(self, drafts: list[GrowingDraft], logits: LogitRows, depth: int) -> Iterator[list[OpenNode]]:
        """Propose every draft's next level; yields the nodes that would go on. Shape: logits [N, Vd], all open nodes."""
        owners = [draft.sequence for draft in drafts for _ in draft.open]
        num_children = self._settings.shape.num_children
        picks = self._coupling.pick(logits, owners, depth, num_children)
        self._drop_failed(drafts, picks.finite)
        token_ids = self.network.draft_ids[np.maximum(picks.columns, 0)]
        first = 0
        for draft in drafts:
            own = slice(first, first := first + len(draft.open))
            if draft.sequence.key in self._failed:
                yield []
            elif draft.mode == DRAWN:
                if draft.sampler is None:
                    vocab_size = self.network.config.vocab_size
                    draft.sampler = ChildSampler(draft.sequence, self.network.draft_ids, vocab_size)
                count = draft.settings.shape.num_children
                rows = range(own.start, own.stop)
                yield draft.extend_drawn([draft.sampler.children(logits, row, count) for row in rows])
            else:
                most = 1 if needs_chain(draft.sequence) else num_children
                yield draft.extend(picks.columns[own, :most], picks.scores[own, :most], token_ids[own])

    def _descend(
        self, drafts: list[GrowingDraft], states: torch.Tensor, rows: DraftBatch, cache: KvPool
    ) -> torch.Tensor:
        """The head's forward over the open nodes. Shapes: [N of the level above, H] -> [N, H]."""
        level = [node for draft in drafts for node in draft.open]
        token_ids = np.array([node.token_id for node in level], np.int32)
        above = states[self.network.backend.tokens(np.array([node.row for node in level]))]
        paths = [[node.path for node in draft.open] for draft in drafts]
        return self.network.further(token_ids, above, cache, rows.level(paths))


def _scheduled(draft: GrowingDraft) -> ScheduledDraft:
    memory, pairs = draft.memory, draft.pairs
    new: NDArray[np.int32] = memory.slots.slots[pairs.start : memory.end]
    return ScheduledDraft(np.concatenate([memory.context(pairs.start), new]), len(new), memory.end, draft.scratch)


def _longest(drafts: list[GrowingDraft]) -> int:
    return max(draft.memory.end for draft in drafts)

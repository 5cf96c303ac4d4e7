"""The base of drafters with a network of their own: all sequences' drafts grow together, one forward a level.

    draft = read the tokens decided since the last draft, then level by level:
            logits -> children (with the request's own noise) -> the most probable paths -> one forward

A network reads lazily, when its draft is wanted. Drafting stops where another level would take more time than it is likely to
save.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ragspec.drafting.acceptance import Cell, ChildAcceptance
from ragspec.drafting.cost_model import CostTable
from ragspec.drafting.coupling import Coupling
from ragspec.drafting.drafter import Budget, Drafter, SequenceView
from ragspec.drafting.growing.batch import DraftBatch, ScheduledDraft
from ragspec.drafting.growing.draft import (
    DRAWN,
    GREEDY,
    WITH_NOISE,
    WITHOUT_NOISE,
    DraftMemory,
    DraftSettings,
    GrowingDraft,
    OpenNode,
)
from ragspec.drafting.growing.shapes import TreeShape, make_shape
from ragspec.drafting.stochastic_drafts import ChildSampler, draws_children, needs_chain
from ragspec.errors import EngineError
from ragspec.numerics.backend import LogitRows
from ragspec.numerics.kv_cache import KvPool
from ragspec.tree import Proposal

log = logging.getLogger(__name__)

_CATCH_UP_STEPS = 24
"""Steps over which the reading of a prompt is counted, if so many are to come."""
_LEVELS_MEMORY = 0.95

D = TypeVar("D", bound=GrowingDraft)


class GrowingDrafter(Drafter, Generic[D]):
    """See the module. A subclass says which sequences are ready, and computes the forwards.

    `draft_ids`: the target's id of each token of the draft vocabulary, rising. `coupled`: whether drafts use the sampling noise.
    """

    def __init__(
        self, draft_ids: NDArray[np.int64], vocab_size: int, shape: TreeShape, costs: CostTable, *, coupled: bool
    ) -> None:
        self.acceptance = ChildAcceptance()
        self._draft_ids, self._vocab_size = draft_ids, vocab_size
        self._settings = DraftSettings(self.name, shape, self.acceptance, least_prob=0.004)
        self._chain = self._settings._replace(shape=make_shape("chain", 1, 1, shape.max_depth))
        self._costs = costs
        self._coupling = Coupling(draft_ids, vocab_size, coupled)
        self._failed: set[tuple[str, int]] = set()
        self._num_levels = 2.0

    def _ready(self, sequence: SequenceView) -> DraftMemory | None:
        """A sequence's memory, if a draft can be grown from it and be of use."""
        raise NotImplementedError

    def _draft(self, sequence: SequenceView, settings: DraftSettings, num_levels: int) -> D | None:
        """A new draft of at most so many levels, or None."""
        raise NotImplementedError

    def _scheduled(self, drafts: list[D]) -> tuple[list[ScheduledDraft], KvPool]:
        """Each draft's part of the forwards, and the pool of their keys."""
        raise NotImplementedError

    def _read(self, drafts: list[D], rows: DraftBatch, cache: KvPool) -> Tensor:
        """The first forward, over all unread tokens. Returns the state of each sequence's last token. Shape: [B, H]."""
        raise NotImplementedError

    def _descend(self, drafts: list[D], states: Tensor, rows: DraftBatch, cache: KvPool) -> Tensor:
        """The forward over the open nodes. Shapes: [N of the level above, H] -> [N, H]."""
        raise NotImplementedError

    def _logits(self, states: Tensor) -> LogitRows:
        """Logits of the token after each state, over the draft vocabulary. Shapes: [N, H] -> float32 [N, Vd]."""
        raise NotImplementedError

    def learn(self, feedback: object, accepted: bool) -> None:
        if isinstance(feedback, Cell):
            self.acceptance.learn(feedback, accepted)

    def finish(self, sequence: SequenceView) -> None:
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
        drafts: list[D | None] = []
        for sequence, num_levels in zip(sequences, budget.depths, strict=True):
            settings = self._chain if needs_chain(sequence) else self._settings
            settings = settings._replace(mode=self._mode(sequence))
            if budget.token_s == 0.0:  # time does not count, so no node is too improbable
                settings = settings._replace(least_prob=0.0)
            drafts.append(self._draft(sequence, settings, num_levels))
        self._grow([draft for draft in drafts if draft is not None], budget)
        return [[] if draft is None or draft.sequence.key in self._failed else draft.proposals for draft in drafts]

    def _mode(self, sequence: SequenceView) -> int:
        if sequence.request.params.greedy:
            return GREEDY
        if draws_children(sequence):
            return DRAWN
        return WITH_NOISE if self._coupling.uses_noise(sequence) else WITHOUT_NOISE

    def _grow(self, drafts: list[D], budget: Budget) -> None:
        """Grow all drafts level by level, until another level would not pay."""
        if not drafts:
            return
        parts, cache = self._scheduled(drafts)
        rows, longest = DraftBatch(parts), max(part.end for part in parts)
        depth, begin, num_rows = 1, time.perf_counter(), sum(part.num_new for part in parts)
        states = self._read(drafts, rows, cache)
        while True:
            goes_on = self._extend(drafts, states, depth, budget)
            self._costs.refine(num_rows, longest, time.perf_counter() - begin)
            if not goes_on:
                break
            depth, begin, num_rows = depth + 1, time.perf_counter(), sum(len(draft.open) for draft in drafts)
            states = self._descend(drafts, states, rows, cache)
        if max(draft.max_depth for draft in drafts) > 1:
            self._num_levels += (1.0 - _LEVELS_MEMORY) * (depth - self._num_levels)

    def _extend(self, drafts: list[D], states: Tensor, depth: int, budget: Budget) -> bool:
        """Propose the children of all open nodes. False: no node goes on, or another level would not pay."""
        logits = self._logits(states)  # [N, Vd]
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
        longest = max(draft.memory.end for draft in drafts)
        return num_rows > 0 and (budget.token_s == 0.0 or saved_s > self._costs.cost_s(num_rows, longest))

    def _drop_failed(self, drafts: list[D], finite: NDArray[np.bool_]) -> None:
        """End drafting for sequences with logits that are not finite. Raises: EngineError if no logits are finite."""
        if finite.all():
            return
        first = 0
        for draft in drafts:
            own = slice(first, first := first + len(draft.open))
            if not finite[own].all():
                log.warning(
                    "request %r: the logits of the drafter %s are not finite; no more of its drafts for it",
                    draft.sequence.request.id,
                    self.name,
                )
                self._failed.add(draft.sequence.key)
        if not finite.any():
            raise EngineError(f"the logits of the drafter {self.name} are not finite")

    def _children(self, drafts: list[D], logits: LogitRows, depth: int) -> Iterator[list[OpenNode]]:
        """Propose every draft's next level; yields the nodes that would go on. Shape: logits [N, Vd], all open nodes."""
        owners = [draft.sequence for draft in drafts for _ in draft.open]
        num_children = self._settings.shape.num_children
        picks = self._coupling.pick(logits, owners, depth, num_children)
        self._drop_failed(drafts, picks.finite)
        token_ids = self._draft_ids[np.maximum(picks.columns, 0)]
        first = 0
        for draft in drafts:
            own = slice(first, first := first + len(draft.open))
            if draft.sequence.key in self._failed:
                yield []
            elif draft.settings.mode == DRAWN:
                if draft.sampler is None:
                    draft.sampler = ChildSampler(draft.sequence, self._draft_ids, self._vocab_size)
                count = draft.settings.shape.num_children
                rows = range(own.start, own.stop)
                yield draft.extend_drawn([draft.sampler.children(logits, row, count) for row in rows])
            else:
                most = 1 if needs_chain(draft.sequence) else num_children
                yield draft.extend(picks.columns[own, :most], picks.scores[own, :most], token_ids[own])

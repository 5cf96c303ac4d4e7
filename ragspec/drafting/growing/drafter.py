"""The base of drafters with a network of their own: all sequences' drafts grow together, one forward a level.

    draft = level by level: one forward -> logits -> children (with the request's own noise) -> the most probable paths go on

Drafting stops where another level would take more time than it is likely to save.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ragspec.drafting.acceptance import Cell, ChildAcceptance
from ragspec.drafting.cost_model import CostTable
from ragspec.drafting.coupling import Coupling, most_probable
from ragspec.drafting.drafter import Budget, Drafter, SequenceView
from ragspec.drafting.growing.draft import (
    DRAWN,
    GREEDY,
    WITH_NOISE,
    WITHOUT_NOISE,
    DraftSettings,
    GrowingDraft,
    OpenNode,
)
from ragspec.drafting.growing.shapes import TreeShape, make_shape
from ragspec.drafting.stochastic_drafts import ChildSampler, draws_children, needs_chain
from ragspec.errors import EngineError
from ragspec.numerics.backend import BestTokens, LogitRows
from ragspec.tree import Proposal

log = logging.getLogger(__name__)

_LEVELS_MEMORY = 0.95

D = TypeVar("D", bound=GrowingDraft)


class Level(NamedTuple):
    """Logits of one level's open nodes, and the rows that its forward took. Shape: float32 [N, Vd]."""

    logits: LogitRows
    num_rows: int


class GrowingDrafter(Drafter, Generic[D]):
    """See the module. A subclass says which sequences are ready and what drafts cost, and computes the forwards.

    `draft_ids`: the target's id of each token of the draft vocabulary, rising. `coupled`: whether drafts use the sampling noise.
    """

    nodes_share_rows = False
    """Whether all nodes of one level of a draft have the same children. A level then has one row of logits for each draft."""

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

    def _draft(self, sequence: SequenceView, settings: DraftSettings, num_levels: int) -> D | None:
        """A new draft of at most so many levels, or None."""
        raise NotImplementedError

    def _levels(self, drafts: list[D]) -> Iterator[Level]:
        """The network's forwards, one for each level, each over the nodes that are open when it is asked for."""
        raise NotImplementedError

    def learn(self, feedback: object, accepted: bool) -> None:
        if isinstance(feedback, Cell):
            self.acceptance.learn(feedback, accepted)

    def finish(self, sequence: SequenceView) -> None:
        self._failed.discard(sequence.key)

    def propose(self, sequences: SequenceOf[SequenceView], budget: Budget) -> list[list[Proposal]]:
        drafts: list[D | None] = []
        for sequence, num_levels in zip(sequences, budget.depths, strict=True):
            settings = self._chain if needs_chain(sequence) else self._settings
            settings = settings._replace(mode=self._mode(sequence))
            if (
                budget.token_s == 0.0 or settings.shape.num_nodes is not None
            ):  # time does not count, so no node is too improbable
                settings = settings._replace(least_prob=0.0)
            drafts.append(self._draft(sequence, settings, num_levels))
        self._grow([draft for draft in drafts if draft is not None], budget)
        return [[] if draft is None or draft.sequence.key in self._failed else draft.best() for draft in drafts]

    def _mode(self, sequence: SequenceView) -> int:
        if sequence.request.params.greedy:
            return GREEDY
        if draws_children(sequence):
            return DRAWN
        coupled = self._settings.shape.num_nodes is None and self._coupling.uses_noise(sequence)
        return WITH_NOISE if coupled else WITHOUT_NOISE

    def _grow(self, drafts: list[D], budget: Budget) -> None:
        """Grow all drafts level by level, until another level would not pay."""
        if not drafts:
            return
        begin, depth, longest = time.perf_counter(), 0, max(draft.memory.end for draft in drafts)
        for depth, (logits, num_rows) in enumerate(self._levels(drafts), 1):
            goes_on = self._extend(drafts, logits, depth, budget)
            self._costs.refine(num_rows, longest, time.perf_counter() - begin)
            if not goes_on:
                break
            begin = time.perf_counter()
        if max(draft.max_depth for draft in drafts) > 1:
            self._num_levels += (1.0 - _LEVELS_MEMORY) * (depth - self._num_levels)

    def _extend(self, drafts: list[D], logits: LogitRows, depth: int, budget: Budget) -> bool:
        """Propose the children of all open nodes. False: no node goes on, or another level would not pay."""
        rows, first, chosen = self._rows(drafts), 0, []
        for draft, going_on in zip(drafts, self._children(drafts, logits, depth), strict=True):
            room = depth < draft.max_depth
            chosen.append([node._replace(row=rows[node.row + first]) for node in going_on] if room else [])
            first += len(draft.open)
        gain = sum(node.branch.path_prob for those in chosen for node in those)
        for draft, those in zip(drafts, chosen, strict=True):
            draft.descend(those)
        num_rows = len(set(self._rows(drafts)))
        saved_s = gain * self.acceptance.typical * budget.token_s
        longest = max(draft.memory.end for draft in drafts)
        return num_rows > 0 and (budget.token_s == 0.0 or saved_s > self._costs.cost_s(num_rows, longest))

    def _rows(self, drafts: list[D]) -> list[int]:
        """The row of logits of each open node."""
        if not self.nodes_share_rows:
            return list(range(sum(len(draft.open) for draft in drafts)))
        growing = [draft for draft in drafts if draft.open]
        return [row for row, draft in enumerate(growing) for _ in draft.open]

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

    def _picks(self, drafts: list[D], rows: list[int], logits: LogitRows, depth: int) -> BestTokens:
        """The best children of every open node; of nodes that share a row they are picked once."""
        of_nodes = [draft.sequence for draft in drafts for _ in draft.open]
        owners = dict(zip(rows, of_nodes, strict=True))
        shape = self._settings.shape
        if shape.num_nodes is None:
            picks = self._coupling.pick(logits, list(owners.values()), depth, shape.num_children)
        else:
            picks = most_probable(logits, shape.num_children)
        return BestTokens(picks.columns[rows], picks.scores[rows], picks.finite[rows])

    def _children(self, drafts: list[D], logits: LogitRows, depth: int) -> Iterator[list[OpenNode]]:
        """Propose every draft's next level; yields the nodes that would go on. Shape: logits [N, Vd], all rows."""
        rows = self._rows(drafts)
        picks = self._picks(drafts, rows, logits, depth)
        self._drop_failed(drafts, picks.finite)
        token_ids = self._draft_ids[np.maximum(picks.columns, 0)]
        first = 0
        for draft in drafts:
            own = slice(first, first := first + len(draft.open))
            count = draft.settings.shape.num_children
            if draft.sequence.key in self._failed:
                yield []
            elif draft.settings.mode == DRAWN:
                if draft.sampler is None:
                    draft.sampler = ChildSampler(draft.sequence, self._draft_ids, self._vocab_size)
                yield draft.extend_drawn([draft.sampler.children(logits, row, count) for row in rows[own]])
            else:
                yield draft.extend(picks.columns[own, :count], picks.scores[own, :count], token_ids[own])

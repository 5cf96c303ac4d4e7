"""The base of drafters with a network of their own: all sequences' drafts grow together, one forward a level.

    draft = level by level: one forward -> logits -> children (with the request's own noise) -> the most probable paths go on

Drafting stops where another level would take more time than it is likely to save.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Generator, Iterator
from collections.abc import Sequence as SequenceOf
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ragspec.drafting.acceptance import ChildAcceptance
from ragspec.drafting.cost_model import CostTable
from ragspec.drafting.coupling import Coupling, most_probable
from ragspec.drafting.drafter import Budget, Drafter, SequenceView
from ragspec.drafting.growing.beam import Beam, PickedLevel, can_grow_on_device
from ragspec.drafting.growing.draft import (
    DRAWN,
    GREEDY,
    WITH_NOISE,
    WITHOUT_NOISE,
    DraftSettings,
    GrowingDraft,
    OpenNode,
    OpenRows,
)
from ragspec.drafting.growing.shapes import TreeShape, make_shape
from ragspec.drafting.stochastic_drafts import ChildSampler, draws_children, needs_chain
from ragspec.errors import EngineError
from ragspec.numerics.backend import BestTokens, DeviceLogits, LogitRows
from ragspec.numerics.torch.transfer import to_host
from ragspec.tree import Proposal

log = logging.getLogger(__name__)

_LEVELS_MEMORY = 0.95

D = TypeVar("D", bound=GrowingDraft)


class Level(NamedTuple):
    """Logits of one level's open nodes, and the rows that its forward took. Shape: float32 [N, Vd]."""

    logits: LogitRows
    num_rows: int


Levels = Generator[Level, OpenRows, None]
"""A network's forwards: each but the first over the rows that it is sent."""


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
        self._num_children = min(shape.num_children, len(draft_ids))
        self._settings = DraftSettings(self.name, shape, self.acceptance, least_prob=0.004)
        self._chain = self._settings._replace(shape=make_shape("chain", 1, 1, shape.max_depth))
        self._costs = costs
        self._coupling = Coupling(draft_ids, vocab_size, coupled)
        self._failed: set[tuple[str, int]] = set()
        self._num_levels = min(2.0, shape.max_depth)

    def _draft(self, sequence: SequenceView, settings: DraftSettings, num_levels: int) -> D | None:
        """A new draft of at most so many levels, or None."""
        raise NotImplementedError

    def _levels(self, drafts: list[D]) -> Levels:
        """The network's forwards, one for each level."""
        raise NotImplementedError

    def finish(self, sequence: SequenceView) -> None:
        self._failed.discard(sequence.key)

    def propose(self, sequences: SequenceOf[SequenceView], budget: Budget) -> list[list[Proposal]]:
        drafts: list[D | None] = []
        for sequence, num_levels in zip(sequences, budget.depths, strict=True):
            settings = self._chain if needs_chain(sequence) else self._settings
            settings = settings._replace(mode=self._mode(sequence))
            if budget.token_s == 0.0 or settings.shape.num_nodes is not None:  # no node is too improbable
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
        begin, depth, rows = time.perf_counter(), 0, list[int]()
        for depth, level in enumerate(self._picked(drafts, budget), 1):
            goes_on = self._extend(drafts, level, depth, budget)
            rows.append(level.num_rows)
            if level.is_last or not goes_on:
                self._refine_costs(rows, max(draft.memory.end for draft in drafts), time.perf_counter() - begin)
                begin, rows = time.perf_counter(), []
            if not goes_on:
                break
        if max(draft.max_depth for draft in drafts) > 1:
            self._num_levels += (1.0 - _LEVELS_MEMORY) * (depth - self._num_levels)

    def _picked(self, drafts: list[D], budget: Budget) -> Iterator[PickedLevel]:
        """Each level over the nodes that are open when it is asked for. On a device several grow before the host sees them."""
        levels = self._levels(drafts)
        logits, num_rows = next(levels)
        if not isinstance(logits, np.ndarray) and can_grow_on_device(drafts):
            beam = Beam(drafts, logits.token_ids, shares_rows=self.nodes_share_rows)
            yield from self._grown_on_device(beam, levels, Level(logits, num_rows), budget)
            return
        for depth in itertools.count(1):
            yield PickedLevel(self._picks(drafts, logits, depth), num_rows, logits)
            logits, num_rows = levels.send(self._open_rows(drafts, depth))

    def _grown_on_device(self, beam: Beam, levels: Levels, level: Level, budget: Budget) -> Iterator[PickedLevel]:
        """The levels that are certain or usual come at once, further levels one by one.

        A draft that ends before the usual depth has computed levels in vain; their time counts as that of its other levels.
        """
        at_once = beam.max_depth if budget.token_s == 0.0 else min(beam.max_depth, round(self._num_levels))
        for depth in range(1, beam.max_depth + 1):
            if depth > 1:
                level = levels.send(beam.open_rows())
            assert not isinstance(level.logits, np.ndarray)
            beam.grow(self._best(level.logits, beam.owners, depth), level.num_rows)
            if depth >= at_once:
                yield from beam.fetch()

    def _refine_costs(self, rows: list[int], longest: int, seconds: float) -> None:
        """`rows`: of each forward that the seconds were spent on."""
        expected = [self._costs.cost_s(num_rows, longest) for num_rows in rows]
        for num_rows, cost_s in zip(rows, expected, strict=True):
            self._costs.refine(num_rows, longest, seconds * cost_s / sum(expected))

    def _extend(self, drafts: list[D], level: PickedLevel, depth: int, budget: Budget) -> bool:
        """Propose the children of all open nodes. False: no node goes on, or another level would not pay."""
        rows, first, chosen = self._rows(drafts), 0, []
        for draft, going_on in zip(drafts, self._children(drafts, level), strict=True):
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

    def _open_rows(self, drafts: list[D], depth: int) -> OpenRows:
        nodes = [node for draft in drafts for node in draft.open]
        above = [node.row for node in nodes]
        if self.nodes_share_rows:
            above = list(dict.fromkeys(above))
        token_ids = np.array([node.token_id for node in nodes], np.int32)
        paths = [[node.path for node in draft.open] for draft in drafts]
        return OpenRows(token_ids, np.array(above, np.int32), paths, depth)

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

    def _picks(self, drafts: list[D], logits: LogitRows, depth: int) -> BestTokens:
        """The best children of every open node; of nodes that share a row they are picked once."""
        rows, of_nodes = self._rows(drafts), [draft.sequence for draft in drafts for _ in draft.open]
        owners = list(dict(zip(rows, of_nodes, strict=True)).values())
        if not isinstance(logits, np.ndarray):
            picks = BestTokens.of(to_host(self._best(logits, owners, depth)))
        elif self._settings.shape.num_nodes is None:
            picks = self._coupling.pick(logits, owners, depth, self._num_children)
        else:
            picks = most_probable(logits, self._num_children)
        return BestTokens(picks.columns[rows], picks.scores[rows], picks.finite[rows])

    def _best(self, logits: DeviceLogits, owners: SequenceOf[SequenceView], depth: int) -> Tensor:
        by_confidence = self._settings.shape.num_nodes is not None
        return logits.best(None if by_confidence else self._coupling.draws(owners, depth), self._num_children)

    def _children(self, drafts: list[D], level: PickedLevel) -> Iterator[list[OpenNode]]:
        """Propose every draft's next level; yields the nodes that would go on."""
        picks, rows = level.picks, self._rows(drafts)
        self._drop_failed(drafts, picks.finite)
        token_ids = self._draft_ids[np.maximum(picks.columns, 0)]
        first = 0
        for draft, chosen in zip(drafts, level.chosen or itertools.repeat(None), strict=False):
            own = slice(first, first := first + len(draft.open))
            count = draft.settings.shape.num_children
            if draft.sequence.key in self._failed:
                yield []
            elif level.logits is not None and draft.settings.mode == DRAWN:
                if draft.sampler is None:
                    draft.sampler = ChildSampler(draft.sequence, self._draft_ids, self._vocab_size)
                yield draft.extend_drawn([draft.sampler.children(level.logits, row, count) for row in rows[own]])
            else:
                yield draft.extend(picks.columns[own, :count], picks.scores[own, :count], token_ids[own], chosen)

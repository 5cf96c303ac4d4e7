"""The bases of drafters with a network of their own: all sequences' drafts grow together, one forward a level.

    draft = level by level: one forward -> logits -> children (with the request's own noise) -> the most probable paths go on

Drafting stops where another level would take more time than it is likely to save. `AttendingDrafter` is for networks that keep
keys of the text and of nodes: a draft first reads the tokens decided since the last draft.
"""

import itertools
import logging
import math
import time
from collections.abc import Generator, Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ragspec.drafting.acceptance import ChildAcceptance
from ragspec.drafting.children import ChildSampler, Coupling, draws_children, most_probable, needs_chain, uses_noise
from ragspec.drafting.cost_model import CostTable
from ragspec.drafting.drafter import Budget, Drafter, SequenceView
from ragspec.drafting.growing.beam import Beam, DeviceBeam, GrownLevel
from ragspec.drafting.growing.draft import (
    DRAWN,
    GREEDY,
    WITH_NOISE,
    WITHOUT_NOISE,
    DraftBatch,
    DraftSettings,
    GrowingDraft,
    OpenRows,
    ScheduledDraft,
    TreeShape,
)
from ragspec.errors import EngineError
from ragspec.numerics.attention import AttentionMetadata
from ragspec.numerics.backend import LogitRows
from ragspec.numerics.kv_cache import KvPool
from ragspec.numerics.torch.sampling import TorchLogits
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

    `draft_ids`: the target's id of each token of the draft vocabulary, rising.
    """

    draft_class: type[D]
    nodes_share_rows = False
    """Whether all nodes of one level of a draft have the same children. A level then has one row of logits for each draft."""

    def __init__(self, draft_ids: NDArray[np.int64], vocab_size: int, shape: TreeShape, costs: CostTable) -> None:
        self.acceptance = ChildAcceptance()
        self._draft_ids, self._vocab_size = draft_ids, vocab_size
        self._num_children = min(shape.num_children, len(draft_ids))
        self._settings = DraftSettings(self.name, shape, self.acceptance, least_prob=0.004)
        self._costs = costs
        self._coupling = Coupling(draft_ids, vocab_size)
        self._failed: set[tuple[str, int]] = set()
        self._num_levels, self._most_levels = min(2.0, shape.max_depth), shape.max_depth

    def _memory(self, sequence: SequenceView) -> Any:
        """The drafter's memory of a sequence, if a draft can grow from it now, or None."""
        raise NotImplementedError

    def _draft(self, sequence: SequenceView, memory: Any, settings: DraftSettings, num_levels: int) -> D | None:
        """A new draft of at most so many levels, or None where there is no room."""
        return self.draft_class(sequence, memory, settings, num_levels)

    def _levels(self, drafts: list[D]) -> Levels:
        """The network's forwards, one for each level."""
        raise NotImplementedError

    def finish(self, sequence: SequenceView) -> None:
        self._failed.discard(sequence.key)

    def propose(self, sequences: SequenceOf[SequenceView], budget: Budget) -> list[list[Proposal]]:
        drafts: list[D | None] = []
        for sequence, num_levels in zip(sequences, budget.depths, strict=True):
            settings = self._settings._replace(mode=self._mode(sequence), is_chain=needs_chain(sequence))
            if budget.token_s == 0.0 or settings.by_confidence or settings.mode == DRAWN:  # no node is too improbable
                settings = settings._replace(least_prob=0.0)
            memory = self._ready(sequence)
            levels = min(num_levels, self._most_levels)
            drafts.append(None if memory is None else self._draft(sequence, memory, settings, levels))
        self._grow([draft for draft in drafts if draft is not None], budget)
        return [[] if draft is None or draft.sequence.key in self._failed else draft.best() for draft in drafts]

    def _ready(self, sequence: SequenceView) -> Any:
        """As `_memory`; None also where a draft would be of no use, or drafts have failed."""
        is_wanted = sequence.most_tokens > 1 and sequence.key not in self._failed
        return self._memory(sequence) if is_wanted else None

    def _mode(self, sequence: SequenceView) -> int:
        if sequence.request.params.greedy:
            return GREEDY
        if draws_children(sequence):
            return DRAWN
        is_coupled = self._settings.shape.num_nodes is None and uses_noise(sequence)
        return WITH_NOISE if is_coupled else WITHOUT_NOISE

    def _grow(self, drafts: list[D], budget: Budget) -> None:
        """Grow all drafts level by level, until another level would not pay."""
        if not drafts:
            return
        begin, depth, rows = time.perf_counter(), 0, list[int]()
        for depth, level in enumerate(self._grown(drafts, budget), 1):
            goes_on = self._extend(drafts, level, depth, budget)
            rows.append(level.num_rows)
            if level.is_last or not goes_on:
                self._refine_costs(rows, max(draft.memory.end for draft in drafts), time.perf_counter() - begin)
                begin, rows = time.perf_counter(), []
            if not goes_on:
                break
        if max(draft.max_depth for draft in drafts) > 1:
            self._num_levels += (1.0 - _LEVELS_MEMORY) * (depth - self._num_levels)

    def _grown(self, drafts: list[D], budget: Budget) -> Iterator[GrownLevel]:
        """Each level over the nodes that are open when it is asked for.

        On a device the levels that are certain or usual grow before the host sees them, further levels one by one. A draft that
        ends before the usual depth has computed levels in vain; their time counts as that of its other levels.
        """
        levels = self._levels(drafts)
        logits, num_rows = next(levels)
        if isinstance(logits, np.ndarray) or needs_host(drafts):
            host_beam = Beam(drafts, self._num_children)
            for depth in itertools.count(1):
                yield host_beam.grown(self._picks(drafts, logits, depth), num_rows)
                logits, num_rows = levels.send(self._open_rows(drafts, depth))
        else:
            beam = DeviceBeam(drafts, self._num_children, logits.token_ids, shares_rows=self.nodes_share_rows)
            at_once = beam.max_depth if budget.token_s == 0.0 else min(beam.max_depth, round(self._num_levels))
            for depth in range(1, beam.max_depth + 1):
                if depth > 1:
                    logits, num_rows = levels.send(beam.open_rows())
                assert not isinstance(logits, np.ndarray)
                beam.grow(self._best(logits, beam.owners, depth), num_rows)
                if depth >= at_once:
                    yield from beam.fetch()

    def _refine_costs(self, rows: list[int], longest: int, seconds: float) -> None:
        """`rows`: of each forward that the seconds were spent on."""
        expected = [self._costs.cost_s(num_rows, longest) for num_rows in rows]
        for num_rows, cost_s in zip(rows, expected, strict=True):
            self._costs.refine(num_rows, longest, seconds * cost_s / sum(expected))

    def _extend(self, drafts: list[D], level: GrownLevel, depth: int, budget: Budget) -> bool:
        """Propose the children of all open nodes. False: no node goes on, or another level would not pay."""
        rows, first, chosen = self._rows(drafts), 0, []
        self._drop_failed(drafts, level)
        for draft, children in zip(drafts, level.children, strict=True):
            further = [] if draft.sequence.key in self._failed else draft.extend(children, self._draft_ids)
            room = depth < draft.max_depth
            chosen.append([node._replace(row=rows[node.row + first]) for node in further] if room else [])
            first += len(draft.open)
        gain = sum(node.path_prob for those in chosen for node in those)
        for draft, those in zip(drafts, chosen, strict=True):
            draft.descend(those)
        num_rows = len(set(self._rows(drafts)))
        saved_s = gain * self.acceptance.typical * budget.token_s
        longest = max(draft.memory.end for draft in drafts)
        return num_rows > 0 and (budget.token_s == 0.0 or saved_s > self._level_s(num_rows, longest))

    def _level_s(self, num_rows: int, longest: int) -> float:
        """Expected seconds of a further level."""
        return self._costs.cost_s(num_rows, longest)

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

    def _drop_failed(self, drafts: list[D], level: GrownLevel) -> None:
        """End drafting for sequences with logits that are not finite. Raises: EngineError if no logits are finite."""
        for draft, children in zip(drafts, level.children, strict=True):
            if not children.finite.all():
                log.warning(
                    "request %r: the logits of the drafter %s are not finite; no more of its drafts for it",
                    draft.sequence.request.id,
                    self.name,
                )
                self._failed.add(draft.sequence.key)
        if not any(children.finite.any() for children in level.children):
            raise EngineError(f"the logits of the drafter {self.name} are not finite")

    def _picks(self, drafts: list[D], logits: LogitRows, depth: int) -> NDArray[np.float64]:
        """The children of every open node, on the host, in the form that `BestTokens.of` reads. Of nodes that share a row
        they are picked once. Children that are drawn by chance are put into their drafts; here they have numbers for columns.

        Shape: [N, 2 k + 1].
        """
        rows, of_nodes = self._rows(drafts), [draft.sequence for draft in drafts for _ in draft.open]
        owners = list(dict(zip(rows, of_nodes, strict=True)).values())
        if not isinstance(logits, np.ndarray):
            picks: NDArray[np.float64] = to_host(self._best(logits, owners, depth))
        else:
            by_confidence, count = self._settings.shape.num_nodes is not None, self._num_children
            best = most_probable(logits, count) if by_confidence else self._coupling.pick(logits, owners, depth, count)
            picks = np.column_stack([best.columns, best.scores, best.finite])
        picks = picks[rows]
        first = 0
        for draft in drafts:
            own = slice(first, first := first + len(draft.open))
            if draft.settings.mode == DRAWN and picks[own, -1].all():
                self._draw(draft, logits, rows[own], picks[own])
        return picks

    def _draw(self, draft: D, logits: LogitRows, rows: list[int], picks: NDArray[np.float64]) -> None:
        """Draw the children of a draft's open nodes in the place of their `picks`."""
        if draft.sampler is None:
            draft.sampler = ChildSampler(draft.sequence, self._draft_ids, self._vocab_size)
        count = 1 if draft.settings.is_chain else self._settings.shape.num_children
        draft.drawn = [draft.sampler.children(logits, row, count) for row in rows]
        picks[:, :-1] = -np.inf
        picks[:, : self._num_children] = -1.0
        for own, drawn in zip(picks, draft.drawn, strict=True):
            for rank, log_prob in enumerate(drawn.log_probs):
                own[rank] = rank
                own[self._num_children + rank] = min(0.0, log_prob - drawn.log_probs[0])

    def _best(self, logits: TorchLogits, owners: SequenceOf[SequenceView], depth: int) -> Tensor:
        by_confidence = self._settings.shape.num_nodes is not None
        return logits.best(None if by_confidence else self._coupling.draws(owners, depth), self._num_children)


def needs_host(drafts: SequenceOf[GrowingDraft]) -> bool:
    """Whether children are drawn by chance, by the host."""
    return any(draft.settings.mode == DRAWN for draft in drafts)


_CATCH_UP_STEPS = 24
"""Steps over which the reading of a prompt is counted, if so many are to come."""


class AttendingDrafter(GrowingDrafter[D]):
    """See the module. `num_waiting` of a sequence's memory: tokens that this draft and later drafts have yet to read."""

    first_rows = 4
    """Rows of a draft's first forward where little text is new."""

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
        first_s = self._costs.cost_s(self.first_rows * len(ready), longest)
        return reading_s + first_s + (self._num_levels - 1.0) * self._level_s(rows, longest)

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

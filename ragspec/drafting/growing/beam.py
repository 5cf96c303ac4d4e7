"""The choice of a draft's nodes: the children that are proposed, their probabilities, and the nodes that are drafted further.

The nodes of all drafts are chosen together: with NumPy on the host, with torch on the device that has the logits. On a device
the host launches several levels at once and learns their nodes by one transfer. Both compute in one order, so their trees are
equal.

    >>> beam = DeviceBeam(drafts, 4, logits.token_ids, shares_rows=False)
    >>> beam.grow(logits.best(draws, 4), num_rows)         # then a forward over beam.open_rows(), and so on
    >>> levels = beam.fetch()
"""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.drafting.acceptance import MARGINS
from ragspec.drafting.drafter import SequenceView
from ragspec.drafting.growing.draft import DRAWN, Children, GrowingDraft, OpenRows, StaticShape
from ragspec.numerics.torch.transfer import to_device, to_host

Array = Any
"""A NumPy array on the host, a tensor on a device."""


class GrownLevel(NamedTuple):
    """The children of each draft's open nodes, and the rows that the level's forward took. `is_last`: of the levels that were
    fetched together."""

    children: list[Children]
    num_rows: int
    is_last: bool = True


class _Rules(NamedTuple):
    """Settings of each draft. `limits`: of the children of a node; `least_probs`: of a path; `leads`: whether the best child's
    margin is its lead; `confident`: whether paths have the drafter's own probabilities.

    Shapes: cells int64 [B, depths, k], the acceptance of each rank at the least margin; the others float64 [B, 1, 1].
    """

    cells: Array
    limits: Array
    least_probs: Array
    leads: Array
    confident: Array


class _Nodes(NamedTuple):
    """The nodes whose children come next: node j of draft b is open or means nothing. `numbers`: in a fixed tree.

    Shapes: open bool, path_probs float64, numbers int64, [B, W] each.
    """

    open: Array
    path_probs: Array
    numbers: Array


class _Chosen(NamedTuple):
    """The children of one level. Shapes: children float64 [B, W, 3 k + 2], as `Children.of` reads them; places int64 [B, W], node
    * k + rank of the children that go on, -1 behind the last."""

    children: Array
    places: Array


class Beam:
    """The open nodes of some drafts of one tree shape. `num_children`: of each row of picks, k."""

    _arrays: Any = np

    def __init__(self, drafts: SequenceOf[GrowingDraft], num_children: int) -> None:
        self._drafts, self._num_children, self._depth = drafts, num_children, 0
        self.max_depth = max(draft.max_depth for draft in drafts)
        self._shape = drafts[0].settings.shape
        self._width = max(draft.settings.width for draft in drafts)
        self._below = self._is_inner = None
        if isinstance(self._shape, StaticShape):
            self._below = self._sent(self._shape.below[:, :num_children])
            self._is_inner = self._sent(self._shape.is_inner)
        acceptance, modes = drafts[0].settings.acceptance, [draft.settings.mode for draft in drafts]
        self._margins, self._chances = self._sent(np.array(MARGINS)), self._sent(acceptance.chances(modes))
        self._ranks, self._numbered = self._sent(np.arange(num_children)), self._sent(np.arange(len(drafts))[:, None])
        rows = []
        for settings in (draft.settings for draft in drafts):
            limit = 1 if settings.is_chain else num_children
            leads = limit > 1 and settings.mode != DRAWN
            rows.append([limit, settings.least_prob, leads, settings.by_confidence])
        rules = self._sent(np.array(rows, np.float64))[:, :, None, None]
        cells = self._sent(acceptance.first_cells(modes, num_children))
        self._rules = _Rules(cells, *(rules[:, column] for column in range(4)))
        root = np.zeros((len(drafts), 1), np.int64)
        self._nodes = _Nodes(self._sent(root == 0), self._sent(root + 1.0), self._sent(root))

    def _sent(self, array: NDArray[Any]) -> Array:
        return array

    def grown(self, picks: NDArray[np.float64], num_rows: int) -> GrownLevel:
        """The children of the drafts' open nodes. `picks`: as `BestTokens.of` reads them. Shape: [N, 2 k + 1]."""
        rows = np.full((*self._nodes.open.shape, picks.shape[1]), -1.0)
        ends = np.cumsum([len(draft.open) for draft in self._drafts])
        for own, draft, end in zip(rows, self._drafts, ends.tolist(), strict=True):
            own[: len(draft.open)] = picks[end - len(draft.open) : end]
        with np.errstate(invalid="ignore"):  # of places without a child
            chosen = self._choose(rows)
        parts = zip(*chosen, self._drafts, strict=True)
        children = [Children.of(found[: len(draft.open)], places) for found, places, draft in parts]
        return GrownLevel(children, num_rows)

    def _choose(self, picks: Array) -> _Chosen:
        """Choose among the children of the open nodes, and go on to the next level. Shape: float64 [B, W, 2 k + 1]."""
        arrays, nodes, rules, count = self._arrays, self._nodes, self._rules, self._num_children
        columns, scores = picks[..., :count], picks[..., count:-1]
        offered = nodes.open[..., None] & (columns >= 0) & (self._ranks < rules.limits)
        numbers = None
        if self._below is not None:
            numbers = self._below[nodes.numbers]
            offered &= numbers < len(self._below) - 1
        cells, path_probs, rejections = self._probs(scores, offered)
        proposed = offered & (path_probs >= rules.least_probs)
        worth = arrays.where(proposed, path_probs, -1.0)
        if self._is_inner is not None:  # a fixed tree's nodes go on by their place
            worth = arrays.where(proposed & self._is_inner[numbers], 1.0, -1.0)
        worth = worth.reshape(len(worth), -1)
        drafts, size = self._numbered[: len(worth)], worth.shape[1]
        order = arrays.argsort(-worth, stable=True)[:, : self._width]
        places = arrays.where(worth[drafts, order] >= 0.0, order, size)
        places = places[drafts, arrays.argsort(places, stable=True)]
        is_open = places < size
        parts = [arrays.where(proposed, columns, -1.0), cells, path_probs, rejections[..., None], picks[..., -1:]]
        chosen = _Chosen(arrays.concat(parts, -1), arrays.where(is_open, places, -1))
        places = arrays.where(is_open, places, 0)
        numbers = nodes.numbers if numbers is None else numbers.reshape(worth.shape)[drafts, places]
        self._nodes = _Nodes(is_open, path_probs.reshape(worth.shape)[drafts, places], numbers)
        self._depth += 1
        return chosen

    def _probs(self, scores: Array, offered: Array) -> tuple[Array, Array, Array]:
        """Cells of acceptance, probabilities of the paths to the children, and that no child of a node is accepted.

        Shapes: float64 and bool [B, W, k] -> int64 and float64 [B, W, k], float64 [B, W].
        """
        arrays, rules, above = self._arrays, self._rules, self._nodes.path_probs
        behind = scores[..., :1] - scores
        if self._num_children > 1:
            behind[..., :1] = arrays.where(rules.leads > 0.0, behind[..., 1:2], 0.0)
        depth = min(self._depth, rules.cells.shape[1] - 1)
        cells = rules.cells[:, None, depth] + arrays.searchsorted(self._margins, behind, side="right")
        chances = self._chances[cells]
        rejections = arrays.where(offered, 1.0 - chances, 1.0)
        left = [arrays.ones_like(above)]
        for rank in range(self._num_children):  # in order: a device's own running product would round otherwise
            left.append(left[-1] * rejections[..., rank])
        path_probs = above[..., None] * (arrays.stack(left[:-1], 2) * chances)
        if self._shape.num_nodes is not None:
            path_probs = arrays.where(rules.confident > 0.0, above[..., None] * arrays.exp(scores), path_probs)
        return cells, path_probs, left[-1]


class _GrownOnDevice(NamedTuple):
    """A level that the host has not seen. `drafts`: the numbers of those that grow."""

    drafts: list[int]
    chosen: _Chosen
    num_rows: int


class _Rows(NamedTuple):
    """The next forward's rows. `above`: each node's row of the level above. Shapes: int64 [B, W], [B, W] and [B, W, D]."""

    tokens: Tensor
    above: Tensor
    path_slots: Tensor


class DeviceBeam(Beam):
    """A beam on the device of `draft_ids`, the token of each column. A draft leaves it at its last level.

    `shares_rows`: a draft has one row of logits for all its nodes.
    """

    _arrays = torch

    def __init__(
        self, drafts: SequenceOf[GrowingDraft], num_children: int, draft_ids: Tensor, *, shares_rows: bool
    ) -> None:
        self._draft_ids, self._shares_rows = draft_ids, shares_rows
        super().__init__(drafts, num_children)
        self._growing, self._unseen = list(range(len(drafts))), list[_GrownOnDevice]()
        scratch = np.zeros((len(drafts), max(len(draft.scratch) for draft in drafts)), np.int64)
        for draft, slots in zip(drafts, scratch, strict=True):
            slots[: len(draft.scratch)] = draft.scratch
        self._scratch, root = self._sent(scratch), self._nodes.numbers
        self._rows = _Rows(root, root, root[..., None][..., :0])

    def _sent(self, array: NDArray[Any]) -> Tensor:
        return to_device(array, self._draft_ids.device)

    @property
    def owners(self) -> list[SequenceView]:
        """The sequence of each row of logits."""
        width = 1 if self._shares_rows else self._nodes.open.shape[1]
        return [self._drafts[number].sequence for number in self._growing for _ in range(width)]

    @torch.inference_mode()
    def grow(self, picks: Tensor, num_rows: int) -> None:
        """Choose among the children of the open nodes. `picks`: as `TorchLogits.best` returns them, for each row."""
        (num_drafts, width), count = self._nodes.open.shape, self._num_children
        picks = picks.view(num_drafts, -1, 2 * count + 1).expand(-1, width, -1)
        chosen = self._choose(picks)
        self._unseen.append(_GrownOnDevice(self._growing, chosen, num_rows))
        places, drafts = chosen.places.clamp(min=0), self._numbered[:num_drafts]
        parents, columns = places // count, picks[..., :count].flatten(1).gather(1, places).long()
        above = drafts.expand_as(parents) if self._shares_rows else drafts * width + parents
        self._rows = _Rows(self._draft_ids[columns], above, self._rows.path_slots[drafts, parents])

    @torch.inference_mode()
    def open_rows(self) -> OpenRows:
        """The next level's rows, of the drafts that go on. Their paths have the right length; the slots are on the device."""
        growing = [at for at, number in enumerate(self._growing) if self._drafts[number].max_depth > self._depth]
        if len(growing) < len(self._growing):
            kept = self._sent(np.array(growing))
            self._nodes = _Nodes(*(x[kept] for x in self._nodes))
            self._rules = _Rules(*(x[kept] for x in self._rules))
            self._rows = _Rows(*(x[kept] for x in self._rows))
            self._scratch, self._growing = self._scratch[kept], [self._growing[at] for at in growing]
        rows, first = self._rows, (self._depth - 1) * self._shape.max_width
        own, path_slots = range(first, first + rows.tokens.shape[1]), None
        if self._scratch.shape[1]:
            own_slots = self._scratch[:, own.start : own.stop, None]
            rows = rows._replace(path_slots=torch.cat([rows.path_slots, own_slots], 2))
            self._rows, path_slots = rows, rows.path_slots.flatten()
        level = [(*[own.start] * (self._depth - 1), at) for at in own]
        paths = [level if number in self._growing else [] for number in range(len(self._drafts))]
        above = rows.above[:, 0] if self._shares_rows else rows.above.flatten()
        return OpenRows(rows.tokens.flatten(), above, paths, self._depth, path_slots)

    def fetch(self) -> Iterator[GrownLevel]:
        """The levels since the last call. Each is yielded when the drafts have the children of the level above."""
        unseen, self._unseen = self._unseen, []
        parts = [part for level in unseen for part in level.chosen]
        numbers = to_host(torch.cat([part.double().flatten() for part in parts]))
        arrived = iter(np.split(numbers, np.cumsum([part.numel() for part in parts])[:-1]))
        for level in unseen:
            rows, places = (next(arrived).reshape(part.shape) for part in level.chosen)
            children = [Children.of(rows[0, :0], places[0, :0]) for _ in self._drafts]
            for at, number in enumerate(level.drafts):
                children[number] = Children.of(rows[at, : len(self._drafts[number].open)], places[at])
            yield GrownLevel(children, level.num_rows, level is unseen[-1])

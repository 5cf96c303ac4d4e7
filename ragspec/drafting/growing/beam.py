"""Trees that grow on a device: the host launches several levels at once and then learns their nodes by one transfer.

The nodes that go on are computed by the formulas of `ragspec.drafting.growing.draft` and `shapes` beside it, in their order of
operations. So the trees are those that the host would grow.

    >>> beam = Beam(drafts, draft_ids, shares_rows=False)
    >>> beam.grow(logits.best(draws, num_children), num_rows)         # then a forward over beam.open_rows(), and so on
    >>> levels = beam.fetch()
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.drafting.acceptance import MARGINS
from ragspec.drafting.drafter import SequenceView
from ragspec.drafting.growing.draft import DRAWN, GrowingDraft, OpenRows
from ragspec.drafting.growing.shapes import StaticShape
from ragspec.numerics.backend import BestTokens, LogitRows
from ragspec.numerics.torch.transfer import to_device, to_host


class PickedLevel(NamedTuple):
    """The best children of each open node, in order, and the rows that the level's forward took.

    `logits`: for children that are drawn by chance. `chosen`: for each draft the places of the children that a device let go on,
    a place being the node's number in its level * number of children + rank. `is_last`: of the levels that came together.
    """

    picks: BestTokens
    num_rows: int
    logits: LogitRows | None = None
    chosen: list[set[int]] | None = None
    is_last: bool = True


class _Grown(NamedTuple):
    """A level on the device. Shapes: picks float64 [rows, 2 k + 1]; places int64 [B, W], -1 behind the last that goes on."""

    drafts: list[int]
    picks: Tensor
    places: Tensor
    num_rows: int


def can_grow_on_device(drafts: SequenceOf[GrowingDraft]) -> bool:
    """Children that are drawn by chance are drawn by the host, and a beam has one shape."""
    return all(d.settings.mode != DRAWN and d.settings.shape is drafts[0].settings.shape for d in drafts)


class Beam:
    """The open nodes of drafts of one shape, at most `max_width` each: row j of draft b is open or means nothing.

    `shares_rows`: a draft has one row of logits for all its nodes. A draft leaves the beam at its last level.
    Shapes: open bool, path_probs float64, tokens, above and numbers int64, [B, W] each; path_slots int64 [B, W, D].
    """

    def __init__(self, drafts: SequenceOf[GrowingDraft], draft_ids: Tensor, *, shares_rows: bool) -> None:
        self._drafts, self._draft_ids, self._shares_rows = drafts, draft_ids, shares_rows
        self._device, self._settings = draft_ids.device, drafts[0].settings
        self._growing, self._depth, self._grown = list(range(len(drafts))), 0, list[_Grown]()
        self.max_depth = max(draft.max_depth for draft in drafts)
        self._margins, shape = self._sent(np.array(MARGINS)), self._settings.shape
        modes = sorted({draft.settings.mode for draft in drafts})
        chances = np.stack([self._settings.acceptance.chances(mode) for mode in modes])
        self._chances = self._sent(np.stack([chances, 1.0 - chances], -1))  # of acceptance and of rejection
        self._modes = self._sent(np.array([[[modes.index(draft.settings.mode)]] for draft in drafts]))
        count = min(shape.num_children, len(draft_ids))
        self._ranks = self._sent(np.minimum(np.arange(count), chances.shape[2] - 1))
        self._numbered = self._sent(np.arange(len(drafts))[:, None])
        scratch = np.zeros((len(drafts), max(len(draft.scratch) for draft in drafts)), np.int64)
        for draft, slots in zip(drafts, scratch, strict=True):
            slots[: len(draft.scratch)] = draft.scratch
        self._scratch = self._sent(scratch)
        self._open = torch.ones((len(drafts), 1), dtype=torch.bool, device=self._device)
        self._path_probs, self._numbers = self._open.double(), self._open.long() - 1
        self._path_slots = torch.zeros((len(drafts), 1, 0), dtype=torch.int64, device=self._device)
        self._tokens = self._above = self._numbers
        self._below = self._sent(shape.below) if isinstance(shape, StaticShape) else None
        self._is_inner = self._sent(shape.is_inner) if isinstance(shape, StaticShape) else None

    @property
    def owners(self) -> list[SequenceView]:
        """The sequence of each row of logits."""
        width = 1 if self._shares_rows else self._open.shape[1]
        return [self._drafts[number].sequence for number in self._growing for _ in range(width)]

    @torch.inference_mode()
    def grow(self, picks: Tensor, num_rows: int) -> None:
        """Choose among the children of the open nodes. `picks`: as `DeviceLogits.best` returns them, for each row."""
        (num_drafts, width), count, num_picks = self._open.shape, len(self._ranks), picks.shape[1] // 2
        rows = picks.view(num_drafts, -1, 2 * num_picks + 1).expand(-1, width, -1)
        columns, scores = rows[..., :count].long(), rows[..., num_picks : num_picks + count]
        path_probs = self._path_probs_of(scores)
        takes = self._open[..., None] & (columns >= 0) & (path_probs >= self._settings.least_prob)
        worth = path_probs
        if self._below is not None and self._is_inner is not None:  # a fixed tree's nodes go on by their place
            below = self._below[self._numbers, :count]
            takes &= self._is_inner[below]
            self._numbers, worth = below.flatten(1), torch.ones_like(path_probs)
        worth = torch.where(takes, worth, -1.0).flatten(1)
        order = torch.sort(worth, dim=1, descending=True, stable=True).indices[:, : self._settings.shape.max_width]
        places = torch.where(worth.gather(1, order) >= 0.0, order, width * count).sort(1).values
        self._open = places < width * count
        self._grown.append(_Grown(self._growing, picks, torch.where(self._open, places, -1), num_rows))
        places = places.clamp(max=width * count - 1)
        self._descend(columns, path_probs, places, places // count)

    def _descend(self, columns: Tensor, path_probs: Tensor, places: Tensor, parents: Tensor) -> None:
        drafts = self._numbered[: len(places)]
        self._above = drafts.expand_as(parents) if self._shares_rows else drafts * columns.shape[1] + parents
        self._tokens = self._draft_ids[columns.flatten(1).gather(1, places)]
        self._path_probs, self._path_slots = path_probs.flatten(1).gather(1, places), self._path_slots[drafts, parents]
        if self._below is not None:
            self._numbers = self._numbers.gather(1, places)
        self._depth += 1

    def _path_probs_of(self, scores: Tensor) -> Tensor:
        """Shapes: float64 [B, W, k] -> [B, W, k]."""
        above, num_children = self._path_probs[..., None], len(self._ranks)
        if self._settings.shape.num_nodes is not None:
            return above * scores.exp()
        behind = scores[..., :1] - scores
        if num_children > 1:
            behind[..., 0] = behind[..., 1]
        cells = torch.searchsorted(self._margins, behind, right=True)
        depth = min(self._depth, self._chances.shape[1] - 1)
        chances, rejections = self._chances[self._modes, depth, self._ranks, cells].unbind(-1)
        left = [torch.ones_like(self._path_probs)]
        for rank in range(
            num_children - 1
        ):  # one after the other: a device's own running product would round otherwise
            left.append(left[-1] * rejections[..., rank] if rank else rejections[..., rank])
        return above * (torch.stack(left, 2) * chances)

    @torch.inference_mode()
    def open_rows(self) -> OpenRows:
        """The next level's rows, of the drafts that go on. Their paths have the right length; the slots are on the device."""
        growing = [at for at, number in enumerate(self._growing) if self._drafts[number].max_depth > self._depth]
        if len(growing) < len(self._growing):
            self._keep(self._sent(np.array(growing)))
            self._growing = [self._growing[at] for at in growing]
        width, first = self._open.shape[1], (self._depth - 1) * self._settings.shape.max_width
        own, path_slots = range(first, first + width), None
        if self._scratch.shape[1]:
            self._path_slots = torch.cat([self._path_slots, self._scratch[:, own.start : own.stop, None]], 2)
            path_slots = self._path_slots.flatten()
        level = [(*[own.start] * (self._depth - 1), at) for at in own]
        paths = [level if number in self._growing else [] for number in range(len(self._drafts))]
        above = self._above[:, 0] if self._shares_rows else self._above.flatten()
        return OpenRows(self._tokens.flatten(), above, paths, self._depth, path_slots)

    def _keep(self, drafts: Tensor) -> None:
        self._open, self._path_probs, self._tokens = (x[drafts] for x in (self._open, self._path_probs, self._tokens))
        self._above, self._path_slots, self._modes = (x[drafts] for x in (self._above, self._path_slots, self._modes))
        self._numbers, self._scratch = self._numbers[drafts], self._scratch[drafts]

    def fetch(self) -> Iterator[PickedLevel]:
        """The levels since the last call. Each is yielded when the drafts have the children of the level above."""
        grown, self._grown = self._grown, []
        parts = [part for level in grown for part in (level.picks, level.places)]
        numbers = to_host(torch.cat([part.double().flatten() for part in parts]))
        arrived = iter(np.split(numbers, np.cumsum([part.numel() for part in parts])[:-1]))
        for level in grown:
            picks, places = next(arrived), next(arrived)
            rows, width = picks.reshape(level.picks.shape), len(level.picks) // len(level.drafts)
            open_rows = [
                at * width + (0 if self._shares_rows else node)
                for at, number in enumerate(level.drafts)
                for node in range(len(self._drafts[number].open))
            ]
            chosen = [set[int]() for _ in self._drafts]
            for number, own in zip(level.drafts, places.reshape(level.places.shape).astype(np.int64), strict=True):
                chosen[number] = {*own.tolist()} - {-1}
            yield PickedLevel(BestTokens.of(rows[open_rows]), level.num_rows, None, chosen, level is grown[-1])

    def _sent(self, array: NDArray[np.generic]) -> Tensor:
        return to_device(array, self._device)

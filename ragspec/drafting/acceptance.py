"""Learned acceptance: how probable it is that the target accepts a proposed node, by the kind of node.

Older outcomes fade. Only counts are kept, never text. Drafters that repeat text have a table for each tenant (`Experience`), so
that no tenant's drafts show what others wrote; a network's drafts are alike for all, and so is its table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ragspec.numerics.compiled import compiled
from ragspec.tenants import tenant_of

Ints = NDArray[np.int64]

MARGINS = (0.1, 0.25, 0.5, 0.8, 1.2, 1.7, 2.4, 3.3, 4.5, 6.5)
_MAX_TENANTS = 256
_NUM_MODES, _NUM_RANKS, _NUM_DEPTHS = 4, 8, 4


@compiled(nogil=True)
def _learn(accepted: Any, seen: Any, keep: float, cells: Any, outcomes: Any) -> None:
    for n in range(len(cells)):
        seen[cells[n]] = seen[cells[n]] * keep + 1.0
        accepted[cells[n]] = accepted[cells[n]] * keep + outcomes[n]


class Cell(int):
    """The number of an estimate; a type of its own, so that no other drafter's feedback is taken for a cell."""


class AcceptanceCells:
    """One estimate a cell: a Beta prior of a given weight, and outcomes that weigh 1/e after `memory` further ones.

    `accepted` and `seen` are weights of outcomes. Shapes: float64 [cells] each.
    """

    def __init__(self, prior: Iterable[float], prior_weight: float, memory: float) -> None:
        self.accepted = prior_weight * np.fromiter(prior, np.float64)
        self.seen = np.full(len(self.accepted), prior_weight)
        self._keep = 1.0 - 1.0 / memory

    def probability(self, cell: Cell) -> float:
        return self.accepted.item(cell) / self.seen.item(cell)

    def learn(self, cells: Cell | Ints, accepted: bool | Ints) -> None:
        """The outcome of a node, or of several in order. Shapes: int64 [N] each."""
        _learn(self.accepted, self.seen, self._keep, np.atleast_1d(np.int64(cells)), np.atleast_1d(np.int64(accepted)))


class Guess(NamedTuple):
    """A node's feedback where a drafter has several tables of acceptance: the cell and its table. Several nodes have an array of
    cells, int64 [N]."""

    acceptance: AcceptanceCells
    cell: Cell | Ints

    def learn(self, accepted: bool | Ints) -> None:
        self.acceptance.learn(self.cell, accepted)


T = TypeVar("T")


class Experience(Generic[T]):
    """One table of acceptance for each tenant. Beyond `_MAX_TENANTS` the least recently used one is forgotten."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make, self._tables = make, dict[str, T]()

    def of(self, salt: str) -> T:
        tenant = tenant_of(salt)
        table = self._tables.pop(tenant, None)
        table = self._make() if table is None else table
        self._tables[tenant] = table
        if len(self._tables) > _MAX_TENANTS:
            del self._tables[next(iter(self._tables))]
        return table

    def purge(self, salt: str) -> None:
        self._tables.pop(salt, None)


class CopyAcceptance(AcceptanceCells):
    """Acceptance of a copied node given its parent's, by (kind, match length).

    `priors[kind]` has the prior of length 0 and the limit for long matches.
    """

    def __init__(self, priors: dict[str, tuple[float, float]], max_length: int = 16) -> None:
        self._max_length = max_length
        self._rows = {kind: i * (max_length + 1) for i, kind in enumerate(priors)}
        share = 1.0 - 0.6 ** np.arange(max_length + 1)
        rows = [short + (long - short) * share for short, long in priors.values()]
        super().__init__(np.concatenate(rows), prior_weight=4.0, memory=400.0)

    def row(self, kind: str) -> int:
        """The cell of length 0; the next cells have the next lengths."""
        return self._rows[kind]

    def cell(self, kind: str, length: int) -> Cell:
        return Cell(self._rows[kind] + min(length, self._max_length))


class ChildAcceptance(AcceptanceCells):
    """Acceptance of a drafted child given that its parent was accepted and no better sibling was.

    With the sampling noise known, a child's chance is no longer its probability under the drafter. Its rank among its siblings
    predicts the chance, and how far its score lies behind the best score (for the best child: how far it leads).
    """

    def __init__(self) -> None:
        margin = np.array([0.0, *MARGINS])
        prior = np.empty((_NUM_MODES, _NUM_DEPTHS, _NUM_RANKS, len(margin)))
        prior[:, :, 0] = 0.85 - 0.5 * np.exp(-0.7 * margin)
        for rank in range(1, _NUM_RANKS):
            prior[:, :, rank] = 0.4 / rank**0.5 * np.exp(-0.6 * margin)
        self._strides = [int(np.prod(prior.shape[i + 1 :])) for i in range(3)]
        super().__init__(prior.ravel(), prior_weight=2.0, memory=600.0)
        self.typical = 0.7
        """Recent mean chance that one of an accepted node's children is accepted."""

    def first_cells(self, modes: Sequence[int], num_ranks: int) -> NDArray[np.int64]:
        """Cells of the least margin, by mode, depth - 1 and rank. Each of `MARGINS` that a child's margin passes adds 1.

        A margin is for rank 0 the score less that of rank 1, else the best score less the child's own. Modes: greedy, with noise,
        without noise, or drawn by chance (`ragspec.drafting.growing.draft`). Shape: [modes, 4, num_ranks].
        """
        by_mode, by_depth, by_rank = self._strides
        ranks = np.minimum(np.arange(num_ranks), _NUM_RANKS - 1)
        depths = np.arange(_NUM_DEPTHS)[:, None]
        cells: NDArray[np.int64] = np.array(modes)[:, None, None] * by_mode + depths * by_depth + ranks * by_rank
        return cells

    def chances(self, modes: Iterable[int]) -> NDArray[np.float64]:
        """The probability of every cell of these modes, 0 in other cells. Shape: [cells]."""
        chances = np.zeros(len(self.seen))
        for mode in set(modes):
            own = slice(mode * self._strides[0], (mode + 1) * self._strides[0])
            chances[own] = self.accepted[own] / self.seen[own]
        return chances

    def note_children(self, chance: float, weight: float) -> None:
        """One of a node's children is accepted with probability `chance`; the node itself with probability `weight`."""
        self.typical += 0.02 * weight * (chance - self.typical)

"""Learned acceptance: how probable it is that the target accepts a proposed node, by the kind of node, and how far a drafter is
trusted in one sequence (`Trust`).

Older outcomes fade. Only counts are kept, never text. Drafters that repeat text have a table for each tenant, so that no
tenant's drafts show what others wrote; a network's drafts are alike for all, and so is its table.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragspec.numerics.compiled import address_of, array_at, compiled
from ragspec.tenants import TenantStates, tenant_of

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

ASKED, UNCOVERED, EXPECTED, ACCEPTED, NUM_NODES, NUM_HITS, NUM_FIGURES = range(7)
"""Figures of a drafter in a sequence's step: whether it was asked; how little drafters before it covered (1 over the tokens that
the tree promised); accepted tokens that its nodes promised, unscaled; those that came; its nodes that took a row; and those of
them that were accepted."""
_PRIOR_TOKENS = 6.0
"""Expected tokens after which a sequence's own ratio weighs as much as its tenant's. Fewer: short answers trust chance hits."""
_MEMORY = 0.98
"""Weight of the past after a step with guesses, so that a sequence that begins to copy late is trusted again."""
_FREE_MISSES, _NUM_DOUBLINGS = 6, 3
"""Misses in a row before a drafter is asked less often, and how often the wait doubles. Longer waits lose the beginning of a
copy: with 4 free misses instead of 6, replayed outputs of Spec-Bench take 2 to 4 % more steps and 5 to 7 % fewer rows."""
_PRIOR_GAIN, _PRIOR_DRAFTS = 0.6, 2.0
"""Accepted tokens that a drafter which takes time is first credited with for a draft, and for how many drafts. With 1.0 a poor
head's trials cost eight sequences at once 7 % more; a good one is found sooner."""

_EXPECTED, _ACCEPTED, _CHANCES, _GAINED, _RATIO, _GAIN, _NUM_MISSES, _NUM_POOR, _BEGUN, _DUE, _NUM_FIGURES = range(11)
_NUM_COUNTS = 4

MARGINS = (0.1, 0.25, 0.5, 0.8, 1.2, 1.7, 2.4, 3.3, 4.5, 6.5)
MAX_TENANTS = 256
"""Of which tables are kept; then the table that was used longest ago is forgotten."""
_NUM_MODES, _NUM_RANKS, _NUM_DEPTHS = 4, 8, 4


@compiled(nogil=True)
def _learn(tables: Any, keep: float, owners: Any, cells: Any, outcomes: Any) -> None:
    """Shapes: tables int64 [B, 2], the addresses of `accepted` and `seen`; owners, cells, outcomes int64 [N]."""
    for n in range(len(cells)):
        accepted, seen = tables[owners[n]]
        for table, outcome in ((accepted, outcomes[n]), (seen, 1)):
            cell = array_at(table + 8 * cells[n], (1,), np.float64)
            cell[0] = cell[0] * keep + outcome


class AcceptanceCells:
    """One estimate a cell: a Beta prior of a given weight, and outcomes that weigh 1/e after `memory` further ones.

    `accepted` and `seen` are weights of outcomes. Shapes: float64 [cells] each.
    """

    def __init__(self, prior: Iterable[float], prior_weight: float = 4.0, memory: float = 400.0) -> None:
        self.accepted = prior_weight * np.fromiter(prior, np.float64)
        self.seen = np.full(len(self.accepted), prior_weight)
        self.keep = 1.0 - 1.0 / memory
        self.address = address_of(self.accepted), address_of(self.seen)

    def probability(self, cell: int) -> float:
        return float(self.accepted.item(cell) / self.seen.item(cell))

    def learn(self, cell: int, accepted: bool) -> None:
        """The outcome of a node."""
        self.seen[cell] = self.seen[cell] * self.keep + 1.0
        self.accepted[cell] = self.accepted[cell] * self.keep + accepted


class Guess(NamedTuple):
    """A node's feedback where a drafter has several tables of acceptance: the cell and its table."""

    acceptance: AcceptanceCells
    cell: int

    def learn(self, accepted: bool) -> None:
        self.acceptance.learn(self.cell, accepted)


class Guesses(NamedTuple):
    """The feedback of N nodes of several sequences: the table of each sequence, and the sequence and cell of each node. All
    tables remember alike. Shapes: int64 [N]."""

    tables: Sequence[AcceptanceCells]
    owners: Ints
    cells: Ints

    def learn(self, accepted: Ints) -> None:
        """The outcomes, in order. Shape: int64 [N]."""
        addresses = np.array([table.address for table in self.tables], np.int64)
        _learn(addresses, self.tables[0].keep, self.owners, self.cells, accepted)


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
        self._first_cells = np.arange(prior.size).reshape(prior.shape)[..., 0]
        super().__init__(prior.ravel(), prior_weight=2.0, memory=600.0)
        self.typical = 0.7
        """Recent mean chance that one of an accepted node's children is accepted."""

    def first_cells(self, modes: Sequence[int], num_ranks: int) -> Ints:
        """Cells of the least margin, by mode, depth - 1 and rank. Each of `MARGINS` that a child's margin passes adds 1.

        A margin is for rank 0 the score less that of rank 1, else the best score less the child's own. Modes: greedy, with noise,
        without noise, or drawn by chance (`ragspec.drafting.growing.draft`). Shape: [modes, 4, num_ranks].
        """
        ranks = np.minimum(np.arange(num_ranks), _NUM_RANKS - 1)
        cells: Ints = self._first_cells[np.ix_(np.array(modes), np.arange(_NUM_DEPTHS), ranks)]
        return cells

    def chances(self, modes: Iterable[int]) -> Floats:
        """The probability of every cell of these modes, 0 in other cells. Shape: [cells]."""
        chances, size = np.zeros(len(self.seen)), len(self.seen) // _NUM_MODES
        for mode in set(modes):
            own = slice(mode * size, (mode + 1) * size)
            chances[own] = self.accepted[own] / self.seen[own]
        return chances

    def note_children(self, chance: float, weight: float) -> None:
        """One of a node's children is accepted with probability `chance`; the node itself with probability `weight`."""
        self.typical += 0.02 * weight * (chance - self.typical)


@compiled(nogil=True)
def _count(state: Any, rows: Any, figures: Any, step: int, row_price: float, num_free_misses: float) -> None:
    for n in range(len(rows)):
        for drafter in range(figures.shape[1]):
            own, found = state[rows[n], drafter], figures[n, drafter]
            if found[ASKED] == 0.0:
                continue
            memory = _MEMORY if found[EXPECTED] > 0.0 else 1.0
            own[_EXPECTED] = own[_EXPECTED] * memory + found[EXPECTED]
            own[_ACCEPTED] = own[_ACCEPTED] * memory + found[ACCEPTED]
            own[_CHANCES] = own[_CHANCES] * _MEMORY + found[UNCOVERED]
            own[_GAINED] = own[_GAINED] * _MEMORY + found[NUM_HITS] - row_price * found[NUM_NODES]
            own[_NUM_MISSES] = 0.0 if found[NUM_HITS] > 0.0 else own[_NUM_MISSES] + 1.0
            wait = 2.0 ** min(max(0.0, own[_NUM_MISSES] - num_free_misses), _NUM_DOUBLINGS)
            own[_DUE] = own[_BEGUN] + ((step - own[_BEGUN]) // wait + 1.0) * wait


class Trust:
    """How far drafters are trusted: one rule, in arrays with a row for each open sequence and a column for each drafter.

    A drafter estimates the probabilities of its nodes over all requests. A sequence scales them by the ratio of accepted to
    expected tokens that the drafter had there, which begins at the ratio of the tenant's other sequences and is 1 at most. After
    some misses in a row a drafter is asked again in a step whose number, counted from the sequence's first, is a multiple of 2,
    4 and then 8: sequences that began together are asked together, and others' steps change none of a tenant's
    drafts. A draft of a drafter that takes time gains the ratio of the tokens that its drafts added, less the price of their
    rows, to how little drafters before it covered.
    Only counts are kept, never text.
    """

    def __init__(self, num_drafters: int, num_free_misses: float = _FREE_MISSES) -> None:
        self._num_free_misses = num_free_misses
        self.step = 0
        """The number of the present step."""
        self._state = np.zeros((0, num_drafters, _NUM_FIGURES))
        self._tenants = TenantStates(MAX_TENANTS, lambda: np.zeros((num_drafters, _NUM_COUNTS)))
        self._free = list[int]()
        self.learn(np.zeros(0, np.int64), np.zeros((0, num_drafters, NUM_FIGURES)), 0.0)  # compiles it

    def start(self, salt: str, drafters: Sequence[int]) -> int:
        """The row of a new sequence, whose request allows these drafters."""
        if not self._free:
            count = len(self._state)
            self._free = list(range(count, 2 * count + 8))
            self._state = np.concatenate([self._state, np.full((count + 8, *self._state.shape[1:]), np.inf)])
        row = self._free.pop()
        expected, accepted, chances, gained = self._tenants.used(tenant_of(salt)).T
        self._state[row] = 0.0
        self._state[row, :, _RATIO] = (_PRIOR_TOKENS + accepted) / (_PRIOR_TOKENS + expected)
        self._state[row, :, _GAIN] = (_PRIOR_GAIN * _PRIOR_DRAFTS + gained) / (_PRIOR_DRAFTS + chances)
        self._state[row, :, _BEGUN], self._state[row, :, _DUE] = self.step, np.inf
        self._state[row, [*drafters], _DUE] = 0.0
        return row

    def finish(self, row: int, salt: str) -> None:
        """Add the sequence to its tenant's, with no more than was expected: answers that repeat themselves are no rule."""
        counts, table = self._state[row, :, :_NUM_COUNTS], self._tenants.used(tenant_of(salt))
        counts[:, _ACCEPTED] = np.minimum(counts[:, _EXPECTED], counts[:, _ACCEPTED])
        table *= np.where(counts[:, _EXPECTED] > 0.0, _MEMORY, 1.0)[:, None]
        table += counts
        self._state[row, :, _DUE] = np.inf
        self._free.append(row)

    def purge(self, salt: str) -> None:
        self._tenants.purge(salt)

    def ratios(self, rows: Ints) -> Floats:
        """By which probabilities are scaled. Shape: [B] -> [B, drafters]."""
        state = self._state[rows]
        ratio = (_PRIOR_TOKENS * state[..., _RATIO] + state[..., _ACCEPTED]) / (_PRIOR_TOKENS + state[..., _EXPECTED])
        return np.minimum(1.0, ratio)

    def gains(self, rows: Ints, drafter: int, uncovered: Floats) -> list[float]:
        """Tokens that a draft is expected to add, less the price of its rows. `uncovered`: as in `UNCOVERED`. Shape: [B]."""
        state = self._state[rows, drafter]
        own = (_PRIOR_DRAFTS * state[:, _GAIN] + state[:, _GAINED]) / (_PRIOR_DRAFTS + state[:, _CHANCES])
        gains: list[float] = (own * uncovered).tolist()
        return gains

    def due(self, rows: Ints) -> Mask:
        """Whether requests and misses allow each drafter to be asked in this step. Shape: [B] -> [B, drafters]."""
        due: Mask = self._state[rows, :, _DUE] <= self.step
        return due

    def not_worth(self, rows: Ints, due: Mask, least_gain: float) -> Mask:
        """Which due drafters gained fewer tokens than `least_gain`. They wait, until the next multiple of 8 steps, then of 16, 32
        and 64, and forget all but a few drafts; after a wait they are asked once before they are judged. Shape: [B, drafters]."""
        least = self._num_free_misses - 1.0
        places, drafters = np.nonzero(due & (self._state[rows, :, _CHANCES] >= least))
        own = self._state[rows[places], drafters]
        times, is_trial = np.abs(own[:, _NUM_POOR]), own[:, _NUM_POOR] > 0.0
        gains = (_PRIOR_DRAFTS * own[:, _GAIN] + own[:, _GAINED]) / (_PRIOR_DRAFTS + own[:, _CHANCES])
        poor = ~is_trial & (gains < least_gain)
        own[:, _NUM_POOR] = np.where(poor, times + 1.0, np.where(is_trial, -times, 0.0))
        waits = 2.0 ** (_NUM_DOUBLINGS + np.minimum(times, _NUM_DOUBLINGS))
        next_due = own[:, _BEGUN] + ((self.step - own[:, _BEGUN]) // waits + 1.0) * waits
        own[:, _DUE] = np.where(poor, next_due, own[:, _DUE])
        own[:, [_GAINED, _CHANCES]] *= np.where(poor, least / np.maximum(own[:, _CHANCES], least), 1.0)[:, None]
        self._state[rows[places], drafters] = own
        found = np.zeros_like(due)
        found[places[poor], drafters[poor]] = True
        return found

    def next_due(self) -> float:
        """The first step in which a drafter may be asked for any of the sequences; infinity if there is none."""
        return float(self._state[..., _DUE].min(initial=np.inf))

    def miss(self, rows: Ints, drafter: int) -> None:
        """A drafter that was due had nothing to propose."""
        figures = np.zeros((len(rows), self._state.shape[1], NUM_FIGURES))
        figures[:, drafter, ASKED] = 1.0
        self.learn(rows, figures, 0.0)

    def learn(self, rows: Ints, figures: Floats, row_price: float) -> None:
        """Count the judged nodes of a step. `row_price`: tokens that a row costs. Shape: figures [B, drafters, figures] of
        `StepTrees`."""
        _count(self._state, rows, figures, self.step, row_price, float(self._num_free_misses))

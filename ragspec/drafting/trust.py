"""How far drafters are trusted: one rule, in arrays with a row for each open sequence and a column for each drafter.

A drafter estimates the probabilities of its nodes over all requests. A sequence scales them by the ratio of accepted to expected
tokens that the drafter had there, which begins at the ratio of the tenant's other sequences and is 1 at most. After some misses
in a row a drafter is asked again after 1, 2, 4 and then every 8 steps. A drafter that takes time has a gain beside, the accepted
tokens that a draft adds: where cheaper drafters probably have the next token, and where they do not. Only counts are kept, never
text.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragspec.drafting.acceptance import Experience
from ragspec.drafting.step_trees import ACCEPTED, EXPECTED, NUM_ADDED, NUM_HITS, NUM_NODES, NUM_SHARED

_PRIOR_TOKENS = 6.0
"""Expected tokens after which a sequence's own ratio weighs as much as its tenant's. Fewer: short answers trust chance hits."""
_MEMORY = 0.98
"""Weight of the past after a step with guesses, so that a sequence that begins to copy late is trusted again."""
_FREE_MISSES, _MAX_WAIT_STEPS = 3, 8
"""Misses in a row before a drafter is asked less often, and the longest wait. Longer waits lose the beginning of a copy."""
_PRIOR_GAIN, _PRIOR_DRAFTS = 0.6, 2.0
"""Accepted tokens that a drafter which takes time is first credited with for a draft, and for how many drafts."""

Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]
_EXPECTED, _ACCEPTED, _PRIOR, _NUM_MISSES, _WAIT, _GAINED = range(6)
_NUM_FIGURES = _GAINED + 4  # tokens gained and drafts, alone and beside a cheaper drafter's token


class Trust:
    """See the module. A sequence gets its row when it is first named."""

    def __init__(self, num_drafters: int) -> None:
        self._state = np.zeros((8, num_drafters, _NUM_FIGURES))
        self._allowed = np.zeros((8, num_drafters), np.bool_)
        self._tenants = Experience(lambda: np.zeros((num_drafters, 2)))
        self._overall = np.full((num_drafters, 4), 2 * [_PRIOR_GAIN * _PRIOR_DRAFTS, _PRIOR_DRAFTS])
        self.nodes_a_draft = np.full(num_drafters, 3.0)
        """Mean number of rows that a draft takes of the step."""
        self._rows: dict[tuple[str, int], tuple[int, str]] = {}
        self._free = list(range(8))

    def row(self, key: tuple[str, int], salt: str, drafters: SequenceOf[int] = ()) -> int:
        """`drafters`: the numbers of those that the request allows."""
        if (known := self._rows.get(key)) is None:
            if not self._free:
                count = len(self._state)
                self._free = list(range(count, 2 * count))
                self._state = np.concatenate([self._state, np.zeros_like(self._state)])
                self._allowed = np.concatenate([self._allowed, self._allowed])
            known = self._rows[key] = self._free.pop(), salt
            expected, accepted = self._tenants.of(salt).T
            self._state[known[0]], self._allowed[known[0]] = 0.0, False
            self._allowed[known[0], [*drafters]] = True
            self._state[known[0], :, _PRIOR] = (_PRIOR_TOKENS + accepted) / (_PRIOR_TOKENS + expected)
            scale = _PRIOR_DRAFTS / self._overall[:, [1, 1, 3, 3]]
            self._state[known[0], :, _GAINED:] = self._overall * scale
        return known[0]

    def finish(self, key: tuple[str, int]) -> None:
        """Add the sequence to its tenant's, with no more than was expected: answers that repeat themselves are no rule."""
        row, salt = self._rows.pop(key, (-1, ""))
        if row >= 0:
            self._free.append(row)
            expected, accepted = self._state[row, :, _EXPECTED], self._state[row, :, _ACCEPTED]
            table = self._tenants.of(salt)
            table *= np.where(expected > 0.0, _MEMORY, 1.0)[:, None]
            table += np.column_stack([expected, np.minimum(expected, accepted)])

    def purge(self, salt: str) -> None:
        self._tenants.purge(salt)

    def allowed(self, rows: Rows) -> Mask:
        """Which drafters may draft. Shape: [B] -> [B, drafters]."""
        return self._allowed[rows]

    def factors(self, rows: Rows) -> NDArray[np.float64]:
        """Shape: [B] -> [B, drafters]."""
        state = self._state[rows]
        ratio = (_PRIOR_TOKENS * state[..., _PRIOR] + state[..., _ACCEPTED]) / (_PRIOR_TOKENS + state[..., _EXPECTED])
        return np.minimum(1.0, ratio)

    def due(self, rows: Rows, drafter: int) -> Mask:
        """Whether misses allow a drafter to be asked in this step. Counts the step as waited. Shape: [B] -> [B]."""
        waits = self._state[rows, drafter, _WAIT]
        self._state[rows, drafter, _WAIT] = np.maximum(0.0, waits - 1.0)
        return waits <= 1.0

    def note(self, rows: Rows, drafter: int, is_hit: Mask) -> None:
        """Whether a token of a draft was accepted, in each of these sequences."""
        misses = np.where(is_hit, 0.0, self._state[rows, drafter, _NUM_MISSES] + 1.0)
        beyond = np.minimum(misses - _FREE_MISSES, _MAX_WAIT_STEPS)
        self._state[rows, drafter, _NUM_MISSES] = misses
        self._state[rows, drafter, _WAIT] = np.where(beyond > 0, np.minimum(_MAX_WAIT_STEPS, 2 ** (beyond - 1)) + 1, 0)

    def gains(self, rows: Rows, drafter: int, covered: NDArray[np.float64]) -> NDArray[np.float64]:
        """Accepted tokens that a draft is expected to add. `covered`: the probability that a node so far holds the next token."""
        at = _GAINED + 2 * (covered >= 0.5)
        return self._state[rows, drafter, at] / self._state[rows, drafter, at + 1]

    def learn_gains(self, rows: Rows, drafter: int, covered: NDArray[np.float64], figures: Any) -> None:
        """Count a draft that took time in each of these sequences. Shape: figures [B, figures], of this drafter."""
        own = self._overall[drafter]
        for row, at, added in zip(rows, 2 * (covered >= 0.5), figures[:, NUM_ADDED], strict=True):
            for counts in (self._state[row, drafter, _GAINED + at : _GAINED + at + 2], own[at : at + 2]):
                counts *= _MEMORY
                counts += added, 1.0
        if len(rows):
            self.nodes_a_draft[drafter] += (1.0 - _MEMORY) * (
                figures[:, NUM_NODES].mean() - self.nodes_a_draft[drafter]
            )

    def learn(self, rows: Rows, figures: NDArray[np.float64]) -> None:
        """Count the judged nodes of a step. Shape: figures [B, drafters, figures] of `StepTrees`."""
        guessed = (figures[..., EXPECTED] > 0.0) | (figures[..., NUM_NODES] > 0.0)
        memory = np.where(guessed, _MEMORY, 1.0)
        state = self._state[rows]
        state[..., _EXPECTED] = state[..., _EXPECTED] * memory + figures[..., EXPECTED]
        state[..., _ACCEPTED] = state[..., _ACCEPTED] * memory + figures[..., ACCEPTED]
        self._state[rows] = state
        for drafter in np.flatnonzero((figures[..., NUM_NODES] + figures[..., NUM_SHARED]).any(0)):
            drafted = figures[:, drafter, NUM_NODES] + figures[:, drafter, NUM_SHARED] > 0.0
            self.note(rows[drafted], int(drafter), figures[drafted, drafter, NUM_HITS] > 0.0)

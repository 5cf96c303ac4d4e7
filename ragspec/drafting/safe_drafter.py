"""A drafter whose errors cost its draft and nothing else.

Errors are counted and, unless they repeat, logged; proposals are checked; and a drafter that keeps failing is disabled.
"""

import functools
import logging
import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from ragspec.drafting.drafter import Budget, Drafter, SequenceView
from ragspec.drafting.step_trees import check_proposals
from ragspec.tree import Proposals

log = logging.getLogger(__name__)

_MAX_FAILURES = 25
"""Failed `propose` calls in a row. Why so many: one bad request must not end drafting for all other requests."""

P = ParamSpec("P")
T = TypeVar("T")


class SafeDrafter:
    """Has the methods of the drafter that it wraps. None of them raises; a method that fails returns None."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self._last_failure = drafter, ""
        self.name = drafter.name
        self.num_failures = self._num_in_a_row = 0
        self.prepare, self.start = self._safe(drafter.prepare), self._safe(drafter.start)
        self.observe, self.learn = self._safe(drafter.observe), self._safe(drafter.learn)
        self.learn_nodes = self._safe(self._learn_nodes)
        self.finish, self.purge = self._safe(drafter.finish), self._safe(drafter.purge)
        self.note_idle, self.close = self._safe(drafter.note_idle), self._safe(drafter.close)
        self._safe_cost_s, self._safe_propose = self._safe(self._checked_cost_s), self._safe(self._checked_propose)

    @property
    def disabled(self) -> bool:
        """Whether `propose` has failed too often."""
        return self._num_in_a_row >= _MAX_FAILURES

    def cost_s(self, sequences: SequenceOf[SequenceView]) -> float:
        """Infinity where the drafter fails, returns no number or is disabled."""
        cost_s = None if self.disabled else self._safe_cost_s(sequences)
        return math.inf if cost_s is None or math.isnan(cost_s) else cost_s

    def propose(self, sequences: SequenceOf[SequenceView], budget: Budget) -> Proposals:
        """If the call for all sequences fails, each sequence gets a call of its own."""
        proposed = self._safe_propose(sequences, budget)
        if proposed is None and len(sequences) > 1:
            parts = zip(sequences, budget.depths, strict=True)
            alone = [self._safe_propose([sequence], budget._replace(depths=[depth])) for sequence, depth in parts]
            if any(own is not None for own in alone):
                proposed = Proposals.of(self.name, [own[0] if own is not None else () for own in alone])
        self._num_in_a_row = self._num_in_a_row + 1 if proposed is None else 0
        if self.disabled:
            log.warning("the drafter %s is disabled: it has failed %d times in a row", self.name, _MAX_FAILURES)
        return Proposals.of(self.name, [()] * len(sequences)) if proposed is None else proposed

    def _checked_cost_s(self, sequences: SequenceOf[SequenceView]) -> float:
        return max(0.0, float(self._drafter.cost_s(sequences)))

    def _checked_propose(self, sequences: SequenceOf[SequenceView], budget: Budget) -> Proposals:
        """Raises: AttributeError, TypeError, ValueError, OverflowError for anything but proposals."""
        proposed = self._drafter.propose(sequences, budget)
        if not isinstance(proposed, Proposals):
            lists = [list(own) for own in proposed]
            proposed = Proposals.of(self.name, [*lists, *([()] * (len(sequences) - len(lists)))])
        check_proposals(proposed, len(sequences))
        return proposed

    def _learn_nodes(self, given: Proposals, judged: NDArray[np.int64]) -> None:
        """The fate of proposed nodes. Shape: as `StepTrees.judge` yields."""
        owners, columns, right = judged
        if given.in_arrays:
            self.learn(given.feedback(owners, columns), right)
        else:
            for owner, column, is_right in judged.T.tolist():
                self.learn(given.feedback(owner, column), bool(is_right))

    def _safe(self, call: Callable[P, T]) -> Callable[P, T | None]:
        @functools.wraps(call)
        def safe(*args: P.args, **kwargs: P.kwargs) -> T | None:
            try:
                return call(*args, **kwargs)
            except Exception as error:
                self.num_failures += 1
                failure, self._last_failure = self._last_failure, repr(error)
                if failure != self._last_failure:
                    log.exception("the drafter %s failed; the step goes on without its draft", self.name)
                return None

        return safe

"""A drafter whose mistakes cost its draft and nothing else.

Whatever it raises is logged and counted, whatever it returns is checked for being proposals at all, and one that goes on failing
is asked no more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, ParamSpec, TypeVar

import numpy as np

from ragspec.core import Request
from ragspec.drafting.drafter import Budget, Drafted, Drafter, Features
from ragspec.tree import Origin, Proposal

log = logging.getLogger(__name__)

_MOST_FAILURES = 25
"""Drafts in a row that failed for every sequence. Why: what one request breaks must not end drafting for all others."""

P = ParamSpec("P")
T = TypeVar("T")


class Guarded:
    """Stands before one drafter and has its methods. `benched`: it goes on failing and is asked no more."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.name, self.taps = drafter.name, drafter.taps
        self.num_failures = self._num_in_a_row = 0

    @property
    def benched(self) -> bool:
        return self._num_in_a_row >= _MOST_FAILURES

    def prepare(self, request: Request) -> Any:
        return self._contain(self._drafter.prepare, request)

    def start(self, sequence: Drafted) -> None:
        self._contain(self._drafter.start, sequence)

    def cost_s(self, sequences: SequenceOf[Drafted]) -> float:
        """Infinity where the drafter cannot say."""
        cost_s = self._contain(lambda: max(0.0, float(self._drafter.cost_s(sequences))))
        return float("inf") if cost_s is None or cost_s != cost_s else cost_s

    def propose(self, sequences: SequenceOf[Drafted], budget: Budget) -> list[list[Proposal]]:
        """One list a sequence. Where asking for all fails, each is asked for alone: one must not cost the others their drafts."""
        lists = self._contain(self._proposals, sequences, budget)
        if lists is None and len(sequences) > 1:
            alone = [
                self._contain(self._proposals, [sequence], budget._replace(trees=[tree], depths=[depth]))
                for sequence, tree, depth in zip(sequences, budget.trees, budget.depths, strict=True)
            ]
            has_failed = all(lists is None for lists in alone)
            lists = [lists[0] if lists else [] for lists in alone]
        else:
            has_failed = lists is None
        self._num_in_a_row = self._num_in_a_row + 1 if has_failed else 0
        if self.benched:
            log.warning("the drafter %s has failed %d times in a row and is asked no more", self.name, _MOST_FAILURES)
        return lists or [[] for _ in sequences]

    def observe(self, sequence: Drafted, tokens: SequenceOf[int], features: Features) -> None:
        self._contain(self._drafter.observe, sequence, tokens, features)

    def learn(self, feedback: object, accepted: bool) -> None:
        self._contain(self._drafter.learn, feedback, accepted)

    def finish(self, sequence: Drafted) -> None:
        self._contain(self._drafter.finish, sequence)

    def purge(self, salt: str) -> None:
        self._contain(self._drafter.purge, salt)

    def _proposals(self, sequences: SequenceOf[Drafted], budget: Budget) -> list[list[Proposal]]:
        lists = [list(proposals) for proposals in self._drafter.propose(sequences, budget)]
        for proposals in lists:
            for at, proposal in enumerate(proposals):
                if not (isinstance(proposal, Proposal) and isinstance(proposal.origin, Origin)):
                    raise TypeError(f"{self.name} proposed {type(proposal).__name__}, which is no proposal")
                origin, whole = proposal.origin, (int, np.integer)
                if not all(isinstance(each, whole) for each in (proposal.token_id, origin.source, origin.offset)):
                    raise TypeError(f"{self.name} proposed a node whose token or origin is no whole number")
                if not (-1 <= proposal.parent < at and isinstance(proposal.path_prob, float | int)):
                    raise ValueError(
                        f"{self.name} proposed a node below {proposal.parent!r}, which does not precede it"
                    )
        return [*lists, *([] for _ in range(len(sequences) - len(lists)))]

    def _contain(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return call(*args, **kwargs)
        except Exception:
            self.num_failures += 1
            log.exception("the drafter %s failed; the step goes on without its draft", self.name)
            return None

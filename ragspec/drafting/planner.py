"""How much to draft: one tree a sequence, sized so that the step's expected tokens per second are greatest.

A forward over n rows costs what it was measured to cost at start; a node is worth the probability that its path is accepted.
Drafters learn that probability over all requests; the planner scales it by how their guesses have fared in this one.
Nodes of all sequences are taken in order of that probability while (expected tokens) / (cost of the step) still rises, so
nothing is drafted where nothing pays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, ParamSpec, TypeVar

from ragspec.core import Request
from ragspec.drafting.costs import CostTable
from ragspec.drafting.drafter import Drafted, Drafter
from ragspec.tree import DraftTree

log = logging.getLogger(__name__)

_PATIENCE = 3
"""Steps in a row without an accepted token before drafters are asked less often."""
_LONGEST_SLEEP = 8

_PRIOR_TOKENS = 6.0
"""Accepted tokens that a new sequence is believed to have had, of as many expected."""
_TRUST_MEMORY = 0.98
"""What is kept of the balance a step, drafted or not, so that a sequence that begins to copy late is tried again."""

P = ParamSpec("P")
T = TypeVar("T")


class Trust:
    """Accepted over expected tokens of one sequence, at most 1: where a sequence does not copy, drafts for it soon end."""

    def __init__(self) -> None:
        self._expected = self._accepted = 0.0
        self.factor = 1.0

    def learn(self, expected: float, num_accepted: int) -> None:
        """`expected` by probabilities that were scaled by the factor."""
        self._expected = self._expected * _TRUST_MEMORY + expected / self.factor
        self._accepted = self._accepted * _TRUST_MEMORY + num_accepted
        self.factor = min(1.0, (_PRIOR_TOKENS + self._accepted) / (_PRIOR_TOKENS + self._expected))


class Planner:
    """Merges the proposals of all drafters and cuts them to what pays. Contains their exceptions."""

    def __init__(
        self, drafters: SequenceOf[Drafter], costs: CostTable, max_tree_nodes: int, vocab_size: int = 2**31
    ) -> None:
        self._drafters = list(drafters)
        self._costs = costs
        self._max_nodes = max_tree_nodes
        self._vocab_size = vocab_size
        self._idle: dict[tuple[str, int], tuple[int, int]] = {}  # sequence -> (steps to skip, empty drafts in a row)
        self._trust: dict[tuple[str, int], Trust] = {}
        self.num_failures = 0

    def prepare(self, request: Request) -> dict[str, Any]:
        """By drafter, what it needs of a request before it starts. For any thread."""
        return {d.name: self._contain(d.prepare, request) for d in self._drafters} if request.speculation else {}

    def start(self, sequence: Drafted) -> None:
        for drafter in self._drafters if sequence.request.speculation else ():
            self._contain(drafter.start, sequence)

    def plan(self, sequences: SequenceOf[Drafted], num_other_rows: int, spare_rows: int) -> list[DraftTree]:
        """One tree a sequence. `num_other_rows`: prompt rows in the same step; `spare_rows`: the most nodes in all."""
        trees = [DraftTree(s.tokens[-1]) for s in sequences]
        awake = [i for i, s in enumerate(sequences) if s.request.speculation and not self._asleep(s)]
        if not awake or spare_rows <= 0:
            return trees
        for drafter in self._drafters:
            asking = [sequences[i] for i in awake]
            lists = self._contain(drafter.propose, asking, self._max_nodes)
            if lists is None:  # one row must not cost the others their drafts
                lists = [(self._contain(drafter.propose, [s], self._max_nodes) or [[]])[0] for s in asking]
            for i, proposals in zip(awake, lists, strict=False):
                most = sequences[i].most_tokens - 1  # the last token of a step is the target's own
                self._contain(trees[i].merge, proposals, most, self._vocab_size)
        for i in awake:
            trees[i] = trees[i].best(self._max_nodes)
            trees[i].scale(self._trust_in(sequences[i]).factor)
        trees = self._cut(sequences, trees, num_other_rows, spare_rows)
        for i in awake:
            if not trees[i].num_drafted:
                self._note(sequences[i], False)
        return trees

    def note_cost(self, num_rows: int, context: int, seconds: float) -> None:
        """What a step's forward took."""
        self._costs.refine(num_rows, context, seconds)

    def observe(self, sequence: Drafted, tree: DraftTree, path: list[int], tokens: SequenceOf[int]) -> None:
        """What the target decided: each drafter learns from its nodes, then hears the tokens.

        Siblings count in order up to the accepted one: a later sibling's probability was given that no earlier one is right.
        """
        if not sequence.request.speculation:
            return
        self._trust_in(sequence).learn(sum(tree.path_probs[1:]), len(path))
        if tree.num_drafted:
            self._note(sequence, len(path) > 0)
        by_name = {d.name: d for d in self._drafters}
        on_path = {0, *path}
        settled: set[int] = set()
        for node in range(1, len(tree)):
            parent = tree.parents[node]
            if parent not in on_path or parent in settled:
                continue
            drafter = by_name.get(tree.origins[node].drafter)
            if drafter is not None:
                self._contain(drafter.learn, tree.origins[node].feedback, node in on_path)
            if node in on_path:
                settled.add(parent)
        for drafter in self._drafters:
            self._contain(drafter.observe, sequence, tokens, None)

    def finish(self, sequence: Drafted) -> None:
        self._idle.pop(sequence.key, None)
        self._trust.pop(sequence.key, None)
        for drafter in self._drafters if sequence.request.speculation else ():
            self._contain(drafter.finish, sequence)

    def purge(self, salt: str) -> None:
        """Forget one tenant's text."""
        for drafter in self._drafters:
            self._contain(drafter.purge, salt)

    def _cut(
        self, sequences: SequenceOf[Drafted], trees: list[DraftTree], num_other_rows: int, spare_rows: int
    ) -> list[DraftTree]:
        """Nodes by probability while expected tokens a second rise. Rows of prompts are paid for anyway and count for nothing."""
        context = max(len(s.tokens) for s in sequences)
        probs = sorted((p for tree in trees for p in tree.path_probs[1:]), reverse=True)[:spare_rows]
        rows = len(sequences) + num_other_rows
        expected = float(len(sequences))
        sunk_s = self._costs.cost_s(rows, context) - self._costs.cost_s(len(sequences), context)
        best_rate, best = expected / self._costs.cost_s(len(sequences), context), 0
        for n, prob in enumerate(probs, 1):
            expected += prob
            rate = expected / (self._costs.cost_s(rows + n, context) - sunk_s)
            if rate > best_rate:
                best_rate, best = rate, n
        if best == 0:
            return [DraftTree(tree.token_ids[0]) for tree in trees]
        if best == sum(tree.num_drafted for tree in trees):
            return trees
        return _split_budget(trees, probs[best - 1], best)

    def _trust_in(self, sequence: Drafted) -> Trust:
        return self._trust.setdefault(sequence.key, Trust())

    def _asleep(self, sequence: Drafted) -> bool:
        left, num_empty = self._idle.get(sequence.key, (0, 0))
        if left:
            self._idle[sequence.key] = (left - 1, num_empty)
        return left > 0

    def _note(self, sequence: Drafted, accepted: bool) -> None:
        """After some steps in vain in a row, drafters are asked again after 1, 2, 4 and then every 8 steps."""
        if accepted:
            self._idle.pop(sequence.key, None)
        else:
            num_empty = self._idle.get(sequence.key, (0, 0))[1] + 1
            beyond = num_empty - _PATIENCE
            self._idle[sequence.key] = (min(_LONGEST_SLEEP, 2 ** (beyond - 1)) if beyond > 0 else 0, num_empty)

    def _contain(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return call(*args, **kwargs)
        except Exception:
            self.num_failures += 1
            log.exception("a drafter failed; the step goes on without its draft")
            return None


def _split_budget(trees: list[DraftTree], threshold: float, num_nodes: int) -> list[DraftTree]:
    """Each tree keeps its nodes above the threshold; nodes at it fill what is left, first trees first."""
    above = [sum(p > threshold for p in tree.path_probs[1:]) for tree in trees]
    at = [sum(p == threshold for p in tree.path_probs[1:]) for tree in trees]
    left = num_nodes - sum(above)
    kept = []
    for tree, high, equal in zip(trees, above, at, strict=True):
        extra = min(left, equal)
        left -= extra
        kept.append(tree.best(high + extra))
    return kept

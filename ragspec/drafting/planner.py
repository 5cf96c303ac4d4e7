"""How much to draft: one tree a sequence, sized so that the step's expected tokens per second are greatest.

A forward over n rows costs what it was measured to cost at start; a node is worth the probability that its path is accepted.
Drafters learn that probability over all requests; the planner scales it by how their guesses have fared in this one.
Nodes of all sequences are taken in order of that probability while (expected tokens) / (cost of the step) still rises, so
nothing is drafted where nothing pays. A drafter whose guesses take time themselves is asked where they are worth that time.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, ParamSpec, TypeVar

from ragspec.core import Request
from ragspec.drafting.costs import CostTable
from ragspec.drafting.drafter import Budget, Drafted, Drafter, Features
from ragspec.drafting.drawing import needs_chain
from ragspec.drafting.worth import Course, Worth, worthwhile
from ragspec.errors import InputError
from ragspec.tree import DraftTree

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
Key = tuple[str, int]


class Planner:
    """Merges the proposals of all drafters and cuts them to what pays. Contains their exceptions.

    `fixed_nodes`: take so many of the best nodes in every step, whatever they cost; for measurements.
    """

    def __init__(
        self,
        drafters: SequenceOf[Drafter],
        costs: CostTable,
        max_tree_nodes: int,
        vocab_size: int = 2**31,
        fixed_nodes: int | None = None,
    ) -> None:
        self._drafters = list(drafters)
        self._costs = costs
        self._max_nodes = fixed_nodes or max_tree_nodes
        self._vocab_size = vocab_size
        self._fixed = fixed_nodes is not None
        self._courses: dict[Key, dict[str, Course]] = {}
        self._worth: defaultdict[str, Worth] = defaultdict(Worth)
        self._asked: dict[
            tuple[Key, str], float
        ] = {}  # costly drafters of this step -> what others expected before them
        self.taps = tuple(sorted({tap for drafter in drafters for tap in drafter.taps}))
        self.num_failures = 0
        self.draft_s = 0.0
        """Seconds that the last step's drafts took, a sequence."""

    def check(self, request: Request) -> None:
        """Raises: InputError for a drafter that there is none of."""
        known = [drafter.name for drafter in self._drafters]
        unknown = [name for name in request.speculation.drafters or () if name not in known]
        if unknown:
            raise InputError(f"there is no drafter {unknown[0]!r}; there are: {', '.join(known) or 'none'}")

    def prepare(self, request: Request) -> dict[str, Any]:
        """By drafter, what it needs of a request before it starts. For any thread. Raises: InputError."""
        self.check(request)
        return {drafter.name: self._contain(drafter.prepare, request) for drafter in self._of(request)}

    def start(self, sequence: Drafted) -> None:
        for drafter in self._of(sequence.request):
            self._contain(drafter.start, sequence)

    def plan(self, sequences: SequenceOf[Drafted], num_other_rows: int, spare_rows: int) -> list[DraftTree]:
        """One tree a sequence. `num_other_rows`: prompt rows in the same step; `spare_rows`: the most nodes in all."""
        begin = time.perf_counter()
        trees = self._planned(sequences, num_other_rows, spare_rows)
        self.draft_s = (time.perf_counter() - begin) / max(1, len(sequences))
        return trees

    def _planned(self, sequences: SequenceOf[Drafted], num_other_rows: int, spare_rows: int) -> list[DraftTree]:
        trees = [DraftTree(s.tokens[-1]) for s in sequences]
        self._asked.clear()
        if spare_rows <= 0:
            return trees
        asked: dict[int, list[Drafter]] = {}
        for drafter in self._drafters:
            awake = [i for i, s in enumerate(sequences) if self._awake(drafter, s)]
            awake = [i for i in awake if not (needs_chain(sequences[i]) and trees[i].num_drafted)]
            for i in self._worth_asking(drafter, awake, sequences, trees):
                asked.setdefault(i, []).append(drafter)
            self._merge(drafter, [i for i in awake if drafter in asked.get(i, ())], sequences, trees)
        for i in asked:
            tree = trees[i].first_path() if needs_chain(sequences[i]) else trees[i]
            trees[i] = tree.best(self._most_nodes(sequences[i]))
            trees[i].scale({drafter.name: self._course(sequences[i], drafter).trust.factor for drafter in asked[i]})
        trees = trees if self._fixed else self._fitted(sequences, trees, num_other_rows, spare_rows)
        for i, drafters in asked.items():
            for drafter in drafters:
                if not _guessed(trees[i], drafter.name):
                    self._course(sequences[i], drafter).rest.note(False)
        return trees

    def note_cost(self, num_rows: int, context: int, seconds: float) -> None:
        """What a step's forward took."""
        self._costs.refine(num_rows, context, seconds)

    def observe(
        self, sequence: Drafted, tree: DraftTree, path: list[int], tokens: SequenceOf[int], features: Features
    ) -> None:
        """What the target decided: each drafter learns from its nodes, then hears the tokens.

        Siblings count in order up to the accepted one: a later sibling's probability was given that no earlier one is right.
        """
        drafters = self._of(sequence.request)
        by_name = {drafter.name: drafter for drafter in drafters}
        for name in by_name:
            self._settle(sequence, tree, path, name)
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
        self.follow(sequence, tokens, features)

    def follow(self, sequence: Drafted, tokens: SequenceOf[int], features: Features) -> None:
        """Tokens were decided, or a piece of the prompt was read, without a draft."""
        for drafter in self._of(sequence.request):
            self._contain(drafter.observe, sequence, tokens, features)

    def finish(self, sequence: Drafted) -> None:
        self._courses.pop(sequence.key, None)
        for drafter in self._of(sequence.request):
            self._contain(drafter.finish, sequence)

    def purge(self, salt: str) -> None:
        """Forget one tenant's text."""
        for drafter in self._drafters:
            self._contain(drafter.purge, salt)

    def _of(self, request: Request) -> list[Drafter]:
        """The drafters that a request wants."""
        wanted = request.speculation
        return [d for d in self._drafters if wanted and (wanted.drafters is None or d.name in wanted.drafters)]

    def _most_nodes(self, sequence: Drafted) -> int:
        own = sequence.request.speculation.max_nodes
        return self._max_nodes if own is None else min(own, self._max_nodes)

    def _course(self, sequence: Drafted, drafter: Drafter) -> Course:
        return self._courses.setdefault(sequence.key, {}).setdefault(drafter.name, Course())

    def _awake(self, drafter: Drafter, sequence: Drafted) -> bool:
        return drafter in self._of(sequence.request) and (self._course(sequence, drafter).rest.due() or self._fixed)

    def _worth_asking(
        self, drafter: Drafter, awake: list[int], sequences: SequenceOf[Drafted], trees: list[DraftTree]
    ) -> list[int]:
        """Of the sequences awake, those for which a draft is likely to save more time than it takes."""

        def cost_s(chosen: SequenceOf[int]) -> float:
            return self._contain(drafter.cost_s, [sequences[awake[n]] for n in chosen]) or 0.0

        if not awake or cost_s(range(len(awake))) == 0.0:
            return awake
        others = {i: sum(trees[i].path_probs[1:]) for i in awake}
        worth = self._worth[drafter.name]
        gains = [worth.gain(others[i]) * self._course(sequences[i], drafter).trust.factor for i in awake]
        chosen = [awake[n] for n in worthwhile(gains, self._token_s(sequences, trees), cost_s)]
        if self._fixed or (not chosen and worth.probe_due()):
            chosen = awake
        self._asked.update({(sequences[i].key, drafter.name): others[i] for i in chosen})
        return chosen

    def _token_s(self, sequences: SequenceOf[Drafted], trees: list[DraftTree]) -> float:
        """Seconds a token takes with what is drafted so far."""
        expected = len(trees) + sum(sum(tree.path_probs[1:]) for tree in trees)
        return self._costs.cost_s(len(trees), max(len(s.tokens) for s in sequences)) / expected

    def _merge(
        self, drafter: Drafter, asking: list[int], sequences: SequenceOf[Drafted], trees: list[DraftTree]
    ) -> None:
        if not asking:
            return
        token_s = 0.0 if self._fixed else self._token_s(sequences, trees)
        budget = Budget(self._max_nodes, token_s, [trees[i] for i in asking])
        lists = self._contain(drafter.propose, [sequences[i] for i in asking], budget)
        if lists is None:  # one row must not cost the others their drafts
            alone = [budget._replace(trees=[trees[i]]) for i in asking]
            lists = [
                (self._contain(drafter.propose, [sequences[i]], own) or [[]])[0]
                for i, own in zip(asking, alone, strict=True)
            ]
        for i, proposals in zip(asking, lists, strict=False):
            most = sequences[i].most_tokens - 1  # the last token of a step is the target's own
            self._contain(trees[i].merge, proposals, most, self._vocab_size)

    def _settle(self, sequence: Drafted, tree: DraftTree, path: list[int], name: str) -> None:
        """How a drafter's guesses of this step have fared in this sequence."""
        course = self._courses.setdefault(sequence.key, {}).setdefault(name, Course())
        own = [n for n in range(1, len(tree)) if tree.origins[n].drafter == name]
        course.trust.learn(sum(tree.path_probs[n] for n in own), sum(tree.origins[n].drafter == name for n in path))
        if _guessed(tree, name):
            course.rest.note(any(tree.origins[n].drafter == name or tree.shared[n] for n in path))
        others = self._asked.pop((sequence.key, name), None)
        if others is not None:
            added = sum(tree.origins[n].drafter == name and not tree.shared[n] for n in path)
            self._worth[name].learn(others, added)

    def _fitted(
        self, sequences: SequenceOf[Drafted], trees: list[DraftTree], num_other_rows: int, spare_rows: int
    ) -> list[DraftTree]:
        """Cut to what pays, but for trees that were drawn by chance: to leave a node out for what was drawn below it would shift
        the law of the output."""
        drawn = [i for i, tree in enumerate(trees) if tree.draws]
        if not drawn:
            return self._cut(sequences, trees, num_other_rows, spare_rows)
        for i in drawn:
            trees[i] = trees[i].best(spare_rows // len(drawn))
        kept_rows = sum(trees[i].num_drafted for i in drawn)
        others = [i for i in range(len(trees)) if i not in drawn]
        if others:
            own = [sequences[i] for i in others], [trees[i] for i in others]
            rows = num_other_rows + kept_rows + len(drawn)
            for i, tree in zip(others, self._cut(*own, rows, spare_rows - kept_rows), strict=True):
                trees[i] = tree
        return trees

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
            return [tree.best(0) for tree in trees]
        if best == sum(tree.num_drafted for tree in trees):
            return trees
        return _split_budget(trees, probs[best - 1], best)

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


def _guessed(tree: DraftTree, name: str) -> bool:
    """Whether a node of the tree is this drafter's, alone or with others."""
    return any(tree.origins[n].drafter == name or tree.shared[n] for n in range(1, len(tree)))

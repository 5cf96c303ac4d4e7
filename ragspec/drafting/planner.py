"""How much to draft: one tree a sequence, sized so that the step's expected tokens per second are greatest.

A forward over n rows costs what it was measured to cost at start; a node is worth the probability that its path is accepted.
Drafters learn that probability over all requests; the planner scales it by how their guesses have fared in this one.
Nodes of all sequences are taken in order of that probability while (expected tokens) / (cost of the step) still rises, so
nothing is drafted where nothing pays. A drafter whose guesses take time themselves is asked where they are worth that time.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Sequence as SequenceOf
from typing import Any

from ragspec.core import Request
from ragspec.drafting.costs import CostTable
from ragspec.drafting.drafter import Budget, Drafted, Drafter, Features
from ragspec.drafting.drafter_stats import CALLED_GAIN, Asked, Course, Worth, worthwhile
from ragspec.drafting.safe_drafter import Guarded
from ragspec.drafting.sizing import Sizing
from ragspec.drafting.stochastic_drafts import needs_chain
from ragspec.errors import InputError, RagspecError
from ragspec.tree import DraftTree
from ragspec.verification.rejection import check_draft

log = logging.getLogger(__name__)

Key = tuple[str, int]

_ANY_DEPTH = 2**31


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
        self._drafters = [Guarded(drafter) for drafter in drafters]
        self._sizing = Sizing(costs, is_fixed=fixed_nodes is not None)
        self._max_nodes = fixed_nodes or max_tree_nodes
        self._vocab_size = vocab_size
        self._fixed = fixed_nodes is not None
        self._courses: dict[Key, dict[str, Course]] = {}
        self._worth: defaultdict[str, Worth] = defaultdict(Worth)
        self._asked: dict[tuple[Key, str], Asked] = {}  # in this step, of drafters that take time
        self.taps = tuple(sorted({tap for drafter in drafters for tap in drafter.taps}))
        self.draft_s = 0.0
        """Seconds that the last step's drafts took, a sequence."""

    @property
    def num_failures(self) -> int:
        """How often a drafter has failed."""
        return sum(drafter.num_failures for drafter in self._drafters)

    def check(self, request: Request) -> None:
        """Raises: InputError for a drafter that there is none of."""
        known = [drafter.name for drafter in self._drafters]
        unknown = [name for name in request.speculation.drafters or () if name not in known]
        if unknown:
            raise InputError(f"there is no drafter {unknown[0]!r}; there are: {', '.join(known) or 'none'}")

    def prepare(self, request: Request) -> dict[str, Any]:
        """By drafter, what it needs of a request before it starts. For any thread. Raises: InputError."""
        self.check(request)
        return {drafter.name: drafter.prepare(request) for drafter in self._of(request)}

    def start(self, sequence: Drafted) -> None:
        for drafter in self._of(sequence.request):
            drafter.start(sequence)

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
        asked: dict[int, list[Guarded]] = {}
        for drafter in self._drafters:
            awake = [i for i, s in enumerate(sequences) if self._awake(drafter, s)]
            awake = [i for i in awake if not (needs_chain(sequences[i]) and trees[i].num_drafted)]
            depths = self._worth_asking(drafter, awake, sequences, trees)
            for i in depths:
                asked.setdefault(i, []).append(drafter)
            self._merge(drafter, depths, sequences, trees)
        for i in asked:
            tree = trees[i].first_path() if needs_chain(sequences[i]) else trees[i]
            trees[i] = tree.best(self._most_nodes(sequences[i]))
            trees[i].scale(
                {drafter.name: self._course(sequences[i], drafter.name).trust.factor for drafter in asked[i]}
            )
        trees = self._sizing.fit(sequences, trees, num_other_rows, spare_rows)
        for i, drafters in asked.items():
            for drafter in drafters:
                if not _guessed(trees[i], drafter.name) and (sequences[i].key, drafter.name) not in self._asked:
                    self._course(sequences[i], drafter.name).rest.note(False)
        return trees

    def note_cost(self, num_rows: int, context: int, seconds: float) -> None:
        """What a step's forward took."""
        self._sizing.note_cost(num_rows, context, seconds)

    def observe(
        self, sequence: Drafted, tree: DraftTree, path: list[int], tokens: SequenceOf[int], features: Features
    ) -> None:
        """What the target decided: each drafter learns from its nodes, then hears the tokens.

        Siblings count in order up to the accepted one: a later sibling's probability was given that no earlier one is right.
        """
        drafters = self._of(sequence.request)
        by_name = {drafter.name: drafter for drafter in drafters}
        for name in by_name:
            self._settle(sequence, tree, path, tokens[0], name)
        on_path = {0, *path}
        settled: set[int] = set()
        for node in range(1, len(tree)):
            parent = tree.parents[node]
            if parent not in on_path or parent in settled:
                continue
            drafter = by_name.get(tree.origins[node].drafter)
            if drafter is not None:
                drafter.learn(tree.origins[node].feedback, node in on_path)
            if node in on_path:
                settled.add(parent)
        self.follow(sequence, tokens, features)

    def follow(self, sequence: Drafted, tokens: SequenceOf[int], features: Features) -> None:
        """Tokens were decided, or a piece of the prompt was read, without a draft."""
        for drafter in self._of(sequence.request):
            drafter.observe(sequence, tokens, features)

    def finish(self, sequence: Drafted) -> None:
        self._courses.pop(sequence.key, None)
        for drafter in self._of(sequence.request):
            drafter.finish(sequence)

    def purge(self, salt: str) -> None:
        """Forget one tenant's text."""
        for drafter in self._drafters:
            drafter.purge(salt)

    def _of(self, request: Request) -> list[Guarded]:
        """The drafters that a request wants."""
        wanted = request.speculation
        return [d for d in self._drafters if wanted and (wanted.drafters is None or d.name in wanted.drafters)]

    def _most_nodes(self, sequence: Drafted) -> int:
        own = sequence.request.speculation.max_nodes
        return self._max_nodes if own is None else min(own, self._max_nodes)

    def _course(self, sequence: Drafted, name: str) -> Course:
        courses = self._courses.setdefault(sequence.key, {})
        if name not in courses:
            courses[name] = Course(self._worth[name].first_wait)
        return courses[name]

    def _awake(self, drafter: Guarded, sequence: Drafted) -> bool:
        return (
            not drafter.benched
            and drafter in self._of(sequence.request)
            and (self._course(sequence, drafter.name).rest.due() or self._fixed)
        )

    def _worth_asking(
        self, drafter: Guarded, awake: list[int], sequences: SequenceOf[Drafted], trees: list[DraftTree]
    ) -> dict[int, int]:
        """The sequences to ask a drafter for, and how many levels each may have.

        A drafter that takes time: those for which a draft is likely to save more than it takes, and now and then a trial.
        """

        def cost_s(chosen: SequenceOf[int]) -> float:
            rows_s = self._sizing.rows_s(sequences, round(len(chosen) * self._worth[drafter.name].num_nodes))
            return drafter.cost_s([sequences[awake[n]] for n in chosen]) + rows_s

        awake = [i for i in awake if drafter.cost_s([sequences[i]]) < math.inf]
        if not awake or drafter.cost_s([sequences[i] for i in awake]) == 0.0:
            return dict.fromkeys(awake, _ANY_DEPTH)
        others = {i: sum(trees[i].path_probs[1:]) for i in awake}
        worth, courses = self._worth[drafter.name], {i: self._course(sequences[i], drafter.name) for i in awake}
        gains = [worth.gain(others[i]) * courses[i].factor for i in awake]
        hoped = [max(gain, CALLED_GAIN * courses[i].called) for gain, i in zip(gains, awake, strict=True)]

        def saved_s(chosen: SequenceOf[int]) -> float:
            return self._sizing.saved_s(sequences, trees, [hoped[n] for n in chosen])

        paying = {awake[n] for n in worthwhile(hoped, saved_s, cost_s)}
        whole = set(awake) if self._fixed else paying
        hit_s = self._sizing.saved_s(sequences, trees, [CALLED_GAIN])
        hopeful = [i for n, i in enumerate(awake) if i not in whole and hit_s > cost_s([n])]
        trials = {i for i in hopeful if courses[i].trial_due()}
        if not whole and not hopeful and worth.joint_trial_due():
            all_hit_s = self._sizing.saved_s(sequences, trees, [CALLED_GAIN] * len(awake))
            trials = set(awake) if all_hit_s > cost_s(range(len(awake))) else set()
        for i in whole | trials:
            self._asked[sequences[i].key, drafter.name] = Asked(others[i], i in trials, courses[i].called)
        return {i: 1 if i in trials else _ANY_DEPTH for i in awake if i in whole | trials}

    def _merge(
        self, drafter: Guarded, depths: dict[int, int], sequences: SequenceOf[Drafted], trees: list[DraftTree]
    ) -> None:
        """Ask for these sequences, and put what is proposed into their trees."""
        if not depths:
            return
        token_s = 0.0 if self._fixed else self._sizing.token_s(sequences, trees)
        budget = Budget(self._max_nodes, token_s, [trees[i] for i in depths], list(depths.values()))
        lists = drafter.propose([sequences[i] for i in depths], budget)
        for i, proposals in zip(depths, lists, strict=False):
            if (asked := self._asked.get((sequences[i].key, drafter.name))) is not None:
                guesses = frozenset(p.token_id for p in proposals if p.parent < 0)
                self._asked[sequences[i].key, drafter.name] = asked._replace(guesses=guesses)
            most = sequences[i].most_tokens - 1  # the last token of a step is the target's own
            trees[i].merge(proposals, most, self._vocab_size)
            if trees[i].draws:
                trees[i] = _sound(sequences[i], trees[i], self._vocab_size)

    def _settle(self, sequence: Drafted, tree: DraftTree, path: list[int], next_token: int, name: str) -> None:
        """How a drafter's guesses of this step have fared in this sequence."""
        course = self._course(sequence, name)
        own = [n for n in range(1, len(tree)) if tree.origins[n].drafter == name]
        course.trust.learn(sum(tree.path_probs[n] for n in own), sum(tree.origins[n].drafter == name for n in path))
        asked = self._asked.pop((sequence.key, name), None)
        if asked is None and _guessed(tree, name):
            course.rest.note(any(tree.origins[n].drafter == name or tree.shared[n] for n in path))
        elif asked is not None and asked.is_trial:
            known = bool(path) and (tree.origins[path[0]].drafter != name or tree.shared[path[0]])
            hit = next_token in asked.guesses and not known
            course.note_trial(hit)
            if not hit:
                self._worth[name].note_trial(False)
        elif asked is not None:
            added = sum(tree.origins[n].drafter == name and not tree.shared[n] for n in path)
            course.learn(self._worth[name].gain(asked.expected_of_others), added)
            self._worth[name].learn(asked, added)
            self._worth[name].note_nodes(len(own))


def _guessed(tree: DraftTree, name: str) -> bool:
    """Whether a node of the tree is this drafter's, alone or with others."""
    return any(tree.origins[n].drafter == name or tree.shared[n] for n in range(1, len(tree)))


def _sound(sequence: Drafted, tree: DraftTree, vocab_size: int) -> DraftTree:
    """The tree, or its root alone where children cannot have been drawn as they are said to: no rule could accept them."""
    try:
        check_draft(sequence.request.speculation.rule, tree, tree.draws, vocab_size)
    except RagspecError as error:
        log.warning("a draft for request %r is left out: %s", sequence.request.id, error)
        return DraftTree(tree.token_ids[0])
    return tree

"""How much to draft: one tree for each sequence, sized so that the step's expected tokens a second are greatest.

`ragspec.drafting.cost_model` writes the objective as a formula, `Trust` of `acceptance` the rule by which drafters are believed.
The planner merges all proposals into one tree for each sequence and cuts the trees to the best size (`step_trees`). Nodes that
were cut are judged too, by the tokens that the target said: a drafter shows without a row whether its guesses would pay. A tree
has at most `max_tree_nodes` nodes more than its longest path. Drafters that take time come after the others, and one of them
drafts for a sequence in a step: the one whose drafts save most. It is asked only where its drafts save more time than they take;
where they do not, a drafter is tried when a hundredth of the time since its last trial pays for another.

    >>> planner = Planner([CopyDrafter(tokenizer)], costs, max_tree_nodes=48)
    >>> trees = planner.plan(sequences, num_prompt_rows=0, spare_rows=lambda count: 100)
    >>> planner.observe(sequences, results, features)             # after verification
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np

from ragspec.core import Request
from ragspec.drafting.acceptance import Floats, Ints, Mask, Trust
from ragspec.drafting.children import draws_children, needs_chain
from ragspec.drafting.cost_model import CostTable, StepPlan
from ragspec.drafting.drafter import Budget, Drafter, Features, SequenceView
from ragspec.drafting.safe_drafter import SafeDrafter
from ragspec.drafting.step_trees import StepTrees, compile_trees
from ragspec.errors import InputError
from ragspec.tree import DraftTree, StepResult
from ragspec.verification.rejection import check_draft

log = logging.getLogger(__name__)

_SUREST = 0.98
"""Hardly any draft is surer: where only a surer draft pays, drafters are not asked."""
_TRIAL_SHARE = 0.01
"""Share of the time for drafts that do not seem to pay. More: a drafter that has become right is found sooner."""
_TOKEN_WORTH = 2.0
"""A token saves this many times the device's seconds for it, because it saves the host's time too. With 1, 64 sequences that copy
nine tokens in ten fell from 1.3 to 0.9 times the speed without drafts."""
_FREE_TOKENS = 0.08
"""Where the host's time for a draft is worth fewer tokens, it does not count, as on processors."""
_ANY_ROWS = 2**31
"""More than a step ever has."""
_ASK_WEIGHT = 1 / 24
"""Weight of one step in the mean of the host's seconds for asking."""


class Planner:
    """Merges the proposals of all drafters and cuts them to the size that pays. A drafter's errors cost only its draft."""

    is_fixed = False
    """Whether time does not count."""

    def __init__(
        self,
        drafters: SequenceOf[Drafter],
        costs: CostTable,
        max_tree_nodes: int,
        vocab_size: int = 2**31,
        num_embeddings: int = 0,
    ) -> None:
        """`num_embeddings`: of the target, if it has inputs for further tokens than its vocabulary's."""
        self._drafters = [SafeDrafter(drafter) for drafter in drafters]
        self._names = [drafter.name for drafter in drafters]
        self._max_nodes, self._vocab_size = max_tree_nodes, vocab_size
        self._num_embeddings = max(vocab_size, num_embeddings)
        self._trust = Trust(len(drafters), math.inf) if self.is_fixed else Trust(len(drafters))
        self._watching = frozenset(
            number for number, drafter in enumerate(drafters) if type(drafter).observe is not Drafter.observe
        )
        compile_trees()
        self._own: dict[tuple[str, int], _Own] = {}
        self._trial_s = np.zeros(len(drafters))  # time for a trial of each drafter that takes time
        self._asked: tuple[StepPlan, Ints] | None = None  # until the target has decided
        self._next_number = 0.0  # of the next step in which a drafter may be asked
        self._open: set[tuple[str, int]] = set()  # sequences that wait or run
        self.costs, self._ask_s = costs, 0.0
        self.taps = tuple(sorted({tap for drafter in drafters for tap in drafter.taps}))

    @property
    def num_failures(self) -> int:
        """Calls of drafters that raised."""
        return sum(drafter.num_failures for drafter in self._drafters)

    def prepare(self, request: Request) -> dict[str, Any]:
        """By drafter, what it prepares for a request. Callable from any thread. Raises: InputError for an unknown drafter."""
        unknown = [name for name in request.speculation.drafters or () if name not in self._names]
        if unknown:
            raise InputError(f"there is no drafter {unknown[0]!r}; there are: {', '.join(self._names) or 'none'}")
        return {self._names[d]: self._drafters[d].prepare(request) for d in self._drafters_of(request)}

    def start(self, sequence: SequenceView) -> None:
        if not self._open:
            self._note_idle(False)
        self._open.add(sequence.key)
        for drafter in self._drafters_of(sequence.request):
            self._drafters[drafter].start(sequence)

    def plan(
        self, sequences: SequenceOf[SequenceView], num_prompt_rows: int, spare_rows: Callable[[int], int]
    ) -> list[DraftTree]:
        """One tree for each sequence.

        `num_prompt_rows`: rows of prompts in the same step; `spare_rows`: the most nodes of trees for so many of them.
        """
        self._asked, self._trust.step = None, self._trust.step + 1
        if self._trust.step < self._next_number and all(sequence.key in self._own for sequence in sequences):
            return _roots(sequences)
        owns = [self._own.get(sequence.key) or self._own_of(sequence) for sequence in sequences]
        rows = np.array([own.row for own in owns], np.int64)
        # A tree drawn by chance is never cut or left out for what it costs
        keeps_all = self.is_fixed or any(own.draws_children for own in owns if own.drafters)
        trees, most_rows, context = _roots(sequences), _ANY_ROWS, max((len(s.tokens) for s in sequences), default=0)
        if (num_prompt_rows or not all(s.num_output for s in sequences)) and owns and not keeps_all:
            most_rows = self.costs.rows_beside_prompts(num_prompt_rows + len(owns), context)
        due = self._trust.due(rows)
        costs_s = self._costs_s(sequences, rows, due) if most_rows > 0 else []
        self._next_number, can_draft = self._trust.next_due(), np.array(costs_s) < math.inf
        if not can_draft.any():
            return trees
        least_gain = self._ask_s * len(owns) / (_TOKEN_WORTH * self.costs.cost_s(len(owns), context))
        if least_gain > _FREE_TOKENS and not self.is_fixed:
            due &= ~self._trust.not_worth(rows, due & (np.array(costs_s) == 0.0), least_gain)
            self._next_number = self._trust.next_due()
        asked = np.flatnonzero((due & can_draft).any(1)).tolist()
        if not asked or (most_rows := min(most_rows, spare_rows(len(asked)))) <= 0:
            return trees
        rows, due, owns = rows[asked], due[asked], [owns[i] for i in asked]
        plan = StepPlan(self.costs, sequences, num_prompt_rows, most_rows, self._trust.ratios(rows), asked)
        if keeps_all:
            plan.least_prob = 0.0
        if plan.least_prob >= _SUREST:
            return trees
        begin = time.thread_time()  # Why not the clock: on busy processors it counts what others do
        costly_s = self._ask(plan, owns, rows, due, costs_s)
        if count := np.count_nonzero(due[:, np.array(costs_s) == 0.0]):
            ask_s = (time.thread_time() - begin - costly_s) / count
            # Why a bound: a collection of garbage in one step says nothing about the next ones
            self._ask_s += _ASK_WEIGHT * (min(ask_s, 1e-5 + 4.0 * self._ask_s) - self._ask_s)
        if plan.trees.counts.max() == 1:
            self._count(plan, rows, plan.trees.figures)
            return trees
        self._asked = plan, rows
        for i, tree in zip(asked, self._cut(plan, owns), strict=True):
            trees[i] = tree
        return trees

    def _cut(self, plan: StepPlan, owns: list[_Own]) -> list[DraftTree]:
        """The step's trees, cut to the size that pays."""
        # Why no room beside the limit of a tree drawn by chance: a node would stay because of the tokens drawn below it
        is_whole = np.array([self.is_fixed or bool(draws) for draws in plan.trees.draws])
        most = self._max_nodes + np.where(is_whole, 0, plan.trees.depths)
        plan.fit(np.minimum(most, [own.most_nodes for own in owns]), is_whole)
        return plan.trees.trees(self._names)

    def _costs_s(self, sequences: SequenceOf[SequenceView], rows: Ints, due: Mask) -> list[float]:
        """Seconds of each drafter's drafts for the sequences for which it is due; infinity where it can propose nothing."""
        costs_s = []
        for number, drafter in enumerate(self._drafters):
            places = np.flatnonzero(due[:, number]).tolist()
            costs_s.append(drafter.cost_s([sequences[i] for i in places]) if places else math.inf)
            if places and costs_s[number] == math.inf:
                self._trust.miss(rows[places], number)
        return costs_s

    def _ask(self, plan: StepPlan, owns: list[_Own], rows: Ints, due: Mask, costs_s: list[float]) -> float:
        """Ask the drafters that are due, and merge their proposals into the step's trees. Returns the seconds of those that take
        time.

        A chain has one drafter, and so has a sequence of those that take time: one that is due for a trial, else the one whose
        drafts save most for all sequences.
        """
        trees = plan.trees
        self._trial_s += due.any(0) * _TRIAL_SHARE * plan.own_s
        is_chain, is_taken = np.array([own.needs_chain for own in owns]), np.zeros(len(owns), np.bool_)

        def ready(number: int) -> list[int]:
            is_open = ~is_taken & ~(is_chain & (trees.counts > 1))
            places: list[int] = np.flatnonzero(due[:, number] & is_open).tolist()
            return places

        def worth(number: int) -> tuple[bool, float]:
            saved_s = sum(self._gains(number, ready(number), plan, rows)) * plan.token_s()
            return self._trial_s[number] >= costs_s[number], saved_s - costs_s[number]

        for number in [n for n, cost_s in enumerate(costs_s) if cost_s == 0.0]:
            self._merge(number, ready(number), plan, owns)
        begin = time.thread_time()
        costly = [n for n, cost_s in enumerate(costs_s) if 0.0 < cost_s < math.inf]
        for number in sorted(costly, key=worth, reverse=True):
            if places := ready(number):
                places = self._paying(number, places, plan, rows)
                self._merge(number, places, plan, owns)
                is_taken[places] = True
        return time.thread_time() - begin

    def _gains(self, number: int, places: list[int], plan: StepPlan, rows: Ints) -> list[float]:
        """Tokens that a drafter's drafts are expected to add to the trees of these sequences."""
        return self._trust.gains(rows[places], number, 1.0 / plan.trees.promised[places])

    def _paying(self, number: int, places: list[int], plan: StepPlan, rows: Ints) -> list[int]:
        """Of these sequences the ones for which a drafter that takes time is asked: where its drafts save more, and all of them
        when the time since the last trial has earned its cost."""

        def cost_s(chosen: SequenceOf[int]) -> float:
            return self._drafters[number].cost_s([plan.sequences[places[n]] for n in chosen])

        every = range(len(places))
        chosen: SequenceOf[int] = select_paying(self._gains(number, places, plan, rows), plan.saved_s, cost_s)
        if self.is_fixed or len(chosen) == len(every) or self._trial_s[number] >= cost_s(every):
            self._trial_s[number], chosen = 0.0, every
        return [places[n] for n in chosen if len(places) == 1 or cost_s([n]) < math.inf]

    def _merge(self, number: int, places: list[int], plan: StepPlan, owns: list[_Own]) -> None:
        """Ask a drafter for these sequences, and merge its proposals into their trees."""
        if not places:
            return
        trees, sequences = plan.trees, [plan.sequences[i] for i in places]
        levels = [min(plan.longest[i], plan.spare_rows) for i in places]
        least_prob = 0.0 if (trees.counts > 1).any() else plan.least_prob
        budget = Budget(self._max_nodes, 0.0 if self.is_fixed else plan.token_s(), levels, least_prob)
        limits = np.array(plan.longest), self._num_embeddings, np.array([own.needs_chain for own in owns])
        trees.merge(places, self._drafters[number].propose(sequences, budget), number, limits)
        for i in places:
            if trees.draws[i] and not _is_sound(plan.sequences[i], trees, i, self._vocab_size):
                trees.drop(i)

    def observe(
        self, sequences: SequenceOf[SequenceView], results: SequenceOf[StepResult], features: SequenceOf[Features]
    ) -> None:
        """Teach each drafter by the fate of its nodes, then hand all drafters the decided tokens and the new features."""
        if self._asked is not None:
            plan, rows = self._asked
            decided = {sequence.key: result.token_ids for sequence, result in zip(sequences, results, strict=True)}
            tokens = [decided.get(sequence.key, []) for sequence in plan.sequences]
            for number, given, judged in plan.trees.judge(tokens):
                self._drafters[number].learn_nodes(given, judged)
            known = np.array([len(own) > 0 for own in tokens])
            self._count(plan, rows[known], plan.trees.figures[known])
        for sequence, result, states in zip(sequences, results, features, strict=True) if self._watching else ():
            own = self._own.get(sequence.key) or self._own_of(sequence)
            for drafter in self._watching.intersection(own.drafters):
                self._drafters[drafter].observe(sequence, result.token_ids, states)

    def _count(self, plan: StepPlan, rows: Ints, figures: Floats) -> None:
        """Count the figures of sequences of a step. Shape: as in `StepTrees`."""
        self._trust.learn(rows, figures, plan.least_prob)
        self._next_number = self._trust.next_due()

    def finish(self, sequence: SequenceView) -> None:
        if own := self._own.pop(sequence.key, None):
            self._trust.finish(own.row, sequence.request.salt)
        for drafter in self._drafters_of(sequence.request):
            self._drafters[drafter].finish(sequence)
        self._open.discard(sequence.key)
        if not self._open:
            self._note_idle(True)

    def _note_idle(self, is_idle: bool) -> None:
        """Drafters may learn while nothing waits or runs."""
        for drafter in self._drafters:
            drafter.note_idle(is_idle)

    def purge(self, salt: str) -> None:
        """Forget one tenant's text."""
        self._trust.purge(salt)
        for drafter in self._drafters:
            drafter.purge(salt)

    def close(self) -> None:
        """End what drafters do beside the steps."""
        for drafter in self._drafters:
            drafter.close()

    def _drafters_of(self, request: Request) -> list[int]:
        speculation = request.speculation
        names = speculation.drafters
        return [d for d, name in enumerate(self._names) if speculation and (names is None or name in names)]

    def _own_of(self, sequence: SequenceView) -> _Own:
        request = sequence.request
        drafters, most = self._drafters_of(request), request.speculation.max_nodes
        row = self._trust.start(request.salt, drafters)
        own = _Own(row, drafters, 2**31 if most is None else most, draws_children(sequence), needs_chain(sequence))
        self._own[sequence.key] = own
        self._next_number = 0.0  # it may be met before its first step, in a step that had none to ask for
        return own


class _Own(NamedTuple):
    """What a sequence's request says about drafts, and the row of its records."""

    row: int
    drafters: list[int]
    most_nodes: int
    draws_children: bool
    needs_chain: bool


def select_paying(
    gains: SequenceOf[float], saved_s: Callable[[SequenceOf[float]], float], cost_s: Callable[[SequenceOf[int]], float]
) -> list[int]:
    """The sequences whose drafts together save the most time: of the greatest gains the first 1, 2, 4 and so on, or all.

    `saved_s`: seconds that some gains, in tokens, save together. `cost_s`: seconds that drafts for some sequences take.
    """
    order = sorted(range(len(gains)), key=lambda i: -gains[i])
    worth_s = {0: 0.0}
    for count in sorted({len(order), *(2**n for n in range(len(order).bit_length()))} - {0}):
        worth_s[count] = saved_s([gains[i] for i in order[:count]]) - cost_s(order[:count])
    return sorted(order[: max(worth_s, key=worth_s.__getitem__)])


def _roots(sequences: SequenceOf[SequenceView]) -> list[DraftTree]:
    return [DraftTree(sequence.tokens[-1]) for sequence in sequences]


def _is_sound(sequence: SequenceView, trees: StepTrees, tree: int, vocab_size: int) -> bool:
    """Whether children can have been drawn as declared: else no rule could accept them."""
    try:
        check_draft(sequence.request.speculation.rule, trees.whole(tree), trees.draws[tree], vocab_size)
    except Exception as error:  # a drafter may name anything as a draw
        log.warning("a draft for request %r is left out: %s", sequence.request.id, error)
        return False
    return True


class FixedTreePlanner(Planner):
    """Asks drafters in every step, one of those that take time, and keeps the best `max_tree_nodes` nodes of each tree, whatever
    they cost."""

    is_fixed = True

"""How much to draft: one tree for each sequence, sized so that the step's expected tokens a second are greatest.

`ragspec.drafting.cost_model` writes the objective as a formula, `Trust` of `acceptance` the rule by which drafters are believed.
The planner merges all proposals into one tree for each sequence and cuts the trees to the best size (`step_trees`). Nodes that
were cut are judged too, by the tokens that the target said: a drafter shows without a row whether its guesses would pay. The
likeliest path may be as long as it pays; beside it stand at most `max_tree_nodes` nodes. A drafter that takes time itself is
asked only where its drafts save more time; where they do not, it is tried when a hundredth of the time since its last trial pays
for another. Of several trained heads one drafts for a sequence in a step: the head whose drafts save most.

    >>> planner = Planner([CopyDrafter(tokenizer)], costs, max_tree_nodes=48)
    >>> trees = planner.plan(sequences, num_prompt_rows=0, spare_rows=100)
    >>> planner.observe(sequences, results, features)             # after verification
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragspec.core import Request
from ragspec.drafting.acceptance import FREE_MISSES, Mask, Rows, Trust
from ragspec.drafting.children import draws_children, needs_chain
from ragspec.drafting.cost_model import CostTable, OwnShare, StepPlan
from ragspec.drafting.drafter import Budget, Drafter, Features, SequenceView
from ragspec.drafting.safe_drafter import SafeDrafter
from ragspec.drafting.step_trees import NUM_NODES, NUM_SHARED, Limits, StepTrees, compile_trees
from ragspec.errors import InputError, RagspecError
from ragspec.tree import DraftTree, StepResult
from ragspec.verification.rejection import check_draft

log = logging.getLogger(__name__)

_SUREST = 0.98
"""Hardly any draft is surer: where only a surer draft pays, drafters are not asked."""
_TRIAL_SHARE = 0.01
"""Share of the time for drafts that do not seem to pay. More: a drafter that has become right is found sooner."""


class Planner:
    """Merges the proposals of all drafters and cuts them to the size that pays. A drafter's errors cost only its draft."""

    step_plan: type[StepPlan] = StepPlan
    num_free_misses: float = FREE_MISSES

    def __init__(
        self, drafters: SequenceOf[Drafter], costs: CostTable, max_tree_nodes: int, vocab_size: int = 2**31
    ) -> None:
        self._drafters = [SafeDrafter(drafter) for drafter in drafters]
        self._names = [drafter.name for drafter in drafters]
        self._max_nodes, self._vocab_size = max_tree_nodes, vocab_size
        self._trust = Trust(len(drafters), self.num_free_misses)
        self._watching = frozenset(
            number for number, drafter in enumerate(drafters) if type(drafter).observe is not Drafter.observe
        )
        compile_trees()
        self._own: dict[tuple[str, int], _Own] = {}
        self._trial_s = np.zeros(len(drafters))  # time for a trial of each drafter that takes time
        self._step: _Asked | None = None
        self._next_number = 0.0  # of the next step in which a drafter may be asked
        self._open: set[tuple[str, int]] = set()  # sequences that wait or run
        self.costs, self._share = costs, OwnShare()
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
        self._note_open(self._open | {sequence.key})
        for drafter in self._drafters_of(sequence.request):
            self._drafters[drafter].start(sequence)

    def plan(self, sequences: SequenceOf[SequenceView], num_prompt_rows: int, spare_rows: int) -> list[DraftTree]:
        """One tree for each sequence, at most `spare_rows` nodes together.

        `num_prompt_rows`: rows of prompts in the same step.
        """
        self._step, self._trust.step = None, self._trust.step + 1
        if self._trust.step < self._next_number and all(sequence.key in self._own for sequence in sequences):
            return _roots(sequences)
        owns = [self._own.get(sequence.key) or self._own_of(sequence) for sequence in sequences]
        rows = np.array([own.row for own in owns], np.int64)
        due = self._trust.due(rows)
        costs_s, trees = self._costs_s(sequences, rows, due) if spare_rows > 0 else {}, list[DraftTree]()
        if costs_s:
            self._share.learn(self.costs, sequences, num_prompt_rows)
            step = self.step_plan(self.costs, sequences, num_prompt_rows, self._share.value, len(self._drafters))
            # Why 0: a drawn tree is never left out for what it costs
            is_drawn = any(own.draws_children for own in owns if own.drafters)
            least_prob = 0.0 if is_drawn else step.least_prob(spare_rows)
            if least_prob < _SUREST:
                asked = _Asked(step, owns, rows, spare_rows, least_prob)
                self._ask(asked, due, costs_s)
                trees = self._cut(asked)
        self._next_number = 0.0 if trees else self._trust.next_due()
        return trees or _roots(sequences)

    def _costs_s(self, sequences: SequenceOf[SequenceView], rows: Rows, due: Mask) -> dict[int, float]:
        """Seconds of a draft for all sequences for which a drafter is due, by drafter. A drafter that has nothing to propose has
        missed."""
        found = {}
        for number in np.flatnonzero(due.any(0)).tolist():
            drafter, places = self._drafters[number], np.flatnonzero(due[:, number])
            cost_s = math.inf if drafter.disabled else drafter.cost_s([sequences[i] for i in places.tolist()])
            if cost_s < math.inf:
                found[number] = cost_s
            else:
                self._trust.note(rows[places], number, np.zeros(len(places), np.bool_))
        return found

    def _ask(self, asked: _Asked, due: Mask, costs_s: Mapping[int, float]) -> None:
        """Ask the drafters, and merge their proposals into the step's trees. `costs_s`: by drafter with something to propose."""
        allowed, trees = self._trust.allowed(asked.rows), asked.step.trees
        chains = np.array([own.needs_chain for own in asked.owns])
        heads = [d for d, drafter in enumerate(self._drafters) if drafter.is_head]
        others = [d for d in range(len(self._drafters)) if d not in heads]
        self._trial_s += allowed.any(0) * _TRIAL_SHARE * asked.step.step_s
        taken = np.zeros(len(asked.owns), np.bool_)  # by a head in this step
        for number in [*others, *(self._ranked(heads, allowed, asked) if len(heads) > 1 else heads)]:
            drafter = self._drafters[number]
            ready = due[:, number] & ~(taken & drafter.is_head) & ~(chains & (trees.counts > 1))
            places = np.flatnonzero(ready).tolist() if number in costs_s else []
            if places and costs_s[number]:
                places = self._paying(number, places, asked)
                asked.costly |= {number} if places else set()
            if places:
                taken[places] |= drafter.is_head
                asked.places[number] = np.array(places)
                self._merge(number, places, asked)

    def _ranked(self, heads: list[int], allowed: Mask, asked: _Asked) -> list[int]:
        """Heads in the order to ask: one that is due for a trial, then the one whose drafts save most, to all sequences."""
        worth = {}
        for head in heads:
            places = np.flatnonzero(allowed[:, head]).tolist()
            cost_s = self._drafters[head].cost_s([asked.step.sequences[i] for i in places]) if len(places) else math.inf
            gains = self._trust.gains(asked.rows[places], head, asked.step.trees.covered[places])
            worth[head] = self._trial_s[head] >= cost_s, gains.sum() * asked.step.token_s() - cost_s
        return sorted(heads, key=worth.__getitem__, reverse=True)

    def _paying(self, number: int, places: list[int], asked: _Asked) -> list[int]:
        """Of these sequences the ones for which a drafter that takes time is asked: where its drafts save more, and all of them
        when the time since the last trial has earned its cost."""
        drafter, step, rows = self._drafters[number], asked.step, asked.rows
        gains = self._trust.gains(rows[places], number, step.trees.covered[places])
        nodes = self._trust.nodes_a_draft[number]

        def needed_s(chosen: SequenceOf[int]) -> float:
            draft_s = drafter.cost_s([step.sequences[places[n]] for n in chosen])
            return draft_s + step.nodes_s(round(len(chosen) * nodes))

        chosen = select_paying(gains.tolist(), step.saved_s, needed_s)
        all_s = needed_s(range(len(places)))
        if all_s == math.inf:
            return []
        if len(chosen) == len(places) or self._trial_s[number] + (needed_s(chosen) if chosen else 0.0) >= all_s:
            self._trial_s[number], chosen = 0.0, [*range(len(places))]
        found = [places[n] for n in chosen]
        return [i for i in found if len(places) == 1 or drafter.cost_s([step.sequences[i]]) < math.inf]

    def _merge(self, number: int, places: list[int], asked: _Asked) -> None:
        """Ask a drafter for these sequences, and merge its proposals into their trees."""
        sequences, trees, drafter = asked.step.sequences, asked.step.trees, self._drafters[number]
        asked.covered[number] = trees.covered[places]
        longest = [sequences[i].most_tokens - 1 for i in places]  # the last token of a step is the target's own
        levels = [min(most, asked.spare_rows) for most in longest]
        least_prob = 0.0 if (trees.counts > 1).any() else asked.least_prob
        budget = Budget(self._max_nodes, asked.step.token_s(), levels, least_prob)
        for i, most, proposals in zip(
            places, longest, drafter.propose([sequences[i] for i in places], budget), strict=True
        ):
            trees.merge(i, proposals, number, most, self._vocab_size)
            if trees.draws[i] and not _is_sound(sequences[i], trees, i, self._vocab_size):
                trees.drop(i)

    def _cut(self, asked: _Asked) -> list[DraftTree]:
        """The trees cut to the size that pays; none if nothing was proposed."""
        step, trust, found = asked.step, self._trust, list[DraftTree]()
        if step.trees.counts.max() > 1:
            limits = [self.limits(own, bool(step.trees.draws[i])) for i, own in enumerate(asked.owns)]
            step.fit(limits, trust.factors(asked.rows), asked.spare_rows)
            found, self._step = step.trees.trees(self._names), asked
        figures = step.trees.figures
        for number, places in asked.places.items():
            if number not in asked.costly:
                missed = places[(figures[places, number, NUM_NODES] + figures[places, number, NUM_SHARED]) == 0.0]
                trust.note(asked.rows[missed], number, np.zeros(len(missed), np.bool_))
            elif self._step is None:
                trust.learn_gains(asked.rows[places], number, asked.covered[number], figures[places, number])
        return found

    def observe(
        self, sequences: SequenceOf[SequenceView], results: SequenceOf[StepResult], features: SequenceOf[Features]
    ) -> None:
        """Teach each drafter by the fate of its nodes, then hand all drafters the decided tokens and the new features."""
        if (asked := self._step) is not None:
            self._judge(asked, {s.key: r.token_ids for s, r in zip(sequences, results, strict=True)})
        for sequence, result, own in zip(sequences, results, features, strict=True) if self._watching else ():
            for drafter in self._watching.intersection(
                (self._own.get(sequence.key) or self._own_of(sequence)).drafters
            ):
                self._drafters[drafter].observe(sequence, result.token_ids, own)

    def _judge(self, asked: _Asked, decided: Mapping[tuple[str, int], list[int]]) -> None:
        """Count the nodes of the sequences whose tokens are decided."""
        step, rows = asked.step, asked.rows
        tokens = [decided.get(sequence.key, []) for sequence in step.sequences]
        for number, given, columns, right in step.trees.judge(tokens):
            self._drafters[number].learn_nodes(given, columns, right)
        known = np.array([len(own) > 0 for own in tokens])
        self._trust.learn(rows[known], step.trees.figures[known])
        for number in asked.costly:
            places, covered = asked.places[number], asked.covered[number]
            own = known[places]
            self._trust.learn_gains(rows[places[own]], number, covered[own], step.trees.figures[places[own], number])

    def finish(self, sequence: SequenceView) -> None:
        self._trust.finish(sequence.key)
        self._own.pop(sequence.key, None)
        for drafter in self._drafters_of(sequence.request):
            self._drafters[drafter].finish(sequence)
        self._note_open(self._open - {sequence.key})

    def purge(self, salt: str) -> None:
        """Forget one tenant's text."""
        self._trust.purge(salt)
        for drafter in self._drafters:
            drafter.purge(salt)

    def close(self) -> None:
        """End what drafters do beside the steps."""
        for drafter in self._drafters:
            drafter.close()

    def limits(self, own: _Own, is_drawn: bool) -> Limits:
        """Why no path beside the limit of a tree drawn by chance: a node would stay because of the tokens drawn below it."""
        return Limits(self._max_nodes, own.most_nodes, own.needs_chain, is_drawn)

    def _note_open(self, keys: set[tuple[str, int]]) -> None:
        """Drafters may learn while nothing waits or runs. What comes after says nothing about the prompts before."""
        if not keys:
            self._share = OwnShare()
        if bool(keys) != bool(self._open):
            for drafter in self._drafters:
                drafter.note_idle(not keys)
        self._open = keys

    def _drafters_of(self, request: Request) -> list[int]:
        speculation = request.speculation
        names = speculation.drafters
        return [d for d, name in enumerate(self._names) if speculation and (names is None or name in names)]

    def _own_of(self, sequence: SequenceView) -> _Own:
        request = sequence.request
        drafters, most = self._drafters_of(request), request.speculation.max_nodes
        row = self._trust.row(sequence.key, request.salt, drafters)
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


class _Asked:
    """A step's drafts until the target has decided. By drafter: `places`, the sequences that it drafted for; `covered`,
    the probability that an earlier drafter's node there holds the next token."""

    def __init__(self, step: StepPlan, owns: list[_Own], rows: Rows, spare_rows: int, least_prob: float) -> None:
        self.step, self.owns, self.rows = step, owns, rows
        self.spare_rows, self.least_prob = spare_rows, least_prob
        self.places: dict[int, Rows] = {}
        self.covered: dict[int, NDArray[np.float64]] = {}
        self.costly: set[int] = set()


def select_paying(
    gains: SequenceOf[float], saved_s: Callable[[SequenceOf[float]], float], cost_s: Callable[[SequenceOf[int]], float]
) -> list[int]:
    """The sequences whose drafts together save the most time: of the greatest gains the first 1, 2, 4 and so on, or all.

    `saved_s`: seconds that some gains, in tokens, save together. `cost_s`: seconds that drafts for some sequences take.
    """
    order = sorted(range(len(gains)), key=lambda i: -gains[i])
    counts = {len(order), *(2**n for n in range(len(order).bit_length()))} - {0}
    best, best_s = 0, 0.0
    for count in sorted(counts):
        if (saved := saved_s([gains[i] for i in order[:count]])) > best_s and saved - cost_s(order[:count]) > best_s:
            best, best_s = count, saved - cost_s(order[:count])
    return sorted(order[:best])


def _roots(sequences: SequenceOf[SequenceView]) -> list[DraftTree]:
    return [DraftTree(sequence.tokens[-1]) for sequence in sequences]


def _is_sound(sequence: SequenceView, trees: StepTrees, tree: int, vocab_size: int) -> bool:
    """Whether children can have been drawn as declared: else no rule could accept them."""
    try:
        check_draft(sequence.request.speculation.rule, trees.whole(tree), trees.draws[tree], vocab_size)
    except RagspecError as error:
        log.warning("a draft for request %r is left out: %s", sequence.request.id, error)
        return False
    return True


class _FreeStep(StepPlan):
    """Time does not count: every draft saves time."""

    def token_s(self) -> float:
        return 0.0

    def saved_s(self, gains: SequenceOf[float]) -> float:
        return 1e9 * len(gains)

    def least_prob(self, spare_rows: int) -> float:
        return 0.0


class FixedTreePlanner(Planner):
    """Asks every drafter in every step and keeps the best `max_tree_nodes` nodes of each tree, whatever they cost."""

    step_plan = _FreeStep
    num_free_misses = math.inf

    def limits(self, own: _Own, is_drawn: bool) -> Limits:
        return Limits(self._max_nodes, 2**31, own.needs_chain, is_whole=True)

"""How much to draft: one tree for each sequence, sized so that the step's expected tokens a second are greatest.

`ragspec.drafting.cost_model` writes the objective as a formula. Drafters estimate over all requests how probable each of their
nodes is; the planner scales these probabilities by the drafter's record in the sequence at hand, which begins with that of the
tenant's other sequences. It merges all proposals into one tree and cuts the trees to the best size. Nodes that were cut are
judged too, by the tokens that the target said: a drafter shows without a row whether its guesses would pay. The likeliest path
may be as long as it pays; beside it stand at most `max_tree_nodes` nodes. A drafter that takes time itself is asked only where
its drafts save more time; while none do, that is computed in every fifth step only. Of several trained heads one is asked: that
whose drafts save most time, by its record in the sequences at hand and in other requests.

    >>> planner = Planner([CopyDrafter(tokenizer)], costs, max_tree_nodes=48)
    >>> trees = planner.plan(sequences, num_prompt_rows=0, spare_rows=100)
    >>> planner.observe(sequence, result, features)             # after verification, for each sequence
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

from ragspec.core import Request
from ragspec.drafting.acceptance import Experience
from ragspec.drafting.children import draws_children, needs_chain
from ragspec.drafting.cost_model import CostTable, OwnShare, StepPlan
from ragspec.drafting.drafter import Budget, Drafter, Features, SequenceView
from ragspec.drafting.drafter_stats import (
    TRIAL_HIT_GAIN,
    DrafterStats,
    FirstSteps,
    HeadChoice,
    Pause,
    PendingDraft,
    SequenceStats,
    select_paying,
)
from ragspec.drafting.safe_drafter import SafeDrafter
from ragspec.errors import InputError, RagspecError
from ragspec.tree import DraftTree, Origin, StepResult
from ragspec.verification.rejection import check_draft

log = logging.getLogger(__name__)

_ANY_DEPTH = 2**31
_HEADS = ""
_SUREST = 0.98
"""Hardly any draft is surer: where only a surer draft pays, drafters are not asked."""


class Planner:
    """Merges the proposals of all drafters and cuts them to the size that pays. A drafter's errors cost only its draft."""

    step_plan: type[StepPlan] = StepPlan

    def __init__(
        self, drafters: SequenceOf[Drafter], costs: CostTable, max_tree_nodes: int, vocab_size: int = 2**31
    ) -> None:
        self._drafters = [SafeDrafter(drafter) for drafter in drafters]
        self._max_nodes, self._vocab_size = max_tree_nodes, vocab_size
        self._sequence_stats: dict[tuple[str, int], dict[str, SequenceStats]] = {}
        self._stats: defaultdict[str, DrafterStats] = defaultdict(DrafterStats)
        self._first_steps: Experience[defaultdict[str, FirstSteps]] = Experience(lambda: defaultdict(FirstSteps))
        self._num_heads = sum(drafter.is_head for drafter in drafters)
        self._choices: dict[tuple[str, int], HeadChoice] = {}
        self._pending: dict[tuple[tuple[str, int], str], PendingDraft] = {}  # of this step
        self._proposed: dict[tuple[str, int], DraftTree] = {}  # of this step, before the trees were cut
        self._pauses: defaultdict[str, Pause] = defaultdict(Pause)  # by group; of drafters that take time
        self._open: set[tuple[str, int]] = set()  # sequences that wait or run
        self.costs, self._share = costs, OwnShare()
        self.taps = tuple(sorted({tap for drafter in drafters for tap in drafter.taps}))

    @property
    def num_failures(self) -> int:
        """Calls of drafters that raised."""
        return sum(drafter.num_failures for drafter in self._drafters)

    def prepare(self, request: Request) -> dict[str, Any]:
        """By drafter, what it prepares for a request. Callable from any thread. Raises: InputError for an unknown drafter."""
        known = [drafter.name for drafter in self._drafters]
        unknown = [name for name in request.speculation.drafters or () if name not in known]
        if unknown:
            raise InputError(f"there is no drafter {unknown[0]!r}; there are: {', '.join(known) or 'none'}")
        return {drafter.name: drafter.prepare(request) for drafter in self._drafters_of(request)}

    def start(self, sequence: SequenceView) -> None:
        self._note_open(self._open | {sequence.key})
        for drafter in self._drafters_of(sequence.request):
            drafter.start(sequence)

    def plan(self, sequences: SequenceOf[SequenceView], num_prompt_rows: int, spare_rows: int) -> list[DraftTree]:
        """One tree for each sequence, at most `spare_rows` nodes together.

        `num_prompt_rows`: rows of prompts in the same step.
        """
        self._pending.clear()
        self._proposed.clear()
        if not sequences:
            return []
        self._share.learn(self.costs, sequences, num_prompt_rows)
        step = self.step_plan(self.costs, sequences, num_prompt_rows, self._share.value)
        wanted = [sequence for sequence in sequences if sequence.request.speculation]
        # Why 0: a drawn tree is never left out for what it costs
        least_prob = 0.0 if any(map(draws_children, wanted)) else step.least_prob(spare_rows)
        if spare_rows <= 0 or not wanted or least_prob >= _SUREST:
            return step.trees
        proposing = self._ask(step, spare_rows, least_prob)
        for i, drafters in proposing.items():
            tree = step.trees[i].first_path() if needs_chain(sequences[i]) else step.trees[i]
            step.trees[i] = self.limited(tree, sequences[i])
            step.trees[i].scale({d.name: self._stats_in(sequences[i], d.name).ratio.factor for d in drafters})
            self._proposed[sequences[i].key] = step.trees[i]
        if not proposing:
            return step.trees
        trees = step.fit(spare_rows)
        for i, drafters in proposing.items():
            for drafter in drafters:
                if not _has_nodes_of(trees[i], drafter.name) and (sequences[i].key, drafter.name) not in self._pending:
                    self._stats_in(sequences[i], drafter.name).backoff.note(False)
        return trees

    def _ask(self, step: StepPlan, spare_rows: int, least_prob: float) -> dict[int, list[SafeDrafter]]:
        """Ask drafters, and merge their proposals into the step's trees. Returns the drafters of each sequence, by number."""
        proposing: defaultdict[int, list[SafeDrafter]] = defaultdict(list)
        chosen: dict[int, str] = {}
        paused: dict[str, bool] = {}  # by group
        for drafter in sorted(self._drafters, key=lambda d: d.is_head and self._num_heads > 1):  # heads last
            if (group := _group(drafter)) in self._pauses and group not in paused:
                paused[group] = not self._pauses[group].begin_step(self._expected_of_others(group, step))
            if drafter.disabled or paused.get(group, False):
                continue
            if drafter.is_head and self._num_heads > 1 and not chosen:
                chosen = self._choose_heads(step)
            depths = self._depths(drafter, step, chosen)
            for i in depths:
                proposing[i].append(drafter)
            self._merge(drafter, depths, step, spare_rows, least_prob)
        return proposing

    def observe(self, sequence: SequenceView, result: StepResult, features: Features) -> None:
        """Teach each drafter by the fate of its nodes, then hand all drafters the decided tokens and the new features."""
        drafters = self._drafters_of(sequence.request)
        proposed = self._proposed.get(sequence.key, result.tree)
        if proposed is not None and result.tree is not None and (proposed.num_drafted or self._pending):
            judged = _judged(proposed, result)
            for drafter in drafters:
                self._learn(sequence, result.tree, result, judged, drafter.name)
                for node in judged:
                    if node.origin.drafter == drafter.name:
                        drafter.learn(node.origin.feedback, node.is_right)
        for drafter in drafters:
            drafter.observe(sequence, result.token_ids, features)

    def finish(self, sequence: SequenceView) -> None:
        for stats in self._sequence_stats.pop(sequence.key, {}).values():
            stats.ratio.finish()
        self._choices.pop(sequence.key, None)
        for drafter in self._drafters_of(sequence.request):
            drafter.finish(sequence)
        self._note_open(self._open - {sequence.key})

    def purge(self, salt: str) -> None:
        """Forget one tenant's text."""
        self._first_steps.purge(salt)
        for drafter in self._drafters:
            drafter.purge(salt)

    def close(self) -> None:
        """End what drafters do beside the steps."""
        for drafter in self._drafters:
            drafter.close()

    def is_due(self, drafter: SafeDrafter, sequence: SequenceView) -> bool:
        """Whether recent misses allow a drafter to be asked in this step."""
        return self._stats_in(sequence, drafter.name).backoff.due()

    def _note_open(self, keys: set[tuple[str, int]]) -> None:
        """Drafters may learn while nothing waits or runs. What comes after says nothing about the prompts before."""
        if not keys:
            self._share = OwnShare()
        if bool(keys) != bool(self._open):
            for drafter in self._drafters:
                drafter.note_idle(not keys)
        self._open = keys

    def _drafters_of(self, request: Request) -> list[SafeDrafter]:
        speculation = request.speculation
        names = speculation.drafters
        return [d for d in self._drafters if speculation and (names is None or d.name in names)]

    def limited(self, tree: DraftTree, sequence: SequenceView) -> DraftTree:
        """The likeliest path and the best nodes beside it; of a request with a limit of its own at most so many nodes.

        Why no path of a tree drawn by chance: it would keep a node because of the tokens drawn below it.
        """
        own = sequence.request.speculation.max_nodes
        tree = tree.best(self._max_nodes, besides=() if tree.draws else frozenset(tree.likeliest_path()))
        return tree if own is None else tree.best(own)

    def _stats_in(self, sequence: SequenceView, name: str) -> SequenceStats:
        stats = self._sequence_stats.setdefault(sequence.key, {})
        if name not in stats:
            first_steps = self._first_steps.of(sequence.request.salt)[name]
            stats[name] = SequenceStats(first_steps, self._stats[name].first_trial_steps)
        return stats[name]

    def _expected_of_others(self, group: str, step: StepPlan) -> dict[tuple[str, int], float]:
        """Accepted tokens of the trees so far, of the sequences that drafters of the group may draft for."""
        names = {drafter.name for drafter in self._drafters if _group(drafter) == group}
        found = {}
        for sequence, tree in zip(step.sequences, step.trees, strict=True):
            speculation = sequence.request.speculation
            if speculation and (speculation.drafters is None or not names.isdisjoint(speculation.drafters)):
                found[sequence.key] = sum(tree.path_probs[1:])
        return found

    def _choose_heads(self, step: StepPlan) -> dict[int, str]:
        """The head for each sequence, by number: of most worth to all of them together, since two heads take twice the time.

        Other drafters have proposed.
        """
        worths: dict[int, dict[str, float]] = {}
        for i, sequence in enumerate(step.sequences):
            others = sum(step.trees[i].path_probs[1:])
            for head in self._drafters_of(sequence.request):
                if head.is_head and not head.disabled and (cost_s := head.cost_s([sequence])) < math.inf:
                    gain = self._stats[head.name].gain(others) * self._stats_in(sequence, head.name).factor
                    worths.setdefault(i, {})[head.name] = gain * step.token_s() - cost_s
        if not worths:
            return {}
        total = {
            name: sum(worth.get(name, 0.0) for worth in worths.values()) for worth in worths.values() for name in worth
        }
        first = step.sequences[min(worths)].key
        choice = self._choices.setdefault(first, HeadChoice())
        leader = choice.pick(
            {name: total[name] for name in worths[min(worths)]}, self._pauses[_HEADS].num_steps_of(first)
        )
        return {i: leader if leader in worth else max(worth, key=worth.__getitem__) for i, worth in worths.items()}

    def _depths(self, drafter: SafeDrafter, step: StepPlan, chosen: dict[int, str]) -> dict[int, int]:
        """The sequences to ask a drafter for, by number, and how many levels each draft may have. `chosen`: heads."""
        ready = {
            i: cost_s
            for i, sequence in enumerate(step.sequences)
            if drafter in self._drafters_of(sequence.request)
            and (not drafter.is_head or chosen.get(i, drafter.name) == drafter.name)
            and self.is_due(drafter, sequence)
            and not (needs_chain(sequence) and step.trees[i].num_drafted)
            and (cost_s := drafter.cost_s([sequence])) < math.inf
        }
        return self._paying(drafter, ready, step) if any(ready.values()) else dict.fromkeys(ready, _ANY_DEPTH)

    def _paying(self, drafter: SafeDrafter, alone_s: dict[int, float], step: StepPlan) -> dict[int, int]:
        """As `_depths`, of a drafter that takes time: the sequences whose drafts pay, and now and then a trial of one level.

        `alone_s`: seconds of a draft for each sequence that may be asked for, alone.
        """
        ready = list(alone_s)
        overall, pause = self._stats[drafter.name], self._pauses[_group(drafter)]
        stats = {i: self._stats_in(step.sequences[i], drafter.name) for i in ready}
        others = {i: sum(step.trees[i].path_probs[1:]) for i in ready}
        gains = [overall.gain(others[i]) * stats[i].factor for i in ready]
        gains = [max(gain, TRIAL_HIT_GAIN * stats[i].trial_hit) for gain, i in zip(gains, ready, strict=True)]

        def cost_s(chosen: SequenceOf[int]) -> float:
            nodes_s = step.nodes_s(round(len(chosen) * overall.num_nodes))
            if len(chosen) == 1:
                return alone_s[ready[chosen[0]]] + nodes_s
            return drafter.cost_s([step.sequences[ready[n]] for n in chosen]) + nodes_s

        full = {ready[n] for n in select_paying(gains, step.saved_s, cost_s)}
        hit_s = step.saved_s([TRIAL_HIT_GAIN])
        hopeful = [i for n, i in enumerate(ready) if i not in full and hit_s > cost_s([n])]
        trials = {i for i in hopeful if stats[i].trial_due(pause.num_steps_of(step.sequences[i].key))}
        if not full and not hopeful and overall.joint_trial_due(pause.num_steps):
            all_hit_s = step.saved_s([TRIAL_HIT_GAIN] * len(ready))
            trials = set(ready) if all_hit_s > cost_s(range(len(ready))) else set()
        pause.note(bool(full or trials))
        for i in full | trials:
            self._pending[step.sequences[i].key, drafter.name] = PendingDraft(
                others[i], i in trials, stats[i].trial_hit
            )
        return {i: 1 if i in trials else _ANY_DEPTH for i in ready if i in full | trials}

    def _merge(
        self, drafter: SafeDrafter, depths: dict[int, int], step: StepPlan, spare_rows: int, least_prob: float
    ) -> None:
        """Ask a drafter for these sequences, and merge its proposals into their trees."""
        if not depths:
            return
        sequences, trees = step.sequences, step.trees
        longest = {i: sequences[i].most_tokens - 1 for i in depths}  # the last token of a step is the target's own
        levels = [min(depth, longest[i], spare_rows) for i, depth in depths.items()]
        if any(tree.num_drafted for tree in trees):
            least_prob = 0.0
        budget = Budget(self._max_nodes, step.token_s(), [trees[i] for i in depths], levels, least_prob)
        lists = drafter.propose([sequences[i] for i in depths], budget)
        for i, proposals in zip(depths, lists, strict=False):
            if (pending := self._pending.get((sequences[i].key, drafter.name))) is not None:
                first_tokens = frozenset(p.token_id for p in proposals if p.parent < 0)
                self._pending[sequences[i].key, drafter.name] = pending._replace(first_tokens=first_tokens)
            trees[i].merge(proposals, longest[i], self._vocab_size)
            if trees[i].draws:
                trees[i] = _without_unsound_draws(sequences[i], trees[i], self._vocab_size)

    def _learn(
        self, sequence: SequenceView, tree: DraftTree, result: StepResult, judged: list[Judged], name: str
    ) -> None:
        """Count a drafter's nodes of this step for and against the drafter."""
        stats, overall, path = self._stats_in(sequence, name), self._stats[name], result.accepted
        own = [n for n in range(1, len(tree)) if tree.origins[n].drafter == name]
        cut = [node for node in judged if node.is_cut and node.origin.drafter == name]
        scaled = sum(tree.path_probs[n] for n in own) + sum(node.chance for node in cut if node.is_first)
        expected = scaled / stats.ratio.factor + sum(node.chance for node in cut if not node.is_first)
        num_accepted = sum(tree.origins[n].drafter == name for n in path) + sum(node.is_right for node in cut)
        if own or cut:
            stats.ratio.learn(expected, num_accepted)
        pending = self._pending.pop((sequence.key, name), None)
        if pending is None:
            if _has_nodes_of(tree, name):
                stats.backoff.note(any(tree.origins[n].drafter == name or tree.shared[n] for n in path))
        elif pending.is_trial:
            known = bool(path) and (tree.origins[path[0]].drafter != name or tree.shared[path[0]])
            stats.trial_hit = result.token_ids[0] in pending.first_tokens and not known
            if not stats.trial_hit:
                overall.note_trial(False)
        else:
            num_added = sum(tree.origins[n].drafter == name and not tree.shared[n] for n in path)
            stats.learn(overall.gain(pending.expected_of_others), num_added)
            overall.learn(pending, num_added, len(own))


class Judged(NamedTuple):
    """A proposed node of which the step told whether it is right. `chance`: given its parent; that of a first node, a child of
    the root, is scaled by the drafter's record. `is_cut`: it took no row."""

    origin: Origin
    chance: float
    is_first: bool
    is_cut: bool
    is_right: bool


def _judged(proposed: DraftTree, result: StepResult) -> list[Judged]:
    """The proposed nodes that the step's tokens judge, drafted or cut: the children of every node on the tokens' path.

    Siblings count in order up to the right one: a later sibling's probability is given that no earlier one is right.
    """
    tree, found = result.tree, list[Judged]()
    assert tree is not None
    node: int | None = 0
    drafted: int | None = 0
    for token in result.token_ids:
        if node is None:
            break
        for child in proposed.children(node):
            token_id = proposed.token_ids[child]
            is_cut = drafted is None or tree.child(drafted, token_id) is None
            chance = proposed.path_probs[child] / proposed.path_probs[node] if proposed.path_probs[node] else 0.0
            found.append(Judged(proposed.origins[child], chance, node == 0, is_cut, token_id == token))
            if token_id == token:
                break
        node = proposed.child(node, token)
        drafted = None if drafted is None else tree.child(drafted, token)
    return found


def _group(drafter: SafeDrafter) -> str:
    """Drafters that pause together: all heads, of which one at most drafts, or a drafter alone."""
    return _HEADS if drafter.is_head else drafter.name


def _has_nodes_of(tree: DraftTree, name: str) -> bool:
    """Whether a drafter proposed a node of the tree, alone or with other drafters."""
    return any(tree.origins[n].drafter == name or tree.shared[n] for n in range(1, len(tree)))


def _without_unsound_draws(sequence: SequenceView, tree: DraftTree, vocab_size: int) -> DraftTree:
    """The tree, or its root alone if its children cannot have been drawn as declared: no rule could accept them."""
    try:
        check_draft(sequence.request.speculation.rule, tree, tree.draws, vocab_size)
    except RagspecError as error:
        log.warning("a draft for request %r is left out: %s", sequence.request.id, error)
        return DraftTree(tree.token_ids[0])
    return tree


class _FreeStep(StepPlan):
    """Time does not count: every draft saves time, and no tree is cut for its cost."""

    def token_s(self) -> float:
        return 0.0

    def saved_s(self, gains: SequenceOf[float]) -> float:
        return 1e9 * len(gains)

    def least_prob(self, spare_rows: int) -> float:
        return 0.0

    def fit(self, spare_rows: int) -> list[DraftTree]:
        return [tree.best(min(tree.num_drafted, spare_rows // len(self.trees))) for tree in self.trees]


class FixedTreePlanner(Planner):
    """Asks every drafter in every step and keeps the best `max_tree_nodes` nodes of each tree, whatever they cost."""

    step_plan = _FreeStep

    def is_due(self, drafter: SafeDrafter, sequence: SequenceView) -> bool:
        return True

    def limited(self, tree: DraftTree, sequence: SequenceView) -> DraftTree:
        return tree.best(self._max_nodes)

"""The draft trees of one step's sequences as arrays: compiled code merges proposals, cuts the trees and judges their nodes.

Every sequence has a row of nodes; node 0 is its root. Drafters' proposals are merged one drafter after the other; then all trees
are cut at once to the set of nodes with the most expected tokens a second (`ragspec.drafting.cost_model`). When the target has
decided, every proposed node whose parent is right is judged, whether it took a row or not.

    >>> trees = StepTrees([7, 9], trusts=np.ones((2, 2)))
    >>> trees.merge(0, proposals, drafter=1, max_depth=8, vocab_size=32_000)
    >>> trees.cut(limits, own_s, seconds, row_s); trees.trees(["copy", "eagle"])
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragspec.numerics.compiled import compiled, inner
from ragspec.tree import (
    FEEDBACK,
    NUM_GIVEN,
    OFFSET,
    PARENT,
    SOURCE,
    TOKEN,
    DraftTree,
    Draw,
    Origin,
    Proposal,
    ProposalArrays,
)

_DEPTH, _DRAFTER, _NUM_COLUMNS = range(NUM_GIVEN, NUM_GIVEN + 3)
"""Columns of a node beside those of a proposal. A node belongs to the first drafter that proposed it."""
ASKED, UNCOVERED, EXPECTED, ACCEPTED, NUM_NODES, NUM_HITS, NUM_FIGURES = range(7)
"""Figures of a drafter in a sequence's step: whether it was asked; how little drafters before it covered (`uncovered`);
accepted tokens that its nodes promised, unscaled; those that came; its nodes that took a row; and the accepted nodes of these."""


class _Trees(NamedTuple):
    """The arrays of a step's trees. `kept`: what takes rows.

    Shapes: nodes int64 [B, C, columns], probs float64 [B, C], counts int64 [B], kept bool [B, C], trusts float64 [B, drafters],
    figures float64 [B, drafters, figures].
    """

    nodes: Any
    probs: Any
    counts: Any
    kept: Any
    trusts: Any
    figures: Any


@inner
def _child(nodes: Any, count: int, node: int, token: int) -> int:
    """The child of a node that holds a token, 0 for none."""
    for child in range(node + 1, count):
        if nodes[child, PARENT] == node and nodes[child, TOKEN] == token:
            return child
    return 0


@compiled(nogil=True)
def _merge(trees: Any, i: int, drafter: int, given: Any, given_probs: Any, limits: Any, numbers: Any) -> None:
    """See `StepTrees.merge`. `numbers` gets the node of each proposal, -1 for none.

    Shapes: given int64 [P, columns], limits int64 [2], numbers int64 [P].
    """
    nodes, probs, first_new = trees.nodes[i], trees.probs[i], trees.counts[i]
    count = first_new
    for n in range(given.shape[0]):
        token, above, prob = given[n, TOKEN], given[n, PARENT], given_probs[n]
        parent = 0 if above < 0 else numbers[above]
        numbers[n] = -1
        if parent < 0 or nodes[parent, _DEPTH] >= limits[0] or not (0 <= token < limits[1] and prob >= 0.0):
            continue
        above_prob = given_probs[above] if above >= 0 else 1.0
        prob = min(probs[parent], prob * probs[parent] / above_prob) if above_prob > 0.0 else 0.0
        node = _child(nodes, count, parent, token)
        if parent < first_new:
            prob *= trees.trusts[i, drafter]
            taken = 0.0
            for child in range(parent + 1, first_new):
                taken += probs[child] if nodes[child, PARENT] == parent and not node else 0.0
            prob *= max(0.0, 1.0 - taken / probs[parent]) if taken > 0.0 else 1.0
        if not node:
            node, count = count, count + 1
            nodes[node, :NUM_GIVEN] = given[n]
            nodes[node, PARENT], nodes[node, _DEPTH], nodes[node, _DRAFTER] = parent, nodes[parent, _DEPTH] + 1, drafter
        numbers[n], probs[node] = node, max(prob, probs[node])
    trees.counts[i] = count


@inner
def _limit(nodes: Any, probs: Any, kept: Any, limits: Any) -> None:
    """Keep of one tree what its `Limits` allow. Of equal nodes the first ones are kept."""
    kept[:] = True
    last = 0
    for node in range(1, len(kept)):
        kept[node] = not limits[2] or nodes[node, PARENT] == last
        last = node if kept[node] else last
    ranked = np.flatnonzero(kept)[1:]
    ranked = ranked[np.argsort(-probs[ranked], kind="mergesort")]
    num_likely = 0 if limits[3] else (probs[ranked] > 0.5).sum()
    kept[ranked[min(limits[1], limits[0] + num_likely) :]] = False


@compiled(nogil=True)
def _cut(trees: Any, limits: Any, own_s: float, seconds: Any, row_s: float) -> None:
    """See `StepTrees.cut`. Shapes: limits int64 [B, 4], seconds float64 [most nodes + 1]."""
    nodes, probs, counts, kept, _, _ = trees
    owners, places = np.empty(counts.sum(), np.int64), np.empty(counts.sum(), np.int64)
    values, num, num_whole, expected = np.empty(counts.sum()), 0, 0, 0.0
    for i in range(len(counts)):
        _limit(nodes[i], probs[i, : counts[i]], kept[i, : counts[i]], limits[i])
        expected += 1.0 - limits[i, 3]
        for node in range(1, counts[i]):
            if limits[i, 3]:
                num_whole += kept[i, node]
            elif kept[i, node]:
                owners[num], places[num], values[num] = i, node, -probs[i, node]
                num += 1
    order, best, best_rate = np.argsort(values[:num], kind="mergesort"), 0, expected / own_s
    for n in range(min(num, len(seconds) - 1 - num_whole)):
        prob = -values[order[n]]
        if prob < best_rate * row_s:
            break  # neither this node nor a later one raises the rate
        expected += prob
        rate = expected / (own_s + seconds[num_whole + n + 1] - seconds[num_whole])
        if rate > best_rate:
            best_rate, best = rate, n + 1
    for n in order[best:]:
        kept[owners[n], places[n]] = False


@compiled(nogil=True)
def _judge(trees: Any, tokens: Any, starts: Any, events: Any) -> int:
    """List the proposed children of all nodes on the path of the decided tokens, and count them.

    Siblings count in order up to the right one: a later sibling's probability is given that no earlier one is right. Shapes:
    tokens int64 [T], of sequence i [starts[i], starts[i + 1]); events int64 [most, 4]: sequence, drafter, feedback, whether it is
    right. Returns the number of events.
    """
    nodes, probs, counts, kept, trusts, figures = trees
    num = 0
    for i in range(len(counts)):
        parent, at = 0, starts[i]
        for node in range(1, counts[i] if at < starts[i + 1] else 1):
            drafter = nodes[i, node, _DRAFTER]
            figures[i, drafter, NUM_NODES] += kept[i, node]
            if kept[i, node]:
                figures[i, drafter, EXPECTED] += probs[i, node] / trusts[i, drafter]
            if at >= starts[i + 1] or nodes[i, node, PARENT] != parent:
                continue
            is_right = nodes[i, node, TOKEN] == tokens[at]
            events[num, 0], events[num, 1], events[num, 2], events[num, 3] = (
                i,
                drafter,
                nodes[i, node, FEEDBACK],
                is_right,
            )
            num += 1
            if probs[i, parent] > 0.0 and not kept[i, node]:
                chance = probs[i, node] / probs[i, parent]
                figures[i, drafter, EXPECTED] += chance / trusts[i, drafter] if parent == 0 else chance
            if is_right:
                figures[i, drafter, ACCEPTED] += 1.0
                figures[i, drafter, NUM_HITS] += kept[i, node]
                parent, at = node, at + 1
    return num


@compiled(nogil=True)
def _compact(trees: Any, packed: Any, packed_probs: Any, starts: Any) -> None:
    """The kept nodes of all trees, one tree behind the other, with parents numbered anew. Shape of starts: int64 [B + 1]."""
    numbers, num = np.zeros(trees.probs.shape[1], np.int64), 0
    for i in range(len(trees.counts)):
        starts[i] = num
        for node in range(trees.counts[i]):
            if trees.kept[i, node]:
                numbers[node] = num - starts[i]
                packed[num] = trees.nodes[i, node]
                packed[num, PARENT] = numbers[trees.nodes[i, node, PARENT]] if node else -1
                packed_probs[num] = trees.probs[i, node]
                num += 1
    starts[len(trees.counts)] = num


Ints = NDArray[np.int64]


class Limits(NamedTuple):
    """What a sequence's tree may be.

    `most_besides`: nodes beside its path of nodes more likely than not; `most`: nodes in all. `is_chain`: its first path alone;
    `is_whole`: no node is left out for what it costs, and a likely path takes of the limit too.
    """

    most_besides: int
    most: int
    is_chain: bool
    is_whole: bool


class StepTrees:
    """See the module. Belongs to one step of B sequences. `trusts`: by which each drafter's probabilities are scaled, over 0.

    Shape: trusts float64 [B, drafters].
    """

    def __init__(self, root_tokens: SequenceOf[int], trusts: NDArray[np.float64]) -> None:
        count, capacity = len(root_tokens), 64
        nodes, probs = np.zeros((count, capacity, _NUM_COLUMNS), np.int64), np.zeros((count, capacity))
        nodes[:, 0, TOKEN], nodes[:, 0, PARENT], probs[:, 0] = root_tokens, -1, 1.0
        self.figures = np.zeros((*trusts.shape, NUM_FIGURES))
        kept = np.zeros(probs.shape, np.bool_)
        self._arrays = _Trees(nodes, probs, np.ones(count, np.int64), kept, trusts, self.figures)
        self.draws: list[dict[int, Draw]] = [{} for _ in root_tokens]
        self._given: dict[tuple[int, int], ProposalArrays] = {}

    @property
    def counts(self) -> Ints:
        """Nodes of each tree. Shape: [B]."""
        counts: Ints = self._arrays.counts
        return counts

    @property
    def expected(self) -> float:
        """Accepted tokens that all nodes so far promise."""
        return float(self._arrays.probs.sum()) - len(self.counts)

    def uncovered(self) -> NDArray[np.float64]:
        """How little the nodes so far cover: 1 over the tokens that a tree promises, the bonus token included. Shape: [B]."""
        uncovered: NDArray[np.float64] = 1.0 / self._arrays.probs.sum(1)
        return uncovered

    def merge(self, tree: int, given: ProposalArrays, drafter: int, max_depth: int, vocab_size: int) -> None:
        """Add one drafter's proposals; parents precede their children.

        Below a node that is there already, probabilities are rescaled to that node's. A new sibling of other drafters' nodes gets
        the probability that they leave. A node that is too deep, no token of the target or without a probability is left out with
        all nodes below it.
        """
        if not len(given):
            return
        nodes, probs, counts, kept, *_ = self._arrays
        if (needed := int(counts[tree]) + len(given)) > probs.shape[1]:
            more = ((0, 0), (0, needed))
            nodes, probs, kept = np.pad(nodes, (*more, (0, 0))), np.pad(probs, more), np.pad(kept, more)
            self._arrays = self._arrays._replace(nodes=nodes, probs=probs, kept=kept)
        limits, numbers = np.array([max_depth, vocab_size]), np.empty(len(given), np.int64)
        _merge(self._arrays, tree, drafter, given.nodes, given.probs, limits, numbers)
        for at, draw in given.draws.items():
            above = given.nodes[at, PARENT]
            if (parent := 0 if above < 0 else int(numbers[above])) >= 0:
                self.draws[tree][parent] = draw
        self._given[tree, drafter] = given

    def whole(self, tree: int) -> DraftTree:
        """All nodes so far, without origins."""
        nodes = self._arrays.nodes[tree, : self.counts[tree]].T.tolist()
        found = DraftTree(nodes[TOKEN][0])
        found.token_ids, found.parents, found.depths = nodes[TOKEN], nodes[PARENT], nodes[_DEPTH]
        return found

    def drop(self, tree: int) -> None:
        """Leave the root alone."""
        self.counts[tree], self.draws[tree] = 1, {}
        self._arrays.probs[tree, 1:] = 0.0

    def cut(self, limits: SequenceOf[Limits], own_s: float, seconds: NDArray[np.float64], row_s: float) -> None:
        """Keep the best set of the nodes that limits allow: as many as `seconds` has at most, the step's with 0, 1, ... nodes."""
        _cut(self._arrays, np.array(limits, np.int64), own_s, seconds, row_s)

    def trees(self, drafters: SequenceOf[str]) -> list[DraftTree]:
        """The kept nodes."""
        kept = self._arrays.kept
        starts, size = np.empty(len(self.counts) + 1, np.int64), int(kept.sum())
        packed, probs = np.empty((size, _NUM_COLUMNS), np.int64), np.empty(size)
        _compact(self._arrays, packed, probs, starts)
        columns, all_probs, found = packed.T.tolist(), probs.tolist(), list[DraftTree]()
        for i, (low, high) in enumerate(itertools.pairwise(starts.tolist())):
            tree = DraftTree(columns[TOKEN][low])
            if high > low + 1:
                tree.token_ids, tree.parents = columns[TOKEN][low:high], columns[PARENT][low:high]
                tree.depths, tree.path_probs = columns[_DEPTH][low:high], all_probs[low:high]
                origins = zip(*(columns[c][low + 1 : high] for c in (_DRAFTER, SOURCE, OFFSET)), strict=True)
                tree.origins += [Origin(drafters[drafter], source, offset) for drafter, source, offset in origins]
            if high > low + 1 and self.draws[i]:
                numbers = {int(node): n for n, node in enumerate(np.flatnonzero(kept[i]))}
                tree.draws = {numbers[node]: draw for node, draw in self.draws[i].items() if node in numbers}
            found.append(tree)
        return found

    def judge(self, tokens: SequenceOf[SequenceOf[int]]) -> Iterator[tuple[int, ProposalArrays, Ints, Ints]]:
        """Judge the proposed nodes by the decided tokens of each sequence, and add to `figures`.

        Yields for each sequence and drafter the drafter, its proposals, the feedback columns of its judged nodes, and 1 or 0 for
        right or wrong.
        """
        starts = np.cumsum([0, *map(len, tokens)])
        flat = np.fromiter((token for own in tokens for token in own), np.int64, starts[-1])
        events = np.empty((int(self.counts.sum()), 4), np.int64)
        events = events[: _judge(self._arrays, flat, starts, events)]
        bounds = np.searchsorted(events[:, 0], np.arange(len(self.counts) + 1))
        for (tree, drafter), given in self._given.items():
            own = events[bounds[tree] : bounds[tree + 1]]
            own = own[own[:, 1] == drafter]
            if len(own):
                yield drafter, given, own[:, 2], own[:, 3]


def compile_trees() -> None:
    """Compile now, or read from disk, for the first answer would otherwise wait."""
    trees, origin = StepTrees([0], np.ones((1, 1))), Origin("any")
    trees.merge(0, ProposalArrays.of("any", [Proposal(1, -1, 0.5, origin)]), 0, 1, 2)
    trees.cut([Limits(1, 1, is_chain=False, is_whole=False)], 1.0, np.zeros(2), 0.0)
    trees.trees(["any"])
    list(trees.judge([[1]]))

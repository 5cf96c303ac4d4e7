"""The draft trees of one step's sequences as arrays: compiled code merges proposals, cuts the trees and judges their nodes.

Every sequence has a row of nodes; node 0 is its root. Drafters' proposals are merged one drafter after the other; then all trees
are cut at once to the set of nodes with the most expected tokens a second (`ragspec.drafting.cost_model`). When the target has
decided, every proposed node whose parent is right is judged, whether it took a row or not.

    >>> trees = StepTrees([7, 9], num_drafters=2)
    >>> trees.merge(0, proposals, drafter=1, max_depth=8, vocab_size=32_000)
    >>> trees.cut(limits, factors, spare_rows=100, ...); trees.trees(["copy", "eagle"])
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

_DEPTH, _DRAFTER, _SHARED, _CHILD, _LAST, _NEXT, _NUM_COLUMNS = range(NUM_GIVEN, NUM_GIVEN + 7)
"""Columns of a node beside those of a proposal: its first child, its last child and its next sibling are nodes, 0 for none."""
EXPECTED, ACCEPTED, NUM_NODES, NUM_SHARED, NUM_HITS, NUM_ADDED, NUM_FIGURES = range(7)
"""Figures of a drafter in a sequence's step: accepted tokens that its nodes promised, unscaled; those that came; its nodes that
took a row; nodes of several drafters that did; accepted nodes of its own or of several drafters; of its own alone."""


class _Trees(NamedTuple):
    """The arrays of a step's trees. Shapes: nodes int64 [B, C, columns], probs float64 [B, C], counts int64 [B]; limited and kept
    bool [B, C]: what limits allow, and what takes rows; factors float64 [B, drafters], figures float64 [B, drafters, figures]."""

    nodes: Any
    probs: Any
    counts: Any
    limited: Any
    kept: Any
    factors: Any
    figures: Any


@inner
def _child(nodes: Any, node: int, token: int) -> int:
    child = nodes[node, _CHILD]
    while child and nodes[child, TOKEN] != token:
        child = nodes[child, _NEXT]
    return int(child)


@compiled(nogil=True)
def _merge(
    nodes: Any, probs: Any, count: int, drafter: int, given: Any, given_probs: Any, limits: Any, numbers: Any
) -> int:
    """See `StepTrees.merge`. `numbers` gets the node of each proposal, -1 for none. Returns the number of nodes.

    Shapes: nodes int64 [C, columns], probs float64 [C], given int64 [P, columns], limits int64 [2], numbers int64 [P].
    """
    first_new, factors = count, np.ones(given.shape[0])
    for n in range(given.shape[0]):
        token, above, prob = given[n, TOKEN], given[n, PARENT], given_probs[n]
        parent = 0 if above < 0 else numbers[above]
        numbers[n] = -1
        if parent < 0 or nodes[parent, _DEPTH] >= limits[0] or not (0 <= token < limits[1] and prob >= 0.0):
            continue
        factor = factors[above] if above >= 0 else 1.0
        if 0 < parent < first_new and prob > 0.0:
            factor = min(1.0, prob / given_probs[above]) * probs[parent] / prob if given_probs[above] > 0.0 else 1.0
        present = _child(nodes, parent, token)
        if 0 < present < first_new:
            nodes[present, _SHARED] = 1
        elif parent < first_new:
            taken, child = 0.0, nodes[parent, _CHILD]
            while 0 < child < first_new:
                taken, child = taken + probs[child], nodes[child, _NEXT]
            if taken > 0.0:
                factor *= max(0.0, 1.0 - taken / probs[parent])
        factors[n] = factor
        prob = min(prob * factor, probs[parent])
        numbers[n] = present or count
        if present and prob <= probs[present]:
            continue
        node = numbers[n]
        probs[node] = prob
        for column in (TOKEN, SOURCE, OFFSET, FEEDBACK):
            nodes[node, column] = given[n, column]
        nodes[node, _DRAFTER] = drafter
        if not present:
            nodes[node, PARENT], nodes[node, _DEPTH] = parent, nodes[parent, _DEPTH] + 1
            nodes[node, _SHARED] = nodes[node, _CHILD] = nodes[node, _NEXT] = 0
            if nodes[parent, _CHILD]:
                nodes[nodes[parent, _LAST], _NEXT] = node
            else:
                nodes[parent, _CHILD] = node
            nodes[parent, _LAST] = node
            count += 1
    return count


@inner
def _ranked(probs: Any) -> Any:
    """The order from the highest to the lowest; ties to the lower number. A merge sort: numba's loads scipy at a later start."""
    order, merged, width = np.arange(len(probs)), np.arange(len(probs)), 1
    while width < len(probs):
        for low in range(0, len(probs), 2 * width):
            middle, high = min(low + width, len(probs)), min(low + 2 * width, len(probs))
            left, right = low, middle
            for at in range(low, high):
                is_left = right == high or (left < middle and probs[order[left]] >= probs[order[right]])
                merged[at] = order[left if is_left else right]
                left, right = left + is_left, right + (not is_left)
        order, merged, width = merged, order, 2 * width
    return order


@inner
def _keep_best(probs: Any, kept: Any, spared: Any, most: int) -> None:
    """Of the kept nodes that are not spared, keep the `most` most probable; ties to the lower number. The root stays."""
    for node in _ranked(probs):
        if node and kept[node] and not spared[node]:
            kept[node] = most > 0
            most -= 1


@inner
def _likeliest_path(nodes: Any, probs: Any, kept: Any) -> Any:
    """The nodes, the root among them, of the path with the most expected tokens; of equal paths the one added first."""
    expected, best = probs.copy(), np.zeros(len(probs), np.int64)  # from the node on, down its best child
    on_path = np.zeros(len(probs), np.bool_)
    for node in range(len(probs) - 1, 0, -1):
        parent = nodes[node, PARENT]
        if kept[node] and probs[parent] + expected[node] >= expected[parent]:
            expected[parent], best[parent] = probs[parent] + expected[node], node
    node, on_path[0] = best[0], True
    while node:
        on_path[node], node = True, best[node]
    return on_path


@compiled(nogil=True)
def _limit(trees: Any, kinds: Any, limits: Any) -> None:
    """Scale all probabilities by the drafters' records, and keep of each tree what its limits allow.

    Shapes: kinds bool [B, 2]: a chain alone, and no room beside the limit; limits int64 [B, 2]: nodes beside the likeliest path,
    and nodes in all.
    """
    nodes, probs, counts, kept, _, factors, _ = trees
    least = np.ones(probs.shape[1])
    for i in range(len(counts)):
        own, own_probs, count = nodes[i], probs[i], counts[i]
        keeps = kept[i, :count]
        keeps[:] = not kinds[i, 0]
        keeps[0], node = True, own[0, _CHILD]
        while kinds[i, 0] and node:
            keeps[node], node = True, own[node, _CHILD]
        for node in range(1, count):
            least[node] = min(least[own[node, PARENT]], factors[i, own[node, _DRAFTER]])
            own_probs[node] *= least[node]
        if count - 1 > limits[i, 0]:
            spared = _likeliest_path(own, own_probs[:count], keeps) if not kinds[i, 1] else np.zeros(count, np.bool_)
            _keep_best(own_probs[:count], keeps, spared, limits[i, 0])
        if count - 1 > limits[i, 1]:
            _keep_best(own_probs[:count], keeps, np.zeros(count, np.bool_), limits[i, 1])


@compiled(nogil=True)
def _cut(probs: Any, counts: Any, kept: Any, drafts: Any, own_s: float, nodes_s: Any, row_s: float) -> int:
    """Keep the best set of the limited nodes of these trees (see `cost_model`); of equal nodes those of the first trees are kept.

    Shapes: drafts int64 [trees], their numbers; nodes_s float64 [most nodes + 1]. Returns the number of kept nodes.
    """
    total = 0
    for i in drafts:
        total += counts[i] - 1
    owners, places, values, num = np.empty(total, np.int64), np.empty(total, np.int64), np.empty(total), 0
    for i in drafts:
        for node in range(1, counts[i]):
            if kept[i, node]:
                owners[num], places[num], values[num] = i, node, probs[i, node]
                num += 1
    order = _ranked(values[:num])
    expected, best = np.float64(len(drafts)), 0
    best_rate = expected / own_s
    for n in range(min(num, len(nodes_s) - 1)):
        prob = values[order[n]]
        if prob < best_rate * row_s:
            break  # neither this node nor a later one raises the rate
        expected += prob
        rate = expected / (own_s + nodes_s[n + 1])
        if rate > best_rate:
            best_rate, best = rate, n + 1
    for n in range(best, num):
        kept[owners[order[n]], places[order[n]]] = False
    return best


@compiled(nogil=True)
def _judge(trees: Any, tokens: Any, starts: Any, events: Any) -> int:
    """List the proposed children of all nodes on the path of the decided tokens, and count them.

    Siblings count in order up to the right one: a later sibling's probability is given that no earlier one is right. Shapes:
    tokens int64 [T], of sequence i [starts[i], starts[i + 1]); events int64 [most, 4]: sequence, drafter, feedback, whether it is
    right. Returns the number of events.
    """
    nodes, probs, counts, limited, kept, factors, figures = trees
    num = 0
    for i in range(len(counts)):
        own, node = nodes[i], 0
        for at in range(starts[i], starts[i + 1]):
            child = own[node, _CHILD]
            while child:
                drafter, is_right = own[child, _DRAFTER], own[child, TOKEN] == tokens[at]
                if limited[i, child]:
                    events[num, 0], events[num, 1], events[num, 2] = i, drafter, own[child, FEEDBACK]
                    events[num, 3] = is_right
                    num += 1
                    chance = probs[i, child] / probs[i, node] if probs[i, node] > 0.0 else 0.0
                    if not kept[i, child]:
                        figures[i, drafter, EXPECTED] += chance / factors[i, drafter] if node == 0 else chance
                    if is_right:
                        figures[i, drafter, ACCEPTED] += 1.0
                        if kept[i, child]:
                            figures[i, drafter, NUM_ADDED] += 1.0 - own[child, _SHARED]
                            figures[i, drafter, NUM_HITS] += 1.0
                            if own[child, _SHARED]:
                                figures[i, :, NUM_HITS] += 1.0
                if is_right:
                    break
                child = own[child, _NEXT]
            if not child or not limited[i, child]:
                break
            node = child
    return num


@compiled(nogil=True)
def _compact(trees: Any, packed: Any, packed_probs: Any, starts: Any) -> None:
    """The kept nodes of all trees, one tree behind the other, with parents numbered anew, and each drafter's count.

    Shape of starts: int64 [B + 1].
    """
    nodes, probs, counts, _, kept, factors, figures = trees
    numbers, num = np.zeros(probs.shape[1], np.int64), 0
    for i in range(len(counts)):
        starts[i] = num
        for node in range(counts[i]):
            if kept[i, node]:
                numbers[node] = num - starts[i]
                packed[num] = nodes[i, node]
                packed[num, PARENT] = numbers[nodes[i, node, PARENT]] if node else -1
                packed_probs[num] = probs[i, node]
                num += 1
                if node:
                    drafter = nodes[i, node, _DRAFTER]
                    figures[i, drafter, EXPECTED] += probs[i, node] / factors[i, drafter]
                    figures[i, drafter, NUM_NODES] += 1.0
                    if nodes[i, node, _SHARED]:
                        figures[i, :, NUM_SHARED] += 1.0
    starts[len(counts)] = num


Ints = NDArray[np.int64]


class Limits(NamedTuple):
    """What a sequence's tree may be. `most_besides`: nodes beside its likeliest path; `most`: nodes in all. `is_chain`: its first
    path alone; `is_whole`: no node is left out for what it costs, and the likeliest path takes of the limit too."""

    most_besides: int
    most: int
    is_chain: bool
    is_whole: bool


class StepTrees:
    """See the module. Belongs to one step of B sequences.

    `probs` are the nodes' path probabilities, `counts` the numbers of nodes.
    """

    def __init__(self, root_tokens: SequenceOf[int], num_drafters: int) -> None:
        count, capacity = len(root_tokens), 64
        self._nodes = np.zeros((count, capacity, _NUM_COLUMNS), np.int64)
        self.probs, self.counts = np.zeros((count, capacity)), np.ones(count, np.int64)
        self._nodes[:, 0, TOKEN], self._nodes[:, 0, PARENT], self.probs[:, 0] = root_tokens, -1, 1.0
        self.draws: list[dict[int, Draw]] = [{} for _ in root_tokens]
        self.expected = np.zeros(count)
        """Accepted tokens that the nodes so far promise."""
        self.covered = np.zeros(count)
        """How probable it is that a node so far holds the next token."""
        self.figures = np.zeros((count, num_drafters, NUM_FIGURES))
        self._given: dict[tuple[int, int], ProposalArrays] = {}

    def merge(self, tree: int, given: ProposalArrays, drafter: int, max_depth: int, vocab_size: int) -> None:
        """Add one drafter's proposals; parents precede their children.

        Below a node that other drafters proposed too, probabilities are rescaled to that node's. A new sibling of other drafters'
        nodes gets the probability that they leave. A node that is too deep, no token of the target or without a probability is
        left out with all nodes below it.
        """
        if not len(given):
            return
        if (needed := self.counts[tree] + len(given)) > self.probs.shape[1]:
            more = ((0, 0), (0, int(needed)))
            self._nodes, self.probs = np.pad(self._nodes, (*more, (0, 0))), np.pad(self.probs, more)
        limits, numbers = np.array([max_depth, vocab_size]), np.empty(len(given), np.int64)
        own, own_probs = self._nodes[tree], self.probs[tree]
        count = _merge(own, own_probs, self.counts[tree], drafter, given.nodes, given.probs, limits, numbers)
        self.counts[tree] = count
        for at, draw in given.draws.items():
            above = given.nodes[at, PARENT]
            if (parent := 0 if above < 0 else int(numbers[above])) >= 0:
                self.draws[tree][parent] = draw
        self.expected[tree] = own_probs[1:count].sum()
        self.covered[tree] = own_probs[1:count][own[1:count, _DEPTH] == 1].sum()
        self._given[tree, drafter] = given

    def whole(self, tree: int) -> DraftTree:
        """All nodes so far, without origins."""
        nodes, found = self._nodes[tree, : self.counts[tree]].T.tolist(), DraftTree(int(self._nodes[tree, 0, TOKEN]))
        found.token_ids, found.parents, found.depths = nodes[TOKEN], nodes[PARENT], nodes[_DEPTH]
        return found

    def drop(self, tree: int) -> None:
        """Leave the root alone."""
        self.counts[tree], self.draws[tree] = 1, {}
        self._nodes[tree, 0, _CHILD] = self.expected[tree] = self.covered[tree] = 0

    def limit(self, limits: SequenceOf[Limits], factors: NDArray[np.float64]) -> None:
        """Scale all probabilities, and leave out what limits forbid. Shape: factors float64 [B, drafters], over 0."""
        self._factors, self.limited = factors, np.zeros(self.probs.shape, np.bool_)
        self.kept = self.limited
        kinds = np.array([(limit.is_chain, limit.is_whole) for limit in limits])
        most = np.array([(limit.most_besides, limit.most) for limit in limits], np.int64)
        _limit(self._arrays, kinds, most)
        for i, limit in enumerate(limits):
            if limit.is_chain:  # no child of the last node is in the chain
                self.draws[i] = {node: draw for node, draw in self.draws[i].items() if self._nodes[i, node, _CHILD]}
        self.kept = self.limited.copy()

    @property
    def _arrays(self) -> _Trees:
        known = self.limited, self.kept, self._factors, self.figures
        return _Trees(self._nodes, self.probs, self.counts, *known)

    def cut(self, trees: NDArray[np.int64], own_s: float, nodes_s: NDArray[np.float64], row_s: float) -> None:
        """Of these trees keep the best set of nodes: as many as `nodes_s` has at most, the seconds that 0, 1, ... nodes add."""
        _cut(self.probs, self.counts, self.kept, trees, own_s, nodes_s, row_s)

    def trees(self, drafters: SequenceOf[str]) -> list[DraftTree]:
        """The kept nodes. Counts each drafter's for `judge`."""
        starts, size = np.empty(len(self.counts) + 1, np.int64), int(self.kept.sum())
        packed, probs = np.empty((size, _NUM_COLUMNS), np.int64), np.empty(size)
        _compact(self._arrays, packed, probs, starts)
        columns, all_probs, ends = packed.T.tolist(), probs.tolist(), starts.tolist()
        found = []
        for i, (low, high) in enumerate(itertools.pairwise(ends)):
            tree = DraftTree(columns[TOKEN][low])
            if high > low + 1:
                tree.token_ids, tree.parents = columns[TOKEN][low:high], columns[PARENT][low:high]
                tree.depths, tree.path_probs = columns[_DEPTH][low:high], all_probs[low:high]
                tree.shared = list(map(bool, columns[_SHARED][low:high]))
                origins = zip(*(columns[c][low + 1 : high] for c in (_DRAFTER, SOURCE, OFFSET)), strict=True)
                tree.origins += [Origin(drafters[drafter], source, offset) for drafter, source, offset in origins]
                if self.draws[i]:
                    kept = {int(node): n for n, node in enumerate(np.flatnonzero(self.kept[i]))}
                    tree.draws = {kept[node]: draw for node, draw in self.draws[i].items() if node in kept}
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
    trees, origin = StepTrees([0], 1), Origin("any")
    trees.merge(0, ProposalArrays.of("any", [Proposal(1, -1, 0.5, origin)]), 0, 1, 2)
    trees.limit([Limits(1, 1, is_chain=False, is_whole=False)], np.ones((1, 1)))
    trees.cut(np.zeros(1, np.int64), 1.0, np.zeros(2), 0.0)
    trees.trees(["any"])
    list(trees.judge([[1]]))

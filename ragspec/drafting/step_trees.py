"""The draft trees of one step's sequences as arrays: proposals are merged, the trees cut, and their nodes judged.

Every sequence has a row of nodes; node 0 is its root. Drafters' proposals are merged one drafter after the other; then all trees
are cut at once to the set of nodes with the most expected tokens a second (`ragspec.drafting.cost_model`). When the target has
decided, every proposed node whose parent is right is judged, whether it took a row or not.

    >>> trees = StepTrees([7, 9], trusts=np.ones((2, 2)))
    >>> trees.merge([0], proposals, drafter=1, limits=(depths, 32_000, is_chain))
    >>> trees.cut(np.array([48, 48]), is_whole, 2, others_s, seconds); trees.trees(["copy", "eagle"])
"""

import functools
import itertools
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np

from ragspec.drafting.acceptance import (
    ACCEPTED,
    ASKED,
    EXPECTED,
    NUM_FIGURES,
    NUM_HITS,
    NUM_NODES,
    UNCOVERED,
    Floats,
    Ints,
    Mask,
)
from ragspec.numerics.compiled import assign, compiled, inner
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
    Proposals,
)

_GIVEN_TYPES = np.dtype(np.int64), np.dtype(np.float64), np.dtype(np.int64)
"""Of nodes, probabilities and starts of proposals."""
_DEPTH, _DRAFTER, _NUM_COLUMNS = range(NUM_GIVEN, NUM_GIVEN + 3)
"""Columns of a node beside those of a proposal. A node belongs to the first drafter that proposed it."""


TreeLimits = tuple[Ints, int, Mask]
"""The greatest depth of each tree, the target's vocabulary, and which trees are chains. Shapes: int64 [B], bool [B]."""


@inner
def _merge_tree(
    nodes: Any, probs: Any, first_new: int, drafter: int, trust: float, proposed: Any, limits: Any, numbers: Any
) -> int:
    """See `StepTrees.merge`. `numbers` gets the node of each proposal, -1 for none. Returns the number of nodes.

    Shapes: nodes int64 [C, columns], probs float64 [C], proposed int64 [P, columns] and float64 [P], numbers int64 [P].
    """
    (given, given_probs), (max_depth, vocab_size, is_chain) = proposed, limits
    count = first_new
    for n in range(given.shape[0]):
        token, above, prob = given[n, TOKEN], given[n, PARENT], given_probs[n]
        parent = 0 if above < 0 else numbers[above]
        numbers[n] = -1
        if parent < 0 or nodes[parent, _DEPTH] >= max_depth or not (0 <= token < vocab_size and prob >= 0.0):
            continue
        above_prob = given_probs[above] if above >= 0 else 1.0
        prob = min(probs[parent], prob * probs[parent] / above_prob) if above_prob > 0.0 else 0.0
        node, taken = 0, 0.0
        for child in range(parent + 1, count):
            if nodes[child, PARENT] == parent and nodes[child, TOKEN] == token:
                node = child
            elif nodes[child, PARENT] == parent and child < first_new:
                taken += probs[child]
        if parent < first_new:
            prob *= trust
            if not 0 < node < first_new and taken > 0.0:
                prob *= max(0.0, 1.0 - taken / probs[parent])
        if not node:
            if is_chain and parent < count - 1:
                continue
            node, count = count, count + 1
            assign(nodes[node, :NUM_GIVEN], given[n])
            nodes[node, PARENT], nodes[node, _DEPTH], nodes[node, _DRAFTER] = parent, nodes[parent, _DEPTH] + 1, drafter
        numbers[n], probs[node] = node, max(prob, probs[node])
    return count


@compiled(nogil=True)
def _merge(
    nodes: Any, probs: Any, trees: Any, drafter: int, places: Any, given: Any, limits: Any, numbers: Any
) -> None:
    """See `StepTrees.merge`. Shapes: nodes int64 [B, C, columns], probs float64 [B, C], places int64 [given]."""
    (rows, row_probs, starts), (max_depths, vocab_size, is_chain) = given, limits
    counts, promised, depths, trusts, figures = trees
    for n, i in enumerate(places):
        low, high = starts[n], starts[n + 1]
        own, own_limits = (rows[low:high], row_probs[low:high]), (max_depths[i], vocab_size, is_chain[i])
        figures[i, drafter, ASKED], figures[i, drafter, UNCOVERED] = 1.0, 1.0 / promised[i]
        trust = trusts[i, drafter]
        counts[i] = _merge_tree(nodes[i], probs[i], counts[i], drafter, trust, own, own_limits, numbers[low:high])
        promised[i] = 0.0
        for node in range(counts[i]):
            promised[i] += probs[i, node]
            depths[i] = max(depths[i], nodes[i, node, _DEPTH])


@compiled(nogil=True)
def _list(probs: Any, counts: Any, places: Any, found: Any) -> int:
    """List all nodes but the roots: the place of each in the flat arrays, and its probability, negated. Returns how many."""
    num = 0
    for i in range(len(counts)):
        for node in range(1, counts[i]):
            places[num], found[num] = i * probs.shape[1] + node, -probs[i, node]
            num += 1
    return num


@compiled(nogil=True)
def _cut(
    kept: Any, places: Any, probs: Any, most: Any, is_whole: Any, num_others: int, others_s: float, seconds: Any
) -> None:
    """See `StepTrees.cut`. `places`, `probs`: of all nodes, falling. Shapes: int64 [N], float64 [N]."""
    width, left, num_whole, num_open, expected = kept.shape[1], most.copy(), 0, 0, float(num_others)
    open_nodes = np.empty(len(places), np.int64)
    for i in range(len(most)):
        kept[i, 0] = True
    for n in range(len(places)):
        tree, node = places[n] // width, places[n] % width
        if left[tree] > 0:
            left[tree] -= 1
            if is_whole[tree]:
                kept[tree, node] = True
                num_whole += 1
            else:
                open_nodes[num_open] = n
                num_open += 1
    best, best_rate = 0, expected / others_s
    for n in range(min(num_open, len(seconds) - 1 - num_whole)):
        expected += probs[open_nodes[n]]
        rate = expected / (others_s + seconds[num_whole + n + 1] - seconds[num_whole])
        if rate > best_rate:
            best, best_rate = n + 1, rate
    for n in range(best):
        place = places[open_nodes[n]]
        kept[place // width, place % width] = True


@compiled(nogil=True)
def _pack(nodes: Any, probs: Any, kept: Any, packed: Any, packed_probs: Any, ends: Any) -> None:
    """Copy the kept nodes, with the numbers of their parents among them. `ends`: behind each tree's last. Shapes: kept bool
    [B, C], packed int64 [N, columns]."""
    num, numbers = 0, np.empty(kept.shape[1], np.int64)
    for i in range(len(kept)):
        first = num
        for node in range(kept.shape[1]):
            if kept[i, node]:
                assign(packed[num], nodes[i, node])
                packed_probs[num] = probs[i, node]
                packed[num, PARENT] = numbers[nodes[i, node, PARENT]] if node else -1
                numbers[node] = num - first
                num += 1
        ends[i] = num


@compiled(nogil=True)
def _judge(
    nodes: Any, probs: Any, counts: Any, kept: Any, trusts: Any, figures: Any, tokens: Any, starts: Any, events: Any
) -> int:
    """List the proposed children of all nodes on the path of the decided tokens, and count them.

    Siblings count in order up to the right one: a later sibling's probability is given that no earlier one is right. Shapes:
    tokens int64 [T], of sequence i [starts[i], starts[i + 1]); events int64 [4, most]: drafter, sequence, feedback, whether it is
    right. Returns the number of events.
    """
    num = 0
    for i in range(len(counts)):
        parent, at = 0, starts[i]
        for node in range(1, counts[i] if at < starts[i + 1] else 1):
            drafter = nodes[i, node, _DRAFTER]
            found = figures[i, drafter]
            if kept[i, node]:
                found[NUM_NODES] += 1.0
                found[EXPECTED] += probs[i, node] / trusts[i, drafter]
            if at >= starts[i + 1] or nodes[i, node, PARENT] != parent:
                continue
            is_right = nodes[i, node, TOKEN] == tokens[at]
            events[0, num], events[1, num] = drafter, i
            events[2, num], events[3, num] = nodes[i, node, FEEDBACK], is_right
            num += 1
            if probs[i, parent] > 0.0 and not kept[i, node]:
                chance = probs[i, node] / probs[i, parent]
                found[EXPECTED] += chance / trusts[i, drafter] if parent == 0 else chance
            if is_right:
                found[ACCEPTED] += 1.0
                found[NUM_HITS] += kept[i, node]
                parent, at = node, at + 1
    return num


class StepTrees:
    """See the module. Belongs to one step of B sequences. `trusts`: by which each drafter's probabilities are scaled, over 0.

    `counts`: nodes of each tree; `depths`: its levels; `promised`: tokens that it promises, the bonus token included; `draws`: by
    node, how its children were drawn. Shapes: trusts float64 [B, drafters], counts and depths int64 [B], promised float64 [B],
    figures float64 [B, drafters, figures].
    """

    def __init__(self, root_tokens: SequenceOf[int], trusts: Floats) -> None:
        count, capacity = len(root_tokens), 16
        self._nodes, self._probs = np.empty((count, capacity, _NUM_COLUMNS), np.int64), np.zeros((count, capacity))
        self._nodes[:, 0], self._probs[:, 0] = 0, 1.0
        self._nodes[:, 0, TOKEN], self._nodes[:, 0, PARENT] = root_tokens, -1
        self._trusts, self._kept = trusts, self._probs > 0.0
        self.counts, self.depths, self.promised = np.ones(count, np.int64), np.zeros(count, np.int64), np.ones(count)
        self.figures = np.zeros((*trusts.shape, NUM_FIGURES))
        self.draws: list[dict[int, Draw]] = [{} for _ in root_tokens]
        self._given: list[tuple[int, Ints, Proposals]] = []

    def merge(self, places: SequenceOf[int], given: Proposals, drafter: int, limits: TreeLimits) -> None:
        """Add one drafter's proposals for these trees; parents precede their children. Of a chain the first path counts alone.

        Below a node that is there already, probabilities are rescaled to that node's. A new sibling of other drafters' nodes gets
        the probability that they leave. A node that is too deep, no token of the target or without a probability is left out with
        all nodes below it.
        """
        at, sizes = np.array(places, np.int64), np.diff(given.starts)
        needed, (count, width) = int((self.counts[at] + sizes).max(initial=0)), self._probs.shape
        if needed > width:
            nodes, probs = np.empty((count, 2 * needed, _NUM_COLUMNS), np.int64), np.zeros((count, 2 * needed))
            nodes[:, :width], probs[:, :width] = self._nodes, self._probs
            self._nodes, self._probs = nodes, probs
        numbers, arrays = np.empty(len(given.nodes), np.int64), (given.nodes, given.probs, given.starts)
        trees = self.counts, self.promised, self.depths, self._trusts, self.figures
        _merge(self._nodes, self._probs, trees, drafter, at, arrays, limits, numbers)
        for node, draw in given.draws.items():
            own = int(np.searchsorted(given.starts, node, "right")) - 1
            tree, above = places[own], given.nodes[node, PARENT]
            parent = 0 if above < 0 else int(numbers[given.starts[own] + above])
            has_children = parent in self._nodes[tree, 1 : self.counts[tree], PARENT]
            if has_children or (parent >= 0 and not limits[2][tree]):
                self.draws[tree][parent] = draw
        self._given.append((drafter, at, given))

    def whole(self, tree: int) -> DraftTree:
        """All nodes so far, without origins."""
        nodes = self._nodes[tree, : self.counts[tree]].T.tolist()
        found = DraftTree(nodes[TOKEN][0])
        found.token_ids, found.parents, found.depths = nodes[TOKEN], nodes[PARENT], nodes[_DEPTH]
        return found

    def drop(self, tree: int) -> None:
        """Leave the root alone."""
        self.counts[tree], self.depths[tree], self.promised[tree], self.draws[tree] = 1, 0, 1.0, {}
        self._nodes[tree, 1:] = self._probs[tree, 1:] = 0

    def cut(self, most: Ints, is_whole: Mask, num_others: int, others_s: float, seconds: Floats) -> None:
        """Keep the best set of nodes: as many as `seconds` has at most, the step's with 0, 1, ... nodes, and `most` of each tree.

        The most probable nodes stay, of equal nodes the first ones. `is_whole`: trees of which no node is left out for what it
        costs. `num_others`: the step's other sequences, those without a tree included; `others_s`: seconds of their own tokens.
        Shapes: most int64 [B], is_whole bool [B], seconds float64 [most nodes + 1].
        """
        places, probs = np.empty(self._probs.size, np.int64), np.empty(self._probs.size)
        num = _list(self._probs, self.counts, places, probs)
        order = np.argsort(probs[:num], kind="stable")
        self._kept = np.zeros(self._probs.shape, np.bool_)
        _cut(self._kept, places[order], -probs[order], most, is_whole, num_others, others_s, seconds)

    def trees(self, drafters: SequenceOf[str]) -> list[DraftTree]:
        """The kept nodes."""
        count, ends = np.count_nonzero(self._kept), np.empty(len(self._kept), np.int64)
        packed, probs = np.empty((count, _NUM_COLUMNS), np.int64), np.empty(count)
        _pack(self._nodes, self._probs, self._kept, packed, probs, ends)
        tokens, parents, depths = packed[:, [TOKEN, PARENT, _DEPTH]].T.tolist()
        every_prob, found = probs.tolist(), list[DraftTree]()
        for i, (low, high) in enumerate(itertools.pairwise([0, *ends.tolist()])):
            tree = DraftTree(tokens[low], functools.partial(_origins, drafters, packed[low + 1 : high]))
            tree.token_ids, tree.parents = tokens[low:high], parents[low:high]
            tree.depths, tree.path_probs = depths[low:high], every_prob[low:high]
            if self.draws[i] and high > low + 1:
                numbers = np.cumsum(self._kept[i]) - 1
                tree.draws = {int(numbers[node]): draw for node, draw in self.draws[i].items() if self._kept[i, node]}
            found.append(tree)
        return found

    def judge(self, tokens: SequenceOf[SequenceOf[int]]) -> Iterator[tuple[int, Proposals, Ints]]:
        """Judge the proposed nodes by the decided tokens of each sequence, and add to `figures`.

        Yields for each drafter its number, its proposals and its judged nodes: sequence of the proposals, column of feedback, 1
        for right. Shape: int64 [3, N].
        """
        starts = np.cumsum([0, *map(len, tokens)])
        flat = np.fromiter(itertools.chain.from_iterable(tokens), np.int64, starts[-1])
        events = np.empty((4, int(self.counts.sum())), np.int64)
        arrays = self._nodes, self._probs, self.counts, self._kept, self._trusts, self.figures
        events = events[:, : _judge(*arrays, flat, starts, events)]
        for drafter, places, given in self._given:
            judged = np.compress(events[0] == drafter, events[1:], axis=1)
            if judged.size:
                judged[0] = np.searchsorted(places, judged[0])
                yield drafter, given, judged


@compiled(nogil=True)
def _are_sound(nodes: Any, probs: Any, starts: Any) -> bool:
    """See `check_proposals`."""
    if starts[0] != 0 or starts[-1] != len(nodes):
        return False
    for i in range(len(starts) - 1):
        if not starts[i] <= starts[i + 1] <= len(nodes):
            return False
        for n in range(starts[i], starts[i + 1]):
            if not (-1 <= nodes[n, PARENT] < n - starts[i] and nodes[n, TOKEN] >= 0):
                return False
            if not 0.0 <= probs[n] < np.inf:
                return False
    return True


def check_proposals(given: Proposals, num_sequences: int) -> None:
    """Tokens that the target lacks are no fault: its tokenizer may write them, and `merge` leaves them out.

    Raises: ValueError for anything but proposals for so many sequences, each behind its parent and with a probability.
    """
    arrays = given.nodes, given.probs, given.starts
    shapes = (len(given.probs), NUM_GIVEN), (len(given.nodes),), (num_sequences + 1,)
    are_arrays = [(own.shape, own.dtype) for own in arrays] == list(zip(shapes, _GIVEN_TYPES, strict=True))
    are_draws = all(0 <= n < len(given.nodes) and isinstance(draw, Draw) for n, draw in given.draws.items())
    if not (are_arrays and are_draws and _are_sound(*arrays)):
        raise ValueError(f"{given.drafter} proposed a node that is no token behind its parent with a probability")


def _origins(drafters: SequenceOf[str], nodes: Ints) -> list[Origin]:
    columns = nodes[:, [_DRAFTER, SOURCE, OFFSET]].tolist()
    return [Origin(drafters[drafter], source, offset) for drafter, source, offset in columns]


def compile_trees() -> None:
    """Compile now, or read from disk, for the first answer would otherwise wait."""
    trees = StepTrees([0], np.ones((1, 1)))
    limits = np.ones(1, np.int64), 2, np.zeros(1, np.bool_)
    given = Proposals.of("any", [[Proposal(1, -1, 0.5, Origin("any"))]])
    check_proposals(given, 1)
    trees.merge([0], given, 0, limits)
    trees.cut(np.ones(1, np.int64), np.zeros(1, np.bool_), 1, 1.0, np.ones(2))
    trees.trees(["any"])
    list(trees.judge([[1]]))

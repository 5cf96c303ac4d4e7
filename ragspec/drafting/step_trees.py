"""The draft trees of one step's sequences as arrays: proposals are merged, the trees cut, and their nodes judged.

Every sequence has a row of nodes; node 0 is its root. Drafters' proposals are merged one drafter after the other; then all trees
are cut at once to the set of nodes with the most expected tokens a second (`ragspec.drafting.cost_model`). When the target has
decided, every proposed node whose parent is right is judged, whether it took a row or not.

    >>> trees = StepTrees([7, 9], trusts=np.ones((2, 2)))
    >>> trees.merge(0, proposals, drafter=1, limits=(8, 32_000, False))
    >>> trees.limit(np.array([48, 48]), is_whole); trees.cut(is_whole, own_s, seconds); trees.trees(["copy", "eagle"])
"""

import itertools
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np

from ragspec.drafting.acceptance import ACCEPTED, EXPECTED, NUM_FIGURES, NUM_HITS, NUM_NODES, Floats, Ints, Mask
from ragspec.numerics.compiled import compiled
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


@compiled(nogil=True)
def _merge(
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
            nodes[node, :NUM_GIVEN] = given[n]
            nodes[node, PARENT], nodes[node, _DEPTH], nodes[node, _DRAFTER] = parent, nodes[parent, _DEPTH] + 1, drafter
        numbers[n], probs[node] = node, max(prob, probs[node])
    return count


@compiled(nogil=True)
def _judge(
    nodes: Any, probs: Any, counts: Any, kept: Any, trusts: Any, figures: Any, tokens: Any, starts: Any, events: Any
) -> int:
    """List the proposed children of all nodes on the path of the decided tokens, and count them.

    Siblings count in order up to the right one: a later sibling's probability is given that no earlier one is right. Shapes:
    tokens int64 [T], of sequence i [starts[i], starts[i + 1]); events int64 [most, 4]: sequence, drafter, feedback, whether it is
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
            event = events[num]
            event[0], event[1], event[2], event[3] = i, drafter, nodes[i, node, FEEDBACK], is_right
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

    `counts`: nodes of each tree, `draws`: by node, how its children were drawn. Shapes: trusts float64 [B, drafters], counts
    int64 [B], figures float64 [B, drafters, figures].
    """

    def __init__(self, root_tokens: SequenceOf[int], trusts: Floats) -> None:
        count, capacity = len(root_tokens), 64
        self._nodes, self._probs = np.zeros((count, capacity, _NUM_COLUMNS), np.int64), np.zeros((count, capacity))
        self._nodes[:, 0, TOKEN], self._nodes[:, 0, PARENT], self._probs[:, 0] = root_tokens, -1, 1.0
        self._trusts, self._kept = trusts, self._probs > 0.0
        self.counts, self.figures = np.ones(count, np.int64), np.zeros((*trusts.shape, NUM_FIGURES))
        self.draws: list[dict[int, Draw]] = [{} for _ in root_tokens]
        self._given: dict[tuple[int, int], ProposalArrays] = {}

    @property
    def expected(self) -> float:
        """Accepted tokens that all nodes so far promise."""
        return float(self._probs.sum()) - len(self.counts)

    @property
    def depths(self) -> Ints:
        """Of each tree. Shape: int64 [B]."""
        depths: Ints = self._nodes[:, :, _DEPTH].max(1)
        return depths

    def uncovered(self) -> Floats:
        """How little the nodes so far cover: 1 over the tokens that a tree promises, the bonus token included. Shape: [B]."""
        uncovered: Floats = 1.0 / self._probs.sum(1)
        return uncovered

    def merge(self, tree: int, given: ProposalArrays, drafter: int, limits: tuple[int, int, bool]) -> None:
        """Add one drafter's proposals; parents precede their children. `limits`: the greatest depth, the target's vocabulary, and
        whether the tree is a chain: the first path alone.

        Below a node that is there already, probabilities are rescaled to that node's. A new sibling of other drafters' nodes gets
        the probability that they leave. A node that is too deep, no token of the target or without a probability is left out with
        all nodes below it.
        """
        if not len(given):
            return
        if (needed := int(self.counts[tree]) + len(given)) > self._probs.shape[1]:
            more = ((0, 0), (0, needed))
            self._nodes, self._probs = np.pad(self._nodes, (*more, (0, 0))), np.pad(self._probs, more)
        own, own_probs, numbers = self._nodes[tree], self._probs[tree], np.empty(len(given), np.int64)
        trust, proposed = self._trusts[tree, drafter], (given.nodes, given.probs)
        self.counts[tree] = _merge(own, own_probs, self.counts[tree], drafter, trust, proposed, limits, numbers)
        parents = set(own[1 : self.counts[tree], PARENT].tolist()) if given.draws else set()
        for at, draw in given.draws.items():
            above = given.nodes[at, PARENT]
            parent = 0 if above < 0 else int(numbers[above])
            if parent in parents or (parent >= 0 and not limits[2]):
                self.draws[tree][parent] = draw
        self._given[tree, drafter] = given

    def whole(self, tree: int) -> DraftTree:
        """All nodes so far, without origins."""
        nodes = self._nodes[tree, : self.counts[tree]].T.tolist()
        found = DraftTree(nodes[TOKEN][0])
        found.token_ids, found.parents, found.depths = nodes[TOKEN], nodes[PARENT], nodes[_DEPTH]
        return found

    def drop(self, tree: int) -> None:
        """Leave the root alone."""
        self.counts[tree], self.draws[tree] = 1, {}
        self._nodes[tree, 1:] = self._probs[tree, 1:] = 0

    def limit(self, most: Ints) -> None:
        """Keep of each tree at most so many of its most probable nodes; of equal nodes the first ones. Shape: int64 [B]."""
        places = np.arange(self._probs.shape[1])
        self._kept = places < self.counts[:, None]
        if (self.counts - 1 > most).any():
            order = np.argsort(np.where(self._kept, -self._probs, np.inf), axis=1, kind="stable")
            ranks = np.empty_like(order)
            np.put_along_axis(ranks, order, places[None], axis=1)
            self._kept &= ranks <= most[:, None]

    def cut(self, is_whole: Mask, own_s: float, seconds: Floats) -> None:
        """Keep the best set of the limited nodes: as many as `seconds` has at most, the step's with 0, 1, ... nodes.

        `is_whole`: trees of which no node is left out for what it costs. `own_s`: seconds of the other sequences' own tokens.
        Shapes: is_whole bool [B], seconds float64 [most nodes + 1].
        """
        owners, places = np.nonzero(self._kept & ~is_whole[:, None])
        owners, places = owners[places > 0], places[places > 0]
        num_whole = int(self._kept[is_whole, 1:].sum())
        probs = self._probs[owners, places]
        order = np.argsort(-probs, kind="stable")
        spent = own_s + seconds[num_whole : num_whole + len(order) + 1] - seconds[num_whole]
        own = np.count_nonzero(~is_whole)
        expected = own + np.cumsum(probs[order[: len(spent) - 1]])
        best = int(np.argmax(np.concatenate([[own], expected]) / spent))
        self._kept[owners[order[best:]], places[order[best:]]] = False

    def trees(self, drafters: SequenceOf[str]) -> list[DraftTree]:
        """The kept nodes."""
        numbers = np.cumsum(self._kept, axis=1) - 1
        owners, places = np.nonzero(self._kept)
        packed = self._nodes[owners, places]
        packed[:, PARENT] = np.where(places > 0, numbers[owners, packed[:, PARENT]], -1)
        columns, probs, found = packed.T.tolist(), self._probs[owners, places].tolist(), list[DraftTree]()
        ends = np.cumsum(numbers[:, -1] + 1).tolist()
        for i, (low, high) in enumerate(itertools.pairwise([0, *ends])):
            tree = DraftTree(columns[TOKEN][low])
            tree.token_ids, tree.parents = columns[TOKEN][low:high], columns[PARENT][low:high]
            tree.depths, tree.path_probs = columns[_DEPTH][low:high], probs[low:high]
            origins = zip(*(columns[c][low + 1 : high] for c in (_DRAFTER, SOURCE, OFFSET)), strict=True)
            tree.origins += [Origin(drafters[drafter], source, offset) for drafter, source, offset in origins]
            draws = self.draws[i].items() if high > low + 1 else ()
            tree.draws = {int(numbers[i, node]): draw for node, draw in draws if self._kept[i, node]}
            found.append(tree)
        return found

    def judge(self, tokens: SequenceOf[SequenceOf[int]]) -> Iterator[tuple[int, ProposalArrays, Ints, Ints]]:
        """Judge the proposed nodes by the decided tokens of each sequence, and add to `figures`.

        Yields for each sequence and drafter the drafter, its proposals, the feedback columns of its judged nodes, and 1 or 0 for
        right or wrong.
        """
        starts = np.cumsum([0, *map(len, tokens)])
        flat = np.fromiter(itertools.chain.from_iterable(tokens), np.int64, starts[-1])
        events = np.empty((int(self.counts.sum()), 4), np.int64)
        arrays = self._nodes, self._probs, self.counts, self._kept, self._trusts, self.figures
        events = events[: _judge(*arrays, flat, starts, events)]
        bounds = np.searchsorted(events[:, 0], np.arange(len(self.counts) + 1))
        for (tree, drafter), given in self._given.items():
            own = events[bounds[tree] : bounds[tree + 1]]
            own = own[own[:, 1] == drafter]
            if len(own):
                yield drafter, given, own[:, 2], own[:, 3]


def compile_trees() -> None:
    """Compile now, or read from disk, for the first answer would otherwise wait."""
    trees = StepTrees([0], np.ones((1, 1)))
    trees.merge(0, ProposalArrays.of("any", [Proposal(1, -1, 0.5, Origin("any"))]), 0, (1, 2, False))
    list(trees.judge([[1]]))

"""A draft: guesses of what comes next, as a tree.

Node 0, the root, is the last token already decided; it is not a guess. Every other node names its parent, which has a lower
number, so a loop over nodes in order meets parents first. Siblings hold different tokens: adding a token twice under one
parent gives the same node, so drafts of several drafters merge into one tree.

    >>> tree = DraftTree(root_token=7)
    >>> tree.add(parent=0, token_id=3, path_prob=0.5, origin=Origin("copy"))
    1
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Origin(NamedTuple):
    """Who guessed: the drafter, and for copies where the text came from. `feedback` is the drafter's own note to itself."""

    drafter: str
    source: int = -1
    offset: int = -1
    feedback: object = None


class Draw(NamedTuple):
    """How the children of one node were chosen, in draw order; repeated draws are repeated.

    `draft_probs`: what the tokens were really drawn from; None: chosen without chance. Shape: float64 [V].

    A drawn token stays listed when its node is not in the tree (pruned, too deep): accepted, it is the step's last token. To drop
    it would shift the law of the draws, and with it that of the output. So would a node left out for what was drawn below it.
    """

    tokens: tuple[int, ...]
    draft_probs: NDArray[np.float64] | None = None
    with_replacement: bool = True


class Proposal(NamedTuple):
    """One guessed node. `parent` counts within the drafter's own list, -1 is the root; `path_prob` is the estimated
    probability that the whole path down to this node is accepted, at most its parent's. `draw`: how it and its siblings were
    drawn, if by chance."""

    token_id: int
    parent: int
    path_prob: float
    origin: Origin
    draw: Draw | None = None


class DraftTree:
    """Token ids, parents, depths, path probabilities and origins of N nodes, the root included."""

    __slots__ = ("_children", "depths", "draws", "origins", "parents", "path_probs", "shared", "token_ids")

    def __init__(self, root_token: int) -> None:
        self.token_ids = [root_token]
        self.parents = [-1]
        self.depths = [0]
        self.path_probs = [1.0]
        self.origins = [Origin("root")]
        self.shared = [False]  # whether more than one drafter guessed the node
        self.draws: dict[int, Draw] = {}
        """How the children of a node were drawn; those of other nodes were chosen without chance."""
        self._children: list[dict[int, int]] = [{}]

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_drafted(self) -> int:
        return len(self.token_ids) - 1

    def child(self, node: int, token_id: int) -> int | None:
        """The child of `node` that holds `token_id`, if any."""
        return self._children[node].get(token_id)

    def add(self, parent: int, token_id: int, path_prob: float, origin: Origin) -> int:
        """Add a node, or meet the one that is there; returns its number. The more probable guess keeps the origin."""
        path_prob = min(path_prob, self.path_probs[parent])
        present = self._children[parent].get(token_id)
        if present is not None:
            if path_prob > self.path_probs[present]:
                self.path_probs[present], self.origins[present] = path_prob, origin
            return present
        node = len(self.token_ids)
        self.token_ids.append(token_id)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.path_probs.append(path_prob)
        self.origins.append(origin)
        self.shared.append(False)
        self._children.append({})
        self._children[parent][token_id] = node
        return node

    def merge(self, proposals: Iterable[Proposal], max_depth: int = 2**31, vocab_size: int = 2**31) -> None:
        """Add one drafter's list; its parents precede their children.

        Below a node that others guessed too, what the list says is taken relative to its own parent. Beside children that others
        guessed, a new one gets what they leave: one of them may be right. What is too deep, no token of the target or without a
        probability is left out, and all below it.
        """
        first_new = len(self)
        numbers: list[int | None] = []
        factors: list[float] = []  # by which a proposal's probability was changed, and with it those below
        proposals = list(proposals)
        for proposal in proposals:
            token_id, above, given, origin, draw = proposal
            parent = 0 if above < 0 else numbers[above]
            usable = 0 <= token_id < vocab_size and given >= 0.0
            if parent is not None and draw is not None:
                self.draws[parent] = draw
            if parent is None or self.depths[parent] >= max_depth or not usable:
                numbers.append(None)
                factors.append(1.0)
                continue
            factor = factors[above] if above >= 0 else 1.0
            if 0 < parent < first_new:
                factor = self._below(parent, given, proposals[above].path_prob) / given if given else 1.0
            present = self._children[parent].get(token_id, first_new)
            if present < first_new:
                self.shared[present] = True
            else:
                factor *= self._left_by_others(parent, first_new)
            factors.append(factor)
            numbers.append(self.add(parent, token_id, given * factor, origin))

    def _below(self, parent: int, path_prob: float, given: float) -> float:
        """A path probability below this tree's `parent`, whose own was `given` in the list."""
        return min(1.0, path_prob / given) * self.path_probs[parent] if given > 0.0 else path_prob

    def _left_by_others(self, parent: int, first_new: int) -> float:
        if parent >= first_new:
            return 1.0
        taken = sum(self.path_probs[child] for child in self._children[parent].values() if child < first_new)
        return max(0.0, 1.0 - taken / self.path_probs[parent]) if taken else 1.0

    def best(self, num_nodes: int) -> DraftTree:
        """The root and the `num_nodes` most probable nodes; ties to the lower number. Parents stay with their children."""
        if num_nodes >= self.num_drafted:
            return self
        order = sorted(range(1, len(self)), key=lambda node: (-self.path_probs[node], node))[:num_nodes]
        kept = DraftTree(self.token_ids[0])
        numbers = {0: 0}
        for node in sorted(order):
            parent = numbers.get(self.parents[node])
            if parent is not None:
                numbers[node] = kept.add(parent, self.token_ids[node], self.path_probs[node], self.origins[node])
                kept.shared[numbers[node]] = self.shared[node]
        kept.draws = {numbers[node]: draw for node, draw in self.draws.items() if node in numbers}
        return kept

    def first_path(self) -> DraftTree:
        """The root, its first child, that one's first child, and so on."""
        chain, node = DraftTree(self.token_ids[0]), 0
        while self._children[node]:
            child = next(iter(self._children[node].values()))
            number = chain.add(len(chain) - 1, self.token_ids[child], self.path_probs[child], self.origins[child])
            chain.shared[number] = self.shared[child]
            if node in self.draws:
                chain.draws[number - 1] = self.draws[node]
            node = child
        return chain

    def scale(self, factors: Mapping[str, float]) -> None:
        """Multiply every guess's probability by its drafter's factor, or by the least one on the way to it."""
        least = [1.0]
        for node in range(1, len(self)):
            least.append(min(least[self.parents[node]], factors.get(self.origins[node].drafter, 1.0)))
            self.path_probs[node] *= least[node]

    def children(self, node: int) -> list[int]:
        """In the order in which they were added."""
        return list(self._children[node].values())

    def ancestors(self, node: int) -> list[int]:
        """The path from the root down to `node`, both included."""
        path = [node]
        while path[-1] != 0:
            path.append(self.parents[path[-1]])
        return path[::-1]


class StepResult(NamedTuple):
    """What one step decided for one sequence.

    `accepted`: the accepted nodes below the root, top down. `token_ids`: the tokens added to the output, one for each accepted
    node and the bonus token; fewer where the output ends inside an accepted run.
    """

    tree: DraftTree | None
    accepted: list[int]
    token_ids: list[int]

    @property
    def path(self) -> list[int]:
        """The accepted nodes whose tokens are in the output."""
        return self.accepted[: len(self.token_ids)]


UNDECIDED = StepResult(None, [], [])
"""A chunk of a prompt was computed and no token decided."""

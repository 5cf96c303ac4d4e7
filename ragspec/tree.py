"""Draft trees: proposed tokens after the last decided token.

Node 0, the root, is the last decided token and not proposed. Every other node names its parent, which has a lower number, so a
loop over nodes meets parents first. Siblings hold different tokens: adding a token twice under one parent gives the same node, so
the drafts of several drafters merge into one tree.

    >>> tree = DraftTree(root_token=7)
    >>> tree.add(parent=0, token_id=3, path_prob=0.5, origin=Origin("copy"))
    1
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Origin(NamedTuple):
    """The drafter of a node; of a copied node also source and character offset. The drafter's `learn` gets `feedback` back."""

    drafter: str
    source: int = -1
    offset: int = -1
    feedback: object = None


class DeviceProbs(Protocol):
    """A row of probabilities on a device, with the array operations that the published acceptance rules use."""

    shape: tuple[int, ...]

    def __len__(self) -> int: ...

    def __getitem__(self, token_id: int) -> float: ...

    def __setitem__(self, token_id: int, prob: float) -> None: ...

    def __rmul__(self, factor: float) -> DeviceProbs: ...

    def __truediv__(self, divisor: float) -> DeviceProbs: ...

    def __sub__(self, other: Any) -> DeviceProbs: ...

    def clip(self, least: float) -> DeviceProbs: ...

    def copy(self) -> DeviceProbs: ...

    def sum(self) -> float: ...

    def min(self) -> float: ...

    def max(self) -> float: ...

    def entropy_nats(self) -> float: ...

    def rank(self, token_id: int) -> int:
        """How many tokens are more probable, or as probable with a lower id."""

    def index_at(self, share: float) -> int:
        """The token where the running sum passes this share of the whole."""


Probs = NDArray[np.float64] | DeviceProbs
"""A token's probabilities over the vocabulary. Shape: float64 [V]."""


class Draw(NamedTuple):
    """How the children of one node were drawn, in draw order; a token drawn twice is listed twice.

    `draft_probs`: the distribution that the tokens were drawn from; None: chosen deterministically. Shape: float64 [V].

    A drawn token stays listed when its node is not in the tree (pruned, too deep); if accepted, it is the step's last token.
    Leaving it out would change the distribution of the draws and so of the output.
    """

    tokens: tuple[int, ...]
    draft_probs: Probs | None = None
    with_replacement: bool = True


class Proposal(NamedTuple):
    """One proposed node. `parent`: index in the drafter's own list, -1 for the root. `path_prob`: the estimated probability that
    the whole path down to this node is accepted, at most the parent's. `draw`: how the node and its siblings were drawn."""

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
        self.shared = [False]  # whether several drafters proposed the node
        self.draws: dict[int, Draw] = {}
        """By node, how its children were drawn; all other children were chosen deterministically."""
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
        """Add a node, or find the same node; returns its number. The origin of the more probable proposal is kept."""
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
        """Add one drafter's proposals; parents precede their children.

        Below a node that other drafters proposed too, probabilities are rescaled to that node's. A new sibling of other drafters'
        nodes gets the probability that they leave. A node that is too deep, no token of the target or without a probability is
        left out with all nodes below it.
        """
        first_new = len(self)
        numbers: list[int | None] = []
        factors: list[float] = []  # of each proposal's probability, and of those below it
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
        """A path probability rescaled to this tree's `parent`, whose probability in the list is `given`."""
        return min(1.0, path_prob / given) * self.path_probs[parent] if given > 0.0 else path_prob

    def _left_by_others(self, parent: int, first_new: int) -> float:
        if parent >= first_new:
            return 1.0
        taken = sum(self.path_probs[child] for child in self._children[parent].values() if child < first_new)
        return max(0.0, 1.0 - taken / self.path_probs[parent]) if taken else 1.0

    def best(self, num_nodes: int, besides: Container[int] = ()) -> DraftTree:
        """The root, the nodes `besides` and the `num_nodes` most probable others; ties to the lower number.

        Parents stay with their children where `besides` holds the parents of its nodes.
        """
        if num_nodes >= self.num_drafted:
            return self
        others = [node for node in range(1, len(self)) if node not in besides]
        ranked = sorted(others, key=lambda node: (-self.path_probs[node], node))
        dropped = frozenset(ranked[num_nodes:])
        return self._subtree(node for node in range(1, len(self)) if node not in dropped)

    def likeliest_path(self) -> list[int]:
        """The nodes, without the root, of the path with the most expected tokens; of equal paths the one added first."""
        expected = self.path_probs.copy()  # from the node on, down its best child
        best_child = [0] * len(self)
        for node in range(len(self) - 1, 0, -1):
            parent = self.parents[node]
            through = self.path_probs[parent] + expected[node]
            if through >= expected[parent]:
                expected[parent], best_child[parent] = through, node
        path = [0]
        while best_child[path[-1]]:
            path.append(best_child[path[-1]])
        return path[1:]

    def first_path(self) -> DraftTree:
        """The root, its first child, the first child of that child, and so on."""
        path = [0]
        while self._children[path[-1]]:
            path.append(next(iter(self._children[path[-1]].values())))
        chain = self._subtree(path[1:])
        chain.draws.pop(len(chain) - 1, None)  # no child of the last node is in the chain
        return chain

    def _subtree(self, nodes: Iterable[int]) -> DraftTree:
        """The root and these nodes, in rising order; a node without its parent is left out."""
        kept = DraftTree(self.token_ids[0])
        numbers = {0: 0}
        for node in nodes:
            parent = numbers.get(self.parents[node])
            if parent is not None:
                numbers[node] = kept.add(parent, self.token_ids[node], self.path_probs[node], self.origins[node])
                kept.shared[numbers[node]] = self.shared[node]
        kept.draws = {numbers[node]: draw for node, draw in self.draws.items() if node in numbers}
        return kept

    def scale(self, factors: Mapping[str, float]) -> None:
        """Multiply every node's probability by the least factor of the drafters on its path."""
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

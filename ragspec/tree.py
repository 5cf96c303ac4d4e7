"""Draft trees: proposed tokens after the last decided token.

Node 0, the root, is the last decided token and not proposed. Every other node names its parent, which has a lower number, so a
loop over nodes meets parents first. Siblings hold different tokens, so the drafts of several drafters merge into one tree
(`ragspec.drafting.step_trees`).

    >>> DraftTree(root_token=7).child(0, token_id=3) is None
    True
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Origin(NamedTuple):
    """The drafter of a node; of a copied node also source and character offset. The drafter's `learn` gets `feedback` back."""

    drafter: str
    source: int = -1
    offset: int = -1
    feedback: object = None


_ROOT = Origin("root")


class Draw(NamedTuple):
    """How the children of one node were drawn, in draw order; a token drawn twice is listed twice.

    `draft_probs`: the distribution that the tokens were drawn from, as the `Probs` of ragspec.numerics.torch.sampling; None:
    chosen deterministically.

    A drawn token stays listed when its node is not in the tree (pruned, too deep); if accepted, it is the step's last token.
    Leaving it out would change the distribution of the draws and so of the output.
    """

    tokens: tuple[int, ...]
    draft_probs: Any = None
    with_replacement: bool = True


class Proposal(NamedTuple):
    """One proposed node. `parent`: index in the drafter's own list, -1 for the root. `path_prob`: the estimated probability that
    the whole path down to this node is accepted, at most the parent's. `draw`: how the node and its siblings were drawn."""

    token_id: int
    parent: int
    path_prob: float
    origin: Origin
    draw: Draw | None = None


TOKEN, PARENT, SOURCE, OFFSET, FEEDBACK, NUM_GIVEN = range(6)
"""Columns of proposals as arrays."""


class Proposals(SequenceOf[SequenceOf[Proposal]]):
    """One drafter's proposals for B sequences. Shapes: nodes int64 [P, columns], probs float64 [P], starts int64 [B + 1].

    Sequence i has the nodes [starts[i], starts[i + 1]); parents count from its first. `feedback` makes of a sequence's number and
    a node's column, or of arrays of both, the feedback that the drafter gets back. `draws`: by node, how it and its siblings were
    drawn.
    """

    def __init__(
        self,
        drafter: str,
        nodes: NDArray[np.int64],
        probs: NDArray[np.float64],
        starts: NDArray[np.int64],
        feedback: Callable[[Any, Any], object],
        draws: Mapping[int, Draw] | None = None,
    ) -> None:
        self.drafter, self.nodes, self.probs, self.starts = drafter, nodes, probs, starts
        self.feedback, self.draws, self.in_arrays = feedback, draws or {}, draws is None

    @classmethod
    def of(cls, drafter: str, lists: SequenceOf[SequenceOf[Proposal]]) -> Proposals:
        """Raises: TypeError, ValueError, OverflowError for anything but proposals."""
        rows, feedback, flat = list[tuple[int, ...]](), list[object](), [own for given in lists for own in given]
        for proposal in flat:
            if not (isinstance(proposal, Proposal) and isinstance(proposal.origin, Origin)):
                raise TypeError(f"{drafter} proposed {type(proposal).__name__}, which is no proposal")
            token_id, parent, _, (_, source, offset, own), _ = proposal
            if not all(isinstance(number, int | np.integer) for number in (token_id, parent, source, offset)):
                raise TypeError(f"{drafter} proposed a node whose token, parent or origin is no whole number")
            rows.append((token_id, parent, source, offset, len(rows)))
            feedback.append(own)
        draws = {at: proposal.draw for at, proposal in enumerate(flat) if proposal.draw is not None}
        nodes = np.array(rows, np.int64).reshape(-1, NUM_GIVEN)
        probs = np.array([proposal.path_prob for proposal in flat], np.float64)
        starts = np.cumsum([0, *map(len, lists)], dtype=np.int64)
        return cls(drafter, nodes, probs, starts, lambda _, column: feedback[column], draws)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, at: Any) -> Any:
        proposals = list[Proposal]()
        for node in range(self.starts[at], self.starts[at + 1]):
            token_id, parent, source, offset, column = self.nodes[node].tolist()
            origin = Origin(self.drafter, source, offset, self.feedback(at, column))
            proposals.append(Proposal(token_id, parent, float(self.probs[node]), origin, self.draws.get(node)))
        return proposals


class DraftTree:
    """Token ids, parents, depths, path probabilities and origins of N nodes, the root included.

    `read_origins`: reads the origins of all other nodes, which few readers need.
    """

    def __init__(self, root_token: int, read_origins: Callable[[], list[Origin]] = list) -> None:
        self.token_ids = [root_token]
        self.parents = [-1]
        self.depths = [0]
        self.path_probs = [1.0]
        self.draws: dict[int, Draw] = {}
        """By node, how its children were drawn; all other children were chosen deterministically."""
        self._read_origins = read_origins

    @functools.cached_property
    def origins(self) -> list[Origin]:
        return [_ROOT, *self._read_origins()]

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_drafted(self) -> int:
        return len(self.token_ids) - 1

    def child(self, node: int, token_id: int) -> int | None:
        """The child of `node` that holds `token_id`, if any."""
        return next((child for child in self.children(node) if self.token_ids[child] == token_id), None)

    def children(self, node: int) -> list[int]:
        """In the order in which they were added."""
        return [child for child in range(node + 1, len(self)) if self.parents[child] == node]

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

"""One sequence's draft while it grows level by level: its proposals and its open nodes."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ragspec.drafting.acceptance import ChildAcceptance, Guess
from ragspec.drafting.drafter import SequenceView
from ragspec.drafting.growing.shapes import Branch, TreeShape
from ragspec.drafting.stochastic_drafts import ChildSampler, DrawnChildren
from ragspec.tree import Draw, Origin, Proposal

Ints = NDArray[np.int32]

GREEDY, WITH_NOISE, WITHOUT_NOISE, DRAWN = range(4)


class DraftMemory(Protocol):
    """What a drafter knows of one sequence. `end`: the position after the last token that its network may read."""

    @property
    def end(self) -> int: ...


class OpenNode(NamedTuple):
    """A node whose children come next. `number`: index in the proposals, -1 for the root; `row`: its parent's row of logits.

    `path`: indices in the draft's own slots of the ancestors' keys and of its own key, which is last.
    """

    number: int
    token_id: int
    branch: Branch
    row: int
    path: tuple[int, ...]


class OpenRows(NamedTuple):
    """The open nodes of all drafts as the rows of the next forward.

    `paths[b]`: of draft b's nodes, all of `depth` indices in its scratch. `path_slots`: on a device the slots of all paths, which
    the host does not know. Shapes: token_ids [N]; above [N], each node's row of the level above, or each row once where nodes
    share it.
    """

    token_ids: Ints | Tensor
    above: Ints | Tensor
    paths: list[list[tuple[int, ...]]]
    depth: int
    path_slots: Tensor | None = None


class GrowingDraft:
    """Starts as the root alone and grows to at most `max_depth` levels. `scratch`: slots for the keys of its nodes."""

    def __init__(self, sequence: SequenceView, memory: DraftMemory, settings: DraftSettings, num_levels: int) -> None:
        self.sequence, self.memory, self.settings = sequence, memory, settings
        self.max_depth = min(settings.shape.max_depth, sequence.most_tokens - 1, num_levels)
        self.proposals: list[Proposal] = []
        self.open: list[OpenNode] = [OpenNode(-1, sequence.tokens[-1], Branch((), 1.0), 0, ())]
        self.sampler: ChildSampler | None = None
        """Draws children by chance, from one random stream for the whole draft."""
        self._num_keys = 0
        self.scratch: Ints = np.empty(0, np.int32)

    @property
    def num_nodes(self) -> int:
        """The most nodes that get children."""
        return max(0, self.max_depth - 1) * self.settings.shape.max_width

    def extend(
        self,
        columns: NDArray[np.int64],
        scores: NDArray[np.float64],
        tokens: NDArray[np.int64],
        chosen: set[int] | None = None,
    ) -> list[OpenNode]:
        """Propose the children of the open nodes; returns the children that the tree shape lets go on.

        `chosen`: these children, as a device chose them by the tree shape: each is row * k + rank.
        Shapes: one row an open node: columns [N, k] with -1 for none, scores [N, k], tokens [N, k].
        """
        behind = scores[:, :1] - scores
        if behind.shape[1] > 1:
            behind[:, 0] = behind[:, 1]
        counts = (columns >= 0).sum(1).tolist()
        rows = zip(self.open, counts, tokens.tolist(), behind.tolist(), scores.tolist(), strict=True)
        by_confidence, children = self.settings.shape.num_nodes is not None, list[OpenNode]()
        for row, (node, count, token_ids, margins, log_probs) in enumerate(rows):
            own = log_probs if by_confidence else None
            children += self._propose(node, row, token_ids[:count], margins, log_probs=own)
        if chosen is None:
            return self._further(children)
        further = [node for node in children if node.row * columns.shape[1] + node.branch.ranks[-1] in chosen]
        assert len(further) == len(chosen), "the device lets a node go on that is not proposed"
        return further

    def extend_drawn(self, drawn: list[DrawnChildren]) -> list[OpenNode]:
        """As `extend`, with children drawn by chance: none is left out."""
        children: list[OpenNode] = []
        for row, (node, (draw, token_ids, log_probs)) in enumerate(zip(self.open, drawn, strict=True)):
            behind = [max(0.0, log_probs[0] - log_prob) for log_prob in log_probs]
            children += self._propose(node, row, token_ids, behind, draw=draw)
        return self._further(children)

    def _propose(
        self,
        node: OpenNode,
        row: int,
        token_ids: list[int],
        behind: list[float],
        log_probs: list[float] | None = None,
        draw: Draw | None = None,
    ) -> list[OpenNode]:
        """Propose children of one node, the best first. `behind`: score differences to the best child, for the best its lead.
        `log_probs`: of each, by the head; None: learned acceptance counts.
        """
        settings, left = self.settings, 1.0
        children: list[OpenNode] = []
        for rank, token in enumerate(token_ids):
            ranks = (*node.branch.ranks, rank)
            if not settings.shape.takes(ranks):
                break
            cell = settings.acceptance.cell(settings.mode, len(ranks), rank, behind[rank])
            chance = settings.acceptance.probability(cell)
            path_prob = node.branch.path_prob * (math.exp(log_probs[rank]) if log_probs else left * chance)
            left *= 1.0 - chance
            if path_prob < settings.least_prob and draw is None:
                continue
            origin = Origin(settings.name, feedback=Guess(settings.acceptance, cell))
            self.proposals.append(Proposal(token, node.number, path_prob, origin, draw))
            children.append(OpenNode(len(self.proposals) - 1, token, Branch(ranks, path_prob), row, node.path))
        settings.acceptance.note_children(1.0 - left, node.branch.path_prob)
        return children

    def _further(self, children: list[OpenNode]) -> list[OpenNode]:
        return [children[i] for i in self.settings.shape.frontier([child.branch for child in children])]

    def best(self) -> list[Proposal]:
        """The proposals; of a shape with a number of nodes the most probable. Parents, which are no less probable, come first.

        Of nodes drawn by chance none may be left out.
        """
        num_nodes = self.settings.shape.num_nodes
        if num_nodes is None or self.settings.mode == DRAWN:
            return self.proposals
        order = sorted(range(len(self.proposals)), key=lambda i: (-self.proposals[i].path_prob, i))
        place = {-1: -1} | {old: new for new, old in enumerate(sorted(order[:num_nodes]))}
        return [self.proposals[i]._replace(parent=place[self.proposals[i].parent]) for i in list(place)[1:]]

    def descend(self, chosen: list[OpenNode]) -> None:
        """Make these nodes the next level; each gets a slot for its keys."""
        indices = range(self._num_keys, self._num_keys + len(chosen))  # each level has room of its own
        self.open = [node._replace(path=(*node.path, at)) for node, at in zip(chosen, indices, strict=True)]
        self._num_keys += self.settings.shape.max_width


class DraftSettings(NamedTuple):
    """Settings of a drafter's drafts. `mode`: how children are chosen."""

    name: str
    shape: TreeShape
    acceptance: ChildAcceptance
    least_prob: float
    mode: int = GREEDY

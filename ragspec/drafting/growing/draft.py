"""One sequence's draft while it grows level by level: its proposals and its open nodes."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ragspec.drafting.acceptance import ChildAcceptance, Guess
from ragspec.drafting.children import ChildSampler, DrawnChildren
from ragspec.drafting.drafter import SequenceView
from ragspec.drafting.growing.shapes import TreeShape
from ragspec.tree import Origin, Proposal

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
    path_prob: float
    row: int
    path: tuple[int, ...]


class Children(NamedTuple):
    """The children of one draft's open nodes, a row a node, the best first.

    `rejections`: the probability that no child of a node is accepted. `places`: of the children that go on, row * k + rank.
    Shapes: columns int64 [N, k], of the draft vocabulary, -1 where no child is proposed; cells of acceptance int64 [N, k];
    path_probs float64 [N, k]; rejections float64 [N]; finite bool [N], whether all logits are finite.
    """

    columns: NDArray[np.int64]
    cells: NDArray[np.int64]
    path_probs: NDArray[np.float64]
    rejections: NDArray[np.float64]
    finite: NDArray[np.bool_]
    places: list[int]

    @classmethod
    def of(cls, rows: NDArray[np.float64], places: NDArray[Any]) -> Children:
        """Shapes: [N, 3 k + 2]; [W], -1 behind the last."""
        count = rows.shape[1] // 3
        columns, cells = rows[:, :count].astype(np.int64), rows[:, count : 2 * count].astype(np.int64)
        path_probs, rejections, finite = rows[:, 2 * count : 3 * count], rows[:, -2], rows[:, -1] > 0.0
        return cls(columns, cells, path_probs, rejections, finite, [int(at) for at in places.tolist() if at >= 0.0])


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
        self.open: list[OpenNode] = [OpenNode(-1, sequence.tokens[-1], 1.0, 0, ())]
        self.sampler: ChildSampler | None = None
        """Draws children by chance, from one random stream for the whole draft."""
        self.drawn: list[DrawnChildren] = []
        """The drawn children of each open node."""
        self._num_keys = 0
        self.scratch: Ints = np.empty(0, np.int32)

    @property
    def num_nodes(self) -> int:
        """The most nodes that get children."""
        return max(0, self.max_depth - 1) * self.settings.shape.max_width

    def extend(self, children: Children, draft_ids: NDArray[np.int64]) -> list[OpenNode]:
        """Propose the children of the open nodes; returns the children that go on. Shape: draft_ids int64 [Vd]."""
        settings, count = self.settings, children.columns.shape[1]
        numbers: dict[int, int] = {}  # place -> index in the proposals
        path_probs, tokens = children.path_probs.tolist(), draft_ids[children.columns].tolist()
        for row, (node, cells) in enumerate(zip(self.open, children.cells.tolist(), strict=True)):
            draw, token_ids = None, tokens[row]
            if self.drawn:
                draw, token_ids, _ = self.drawn[row]
            for rank in np.flatnonzero(children.columns[row] >= 0).tolist():
                numbers[row * count + rank] = len(self.proposals)
                origin = Origin(settings.name, feedback=Guess(settings.acceptance, cells[rank]))
                self.proposals.append(Proposal(token_ids[rank], node.number, path_probs[row][rank], origin, draw))
            settings.acceptance.note_children(1.0 - float(children.rejections[row]), node.path_prob)
        further: list[OpenNode] = []
        for place in children.places:
            row, number = place // count, numbers[place]
            proposal = self.proposals[number]
            further.append(OpenNode(number, proposal.token_id, proposal.path_prob, row, self.open[row].path))
        return further

    def best(self) -> list[Proposal]:
        """The proposals; of a shape with a number of nodes the most probable. Parents, which are no less probable, come first.

        Of nodes drawn by chance none may be left out.
        """
        if not self.settings.by_confidence:
            return self.proposals
        order = sorted(range(len(self.proposals)), key=lambda i: (-self.proposals[i].path_prob, i))
        place = {-1: -1} | {old: new for new, old in enumerate(sorted(order[: self.settings.shape.num_nodes]))}
        return [self.proposals[i]._replace(parent=place[self.proposals[i].parent]) for i in list(place)[1:]]

    def descend(self, chosen: list[OpenNode]) -> None:
        """Make these nodes the next level; each gets a slot for its keys."""
        indices = range(self._num_keys, self._num_keys + len(chosen))  # each level has room of its own
        self.open = [node._replace(path=(*node.path, at)) for node, at in zip(chosen, indices, strict=True)]
        self._num_keys += self.settings.shape.max_width


class DraftSettings(NamedTuple):
    """Settings of a drafter's drafts. `mode`: how children are chosen. `is_chain`: only the best child is proposed, without
    branches. `least_prob`: of a path that is proposed."""

    name: str
    shape: TreeShape
    acceptance: ChildAcceptance
    least_prob: float
    mode: int = GREEDY
    is_chain: bool = False

    @property
    def width(self) -> int:
        """The most nodes of a level that are drafted further."""
        return 1 if self.is_chain else self.shape.max_width

    @property
    def by_confidence(self) -> bool:
        """Whether paths have the drafter's own probabilities, in the place of learned acceptance."""
        return self.shape.num_nodes is not None and not self.is_chain and self.mode != DRAWN

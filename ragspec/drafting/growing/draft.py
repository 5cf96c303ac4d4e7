"""One sequence's draft while it grows level by level: its proposals and its open nodes; the shape of its tree; and the attention
metadata of the forwards of all drafts.

Which nodes are drafted further:

chain     the best child, and its best child: a draft without branches
static    a fixed tree, by rank: EAGLE-1's of 25 nodes, Medusa's of 63
dynamic   EAGLE-2's: of a level's children the most probable paths go on

Probabilities are the learned acceptance of nodes, ours, or the head's own, as the EAGLE-2 paper has them.

In a forward each sequence attends to a list of slots (the positions that the network has read) and has slots of its own for
nodes. Pages are collected once for a draft; a level only adds its nodes.

    >>> batch = DraftBatch(scheduled)
    >>> batch.chains()              # the metadata of the first forward; then batch.level(paths) for each level
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ragspec.drafting.acceptance import ChildAcceptance, Guess
from ragspec.drafting.children import ChildSampler, DrawnChildren
from ragspec.drafting.drafter import SequenceView
from ragspec.errors import ConfigError
from ragspec.numerics.attention import PAGE, AttentionMetadata, Ints, make_tiles
from ragspec.tree import Origin, Proposal

STATIC_TREE: tuple[tuple[int, ...], ...] = (
    *((a,) for a in range(4)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)
"""The ranks of each node's path. Source: EAGLE (arXiv 2401.15077), the published choices."""

_MEDUSA_CHILDREN: dict[tuple[int, ...], int] = {
    (): 10,
    **{(rank,): count for rank, count in enumerate((10, 7, 3, 2, 1, 1, 1, 1, 1, 1))},
    **{(0, rank): count for rank, count in enumerate((10, 3, 2, 1, 1, 1, 1, 1))},
    (1, 0): 2,
    (2, 0): 1,
    (0, 0, 0): 2,
}
"""How many children each inner node of Medusa's tree has, by the ranks of its path."""
MEDUSA_TREE = tuple((*path, rank) for path, num_children in _MEDUSA_CHILDREN.items() for rank in range(num_children))
"""63 nodes. Source: Medusa (arXiv 2401.10774), the published `mc_sim_7b_63`, which Hydra uses too."""


class TreeShape:
    """The dynamic shape: the `width` most probable nodes of each level go on, each with `num_children` children.

    `max_width`: the most nodes of one level that are drafted further. `num_children`: the most children of one node.
    `num_nodes`: the tree of the EAGLE-2 paper, the so many most probable nodes by the head's own probabilities; None: ours, by
    learned acceptance.
    """

    def __init__(self, num_children: int, width: int, max_depth: int, num_nodes: int | None = None) -> None:
        self.num_children, self.max_width, self.max_depth = num_children, width, max_depth
        self.num_nodes = num_nodes


class StaticShape(TreeShape):
    """A fixed tree, given by the ranks of every node's path.

    The root is node 0, a node outside the tree has the last number. Shapes: below int64 [nodes + 2, num_children], each node's
    children; is_inner bool [nodes + 2], whether children of a node belong to the tree.
    """

    def __init__(self, tree: Sequence[tuple[int, ...]] = STATIC_TREE) -> None:
        inner = frozenset(path[:-1] for path in tree)
        paths = [(), *sorted(tree)]
        numbers = {path: number for number, path in enumerate(paths)}
        max_depth = max(map(len, tree))
        width = max(sum(len(path) == depth for path in inner) for depth in range(1, max_depth + 1))
        super().__init__(1 + max(path[-1] for path in tree), width, max_depth)
        self.below = np.full((len(paths) + 1, self.num_children), len(paths))
        for path, number in numbers.items():
            for rank in range(self.num_children):
                if (*path, rank) not in numbers:
                    break
                self.below[number, rank] = numbers[*path, rank]
        self.is_inner = np.array([path in inner for path in paths] + [False])


def make_shape(
    name: str,
    num_children: int,
    width: int,
    max_depth: int,
    static: Sequence[tuple[int, ...]] = STATIC_TREE,
    num_nodes: int | None = None,
) -> TreeShape:
    """`static`: the tree of that name. `num_nodes`: of a dynamic tree. Raises: ConfigError for an unknown name."""
    if name == "static":
        return StaticShape(static)
    if name in ("chain", "dynamic"):
        return TreeShape(1, 1, max_depth) if name == "chain" else TreeShape(num_children, width, max_depth, num_nodes)
    raise ConfigError(f"unknown tree shape {name!r}; there are: chain, static, dynamic")


class NewRows(NamedTuple):
    """Rows of the context that the first forward computes, rising: their indices in the context, and their rotary positions."""

    indices: NDArray[np.integer[Any]]
    positions: NDArray[np.integer[Any]]


class ScheduledDraft(NamedTuple):
    """One sequence's part: `context` slots in the order of positions; `num_new` of them are computed by the first forward.

    `end`: the position after the context. `scratch`: slots for nodes. `rows`: the new rows; None: the last of the context.
    """

    context: Ints
    num_new: int
    end: int
    scratch: Ints
    rows: NewRows | None = None

    @property
    def new_rows(self) -> NewRows:
        if self.rows is not None:
            return self.rows
        num_read = len(self.context) - self.num_new
        return NewRows(np.arange(num_read, len(self.context)), np.arange(self.end - self.num_new, self.end))


class DraftBatch:
    """Several sequences. A node is given by the path to it, as indices in its sequence's `scratch`, its own index last."""

    def __init__(self, parts: Sequence[ScheduledDraft]) -> None:
        self._parts = parts
        pages = [np.unique(np.concatenate([part.context, part.scratch]) // PAGE) for part in parts]
        context_index = [_index(own, part.context) for own, part in zip(pages, parts, strict=True)]
        self._scratch_index = [_index(own, part.scratch) for own, part in zip(pages, parts, strict=True)]
        self._fixed = {
            "pages": np.concatenate(pages).astype(np.int32),
            "page_start": _starts([len(own) for own in pages]),
            "context_slots": np.concatenate([part.context for part in parts]),
            "context_index": np.concatenate(context_index),
            "context_start": _starts([len(part.context) for part in parts]),
        }

    def chains(self, rows: Sequence[NewRows] = (), is_causal: bool = True) -> AttentionMetadata:
        """Metadata of some rows of every sequence's context, the new ones unless given. Each row sees the positions before it, or
        all of the context."""
        parts, nothing = self._parts, np.empty(0, np.int32)
        rows = rows or [part.new_rows for part in parts]
        num_rows = [len(own.indices) for own in rows]
        return self._metadata(
            num_rows,
            slots=np.concatenate([part.context[own.indices] for part, own in zip(parts, rows, strict=True)]),
            positions=np.concatenate([own.positions for own in rows]),
            context_end=np.concatenate([own.indices + 1 for own in rows])
            if is_causal
            else np.repeat([len(part.context) for part in parts], num_rows),
            path_slots=nothing,
            path_index=nothing,
            path_start=np.zeros(sum(num_rows) + 1),
        )

    def level(self, paths: Sequence[Sequence[Sequence[int]]], path_slots: Tensor | None = None) -> AttentionMetadata:
        """Metadata of one level of every sequence's tree. `paths[b]`: the paths of sequence b's new nodes.

        `path_slots`: their slots on the device, where `paths` has only their number and each node's own index right.
        """
        parts = self._parts
        nodes = [(b, path) for b, own in enumerate(paths) for path in own]
        metadata = self._metadata(
            [len(own) for own in paths],
            slots=np.array([parts[b].scratch[path[-1]] for b, path in nodes]),
            positions=np.array([parts[b].end + len(path) - 1 for b, path in nodes]),
            context_end=np.array([len(parts[b].context) for b, _ in nodes]),
            path_slots=np.array([parts[b].scratch[node] for b, path in nodes for node in path]),
            path_index=np.array([self._scratch_index[b][node] for b, path in nodes for node in path]),
            path_start=_starts([len(path) for _, path in nodes]),
        )
        return metadata if path_slots is None else metadata._replace(path_slots=path_slots)

    def _metadata(self, num_rows: Sequence[int], **arrays: NDArray[Any]) -> AttentionMetadata:
        """`num_rows`: of each sequence."""
        row_start = _starts(num_rows)
        own = {name: array.astype(np.int32, copy=False) for name, array in arrays.items()}
        return AttentionMetadata(row_start=row_start, tiles=make_tiles(row_start), **own, **self._fixed)


def _index(pages: Ints, slots: Ints) -> Ints:
    """Slots as indices into the pages: rank of the page * 16 + lane."""
    return (np.searchsorted(pages, slots // PAGE) * PAGE + slots % PAGE).astype(np.int32)


def _starts(lengths: Sequence[int]) -> Ints:
    return np.fromiter(itertools.accumulate(lengths, initial=0), np.int32)


GREEDY, WITH_NOISE, WITHOUT_NOISE, DRAWN = range(4)


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
    """Starts as the root alone and grows to at most `max_depth` levels. `scratch`: slots for the keys of its nodes.

    `memory`: what the drafter knows of the sequence; its `end` is the position after the last token that the network may read.
    """

    def __init__(self, sequence: SequenceView, memory: Any, settings: DraftSettings, num_levels: int) -> None:
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

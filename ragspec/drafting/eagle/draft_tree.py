"""One sequence's draft while it grows, level by level: its proposals, and which of them are drafted further."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragspec.drafting.calibration import Calibration
from ragspec.drafting.coupling import Picks
from ragspec.drafting.drafter import Drafted
from ragspec.drafting.eagle.memory import HeadMemory, Pairs
from ragspec.drafting.eagle.shapes import Branch, TreeShape
from ragspec.drafting.stochastic_drafts import Drawing, Drawn
from ragspec.tree import Draw, Origin, Proposal

Ints = NDArray[np.int32]

GREEDY, WITH_NOISE, WITHOUT_NOISE, DRAWN = range(4)


class Open(NamedTuple):
    """A node to be drafted further. `number` in the proposals (-1: the root), `row` of the level's states that it came from.

    `path`: the places of its keys and of its ancestors' in the draft's own slots, its own last.
    """

    number: int
    token_id: int
    branch: Branch
    row: int
    path: tuple[int, ...]


class Draft:
    """Starts as the root alone, at most `max_depth` levels deep. `scratch`: slots for the keys of its nodes."""

    def __init__(self, sequence: Drafted, memory: HeadMemory, mode: int, look: Look, most_levels: int) -> None:
        self.sequence, self.memory, self.mode, self.look = sequence, memory, mode, look
        self.max_depth = min(look.shape.max_depth, sequence.most_tokens - 1, most_levels)
        self.pairs: Pairs = memory.pairs(sequence.tokens)
        self.proposals: list[Proposal] = []
        self.open: list[Open] = [Open(-1, sequence.tokens[-1], Branch((), 1.0), 0, ())]
        self.drawing: Drawing | None = None
        """Where children are drawn by chance: one stream for the whole draft."""
        self._num_keys = 0
        self.scratch: Ints = np.empty(0, np.int32)

    @property
    def num_nodes(self) -> int:
        """How many nodes may be drafted further."""
        return max(0, self.max_depth - 1) * self.look.shape.max_width

    def extend(self, picks: Picks, tokens: NDArray[np.int64]) -> list[Open]:
        """Propose the children of the open nodes; returns those that the shape would draft further.

        Shapes: one row an open node: columns [N, k] with -1 for none, scores [N, k], tokens [N, k].
        """
        behind = picks.scores[:, :1] - picks.scores
        if behind.shape[1] > 1:
            behind[:, 0] = behind[:, 1]
        counts = (picks.columns >= 0).sum(1).tolist()
        rows = zip(self.open, counts, tokens.tolist(), behind.tolist(), strict=True)
        children: list[Open] = []
        for row, (node, count, token_ids, margins) in enumerate(rows):
            children += self._propose(node, row, token_ids[:count], margins, None)
        return self._further(children)

    def extend_drawn(self, drawn: list[Drawn]) -> list[Open]:
        """As `extend`, with children that were drawn by chance: none is left out."""
        children: list[Open] = []
        for row, (node, (draw, token_ids, log_probs)) in enumerate(zip(self.open, drawn, strict=True)):
            behind = [max(0.0, log_probs[0] - log_prob) for log_prob in log_probs]
            children += self._propose(node, row, token_ids, behind, draw)
        return self._further(children)

    def _propose(
        self, node: Open, row: int, token_ids: list[int], behind: list[float], draw: Draw | None
    ) -> list[Open]:
        """Children of one node, the best first; `behind`: how far each lies behind the best, the best's lead for itself."""
        look, left = self.look, 1.0
        children: list[Open] = []
        for rank, token in enumerate(token_ids):
            ranks = (*node.branch.ranks, rank)
            if not look.shape.takes(ranks):
                break
            cell = look.calibration.cell(self.mode, len(ranks), rank, behind[rank])
            chance = look.calibration.probability(cell)
            path_prob = node.branch.path_prob * left * chance
            left *= 1.0 - chance
            if path_prob < look.least_prob and draw is None:
                continue
            self.proposals.append(Proposal(token, node.number, path_prob, Origin(look.name, feedback=cell), draw))
            children.append(Open(len(self.proposals) - 1, token, Branch(ranks, path_prob), row, node.path))
        look.calibration.note_children(1.0 - left, node.branch.path_prob)
        return children

    def _further(self, children: list[Open]) -> list[Open]:
        return [children[i] for i in self.look.shape.frontier([child.branch for child in children])]

    def descend(self, chosen: list[Open]) -> None:
        """These are the next level; each gets a place for its keys."""
        places = range(self._num_keys, self._num_keys + len(chosen))
        self.open = [node._replace(path=(*node.path, at)) for node, at in zip(chosen, places, strict=True)]
        self._num_keys += len(chosen)


class Look(NamedTuple):
    """What every draft of one drafter goes by."""

    name: str
    shape: TreeShape
    calibration: Calibration
    least_prob: float

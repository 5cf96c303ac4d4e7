"""Rows of tokens: groups of conversations that share a beginning, packed to one length.

Each conversation of a group sees the beginning and itself only, and its positions go on from the beginning: it reads as if it
were alone.

    >>> row = Row(896); row.add(map(encoder.encode, group)); batch = collate([row])
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ragspec.training.conversations import Encoded

FIRST_WEIGHT = 3.0
"""The weight of an answer's first token, which says whether the passages answer; that of all others is 1."""


class RowBatch(NamedTuple):
    """Shapes: ids, positions int64 [R, T]; mask bool [R, 1, T, T], who sees whom; targets int64 [R, T], the next token or -100;
    weights float32 [R, T], of the targets' losses.

    Padding on the right sees itself.
    """

    ids: Tensor
    positions: Tensor
    mask: Tensor
    targets: Tensor
    weights: Tensor


class Row:
    """Up to `length` tokens. `groups` and `members` say who sees whom; member 0 is the beginning of its group."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.ids: list[int] = []
        self.is_learnt: list[bool] = []
        self.groups: list[int] = []
        self.members: list[int] = []
        self.positions: list[int] = []

    @property
    def num_learnt(self) -> int:
        return sum(self.is_learnt)

    def add(self, group: Iterable[Encoded]) -> None:
        """Append a group up to its first conversation that does not fit; the rest is not even encoded."""
        kept, shared = list[Encoded](), self.length
        for each in group:
            num_prompt = each.weights.index(1.0) if 1.0 in each.weights else 0
            if num_prompt == 0:
                continue
            common = _common_prefix(kept[0].ids if kept else each.ids, each.ids)
            fewer = min(shared, common, num_prompt - 1)  # a learnt token stands behind a token of its own conversation
            if len(self.ids) + fewer + sum(len(text.ids) - fewer for text in (*kept, each)) > self.length:
                break
            kept, shared = [*kept, each], fewer
        number = self.groups[-1] + 1 if self.groups else 0
        if kept:
            self._extend(kept[0], slice(0, shared), number, 0)
        for member, each in enumerate(kept, start=1):
            self._extend(each, slice(shared, len(each.ids)), number, member)

    def _extend(self, text: Encoded, part: slice, group: int, member: int) -> None:
        count = part.stop - part.start
        self.ids += text.ids[part]
        self.is_learnt += [weight > 0 for weight in text.weights[part]]
        self.groups += [group] * count
        self.members += [member] * count
        self.positions += range(part.start, part.stop)


def _common_prefix(first: list[int], second: list[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))


def collate(rows: Sequence[Row]) -> RowBatch:
    """Pads rows to the longest of them. The target of a place is the row's next token where that is learnt."""
    length = max(len(row.ids) for row in rows)

    def padded(values: list[list[int]], fill: int) -> Tensor:
        return torch.tensor([each + [fill] * (length - len(each)) for each in values])

    ids, learnt = padded([row.ids for row in rows], 0), padded([[*map(int, row.is_learnt)] for row in rows], 0)
    group, member = padded([row.groups for row in rows], -1), padded([row.members for row in rows], 0)
    sees = (member[:, None] == 0) | (member[:, :, None] == member[:, None])  # [R, T, T]
    sees = (sees & (group[:, :, None] == group[:, None])).tril()
    targets = torch.full_like(ids, -100)
    targets[:, :-1] = torch.where(learnt[:, 1:] > 0, ids[:, 1:], -100)
    weights = torch.ones(targets.shape).masked_fill_(learnt == 0, FIRST_WEIGHT)  # a learnt token behind one that is not
    return RowBatch(ids, padded([row.positions for row in rows], 0), sees[:, None], targets, weights)

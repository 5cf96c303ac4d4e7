"""Rows of tokens: groups of conversations that share a beginning, packed to one length.

Each conversation of a group sees the beginning and itself only, and its positions go on from the beginning: it reads as if it
were alone.

    >>> row = Row(896); row.add(map(encoder.encode, group)); batch = collate([row])
"""

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from ragspec.training.conversations import Encoded

FIRST_WEIGHT = 3.0
"""The weight of an answer's first token, which says whether the passages answer; that of all others is 1."""


class RowBatch(NamedTuple):
    """`inputs`: token ids and positions int64 [R, T], and who sees whom, bool [R, 1, T, T], by the model's names.

    Shapes: targets int64 [R, T], the next token or -100; weights float32 [R, T], of the targets' losses. Padding on the right
    sees itself.
    """

    inputs: dict[str, Tensor]
    targets: Tensor
    weights: Tensor

    @property
    def num_learnt(self) -> int:
        return int((self.targets >= 0).sum())


class Token(NamedTuple):
    """`group` and `member` say who sees whom; member 0 is the beginning of its group."""

    id: int
    is_learnt: bool
    group: int
    member: int
    position: int


PADDING = Token(0, False, -1, 0, 0)


class Row:
    """Up to `length` tokens."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.tokens: list[Token] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, group: Iterable[Encoded]) -> None:
        """Append a group up to its first conversation that does not fit; the rest is not even encoded."""
        kept, shared = list[Encoded](), self.length
        for each in (text for text in group if any(text.weights) and text.weights[0] == 0):
            first = kept[0].ids if kept else each.ids
            same = takewhile(lambda pair: pair[0] == pair[1], zip(first, each.ids, strict=False))
            most = each.weights.index(1.0) - 1  # a learnt token stands behind a token of its own conversation
            fewer = min(shared, most, sum(1 for _ in same))
            if len(self.tokens) + fewer + sum(len(text.ids) - fewer for text in (*kept, each)) > self.length:
                break
            kept, shared = [*kept, each], fewer
        number = self.tokens[-1].group + 1 if self.tokens else 0
        parts = [(kept[0], 0, shared)] if kept else []
        for member, (text, start, end) in enumerate([*parts, *((text, shared, len(text.ids)) for text in kept)]):
            for at in range(start, end):
                self.tokens.append(Token(text.ids[at], text.weights[at] > 0, number, member, at))


def one_row(row: Row) -> int:
    """Steps are counted in rows."""
    return 1


def collate(rows: Sequence[Row], device: str = "cpu") -> RowBatch:
    """Pads rows to the longest of them. The target of a place is the row's next token where that is learnt."""
    length = max(len(row.tokens) for row in rows)
    padded = [row.tokens + [PADDING] * (length - len(row.tokens)) for row in rows]
    ids, learnt, group, member, positions = torch.tensor(padded, device=device).unbind(-1)  # each [R, T]
    sees = (member[:, None] == 0) | (member[:, :, None] == member[:, None])  # [R, T, T]
    sees = (sees & (group[:, :, None] == group[:, None])).tril()
    targets = torch.full_like(ids, -100)
    targets[:, :-1] = torch.where(learnt[:, 1:] > 0, ids[:, 1:], -100)
    weights = torch.where(learnt > 0, 1.0, FIRST_WEIGHT)  # a learnt token behind one that is not
    return RowBatch({"input_ids": ids, "position_ids": positions, "attention_mask": sees[:, None]}, targets, weights)

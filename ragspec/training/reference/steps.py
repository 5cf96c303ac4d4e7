"""The rows of one optimizer step, and rows as tensors.

Owns how much of a step are packs, and the padding.
"""

import itertools
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from ragspec.training.reference.guidance import Guide, Guided
from ragspec.training.reference.packs import PackStream
from ragspec.training.reference.rows import RowEncoder
from ragspec.training.reference.token_row import Row

LOOSE_SHARE = 0.37
"""Of a step's tokens, about: examples without passages to share, most of them grammar."""
FORBIDDEN = -30_000.0
MULTIPLE = 64
"""Lengths are padded to multiples, or the library of matrix products compiles a kernel for each new one (half of a step)."""


@dataclass(frozen=True)
class RowBatch:
    """Shapes: ids, places [B, T]; bias [B, T, T]; positions [M], flat indices whose next token is predicted; targets [M];
    weights [M]."""

    ids: Tensor
    places: Tensor
    bias: Tensor
    positions: Tensor
    targets: Tensor
    weights: Tensor
    guided: list[Guided]

    @property
    def num_guided(self) -> Counter[Guide]:
        """How many query rows each head is guided for."""
        counts = Counter[Guide]()
        for each in self.guided:
            counts[each.guide] += len(each.rows)
        return counts


def draw_rows(
    stream: PackStream, encoder: RowEncoder, max_tokens: int, step_tokens: int, micro_tokens: int
) -> list[RowBatch]:
    """The micro-batches of one step: about `step_tokens` tokens in rows of at most `max_tokens`."""
    rows: list[Row] = []
    num_loose = num_drawn = 0
    while num_drawn < step_tokens:
        is_loose = num_loose <= LOOSE_SHARE * num_drawn
        if is_loose:
            row = encoder.loose_row((stream.draw() for _ in itertools.count()), max_tokens, stream.rng)
        else:
            row = encoder.pack_row(stream.draw_pack(), max_tokens, stream.rng)
        if row.ids and max(row.segments) > 0:
            rows.append(row)
            num_drawn += len(row.ids)
            num_loose += len(row.ids) * is_loose
    rows.sort(key=lambda row: len(row.ids))
    groups: list[list[Row]] = [[]]
    for row in rows:
        if groups[-1] and (len(groups[-1]) + 1) * len(row.ids) > micro_tokens:
            groups.append([])
        groups[-1].append(row)
    return [as_batch(group) for group in groups]


def as_batch(rows: list[Row]) -> RowBatch:
    """Pad on the right with id 0; padding comes last, so nobody sees it."""
    length = _padded(max(len(row.ids) for row in rows))
    ids, places, segments = (torch.zeros(len(rows), length, dtype=torch.long) for _ in range(3))
    weights = torch.zeros(len(rows), length)
    guided: list[Guided] = []
    for number, row in enumerate(rows):
        size = len(row.ids)
        ids[number, :size] = torch.tensor(row.ids)
        places[number, :size] = torch.tensor(row.positions)
        segments[number, :size] = torch.tensor(row.segments)
        weights[number, :size] = torch.tensor(row.weights)
        guided += [_guided(guide, number, looks, length) for guide, looks in row.looks.items() if looks]
    next_weights = torch.zeros_like(weights)
    next_weights[:, :-1] = weights[:, 1:] * (segments[:, 1:] == segments[:, :-1])  # position t predicts token t + 1
    positions = next_weights.flatten().nonzero().squeeze(1)
    num_predicted = len(positions)
    positions = torch.nn.functional.pad(positions, (0, _padded(num_predicted) - num_predicted))
    kept = next_weights.flatten()[positions]
    kept[num_predicted:] = 0.0
    return RowBatch(ids, places, _bias(segments), positions, ids.flatten()[positions + 1], kept, guided)


def _padded(length: int) -> int:
    return -(-length // MULTIPLE) * MULTIPLE


def _guided(guide: Guide, text: int, looks: list[tuple[int, list[int]]], length: int) -> Guided:
    keys = torch.zeros(len(looks), length, dtype=torch.bool)
    for number, (_, right) in enumerate(looks):
        keys[number, right] = True
    return Guided(guide, text, torch.tensor([at for at, _ in looks]), keys)


def _bias(segments: Tensor) -> Tensor:
    """Each token sees what stands before it of its own turn and of the passages. Shape: [B, T, T], bfloat16."""
    keys, queries = segments[:, None, :], segments[:, :, None]
    forbidden = (keys != 0) & (keys != queries)
    length = segments.shape[1]
    forbidden |= torch.ones(length, length, dtype=torch.bool).triu(1)
    return torch.where(forbidden, FORBIDDEN, 0.0).to(torch.bfloat16)

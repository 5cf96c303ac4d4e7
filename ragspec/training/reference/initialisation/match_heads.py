"""Attention heads written by hand: what a head compares, and what it passes on.

A match head compares parts of the query's stream with parts of the key's through random orthonormal projections in the slowly
rotating rotary dimensions, where the distance hardly counts.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ragspec.training.reference.initialisation.stream_layout import HEAD_DIM, StreamLayout

NUM_PAIRS = HEAD_DIM // 2
DISTANCE_PAIRS, DISTANCE_PENALTY = (10, 23), 2.2
"""Near keys score less: the text just written is not copied again."""


class Comparison(NamedTuple):
    """One part of a match: the query's slot against the key's slot, in rotary pairs [first, last)."""

    query_slot: int
    key_slot: int
    pairs: tuple[int, int]
    gain: float


def orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Random matrix with orthonormal rows, or columns where there are fewer. Shape: [rows, columns]."""
    basis: Tensor = torch.linalg.qr(torch.randn(max(rows, columns), min(rows, columns), generator=generator))[0]
    return basis.T if rows <= columns else basis


def rotary_rows(head: int, pairs: tuple[int, int]) -> Tensor:
    """The rows of a head's projections that hold some rotary pairs. Shape: int64 [2 * number of pairs]."""
    first, last = pairs
    return head * HEAD_DIM + torch.tensor([*range(first, last), *range(first + NUM_PAIRS, last + NUM_PAIRS)])


def pass_on(attention: Any, head: int, projection: Tensor, source: slice, target: slice, gain: float = 1.0) -> None:
    """The head passes on these columns of what it looks at, and nothing else. Shape: projection [target, source]."""
    rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
    attention.v_proj.weight[rows] = 0.0
    attention.o_proj.weight[:, rows] = 0.0
    rows = slice(rows.start, rows.start + len(projection))
    attention.v_proj.weight[rows, source] = projection
    attention.o_proj.weight[target, rows] = gain * torch.eye(len(projection))


def write_match_head(
    attention: Any,
    head: int,
    comparisons: Sequence[Comparison],
    layout: StreamLayout,
    compress: Tensor,
    generator: torch.Generator,
) -> None:
    """The head looks where the comparisons agree. `compress`: from an identity to a shifted slot, [shifted, identity]."""
    rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
    for linear in (attention.q_proj, attention.k_proj):
        linear.weight[rows] = 0.0
    near = rows.start + torch.arange(*DISTANCE_PAIRS)
    attention.q_proj.bias[near] = -DISTANCE_PENALTY
    attention.k_proj.bias[near] = DISTANCE_PENALTY
    for query_slot, key_slot, pairs, gain in comparisons:
        compared = rotary_rows(head, pairs)
        projection = orthonormal(len(compared), layout.shifted, generator) * gain
        for linear, slot in ((attention.q_proj, query_slot), (attention.k_proj, key_slot)):
            linear.weight[compared, layout.columns(slot)] = projection @ compress if slot == 0 else projection

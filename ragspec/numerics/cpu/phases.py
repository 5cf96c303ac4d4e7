"""Builds the table of phases that the kernels run, and adds the weights that they read to an arena."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ragspec.numerics.cpu.int8_weights import Product, WeightArena, greatest_activation
from ragspec.numerics.cpu.kernels import Buffer, Column, Kind
from ragspec.numerics.cpu.thread_pool import Phases
from ragspec.numerics.ranks import Ranks


def make_table(rows: Sequence[Mapping[Column, int]]) -> Phases:
    """The table of phases given by their columns. Shape: int64 [P, 16]."""
    phases = np.full((len(rows), len(Column)), -1, np.int64)
    for phase, row in zip(phases, rows, strict=True):
        for column, value in row.items():
            phase[column] = value
    return phases


class PhaseTable:
    """Collects phases; their weights go into `arena`."""

    def __init__(self, ranks: Ranks, arena: WeightArena) -> None:
        self._arena, self._ranks = arena, ranks
        self._rows: list[dict[Column, int]] = []
        self._row_sums: list[int] = []
        self._quantisers: list[dict[Column, int]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, kind: Kind, **columns: int) -> dict[Column, int]:
        row = {Column.KIND: int(kind)} | {Column[name.upper()]: value for name, value in columns.items()}
        self._rows.append(row)
        return row

    def add_norm(self, norm: Any) -> int:
        """Where a norm's weight lies; -1 for none."""
        return -1 if norm is None else self._arena.add_norm(norm)

    def add_product(
        self, kind: Kind, quantiser: dict[Column, int], out: Buffer, weight: Tensor, bias: Tensor | None = None
    ) -> Product:
        """A product; `quantiser` is the phase that quantises its input."""
        product = self._arena.add_product(weight, bias)
        num_blocks = product.num_blocks // 2 if kind is Kind.GATED_PRODUCT else product.num_blocks
        self.add(
            kind, out=out, width=product.num_inputs, weight=product.weight, count=num_blocks,
            scales=product.scales, bias=product.bias,
        )  # fmt: skip
        quantiser[Column.WIDTH] = product.num_inputs
        self._quantisers.append(quantiser)
        self._row_sums.append(product.row_sum)
        return product

    def finish(self) -> Phases:
        """Every rank rounds activations alike: the greatest sum of all ranks counts."""
        with self._ranks.without_timeout():
            sums = self._ranks.all_gather(torch.tensor([self._row_sums])).view(self._ranks.size, -1).amax(0)
        for quantiser, row_sum in zip(self._quantisers, sums.tolist(), strict=True):
            quantiser[Column.MOST] = greatest_activation(row_sum)
        return make_table(self._rows)

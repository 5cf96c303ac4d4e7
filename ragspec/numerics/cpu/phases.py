"""The table of phases that the kernels run: builds it, adds the weights to an arena, and keeps the arrays between phases."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ragspec.numerics.cpu.int8_weights import Floats, Phases, Product, WeightArena, greatest_activation
from ragspec.numerics.cpu.kernels import Buffer, Column, Kind
from ragspec.numerics.cpu.product_code import RoundedRows, room_for_rows
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
        return self._arena.placed(make_table(self._rows))


def floats_of(given: Mapping[Buffer, Floats], others: Sequence[Floats] = ()) -> tuple[Floats, ...]:
    """One flat array for each `Buffer`; where none is given, that of `others`, or an empty one."""
    floats = [*others] or [_EMPTY] * len(Buffer)
    for buffer, array in given.items():
        floats[buffer] = array.reshape(-1)
    return tuple(floats)


_EMPTY = np.empty(0, np.float32)


class Buffers:
    """Room for any number of rows. `widths`: numbers of a row, by buffer; `aliases`: buffers that share another's memory."""

    def __init__(self, widths: Mapping[Buffer, int], widest_input: int, aliases: Mapping[Buffer, Buffer]) -> None:
        self._widths, self._widest, self._aliases = [widths.get(b, 0) for b in Buffer], widest_input, aliases
        self._num_rows = 0
        self._resize(1)

    def of(self, num_rows: int, own: Mapping[Buffer, Floats]) -> tuple[tuple[Floats, ...], RoundedRows]:
        """The arrays, flat, cut to so many rows; those of the caller stand in for ours. Also room for the quantised rows."""
        if num_rows > self._num_rows:
            self._resize(max(num_rows, 2 * self._num_rows))
        cut = [array[: num_rows * width] for array, width in zip(self._arrays, self._widths, strict=True)]
        return floats_of(own, cut), self._quantised

    def _resize(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._quantised = room_for_rows(num_rows, self._widest)
        self._arrays = [np.empty(num_rows * width, np.float32) for width in self._widths]
        for buffer, other in self._aliases.items():
            self._arrays[buffer] = self._arrays[other]

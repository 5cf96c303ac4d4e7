"""Products in int8 on any device: exact sums of whole numbers, so no order, tile or split can change a bit.

Weights have 8 bits and a scale for each output, as on the CPU (`ragspec.numerics.cpu.int8_weights`). Activations have 16 bits and
a scale for each row; their two bytes are multiplied apart, since devices multiply bytes only, and neither sum can leave 32 bits.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ragspec.numerics.cpu.int8_weights import quantise

ROWS_A_TILE = 64
_MULTIPLE = 16
"""Sizes that every device's product of bytes takes."""
GREATEST = 127 * 256 + 127
"""The greatest activation whose upper byte, rounded, is at most 127."""


class QuantisedRows(NamedTuple):
    """Shapes: numbers int16 [N, in], scales float32 [N, 1]."""

    numbers: Tensor
    scales: Tensor


def quantised_rows(rows: Tensor) -> QuantisedRows:
    wide = rows.float()
    scales = wide.abs().amax(1, keepdim=True) / GREATEST
    scales = torch.where(scales == 0, 1.0, scales)
    return QuantisedRows((wide / scales).round().to(torch.int16), scales)


def halves(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Upper and lower byte: numbers = 256 upper + lower. Shapes: int16 [N, in] -> int8 [N, in] twice."""
    upper = (numbers.int() + 128) >> 8
    return upper.to(torch.int8), (numbers.int() - 256 * upper).to(torch.int8)


class TorchInt8Linear(nn.Module):
    """`y = x W^T + b`, W in int8 with a scale for each output. Shapes: x [..., in_features] -> y [..., out_features]."""

    weight: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._more_inputs = -self.in_features % _MULTIPLE
        numbers, scales = quantise(F.pad(weight.detach(), (0, self._more_inputs, 0, -self.out_features % _MULTIPLE)))
        self.register_buffer("weight", numbers)
        self.register_buffer("scales", scales[: self.out_features])
        self.register_buffer("bias", None if bias is None else bias.detach().float())

    def forward(self, x: Tensor) -> Tensor:
        rows = quantised_rows(F.pad(x.reshape(-1, self.in_features), (0, self._more_inputs)))
        out = self._sums(rows.numbers).float() * rows.scales * self.scales
        out = out if self.bias is None else out + self.bias
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def _sums(self, numbers: Tensor) -> Tensor:
        """Whole sums. Shapes: int16 [N, in] -> int64 [N, out_features]."""
        padded = F.pad(numbers, (0, 0, 0, -len(numbers) % ROWS_A_TILE))
        parts = [self._tile(tile) for tile in padded.split(ROWS_A_TILE)]
        return torch.cat(parts)[: len(numbers), : self.out_features]

    def _tile(self, numbers: Tensor) -> Tensor:
        upper, lower = (torch._int_mm(half, self.weight.t()).long() for half in halves(numbers))
        return 256 * upper + lower

"""Weights as 8-bit integers with a scale for each output, in the layout that the product reads.

Activations are rounded to 16 bits with a scale for each row, so nearly all of the error is the weights'. Their greatest value is
chosen so that no sum of a product can leave 32 bits.

    >>> arena = WeightArena()
    >>> product = arena.add_product(weight, bias)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ragspec.numerics.attention import Floats
from ragspec.numerics.llvm_code import LANES

_GREATEST = 127
_GREATEST_SUM = 2**31 - 1
_GREATEST_ACTIVATION = 2**15 - 1


class Product(NamedTuple):
    """Where a product's numbers lie in the arena. `num_blocks`: blocks of 16 outputs. `row_sum`: the greatest sum of |weights|
    of an output. `bias` -1: none."""

    weight: int
    num_inputs: int
    num_blocks: int
    scales: int
    bias: int
    row_sum: int


class WeightArena:
    """All int8 weights of a model in one array, all its other parameters in another."""

    def __init__(self) -> None:
        self._weights: list[NDArray[np.int8]] = []
        self._parameters: list[Floats] = []
        self._num_weights = self._num_parameters = 0

    def add_product(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        """Quantise a weight; outputs are padded with zeros to a multiple of 16. Shapes: weight [out, in], bias [out]."""
        num_more = -weight.shape[0] % LANES
        quantised, scales = quantise(F.pad(weight.detach(), (0, 0, 0, num_more)))
        packed = pack(quantised)
        row_sum = int(quantised.abs().sum(1, dtype=torch.int64).max())
        at = self._num_weights
        self._weights.append(packed)
        self._num_weights += len(packed)
        bias_at = -1 if bias is None else self.add_parameter(F.pad(bias.detach().float(), (0, num_more)))
        blocks = quantised.shape[0] // LANES
        return Product(at, weight.shape[1], blocks, self.add_parameter(scales), bias_at, row_sum)

    def add_norm(self, norm: object) -> int:
        """A norm's weight, with its epsilon before it. Returns the place of the weight."""
        weight, epsilon = norm.weight.detach().float(), norm.variance_epsilon  # type: ignore[attr-defined]
        return self.add_parameter(torch.cat([torch.tensor([epsilon]), weight])) + 1

    def add_parameter(self, values: Tensor) -> int:
        at = self._num_parameters
        self._parameters.append(values.numpy())
        self._num_parameters += len(values)
        return at

    def arrays(self) -> tuple[NDArray[np.int8], Floats]:
        """Both arrays. Shapes: int8 flat, float32 flat."""
        return np.concatenate(self._weights), np.concatenate(self._parameters)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Shapes: [out, in] -> int8 [out, in], float32 [out]."""
    weight = weight.float()
    scales = weight.abs().amax(1) / _GREATEST
    scales[scales == 0] = 1.0
    return (weight / scales[:, None]).round().to(torch.int8), scales


def pack(quantised: Tensor) -> NDArray[np.int8]:
    """Blocks of 16 outputs, in each the inputs in pairs. Shapes: int8 [out, in] -> flat [out / 16, in / 2, 16, 2]."""
    num_outputs, num_inputs = quantised.shape
    blocks = quantised.view(num_outputs // LANES, LANES, num_inputs // 2, 2)
    packed: NDArray[np.int8] = blocks.transpose(1, 2).contiguous().view(-1).numpy()
    return packed


def greatest_activation(row_sum: int) -> int:
    """The greatest quantised activation with which no sum of the product leaves 32 bits."""
    return min(_GREATEST_ACTIVATION, _GREATEST_SUM // max(1, row_sum))

"""Weights as 8-bit integers with a scale for each output, in the layout that the product reads.

Activations are whole numbers of up to 16 bits with a scale for each row. Rounding them costs about as much as rounding the
weights. The greatest number is chosen so that no sum of a product can leave 32 bits.

    >>> arena = WeightArena()
    >>> product = arena.add_product(weight, bias)
"""

import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ragspec.numerics.cpu.llvm_code import LANES
from ragspec.numerics.cpu.product_code import FASTEST, InstructionSet

Floats = NDArray[np.float32]
Phases = NDArray[np.int64]

FORMAT = f"2-{FASTEST.num_inputs}"
"""Of saved arenas; raise its first number with every change of the layout."""

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


def with_zeros(part: Tensor, num_more: int) -> Tensor:
    """`part` with zeros behind its first dimension; not copied if there are none. A start copied all weights of a usual model."""
    return F.pad(part, (*(0, 0) * (part.dim() - 1), 0, num_more)) if num_more else part


class WeightArena:
    """All int8 weights of a model in one array, all its other parameters in another.

    `saved`: the tensors of an earlier arena of the same model; the weights given are then read for their shapes alone.
    `streams`: whether layers are read from disk in every forward (`StreamedArena`).
    """

    streams = False

    def __init__(self, saved: Mapping[str, Tensor] | None = None) -> None:
        self.is_saved = saved is not None
        self._saved = saved or {}
        self.rotations = self._saved.get("rotations")
        """Of the model's decoder; files of earlier versions have none. Shape: float32 [2, positions, head_dim]."""
        self._weights, self._parameters, self._row_sums = list[Tensor](), list[Tensor](), list[int]()
        self._num_weights = self._num_parameters = self._num_products = 0
        self._layer_ends = list[int]()

    def add_product(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        """Quantise a weight; outputs are padded with zeros to a multiple of 16. Shapes: weight [out, in], bias [out]."""
        weight = with_zeros(weight.detach(), -weight.shape[0] % LANES)
        scales = weight[:, 0]
        if self.is_saved:
            row_sum = int(self._saved["row_sums"][self._num_products])
        else:
            quantised, scales = quantise(weight)
            row_sum = int(quantised.abs().sum(1, dtype=torch.int64).max())
            self._weights.append(pack(quantised))
            self._row_sums.append(row_sum)
        at, num_outputs = self._num_weights, weight.shape[0]
        self._num_weights += weight.numel()
        self._num_products += 1
        bias_at = -1 if bias is None else self.add_parameter(with_zeros(bias.detach(), num_outputs - len(bias)))
        return Product(at, weight.shape[1], num_outputs // LANES, self.add_parameter(scales), bias_at, row_sum)

    def add_norm(self, norm: Any) -> int:
        """A norm's weight, with its epsilon before it. Returns the place of the weight."""
        weight = norm.weight.detach().float()
        return self.add_parameter(torch.cat([weight.new_full((1,), norm.variance_epsilon), weight])) + 1

    def add_parameter(self, values: Tensor) -> int:
        assert "arrays" not in vars(self), "kernels read unchecked"
        at = self._num_parameters
        self._num_parameters += len(values)
        if not self.is_saved:
            self._parameters.append(values.float())
        return at

    def end_layer(self) -> None:
        """What was added since the last call are the weights of a layer."""
        self._layer_ends.append(self._num_weights)

    def placed(self, phases: Phases) -> Phases:
        """The phases with the places of their weights in `arrays`."""
        return phases

    def layer(self, number: int) -> AbstractContextManager[None]:
        """The weights of a layer are in `arrays` inside a `with` block."""
        return nullcontext()

    @functools.cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """The arrays, once everything is added: weights int8 flat, parameters float32 flat, row_sums int64 [products]."""
        if self.is_saved:
            return self._saved
        parts = (torch.cat(self._weights), torch.cat(self._parameters), torch.tensor(self._row_sums))
        self._weights, self._parameters = [], []
        return dict(zip(("weights", "parameters", "row_sums"), parts, strict=True))

    @functools.cached_property
    def arrays(self) -> tuple[NDArray[np.int8], Floats]:
        weights, parameters = self.tensors["weights"].numpy(), self.tensors["parameters"].numpy()
        assert (len(weights), len(parameters)) == (self._num_weights, self._num_parameters), "kernels read unchecked"
        return weights, parameters


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Shapes: [out, in] -> int8 [out, in], float32 [out]."""
    weight = weight.float()
    scales = weight.abs().amax(1) / _GREATEST
    scales[scales == 0] = 1.0
    return (weight / scales[:, None]).round().to(torch.int8), scales


def pack(quantised: Tensor, instructions: InstructionSet = FASTEST) -> Tensor:
    """Blocks of 16 outputs, in each the inputs in groups as the instructions read them: pairs, or fours of weights plus 128.

    Shapes: int8 [out, in] -> flat [out / 16, in / g, 16, g].
    """
    (num_outputs, num_inputs), group = quantised.shape, instructions.num_inputs
    if group == 4:
        quantised = quantised ^ -128  # the bits of the unsigned byte
    blocks = quantised.view(num_outputs // LANES, LANES, num_inputs // group, group)
    return blocks.transpose(1, 2).contiguous().view(-1)


def greatest_activation(row_sum: int) -> int:
    """The greatest quantised activation with which no sum of the product leaves 32 bits."""
    return min(_GREATEST_ACTIVATION, _GREATEST_SUM // max(1, row_sum))

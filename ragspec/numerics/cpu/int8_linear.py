"""One linear layer with int8 weights, for layers that stand alone: the LM head, and models whose own forward runs."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ragspec.numerics.attention import AttentionMetadata, AttentionShape, attention_arguments
from ragspec.numerics.cpu.buffers import Buffers
from ragspec.numerics.cpu.int8_weights import WeightArena
from ragspec.numerics.cpu.kernels import Buffer, Kind
from ragspec.numerics.cpu.llvm_code import LANES
from ragspec.numerics.cpu.phases import PhaseTable
from ragspec.numerics.cpu.thread_pool import run
from ragspec.numerics.ranks import ONE_RANK, Ranks

_NO_ROWS = AttentionMetadata._make([*[np.empty(0, np.int32)] * 12, np.empty((0, 3), np.int32)])
_NO_POOL = (np.empty((1, 0), np.float32), np.empty((1, 0), np.float32))
_HEAD_DIM = 64
"""The most common one: with it the kernel is compiled once for linears and decoders."""
_NO_ROTATIONS = (np.empty((0, _HEAD_DIM), np.float32), np.empty((0, _HEAD_DIM), np.float32))
_NO_ATTENTION = attention_arguments(_NO_ROWS, _NO_POOL, AttentionShape(1, 1, _HEAD_DIM, 1.0))


class Int8Linear(nn.Module):
    """`y = x W^T + b`, W in int8 with a scale for each output, x in int16 with a scale for each row.

    Shapes: x [..., in_features] -> y [..., out_features], in the dtype of x. In a group W is a rank's outputs. `arena`: where
    the weights lie; None: in an arena of their own.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, ranks: Ranks = ONE_RANK, arena: WeightArena | None = None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._arena = arena or WeightArena()
        table = PhaseTable(ranks, self._arena)
        quantiser = table.add(Kind.QUANTISE, source=Buffer.STATES)
        self._num_more = -self.in_features % LANES
        product = table.add_product(
            Kind.PRODUCT, quantiser, Buffer.LOGITS, F.pad(weight.detach(), (0, self._num_more)), bias
        )
        self._num_outputs = product.num_blocks * LANES
        self._phases = table.finish()
        widths = {Buffer.LOGITS: self._num_outputs, Buffer.ROW_SCALES: 1}
        self._room = Buffers(widths, self.in_features + self._num_more, {})

    def forward(self, x: Tensor) -> Tensor:
        rows = F.pad(x.reshape(-1, self.in_features).float(), (0, self._num_more)).contiguous()
        out = np.empty((len(rows), self._num_outputs), np.float32)
        floats, quantised = self._room.of(len(rows), states=rows.numpy(), logits=out)
        run(
            self._phases,
            len(rows),
            0,
            *self._arena.arrays,
            _NO_ROTATIONS,
            floats,
            quantised,
            *_NO_ATTENTION,
        )
        return torch.from_numpy(out)[:, : self.out_features].view(*x.shape[:-1], self.out_features).to(x.dtype)

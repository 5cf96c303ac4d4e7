"""The torch backend: plain torch operators on any device. Keys, values, hidden states and logits never leave it.

A row's bits depend on nothing but the row, on every device: products run in tiles of a fixed number of rows, and sums run in a
fixed tree of additions (`tree_sum`) instead of a reduction whose order the device chooses. The self-test decides whether a
device's products keep the promise.

`transfer` has the only functions that cross between host and device: `to_device`, `to_host` and `queued_to_host`.
"""

from collections.abc import Sequence
from typing import Any, Self, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from ragspec.numerics.attention import AttentionMetadata, AttentionShape, Ints
from ragspec.numerics.kv_cache import KvPool
from ragspec.numerics.ranks import Ranks
from ragspec.numerics.torch.attention import ForwardInputs, TorchForward, tree_sum
from ragspec.numerics.torch.graphs import Outputs, TieredForwards, row_tier
from ragspec.numerics.torch.int8 import ROWS_A_TILE, TorchInt8Linear
from ragspec.numerics.torch.sampling import TorchLogits
from ragspec.numerics.torch.transfer import queued_to_host, to_device


class TiledLinear(nn.Module):
    """`y = x W^T + b` in tiles of ROWS_A_TILE rows, the last padded with zeros: the device sees one shape of product only.

    Shapes: x [..., in_features] -> y [..., out_features].
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("weight", weight.detach().contiguous())
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        padded = F.pad(rows, (0, 0, 0, -len(rows) % ROWS_A_TILE))
        tiles = [F.linear(tile, self.weight, self.bias) for tile in padded.split(ROWS_A_TILE)]
        out = tiles[0] if len(tiles) == 1 else torch.cat(tiles)
        return out[: len(rows)].view(*x.shape[:-1], self.out_features)


class TreeNorm(nn.Module):
    """An RMS norm whose sum of squares is a tree of additions; statistics in float32. Shapes: [..., H] -> [..., H]."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        mean = tree_sum(wide * wide) / x.shape[-1]
        return cast(Tensor, self.weight * (wide * torch.rsqrt(mean + self.variance_epsilon)).to(x.dtype))


class ResidualTreeNorm(TreeNorm):
    """Shapes: x, block [N, H] -> (x + block, normalised), [N, H] each."""

    def forward(self, x: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        total = x + block
        return total, super().forward(total)


class TorchBackend:
    """See `ragspec.numerics.backend.Backend`. `is_int8`: weights of products are quantised to int8."""

    name = "torch"
    least_rows = 1

    def __init__(self, device: str, dtype: torch.dtype, *, is_int8: bool = False) -> None:
        self.device, self._dtype, self._is_int8 = torch.device(device), dtype, is_int8
        self.kv_itemsize, self.runs_ahead = dtype.itemsize, self.device.type == "cuda"
        self._forwards = TieredForwards(self.device, self.device.type == "cuda")

    @property
    def alone(self) -> Self:
        return self

    def for_head(self, dtype: torch.dtype) -> Self:
        return type(self)(str(self.device), self._dtype, is_int8=dtype == torch.int8)

    def place(self, model: nn.Module) -> None:
        model.to(self.device)

    def make_pool(self, shapes: list[AttentionShape], num_slots: int) -> KvPool:
        """Keys and values in the dtype of the weights."""
        self._forwards.forget()
        return KvPool(shapes, num_slots, lambda size: torch.zeros(size, dtype=self._dtype, device=self.device))

    def make_linear(self, weight: Tensor, bias: Tensor | None = None) -> nn.Module:
        return (TorchInt8Linear if self._is_int8 else TiledLinear)(weight.to(self.device), self._placed(bias))

    def _placed(self, bias: Tensor | None) -> Tensor | None:
        return None if bias is None else bias.to(self.device)

    def make_norm(self, norm: Any, *, residual: bool = False) -> nn.Module:
        return ResidualTreeNorm(norm) if residual else TreeNorm(norm)

    def make_decoder(self, model: Any, rotations: tuple[Tensor, Tensor], ranks: Ranks) -> None:
        return None

    def make_layer(self, layer: Any, shape: AttentionShape, rotations: tuple[Tensor, Tensor], index: int) -> None:
        return None

    def tokens(self, token_ids: NDArray[np.integer[Any]] | Tensor) -> Tensor:
        if isinstance(token_ids, Tensor):
            return token_ids
        return to_device(token_ids.astype(np.int64), self.device)

    def context(self, pool: KvPool, metadata: AttentionMetadata) -> TorchForward:
        self._use_device()
        inputs = self._inputs(metadata, pool, 0)
        return self._forward(pool, metadata, inputs, inputs.sent(self.device))

    def decode(
        self, decoder: Any, token_ids: Ints | Tensor, pool: KvPool, metadata: AttentionMetadata, taps: Sequence[int]
    ) -> Outputs:
        self._use_device()
        inputs = self._inputs(metadata, pool, row_tier(len(token_ids), self._forwards.captures))

        def compute(tokens: Tensor, inputs: ForwardInputs, packed: Tensor) -> Outputs:
            return cast(Outputs, decoder(tokens, self._forward(pool, metadata, inputs, packed), taps))

        return self._forwards.run(token_ids, inputs, (pool, *taps), compute)

    def _inputs(self, metadata: AttentionMetadata, pool: KvPool, num_rows: int) -> ForwardInputs:
        return ForwardInputs(metadata, pool.spare_slot, num_rows)

    def _forward(
        self, pool: KvPool, metadata: AttentionMetadata, inputs: ForwardInputs, packed: Tensor
    ) -> TorchForward:
        return TorchForward(pool, metadata, inputs, packed)

    def _use_device(self) -> None:
        """Kernels are launched on the thread's own device."""
        if self.device.type == "cuda" and self.device.index is not None:
            torch.cuda.set_device(self.device)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def logits(self, values: Tensor, token_ids: Tensor | None = None, vocab_size: int = 0) -> TorchLogits:
        return TorchLogits(values, token_ids, vocab_size)

    def best_tokens(self, logits: Tensor, logit_rows: Ints, num_rows: int) -> Tensor:
        best = torch.full((num_rows,), -1, device=logits.device)
        best[self.tokens(logit_rows)] = logits.argmax(1)
        return queued_to_host(best)

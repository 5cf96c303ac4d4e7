"""The cuda backend: the torch backend with Triton kernels for products, norms and attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ragspec.numerics.attention import AttentionMetadata, AttentionShape, padded
from ragspec.numerics.cuda.kernels import (
    BLOCK,
    BLOCK_IN,
    BLOCK_OUT,
    TILE_ROWS,
    attention_kernel,
    int8_product_kernel,
    norm_kernel,
    product_kernel,
    rotate_kernel,
)
from ragspec.numerics.kv_cache import KvPool
from ragspec.numerics.torch.attention import ForwardInputs, TorchForward, power_of_two
from ragspec.numerics.torch.backend import TiledLinear, TorchBackend, TreeNorm
from ragspec.numerics.torch.int8 import TorchInt8Linear


class TritonLinear(TiledLinear):
    """`y = x W^T + b`. Shapes: x [..., in_features] -> y [..., out_features]."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).contiguous()
        out = rows.new_empty((len(rows), self.out_features))
        grid = (-(-len(rows) // TILE_ROWS), -(-self.out_features // BLOCK_OUT))
        bias = self.weight if self.bias is None else self.bias  # a pointer is wanted, and not read
        product_kernel[grid](
            rows, self.weight, bias, out, len(rows), self.out_features, self.in_features,
            self.bias is not None, TILE_ROWS, BLOCK_OUT, BLOCK_IN,
        )  # fmt: skip
        return out.view(*x.shape[:-1], self.out_features)


class TritonInt8Linear(TorchInt8Linear):
    """`y = x W^T + b`, W in int8. Shapes: x [..., in_features] -> y [..., out_features]."""

    def _sums(self, numbers: Tensor) -> Tensor:
        num_rows, num_inputs = numbers.shape
        out = torch.empty((num_rows, self.out_features), dtype=torch.int64, device=numbers.device)
        grid = (-(-num_rows // TILE_ROWS), -(-self.out_features // BLOCK_OUT))
        int8_product_kernel[grid](
            numbers.contiguous(),
            self.weight,
            out,
            num_rows,
            self.out_features,
            num_inputs,
            TILE_ROWS,
            BLOCK_OUT,
            BLOCK_IN,
        )
        return out


class TritonNorm(TreeNorm):
    """An RMS norm; statistics in float32. Shapes: [..., H] -> [..., H]."""

    def forward(self, x: Tensor) -> Tensor:
        return self._run(x.contiguous(), None)[1]

    def _run(self, x: Tensor, block: Tensor | None) -> tuple[Tensor, Tensor]:
        total, out, width = x if block is None else torch.empty_like(x), torch.empty_like(x), x.shape[-1]
        norm_kernel[(x.numel() // width,)](
            x, x if block is None else block.contiguous(), self.weight, total, out, self.variance_epsilon, width,
            block is not None, power_of_two(width),
        )  # fmt: skip
        return total, out


class ResidualTritonNorm(TritonNorm):
    """Shapes: x, block [N, H] -> (x + block, normalised), [N, H] each."""

    def forward(self, x: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self._run(x.contiguous(), block)


class CudaInputs(ForwardInputs):
    """Beside the columns and `seen`: for each size of tile a table of tiles, int64 [T, 5] (`attention_kernel`).

    Blocks that all rows of a tile share are read once. A padded table has a tile for each row, empty ones last.
    """

    def __init__(self, data: AttentionMetadata, pool: KvPool, num_rows: int = 0) -> None:
        super().__init__(data, pool.spare_slot, num_rows)
        self.num_positions, self.num_tiles = 0, dict[int, int]()
        for size in sorted({_rows_a_tile(shape) for shape in pool.shapes}):
            tiles = _cut(data, size)
            if num_rows:
                tiles = np.concatenate([tiles, _padding_tiles(self, len(data.slots), num_rows - len(tiles))])
            self.num_tiles[size] = len(tiles)
            self.packed = np.concatenate([self.packed, tiles.reshape(-1)])


class CudaForward(TorchForward):
    """See `ragspec.numerics.backend.ForwardContext`."""

    def __init__(self, pool: KvPool, metadata: AttentionMetadata, inputs: CudaInputs, packed: Tensor) -> None:
        super().__init__(pool, metadata, inputs, packed)
        tables = self._rest.split([5 * num_tiles for num_tiles in inputs.num_tiles.values()])
        self._tiles = {size: table.view(-1, 5) for size, table in zip(inputs.num_tiles, tables, strict=True)}

    def attend(
        self, layer: int, qkv: Tensor, shape: AttentionShape, rotations: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        qkv = qkv.contiguous()
        num_rows, group, stored_dim = len(qkv), shape.num_heads // shape.num_kv_heads, padded(shape.head_dim)
        assert group <= TILE_ROWS and shape.head_dim % 2 == 0, "a tile holds all query heads of a KV head, in halves"
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        queries = torch.empty((num_rows, shape.num_heads, shape.head_dim), dtype=keys.dtype, device=keys.device)
        cos, sin = rotations or (qkv, qkv)
        rotate_kernel[(num_rows, shape.num_heads + 2 * shape.num_kv_heads)](
            qkv, queries, keys, values, self._slots, self._positions, cos, sin, shape.num_heads, shape.num_kv_heads,
            shape.head_dim, stored_dim, rotations is not None, power_of_two(-(-shape.head_dim // 2)),
        )  # fmt: skip
        out, tiles = torch.empty_like(queries, dtype=qkv.dtype), self._tiles[_rows_a_tile(shape)]
        attention_kernel[(len(tiles), shape.num_kv_heads)](
            queries, keys, values, out, tiles, self._seen, self._ends, self._paths, self._lengths,
            shape.scale, shape.softcap or 1.0, shape.window, shape.num_heads, shape.num_kv_heads, shape.head_dim, stored_dim,
            group, shape.softcap > 0.0, TILE_ROWS, BLOCK, max(16, power_of_two(shape.head_dim)),
        )  # fmt: skip
        return out


def _rows_a_tile(shape: AttentionShape) -> int:
    return TILE_ROWS // (shape.num_heads // shape.num_kv_heads)


def _cut(data: AttentionMetadata, rows_a_tile: int) -> NDArray[np.int64]:
    """Tiles of at most so many rows of one sequence, as the kernel reads them. Shape: int64 [tiles, 5]."""
    tiles = []
    path_lengths = np.diff(data.path_start)
    for sequence, (start, end) in enumerate(zip(data.row_start[:-1], data.row_start[1:], strict=True)):
        context = data.context_start[sequence]
        num_context = data.context_start[sequence + 1] - context
        for first in range(start, end, rows_a_tile):
            own = slice(first, min(first + rows_a_tile, end))
            with_path = data.context_end[own][path_lengths[own] > 0]
            shared = with_path.min() // BLOCK * BLOCK if len(with_path) else data.context_end[own].max()
            longest = (data.context_end[own] + path_lengths[own]).max()
            assert shared <= num_context, "the kernel reads slots unchecked"
            tiles.append((first, own.stop, context, shared, longest))
    return np.array(tiles, np.int64)


def _padding_tiles(inputs: ForwardInputs, num_rows: int, count: int) -> NDArray[np.int64]:
    """One tile for each padded row, which sees the spare slot alone, then empty ones. Shape: int64 [count, 5]."""
    rows = range(num_rows, inputs.num_rows)
    tiles = [(row, row + 1, inputs.spare_place, 1, 1) for row in rows] + [(0, 0, 0, 0, 0)] * (count - len(rows))
    return np.array(tiles, np.int64).reshape(-1, 5)


class CudaBackend(TorchBackend):
    """See `ragspec.numerics.backend.Backend`."""

    name = "cuda"

    def make_linear(self, weight: Tensor, bias: Tensor | None = None) -> nn.Module:
        return (TritonInt8Linear if self._is_int8 else TritonLinear)(weight.to(self.device), self._placed(bias))

    def make_norm(self, norm: Any, *, residual: bool = False) -> nn.Module:
        return ResidualTritonNorm(norm) if residual else TritonNorm(norm)

    def _inputs(self, metadata: AttentionMetadata, pool: KvPool, num_rows: int) -> CudaInputs:
        return CudaInputs(metadata, pool, num_rows)

    def _forward(self, pool: KvPool, metadata: AttentionMetadata, inputs: ForwardInputs, packed: Tensor) -> CudaForward:
        assert isinstance(inputs, CudaInputs)
        return CudaForward(pool, metadata, inputs, packed)

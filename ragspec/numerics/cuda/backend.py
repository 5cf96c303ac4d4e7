"""The cuda backend: the torch backend with Triton kernels for products, norms and attention."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ragspec.numerics.attention import AttentionMetadata, AttentionShape, padded
from ragspec.numerics.cuda.kernels import (
    BLOCK,
    NUM_ARRIVALS,
    attention_kernel,
    gated_product_kernel,
    int8_product_kernel,
    norm_kernel,
    num_chunks,
    product_kernel,
    quantise_kernel,
    rotate_kernel,
)
from ragspec.numerics.cuda.tiles import shared_bytes, sum_order, tile_for
from ragspec.numerics.kv_cache import KvPool
from ragspec.numerics.torch.attention import ForwardInputs, TorchForward, power_of_two
from ragspec.numerics.torch.backend import TiledLinear, TorchBackend, TreeNorm
from ragspec.numerics.torch.int8 import GREATEST, TorchInt8Linear

TILE_PAIRS = (16, 64, 128)
"""Heights of attention's tiles, in pairs of a row and a query head: prompts in 16-bit types take the higher ones. Compiled for
compute capability 9.0, a tile takes at most (256 + 6.5 height) head_dim bytes of shared memory."""
_SPREAD_PAIRS, _PART_BYTES = 2**14, 2**27
"""Attention is spread over chunks below so many pairs, if the chunks' states take at most so many bytes."""


class TritonLinear(TiledLinear):
    """`y = x W^T + b`. Shapes: x [..., in_features] -> y [..., out_features]. `arrivals`: see `cuda.kernels`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, arrivals: Tensor) -> None:
        super().__init__(weight, bias)
        self._order, self._arrivals = sum_order(weight), arrivals

    def forward(self, x: Tensor) -> Tensor:
        rows, (block_in, split) = x.reshape(-1, self.in_features).contiguous(), self._order
        tile, out = tile_for(len(rows), self.weight), rows.new_empty((len(rows), self.out_features))
        blocks = -(-self.in_features // block_in)
        parts = torch.empty((split, *out.shape) if split > 1 else 1, dtype=torch.float32, device=out.device)
        grid = (-(-len(rows) // tile.rows), -(-self.out_features // tile.outputs), split)
        assert split == 1 or grid[0] * grid[1] <= NUM_ARRIVALS
        product_kernel[grid](
            rows, self.weight, self._bias, out, parts, self._arrivals, len(rows), self.out_features, self.in_features,
            -(-blocks // split) * block_in, self.bias is not None, split, self.in_features % block_in == 0,
            tile.rows, tile.outputs, block_in, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        return out.view(*x.shape[:-1], self.out_features)

    def gated(self, x: Tensor) -> Tensor:
        """silu of the first half of the outputs times the second. Shapes: x [..., in_features] -> [..., out_features / 2]."""
        rows, block_in, width = (
            x.reshape(-1, self.in_features).contiguous(),
            self._order.block_in,
            self.out_features // 2,
        )
        tile, out = tile_for(len(rows), self.weight), rows.new_empty((len(rows), width))
        half = max(16, tile.outputs // 2)
        gated_product_kernel[(-(-len(rows) // tile.rows), -(-width // half))](
            rows, self.weight, self._bias, out, len(rows), width, self.in_features, self.bias is not None,
            self.in_features % block_in == 0, tile.rows, half, block_in, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        return out.view(*x.shape[:-1], width)

    @property
    def _bias(self) -> Tensor:
        """A pointer that is wanted, and not read without a bias."""
        return self.weight if self.bias is None else self.bias


class TritonInt8Linear(TorchInt8Linear):
    """`y = x W^T + b`, W in int8. Shapes: x [..., in_features] -> y [..., out_features]."""

    def forward(self, x: Tensor) -> Tensor:
        rows, num_inputs = x.reshape(-1, self.in_features).contiguous(), self.weight.shape[1]
        numbers = torch.empty((len(rows), num_inputs), dtype=torch.int16, device=x.device)
        scales = torch.empty(len(rows), dtype=torch.float32, device=x.device)
        quantise_kernel[(len(rows),)](
            rows, numbers, scales, self.in_features, num_inputs, float(GREATEST), power_of_two(num_inputs)
        )
        out, tile = rows.new_empty((len(rows), self.out_features)), tile_for(len(rows), self.weight)
        bias = self.scales if self.bias is None else self.bias  # a pointer is wanted, and not read
        int8_product_kernel[(-(-len(rows) // tile.rows), -(-self.out_features // tile.outputs))](
            numbers, self.weight, scales, self.scales, bias, out, len(rows), self.out_features, num_inputs,
            self.bias is not None, tile.rows, tile.outputs, sum_order(self.weight).block_in,
            num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=False,
        )  # fmt: skip
        return out.view(*x.shape[:-1], self.out_features)


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
    """Beside the columns and `seen`: for each group of query heads and height of tile a table of tiles, int64 [T, 5]
    (`attention_kernel`).

    Blocks that all rows of a tile share are read once. A padded table of at most 256 rows has a tile for each row, empty ones
    last; larger ones are padded to a power of two.
    """

    def __init__(self, data: AttentionMetadata, pool: KvPool, num_rows: int = 0) -> None:
        super().__init__(data, pool.spare_slot, num_rows)
        self.num_tiles = dict[tuple[int, int], int]()
        for group, heights in _heights(pool).items():
            tables = _cut(data, group, heights)
            least = min(tables)
            if num_rows:
                rows = range(len(data.slots), self.num_rows)
                tables[least] += [(row, row + 1, self.spare_place, 1, 1) for row in rows]
            for height, tiles in tables.items():
                if num_rows and tiles:
                    count = num_rows if height == least and num_rows <= 256 else power_of_two(len(tiles))
                    tiles += [(0, 0, 0, 0, 0)] * (count - len(tiles))
                if tiles:
                    self.num_tiles[group, height] = len(tiles)
                    self.packed = np.concatenate([self.packed, np.array(tiles, np.int64).reshape(-1)])

    @property
    def shape_key(self) -> tuple[Any, ...]:
        return (*super().shape_key, *self.num_tiles.items())


class CudaForward(TorchForward):
    """See `ragspec.numerics.backend.ForwardContext`."""

    def __init__(
        self, pool: KvPool, metadata: AttentionMetadata, inputs: CudaInputs, packed: Tensor, arrivals: Tensor
    ) -> None:
        super().__init__(pool, metadata, inputs, packed)
        tables = self._rest.split([5 * num_tiles for num_tiles in inputs.num_tiles.values()])
        self._tiles = {key: table.view(-1, 5) for key, table in zip(inputs.num_tiles, tables, strict=True)}
        self._num_chunks, self._arrivals = num_chunks(inputs.num_positions), arrivals

    def attend(
        self, layer: int, qkv: Tensor, shape: AttentionShape, rotations: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        qkv = qkv.contiguous()
        num_rows, own_group, stored_dim = len(qkv), shape.num_heads // shape.num_kv_heads, padded(shape.head_dim)
        assert shape.head_dim % 2 == 0, "a head is rotated in halves"
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        queries = torch.empty((num_rows, shape.num_heads, shape.head_dim), dtype=keys.dtype, device=keys.device)
        cos, sin = rotations or (qkv, qkv)
        rotate_kernel[(num_rows, shape.num_heads + 2 * shape.num_kv_heads)](
            qkv, queries, keys, values, self._slots, self._positions, cos, sin, shape.num_heads, shape.num_kv_heads,
            shape.head_dim, stored_dim, rotations is not None, power_of_two(-(-shape.head_dim // 2)),
        )  # fmt: skip
        out, block_dim = torch.empty_like(queries, dtype=qkv.dtype), max(16, power_of_two(shape.head_dim))
        num_pairs = num_rows * shape.num_heads
        for (group, height), tiles in self._tiles.items():
            if group != own_group:
                continue
            chunks = self._num_chunks
            is_spread = (
                1 < chunks <= _PART_BYTES // (4 * num_pairs * (block_dim + 2))
                and num_pairs < _SPREAD_PAIRS
                and height == min(size for other, size in self._tiles if other == group)
                and len(tiles) * shape.num_kv_heads <= NUM_ARRIVALS
            )
            states, sums = (
                torch.empty((chunks, num_pairs, width) if is_spread else 1, dtype=torch.float32, device=keys.device)
                for width in (2, block_dim)
            )
            attention_kernel[(len(tiles), shape.num_kv_heads, chunks if is_spread else 1)](
                queries, keys, values, out, tiles, self._seen, self._ends, self._paths, self._lengths, states, sums,
                self._arrivals, shape.scale, shape.softcap or 1.0, shape.window, num_rows, shape.num_heads,
                shape.num_kv_heads, shape.head_dim, stored_dim, group, shape.softcap > 0.0, is_spread, height, BLOCK, block_dim,
                num_warps=8 if height == TILE_PAIRS[-1] else 4,
            )  # fmt: skip
        return out


def _heights(pool: KvPool) -> dict[int, list[int]]:
    """By query heads of a KV head: the heights of tiles that the device's shared memory holds, rising."""
    heights, keys = dict[int, list[int]](), pool.keys[0]
    for group in sorted({shape.num_heads // shape.num_kv_heads for shape in pool.shapes}):
        head_dim = max(shape.head_dim for shape in pool.shapes if shape.num_heads // shape.num_kv_heads == group)
        least, most = max(TILE_PAIRS[0], power_of_two(group)), shared_bytes(keys.device) // power_of_two(head_dim)
        taller = [height for height in TILE_PAIRS if height > least and 256 + 6.5 * height <= most]
        heights[group] = [least, *(taller if keys.dtype.itemsize == 2 else ())]
    return heights


_TileRow = tuple[int, int, int, int, int]


def _cut(data: AttentionMetadata, group: int, heights: Sequence[int]) -> dict[int, list[_TileRow]]:
    """By height: tiles of rows of one sequence, as the kernel reads them. Runs of text take the highest tile that they fill."""
    tiles: dict[int, list[_TileRow]] = {height: [] for height in heights}
    path_lengths = np.diff(data.path_start)
    for sequence, (start, end) in enumerate(zip(data.row_start[:-1], data.row_start[1:], strict=True)):
        context = data.context_start[sequence]
        num_context = data.context_start[sequence + 1] - context
        is_text = not path_lengths[start:end].any()
        height = max(h for h in heights if h == heights[0] or (is_text and h <= (end - start) * group))
        for first in range(start, end, height // group):
            own = slice(first, min(first + height // group, end))
            with_path = data.context_end[own][path_lengths[own] > 0]
            shared = with_path.min() // BLOCK * BLOCK if len(with_path) else data.context_end[own].max()
            longest = (data.context_end[own] + path_lengths[own]).max()
            assert shared <= num_context, "the kernel reads slots unchecked"
            tiles[height].append((first, own.stop, context, shared, longest))
    return tiles


class TritonProducts(TorchBackend):
    """The torch backend with products by Triton: cuBLAS chooses other algorithms for the same tile."""

    @functools.cached_property
    def _arrivals(self) -> Tensor:
        return torch.zeros(NUM_ARRIVALS, dtype=torch.int32, device=self.device)

    def make_linear(self, weight: Tensor, bias: Tensor | None = None) -> nn.Module:
        weight, bias = weight.to(self.device), self._placed(bias)
        return TritonInt8Linear(weight, bias) if self._is_int8 else TritonLinear(weight, bias, self._arrivals)


class CudaBackend(TritonProducts):
    """See `ragspec.numerics.backend.Backend`."""

    name = "cuda"

    def make_norm(self, norm: Any, *, residual: bool = False) -> nn.Module:
        return ResidualTritonNorm(norm) if residual else TritonNorm(norm)

    def _inputs(self, metadata: AttentionMetadata, pool: KvPool, num_rows: int) -> CudaInputs:
        return CudaInputs(metadata, pool, num_rows)

    def _forward(self, pool: KvPool, metadata: AttentionMetadata, inputs: ForwardInputs, packed: Tensor) -> CudaForward:
        assert isinstance(inputs, CudaInputs)
        return CudaForward(pool, metadata, inputs, packed, self._arrivals)

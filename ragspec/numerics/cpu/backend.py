"""The CPU backend: oneDNN's packed products or compiled int8 steps, compiled attention and norms, numpy pools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ragspec.numerics.attention import AttentionMetadata, AttentionShape, Floats, Ints, attend
from ragspec.numerics.cpu.int8 import Int8Decoder, Int8Layer, Int8Linear, are_whole_blocks, has_int8_shape
from ragspec.numerics.cpu.int8_weights import WeightArena
from ragspec.numerics.kv_cache import KvPool
from ragspec.numerics.linear import PackedLinear
from ragspec.numerics.norms import ResidualNorm, RootMeanSquareNorm
from ragspec.numerics.ranks import ONE_RANK, Ranks


class CpuForward(NamedTuple):
    """See `ragspec.numerics.backend.ForwardContext`."""

    pool: KvPool
    metadata: AttentionMetadata

    def attend(
        self, layer: int, qkv: Tensor, shape: AttentionShape, rotations: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        cos, sin = (table.numpy() for table in rotations) if rotations else (None, None)
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        out = attend(qkv.float().contiguous().numpy(), keys, values, self.metadata, shape, cos, sin)
        return torch.from_numpy(out).to(qkv.dtype)


class CpuBackend:
    """See `ragspec.numerics.backend.Backend`. With an `arena`, weights are quantised to int8 and go there.

    `kv_dtype`: of the pools; uint16 holds bfloat16. `kv_dir`: the folder of their files, "" for main memory.
    """

    name, device, runs_ahead = "cpu", torch.device("cpu"), False

    def __init__(
        self,
        arena: WeightArena | None = None,
        ranks: Ranks = ONE_RANK,
        kv_dtype: type[np.generic] = np.float32,
        kv_dir: str = "",
    ) -> None:
        self.arena, self._ranks, self._kv_dtype, self._kv_dir = arena, ranks, kv_dtype, kv_dir
        self.kv_itemsize = np.dtype(kv_dtype).itemsize
        self.least_rows = 2 if arena is None else 1
        """Every packed product doubles a single row; doubled once for the whole forward, the copy is computed and never read."""

    @property
    def alone(self) -> CpuBackend:
        return CpuBackend(WeightArena() if self.arena is not None else None)

    def for_head(self, dtype: torch.dtype) -> CpuBackend:
        """Keys beside int8 are bfloat16, as the target's are unless configured: so both run the same compiled step."""
        return CpuBackend(WeightArena(), kv_dtype=np.uint16) if dtype == torch.int8 else CpuBackend()

    def place(self, model: nn.Module) -> None: ...

    def make_pool(self, shapes: list[AttentionShape], num_slots: int) -> KvPool:
        return KvPool(shapes, num_slots, dtype=self._kv_dtype, folder=self._kv_dir)

    def make_linear(self, weight: Tensor, bias: Tensor | None = None) -> nn.Module:
        if self.arena is not None:
            return Int8Linear(weight, bias, self._ranks, self.arena)
        return PackedLinear(weight, bias)

    def make_norm(self, norm: Any, *, residual: bool = False) -> nn.Module:
        return ResidualNorm(norm) if residual else RootMeanSquareNorm(norm)

    def make_decoder(self, model: Any, rotations: tuple[Tensor, Tensor], ranks: Ranks) -> nn.Module | None:
        if self.arena is None or not has_int8_shape(model):
            return None
        return Int8Decoder(model, *rotations, ranks, self.arena)

    def make_layer(
        self, layer: Any, shape: AttentionShape, rotations: tuple[Tensor, Tensor], index: int
    ) -> Int8Layer | None:
        width, num_inputs = layer.self_attn.o_proj.weight.shape[0], layer.self_attn.q_proj.weight.shape[1]
        if self.arena is None or not are_whole_blocks(width, num_inputs, shape.head_dim):
            return None
        return Int8Layer(layer, shape, rotations, index, self.arena)

    def tokens(self, token_ids: NDArray[np.integer[Any]] | Tensor) -> Tensor:
        return torch.from_numpy(np.array(token_ids, np.int64))

    def context(self, pool: KvPool, metadata: AttentionMetadata) -> CpuForward:
        return CpuForward(pool, metadata)

    def decode(
        self, decoder: Any, token_ids: Ints | Tensor, pool: KvPool, metadata: AttentionMetadata, taps: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        hidden: tuple[Tensor, dict[int, Tensor]] = decoder(self.tokens(token_ids), CpuForward(pool, metadata), taps)
        return hidden

    def wait(self) -> None: ...

    def logits(self, values: Tensor, token_ids: Tensor | None = None, vocab_size: int = 0) -> Floats:
        rows: Floats = values.numpy()
        return rows

    def best_tokens(self, logits: Tensor, logit_rows: Ints, num_rows: int) -> Tensor:
        best = np.full(num_rows, -1)
        best[logit_rows] = logits.numpy().argmax(1)
        return torch.from_numpy(best)

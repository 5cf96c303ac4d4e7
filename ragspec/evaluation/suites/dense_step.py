"""The fastest step without the bitwise promise: fast kernels in place of the row-invariant kernels.

torch's scaled-dot-product attention over one dense cache replaces the paged kernel, and a single row is not
padded. Packed linears, fused projections, norms and the loop over layers stay; torch rotates and writes the cache.
A negative cost says that our whole step is faster. For timing only: nothing is decoded with this step.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ragspec.errors import ModelError
from ragspec.numerics.cpu.backend import CpuBackend
from ragspec.numerics.layers import Decoder, PagedAttention, make_row_invariant
from ragspec.numerics.linear import PackedLinear


class DenseBatch(NamedTuple):
    """Rows [start, start + N) of one sequence as a chain. Shapes: keys, values per layer [1, KV heads, T, head_dim];
    cos, sin [N, 1, head_dim]; mask bool [N, start + N], None for a single row."""

    keys: list[Tensor]
    values: list[Tensor]
    start: int
    cos: Tensor
    sin: Tensor
    mask: Tensor | None


class UnpaddedLinear(nn.Module):
    """The packed product without padding of a single row."""

    def __init__(self, packed: PackedLinear) -> None:
        super().__init__()
        self.packed, self.bias = packed.packed, packed.bias
        self.in_features, self.out_features = packed.in_features, packed.out_features

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)  # [N, in]
        y = torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")
        return cast(Tensor, y).view(*x.shape[:-1], self.out_features)


class DenseAttention(nn.Module):
    """`PagedAttention` with a dense cache and torch's attention; query heads of a group share one product."""

    def __init__(self, paged: PagedAttention) -> None:
        super().__init__()
        self.shape, self.layer = paged.shape, paged.layer
        assert isinstance(paged.qkv, PackedLinear), "the variant computes with float weights"
        self.qkv, self.out = UnpaddedLinear(paged.qkv), UnpaddedLinear(paged.out)

    def forward(self, x: Tensor, step: DenseBatch) -> Tensor:
        heads, kv_heads, dim = self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim
        group = heads // kv_heads
        qkv = self.qkv(x).view(-1, heads + 2 * kv_heads, dim)  # [N, heads, D]
        num_rows, end = len(qkv), step.start + len(qkv)
        qk = qkv[:, : heads + kv_heads]
        turned = torch.cat([-qk[..., dim // 2 :], qk[..., : dim // 2]], -1)
        qk = qk * step.cos + turned * step.sin
        keys, values = step.keys[self.layer], step.values[self.layer]
        keys[0, :, step.start : end] = qk[:, heads:].transpose(0, 1)
        values[0, :, step.start : end] = qkv[:, heads + kv_heads :].transpose(0, 1)
        q = qk[:, :heads].view(num_rows, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, dim)
        mask = None if step.mask is None else step.mask.repeat(group, 1)
        out = F.scaled_dot_product_attention(
            q, keys[:, :, :end], values[:, :, :end], attn_mask=mask, scale=self.shape.scale
        )
        out = out.view(kv_heads, group, num_rows, dim).permute(2, 0, 1, 3).reshape(num_rows, heads * dim)
        return cast(Tensor, self.out(out))


class FastestStep:
    """Replaces the parts of an untouched transformers model whose decoder the engine replaces as a whole.

    Raises: ModelError for any other.
    """

    def __init__(self, model: Any, context: int, max_rows: int) -> None:
        dtype, end = next(model.parameters()).dtype, context + max_rows
        with torch.inference_mode():
            self._cos, self._sin = model.model.rotary_emb(torch.zeros(1, dtype=dtype), torch.arange(end)[None])
        make_row_invariant(model, end, CpuBackend())
        if not isinstance(model.model, Decoder):
            raise ModelError(f"no variant step for {type(model).__name__}: its decoder is not replaced as a whole")
        _swap(model)
        self._decoder, self._head = model.model, model.lm_head
        self._context = context
        shapes = [m.shape for m in model.modules() if isinstance(m, DenseAttention)]
        self._keys, self._values = (
            [torch.zeros(1, shape.num_kv_heads, end, shape.head_dim, dtype=dtype) for shape in shapes] for _ in range(2)
        )

    def forward(self, token_ids: Tensor) -> Tensor:
        """One step of N rows after a context of zeros. Shapes: int64 [N] -> [N, V]."""
        num_rows, start = len(token_ids), self._context
        end = start + num_rows
        with torch.inference_mode():
            cos, sin = self._cos[0, start:end, None], self._sin[0, start:end, None]
            visible = torch.ones(num_rows, end, dtype=torch.bool).tril(start) if num_rows > 1 else None
            step = DenseBatch(self._keys, self._values, start, cos, sin, visible)
            hidden = self._decoder.through_layers(self._decoder.embedding(token_ids), cast(Any, step))  # [N, H]
            return cast(Tensor, self._head(hidden))


def _swap(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, PagedAttention):
            setattr(module, name, DenseAttention(child))
        elif isinstance(child, PackedLinear):
            setattr(module, name, UnpaddedLinear(child))
        else:
            _swap(child)

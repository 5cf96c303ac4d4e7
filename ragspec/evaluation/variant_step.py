"""The fastest step that keeps no promise: our row-invariant parts swapped for the fastest kernels that are not.

torch's scaled-dot-product attention over one dense cache takes the place of the paged kernel, and a single row is not padded.
Everything else (packed linears, fused projections, transformers' own forward) stays, so the difference is the price of the
promise. Only for timing: weights of the two models need not be the same, and nothing is ever decoded with this.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ragspec.numerics.layers import PagedAttention
from ragspec.numerics.linear import PackedLinear


class DenseStep(NamedTuple):
    """Rows [start, start + N) of one sequence as a chain. Shapes: keys, values per layer [1, KV heads, T, head_dim];
    cos, sin [N, 1, head_dim]; mask bool [N, start + N], None for a single row."""

    keys: list[Tensor]
    values: list[Tensor]
    start: int
    cos: Tensor
    sin: Tensor
    mask: Tensor | None


class UnpaddedLinear(nn.Module):
    """The packed product, with one row left alone."""

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
        self.qkv, self.out = UnpaddedLinear(paged.qkv), UnpaddedLinear(paged.out)

    def forward(self, hidden_states: Tensor, step: DenseStep, **_: Any) -> tuple[Tensor, None]:
        heads, kv_heads, dim = self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim
        group = heads // kv_heads
        qkv = self.qkv(hidden_states[0]).view(-1, heads + 2 * kv_heads, dim)  # [N, heads, D]
        num_rows, end = len(qkv), step.start + len(qkv)
        x = qkv[:, : heads + kv_heads]
        turned = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
        x = x * step.cos + turned * step.sin
        keys, values = step.keys[self.layer], step.values[self.layer]
        keys[0, :, step.start : end] = x[:, heads:].transpose(0, 1)
        values[0, :, step.start : end] = qkv[:, heads + kv_heads :].transpose(0, 1)
        q = x[:, :heads].view(num_rows, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, dim)
        mask = None if step.mask is None else step.mask.repeat(group, 1)
        out = F.scaled_dot_product_attention(
            q, keys[:, :, :end], values[:, :, :end], attn_mask=mask, scale=self.shape.scale
        )
        out = out.view(kv_heads, group, num_rows, dim).permute(2, 0, 1, 3).reshape(1, num_rows, heads * dim)
        return self.out(out), None


class VariantStep:
    """Takes over a model that was made row-invariant, and undoes that."""

    def __init__(self, model: Any, context: int, max_rows: int) -> None:
        _swap(model)
        self._model = model
        self._context = context
        attentions = [m for m in model.modules() if isinstance(m, DenseAttention)]
        dtype = next(model.parameters()).dtype
        shapes = [(1, a.shape.num_kv_heads, context + max_rows, a.shape.head_dim) for a in attentions]
        self._keys = [torch.zeros(shape, dtype=dtype) for shape in shapes]
        self._values = [torch.zeros(shape, dtype=dtype) for shape in shapes]

    def forward(self, token_ids: Tensor) -> Tensor:
        """One step of N rows after the context. Shapes: int64 [N] -> [N, V]."""
        num_rows, start = len(token_ids), self._context
        positions = torch.arange(start, start + num_rows)[None]
        with torch.inference_mode():
            cos, sin = self._model.model.rotary_emb(self._keys[0], positions)
            visible = torch.ones(num_rows, start + num_rows, dtype=torch.bool).tril(start) if num_rows > 1 else None
            step = DenseStep(self._keys, self._values, start, cos[0][:, None], sin[0][:, None], visible)
            hidden = self._model.model(
                input_ids=token_ids[None], position_ids=positions, use_cache=False, step=step
            ).last_hidden_state[0]
            return cast(Tensor, self._model.lm_head(hidden))


def _swap(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, PagedAttention):
            setattr(module, name, DenseAttention(child))
        elif isinstance(child, PackedLinear):
            setattr(module, name, UnpaddedLinear(child))
        else:
            _swap(child)

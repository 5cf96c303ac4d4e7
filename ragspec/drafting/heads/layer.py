"""A head's decoder layer: attention over keys of its own, then a gated feed-forward, with products of the target's backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor, nn

from ragspec.numerics.attention import AttentionMetadata, AttentionShape
from ragspec.numerics.backend import Backend
from ragspec.numerics.kv_cache import KvPool
from ragspec.numerics.layers import GatedFeedForward


class HeadLayer:
    """`weights`: by their names inside a layer; biases and norms of queries and keys may be absent. `rotations`: cosines and
    sines, float32 [positions, head_dim] each. `index`: of its keys in the head's cache.

    Products are in the dtype of the weights, everything between them in float32.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        shape: AttentionShape,
        rms_norm_eps: float,
        rotations: tuple[Tensor, Tensor],
        backend: Backend,
        index: int = 0,
    ) -> None:
        self.shape, self._index, self._backend, make_linear = shape, index, backend, backend.make_linear
        self._dtype = weights["self_attn.o_proj.weight"].dtype
        projections = [weights[f"self_attn.{name}_proj.weight"] for name in ("q", "k", "v")]
        biases = [weights[name] for part in ("q", "k", "v") if (name := f"self_attn.{part}_proj.bias") in weights]
        self._qkv = make_linear(torch.cat(projections), torch.cat(biases) if biases else None)
        self._out = make_linear(weights["self_attn.o_proj.weight"], weights.get("self_attn.o_proj.bias"))
        norms = [weights[name] for part in ("q", "k") if (name := f"self_attn.{part}_norm.weight") in weights]
        self._head_norms = [backend.make_norm(_norm_of(weight, rms_norm_eps)) for weight in norms]
        parts = {f"{name}_proj": _linear(weights[f"mlp.{name}_proj.weight"]) for name in ("gate", "up", "down")}
        gated = SimpleNamespace(**parts, config=SimpleNamespace(hidden_act="silu"))
        self._feed_forward = GatedFeedForward(gated, make_linear)
        self._feed_forward_norm = make_norm(backend, weights["post_attention_layernorm.weight"], rms_norm_eps)
        cos, sin = rotations
        self._rotations = cos.to(backend.device), sin.to(backend.device)

    def forward(self, residual: Tensor, x: Tensor, cache: KvPool, metadata: AttentionMetadata) -> Tensor:
        """Shapes: residual [N, H], x [N, inputs] -> [N, H]."""
        attended = self.attend(x, cache, metadata)
        stream, normalised = self._feed_forward_norm(residual, self._product(self._out, attended.flatten(1)))
        return cast(Tensor, stream + self._product(self._feed_forward, normalised))

    def attend(self, x: Tensor, cache: KvPool, metadata: AttentionMetadata) -> Tensor:
        """Write the rows' keys and values, and attend. Shapes: x [N, inputs] -> [N, heads, head_dim]."""
        shape = self.shape
        qkv = self._product(self._qkv, x).view(len(x), shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        if self._head_norms:
            q, k, v = qkv.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], 1)
            q_norm, k_norm = self._head_norms
            qkv = torch.cat([q_norm(q), k_norm(k), v], 1)
        return self._backend.context(cache, metadata).attend(self._index, qkv, shape, self._rotations)

    def _product(self, layer: nn.Module, x: Tensor) -> Tensor:
        return cast(Tensor, layer(x.to(self._dtype)).float())


def make_cache(layers: Sequence[HeadLayer], backend: Backend, pool: KvPool, num_own_slots: int) -> KvPool:
    """Keys and values of layers. The first slots belong to the target's pool, the others to draft nodes, so drafts take no
    slots from running sequences."""
    return backend.make_pool([layer.shape for layer in layers], pool.num_slots + num_own_slots)


def make_norm(backend: Backend, weight: Tensor, rms_norm_eps: float) -> nn.Module:
    """An RMS norm: (x, block) -> (x + block, normalised)."""
    return backend.make_norm(backend.make_norm(_norm_of(weight, rms_norm_eps)), residual=True)


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    return cast(Tensor, norm(x, torch.zeros_like(x))[1])


def _norm_of(weight: Tensor, rms_norm_eps: float) -> SimpleNamespace:
    return SimpleNamespace(weight=weight.float(), variance_epsilon=rms_norm_eps)


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear

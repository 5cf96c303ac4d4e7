"""A head's decoder layer: attention over keys of its own, then a gated feed-forward, with products of the target's backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ragspec.numerics.attention import AttentionShape
from ragspec.numerics.backend import Backend, ForwardContext, LayerModule
from ragspec.numerics.kv_cache import KvPool
from ragspec.numerics.layers import GatedFeedForward


def make_layer(
    weights: Mapping[str, Tensor],
    shape: AttentionShape,
    rms_norm_eps: float,
    rotations: tuple[Tensor, Tensor],
    backend: Backend,
    index: int = 0,
) -> LayerModule:
    """The backend's own layer, or one of its products and norms. Everything between products is in float32.

    `weights`: by their names inside a layer; biases and norms of queries and keys may be absent. `rotations`: cosines and sines,
    float32 [positions, head_dim] each. `index`: of the layer's keys in the head's cache.
    """
    cos, sin = rotations
    rotations = cos.to(backend.device), sin.to(backend.device)
    attention: dict[str, Any] = {f"{name}_proj": _linear(weights, f"self_attn.{name}_proj") for name in "qkvo"}
    for name in ("q_norm", "k_norm"):
        weight = weights.get(f"self_attn.{name}.weight")
        attention[name] = None if weight is None else _norm_of(weight, rms_norm_eps)
    gated = {f"{name}_proj": _linear(weights, f"mlp.{name}_proj") for name in ("gate", "up", "down")}
    layer = SimpleNamespace(
        self_attn=SimpleNamespace(**attention),
        mlp=SimpleNamespace(**gated, config=SimpleNamespace(hidden_act="silu")),
        post_attention_layernorm=_norm_of(weights["post_attention_layernorm.weight"], rms_norm_eps),
    )
    return backend.make_layer(layer, shape, rotations, index) or HeadLayer(layer, shape, rotations, backend, index)


class HeadLayer:
    """See `make_layer`. Products are in the dtype of the weights, or in int8 where the backend's are."""

    def __init__(
        self, layer: Any, shape: AttentionShape, rotations: tuple[Tensor, Tensor], backend: Backend, index: int
    ) -> None:
        self.shape, self._index, self._rotations, make_linear = shape, index, rotations, backend.make_linear
        attention = layer.self_attn
        self._dtype = attention.o_proj.weight.dtype
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        biases = [projection.bias for projection in projections if projection.bias is not None]
        self._qkv = make_linear(torch.cat([p.weight for p in projections]), torch.cat(biases) if biases else None)
        self._out = make_linear(attention.o_proj.weight, attention.o_proj.bias)
        norms = (attention.q_norm, attention.k_norm)
        self._head_norms = [backend.make_norm(norm) for norm in norms if norm is not None]
        self._feed_forward = GatedFeedForward(layer.mlp, make_linear)
        self._feed_forward_norm = backend.make_norm(backend.make_norm(layer.post_attention_layernorm), residual=True)

    def __call__(self, stream: Tensor, x: Tensor, context: ForwardContext) -> Tensor:
        attended = self._attend(x, context)
        stream, normalised = self._feed_forward_norm(stream, self._product(self._out, attended.flatten(1)))
        return stream + self._product(self._feed_forward, normalised)

    def write(self, x: Tensor, context: ForwardContext) -> None:
        """Write the rows' keys and values. They are attended to in vain: no backend only writes."""
        self._attend(x, context)

    def _attend(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Shapes: x [N, inputs] -> [N, heads, head_dim]."""
        shape = self.shape
        qkv = self._product(self._qkv, x).view(len(x), shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        if self._head_norms:
            q, k, v = qkv.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], 1)
            q_norm, k_norm = self._head_norms
            qkv = torch.cat([q_norm(q), k_norm(k), v], 1)
        return context.attend(self._index, qkv, shape, self._rotations)

    def _product(self, layer: nn.Module, x: Tensor) -> Tensor:
        return cast(Tensor, layer(x.to(self._dtype)).float())


def make_cache(layers: Sequence[LayerModule], backend: Backend, pool: KvPool, num_own_slots: int) -> KvPool:
    """Keys and values of layers. The first slots belong to the target's pool, the others to draft nodes, so drafts take no
    slots from running sequences."""
    return backend.make_pool([layer.shape for layer in layers], pool.num_slots + num_own_slots)


def make_norm(backend: Backend, weight: Tensor, rms_norm_eps: float) -> nn.Module:
    """An RMS norm."""
    return backend.make_norm(_norm_of(weight, rms_norm_eps))


def _norm_of(weight: Tensor, rms_norm_eps: float) -> SimpleNamespace:
    return SimpleNamespace(weight=weight.float(), variance_epsilon=rms_norm_eps)


def _linear(weights: Mapping[str, Tensor], name: str) -> nn.Linear:
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear

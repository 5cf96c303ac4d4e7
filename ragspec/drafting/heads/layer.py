"""A head's decoder layer, attention over keys of its own and a gated feed-forward, and the target's part that heads need.

`DecoderLayer` holds the weights by their published names, and trains. `make_layer` runs the same weights in the engine, with
products, norms and attention of the target's backend; `serve` replaces the other products and norms of a head.
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ragspec.numerics.attention import AttentionMetadata, AttentionShape, Ints
from ragspec.numerics.backend import Backend, ForwardContext, LayerModule, LogitRows
from ragspec.numerics.kv_cache import KvPool
from ragspec.numerics.layers import GatedFeedForward

FINAL = -1
"""The tap of the target's final norm (`ragspec.engine.target`)."""


def float_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which dtype a backend takes the weights of products in `dtype`."""
    return torch.float32 if dtype == torch.int8 else dtype


class DraftTarget(Protocol):
    """See `ragspec.engine.target.Target`."""

    vocab_size: int
    hidden_size: int
    num_positions: int
    backend: Backend
    pool: KvPool

    @property
    def embedding(self) -> Tensor:
        """On the backend's device. Shape: [V, H]."""

    @property
    def num_layers(self) -> int: ...

    @property
    def text_config(self) -> Any:
        """The model's configuration, as transformers reads it."""

    def forward_tapped(
        self, token_ids: Ints | Tensor, metadata: AttentionMetadata, logit_rows: Ints, taps: Sequence[int]
    ) -> tuple[LogitRows, Mapping[int, Tensor]]: ...

    def states_through(
        self, layers: Sequence[int], token_ids: Ints | Tensor, metadata: AttentionMetadata
    ) -> Tensor: ...

    def logits_of(self, states: Tensor) -> Tensor: ...


Rotations = tuple[Tensor, Tensor]
"""Cosines and sines of rotary positions. Shapes: float32 [positions, head_dim] each."""


class RmsNorm(nn.RMSNorm):
    """An RMS norm that a backend can replace (`Backend.make_norm`)."""

    @property
    def variance_epsilon(self) -> float:
        return float(self.eps or 0.0)


class KeyValues(NamedTuple):
    """Rotated keys, and values. Shapes: [B, kv_heads, rows, D]."""

    keys: Tensor
    values: Tensor


class HeadAttention(nn.Module):
    """Grouped-query attention. `num_inputs`: width of the rows that it reads; `width`: of its output."""

    def __init__(
        self,
        shape: AttentionShape,
        num_inputs: int,
        width: int,
        rms_norm_eps: float,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        self.shape = shape
        size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(num_inputs, size, bias=qkv_bias)
        self.k_proj = nn.Linear(num_inputs, kv_size, bias=qkv_bias)
        self.v_proj = nn.Linear(num_inputs, kv_size, bias=qkv_bias)
        self.o_proj = nn.Linear(size, width, bias=output_bias)
        self.q_norm = RmsNorm(shape.head_dim, rms_norm_eps) if qk_norm else None
        self.k_norm = RmsNorm(shape.head_dim, rms_norm_eps) if qk_norm else None

    def keys_values(self, inputs: Tensor, rotations: Rotations) -> KeyValues:
        """Shapes: inputs [B, rows, num_inputs], rotations [B or 1, rows, D]."""
        keys = self._split(self.k_proj(inputs), self.k_norm)
        return KeyValues(_rotated(keys, rotations), self._split(self.v_proj(inputs)))

    def forward(
        self, inputs: Tensor, rotations: Rotations, text: KeyValues, own: list[KeyValues], bias: Tensor
    ) -> Tensor:
        """Row a attends to the text's pairs that `bias` does not hide, and to row a of each earlier draft step.

        Shapes: inputs [B, A, num_inputs], bias [B, 1, 1, A, T] -> [B, A, H].
        """
        size, num_rows = inputs.shape[:2]
        shape, num_pairs = self.shape, text.keys.shape[2]
        query = _rotated(self._split(self.q_proj(inputs), self.q_norm), rotations) * shape.scale
        query = query.view(size, shape.num_kv_heads, -1, num_rows, shape.head_dim)  # [B, kv_heads, groups, A, D]
        scores = (query.flatten(2, 3) @ text.keys.transpose(2, 3)).view(*query.shape[:-1], -1)
        scores = scores + bias.to(scores.dtype)
        own_scores = [(query * step.keys[:, :, None]).sum(-1, keepdim=True) for step in own]
        with torch.autocast(inputs.device.type, enabled=False):
            weights = torch.softmax(torch.cat([scores, *own_scores], -1), -1)
        out = (weights[..., :num_pairs].flatten(2, 3) @ text.values).view(query.shape)
        for index, step in enumerate(own):
            out = out + weights[..., num_pairs + index, None] * step.values[:, :, None]
        out = out.flatten(1, 2).transpose(1, 2)  # [B, A, heads, D]
        return cast(Tensor, self.o_proj(out.reshape(size, num_rows, -1)))

    def _split(self, projected: Tensor, norm: RmsNorm | None = None) -> Tensor:
        heads = projected.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
        return heads if norm is None else cast(Tensor, norm(heads.float())).to(heads.dtype)


def _rotated(heads: Tensor, rotations: Rotations) -> Tensor:
    cos, sin = (table[:, None].to(heads.dtype) for table in rotations)
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat([-second, first], -1) * sin


class FeedForward(nn.Module):
    """SwiGLU."""

    config = SimpleNamespace(hidden_act="silu")

    def __init__(self, width: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, intermediate_size, bias=False)
        self.up_proj = nn.Linear(width, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, width, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(inputs)) * self.up_proj(inputs)))


class DecoderLayer(nn.Module):
    """Attention and feed-forward. A head norms the inputs of the attention itself, and may keep those norms here."""

    input_layernorm: nn.Module
    hidden_norm: nn.Module

    def __init__(self, attention: HeadAttention, intermediate_size: int, rms_norm_eps: float) -> None:
        super().__init__()
        width = attention.o_proj.out_features
        self.self_attn = attention
        self.mlp = FeedForward(width, intermediate_size)
        self.post_attention_layernorm = RmsNorm(width, rms_norm_eps)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Add attention and feed-forward to the residual stream."""
        hidden = residual + attended
        return hidden + cast(Tensor, self.mlp(self.post_attention_layernorm(hidden)))


class CastProduct(nn.Module):
    """A backend's product over inputs in the dtype of its weights, with a result in float32."""

    def __init__(self, linear: nn.Linear, backend: Backend) -> None:
        super().__init__()
        self.linear, self._dtype = backend.make_linear(linear.weight, linear.bias), linear.weight.dtype

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.linear(x.to(self._dtype))).float()


def prepare(head: nn.Module, tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> None:
    """Give a head on the meta device its weights for serving: products in `dtype`, norms rounded to it and held in float32."""
    own = {name: tensors[name] for name in head.state_dict() if name in tensors}
    floats = {name: t.detach().to(device, dtype) for name, t in own.items() if t.is_floating_point()}
    head.load_state_dict(floats, strict=False, assign=True)
    head.requires_grad_(False)
    for module in head.modules():
        if isinstance(module, RmsNorm):
            module.float()


def serve(head: nn.Module, backend: Backend) -> None:
    """Replace products and norms by the backend's, in place. A decoder layer's own ones stay: `make_layer` takes them."""
    taken = ("self_attn", "mlp", "post_attention_layernorm") if isinstance(head, DecoderLayer) else ()
    for name, child in head.named_children():
        if name in taken:
            continue
        if isinstance(child, nn.Linear):
            setattr(head, name, CastProduct(child, backend))
        elif type(child) is RmsNorm:
            setattr(head, name, backend.make_norm(child))
        else:
            serve(child, backend)


def make_layer(layer: DecoderLayer, rotations: Rotations, backend: Backend, index: int = 0) -> LayerModule:
    """The backend's own layer, or a layer of its products and norms. Everything between products is in float32.

    Takes the weights out of `layer`. `index`: of the layer's keys in the head's cache.
    """
    cos, sin = rotations
    rotations, shape = (cos.to(backend.device), sin.to(backend.device)), layer.self_attn.shape
    made = backend.make_layer(layer, shape, rotations, index) or HeadLayer(layer, rotations, backend, index)
    del layer.self_attn, layer.mlp, layer.post_attention_layernorm
    return made


class HeadLayer:
    """See `make_layer`. Products are in the dtype of the weights, or in int8 where the backend's are."""

    def __init__(self, layer: DecoderLayer, rotations: Rotations, backend: Backend, index: int) -> None:
        attention, make_linear = layer.self_attn, backend.make_linear
        self.shape, self._index, self._rotations = attention.shape, index, rotations
        self._dtype = attention.o_proj.weight.dtype
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        biases = [cast(Tensor, projection.bias) for projection in projections if projection.bias is not None]
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

    def _product(self, layer: Any, x: Tensor) -> Tensor:
        return cast(Tensor, layer(x.to(self._dtype)).float())


def make_cache(layers: Sequence[LayerModule], backend: Backend, pool: KvPool, num_own_slots: int) -> KvPool:
    """Keys and values of layers. The first slots belong to the target's pool, the others to draft nodes, so drafts take no
    slots from running sequences."""
    return backend.make_pool([layer.shape for layer in layers], pool.num_slots + num_own_slots)

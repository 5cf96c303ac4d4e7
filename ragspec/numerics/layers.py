"""The layers of a transformers model in a row-invariant and faster form, put in place after loading.

The module tree and the model's own forward stay as transformers wrote them; only leaves are replaced, and only where the
class is known to compute exactly this. Whatever is not known stays, and the start-up self-test judges the result.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ragspec.errors import ModelError
from ragspec.numerics.attention import AttentionShape, Rows, attend
from ragspec.numerics.kv_cache import KvPool
from ragspec.numerics.linear import PackedLinear, pack_linears

FFN_MULTIPLE = 64
"""SwiGLU widths are padded to this: at odd widths the vectorised activation treats a row's end by its place in the batch."""

_ATTENTION = {"LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention"}
_GATED = {"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP"}
_NORMS = {"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"}
_ROTARY = {"LlamaRotaryEmbedding", "MistralRotaryEmbedding", "Qwen2RotaryEmbedding", "Qwen3RotaryEmbedding"}


class StepContext(NamedTuple):
    """What attention needs beside the hidden states of one forward; reaches it as the keyword `step`."""

    pool: KvPool
    rows: Rows


class PagedAttention(nn.Module):
    """Queries, keys and values as one packed product; rotation, cache and softmax in one kernel; output product.

    Shapes: hidden_states [1, N, H] -> [1, N, H].
    """

    def __init__(self, attention: Any, rotary: RotaryTable) -> None:
        super().__init__()
        config = attention.config
        self.layer = attention.layer_idx
        per_layer = hasattr(attention, "layer_type") or hasattr(attention, "sliding_window")
        window = getattr(attention if per_layer else config, "sliding_window", None)
        self.shape = AttentionShape(
            config.num_attention_heads, config.num_key_value_heads, attention.head_dim, attention.scaling, window or 0
        )
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        bias = None if projections[0].bias is None else torch.cat([p.bias.detach() for p in projections])
        self.qkv = PackedLinear(torch.cat([p.weight.detach() for p in projections]), bias)
        self.out = PackedLinear.from_linear(attention.o_proj)
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self._cos, self._sin = rotary.cos.float().numpy(), rotary.sin.float().numpy()

    def forward(self, hidden_states: Tensor, step: StepContext, **_: Any) -> tuple[Tensor, None]:
        shape = self.shape
        qkv = self.qkv(hidden_states[0]).view(-1, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = qkv.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], 1)
            qkv = torch.cat([self.q_norm(q), self.k_norm(k), v], 1)
        pool, rows = step
        out = attend(
            qkv.float().numpy(), pool.keys[self.layer], pool.values[self.layer], rows, shape, self._cos, self._sin
        )
        return self.out(torch.from_numpy(out).view(1, len(out), -1).to(hidden_states.dtype)), None


class GatedFeedForward(nn.Module):
    """`down(act(gate(x)) * up(x))` with gate and up as one packed product. Shapes: [..., H] -> [..., H]."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        width = mlp.gate_proj.out_features
        self.width = -(-width // FFN_MULTIPLE) * FFN_MULTIPLE
        extra = self.width - width
        gate, up = (F.pad(p.weight.detach(), (0, 0, 0, extra)) for p in (mlp.gate_proj, mlp.up_proj))
        biases = [p.bias for p in (mlp.gate_proj, mlp.up_proj)]
        bias = None if biases[0] is None else torch.cat([F.pad(b.detach(), (0, extra)) for b in biases])
        self.gate_up = PackedLinear(torch.cat([gate, up]), bias)
        self.down = PackedLinear(F.pad(mlp.down_proj.weight.detach(), (0, extra)), mlp.down_proj.bias)
        self.activation = F.silu if mlp.config.hidden_act == "silu" else mlp.act_fn

    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_up(x)
        return cast(Tensor, self.down(self.activation(both[..., : self.width]) * both[..., self.width :]))


class RootMeanSquareNorm(nn.Module):
    """`x / rms(x) * weight` in one operator; statistics in float32."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self.epsilon = norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.epsilon)


class RotaryTable(nn.Module):
    """Cosines and sines of every position, computed once: looked up, a value cannot depend on its neighbours.

    Shapes: position_ids int64 [1, N] -> (cos, sin) each [1, N, head_dim].
    Raises: ModelError when the angles depend on the length of the sequence.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, rotary: Any, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        kind = str(getattr(rotary, "rope_type", "default"))
        if "dynamic" in kind or kind == "longrope":
            raise ModelError(
                f"rotary embedding {kind!r} changes with the length of the sequence; the engine cannot serve it"
            )
        positions = torch.arange(max_positions)[None]
        cos, sin = rotary(torch.zeros(1, dtype=dtype), positions)
        self.register_buffer("cos", cos[0])
        self.register_buffer("sin", sin[0])

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[position_ids], self.sin[position_ids]


def make_row_invariant(model: nn.Module, max_positions: int) -> None:
    """Replace known layers and every linear of a transformers causal LM, in place."""
    dtype = next(model.parameters()).dtype
    rotary = _find_rotary(model, max_positions, dtype)
    _replace(model, rotary)
    pack_linears(model)


def _find_rotary(model: nn.Module, max_positions: int, dtype: torch.dtype) -> RotaryTable | None:
    known = [m for m in model.modules() if type(m).__name__ in _ROTARY]
    return RotaryTable(known[0], max_positions, dtype) if len(known) == 1 else None


def _replace(module: nn.Module, rotary: RotaryTable | None) -> None:
    for name, child in module.named_children():
        kind = type(child).__name__
        if kind in _GATED:
            setattr(module, name, GatedFeedForward(child))
        elif kind in _NORMS:
            setattr(module, name, RootMeanSquareNorm(child))
        elif kind in _ROTARY and rotary is not None:
            setattr(module, name, rotary)
        elif kind in _ATTENTION and rotary is not None and rotary.cos.shape[-1] == child.head_dim:
            _replace(child, rotary)
            setattr(module, name, PagedAttention(child, rotary))
        else:
            _replace(child, rotary)

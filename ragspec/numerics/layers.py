"""Row-invariant, faster replacements for the layers of a transformers model, put in place after loading.

Only modules of known classes are replaced; all others stay as transformers wrote them, and the start-up self-test judges the
result. In a tensor-parallel group each rank has some heads and a part of the feed-forward's width
(`ragspec.numerics.sharding`); activations are gathered before the next product. One rank gathers nothing.

    >>> make_row_invariant(model, max_positions=2048)      # in place
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ragspec.errors import ModelError
from ragspec.numerics.attention import AttentionMetadata, attend, shape_of
from ragspec.numerics.cpu.int8 import Int8Decoder, Int8Linear, has_int8_shape
from ragspec.numerics.cpu.int8_weights import WeightArena
from ragspec.numerics.kv_cache import KvPool
from ragspec.numerics.linear import PackedLinear, replace_linears
from ragspec.numerics.norms import ResidualNorm, RootMeanSquareNorm
from ragspec.numerics.ranks import ONE_RANK, Ranks
from ragspec.numerics.sharding import FFN_MULTIPLE, GatheredEmbedding, GatheredLinear, without_padding

_ATTENTION = {"LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention"}
_LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
_DECODERS = {"LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model"}
_ALIKE = ("Gemma", "Gemma2", "Granite", "Cohere", "Cohere2")
"""Families whose feed-forward and rotation are Llama's; attention and layers differ and stay theirs."""
_GATED = {"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", *(f"{family}MLP" for family in _ALIKE)}
_NORMS = {"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "GraniteRMSNorm"}
_ROTARY = {f"{family}RotaryEmbedding" for family in ("Llama", "Mistral", "Qwen2", "Qwen3", *_ALIKE)}


LinearClass = Callable[[Tensor, Tensor | None], nn.Module]


class ForwardContext(NamedTuple):
    """What every attention layer of one forward reads and writes beside hidden states: the pool, and which rows see what.

    Models whose own forward runs hand it to attention as the keyword `forward_context`.
    """

    pool: KvPool
    metadata: AttentionMetadata


class PagedAttention(nn.Module):
    """Queries, keys and values as one packed product; rotation, cache and softmax in one kernel; output product.

    Shapes: [N, H] -> [N, H].
    """

    def __init__(
        self, attention: Any, rotary: RotaryTable, ranks: Ranks = ONE_RANK, make_linear: LinearClass = PackedLinear
    ) -> None:
        super().__init__()
        self._ranks = ranks
        self.layer, self.shape = attention.layer_idx, shape_of(attention, ranks.size)
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        bias = None if projections[0].bias is None else torch.cat([p.bias.detach() for p in projections])
        self.qkv = make_linear(torch.cat([p.weight.detach() for p in projections]), bias)
        self.out = _output(attention.o_proj, ranks, make_linear=make_linear)
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self._cos, self._sin = rotary.cos.float().numpy(), rotary.sin.float().numpy()

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        shape, (pool, metadata) = self.shape, context
        qkv = self.qkv(x).view(-1, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = qkv.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], 1)
            qkv = torch.cat([self.q_norm(q), self.k_norm(k), v], 1)
        keys, values = pool.keys[self.layer], pool.values[self.layer]
        out = attend(qkv.float().numpy(), keys, values, metadata, shape, self._cos, self._sin)
        heads = torch.from_numpy(out).view(len(out), -1).to(x.dtype)
        return cast(Tensor, self.out(self._ranks.all_gather(heads)))


class GatedFeedForward(nn.Module):
    """`down(act(gate(x)) * up(x))` with gate and up as one packed product. Shapes: [N, H] -> [N, H]."""

    def __init__(self, mlp: Any, ranks: Ranks = ONE_RANK, make_linear: LinearClass = PackedLinear) -> None:
        super().__init__()
        self._ranks = ranks
        own_width, inner_width = len(mlp.gate_proj.weight), mlp.down_proj.weight.shape[1]
        self.width, self._inner_width = own_width + _padding(own_width), inner_width + _padding(inner_width)
        gate, up = (F.pad(p.weight.detach(), (0, 0, 0, _padding(own_width))) for p in (mlp.gate_proj, mlp.up_proj))
        biases = [p.bias for p in (mlp.gate_proj, mlp.up_proj)]
        bias = None if biases[0] is None else torch.cat([F.pad(b.detach(), (0, _padding(own_width))) for b in biases])
        self.gate_up = make_linear(torch.cat([gate, up]), bias)
        self.down = _output(mlp.down_proj, ranks, _padding(inner_width), make_linear)
        self.activation = F.silu if getattr(mlp.config, "hidden_act", "") == "silu" else mlp.act_fn

    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_up(x)
        inner = self.activation(both[..., : self.width]) * both[..., self.width :]
        return cast(Tensor, self.down(without_padding(self._ranks.all_gather(inner), self._inner_width)))


def _padding(width: int) -> int:
    return -width % FFN_MULTIPLE


def _output(linear: Any, ranks: Ranks, num_more_inputs: int = 0, make_linear: LinearClass = PackedLinear) -> Any:
    """The product back into the stream, with `num_more_inputs` zero inputs appended."""
    own = make_linear(F.pad(linear.weight.detach(), (0, num_more_inputs)), linear.bias)
    return own if ranks.size == 1 else GatheredLinear(own, linear.out_features, ranks)


class RotaryTable(nn.Module):
    """Cosines and sines of every position, computed once, so that no value depends on its neighbours.

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


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each on the normalised stream. The next layer adds the feed-forward's output to the stream.

    Shapes: x, block [N, H] -> (x, block), both [N, H].
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.attention, self.feed_forward = layer.self_attn, layer.mlp
        self.attention_norm = ResidualNorm(layer.input_layernorm)
        self.feed_forward_norm = ResidualNorm(layer.post_attention_layernorm)

    def forward(self, x: Tensor, block: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor]:
        x, normalised = self.attention_norm(x, block)
        x, normalised = self.feed_forward_norm(x, self.attention(normalised, context))
        return x, self.feed_forward(normalised)


class Decoder(nn.Module):
    """Embedding, layers and final norm. Leaves out transformers' bookkeeping, a tenth of a small model's step.

    Shapes: token_ids int64 [N] -> normalised hidden states [N, H], and by tap the stream entering that layer or leaving the
    last one, [N, H].
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embedding, self.layers, self.norm = model.embed_tokens, model.layers, ResidualNorm(model.norm)

    def forward(
        self, token_ids: Tensor, context: ForwardContext, taps: Sequence[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        num_rows = len(token_ids)
        # Why: every product would double a single row. Doubled once here, the copy is computed and never read.
        x = self.embedding(token_ids if num_rows > 1 else token_ids.repeat(2))
        tapped: dict[int, Tensor] = dict.fromkeys(taps, x)
        hidden = self.through_layers(x, context, tapped)
        return hidden[:num_rows], {tap: stream[:num_rows] for tap, stream in tapped.items()}

    def through_layers(self, x: Tensor, context: ForwardContext, tapped: dict[int, Tensor] | None = None) -> Tensor:
        """From embedded tokens to normalised hidden states; fills in `tapped`. Shapes: [N, H] -> [N, H]."""
        tapped = {} if tapped is None else tapped
        block = torch.zeros_like(x)
        for i, layer in enumerate(self.layers):
            if i in tapped:
                tapped[i] = x + block
            x, block = layer(x, block, context)
        stream, hidden = self.norm(x, block)
        if len(self.layers) in tapped:
            tapped[len(self.layers)] = stream
        return cast(Tensor, hidden)


def make_row_invariant(
    model: Any, max_positions: int, ranks: Ranks = ONE_RANK, arena: WeightArena | None = None
) -> None:
    """Replace the known layers and every linear of a transformers causal LM, in place; its weights are this rank's part.

    With an `arena`, weights are quantised to int8 and go there.

    If every part of the decoder is known, `model.model` becomes a `Decoder` or `Int8Decoder`; otherwise transformers' forward
    stays. Raises: ModelError if transformers' forward stays and there are several ranks.
    """
    rotary = _find_rotary(model, max_positions)
    whole = (
        rotary is not None and is_supported(model) and rotary.cos.shape[-1] == model.model.layers[0].self_attn.head_dim
    )
    if ranks.size > 1 and not whole:
        raise unsplittable(model)
    make_linear: LinearClass = functools.partial(Int8Linear, ranks=ranks, arena=arena) if arena else PackedLinear
    if arena and rotary is not None and whole and has_int8_shape(model.model):
        model.model = Int8Decoder(model.model, rotary.cos, rotary.sin, ranks, arena)
    else:
        _replace(model, rotary, whole, ranks, make_linear)
    if whole and not isinstance(model.model, Int8Decoder):
        model.model = Decoder(model.model)
    if ranks.size > 1:
        model.model.embedding = GatheredEmbedding(model.model.embedding, ranks)
    replace_linears(model, make_linear)


def _find_rotary(model: nn.Module, max_positions: int) -> RotaryTable | None:
    known = [m for m in model.modules() if type(m).__name__ in _ROTARY]
    return RotaryTable(known[0], max_positions, next(model.parameters()).dtype) if len(known) == 1 else None


def is_supported(model: Any) -> bool:
    """Whether the class of every part of the decoder is known."""
    return type(getattr(model, "model", None)).__name__ in _DECODERS and all(
        type(layer).__name__ in _LAYERS
        and type(layer.self_attn).__name__ in _ATTENTION
        and type(layer.mlp).__name__ in _GATED
        for layer in model.model.layers
    )


def unsplittable(model: Any) -> ModelError:
    return ModelError(
        f"{type(model).__name__} cannot be split over several ranks: only Llama, Mistral, Qwen2 and Qwen3 models can, "
        "and those laid out as they are"
    )


def _replace(
    module: nn.Module, rotary: RotaryTable | None, whole: bool, ranks: Ranks, make_linear: LinearClass
) -> None:
    """Attention and layers are replaced only for a whole `Decoder`, other known modules always."""
    for name, child in module.named_children():
        kind = type(child).__name__
        _replace(child, rotary, whole, ranks, make_linear)
        if kind in _GATED:
            setattr(module, name, GatedFeedForward(child, ranks, make_linear))
        elif kind in _NORMS:
            setattr(module, name, RootMeanSquareNorm(child))
        elif kind in _ROTARY and rotary is not None:
            setattr(module, name, rotary)
        elif kind in _ATTENTION and whole and rotary is not None:
            setattr(module, name, PagedAttention(child, rotary, ranks, make_linear))
        elif kind in _LAYERS and whole:
            setattr(module, name, DecoderLayer(child))

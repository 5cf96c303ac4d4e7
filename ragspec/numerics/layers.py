"""Row-invariant, faster replacements for the layers of a transformers model, put in place after loading.

Only modules of known classes are replaced; all others stay as transformers wrote them, and the start-up self-test judges the
result. In a tensor-parallel group each rank has some heads and a part of the feed-forward's width
(`ragspec.numerics.sharding`); activations are gathered before the next product. One rank gathers nothing.

    >>> make_row_invariant(model, max_positions=2048)      # in place
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ragspec.errors import ModelError
from ragspec.numerics.attention import shape_of
from ragspec.numerics.backend import Backend, ForwardContext
from ragspec.numerics.linear import replace_linears
from ragspec.numerics.ranks import ONE_RANK, Ranks
from ragspec.numerics.sharding import FFN_MULTIPLE, AddedLinear, GatheredEmbedding, GatheredLinear, without_padding

_ATTENTION = {"LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention"}
_LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
_DECODERS = {"LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model"}
_ALIKE = ("Gemma", "Gemma2", "Granite", "Cohere", "Cohere2")
"""Families whose feed-forward and rotation are Llama's; attention and layers differ and stay theirs."""
_GATED = {"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", *(f"{family}MLP" for family in _ALIKE)}
_NORMS = {"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "GraniteRMSNorm"}
_ROTARY = {f"{family}RotaryEmbedding" for family in ("Llama", "Mistral", "Qwen2", "Qwen3", *_ALIKE)}


MakeLinear = Callable[[Tensor, Tensor | None], nn.Module]


class PagedAttention(nn.Module):
    """Queries, keys and values as one packed product; rotation, cache and softmax in one kernel; output product.

    Shapes: [N, H] -> [N, H].
    """

    def __init__(self, attention: Any, rotary: RotaryTable, backend: Backend, ranks: Ranks = ONE_RANK) -> None:
        super().__init__()
        self._ranks = ranks
        self.layer, self.shape = attention.layer_idx, shape_of(attention, ranks.size)
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        bias = None if projections[0].bias is None else torch.cat([p.bias.detach() for p in projections])
        self.qkv = backend.make_linear(torch.cat([p.weight.detach() for p in projections]), bias)
        self.out = _output(attention.o_proj, ranks, backend.make_linear)
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.rotations = rotary.rotations

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        shape = self.shape
        qkv = self.qkv(x).view(-1, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = qkv.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], 1)
            qkv = torch.cat([self.q_norm(q), self.k_norm(k), v], 1)
        heads = context.attend(self.layer, qkv, shape, self.rotations).flatten(1)
        return cast(Tensor, self.out(heads if self._ranks.adds else self._ranks.all_gather(heads)))


class GatedFeedForward(nn.Module):
    """`down(act(gate(x)) * up(x))` with gate and up as one packed product. Shapes: [N, H] -> [N, H]."""

    def __init__(self, mlp: Any, make_linear: MakeLinear, ranks: Ranks = ONE_RANK) -> None:
        super().__init__()
        self._ranks = ranks
        own_width, inner_width = len(mlp.gate_proj.weight), mlp.down_proj.weight.shape[1]
        self.width, self._inner_width = own_width + _padding(own_width), inner_width + _padding(inner_width)
        gate, up = (F.pad(p.weight.detach(), (0, 0, 0, _padding(own_width))) for p in (mlp.gate_proj, mlp.up_proj))
        biases = [p.bias for p in (mlp.gate_proj, mlp.up_proj)]
        bias = None if biases[0] is None else torch.cat([F.pad(b.detach(), (0, _padding(own_width))) for b in biases])
        self.gate_up: Any = make_linear(torch.cat([gate, up]), bias)
        self.down = _output(mlp.down_proj, ranks, make_linear, _padding(inner_width))
        self.activation = F.silu if getattr(mlp.config, "hidden_act", "") == "silu" else mlp.act_fn
        self._is_fused = self.activation is F.silu and hasattr(self.gate_up, "gated")

    def forward(self, x: Tensor) -> Tensor:
        if self._is_fused:
            inner = self.gate_up.gated(x)
        else:
            both = self.gate_up(x)
            inner = self.activation(both[..., : self.width]) * both[..., self.width :]
        if not self._ranks.adds:
            inner = without_padding(self._ranks.all_gather(inner), self._inner_width)
        return cast(Tensor, self.down(inner))


def _padding(width: int) -> int:
    return -width % FFN_MULTIPLE


def _output(linear: Any, ranks: Ranks, make_linear: MakeLinear, num_more_inputs: int = 0) -> Any:
    """The product back into the stream, with `num_more_inputs` zero inputs appended."""
    bias = linear.bias if ranks.rank == 0 or not ranks.adds else None  # added once
    own = make_linear(F.pad(linear.weight.detach(), (0, num_more_inputs)), bias)
    if ranks.adds:
        return AddedLinear(own, ranks)
    return own if ranks.size == 1 else GatheredLinear(own, linear.out_features, ranks)


class RotaryTable(nn.Module):
    """Cosines and sines of every position, computed once, so that no value depends on its neighbours.

    Shapes: position_ids int64 [1, N] -> (cos, sin) each [1, N, head_dim].
    Raises: ModelError when the angles depend on the length of the sequence.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, rotary: Any, max_positions: int, weight: Tensor) -> None:
        super().__init__()
        kind = str(getattr(rotary, "rope_type", "default"))
        if "dynamic" in kind or (kind == "longrope" and not _is_one_table(rotary.config.rope_parameters)):
            raise ModelError(
                f"rotary embedding {kind!r} changes with the length of the sequence; the engine cannot serve it"
            )
        positions = torch.arange(max_positions, device=weight.device)[None]
        cos, sin = rotary(weight.new_zeros(1), positions)
        self.register_buffer("cos", cos[0])
        self.register_buffer("sin", sin[0])

    @functools.cached_property
    def rotations(self) -> tuple[Tensor, Tensor]:
        """Both tables in float32, shared by all layers. Shapes: [positions, head_dim]."""
        return self.cos.float(), self.sin.float()

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[position_ids], self.sin[position_ids]


def _is_one_table(rotation: dict[str, Any]) -> bool:
    """Whether short and long sequences have the same frequencies, as those that a GGUF file lists."""
    return rotation.get("short_factor") == rotation.get("long_factor")


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each on the normalised stream. The next layer adds the feed-forward's output to the stream.

    Shapes: x, block [N, H] -> (x, block), both [N, H].
    """

    def __init__(self, layer: Any, backend: Backend) -> None:
        super().__init__()
        self.attention, self.feed_forward = layer.self_attn, layer.mlp
        self.attention_norm = backend.make_norm(layer.input_layernorm, residual=True)
        self.feed_forward_norm = backend.make_norm(layer.post_attention_layernorm, residual=True)

    def forward(self, x: Tensor, block: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor]:
        x, normalised = self.attention_norm(x, block)
        x, normalised = self.feed_forward_norm(x, self.attention(normalised, context))
        return x, self.feed_forward(normalised)


class Decoder(nn.Module):
    """Embedding, layers and final norm. Leaves out transformers' bookkeeping, a tenth of a small model's step.

    Shapes: token_ids int64 [N] -> normalised hidden states [N, H], and by tap the stream entering that layer or leaving the
    last one, [N, H].
    """

    def __init__(self, model: Any, backend: Backend) -> None:
        super().__init__()
        self.embedding, self.layers = model.embed_tokens, model.layers
        self.norm, self._least_rows = backend.make_norm(model.norm, residual=True), backend.least_rows

    def forward(
        self, token_ids: Tensor, context: ForwardContext, taps: Sequence[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        num_rows = len(token_ids)
        x = self.embedding(token_ids if num_rows >= self._least_rows else token_ids.repeat(2))
        block, tapped = torch.zeros_like(x), dict.fromkeys(taps, x)
        for i, layer in enumerate(self.layers):
            if i in tapped:
                tapped[i] = x + block
            x, block = layer(x, block, context)
        stream, hidden = self.norm(x, block)
        if len(self.layers) in tapped:
            tapped[len(self.layers)] = stream
        return hidden[:num_rows], {tap: stream[:num_rows] for tap, stream in tapped.items()}

    @property
    def rotations(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines. Shapes: [positions, head_dim]."""
        rotations: tuple[Tensor, Tensor] = cast(Any, self.layers[0]).attention.rotations
        return rotations

    def with_layers(self, layers: Sequence[int]) -> Decoder:
        """A decoder of these layers alone, with the same weights."""
        other = copy.copy(self)
        other._modules = {**self._modules, "layers": nn.ModuleList(self.layers[i] for i in layers)}
        return other


def make_row_invariant(model: Any, max_positions: int, backend: Backend, ranks: Ranks = ONE_RANK) -> None:
    """Replace the known layers and every linear of a transformers causal LM, in place; its weights are this rank's part.

    If every part of the decoder is known, `model.model` becomes the backend's own decoder or a `Decoder`; otherwise
    transformers' forward stays. Products move to the device one by one, so it never holds weights that will be quantised
    in floats. Raises: ModelError if transformers' forward stays and there are several ranks.
    """
    rotary = _find_rotary(model, max_positions)
    whole = (
        rotary is not None and is_supported(model) and rotary.cos.shape[-1] == model.model.layers[0].self_attn.head_dim
    )
    if ranks.size > 1 and not whole:
        raise unsplittable(model)
    if rotary is not None:
        backend.place(rotary)
    own = backend.make_decoder(model.model, rotary.rotations, ranks) if rotary is not None and whole else None
    if own is None:
        _replace(model, rotary, whole, backend, ranks)
    if whole:
        model.model = own or Decoder(model.model, backend)
    if ranks.size > 1:
        model.model.embedding = GatheredEmbedding(model.model.embedding, ranks)
    replace_linears(model, backend.make_linear)
    backend.place(model)


def _find_rotary(model: nn.Module, max_positions: int) -> RotaryTable | None:
    known = [m for m in model.modules() if type(m).__name__ in _ROTARY]
    weight = next(model.parameters())
    return RotaryTable(known[0], max_positions, weight) if len(known) == 1 else None


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


def _replace(module: nn.Module, rotary: RotaryTable | None, whole: bool, backend: Backend, ranks: Ranks) -> None:
    """Attention and layers are replaced only for a whole `Decoder`, other known modules always."""
    for name, child in module.named_children():
        kind = type(child).__name__
        _replace(child, rotary, whole, backend, ranks)
        if kind in _GATED:
            setattr(module, name, GatedFeedForward(child, backend.make_linear, ranks))
        elif kind in _NORMS:
            setattr(module, name, backend.make_norm(child))
        elif kind in _ROTARY and rotary is not None:
            setattr(module, name, rotary)
        elif kind in _ATTENTION and whole and rotary is not None:
            setattr(module, name, PagedAttention(child, rotary, backend, ranks))
        elif kind in _LAYERS and whole:
            setattr(module, name, DecoderLayer(child, backend))

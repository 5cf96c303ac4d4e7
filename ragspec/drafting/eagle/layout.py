"""The layout of an EAGLE head: its configuration, and the name, size and dtype of every published tensor.

Reads no files (`ragspec.drafting.eagle.checkpoint` does) and knows only the official tensor names.

    >>> config = HeadConfig(EagleFamily.EAGLE3, hidden_size=320, intermediate_size=768, ...)
    >>> check_tensors(config, tensors)
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ragspec.drafting.heads.files import STORED_DTYPES, check_tensor
from ragspec.errors import ModelError

Shape = tuple[int, ...]

NUM_AUX_LAYERS = 3
MOST_LAYERS = 64
_MAP_DTYPES: dict[str, tuple[torch.dtype, ...]] = {"d2t": (torch.int64,), "t2d": (torch.bool,)}
_SIZES = (
    "hidden_size intermediate_size num_heads num_kv_heads head_dim vocab_size draft_vocab_size max_positions"
    " target_hidden_size num_layers"
).split()


class EagleFamily(enum.StrEnum):
    """A head reads the target's last hidden state (EAGLE-1, EAGLE-2, HASS) or several of its layers (EAGLE-3)."""

    EAGLE = "eagle"
    EAGLE3 = "eagle3"


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """The shape of one head and its dialect; valid once built.

    `aux_layers` are taps, low to high: tap i is the residual stream entering layer i of the target. `()` is EAGLE-1/2,
    or for EAGLE-3 the default of the target's depth. `norm_before_residual` adds the attention to the normed hidden
    state, `norm_before_fc` norms the features, `norm_output` feeds the normed output back. Layers behind the first are a
    Llama's, or with `positions_per_layer` (PosS) specialists: each drafts so many positions. `window`: positions that a
    row attends to, 0: all. `rope`: of rotary positions that are not plain, transformers' `rope_parameters`.
    Raises: ModelError for a shape that no head can have.
    """

    family: EagleFamily
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    target_hidden_size: int
    aux_layers: tuple[int, ...] = ()
    fc_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    num_layers: int = 1
    positions_per_layer: int = 0
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    window: int = 0
    rope: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if bad := _first_fault(self) or (_eagle_fault(self) if self.family is EagleFamily.EAGLE else ""):
            raise ModelError(f"no {self.family} head can have {bad}")

    @property
    def num_features(self) -> int:
        """Width of the target's features of one token, F."""
        if self.family is EagleFamily.EAGLE:
            return self.target_hidden_size
        return (len(self.aux_layers) or NUM_AUX_LAYERS) * self.target_hidden_size


class HeadCheckpoint(NamedTuple):
    """A head's configuration, and its tensors by official name in the stored dtype."""

    config: HeadConfig
    tensors: dict[str, Tensor]


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """The taps an EAGLE-3 head reads where its config names none.

    Source: the published EAGLE code. Of targets with fewer than seven layers these are not three different layers, which
    `check_fits` refuses.
    """
    return 2, num_layers // 2, num_layers - 3


def check_fits(config: HeadConfig, vocab_size: int, hidden_size: int, num_layers: int) -> None:
    """Raises: ModelError if the head was made for a target of another vocabulary, width or depth."""
    if config.vocab_size != vocab_size:
        raise ModelError(f"the head is for a vocabulary of {config.vocab_size} tokens, the target has {vocab_size}")
    if config.target_hidden_size != hidden_size:
        raise ModelError(
            f"the head reads hidden states of {config.target_hidden_size}, the target's have {hidden_size}"
        )
    if config.family is EagleFamily.EAGLE:
        return
    taps = config.aux_layers or default_aux_layers(num_layers)
    if not _is_increasing(taps) or taps[-1] > num_layers:
        origin = "aux_layers" if config.aux_layers else "default aux_layers"
        raise ModelError(f"the head's {origin} {taps} are no layers of a target that has {num_layers}")


def reachable(config: HeadConfig, max_depth: int) -> HeadConfig:
    """The head without the specialists that draft beyond `max_depth` positions: keys for them would be computed for nothing."""
    if not config.positions_per_layer:
        return config
    return replace(config, num_layers=min(config.num_layers, -(-max_depth // config.positions_per_layer)))


def expected_shapes(config: HeadConfig) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Shapes of the required tensors and of the optional ones. `fc_norm.weight` has two forms: `check_tensors`."""
    layers = {name: shape for i in range(config.num_layers) for name, shape in _layer_shapes(config, i).items()}
    embedding: dict[str, Shape] = {"embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    is_eagle = config.family is EagleFamily.EAGLE
    fc: dict[str, Shape] = {
        "fc.weight": (config.hidden_size, 2 * config.hidden_size if is_eagle else config.num_features)
    }
    if config.fc_bias:
        fc["fc.bias"] = (config.hidden_size,)
    needed = fc | layers
    if is_eagle:
        return needed, embedding | {"lm_head.weight": (config.vocab_size, config.hidden_size)}
    needed["norm.weight"] = (config.hidden_size,)
    needed["lm_head.weight"] = (config.draft_vocab_size, config.hidden_size)
    maps: dict[str, Shape] = {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
    own_embedding = config.hidden_size != config.target_hidden_size
    own_maps = config.draft_vocab_size != config.vocab_size
    needed |= (embedding if own_embedding else {}) | (maps if own_maps else {})
    return needed, embedding | maps


def layer_prefix(family: EagleFamily, index: int = 0) -> str:
    """The name prefix of a decoder layer's tensors."""
    return f"layers.{index}." if index or family is EagleFamily.EAGLE else "midlayer."


def check_tensors(config: HeadConfig, tensors: Mapping[str, Tensor]) -> None:
    """Raises: ModelError naming the first tensor that is missing, unknown, of another shape or kind, or not finite."""
    needed, optional = expected_shapes(config)
    if config.norm_before_fc:
        needed["fc_norm.weight"] = _fc_norm_shape(config, tensors)
    for name in needed:
        if name not in tensors:
            raise ModelError(f"the head lacks {name}, which its config asks for")
    for name, tensor in tensors.items():
        if name not in needed and name not in optional:
            raise ModelError(f"the head has {name}, which a head of its config ({config.family}) has not")
        shape = needed.get(name) or optional[name]
        check_tensor(name, tensor, shape, _MAP_DTYPES.get(name, STORED_DTYPES))
    if ("d2t" in tensors) != ("t2d" in tensors):
        raise ModelError("the head has only one of d2t and t2d")
    if "d2t" in tensors:
        _check_vocabulary(tensors["d2t"], tensors["t2d"])


def _layer_shapes(config: HeadConfig, index: int) -> dict[str, Shape]:
    hidden, between = config.hidden_size, config.intermediate_size
    wide = hidden if index or config.family is EagleFamily.EAGLE else 2 * hidden
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {
        "self_attn.q_proj.weight": (heads, wide),
        "self_attn.k_proj.weight": (kv_heads, wide),
        "self_attn.v_proj.weight": (kv_heads, wide),
        "self_attn.o_proj.weight": (hidden, heads),
        "mlp.gate_proj.weight": (between, hidden),
        "mlp.up_proj.weight": (between, hidden),
        "mlp.down_proj.weight": (hidden, between),
        "post_attention_layernorm.weight": (hidden,),
    }
    if config.qkv_bias:
        shapes |= {f"self_attn.{part}_proj.bias": shapes[f"self_attn.{part}_proj.weight"][:1] for part in "qkv"}
    if config.output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config.qk_norm:
        shapes |= {f"self_attn.{part}_norm.weight": (config.head_dim,) for part in "qk"}
    if index == 0 and config.family is EagleFamily.EAGLE3:
        shapes |= {"hidden_norm.weight": (hidden,), "input_layernorm.weight": (hidden,)}
    if index and not config.positions_per_layer:
        shapes["input_layernorm.weight"] = (hidden,)
    prefix = layer_prefix(config.family, index)
    return {prefix + name: shape for name, shape in shapes.items()}


def _fc_norm_shape(config: HeadConfig, tensors: Mapping[str, Tensor]) -> Shape:
    """[1, F]: one norm over all features; [taps, F / taps]: each tap has its own."""
    num_taps = config.num_features // config.target_hidden_size
    given = tensors.get("fc_norm.weight")
    groups = num_taps if given is not None and given.ndim == 2 and len(given) == num_taps else 1
    return groups, config.num_features // groups


def _check_vocabulary(d2t: Tensor, t2d: Tensor) -> None:
    """d2t [Vd] holds offsets: draft token i is the target's token i + d2t[i]. t2d [V] marks these tokens."""
    if _reaches(torch.arange(len(d2t)) + d2t, t2d):
        return
    if _reaches(d2t, t2d):
        raise ModelError("the head's d2t holds token ids; the published layout holds offsets, id minus row")
    raise ModelError("the head's d2t and t2d name different tokens")


def _reaches(ids: Tensor, t2d: Tensor) -> bool:
    if bool((ids < 0).any()) or bool((ids >= len(t2d)).any()) or not bool((ids[1:] > ids[:-1]).all()):
        return False
    return int(t2d.sum()) == len(ids) and bool(t2d[ids].all())


def _first_fault(config: HeadConfig) -> str:
    for name in _SIZES:
        if getattr(config, name) < 1:
            return f"{name} {getattr(config, name)}"
    for name in ("rms_norm_eps", "rope_theta"):
        if not (math.isfinite(getattr(config, name)) and getattr(config, name) > 0):
            return f"{name} {getattr(config, name)}"
    if config.num_heads % config.num_kv_heads:
        return f"{config.num_heads} heads over {config.num_kv_heads} KV heads"
    if config.head_dim % 2:
        return f"an odd head_dim, {config.head_dim}"
    if min(config.window, config.positions_per_layer) < 0 or config.num_layers > MOST_LAYERS:
        return f"{config.num_layers} layers, window {config.window}, positions_per_layer {config.positions_per_layer}"
    if config.draft_vocab_size > config.vocab_size:
        return f"a draft vocabulary of {config.draft_vocab_size} out of {config.vocab_size} tokens"
    return "" if _is_increasing(config.aux_layers) else f"aux_layers {config.aux_layers}"


def _eagle_fault(config: HeadConfig) -> str:
    if config.draft_vocab_size != config.vocab_size:
        return f"draft_vocab_size {config.draft_vocab_size} (or truncated_vocab_size) beside vocab_size {config.vocab_size}"
    if config.target_hidden_size != config.hidden_size:
        return f"hidden_size {config.hidden_size} and target_hidden_size {config.target_hidden_size}"
    foreign = ("aux_layers", "norm_before_residual", "norm_before_fc", "norm_output")
    return next((name for name in foreign if getattr(config, name)), "")


def _is_increasing(taps: tuple[int, ...]) -> bool:
    return all(low < high for low, high in zip((-1, *taps), taps, strict=False))

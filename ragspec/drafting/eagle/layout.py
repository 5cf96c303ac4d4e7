"""The configuration of an EAGLE head: its family, its shape and its dialect.

>>> config = HeadConfig(EagleFamily.EAGLE3, hidden_size=320, intermediate_size=768, ...)
>>> check_fits(config, vocab_size=128256, hidden_size=4096, num_layers=32)
"""

import enum
import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from ragspec.drafting.heads.layer import FINAL
from ragspec.errors import ModelError

NUM_AUX_LAYERS = 3
MAX_LAYERS, MAX_SIZE = 64, 2**22
_SIZES = (
    "hidden_size intermediate_size num_heads num_kv_heads head_dim vocab_size draft_vocab_size target_hidden_size"
    " num_layers"
).split()
_FLAGS_OF_EAGLE3 = ("aux_layers", "norm_before_residual", "norm_before_fc", "norm_output")


class EagleFamily(enum.StrEnum):
    """A head reads the target's last hidden state (EAGLE-1, EAGLE-2, HASS) or several of its layers (EAGLE-3)."""

    EAGLE = "eagle"
    EAGLE3 = "eagle3"


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """The shape of one head and its dialect; valid once built.

    `aux_layers` are taps, low to high: tap i is the residual stream entering layer i of the target. `()` is EAGLE-1/2,
    or for EAGLE-3 the default of the target's depth; `(FINAL,)` is the target's final state, without a projection.
    `norm_before_residual` adds the attention to the normed hidden state, `norm_before_fc` norms the features, `norm_output`
    feeds the normed output back. Layers behind the first are a Llama's, or with `positions_per_layer` (PosS) specialists: each
    drafts so many positions. `shares_lm_head`: an EAGLE-3 head without an output layer uses the target's. `window`: positions
    that a row attends to, 0: all. `rope`: of rotary positions that are not plain, transformers' `rope_parameters`.
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
    shares_lm_head: bool = False
    window: int = 0
    rope: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if fault := _fault_of(self) or (_fault_of_eagle(self) if self.family is EagleFamily.EAGLE else ""):
            raise ModelError(f"no {self.family} head can have {fault}")

    @property
    def reads_final(self) -> bool:
        """Whether an EAGLE-3 head reads the target's final state, without a projection."""
        return self.aux_layers == (FINAL,)

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
    if config.family is EagleFamily.EAGLE or config.reads_final:
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


def _fault_of(config: HeadConfig) -> str:
    for name in _SIZES:
        if not 1 <= getattr(config, name) <= MAX_SIZE:
            return f"{name} {getattr(config, name)}"
    if config.max_positions < 1:
        return f"max_positions {config.max_positions}"
    for name in ("rms_norm_eps", "rope_theta"):
        if not (math.isfinite(getattr(config, name)) and getattr(config, name) > 0):
            return f"{name} {getattr(config, name)}"
    if config.num_heads % config.num_kv_heads or config.num_heads * config.head_dim > MAX_SIZE:
        return f"{config.num_heads} heads of {config.head_dim} over {config.num_kv_heads} KV heads"
    if config.head_dim % 2:
        return f"an odd head_dim, {config.head_dim}"
    if min(config.window, config.positions_per_layer) < 0 or config.num_layers > MAX_LAYERS:
        return f"{config.num_layers} layers, window {config.window}, positions_per_layer {config.positions_per_layer}"
    if config.draft_vocab_size > config.vocab_size:
        return f"a draft vocabulary of {config.draft_vocab_size} out of {config.vocab_size} tokens"
    if config.hidden_size != config.target_hidden_size and (config.reads_final or config.shares_lm_head):
        return f"hidden_size {config.hidden_size} and target_hidden_size {config.target_hidden_size} without fc and lm_head"
    if config.reads_final:
        return next((name for name in ("fc_bias", "norm_before_fc") if getattr(config, name)), "")
    is_served = _is_increasing(config.aux_layers) and len(config.aux_layers) <= MAX_LAYERS
    return "" if is_served else f"aux_layers {config.aux_layers}"


def _fault_of_eagle(config: HeadConfig) -> str:
    if config.draft_vocab_size != config.vocab_size:
        return f"draft_vocab_size {config.draft_vocab_size} (or truncated_vocab_size) beside vocab_size {config.vocab_size}"
    if config.target_hidden_size != config.hidden_size:
        return f"hidden_size {config.hidden_size} and target_hidden_size {config.target_hidden_size}"
    return next((name for name in _FLAGS_OF_EAGLE3 if getattr(config, name)), "")


def _is_increasing(taps: tuple[int, ...]) -> bool:
    return all(low < high for low, high in zip((-1, *taps), taps, strict=False))

"""Translates the dialects of published EAGLE heads to one official form.

Owns the meaning of config.json keys and tensor names; reads no files.

    >>> config, tensors = official_form(config_json, stored_tensors)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ragspec.drafting.eagle.layout import NUM_AUX_LAYERS, EagleFamily, HeadCheckpoint, HeadConfig, layer_prefix
from ragspec.drafting.heads.config_keys import Raw, integer, number, section_of, truth
from ragspec.errors import ModelError

DEFAULT_ROPE_THETA = 10000.0  # Why: the published code falls back to it, even where the target's base is another.
_DEFAULT_EPS = 1e-6
_DEFAULT_POSITIONS = 2048
AUX_KEY = "eagle_aux_hidden_state_layer_ids"
_IGNORED = ("rotary_emb.inv_freq", "verifier_lm_head.weight", "verifier_norm.weight")
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_NOT_EAGLE = {
    "Hydra": re.compile(r"(hydra_mlp|hydra_lm_head|prefix_embeding_layer|input_embed_fn|cross_attn)\."),
    "Medusa": re.compile(r"(medusa_head\.|\d+\.\d+\.(linear\.)?(weight|bias)$)"),
    "GliDe": re.compile(r".+\.cross_attn\."),
}
_EAGLE_FLAGS: dict[str, tuple[Any, ...]] = {
    AUX_KEY: (),
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (1,),
    "parallel_draft_heads_num_layers": (1,),
}
"""Keys of `eagle_config` (ModelOpt, SpecForge) and the values that mean the published EAGLE-3; none: any."""
_PLAIN_ROPE = ("default", "mrope")  # Why mrope: the three positions of a token of text are the same.
_ROPE_NUMBERS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
ROPE_KEYS = ("rope_scaling", "rope_parameters")
POSITIONS_KEY = "position_per_layer"
_SPECFORGE = re.compile(r"\w+ForCausalLMEagle3")
_PLACES = {"Medusa": "; drafting.medusa.path names Medusa heads", "Hydra": "; drafting.hydra.path names Hydra heads"}


def official_form(raw: Raw, stored: Mapping[str, Tensor], positions_per_layer: int | None = None) -> HeadCheckpoint:
    """Configuration and tensors of a head under the official names; the tensors are not checked.

    `positions_per_layer`: of PosS, whose files do not say it. Raises: ModelError for another family, or a config that is
    incomplete or not supported.
    """
    if "model.fc.weight" in stored or ("fc.weight" in stored and "model.layers.0.mlp.up_proj.weight" in stored):
        stored = _renamed(stored, "model.", "")
    family = _family_of(raw, stored)
    merged = _merged(raw)
    if positions_per_layer is not None:
        merged[POSITIONS_KEY] = positions_per_layer
    config = _config_of(family, merged, stored)
    kept = {name: tensor.detach() for name, tensor in stored.items() if not name.endswith(_IGNORED)}
    if config.norm_before_fc:
        kept["fc_norm.weight"] = _taken_norm(kept, _norm_names(merged, config))
    if family is EagleFamily.EAGLE3:
        kept = _renamed(kept, "layers.0.", layer_prefix(family))
    return HeadCheckpoint(config, {name: _official_map(name, tensor) for name, tensor in kept.items()})


def _family_of(raw: Raw, stored: Iterable[str]) -> EagleFamily:
    """The family, from the tensors or, where they are ambiguous, from the speculators keys. Raises: ModelError."""
    names = set(stored)
    for family, pattern in _NOT_EAGLE.items():
        if foreign := sorted(name for name in names if pattern.match(name)):
            raise ModelError(
                f"this is a {family} head ({foreign[0]}), which is not served as EAGLE{_PLACES.get(family, '')}"
            )
    has_layers = any(name.startswith("layers.0.") for name in names)
    is_speculators = "speculators_config" in raw or "layers.0.hidden_norm.weight" in names
    if "d2t" in names or any(name.startswith("midlayer.") for name in names) or (has_layers and is_speculators):
        return EagleFamily.EAGLE3
    if has_layers:
        return EagleFamily.EAGLE
    raise ModelError("no EAGLE head: none of its tensors is named midlayer. or layers.0.")


def _merged(raw: Raw) -> dict[str, Any]:
    """The config as one flat mapping; speculators, ModelOpt and vLLM's configs have sections.

    Layer ids in `eagle_config` count outputs of layers (SpecForge, ModelOpt), elsewhere inputs, as taps do.
    """
    kind = raw.get("speculators_model_type") or "eagle3"
    if kind != "eagle3":
        raise ModelError(f"speculators_model_type {kind!r} is not served; eagle3 is")
    eagle = dict(section_of(raw, "eagle_config"))
    for key, value in eagle.items():
        if key not in _EAGLE_FLAGS or (value is not None and _EAGLE_FLAGS[key] and value not in _EAGLE_FLAGS[key]):
            raise ModelError(f"config.json has {key} {value!r} in eagle_config, which is not served")
    if eagle.get(AUX_KEY) is not None:
        eagle[AUX_KEY] = [tap + 1 for tap in _taps(eagle)]
    given = {key: value for key, value in raw.items() if value is not None}
    nested = section_of(raw, "model") if raw.get("model_type") == "eagle" else {}
    return {**section_of(raw, "transformer_layer_config"), **nested, **eagle, **given}


def _config_of(family: EagleFamily, merged: Raw, stored: Mapping[str, Tensor]) -> HeadConfig:
    _refuse_unserved(merged)
    layer = "layers.0." if "layers.0.mlp.up_proj.weight" in stored else layer_prefix(family)
    num_layers, positions_per_layer = _layers(merged, stored)
    attention_bias = truth(merged, "attention_bias", f"{layer}self_attn.o_proj.bias" in stored)
    has_bias = family is EagleFamily.EAGLE and "fc.bias" in stored  # the published code reads an absent key as true
    hidden_size, num_heads = integer(merged, "hidden_size"), integer(merged, "num_attention_heads")
    if merged.get("head_dim") is None and (num_heads < 1 or hidden_size % num_heads):
        raise ModelError(f"config.json has no head_dim, and {num_heads} heads do not divide hidden_size {hidden_size}")
    vocab_size = integer(merged, "vocab_size")
    return HeadConfig(
        family=family,
        hidden_size=hidden_size,
        intermediate_size=integer(merged, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=integer(merged, "num_key_value_heads", num_heads),
        head_dim=integer(merged, "head_dim", hidden_size // max(num_heads, 1)),
        vocab_size=vocab_size,
        draft_vocab_size=integer(merged, "draft_vocab_size", integer(merged, "truncated_vocab_size", vocab_size)),
        rms_norm_eps=number(merged, "rms_norm_eps", _DEFAULT_EPS),
        rope_theta=_rope_theta(merged),
        max_positions=integer(merged, "max_position_embeddings", _DEFAULT_POSITIONS),
        target_hidden_size=integer(merged, "target_hidden_size", hidden_size),
        aux_layers=tuple(sorted(_taps(merged))),
        fc_bias=truth(merged, "eagle_fc_bias", truth(merged, "bias", has_bias)),
        norm_before_residual=truth(merged, "norm_before_residual"),
        norm_before_fc=truth(merged, "norm_before_fc") or truth(merged, "fc_norm"),
        norm_output=_feeds_normed(merged),
        num_layers=num_layers,
        positions_per_layer=positions_per_layer,
        qkv_bias=truth(merged, "qkv_bias", attention_bias or f"{layer}self_attn.q_proj.bias" in stored),
        output_bias=f"{layer}self_attn.o_proj.bias" in stored,
        qk_norm=f"{layer}self_attn.q_norm.weight" in stored,
        window=_window(merged, num_layers),
        rope=_rope(merged),
    )


def _layers(merged: Raw, stored: Mapping[str, Tensor]) -> tuple[int, int]:
    """How many layers the head has, and how many positions each drafts: 0 where they are one stack. Raises: ModelError."""
    count = integer(merged, "num_hidden_layers", 1)
    found = {int(match[1]) for name in stored if (match := re.match(r"layers\.(\d{1,9})\.", name))} | {0}
    if len(found) == 1 or any(re.match(r"layers\.[1-9]\d*\.input_layernorm\.weight", name) for name in stored):
        return count, 0
    positions = integer(merged, POSITIONS_KEY, 0)
    if positions < 1:
        raise ModelError(
            f"this is a PosS head of {len(found)} layers (layers.{max(found)}); its files do not say how many positions each "
            f"drafts: set drafting.eagle.positions_per_layer, or {POSITIONS_KEY} in its config.json"
        )
    return len(found), positions


def _feeds_normed(merged: Raw) -> bool:
    """SpecForge's `norm_output` (true by default) is the norm in front of the output layer. For all others the normed state is
    fed back."""
    names = merged.get("architectures") or []
    is_specforge = isinstance(names, list) and any(_SPECFORGE.fullmatch(str(name)) for name in names)
    if not is_specforge or "speculators_config" in merged:
        return truth(merged, "norm_output")
    if not truth(merged, "norm_output", True):
        raise ModelError(f"config.json has norm_output false, which {names} reads as no norm before the output layer")
    if truth(merged, "norm_output") and truth(merged, "fc_norm"):
        raise ModelError(f"config.json has norm_output and fc_norm: for {names} norm_output has two meanings")
    return False


def _window(merged: Raw, num_layers: int) -> int:
    """Positions that each row attends to; 0: all. Raises: ModelError for layers that differ."""
    kinds = merged.get("layer_types") or []
    if not isinstance(kinds, list) or len(set(map(str, kinds))) > 1 or len(kinds) not in (0, num_layers):
        raise ModelError(
            f"config.json has layer_types {kinds} and num_hidden_layers {num_layers}: not one kind for each"
        )
    if kinds and kinds[0] not in ("full_attention", "sliding_attention"):
        raise ModelError(f"config.json has layer_types {kinds}; full_attention and sliding_attention are served")
    slides = kinds[0] == "sliding_attention" if kinds else truth(merged, "use_sliding_window", True)
    window = integer(merged, "sliding_window", 0) if slides else 0
    if window < 1 and slides and (kinds or merged.get("use_sliding_window") or "sliding_window" in merged):
        raise ModelError(f"config.json has sliding_window {merged.get('sliding_window')!r}, not the width of a window")
    return window


def _rope(merged: Raw) -> dict[str, Any]:
    """transformers' `rope_parameters` of rotary positions that are not plain. Raises: ModelError."""
    rope: dict[str, Any] = {}
    for key in ROPE_KEYS:
        section = dict(section_of(merged, key))
        kind = section.get("rope_type") or section.get("type") or "default"
        served = isinstance(kind, str) and (kind in _PLAIN_ROPE or kind in _ROPE_NUMBERS)
        if not served or (section.get("partial_rotary_factor") or 1.0) != 1.0:
            raise ModelError(
                f"config.json has {key} of type {kind!r}; default, {', '.join((*_ROPE_NUMBERS, 'mrope'))} are served"
            )
        for name in _ROPE_NUMBERS.get(kind, ()):
            if not number(section, name, 0.0) > 0.0:
                raise ModelError(f"config.json has {key} of type {kind!r} without a {name} above 0")
        if kind in _ROPE_NUMBERS:
            rope = {name: value for name, value in section.items() if name != "type"} | {"rope_type": kind}
    return rope


def _refuse_unserved(merged: Raw) -> None:
    """Raises: ModelError for keys that would change the result and are not supported."""
    if (activation := merged.get("hidden_act") or "silu") != "silu":
        raise ModelError(f"config.json has hidden_act {activation!r}; silu is served")
    if truth(merged, "norm_before_fc") and truth(merged, "fc_norm"):
        raise ModelError("config.json has both norm_before_fc and fc_norm")


def _norm_names(merged: Raw, config: HeadConfig) -> list[str]:
    """Names of the feature norms: one norm for all taps, or one for each tap."""
    if not truth(merged, "fc_norm"):
        return ["input_norm.weight"]
    return [f"fc_norm.{i}.weight" for i in range(len(config.aux_layers) or NUM_AUX_LAYERS)]


def _taken_norm(tensors: dict[str, Tensor], names: list[str]) -> Tensor:
    """Take the norms out of `tensors`. Shapes: each [F / groups] -> [groups, F / groups]."""
    for name in names:
        if name not in tensors:
            raise ModelError(f"the head lacks {name}, which its config asks for")
        if tensors[name].ndim != 1 or tensors[name].shape != tensors[names[0]].shape:
            raise ModelError(f"the head's {name} is {list(tensors[name].shape)}")
    return torch.stack([tensors.pop(name) for name in names])


def _renamed(tensors: Mapping[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        official = new + name.removeprefix(old) if name.startswith(old) else name
        if official in renamed:
            raise ModelError(f"the head has {official} twice, as {old} and as {new}")
        renamed[official] = tensor
    return renamed


def _official_map(name: str, tensor: Tensor) -> Tensor:
    """Vocabulary maps of other integer types become int64 offsets and booleans."""
    if name == "d2t" and tensor.dtype in _INTEGERS:
        return tensor.to(torch.int64)
    if name == "t2d" and tensor.dtype in _INTEGERS and bool(((tensor == 0) | (tensor == 1)).all()):
        return tensor.to(torch.bool)
    return tensor


def _rope_theta(merged: Raw) -> float:
    if merged.get("rope_theta") is None:
        return number(section_of(merged, "rope_parameters"), "rope_theta", DEFAULT_ROPE_THETA)
    return number(merged, "rope_theta", DEFAULT_ROPE_THETA)


def _taps(section: Raw) -> list[int]:
    taps = section.get(AUX_KEY) or []
    if not isinstance(taps, list) or not all(type(tap) is int for tap in taps):
        raise ModelError(f"config.json has {AUX_KEY} {taps!r}, not a list of whole numbers")
    return taps

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
    "Hydra": re.compile(r"(hydra_mlp|hydra_lm_head|prefix_embeding_layer)\."),
    "Medusa": re.compile(r"(medusa_head\.|\d+\.\d+\.(linear\.)?(weight|bias)$)"),
    "GliDe": re.compile(r".*\bcross_attn\b"),
}
_PLACES = {"Medusa": "; drafting.medusa.path names Medusa heads", "Hydra": "; drafting.hydra.path names Hydra heads"}


def official_form(raw: Raw, stored: Mapping[str, Tensor]) -> HeadCheckpoint:
    """Configuration and tensors of a head under the official names; the tensors are not checked.

    Raises: ModelError for another family, or a config that is incomplete or not supported.
    """
    family = _family_of(raw, stored)
    merged = _merged(raw)
    config = _config_of(family, merged)
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
    layers = sorted({int(found[1]) for name in names if (found := re.match(r"layers\.(\d{1,9})\.", name))})
    is_speculators = "speculators_config" in raw or "layers.0.hidden_norm.weight" in names
    if "d2t" in names or any(name.startswith("midlayer.") for name in names) or (layers and is_speculators):
        if layers[1:]:
            raise ModelError(f"the head has {len(layers)} layers (layers.{layers[1]}); EAGLE-3 heads of one are served")
        return EagleFamily.EAGLE3
    if "fc.weight" in names and layers[1:]:
        raise ModelError(f"this is a PosS head (layers.{layers[1]}), which is not served as EAGLE")
    if layers:
        return EagleFamily.EAGLE
    raise ModelError("no EAGLE head: none of its tensors is named midlayer. or layers.0.")


def _merged(raw: Raw) -> dict[str, Any]:
    """The config as one flat mapping; speculators and ModelOpt configs have sections.

    Layer ids in `eagle_config` count outputs of layers (SpecForge, ModelOpt), elsewhere inputs, as taps do.
    """
    kind = raw.get("speculators_model_type") or "eagle3"
    if kind != "eagle3":
        raise ModelError(f"speculators_model_type {kind!r} is not served; eagle3 is")
    eagle = dict(section_of(raw, "eagle_config"))
    if eagle.get(AUX_KEY) is not None:
        eagle[AUX_KEY] = [tap + 1 for tap in _taps(eagle)]
    given = {key: value for key, value in raw.items() if value is not None}
    return {**section_of(raw, "transformer_layer_config"), **eagle, **given}


def _config_of(family: EagleFamily, merged: Raw) -> HeadConfig:
    _refuse_unserved(merged)
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
        draft_vocab_size=integer(merged, "draft_vocab_size", vocab_size),
        rms_norm_eps=number(merged, "rms_norm_eps", _DEFAULT_EPS),
        rope_theta=_rope_theta(merged),
        max_positions=integer(merged, "max_position_embeddings", _DEFAULT_POSITIONS),
        target_hidden_size=integer(merged, "target_hidden_size", hidden_size),
        aux_layers=tuple(sorted(_taps(merged))),
        fc_bias=truth(merged, "bias", family is EagleFamily.EAGLE),
        norm_before_residual=truth(merged, "norm_before_residual"),
        norm_before_fc=truth(merged, "norm_before_fc") or truth(merged, "fc_norm"),
        norm_output=truth(merged, "norm_output"),
    )


def _refuse_unserved(merged: Raw) -> None:
    """Raises: ModelError for keys that would change the result and are not supported."""
    if (layers := integer(merged, "num_hidden_layers", 1)) != 1:
        raise ModelError(f"config.json has num_hidden_layers {layers}; heads of one layer are served")
    if (activation := merged.get("hidden_act") or "silu") != "silu":
        raise ModelError(f"config.json has hidden_act {activation!r}; silu is served")
    layer_types = merged.get("layer_types") or ["full_attention"]
    if layer_types != ["full_attention"] or merged.get("use_sliding_window"):
        raise ModelError(f"config.json has layer_types {layer_types}; full_attention is served")
    for key in ("rope_scaling", "rope_parameters"):
        section = section_of(merged, key)
        kind = section.get("rope_type") or section.get("type") or "default"
        if kind != "default" or (section.get("partial_rotary_factor") or 1.0) != 1.0:
            raise ModelError(f"config.json has {key} of type {kind!r}; plain rotary positions are served")
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

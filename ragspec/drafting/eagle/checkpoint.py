"""EAGLE heads on disk: reads every published dialect into one official form, refuses anything else, writes the published layout.

>>> config, tensors = read_head("EAGLE3-LLaMA3.1-Instruct-8B")
>>> check_fits(config, vocab_size=128256, hidden_size=4096, num_layers=32)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ragspec.drafting.eagle.layout import NUM_AUX_LAYERS, EagleFamily, HeadCheckpoint, HeadConfig
from ragspec.drafting.eagle.network import EagleHead
from ragspec.drafting.heads.files import (
    CONFIG,
    WEIGHTS,
    Raw,
    check_tensors,
    integer,
    number,
    read_json,
    read_tensors,
    section_of,
    truth,
    write_files,
)
from ragspec.errors import ModelError

DEFAULT_ROPE_THETA = 10000.0  # Why: the published code falls back to it, even where the target's base is another.
_AUX_KEY, _POSITIONS_KEY = "eagle_aux_hidden_state_layer_ids", "position_per_layer"
_KEYS: dict[str, tuple[str, Callable[..., Any], Any]] = {
    "hidden_size": ("hidden_size", integer, None),
    "intermediate_size": ("intermediate_size", integer, None),
    "num_heads": ("num_attention_heads", integer, None),
    "num_kv_heads": ("num_key_value_heads", integer, "num_attention_heads"),
    "head_dim": ("head_dim", integer, None),
    "vocab_size": ("vocab_size", integer, None),
    "draft_vocab_size": ("draft_vocab_size", integer, "vocab_size"),
    "target_hidden_size": ("target_hidden_size", integer, "hidden_size"),
    "max_positions": ("max_position_embeddings", integer, 2048),
    "rms_norm_eps": ("rms_norm_eps", number, 1e-6),
    "rope_theta": ("rope_theta", number, DEFAULT_ROPE_THETA),
    "norm_before_residual": ("norm_before_residual", truth, False),
}
"""Fields of `HeadConfig`: the published key, the kind of its value, and the value that an absent key means, or the key that it is
read from. None: the key must be there."""
_OTHER_KEYS = {"truncated_vocab_size": "draft_vocab_size", "eagle_fc_bias": "bias"}
"""Keys of single dialects, and the keys that they stand for."""
_NORM = "input_norm.weight"
"""One norm for the features of all taps."""
_IGNORED = ("rotary_emb.inv_freq", "verifier_lm_head.weight", "verifier_norm.weight")
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_NOT_EAGLE = {
    "Hydra": re.compile(r"(hydra_mlp|hydra_lm_head|prefix_embeding_layer|input_embed_fn|cross_attn)\."),
    "Medusa": re.compile(r"(medusa_head\.|\d+\.\d+\.(linear\.)?(weight|bias)$)"),
    "GliDe": re.compile(r".+\.cross_attn\."),
}
_PLACES = {"Medusa": "; drafting.medusa.path names Medusa heads", "Hydra": "; drafting.hydra.path names Hydra heads"}
_EAGLE_FLAGS: dict[str, tuple[Any, ...]] = {
    _AUX_KEY: (),
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
_ROPE_KEYS = ("rope_scaling", "rope_parameters")
_SPECFORGE = re.compile(r"\w+ForCausalLMEagle3")


def read_head(directory: str | Path, positions_per_layer: int | None = None) -> HeadCheckpoint:
    """Read and check the head in a directory: every tensor is there, has the configured size and is finite.

    A head without `embed_tokens.weight` uses the target's embedding. A head without a rope base has 10000, never the
    target's. `positions_per_layer`: of a PosS head, whose files do not say it. Raises: ModelError with the reason, naming
    the tensor or the key.
    """
    directory = Path(directory)
    try:
        raw = read_json(directory / CONFIG)
        checkpoint = official_form(raw, read_tensors(directory), positions_per_layer)
        check_head(checkpoint.config, checkpoint.tensors)
    except ModelError as cause:
        raise ModelError(f"{directory}: {cause}") from cause
    return checkpoint


def write_head(directory: str | Path, checkpoint: HeadCheckpoint) -> None:
    """Write config.json and model.safetensors in the published layout, each file whole or not at all.

    Raises: ModelError for a head that `read_head` would refuse, SaveError.
    """
    check_head(checkpoint.config, checkpoint.tensors)
    raw, tensors = published_form(checkpoint)
    write_files(Path(directory), raw, WEIGHTS, tensors)


def check_head(config: HeadConfig, tensors: Mapping[str, Tensor]) -> None:
    """Raises: ModelError naming the first tensor that a head of this configuration has not, or has otherwise."""
    check_tensors(tensors, *_expected(config, tensors))
    if ("d2t" in tensors) != ("t2d" in tensors):
        raise ModelError("the head has only one of d2t and t2d")
    if "d2t" in tensors:
        _check_vocabulary(tensors["d2t"], tensors["t2d"])


def _expected(config: HeadConfig, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors that a head of this configuration has, and those that it may have, without memory."""
    norms = tensors.get("fc_norm.weight")
    num_taps = config.num_features // config.target_hidden_size
    has_norm_a_tap = norms is not None and norms.ndim == 2 and len(norms) == num_taps
    with torch.device("meta"):
        needed = EagleHead(config, num_taps if has_norm_a_tap else 1).state_dict()
        table = torch.empty(config.vocab_size, config.hidden_size)
        if config.family is EagleFamily.EAGLE:
            return needed, {"embed_tokens.weight": table, "lm_head.weight": table}
        if config.hidden_size != config.target_hidden_size:
            needed["embed_tokens.weight"] = table
        d2t = torch.empty(config.draft_vocab_size, dtype=torch.int64)
        t2d = torch.empty(config.vocab_size, dtype=torch.bool)
        return needed, {"embed_tokens.weight": table, "d2t": d2t, "t2d": t2d}


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
        merged[_POSITIONS_KEY] = positions_per_layer
    tensors = {name: tensor.detach() for name, tensor in stored.items() if not name.endswith(_IGNORED)}
    if family is EagleFamily.EAGLE3:
        tensors = _renamed(tensors, "layers.0.", "midlayer.")
    config = _config_of(family, merged, tensors)
    if config.norm_before_fc:
        count = len(config.aux_layers) or NUM_AUX_LAYERS
        tensors["fc_norm.weight"] = _taken_norm(tensors, _norms_of_taps(count) if truth(merged, "fc_norm") else [_NORM])
    return HeadCheckpoint(config, {name: _official_map(name, tensor) for name, tensor in tensors.items()})


def published_form(checkpoint: HeadCheckpoint) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config.json and the tensors to store, with the keys and names of the published heads."""
    config, tensors = checkpoint.config, dict(checkpoint.tensors)
    raw: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "model_type": "llama",
        "num_hidden_layers": 1 if config.positions_per_layer else config.num_layers,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "torch_dtype": str(tensors["fc.weight"].dtype).removeprefix("torch."),
    }
    raw |= {key: getattr(config, field) for field, (key, _, _) in _KEYS.items()}
    optional = {
        "bias": config.fc_bias,
        "layer_types": ["sliding_attention"] * config.num_layers if config.window else [],
        "norm_output": config.norm_output,
        "rope_scaling": dict(config.rope),
        "sliding_window": config.window,
        _AUX_KEY: list(config.aux_layers),
        _POSITIONS_KEY: config.positions_per_layer,
    }
    raw |= {
        key: value for key, value in optional.items() if value or (key == "bias" and config.family is EagleFamily.EAGLE)
    }
    if (norms := tensors.pop("fc_norm.weight", None)) is not None:
        raw["fc_norm" if len(norms) > 1 else "norm_before_fc"] = True
        names = _norms_of_taps(len(norms)) if len(norms) > 1 else [_NORM]
        tensors |= dict(zip(names, norms, strict=True))
    return raw, tensors


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
    if eagle.get(_AUX_KEY) is not None:
        eagle[_AUX_KEY] = [tap + 1 for tap in _taps(eagle)]
    given = {key: value for key, value in raw.items() if value is not None}
    nested = section_of(raw, "model") if raw.get("model_type") == "eagle" else {}
    merged = {**section_of(raw, "transformer_layer_config"), **nested, **eagle, **given}
    for other, key in _OTHER_KEYS.items():
        if merged.get(key) is None and other in merged:
            merged[key] = merged[other]
    if merged.get("rope_theta") is None:
        merged["rope_theta"] = section_of(merged, "rope_parameters").get("rope_theta")
    if merged.get("head_dim") is None:
        width, num_heads = integer(merged, "hidden_size"), integer(merged, "num_attention_heads")
        if num_heads < 1 or width % num_heads:
            raise ModelError(f"config.json has no head_dim, and {num_heads} heads do not divide hidden_size {width}")
        merged["head_dim"] = width // num_heads
    return merged


def _config_of(family: EagleFamily, merged: Raw, tensors: Mapping[str, Tensor]) -> HeadConfig:
    if (activation := merged.get("hidden_act") or "silu") != "silu":
        raise ModelError(f"config.json has hidden_act {activation!r}; silu is served")
    if truth(merged, "norm_before_fc") and truth(merged, "fc_norm"):
        raise ModelError("config.json has both norm_before_fc and fc_norm")
    attention = ("midlayer." if family is EagleFamily.EAGLE3 else "layers.0.") + "self_attn."
    num_layers, positions_per_layer = _layers(merged, tensors)
    fields = {
        field: kind(merged, key, merged.get(absent) if isinstance(absent, str) else absent)
        for field, (key, kind, absent) in _KEYS.items()
    }
    has_bias = family is EagleFamily.EAGLE and "fc.bias" in tensors  # the published code reads an absent key as true
    output_bias = f"{attention}o_proj.bias" in tensors
    qkv_bias = truth(merged, "attention_bias", output_bias) or f"{attention}q_proj.bias" in tensors
    return HeadConfig(
        family=family,
        **fields,
        aux_layers=tuple(sorted(_taps(merged))),
        fc_bias=truth(merged, "bias", has_bias),
        norm_before_fc=truth(merged, "norm_before_fc") or truth(merged, "fc_norm"),
        norm_output=_feeds_normed(merged),
        num_layers=num_layers,
        positions_per_layer=positions_per_layer,
        qkv_bias=truth(merged, "qkv_bias", qkv_bias),
        output_bias=output_bias,
        qk_norm=f"{attention}q_norm.weight" in tensors,
        window=_window(merged, num_layers),
        rope=_rope(merged),
    )


def _layers(merged: Raw, stored: Mapping[str, Tensor]) -> tuple[int, int]:
    """How many layers the head has, and how many positions each drafts: 0 where they are one stack. Raises: ModelError."""
    count = integer(merged, "num_hidden_layers", 1)
    found = {int(match[1]) for name in stored if (match := re.match(r"layers\.(\d{1,9})\.", name))} | {0}
    if len(found) == 1 or any(re.match(r"layers\.[1-9]\d*\.input_layernorm\.weight", name) for name in stored):
        return count, 0
    positions = integer(merged, _POSITIONS_KEY, 0)
    if positions < 1:
        raise ModelError(
            f"this is a PosS head of {len(found)} layers (layers.{max(found)}); its files do not say how many positions each "
            f"drafts: set drafting.eagle.positions_per_layer, or {_POSITIONS_KEY} in its config.json"
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
    for key in _ROPE_KEYS:
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


def _norms_of_taps(count: int) -> list[str]:
    return [f"fc_norm.{i}.weight" for i in range(count)]


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


def _taps(section: Raw) -> list[int]:
    taps = section.get(_AUX_KEY) or []
    if not isinstance(taps, list) or not all(type(tap) is int for tap in taps):
        raise ModelError(f"config.json has {_AUX_KEY} {taps!r}, not a list of whole numbers")
    return taps

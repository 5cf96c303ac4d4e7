"""EAGLE heads on disk: reads every published dialect into one official form, refuses anything else, writes the published layout.

>>> config, tensors = read_head("EAGLE3-LLaMA3.1-Instruct-8B")
>>> check_fits(config, vocab_size=128256, hidden_size=4096, num_layers=32)
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ragspec.drafting.eagle.layout import (
    AUX_KEY,
    FEEDBACK_KEY,
    FIELDS,
    NUM_AUX_LAYERS,
    POSITIONS_KEY,
    EagleFamily,
    HeadCheckpoint,
    HeadConfig,
    config_of,
    flat_config,
)
from ragspec.drafting.eagle.network import EagleHead
from ragspec.drafting.heads import files
from ragspec.errors import ModelError

_NORM = "input_norm.weight"
"""One norm for the features of all taps."""
_IGNORED = ("rotary_emb.inv_freq", "verifier_lm_head.weight", "verifier_norm.weight", ".input_scale")
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_NOT_EAGLE = {
    "Hydra": re.compile(r"(hydra_mlp|hydra_lm_head|prefix_embeding_layer|input_embed_fn|cross_attn)\."),
    "Medusa": re.compile(r"(medusa_head\.|\d+\.\d+\.(linear\.)?(weight|bias)$)"),
    "GliDe": re.compile(r".+\.cross_attn\."),
}
_PLACES = {"Medusa": "; drafting.medusa.path names Medusa heads", "Hydra": "; drafting.hydra.path names Hydra heads"}
_RENAMED: dict[EagleFamily, dict[str, str]] = {
    EagleFamily.EAGLE: {},
    EagleFamily.EAGLE3: {r"^(layers|midlayer)\.0\.": "midlayer.", r"^midlayer\.(?=\d)": "layers."},
}
"""Patterns of published names, and the official names."""


def read_head(
    directory: str | Path, positions_per_layer: int | None = None, norm_output: bool | None = None
) -> HeadCheckpoint:
    """Read and check the head in a directory: every tensor is there, has the configured size and is finite.

    A head without `embed_tokens.weight` uses the target's embedding. A head without a rope base has 10000, never the
    target's. `positions_per_layer`: of a PosS head, whose files do not say it. `norm_output`: whether the normed state is fed
    back; None: as the config says. Raises: ModelError with the reason, naming the tensor or the key.
    """
    overrides = {POSITIONS_KEY: positions_per_layer, FEEDBACK_KEY: norm_output}
    with files.errors_of(directory) as folder:
        raw = files.read_json(folder / files.CONFIG)
        checkpoint = official_form(raw, files.read_tensors(folder), overrides)
        check_head(checkpoint.config, checkpoint.tensors)
        return checkpoint


def write_head(directory: str | Path, checkpoint: HeadCheckpoint) -> None:
    """Write config.json and model.safetensors in the published layout, each file whole or not at all.

    Raises: ModelError for a head that `read_head` would refuse, SaveError.
    """
    check_head(checkpoint.config, checkpoint.tensors)
    raw, tensors = published_form(checkpoint)
    files.write_files(Path(directory), raw, files.WEIGHTS, tensors)


def check_head(config: HeadConfig, tensors: Mapping[str, Tensor]) -> None:
    """Raises: ModelError naming the first tensor that a head of this configuration has not, or has otherwise."""
    norms = tensors.get("fc_norm.weight")
    num_taps = config.num_features // config.target_hidden_size
    has_norm_a_tap = norms is not None and norms.ndim == 2 and len(norms) == num_taps
    with torch.device("meta"):
        needed = EagleHead(config, num_taps if has_norm_a_tap else 1).state_dict()
        if config.family is EagleFamily.EAGLE3 and config.hidden_size != config.target_hidden_size:
            needed["embed_tokens.weight"] = torch.empty(config.vocab_size, config.hidden_size)
    check_tensors_of(config, needed, tensors)


def check_tensors_of(config: HeadConfig, needed: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """`needed`: without memory. Beside them a head may have an embedding, and a draft vocabulary. Raises: ModelError."""
    with torch.device("meta"):
        table = torch.empty(config.vocab_size, config.hidden_size)
        optional = {"embed_tokens.weight": table, "lm_head.weight": table}
        if config.family is EagleFamily.EAGLE3:
            d2t = torch.empty(config.draft_vocab_size, dtype=torch.int64)
            t2d = torch.empty(config.vocab_size, dtype=torch.bool)
            optional = {"embed_tokens.weight": table, "d2t": d2t, "t2d": t2d}
    files.check_tensors(tensors, needed, optional)
    if ("d2t" in tensors) != ("t2d" in tensors):
        raise ModelError("the head has only one of d2t and t2d")
    if "d2t" in tensors:
        check_vocabulary(tensors["d2t"], tensors["t2d"])


def check_vocabulary(d2t: Tensor, t2d: Tensor) -> None:
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


def official_form(raw: files.Raw, stored: Mapping[str, Tensor], overrides: files.Raw) -> HeadCheckpoint:
    """Configuration and tensors of a head under the official names; the tensors are not checked.

    `overrides`: keys of the config that the user gave beside it. Raises: ModelError for another family, or a config that is
    incomplete or not supported.
    """
    if "model.fc.weight" in stored or ("fc.weight" in stored and "model.layers.0.mlp.up_proj.weight" in stored):
        stored = _renamed(stored, {r"^model\.": ""})
    family = _family_of(raw, stored)
    merged = flat_config(raw, overrides)
    tensors = {n: _official_map(n, t.detach()) for n, t in stored.items() if not n.endswith(_IGNORED)}
    tensors = _renamed(_dequantised(tensors), _RENAMED[family])
    config = config_of(family, merged, tensors)
    if config.norm_before_fc:
        count = len(config.aux_layers) or NUM_AUX_LAYERS
        names = _norms_of_taps(count) if files.truth(merged, "fc_norm") else [_NORM]
        tensors["fc_norm.weight"] = _taken_norm(tensors, names)
    return HeadCheckpoint(config, tensors | _rising_maps(tensors, config.vocab_size))


def published_form(checkpoint: HeadCheckpoint) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config.json and the tensors to store, with the keys and names of the published heads."""
    config, tensors = checkpoint.config, dict(checkpoint.tensors)
    dtype = next(tensor.dtype for name, tensor in tensors.items() if name.endswith("up_proj.weight"))
    raw: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "model_type": "llama",
        "num_hidden_layers": 1 if config.positions_per_layer else config.num_layers,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    raw |= {key: getattr(config, field) for field, (key, _, _) in FIELDS.items()}
    optional = {
        "bias": config.fc_bias,
        "layer_types": ["sliding_attention"] * config.num_layers if config.window else [],
        "norm_output": config.norm_output,
        "rope_scaling": dict(config.rope),
        "sliding_window": config.window,
        "eagle_config": {"use_aux_hidden_state": False} if config.reads_final else {},
        AUX_KEY: [] if config.reads_final else list(config.aux_layers),
        POSITIONS_KEY: config.positions_per_layer,
    }
    raw |= {
        key: value for key, value in optional.items() if value or (key == "bias" and config.family is EagleFamily.EAGLE)
    }
    if (norms := tensors.pop("fc_norm.weight", None)) is not None:
        raw["fc_norm" if len(norms) > 1 else "norm_before_fc"] = True
        names = _norms_of_taps(len(norms)) if len(norms) > 1 else [_NORM]
        tensors |= dict(zip(names, norms, strict=True))
    return raw, tensors


def _family_of(raw: files.Raw, stored: Iterable[str]) -> EagleFamily:
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


def _renamed(tensors: Mapping[str, Tensor], patterns: Mapping[str, str]) -> dict[str, Tensor]:
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        official = name
        for pattern, new in patterns.items():
            official = re.sub(pattern, new, official)
        if official in renamed:
            raise ModelError(f"the head has {official} twice, under two names of one layer")
        renamed[official] = tensor
    return renamed


def _dequantised(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights times their scales, one a tensor or one a row, in the type of the scales. Raises: ModelError."""
    for scale_name in [name for name in tensors if name.endswith(".weight_scale")]:
        name, scale = scale_name.removesuffix("_scale"), tensors.pop(scale_name)
        num_rows = len(tensors[name]) if name in tensors and tensors[name].ndim == 2 else 0
        if tuple(scale.shape) not in {(), (1,), (1, 1), (num_rows,), (num_rows, 1)} or not num_rows:
            raise ModelError(
                f"the head's {scale_name} is {list(scale.shape)}: not one scale for {name} or for each row"
            )
        tensors[name] = (tensors[name].float() * scale.float().reshape(-1, 1)).to(scale.dtype)
    return tensors


def _rising_maps(tensors: Mapping[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """d2t with rising tokens, the output layer's rows in the same order, and t2d, which ModelOpt does not store.

    Maps that name no tokens stay as they are: `check_head` refuses them.
    """
    d2t, output = tensors.get("d2t"), tensors.get("lm_head.weight")
    if d2t is None or output is None or d2t.dtype != torch.int64 or d2t.ndim != 1 or d2t.shape != output.shape[:1]:
        return {}
    rows = torch.arange(len(d2t))
    ids = rows + d2t
    order = ids.argsort(stable=True)
    made = {} if torch.equal(order, rows) else {"d2t": ids[order] - rows, "lm_head.weight": output[order]}
    if "t2d" not in tensors and bool(((ids >= 0) & (ids < vocab_size)).all()):
        made["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return made


def _official_map(name: str, tensor: Tensor) -> Tensor:
    """Vocabulary maps of other integer types become int64 offsets and booleans."""
    if name == "d2t" and tensor.dtype in _INTEGERS:
        return tensor.to(torch.int64)
    if name == "t2d" and tensor.dtype in _INTEGERS and bool(((tensor == 0) | (tensor == 1)).all()):
        return tensor.to(torch.bool)
    return tensor

"""EAGLE heads on disk: reads published checkpoints, refuses anything else, writes the published layout.

Runs no code of a checkpoint: reads safetensors, or `.bin` and `.pt` files without pickled code.

    >>> config, tensors = read_head("EAGLE3-LLaMA3.1-Instruct-8B")
    >>> check_fits(config, vocab_size=128256, hidden_size=4096, num_layers=32)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from ragspec.disk import atomic_writer
from ragspec.drafting.eagle.dialects import AUX_KEY, DEFAULT_ROPE_THETA, official_form
from ragspec.drafting.eagle.layout import (
    EagleFamily,
    HeadCheckpoint,
    HeadConfig,
    check_fits,
    check_tensors,
    default_aux_layers,
)
from ragspec.errors import ModelError, SaveError

__all__ = ["EagleFamily", "HeadCheckpoint", "HeadConfig", "check_fits", "default_aux_layers", "read_head", "write_head"]

_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_PUBLISHED_WEIGHTS = (_WEIGHTS, _WEIGHTS + ".index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state")


def read_head(directory: str | Path) -> HeadCheckpoint:
    """Read and check the head in a directory: every tensor is there, has the configured size and is finite.

    A head without `embed_tokens.weight` uses the target's embedding. A head without a rope base has 10000, never the
    target's. Raises: ModelError with the reason, naming the tensor or the key.
    """
    directory = Path(directory)
    try:
        raw = _read_json(directory / _CONFIG)
        checkpoint = official_form(raw, _read_tensors(directory))
        check_tensors(checkpoint.config, checkpoint.tensors)
    except ModelError as cause:
        raise ModelError(f"{directory}: {cause}") from cause
    return checkpoint


def write_head(directory: str | Path, checkpoint: HeadCheckpoint) -> None:
    """Write config.json and model.safetensors in the published layout, each file whole or not at all.

    Raises: ModelError for a head that `read_head` would refuse, SaveError.
    """
    check_tensors(checkpoint.config, checkpoint.tensors)
    raw, tensors = _published_form(checkpoint)
    apart = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    directory, config = Path(directory), json.dumps(raw, indent=2) + "\n"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with atomic_writer(directory / _CONFIG) as config_file, atomic_writer(directory / _WEIGHTS) as weights_file:
            config_file.write(config.encode())
            weights_file.write(save(apart, metadata={"format": "pt"}))
    except (OSError, SafetensorError) as cause:
        raise SaveError(f"cannot write the head to {directory}: {cause}") from cause


def _published_form(checkpoint: HeadCheckpoint) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config.json and the tensors to store, with the keys and names of the published heads."""
    config, tensors = checkpoint.config, dict(checkpoint.tensors)
    norms = tensors.pop("fc_norm.weight", None)
    if norms is not None:
        names = ["input_norm.weight"] if len(norms) == 1 else [f"fc_norm.{i}.weight" for i in range(len(norms))]
        tensors |= dict(zip(names, norms, strict=True))
    raw = _published_shape(config) | _published_dialect(config, per_tap=norms is not None and len(norms) > 1)
    raw["torch_dtype"] = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    return raw, tensors


def _published_shape(config: HeadConfig) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "model_type": "llama",
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "num_hidden_layers": 1,
        "pad_token_id": 0,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
    }
    if config.head_dim * config.num_heads != config.hidden_size:
        raw["head_dim"] = config.head_dim
    if config.rope_theta != DEFAULT_ROPE_THETA:
        raw["rope_theta"] = config.rope_theta
    return raw


def _published_dialect(config: HeadConfig, per_tap: bool) -> dict[str, Any]:
    if config.family is EagleFamily.EAGLE:
        return {"bias": config.fc_bias}
    raw: dict[str, Any] = {"draft_vocab_size": config.draft_vocab_size}
    if config.fc_bias:
        raw["bias"] = True
    if config.target_hidden_size != config.hidden_size:
        raw["target_hidden_size"] = config.target_hidden_size
    if config.aux_layers:
        raw[AUX_KEY] = list(config.aux_layers)
    if config.norm_before_fc:
        raw["fc_norm" if per_tap else "norm_before_fc"] = True
    return raw | {name: True for name in ("norm_before_residual", "norm_output") if getattr(config, name)}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except OSError as cause:
        raise ModelError(f"cannot read {path.name}: {cause.strerror}") from cause
    except (ValueError, RecursionError) as cause:
        raise ModelError(f"{path.name} is no JSON: {cause}") from cause
    if not isinstance(read, dict):
        raise ModelError(f"{path.name} holds no JSON object")
    return read


def _read_tensors(directory: Path) -> dict[str, Tensor]:
    path = _weights_path(directory)
    if path.suffix != ".json":
        return _read_file(path)
    tensors: dict[str, Tensor] = {}
    for name in _shard_names(_read_json(path), path.name):
        tensors |= _read_file(directory / name)
    return tensors


def _weights_path(directory: Path) -> Path:
    """The first published name that exists, or else the only file of tensors."""
    for name in _PUBLISHED_WEIGHTS:
        if (directory / name).is_file():
            return directory / name
    found = [path for pattern in ("*.safetensors", "*.bin", "*.pt") for path in sorted(directory.glob(pattern))]
    found = [path for path in found if not path.name.startswith(_NO_WEIGHTS)]
    if len(found) != 1:
        names = ", ".join(path.name for path in found)
        raise ModelError(f"no {_WEIGHTS} or pytorch_model.bin" + (f", and several others: {names}" if found else ""))
    return found[0]


def _shard_names(index: Mapping[str, Any], index_name: str) -> list[str]:
    weight_map = index.get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ModelError(f"{index_name} has no weight_map of file names")
    return sorted(set(names))


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        is_safe = path.suffix == ".safetensors"
        read = load_file(path) if is_safe else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as cause:  # safetensors, pickle and torch raise classes of their own for a damaged file
        reason = (str(cause).strip().splitlines() or [""])[0]
        raise ModelError(f"cannot read {path.name}: {type(cause).__name__}: {reason}") from cause
    if not isinstance(read, dict) or not all(_is_named_tensor(name, value) for name, value in read.items()):
        raise ModelError(f"{path.name} holds something other than named tensors")
    return read


def _is_named_tensor(name: object, value: object) -> bool:
    return isinstance(name, str) and isinstance(value, Tensor)

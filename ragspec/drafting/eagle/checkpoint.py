"""EAGLE heads on disk: reads published checkpoints, refuses anything else, writes the published layout.

>>> config, tensors = read_head("EAGLE3-LLaMA3.1-Instruct-8B")
>>> check_fits(config, vocab_size=128256, hidden_size=4096, num_layers=32)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from ragspec.drafting.eagle.dialects import AUX_KEY, DEFAULT_ROPE_THETA, POSITIONS_KEY, official_form
from ragspec.drafting.eagle.layout import (
    EagleFamily,
    HeadCheckpoint,
    HeadConfig,
    check_fits,
    check_tensors,
    default_aux_layers,
    reachable,
)
from ragspec.drafting.heads.files import CONFIG, WEIGHTS, read_json, read_tensors, write_files
from ragspec.errors import ModelError

__all__ = [
    "EagleFamily",
    "HeadCheckpoint",
    "HeadConfig",
    "check_fits",
    "default_aux_layers",
    "reachable",
    "read_head",
    "write_head",
]


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
    write_files(Path(directory), raw, WEIGHTS, tensors)


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
        "num_hidden_layers": 1 if config.positions_per_layer else config.num_layers,
        "pad_token_id": 0,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
    }
    if config.head_dim * config.num_heads != config.hidden_size:
        raw["head_dim"] = config.head_dim
    if config.rope_theta != DEFAULT_ROPE_THETA:
        raw["rope_theta"] = config.rope_theta
    if config.rope:
        raw["rope_scaling"] = dict(config.rope)
    if config.window:
        raw |= {"layer_types": ["sliding_attention"] * config.num_layers, "sliding_window": config.window}
    if config.positions_per_layer:
        raw[POSITIONS_KEY] = config.positions_per_layer
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

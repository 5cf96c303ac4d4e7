"""EAGLE heads made on the spot: random weights under the published names, in memory and as published directories.

Names and sizes are written out from the published tables, not taken from the code under test.

    >>> head = random_head("eagle3", folder, hidden=32, vocab=64, dialect="speculators", aux_layers=(0, 1, 2))
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ragspec.drafting.eagle.layout import EagleFamily, HeadCheckpoint, HeadConfig

LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def random_head(
    family: EagleFamily | str,
    folder: Path | None = None,
    *,
    hidden: int = 32,
    vocab: int = 64,
    draft_vocab: int | None = None,
    dialect: str = "official",
    own_embedding: bool = False,
    own_lm_head: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **fields: Any,
) -> HeadCheckpoint:
    """A head of random weights with the published names, written to `folder` if one is given.

    `draft_vocab` is for EAGLE-3 (absent: 5/8 of `vocab`), `own_lm_head` for EAGLE-1/2, which mostly use the target's.
    `fields` are fields of HeadConfig; with `norm_before_fc="taps"` each tap has a norm of its own.
    """
    family = EagleFamily(family)
    is_eagle = family is EagleFamily.EAGLE
    sizes: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": hidden + hidden // 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": max(hidden // 8 * 2, 2),
        "vocab_size": vocab,
        "draft_vocab_size": vocab if is_eagle else draft_vocab or vocab * 5 // 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_positions": 2048,
        "target_hidden_size": hidden,
    }
    sizes |= fields
    norms_of_taps = sizes.get("norm_before_fc") == "taps"
    sizes["norm_before_fc"] = bool(sizes.get("norm_before_fc"))
    config = HeadConfig(family, **sizes)
    extras = {"own_embedding": own_embedding, "own_lm_head": own_lm_head, "norms_of_taps": norms_of_taps}
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: random_tensor(shape, generator).to(dtype) for name, shape in _shapes(config, **extras).items()}
    if config.draft_vocab_size < config.vocab_size:
        tensors |= _random_maps(config, generator)
    checkpoint = HeadCheckpoint(config, tensors)
    if folder is not None:
        save_head(folder, checkpoint, dialect)
    return checkpoint


def same(left: HeadCheckpoint, right: HeadCheckpoint) -> bool:
    if left.config != right.config or left.tensors.keys() != right.tensors.keys():
        return False
    pairs = [(tensor, right.tensors[name]) for name, tensor in left.tensors.items()]
    return all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs)


def save_head(folder: Path, checkpoint: HeadCheckpoint, dialect: str = "official") -> None:
    """config.json and model.safetensors as a dialect has them: "official" or "speculators" (EAGLE-3)."""
    config, tensors = checkpoint.config, dict(checkpoint.tensors)
    norms = tensors.pop("fc_norm.weight", None)
    if norms is not None:
        names = [f"fc_norm.{i}.weight" for i in range(len(norms))] if len(norms) > 1 else ["input_norm.weight"]
        tensors |= dict(zip(names, norms, strict=True))
    shape, flags = _config_shape(config), _config_flags(config, norms is not None and len(norms) > 1)
    if dialect == "official":
        raw = shape | flags
    else:
        assert dialect == "speculators" and config.family is EagleFamily.EAGLE3
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        raw = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": None}},
            "transformer_layer_config": shape,
        } | flags
    save_files(folder, raw, tensors)


def save_files(folder: Path, raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """A directory with config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=2))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")


def change_config(folder: Path, **changes: Any) -> None:
    """Set keys of config.json; `...` takes one out."""
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """`change` alters the stored tensors in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def _config_shape(config: HeadConfig) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "num_hidden_layers": 1 if config.positions_per_layer else config.num_layers,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_positions,
        "attention_bias": config.output_bias,
        "qkv_bias": config.qkv_bias,
        "rope_scaling": config.rope or None,
        "position_per_layer": config.positions_per_layer or None,
        "layer_types": [("sliding" if config.window else "full") + "_attention"] * config.num_layers,
        "sliding_window": config.window or None,
    }


def _config_flags(config: HeadConfig, norms_of_taps: bool) -> dict[str, Any]:
    if config.family is EagleFamily.EAGLE:
        return {"bias": config.fc_bias}
    given = asdict(config)
    flags = {name: given[name] for name in ("draft_vocab_size", "norm_before_residual", "norm_output")}
    flags |= {"norm_before_fc": config.norm_before_fc and not norms_of_taps, "fc_norm": norms_of_taps}
    flags |= {"bias": config.fc_bias, "target_hidden_size": None}
    if config.target_hidden_size != config.hidden_size:
        flags["target_hidden_size"] = config.target_hidden_size
    if config.reads_final:
        flags["eagle_config"] = {"use_aux_hidden_state": False}
    elif config.aux_layers:
        flags["eagle_aux_hidden_state_layer_ids"] = list(config.aux_layers)
    return flags


def _shapes(
    config: HeadConfig, own_embedding: bool, own_lm_head: bool, norms_of_taps: bool
) -> dict[str, tuple[int, ...]]:
    is_eagle = config.family is EagleFamily.EAGLE
    hidden, between = config.hidden_size, config.intermediate_size
    taps = len(config.aux_layers) or 3
    layer, wide = ("layers.0.", hidden) if is_eagle else ("midlayer.", 2 * hidden)
    projected = 2 * hidden if is_eagle else taps * config.target_hidden_size
    shapes: dict[str, tuple[int, ...]] = {} if config.reads_final else {"fc.weight": (hidden, projected)}
    sizes = [count * config.head_dim for count in (config.num_heads, config.num_kv_heads)]
    shapes |= layer_shapes(layer, wide, hidden, between, *sizes)
    heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    for part, count in heads.items():
        if config.qkv_bias:
            shapes[f"{layer}self_attn.{part}_proj.bias"] = (count * config.head_dim,)
        if config.qk_norm and part != "v":
            shapes[f"{layer}self_attn.{part}_norm.weight"] = (config.head_dim,)
    if config.output_bias:
        shapes[f"{layer}self_attn.o_proj.bias"] = (hidden,)
    for index in range(1, config.num_layers):
        for name, shape in [item for item in shapes.items() if item[0].startswith(layer)]:
            shapes[name.replace(layer, f"layers.{index}.")] = (*shape[:-1], hidden) if shape[1:] == (wide,) else shape
        if not config.positions_per_layer:
            shapes[f"layers.{index}.input_layernorm.weight"] = (hidden,)
    if config.fc_bias:
        shapes["fc.bias"] = (hidden,)
    if own_embedding or config.target_hidden_size != hidden:
        shapes["embed_tokens.weight"] = (config.vocab_size, hidden)
    if is_eagle:
        return shapes | ({"lm_head.weight": (config.vocab_size, hidden)} if own_lm_head else {})
    if config.norm_before_fc:
        groups = taps if norms_of_taps else 1
        shapes["fc_norm.weight"] = (groups, taps * config.target_hidden_size // groups)
    return shapes | {
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
        **({} if config.shares_lm_head else {"lm_head.weight": (config.draft_vocab_size, hidden)}),
    }


def layer_shapes(layer: str, inputs: int, width: int, between: int, query: int, key: int) -> dict[str, tuple[int, ...]]:
    """The products and the second norm of a decoder layer. `inputs`: width of the rows that attend."""
    return {
        layer + "self_attn.q_proj.weight": (query, inputs),
        layer + "self_attn.k_proj.weight": (key, inputs),
        layer + "self_attn.v_proj.weight": (key, inputs),
        layer + "self_attn.o_proj.weight": (width, query),
        layer + "mlp.gate_proj.weight": (between, width),
        layer + "mlp.up_proj.weight": (between, width),
        layer + "mlp.down_proj.weight": (width, between),
        layer + "post_attention_layernorm.weight": (width,),
    }


def random_tensor(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Matrices keep the size of what they multiply; vectors are norms near one."""
    noise = torch.randn(shape, generator=generator)
    return noise / shape[-1] ** 0.5 if len(shape) == 2 and shape[0] > 3 else 1 + 0.2 * noise


def _random_maps(config: HeadConfig, generator: torch.Generator) -> dict[str, Tensor]:
    kept = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
    marked = torch.zeros(config.vocab_size, dtype=torch.bool)
    marked[kept] = True
    return {"d2t": kept - torch.arange(len(kept)), "t2d": marked}

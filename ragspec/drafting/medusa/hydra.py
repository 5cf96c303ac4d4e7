"""Hydra heads on disk: heads as Medusa's that also read the tokens between the state and the token that they guess.

    hydra_mlp.0.0.linear.weight .bias   hydra_mlp.0.0.res_connection.weight .bias    first block; without the second: not grounded
    hydra_mlp.0.1.linear.weight .bias   ...                                          further blocks
    hydra_lm_head.0.weight .bias        input_embed_fn.weight                        output layer; embedding, which may be absent

Where the heads were trained with dropout, blocks have the indices 1, 3, 5, ... and output layers are named `hydra_lm_head.0.1.`.
The architecture prefix-mlp (Hydra++) always has these names, and a Llama of one layer with the target's sizes:

    prefix_embeding_layer.layers.0.self_attn.q_proj.weight   ...   prefix_embeding_layer.norm.weight

    >>> heads = read_hydra("hydra-vicuna-7b", target)

Source: Hydra (Ankner et al. 2024, arXiv 2402.05109).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ragspec.drafting.heads.config_keys import Raw, integer, truth
from ragspec.drafting.heads.files import CONFIG, read_json, read_tensors
from ragspec.drafting.heads.target import FINAL, HeadTarget
from ragspec.drafting.medusa.checkpoint import Place, PositionHeads, count_key, num_stored, placed, write_checked
from ragspec.errors import ModelError
from ragspec.numerics.attention import AttentionShape

_WEIGHTS = ("hydra_lm_head.safetensors", "hydra_lm_head.pt")
_ARCH_KEY, _PREFIX_ARCH = "hydra_head_arch", "prefix-mlp"


def read_hydra(directory: str | Path, target: HeadTarget) -> PositionHeads:
    """Read and check the heads in a directory, as `read_medusa`. Raises: ModelError naming the tensor or the key."""
    directory = Path(directory)
    try:
        raw = read_json(directory / CONFIG)
        if (arch := raw.get(_ARCH_KEY, "mlp")) not in ("mlp", _PREFIX_ARCH):
            raise ModelError(f"config.json has {_ARCH_KEY} {arch!r}; mlp and {_PREFIX_ARCH} are served")
        stored = read_tensors(directory, _WEIGHTS)
        stored = {name: tensor for name, tensor in stored.items() if not name.endswith("rotary_emb.inv_freq")}
        has_dropout = arch == _PREFIX_ARCH or any(name.startswith("hydra_lm_head.0.1.") for name in stored)
        num_blocks, is_grounded = count_key(raw, "hydra_num_layers", 1), truth(raw, "grounded_heads")
        counted = num_stored(stored, r"hydra_(?:mlp|lm_head)\.(\d+)\.", "Hydra")
        num_heads = max(counted, count_key(raw, "hydra_num_heads", counted))
        places = _places(has_dropout, num_heads, num_blocks, is_grounded, target)
        if arch == _PREFIX_ARCH:
            places |= _prefix_places(target)
        if "input_embed_fn.weight" in stored:
            places["input_embed_fn.weight"] = Place("embedding", (target.vocab_size, target.hidden_size))
        tap, tensors = _tap(raw, target), placed(stored, places)
        return PositionHeads(num_heads, num_blocks, tensors, is_grounded, tap, arch == _PREFIX_ARCH)
    except ModelError as cause:
        raise ModelError(f"{directory}: {cause}") from cause


def write_hydra(
    directory: Path, tensors: Mapping[str, Tensor], num_blocks: int, is_grounded: bool, has_prefix: bool, target: str
) -> None:
    """Write heads of the architecture mlp or prefix-mlp; `target`: its directory or name. Raises: ModelError, SaveError."""
    num_heads = num_stored(tensors, r"hydra_lm_head\.(\d+)\.", "Hydra")
    raw: dict[str, Any] = {"hydra_num_heads": num_heads, "hydra_num_layers": num_blocks}
    raw[_ARCH_KEY] = _PREFIX_ARCH if has_prefix else "mlp"
    raw |= {"grounded_heads": is_grounded, "hidden_state_offset": 0, "base_model_name_or_path": target}
    write_checked(directory, raw, _WEIGHTS[-1], tensors)


def _places(
    has_dropout: bool, num_heads: int, num_blocks: int, is_grounded: bool, target: HeadTarget
) -> dict[str, Place]:
    """All tensors of the heads by their published names."""
    width, places = target.hidden_size, {}
    for i in range(num_heads):
        inputs = (i + 2) * width if is_grounded else width
        blocks = f"hydra_mlp.{i}."
        for j in range(num_blocks):
            linear = f"{blocks}{2 * j + 1 if has_dropout else j}.linear"
            places[f"{linear}.weight"] = Place(f"{i}.blocks.{j}.weight", (width, width if j else inputs))
            places[f"{linear}.bias"] = Place(f"{i}.blocks.{j}.bias", (width,))
        if is_grounded:
            residual = f"{blocks}{int(has_dropout)}.res_connection"
            places[f"{residual}.weight"] = Place(f"{i}.residual.weight", (width, inputs))
            places[f"{residual}.bias"] = Place(f"{i}.residual.bias", (width,))
        output = f"hydra_lm_head.{i}" + (".1" if has_dropout else "")
        places[f"{output}.weight"] = Place(f"{i}.output.weight", (target.vocab_size, width))
        places[f"{output}.bias"] = Place(f"{i}.output.bias", (target.vocab_size,))
    return places


def prefix_attention(target: HeadTarget) -> AttentionShape:
    """The attention of Hydra++'s layer, which has the target's sizes."""
    config = target.text_config
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or target.hidden_size // num_heads
    return AttentionShape(num_heads, getattr(config, "num_key_value_heads", num_heads), head_dim, head_dim**-0.5)


def _prefix_places(target: HeadTarget) -> dict[str, Place]:
    config, width, shape = target.text_config, target.hidden_size, prefix_attention(target)
    if config.hidden_act != "silu":
        raise ModelError(f"a prefix layer for a target with hidden_act {config.hidden_act!r} is not served; silu is")
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    between = config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (heads, width),
        "self_attn.k_proj": (kv_heads, width),
        "self_attn.v_proj": (kv_heads, width),
        "self_attn.o_proj": (width, heads),
        "mlp.gate_proj": (between, width),
        "mlp.up_proj": (between, width),
        "mlp.down_proj": (width, between),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    section = "prefix_embeding_layer."  # spelt so
    places = {f"{section}layers.0.{n}.weight": Place(f"prefix.{n}.weight", shape) for n, shape in shapes.items()}
    places[f"{section}norm.weight"] = Place("prefix.norm.weight", (width,))
    places[f"{section}embed_tokens.weight"] = Place("", (target.vocab_size, width))
    return places


def _tap(raw: Raw, target: HeadTarget) -> int:
    """`hidden_state_offset` counts layers below the last state; 0 is the output of the final norm."""
    offset = integer(raw, "hidden_state_offset", 0)
    if not 0 <= offset <= target.num_layers:
        raise ModelError(f"config.json has hidden_state_offset {offset}; the target has {target.num_layers} layers")
    return target.num_layers - offset if offset else FINAL

"""Medusa and Hydra heads on disk. Reads the published forms and refuses anything else.

    0.0.linear.weight  0.0.linear.bias  0.1.weight        a head beside its target, in `medusa_lm_head.pt` or `.safetensors`
    0.0.linear.weight  0.0.linear.bias                    the same without output layers: the target's own is read
    medusa_head.0.0.linear.weight  model.layers. ...      heads among their target's weights
    hydra_mlp.0.0.linear.weight .bias   hydra_mlp.0.0.res_connection.weight .bias    first block; without the second: not grounded
    hydra_mlp.0.1.linear.weight .bias   ...                                          further blocks
    hydra_lm_head.0.weight .bias        input_embed_fn.weight                        output layer; embedding, which may be absent

Where Hydra heads were trained with dropout, blocks have the indices 1, 3, 5, ... and output layers are named
`hydra_lm_head.0.1.`. The architecture prefix-mlp (Hydra++) always has these names, and a Llama of one layer with the target's
sizes:

    prefix_embeding_layer.layers.0.self_attn.q_proj.weight   ...   prefix_embeding_layer.norm.weight

Heads are counted by their tensors: published configs name fewer than their files hold.

    >>> heads = read_medusa("medusa-vicuna-7b-v1.3", target)

Sources: Medusa (Cai et al. 2024, arXiv 2401.10774), Hydra (Ankner et al. 2024, arXiv 2402.05109).
"""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ragspec.drafting.heads import files
from ragspec.drafting.heads.layer import FINAL, DraftTarget
from ragspec.drafting.medusa.network import (
    EMBEDDING,
    MAX_HEADS,
    PositionCheckpoint,
    PositionConfig,
    PositionFamily,
    PositionHead,
)
from ragspec.errors import ModelError

_MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
_HYDRA_FILES = ("hydra_lm_head.safetensors", "hydra_lm_head.pt")
_SECTION = "medusa_head."
_ARCH_KEY, _PREFIX_ARCH = "hydra_head_arch", "prefix-mlp"
_KEYS = (_ARCH_KEY, *(f"{family}_num_{part}" for family in ("medusa", "hydra") for part in ("heads", "layers")))
"""The keys of heads; a merged checkpoint's config has its target's keys beside them."""


def read_medusa(directory: str | Path, target: DraftTarget) -> PositionCheckpoint:
    """Read and check the heads in a directory: every tensor is there, fits the target and is finite.

    Raises: ModelError with the reason, naming the tensor or the key.
    """
    with files.errors_of(directory) as folder:
        raw, stored = _read_config(folder), files.read_tensors(folder, _MEDUSA_FILES, _SECTION)
        stored = {name.removeprefix(_SECTION): tensor for name, tensor in stored.items()}
        num_blocks = _count(raw, "medusa_num_layers", 1)
        num_heads = max(_num_stored(stored, r"(\d+)\.", "Medusa"), _count(raw, "medusa_num_heads", 1))
        has_output = any(f"{i}.{num_blocks}.weight" in stored for i in range(num_heads))
        sizes = (target.hidden_size, target.vocab_size, num_heads, num_blocks)
        return _checked(PositionConfig(PositionFamily.MEDUSA, *sizes, has_output=has_output), stored, target)


def read_hydra(directory: str | Path, target: DraftTarget) -> PositionCheckpoint:
    """As `read_medusa`."""
    with files.errors_of(directory) as folder:
        raw = _read_config(folder)
        if (arch := raw.get(_ARCH_KEY, "mlp")) not in ("mlp", _PREFIX_ARCH):
            raise ModelError(f"config.json has {_ARCH_KEY} {arch!r}; mlp and {_PREFIX_ARCH} are served")
        stored = files.read_tensors(folder, _HYDRA_FILES)
        stored = {name: tensor for name, tensor in stored.items() if not name.endswith("rotary_emb.inv_freq")}
        has_prefix = arch == _PREFIX_ARCH
        num_blocks, is_grounded = _count(raw, "hydra_num_layers", 1), files.truth(raw, "grounded_heads")
        num_stored = _num_stored(stored, r"hydra_(?:mlp|lm_head)\.(\d+)\.", "Hydra")
        num_heads = max(num_stored, _count(raw, "hydra_num_heads", num_stored))
        has_dropout = has_prefix or any(name.startswith("hydra_lm_head.0.1.") for name in stored)
        if has_prefix and target.text_config.hidden_act != "silu":
            raise ModelError(
                f"a prefix layer for a target with hidden_act {target.text_config.hidden_act!r} is not served; silu is"
            )
        sizes = (target.hidden_size, target.vocab_size, num_heads, num_blocks)
        config = PositionConfig(
            PositionFamily.HYDRA,
            *sizes,
            is_grounded=is_grounded,
            has_prefix=has_prefix,
            has_dropout=has_dropout,
            tap=_tap(raw, target),
        )
        return _checked(config, stored, target)


def write_positions(directory: Path, checkpoint: PositionCheckpoint, target: str) -> None:
    """Write heads in their published form; `target`: its directory or name. Raises: ModelError, SaveError."""
    config, tensors = checkpoint
    for name, tensor in tensors.items():
        files.check_tensor(name, tensor, tuple(tensor.shape))
    family = config.family.value
    raw: dict[str, Any] = {
        f"{family}_num_heads": config.num_heads,
        f"{family}_num_layers": config.num_blocks,
        "base_model_name_or_path": target,
    }
    if config.family is PositionFamily.HYDRA:
        raw |= {"grounded_heads": config.is_grounded, "hidden_state_offset": 0}
        raw[_ARCH_KEY] = _PREFIX_ARCH if config.has_prefix else "mlp"
    files.write_files(directory, raw, f"{family}_lm_head.pt", tensors)


def _read_config(directory: Path) -> files.Raw:
    raw = files.read_json(directory / files.CONFIG)
    for key, value in raw.items():
        if key.startswith(("medusa_", "hydra_")) and key not in _KEYS and value is not None:
            raise ModelError(f"config.json has {key} {value!r}, which is not served")
    return raw


def _checked(config: PositionConfig, stored: dict[str, Tensor], target: DraftTarget) -> PositionCheckpoint:
    with torch.device("meta"):
        head = PositionHead(config, target.text_config if config.has_prefix else None, are_tied=False)
        table = torch.empty(target.vocab_size, target.hidden_size)
    optional = {EMBEDDING: table} if config.family is PositionFamily.HYDRA else {}
    if config.has_prefix:
        optional["prefix_embeding_layer.embed_tokens.weight"] = table
    files.check_tensors(stored, head.state_dict(), optional)
    return PositionCheckpoint(config, {name: tensor.detach() for name, tensor in stored.items()})


def _count(raw: files.Raw, key: str, absent: int) -> int:
    """A key that counts heads or layers. Raises: ModelError naming the key."""
    count = files.integer(raw, key, absent)
    if not 1 <= count <= MAX_HEADS:
        raise ModelError(f"config.json has {key} {count}, not 1 to {MAX_HEADS}")
    return count


def _num_stored(names: Collection[str], pattern: str, family: str) -> int:
    """The number of heads whose tensors are stored, from the greatest index. Raises: ModelError."""
    found = {int(match[1]): name for name in names if (match := re.match(pattern, name)) and len(match[1]) < 10}
    if not found:
        raise ModelError(f"no {family} head: no head has tensors named as {', '.join(sorted(names)[:3])}")
    if max(found) >= MAX_HEADS:
        raise ModelError(f"the head has {found[max(found)]}; at most {MAX_HEADS} heads are served")
    return max(found) + 1


def _tap(raw: files.Raw, target: DraftTarget) -> int:
    """`hidden_state_offset` counts layers below the last state; 0 is the output of the final norm."""
    offset = files.integer(raw, "hidden_state_offset", 0)
    if not 0 <= offset <= target.num_layers:
        raise ModelError(f"config.json has hidden_state_offset {offset}; the target has {target.num_layers} layers")
    return target.num_layers - offset if offset else FINAL

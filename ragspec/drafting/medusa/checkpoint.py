"""Medusa heads on disk: one small network for each position ahead. Reads the published forms and refuses anything else.

    0.0.linear.weight  0.0.linear.bias  0.1.weight        a head beside its target, in `medusa_lm_head.pt` or `.safetensors`
    0.0.linear.weight  0.0.linear.bias                    the same without output layers: the target's own is read
    medusa_head.0.0.linear.weight  model.layers. ...      heads among their target's weights

Heads are counted by their tensors: published configs name fewer than their files hold.

    >>> heads = read_medusa("medusa-vicuna-7b-v1.3", target)

Source: Medusa (Cai et al. 2024, arXiv 2401.10774).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ragspec.drafting.heads.config_keys import Raw, integer
from ragspec.drafting.heads.files import CONFIG, check_tensor, read_json, read_tensors, write_files
from ragspec.drafting.heads.target import FINAL, HeadTarget
from ragspec.errors import ModelError

_WEIGHTS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
_SECTION = "medusa_head."
MOST = 64
"""More heads, or more layers in a head, than any published head has."""


class Place(NamedTuple):
    """Where the networks hold a published tensor, and its shape. No name: the tensor may be absent and is not read."""

    name: str
    shape: tuple[int, ...]


class PositionHeads(NamedTuple):
    """Networks for the positions 1, 2, ... behind the next token.

    Tensors of head i: `i.blocks.j.weight` and `.bias`, `i.output.weight` and `.bias` (none: the target's output layer is read).
    Of `is_grounded` heads, which read the tokens in between, also `i.residual.weight` and `.bias` and perhaps `embedding`. With
    `has_prefix` the states first pass a decoder layer with the names of a Llama's, and a norm: `prefix.self_attn.q_proj.weight`,
    ..., `prefix.norm.weight`. `tap`: of the target's states.
    """

    num_heads: int
    num_blocks: int
    tensors: dict[str, Tensor]
    is_grounded: bool = False
    tap: int = FINAL
    has_prefix: bool = False


def read_medusa(directory: str | Path, target: HeadTarget) -> PositionHeads:
    """Read and check the heads in a directory: every tensor is there, fits the target and is finite.

    Raises: ModelError with the reason, naming the tensor or the key.
    """
    directory = Path(directory)
    try:
        raw, stored = read_json(directory / CONFIG), read_tensors(directory, _WEIGHTS, _SECTION)
        section = _SECTION if any(name.startswith(_SECTION) for name in stored) else ""
        num_blocks = count_key(raw, "medusa_num_layers", 1)
        num_heads = max(
            num_stored(stored, re.escape(section) + r"(\d+)\.", "Medusa"), count_key(raw, "medusa_num_heads", 1)
        )
        outputs = [f"{section}{i}.{num_blocks}.weight" for i in range(num_heads)]
        places = _blocks(section, num_heads, num_blocks, target.hidden_size)
        if any(name in stored for name in outputs):
            shape = (target.vocab_size, target.hidden_size)
            places |= {name: Place(f"{i}.output.weight", shape) for i, name in enumerate(outputs)}
        return PositionHeads(num_heads, num_blocks, placed(stored, places))
    except ModelError as cause:
        raise ModelError(f"{directory}: {cause}") from cause


def write_medusa(directory: Path, tensors: Mapping[str, Tensor], num_heads: int, num_blocks: int, target: str) -> None:
    """Write heads in the form of `medusa_lm_head.pt`; `target`: its directory or name. Raises: ModelError, SaveError."""
    raw = {"medusa_num_heads": num_heads, "medusa_num_layers": num_blocks, "base_model_name_or_path": target}
    write_checked(directory, raw, _WEIGHTS[-1], tensors)


def write_checked(directory: Path, raw: Raw, weights: str, tensors: Mapping[str, Tensor]) -> None:
    """As `write_files`. Raises: ModelError naming a tensor that is not finite, SaveError."""
    for name, tensor in tensors.items():
        check_tensor(name, tensor, tuple(tensor.shape))
    write_files(directory, raw, weights, tensors)


def count_key(raw: Raw, key: str, absent: int) -> int:
    """A key that counts heads or layers. Raises: ModelError naming the key."""
    count = integer(raw, key, absent)
    if not 1 <= count <= MOST:
        raise ModelError(f"config.json has {key} {count}, not 1 to {MOST}")
    return count


def num_stored(names: Collection[str], pattern: str, family: str) -> int:
    """The number of heads whose tensors are stored, from the greatest index. Raises: ModelError."""
    found = {int(match[1]): name for name in names if (match := re.match(pattern, name)) and len(match[1]) < 10}
    if not found:
        raise ModelError(f"no {family} head: no head has tensors named as {', '.join(sorted(names)[:3])}")
    if max(found) >= MOST:
        raise ModelError(f"the head has {found[max(found)]}; at most {MOST} heads are served")
    return max(found) + 1


def placed(stored: Mapping[str, Tensor], places: Mapping[str, Place]) -> dict[str, Tensor]:
    """The tensors under the networks' names.

    Raises: ModelError naming the first tensor that is missing, unknown, of another shape or kind, or not finite.
    """
    for name, place in places.items():
        if place.name and name not in stored:
            raise ModelError(f"the head lacks {name}, which its config or its other tensors ask for")
    for name, tensor in stored.items():
        if name not in places:
            raise ModelError(f"the head has {name}, which a head of its config has not")
        check_tensor(name, tensor, places[name].shape)
    return {place.name: stored[name].detach() for name, place in places.items() if place.name}


def _blocks(section: str, num_heads: int, num_blocks: int, width: int) -> dict[str, Place]:
    """The residual blocks of all heads by their published names."""
    return {
        f"{section}{i}.{j}.linear.{part}": Place(f"{i}.blocks.{j}.{part}", shape)
        for i in range(num_heads)
        for j in range(num_blocks)
        for part, shape in (("weight", (width, width)), ("bias", (width,)))
    }

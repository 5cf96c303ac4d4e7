"""Medusa heads made on the spot: random weights in every published form, and the papers' formula in float64.

Names and sizes are written out from the published tables, not taken from the code under test.

    >>> tensors = medusa_tensors(num_heads=5, hidden=64, vocab=320)
    >>> save_medusa(folder, tensors, "merged")
    >>> logits = medusa_logits(tensors, states, head=2)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_target import Free
from torch import Tensor

from ragspec.drafting.growing.shapes import MEDUSA_TREE, make_shape
from ragspec.drafting.medusa.checkpoint import read_medusa
from ragspec.drafting.medusa.drafter import MedusaDrafter
from ragspec.drafting.medusa.network import MedusaNetwork
from ragspec.engine.target import Target

FORMS = ("pt", "safetensors", "merged", "merged in shards")
Tensors = dict[str, Tensor]


def medusa_tensors(
    num_heads: int = 5, num_layers: int = 1, hidden: int = 64, vocab: int = 320, with_output: bool = True, seed: int = 0
) -> Tensors:
    """Blocks of one head share their weights, as the published code builds them. Without output layers: the legacy form."""
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for i in range(num_heads):
        weight = torch.randn(hidden, hidden, generator=generator) / hidden**0.5
        bias = 0.3 * torch.randn(hidden, generator=generator)
        for j in range(num_layers):
            tensors[f"{i}.{j}.linear.weight"], tensors[f"{i}.{j}.linear.bias"] = weight.clone(), bias.clone()
        if with_output:
            tensors[f"{i}.{num_layers}.weight"] = 0.3 * torch.randn(vocab, hidden, generator=generator)
    return tensors


def save_medusa(folder: Path, tensors: Mapping[str, Tensor], form: str = "pt", **config: Any) -> Path:
    """A directory in one of FORMS. Its config claims two heads, as published ones do, unless `config` says otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3", **config}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))
    if form == "pt":
        torch.save(dict(tensors), folder / "medusa_lm_head.pt")
        return folder
    if form == "safetensors":
        save_file(dict(tensors), folder / "medusa_lm_head.safetensors")
        return folder
    ours = {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
    theirs = {"model.norm.weight": torch.ones(8), "lm_head.weight": torch.full((4, 8), torch.nan)}
    if form == "merged":
        save_file({**theirs, **ours}, folder / "model.safetensors")
        return folder
    shards = {"model-00001-of-00003.safetensors": theirs}
    half = len(ours) // 2
    for number, names in ((2, list(ours)[:half]), (3, list(ours)[half:])):
        shards[f"model-0000{number}-of-00003.safetensors"] = {name: ours[name] for name in names}
    for file, stored in shards.items():
        save_file(stored, folder / file)
    index = {name: file for file, stored in shards.items() for name in stored}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def medusa_logits(tensors: Mapping[str, Tensor], states: Tensor, head: int, lm_head: Tensor | None = None) -> Tensor:
    """z <- z + silu(W z + b) for each block, then U z, in float64. `lm_head`: of the target, for the legacy form."""
    z, layer = states.double(), 0
    while f"{head}.{layer}.linear.weight" in tensors:
        y = z @ tensors[f"{head}.{layer}.linear.weight"].double().T + tensors[f"{head}.{layer}.linear.bias"].double()
        z, layer = z + y / (1 + torch.exp(-y)), layer + 1
    output = tensors[f"{head}.{layer}.weight"] if lm_head is None else lm_head
    return z @ output.double().T


def medusa_drafter(
    target: Target, folder: Path, tensors: Tensors | None = None, tree: str = "dynamic", **options: Any
) -> MedusaDrafter:
    """Random heads of the legacy form unless `tensors` are given; they cost nothing, however long they take here."""
    tensors = medusa_tensors(with_output=False) if tensors is None else tensors
    heads = read_medusa(save_medusa(folder, tensors), target)
    shape = make_shape(tree, 3, 2, 4, MEDUSA_TREE)
    return MedusaDrafter(MedusaNetwork(heads, target), shape, Free(1e-9), **options)

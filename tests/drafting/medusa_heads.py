"""Medusa and Hydra heads made on the spot: random weights in every published form, and the papers' formulas in float64.

Names and sizes are written out from the published tables, not taken from the code under test.

    >>> tensors = medusa_tensors(num_heads=5, hidden=64, vocab=320)
    >>> save_medusa(folder, tensors, "merged")
    >>> logits = medusa_logits(tensors, states, head=2)
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_target import Free
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from ragspec.drafting.growing.draft import MEDUSA_TREE, make_shape
from ragspec.drafting.medusa.checkpoint import read_hydra, read_medusa
from ragspec.drafting.medusa.drafter import HydraDrafter, MedusaDrafter, PrefixHydraDrafter
from ragspec.drafting.medusa.network import PositionNetwork, PrefixNetwork
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
    raw = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3", **config}
    _save_config(folder, raw)
    if form in ("pt", "safetensors"):
        _save_heads(folder / f"medusa_lm_head.{form}", tensors)
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


def hydra_tensors(
    num_heads: int = 4,
    num_layers: int = 2,
    grounded: bool = True,
    hidden: int = 64,
    vocab: int = 320,
    dropout: bool = False,
    seed: int = 0,
) -> Tensors:
    """Heads of the architecture "mlp". `dropout`: they were trained with it, which shifts the indices."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / (shape[-1] ** 0.5 if len(shape) > 1 else 3)

    tensors: Tensors = {}
    for i in range(num_heads):
        wide = (i + 2) * hidden if grounded else hidden
        again = random(hidden, hidden), random(hidden)
        for j in range(num_layers):
            name = f"hydra_mlp.{i}.{2 * j + 1 if dropout else j}"
            weight, bias = again if j else (random(hidden, wide), random(hidden))
            tensors[f"{name}.linear.weight"], tensors[f"{name}.linear.bias"] = weight.clone(), bias.clone()
            if grounded and not j:
                tensors[f"{name}.res_connection.weight"] = random(hidden, wide)
                tensors[f"{name}.res_connection.bias"] = random(hidden)
        output = f"hydra_lm_head.{i}.1" if dropout else f"hydra_lm_head.{i}"
        tensors[f"{output}.weight"], tensors[f"{output}.bias"] = 3 * random(vocab, hidden), random(vocab)
    return tensors


PREFIX = "prefix_embeding_layer."


def prefix_model(target: Target) -> LlamaModel:
    """Hydra++'s prefix: a whole Llama of one layer with the target's sizes and random weights."""
    config = target.text_config
    sizes = {
        name: getattr(config, name) for name in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")
    }
    sizes |= {name: getattr(config, name) for name in ("num_key_value_heads", "rms_norm_eps", "vocab_size")}
    torch.manual_seed(4)
    model = LlamaModel(LlamaConfig(**sizes, num_hidden_layers=1, rope_parameters=config.rope_parameters))
    for name, weight in model.named_parameters():
        nn.init.normal_(weight, float("norm" in name), 0.15)
    return model.eval()


def hydra_plus_tensors(target: Target, num_layers: int = 4) -> Tensors:
    """The architecture "prefix-mlp", with what older files hold beside it."""
    prefix = {PREFIX + name: tensor.detach().clone() for name, tensor in prefix_model(target).state_dict().items()}
    prefix[f"{PREFIX}layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    return hydra_tensors(4, num_layers, dropout=True, hidden=target.hidden_size, vocab=target.vocab_size) | prefix


def save_hydra(folder: Path, tensors: Mapping[str, Tensor], form: str = "pt", **config: Any) -> Path:
    """A published directory, "pt" or "safetensors". The config has what the tensors show unless `config` says otherwise."""
    heads = {name.split(".")[1] for name in tensors if name.startswith("hydra_lm_head.")}
    layers = [name for name in tensors if name.startswith("hydra_mlp.0.") and name.endswith(".linear.weight")]
    raw = {"hydra_num_heads": len(heads), "hydra_num_layers": len(layers), "hydra_head_arch": "mlp"}
    raw |= {"grounded_heads": any("res_connection" in name for name in tensors), "hidden_state_offset": 0, **config}
    _save_config(folder, raw)
    _save_heads(folder / f"hydra_lm_head.{form}", tensors)
    return folder


def _save_config(folder: Path, raw: Mapping[str, Any]) -> None:
    """Keys with the value `...` are absent."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))


def _save_heads(path: Path, tensors: Mapping[str, Tensor]) -> None:
    if path.suffix == ".pt":
        torch.save(dict(tensors), path)
    else:
        save_file(dict(tensors), path)


def hydra_logits(tensors: Mapping[str, Tensor], states: Tensor, embedded: Tensor, head: int) -> Tensor:
    """x = [state, embeddings of the next token and of the guessed ones]; z = R x + silu(W x); further blocks; U z + c; float64.

    Without `res_connection` the head is not grounded: x is the state. Shapes: embedded [N, head + 1, H].
    """

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ tensors[f"{name}.weight"].double().T + tensors[f"{name}.bias"].double()

    shift = int("hydra_lm_head.0.1.weight" in tensors)
    first = f"hydra_mlp.{head}.{shift}"
    grounded = f"{first}.res_connection.weight" in tensors
    x = torch.cat([states, embedded.flatten(1)], 1).double() if grounded else states.double()
    y = linear(f"{first}.linear", x)
    z = (linear(f"{first}.res_connection", x) if grounded else x) + y * torch.sigmoid(y)
    at = 3 if shift else 1
    while f"hydra_mlp.{head}.{at}.linear.weight" in tensors:
        y = linear(f"hydra_mlp.{head}.{at}.linear", z)
        z, at = z + y * torch.sigmoid(y), at + 1 + shift
    return linear(f"hydra_lm_head.{head}" + (".1" if shift else ""), z)


def position_drafter(
    target: Target, folder: Path, family: str = "medusa", tree: str = "dynamic", tensors: Tensors | None = None
) -> MedusaDrafter | PrefixHydraDrafter:
    """Random heads unless `tensors` are given, of Medusa in the legacy form; they cost nothing, however long they take here."""
    shape, costs = make_shape(tree, 3, 2, 4, MEDUSA_TREE), Free(1e-9)
    if family == "medusa":
        tensors = medusa_tensors(with_output=False) if tensors is None else tensors
        return MedusaDrafter(PositionNetwork(read_medusa(save_medusa(folder, tensors), target), target), shape, costs)
    if family == "hydra++":
        save_hydra(folder, hydra_plus_tensors(target), hydra_head_arch="prefix-mlp")
        return PrefixHydraDrafter(PrefixNetwork(read_hydra(folder, target), target, 300), shape, costs)
    tensors = hydra_tensors(grounded=family == "hydra") if tensors is None else tensors
    return HydraDrafter(PositionNetwork(read_hydra(save_hydra(folder, tensors), target), target), shape, costs)

"""One directory for each published form of a head: each loads as it was made, or is refused by a tensor's or a key's name.

Forms and their sources: EAGLE, HASS, PosS, Medusa and Hydra repositories, speculators, SpecForge, ModelOpt, vLLM.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from drafting.eagle_heads import LLAMA3, change_config, change_tensors, random_head, same
from drafting.medusa_heads import Tensors
from safetensors.torch import load_file

from ragspec.drafting.eagle.checkpoint import read_head, write_head
from ragspec.errors import ModelError

AUX_KEY = "eagle_aux_hidden_state_layer_ids"
NAN = torch.full((3,), torch.nan)
NO_KEYS = dict.fromkeys(("layer_types", "sliding_window", "rope_scaling", "qkv_bias", "attention_bias"), ...)
FLAGS = ("norm_output", "norm_before_fc", "norm_before_residual", "fc_norm", "bias", "target_hidden_size")
OFFICIAL = NO_KEYS | dict.fromkeys((*FLAGS, "head_dim", "position_per_layer"), ...)
SPECFORGE = {"architectures": ["LlamaForCausalLMEagle3"]}
MODELOPT = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": None,
}

MAY_BE_ABSENT = ("rope_theta", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings")


class Form(NamedTuple):
    """How a directory is made, and the refusal that is expected. `changes`: of config.json, `...` takes a key out."""

    head: dict[str, Any]
    changes: Mapping[str, Any] = MappingProxyType({})
    tensors: Callable[[Tensors], object] = lambda tensors: None
    refused: str = ""
    dialect: str = "official"
    is_bin: bool = False
    positions_per_layer: int | None = None


def renamed(old: str, new: str) -> Callable[[Tensors], object]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[new + name.removeprefix(old)] = tensors.pop(name)

    return change


def added(*names: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: torch.ones(32) for name in names})


def only(*names: str) -> Callable[[Tensors], object]:
    def change(tensors: Tensors) -> None:
        tensors.clear()
        added(*names)(tensors)

    return change


EAGLE: dict[str, Any] = {"family": "eagle", "fc_bias": True, "num_kv_heads": 4}
LLAMA_3: dict[str, Any] = {"family": "eagle", "rope_theta": 500000.0, "own_embedding": True, "dtype": torch.bfloat16}
QWEN2: dict[str, Any] = EAGLE | {"qkv_bias": True, "rope_theta": 1e6, "dtype": torch.bfloat16}
POSS: dict[str, Any] = EAGLE | {"num_layers": 4, "positions_per_layer": 2, "own_embedding": True}
TAPPED: dict[str, Any] = {"family": "eagle3", "aux_layers": (2, 4, 6)}
SPECULATORS: dict[str, Any] = TAPPED | {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
SHAPE = "hidden_size intermediate_size num_attention_heads num_key_value_heads vocab_size rms_norm_eps rope_theta"
NESTED = dict.fromkeys((*SHAPE.split(), "head_dim", "num_hidden_layers", "hidden_act", "bias"), ...) | NO_KEYS

FORMS: dict[str, Form] = {
    "EAGLE Vicuna": Form(EAGLE, OFFICIAL | {"num_key_value_heads": ..., "rope_theta": ...}, is_bin=True),
    "EAGLE LLaMA-2, older": Form(EAGLE, OFFICIAL, added("layers.0.self_attn.rotary_emb.inv_freq"), is_bin=True),
    "EAGLE LLaMA-3": Form(LLAMA_3, OFFICIAL | {"bias": False}),
    "EAGLE LLaMA-3 without a word of the bias": Form(LLAMA_3, OFFICIAL),
    "EAGLE LLaMA-3 with a bias that is not there": Form(LLAMA_3, {"bias": True}, refused=r"fc\.bias"),
    "EAGLE Qwen2": Form(QWEN2, OFFICIAL | {"qkv_bias": True}),
    "EAGLE Qwen2 without a word of its biases": Form(QWEN2, OFFICIAL | {"use_sliding_window": False, "sliding_window": 9}),
    "EAGLE Qwen2 that lacks a bias": Form(
        QWEN2, OFFICIAL, lambda t: t.pop("layers.0.self_attn.k_proj.bias"), refused=r"layers\.0\.self_attn\.k_proj\.bias"
    ),
    "EAGLE with a bias that its config denies": Form(EAGLE, {"bias": False}, refused=r"fc\.bias"),
    "EAGLE without keys that may be absent": Form(EAGLE | {"rms_norm_eps": 1e-6}, OFFICIAL | dict.fromkeys(MAY_BE_ABSENT, ...)),
    "EAGLE with transformers' rope_parameters": Form(
        EAGLE | {"rope_theta": 5e5}, {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 500000}}
    ),
    "EAGLE Mixtral": Form(EAGLE, OFFICIAL | {"num_local_experts": 8, "sliding_window": None, "output_router_logits": False}),
    "HASS LLaMA-2": Form(EAGLE | {"own_embedding": True}, OFFICIAL, is_bin=True),
    "vLLM's EAGLE": Form(EAGLE | {"own_lm_head": True}, OFFICIAL | {"eagle_fc_bias": True, "architectures": ["EAGLEModel"]}),
    "vLLM's early EAGLE": Form(EAGLE, NESTED | {"model_type": "eagle", "eagle_fc_bias": True}),
    "vLLM's early EAGLE, names": Form(
        EAGLE | {"own_embedding": True}, NESTED | {"model_type": "eagle", "truncated_vocab_size": 64}, renamed("", "model.")
    ),
    "vLLM's early EAGLE, names of the layer": Form(
        EAGLE, NESTED | {"model_type": "eagle", "eagle_fc_bias": True}, renamed("layers.", "model.layers.")
    ),
    "vLLM's early EAGLE, fewer tokens": Form(
        EAGLE, NESTED | {"model_type": "eagle", "truncated_vocab_size": 40}, refused="truncated_vocab_size"
    ),
    "vLLM's early EAGLE, map of tokens": Form(
        EAGLE, NESTED | {"model_type": "eagle"}, added("token_map"), refused="token_map"
    ),
    "two layers": Form({**LLAMA_3, "num_layers": 2}, OFFICIAL | {"bias": False}),
    "two layers, one in the config": Form({**LLAMA_3, "num_layers": 2}, {"num_hidden_layers": 1, "layer_types": ...},
                                          refused=r"layers\.1\."),
    "PosS": Form(POSS, OFFICIAL, refused=r"layers\.3.*positions_per_layer"),
    "PosS-2": Form(POSS, OFFICIAL, positions_per_layer=2, is_bin=True),
    "PosS-2, in its config": Form(POSS, OFFICIAL | {"position_per_layer": 2}),
    "PosS without a layer": Form(
        POSS, OFFICIAL, only("fc.weight", "layers.0.mlp.up_proj.weight", "layers.2.mlp.up_proj.weight"),
        positions_per_layer=2, refused=r"lacks|is \["
    ),
    "EAGLE of wide heads": Form(EAGLE | {"head_dim": 16, "rope_theta": 500000.0}),
    "EAGLE of two layers with a window": Form({"family": "eagle", "num_layers": 2, "qk_norm": True, "window": 512}),
    "EAGLE-3": Form({"family": "eagle3"}, OFFICIAL | {"rope_theta": ...}),
    "EAGLE-3 without its norm": Form({"family": "eagle3"}, {"norm_before_fc": True}, refused=r"input_norm\.weight"),
    "EAGLE-3 without its norms": Form({"family": "eagle3"}, {"fc_norm": True}, refused=r"fc_norm\.0\.weight"),
    "EAGLE-3 with two kinds of norms": Form(
        {"family": "eagle3"}, {"norm_before_fc": True, "fc_norm": True}, refused="both norm_before_fc and fc_norm"
    ),
    "EAGLE-3 with a norm of another size": Form(
        {"family": "eagle3", "norm_before_fc": "taps"}, {}, lambda t: t.update({"fc_norm.1.weight": torch.ones(16)}),
        r"fc_norm\.1\.weight"
    ),
    "EAGLE-3 with a norm that its config denies": Form(
        {"family": "eagle3", "norm_before_fc": True}, {"norm_before_fc": False}, refused=r"input_norm\.weight"
    ),
    "EAGLE-3 with biases": Form(TAPPED | {"qkv_bias": True, "output_bias": True, "max_positions": 512, "dtype": torch.bfloat16}),
    "EAGLE-3 with every flag": Form(SPECULATORS | {"qk_norm": True, "num_layers": 2, "rope": LLAMA3, "window": 2048}),
    "EAGLE-3 that drafts all tokens": Form({"family": "eagle3", "draft_vocab": 64}, OFFICIAL | {"draft_vocab_size": ...}),
    "EAGLE-3 of another width": Form(
        {"family": "eagle3", "target_hidden_size": 48, "own_embedding": True}, OFFICIAL | {"target_hidden_size": 48}
    ),
    "EAGLE-3 of another width without an embedding": Form(
        {"family": "eagle3", "target_hidden_size": 48}, {}, lambda t: t.pop("embed_tokens.weight"), r"embed_tokens\.weight"
    ),
    "speculators": Form({"family": "eagle3"}, dialect="speculators"),
    "speculators, as trained today": Form(SPECULATORS | {"window": 2048, "rope": LLAMA3}, dialect="speculators"),
    "speculators, leftovers": Form(
        SPECULATORS, {}, lambda t: t.update({"verifier_lm_head.weight": NAN, "verifier_norm.weight": NAN.clone()}),
        dialect="speculators",
    ),
    "SpecForge": Form({"family": "eagle3"}, OFFICIAL | SPECFORGE),
    "SpecForge, ids out of order": Form(
        TAPPED, SPECFORGE | {"norm_output": ..., AUX_KEY: ..., "eagle_config": {AUX_KEY: [5, 1, 3]}}
    ),
    "SpecForge, norm_output and fc_norm": Form(
        TAPPED | {"norm_before_fc": "taps", "norm_output": True}, SPECFORGE
    ),
    "SpecForge, YaRN, truncated_vocab_size": Form(
        TAPPED | {"rope": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0}},
        SPECFORGE | {"truncated_vocab_size": 40, "draft_vocab_size": ..., "norm_output": ...},
    ),
    "SpecForge, linear": Form(
        TAPPED | {"rope": {"rope_type": "linear", "factor": 2.0}}, {"rope_scaling": {"type": "linear", "factor": 2.0}}
    ),
    "SpecForge, several layers that read tokens": Form(
        TAPPED | {"num_layers": 2}, SPECFORGE | {"norm_output": ...}, added("layers.1.hidden_norm.weight"),
        r"layers\.1\.hidden_norm\.weight"
    ),
    "ModelOpt": Form(TAPPED, SPECFORGE | {"norm_output": ..., AUX_KEY: ..., "eagle_config": MODELOPT | {AUX_KEY: [1, 3, 5]}}),
    "ModelOpt, MTP norms": Form(TAPPED, {"eagle_config": MODELOPT | {"use_mtp_layernorm": True}}, refused="use_mtp_layernorm"),
    "ModelOpt, no last norm": Form(TAPPED, {"eagle_config": {"use_last_layernorm": False}}, refused="use_last_layernorm"),
    "ModelOpt, drafts side by side": Form(TAPPED, {"eagle_config": {"parallel_draft_step": 4}}, refused="parallel_draft_step"),
    "ModelOpt, a flag to come": Form(TAPPED, {"eagle_config": {"use_new_flag": True}}, refused="use_new_flag"),
    "EAGLE-3 with latent attention": Form(
        TAPPED, {}, added("midlayer.self_attn.kv_a_proj_with_mqa.weight"), r"kv_a_proj_with_mqa"
    ),
    "EAGLE with a further norm": Form(EAGLE, {}, added("layers.0.input_layernorm.weight"), r"layers\.0\.input_layernorm"),
    "EAGLE with a further bias": Form(EAGLE, {}, added("layers.0.mlp.up_proj.bias"), r"layers\.0\.mlp\.up_proj\.bias"),
    "GliDe": Form(EAGLE, {}, only("layers.0.cross_attn.q_proj.weight"), r"GliDe.*layers\.0\.cross_attn"),
    "Hydra, cross-attn": Form(EAGLE, {}, only("cross_attn.q_proj.weight"), r"Hydra.*cross_attn.*drafting\.hydra\.path"),
    "Hydra": Form(EAGLE, {}, only("hydra_mlp.0.1.res_connection.weight", "prefix_embeding_layer.norm.weight"), "Hydra"),
    "Medusa": Form(EAGLE, {}, only("0.0.linear.weight", "0.0.linear.bias", "0.1.weight"), r"Medusa head \(0\.0\.linear\.bias\)"),
    "Medusa, named": Form(EAGLE, {}, only("medusa_head.0.0.linear.weight"), r"drafting\.medusa\.path"),
    "no tensors": Form(EAGLE, {}, only(), "no EAGLE head"),
    "MTP": Form(EAGLE, OFFICIAL, added("enorm.weight", "hnorm.weight"), r"enorm\.weight"),
    "a language model": Form(EAGLE, OFFICIAL, only("model.layers.0.mlp.up_proj.weight"), "none of its tensors"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_an_eagle_form_is_read_as_it_was_made_or_refused_by_name(name: str, tmp_path: Path) -> None:
    """Read in another sense a head loads, and only shows as low acceptance; a field that is not written becomes its default."""
    form = FORMS[name]
    made = random_head(folder=tmp_path, dialect=form.dialect, **form.head)
    changes = dict(form.changes)
    if changes.get("model_type") == "eagle":
        raw = json.loads((tmp_path / "config.json").read_text())
        changes["model"] = {key: raw[key] for key in (*SHAPE.split(), "hidden_act", "head_dim")}
    change_config(tmp_path, **changes)
    change_tensors(tmp_path, form.tensors)
    if form.is_bin:
        torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
    if form.refused:
        with pytest.raises(ModelError, match=form.refused):
            read_head(tmp_path, form.positions_per_layer)
        return
    read = read_head(tmp_path, form.positions_per_layer)
    assert read.config == made.config
    assert same(read, made)
    write_head(tmp_path / "new" / "head", made)
    assert same(read_head(tmp_path / "new" / "head"), made)
    assert sorted(path.name for path in (tmp_path / "new" / "head").iterdir()) == ["config.json", "model.safetensors"]

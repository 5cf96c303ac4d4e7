"""One directory for each published dialect of EAGLE-3.

Each head is read as its trainer means it, or refused by the name of a key or a tensor. Configs have the keys of the public
files, scaled down. The readings are written from the code of trainers and servers: EAGLE, SpecForge, speculators, ModelOpt,
DeepSpec, AngelSlim, TorchSpec, NeMo, SGLang, vLLM and TensorRT-LLM.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ragspec.drafting.eagle.checkpoint import read_head, write_head
from ragspec.drafting.eagle.network import rotations_of, taps_of
from ragspec.drafting.heads.layer import FINAL
from ragspec.errors import ModelError

H, I, V, VD, NUM_LAYERS = 64, 112, 256, 160, 12  # noqa: E741
AUX_KEY = "eagle_aux_hidden_state_layer_ids"
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
MODELOPT = {
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "next_layer_regular": True, "use_mtp_layernorm": False, "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1,
}  # fmt: skip
DFLASH = {"block_size": 16, "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 3, 5, 7, 10]}}


def conf(**changes: Any) -> dict[str, Any]:
    """A flat config; `...` takes a key out."""
    flat = {
        "architectures": ["LlamaForCausalLMEagle3"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
        "draft_vocab_size": VD, "eos_token_id": [2, 3], "head_dim": 16, "hidden_act": "silu", "hidden_size": H,
        "initializer_range": 0.02, "intermediate_size": I, "max_position_embeddings": 2048, "max_window_layers": 48,
        "model_type": "llama", "num_attention_heads": 4, "num_hidden_layers": 1, "num_key_value_heads": 2, "pad_token_id": 0,
        "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1e6, "sliding_window": None, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.53.2", "use_cache": True, "use_sliding_window": False,
        "vocab_size": V,
    }  # fmt: skip
    return {key: value for key, value in (flat | changes).items() if value is not ...}


def spec(layer: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A config of speculators. `layer`: keys of the layer's section."""
    rope = {"rope_scaling": ..., "rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    section = conf(architectures=["LlamaForCausalLM"], draft_vocab_size=..., **(rope | (layer or {})))
    top = {
        "architectures": ["Eagle3Speculator"], "draft_vocab_size": VD, "dtype": "bfloat16", "embed_requires_grad": False,
        "has_no_defaults_at_init": False, "norm_before_residual": True, "speculators_config": {"algorithm": "eagle3"},
        "speculators_model_type": "eagle3", "speculators_version": "0.4.0", "target_hidden_size": None, AUX_KEY: [2, 6, 9],
        "transformer_layer_config": section,
    }  # fmt: skip
    return {key: value for key, value in (top | changes).items() if value is not ...}


def tensors(
    taps: int = 3, layers: int = 1, vd: int = VD, hd: int = 16, norm: str = "", *, qk: bool = False, embed: bool = False,
    bias: bool = False, t2d: bool = True, lm: bool = True, fc: bool = True, prefix: str = "layers.0.",
) -> dict[str, Tensor]:  # fmt: skip
    made = {"norm.weight": (H,), "layers.0.hidden_norm.weight": (H,)}
    made |= {"fc.weight": (H, taps * H)} if fc else {}
    made |= {"lm_head.weight": (vd, H)} if lm else {}
    made |= {"embed_tokens.weight": (V, H)} if embed else {}
    made |= {"input_norm.weight": (taps * H,)} if norm == "all" else {}
    made |= {f"fc_norm.{i}.weight": (H,) for i in range(taps)} if norm == "each" else {}
    for i in range(layers):
        width, at = H if i else 2 * H, f"layers.{i}."
        made |= {f"{at}self_attn.{n}_proj.weight": (size * hd, width) for n, size in (("q", 4), ("k", 2), ("v", 2))}
        made |= {f"{at}self_attn.o_proj.weight": (H, 4 * hd), f"{at}mlp.down_proj.weight": (H, I)}
        made |= {f"{at}mlp.{n}_proj.weight": (I, H) for n in ("gate", "up")}
        made |= {f"{at}{n}_layernorm.weight": (H,) for n in ("input", "post_attention")}
        made |= {f"{at}self_attn.{n}_norm.weight": (hd,) for n in "qk"} if qk else {}
        sizes = (("q", 4 * hd), ("k", 2 * hd), ("v", 2 * hd), ("o", H))
        made |= {f"{at}self_attn.{n}_proj.bias": (size,) for n, size in sizes} if bias else {}
    generator = torch.Generator().manual_seed(0)
    stored = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in made.items()}
    if vd < V:
        stored["d2t"] = torch.arange(vd) // 2
        stored["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill_(0, torch.arange(vd) + stored["d2t"], True)
    if not t2d:
        del stored["t2d"]
    return {prefix + n.removeprefix("layers.0.") if n.startswith("layers.0.") else n: t for n, t in stored.items()}


def mid(**options: Any) -> dict[str, Tensor]:
    return tensors(prefix="midlayer.", **options)


def plain(theta: float, head_dim: int = 16) -> list[float]:
    return [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]


def llama3(theta: float) -> list[float]:
    """The formula of Llama 3.1 with `LLAMA3`."""
    shares = [min(1.0, max(0.0, (64 * rate / (2 * math.pi) - 1) / (4 - 1))) for rate in plain(theta)]
    return [rate * (share + (1 - share) / 8) for rate, share in zip(plain(theta), shares, strict=True)]


def yarn(theta: float, head_dim: int, *, truncates: bool) -> list[float]:
    """The formula of YaRN's paper with `YARN`. `truncates`: both limits of the ramp are rounded to whole planes."""
    first, last = (head_dim * math.log(64 / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (32, 1))
    if truncates:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    shares = [1 - min(1.0, max(0.0, (i - first) / (last - first))) for i in range(head_dim // 2)]
    return [rate * (share + (1 - share) / 32) for rate, share in zip(plain(theta, head_dim), shares, strict=True)]


class Reading(NamedTuple):
    """`taps`: boundaries behind a layer. `feed`: the normed state is fed back. `frequencies`: turns a position of each plane."""

    taps: tuple[int, ...] = (2, 6, 9)
    norm: str = ""
    feed: bool = False
    norm_before_residual: bool = False
    layers: int = 1
    qk: bool = False
    bias: bool = False
    window: int = 0
    vocabulary: int = VD
    frequencies: tuple[float, ...] = tuple(plain(1e6))
    scale: float = 1.0
    own_output: bool = True


class Dialect(NamedTuple):
    """`right`: the reading, or a pattern of the refusal. `option`: `norm_output` of the configuration."""

    config: dict[str, Any]
    stored: dict[str, Tensor]
    right: Reading | str
    option: bool | None = None


SPEC, BOTH = Reading(norm_before_residual=True), "norm_output (true|false): SpecForge before .* since then"
OFFICIAL = {
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu",
    "hidden_size": H,
    "initializer_range": 0.02, "intermediate_size": I, "max_position_embeddings": 2048, "model_type": "llama",
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "pad_token_id": 0, "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.28.1", "use_cache": True, "vocab_size": V,
    "draft_vocab_size": VD,
}  # fmt: skip
DEEPSPEC = {
    "architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "layer_types": ["full_attention"], "draft_vocab_size": ...,
    "num_target_layers": NUM_LAYERS, "ttt_length": 7, "step_loss_decay": 0.8, "draft_num_hidden_layers": 1,
}  # fmt: skip
HUNYUAN = {
    "architectures": ["Eagle3LlamaForCausalLM"], "add_classification_head": False, "attention_head_dim": 16,
    "cla_share_factor": 2, "class_num": 0, "dense_list": [64, 0], "eod_token_id": 7, "im_end_id": 5, "im_newline_id": 11,
    "im_start_id": 4,
    "mask_init_id": 12, "mlp_bias": False, "norm_type": "rms", "org_vocab_size": V, "pad_id": 1, "pool_type": "last",
    "pretraining_tp": 1, "sep_token_id": 2, "text_end_id": 7, "text_start_id": 6, "use_cla": False, "use_qk_norm": True,
    "use_rotary_pos_emb": True,
}  # fmt: skip
FOUR = {AUX_KEY: [2, 6, 9, 11], "norm_before_fc": True, "norm_output": True}
ALL_NORMED = SPEC._replace(norm="all", feed=True)
SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention"], "use_sliding_window": True}
NESTED = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
}
HUNYUAN_ROPE = {
    "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "dynamic",
}  # fmt: skip
EACH: dict[str, Any] = {"fc_norm": True, "norm_output": True}


def ids(*layers: int, **flags: Any) -> dict[str, Any]:
    return {"eagle_config": {AUX_KEY: list(layers), **flags}}


def quantised(dtype: torch.dtype, **scales: Tensor) -> dict[str, Tensor]:
    made = tensors()
    for name, scale in scales.items():
        at = f"layers.0.mlp.{name}_proj.weight"
        made |= {at: made[at].clamp(-1, 1).to(dtype), at + "_scale": scale}
    return made


def deep() -> dict[str, Tensor]:
    return {name.replace("layers.", "midlayer.", 1): tensor for name, tensor in tensors(layers=2).items()}


def reversed_maps() -> dict[str, Tensor]:
    made, rows = mid(), torch.arange(VD)
    return made | {"d2t": (rows + made["d2t"]).flip(0) - rows, "lm_head.weight": made["lm_head.weight"].flip(0)}


DIALECTS: dict[str, Dialect] = {
    "EAGLE, LLaMA3.1": Dialect(OFFICIAL, mid(), Reading(frequencies=tuple(plain(1e4)))),
    "SpecForge, Qwen3": Dialect(conf(), mid(), Reading()),
    "SpecForge, gpt-oss dense": Dialect(
        conf(model_type="gpt_oss", num_local_experts=16, experts_per_token=4, rope_theta=..., **ids(1, 5, 8)), mid(),
        Reading(frequencies=tuple(plain(1e4))),
    ),
    "SpecForge, gpt-oss experts": Dialect(
        conf(architectures=["GptOssForCausalLMEagle3"]), mid() | {"midlayer.mlp.router.weight": torch.ones(16, H)}, "mlp.router"
    ),
    "SpecForge, Kimi K2": Dialect(conf(model_type="kimi_k2", **ids(2, 6, 9, use_aux_hidden_state=True)), mid(), Reading()),
    "SpecForge, Gemma 3": Dialect(
        conf(sliding_window=512, draft_vocab_size=V, target_model_type="gemma3_text", additional_fc=False,
             reuse_target_lm_head=True, **ids(1, 5, 8)),
        mid(vd=V), Reading(vocabulary=V),
    ),
    "SpecForge, Gemma 4": Dialect(conf(target_model_type="gemma4_text", **ids(5, 7, 11)), mid(), Reading(taps=(5, 7, 11))),
    "SpecForge, Qwen3 of experts": Dialect(
        conf(architectures=["Qwen3MoEForCausalLMEagle3"], decoder_sparse_step=1, mlp_only_layers=[], moe_intermediate_size=768,
             norm_topk_prob=True, num_experts=8, num_experts_per_tok=2, output_router_logits=False, router_aux_loss_coef=0.1),
        mid() | {"midlayer.mlp.experts.0.up_proj.weight": torch.ones(I, H)}, r"mlp\.experts\.0",
    ),
    "SpecForge, Phi-4 mini": Dialect(conf(model_type="phi3", tie_word_embeddings=True, head_dim=...), mid(), Reading()),
    "SpecForge, Qwen3-VL": Dialect(
        conf(torch_dtype=..., dtype="bfloat16", target_model_type="qwen3_vl_moe", pretraining_tp=1,
             rope_scaling={"mrope_interleaved": True, "mrope_section": [2, 3, 3]}),
        mid(), Reading(),
    ),
    "SpecForge, Qwen2.5-VL": Dialect(
        conf(sliding_window=32768, rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]}), mid(), Reading()
    ),
    "SpecForge, LLaMA3 70B": Dialect(conf(rope_theta=5e5, rope_scaling=LLAMA3), mid(), Reading(frequencies=tuple(llama3(5e5)))),
    "SpecForge, EAGLE-3.1": Dialect(conf(**EACH), mid(norm="each"), Reading(norm="each", feed=True)),
    "MiniMax-M3": Dialect(
        conf(target_hidden_size=H, draft_vocab_size=V, **EACH), tensors(norm="each", vd=V),
        Reading(norm="each", feed=True, vocabulary=V),
    ),
    "norm_output true": Dialect(conf(norm_output=True), mid(), BOTH),
    "norm_output true, read as since September 2026": Dialect(conf(norm_output=True), mid(), Reading(feed=True), option=True),
    "norm_output true, read as before": Dialect(conf(norm_output=True), mid(), Reading(), option=False),
    "norm_output false": Dialect(conf(norm_output=False), mid(), BOTH),
    "norm_output false, plain EAGLE-3": Dialect(conf(norm_output=False), mid(), Reading(), option=False),
    "NeMo Automodel": Dialect(
        conf(architectures=["LlamaEagle3DraftModel"], **EACH),
        {f"model.{name}": tensor for name, tensor in tensors(norm="each").items()}, Reading(norm="each", feed=True),
    ),
    "speculators, Qwen3-8B": Dialect(
        spec({"rope_parameters": ..., "rope_theta": 1e6, "rope_scaling": None}, **{AUX_KEY: ...}), tensors(), SPEC
    ),
    "speculators, gemma-4-31B": Dialect(spec({"head_dim": 32}), tensors(hd=32), SPEC._replace(frequencies=tuple(plain(1e6, 32)))),
    "speculators, four taps, norms and a window": Dialect(
        spec(SLIDING | {"sliding_window": 5}, **FOUR), tensors(taps=4, norm="all"),
        ALL_NORMED._replace(taps=(2, 6, 9, 11), window=5),
    ),
    "speculators, the final layer as a tap": Dialect(
        spec(**FOUR | {AUX_KEY: [2, 6, 9, 12]}), tensors(taps=4, norm="all"), ALL_NORMED._replace(taps=(2, 6, 9, 12))
    ),
    "speculators, fc_norm": Dialect(spec(**EACH), tensors(norm="each"), SPEC._replace(norm="each", feed=True)),
    "speculators, two layers of Qwen3": Dialect(
        spec({"model_type": "qwen3", "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "max_window_layers": 28}),
        tensors(layers=2, qk=True), SPEC._replace(layers=2, qk=True),
    ),
    "speculators, llama3": Dialect(
        spec({"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}), tensors(), SPEC._replace(frequencies=tuple(llama3(5e5)))
    ),
    "speculators, rotary sections of two kinds": Dialect(
        spec(SLIDING | {"rope_parameters": NESTED, "sliding_window": 64}), tensors(),
        SPEC._replace(frequencies=tuple(plain(5e5)), window=64),
    ),
    "speculators, half of the head rotates": Dialect(
        spec({"rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5}}), tensors(),
        "partial_rotary_factor 0.5 in rope_parameters",
    ),
    "half of the head rotates, at the top": Dialect(
        spec({"rope_parameters": ..., "rope_theta": 1e6, "partial_rotary_factor": 0.5}), tensors(), "partial_rotary_factor 0.5"
    ),
    "speculators, biases": Dialect(spec({"attention_bias": True}), tensors(bias=True), SPEC._replace(bias=True)),
    "speculators, all tokens": Dialect(spec(draft_vocab_size=V), tensors(vd=V), SPEC._replace(vocabulary=V)),
    "speculators, converted ids": Dialect(
        spec(norm_before_residual=False, **{AUX_KEY: [1, 5, 8]}), tensors(), Reading(taps=(1, 5, 8))
    ),
    "speculators, ids null": Dialect(spec(**{AUX_KEY: None}), tensors(), SPEC),
    "speculators, ids counted from the end": Dialect(spec(**{AUX_KEY: [2, -3, -1]}), tensors(), AUX_KEY),
    "speculators, ids without eagle": Dialect(
        spec(aux_hidden_state_layer_ids=[1, 4, 8], **{AUX_KEY: ...}), tensors(), SPEC._replace(taps=(1, 4, 8))
    ),
    "speculators, two lists of ids": Dialect(spec(aux_hidden_state_layer_ids=[1, 4, 8]), tensors(), "which mean the same"),
    "ids under a key to come": Dialect(spec(teacher_layer_ids=[1, 4, 8]), tensors(), "teacher_layer_ids"),
    "ModelOpt": Dialect(
        conf(sliding_window=..., use_sliding_window=..., mlp_bias=False, pretraining_tp=1, **ids(1, 5, 8, **MODELOPT)),
        tensors(t2d=False), Reading(),
    ),
    "ModelOpt, Megatron": Dialect(conf(**ids(1, 5, 8, **MODELOPT)), mid(t2d=False, embed=True), Reading()),
    "ModelOpt, Deep": Dialect(
        conf(architectures=["LlamaForCausalLMEagle3Deep"], num_hidden_layers=2, **ids(1, 5, 8, **MODELOPT)), deep(),
        Reading(layers=2),
    ),
    "gpt-oss-120b v3": Dialect(
        conf(**ids(8, 10, 12, norm_before_fc=True, **MODELOPT)), tensors(t2d=False, norm="all"),
        Reading(taps=(8, 10, 12), norm="all"),
    ),
    "gpt-oss short context": Dialect(
        conf(eagle_config=MODELOPT | {"use_aux_hidden_state": False, AUX_KEY: []}), tensors(t2d=False, fc=False),
        Reading(taps=(FINAL,)),
    ),
    "TensorRT-LLM, normed state": Dialect(
        conf(eagle_config=MODELOPT | {"return_hidden_post_norm": True}), tensors(), Reading(feed=True)
    ),
    "TensorRT-LLM, fc before the attention": Dialect(conf(eagle_config={"eh_proj_before_attn": True}), tensors(), "eh_proj"),
    "norm_output in eagle_config": Dialect(conf(eagle_config={"norm_output": True}), mid(), Reading(feed=True)),
    "ids of inputs in eagle_config": Dialect(conf(**ids(2, 6, 9)), mid(), Reading()),
    "ids of outputs in eagle_config": Dialect(conf(**ids(1, 5, 8)), mid(), Reading()),
    "DeepSpec": Dialect(
        conf(**DEEPSPEC, target_layer_ids=[1, 3, 5, 7, 10]), tensors(taps=5, vd=V, qk=True, embed=True),
        Reading(taps=(2, 4, 6, 8, 11), qk=True, vocabulary=V),
    ),
    "DeepSpec, three taps": Dialect(
        conf(**DEEPSPEC, target_layer_ids=[3, 6, 10]), tensors(vd=V, qk=True, embed=True),
        Reading(taps=(4, 7, 11), qk=True, vocabulary=V),
    ),
    "four taps without ids": Dialect(conf(num_aux_hidden_states=4), tensors(taps=4), "num_aux_hidden_states"),
    "rope_theta in rope_scaling": Dialect(
        conf(rope_theta=..., rope_scaling={"rope_type": "default", "rope_theta": 1e6}), mid(), Reading()
    ),
    "rope_theta in llama3's rope_scaling": Dialect(
        conf(rope_theta=..., rope_scaling=LLAMA3 | {"rope_theta": 5e5}), mid(), Reading(frequencies=tuple(llama3(5e5)))
    ),
    "YaRN without rounding": Dialect(
        conf(rope_scaling=YARN | {"truncate": False}, rope_theta=1.5e5, head_dim=32), mid(hd=32),
        Reading(frequencies=tuple(yarn(1.5e5, 32, truncates=False)), scale=0.1 * math.log(32) + 1),
    ),
    "YaRN of speculators": Dialect(
        spec({"rope_parameters": YARN | {"rope_theta": 1.5e5}, "head_dim": 32}), tensors(hd=32),
        SPEC._replace(frequencies=tuple(yarn(1.5e5, 32, truncates=True)), scale=0.1 * math.log(32) + 1),
    ),
    "longrope": Dialect(
        conf(rope_scaling={"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}), mid(), "short_factor"
    ),
    "dynamic": Dialect(conf(rope_scaling={"type": "dynamic", "factor": 2.0}), mid(), Reading()),
    "AngelSlim, Hunyuan 1.8B": Dialect(conf(rope_scaling=HUNYUAN_ROPE, **HUNYUAN), mid(), Reading()),
    "AngelSlim, Qwen2.5": Dialect(
        conf(architectures=["Eagle3LlamaForCausalLM"], target_model_type="qwen2", tie_word_embeddings=True, use_mrope=False),
        mid(), Reading(),
    ),
    "AngelSlim, Qwen3-VL": Dialect(
        conf(image_token_id=5, video_token_id=6, vision_start_token_id=7, modal_type="VLM",
             rope_scaling={"type": "default", "rope_type": "default", "mrope_interleaved": True, "mrope_section": [2, 3, 3]}),
        mid(), Reading(),
    ),
    "all tokens without an output layer": Dialect(
        conf(draft_vocab_size=V), tensors(vd=V, lm=False), Reading(vocabulary=V, own_output=False)
    ),
    "few tokens without an output layer": Dialect(conf(), tensors(lm=False), r"lm_head\.weight"),
    "attention_bias without biases": Dialect(conf(attention_bias=True), mid(), Reading()),
    "maps of other integers": Dialect(
        conf(), mid() | {"d2t": mid()["d2t"].to(torch.int32), "t2d": mid()["t2d"].to(torch.int64)}, Reading()
    ),
    "d2t out of order": Dialect(conf(), reversed_maps(), Reading()),
    "compressed-tensors, a scale a row": Dialect(
        spec(quantization_config={"quant_method": "compressed-tensors"}),
        quantised(torch.float8_e4m3fn, up=torch.full((I, 1), 0.5).bfloat16(), down=torch.ones(H, 1).bfloat16()), SPEC,
    ),
    "ModelOpt, FP8": Dialect(
        conf(quantization_config={"quant_method": "modelopt"}),
        quantised(torch.float8_e4m3fn, up=torch.tensor(0.5)) | {"layers.0.mlp.up_proj.input_scale": torch.tensor(1.0)}, Reading(),
    ),
    "quantised in blocks": Dialect(
        conf(), quantised(torch.float8_e4m3fn, up=torch.ones(2, 1)), r"mlp\.up_proj\.weight_scale is \[2, 1\]"
    ),
    "target_vocab_size": Dialect(conf(vocab_size=VD, target_vocab_size=V, draft_vocab_size=...), mid(), Reading()),
    "gelu under Gemma's key": Dialect(conf(hidden_act=..., hidden_activation="gelu_pytorch_tanh"), mid(), "hidden_act 'gelu"),
    "MiniCPM's scales": Dialect(
        conf(architectures=["MiniCPMForCausalLMEagle3"], scale_emb=12, scale_depth=1.4, dim_model_base=256), mid(), "scale_emb 12"
    ),
    "DeepSpec, Gemma 4": Dialect(
        conf(architectures=["Gemma4Eagle3Model"], target_layer_ids=[1, 5, 8], hidden_act=...,
             hidden_activation="gelu_pytorch_tanh"),
        tensors(embed=True, qk=True) | {"layers.0.layer_scalar": torch.ones(1)}, "hidden_act 'gelu|layer_scalar",
    ),
    "latent attention": Dialect(
        conf(architectures=["Eagle3DeepseekV2ForCausalLM"], q_lora_rank=8, kv_lora_rank=8, **ids(1, 5, 8)), tensors(),
        "q_lora_rank",
    ),
    "P-EAGLE, speculators": Dialect(spec(speculators_model_type="peagle", mask_token_id=3), tensors(), "'peagle'"),
    "P-EAGLE, SpecForge": Dialect(conf(architectures=["PEagleDraftModel"]), tensors(), "PEagleDraftModel"),
    "P-EAGLE, vLLM": Dialect(conf(parallel_drafting=True, ptd_token_id=3), tensors(), "parallel_drafting True"),
    "P-EAGLE, by its mask alone": Dialect(conf(mask_token_id=3), tensors(), "mask_token_id 3"),
    "DFlash": Dialect(conf(architectures=["DFlashDraftModel"], **DFLASH), tensors(), "DFlashDraftModel"),
    "DFlash under another name": Dialect(conf(**DFLASH), tensors(), "block_size 16"),
    "DFlash, speculators": Dialect(spec(speculators_model_type="dflash"), tensors(), "'dflash'"),
    "Domino": Dialect(conf(architectures=["DominoDraftModel"]), tensors(), "DominoDraftModel"),
    "DSpark": Dialect(conf(architectures=["DSparkDraftModel"]), tensors(), "DSparkDraftModel"),
    "DFlare": Dialect(conf(architectures=["DFlareDraftModel"]), tensors(), "DFlareDraftModel"),
    "MTP, speculators": Dialect(spec(speculators_model_type="mtp"), tensors(), "'mtp'"),
    "EAGLE-1, speculators": Dialect(spec(speculators_model_type="eagle", fusion_bias=False), tensors(), "'eagle'"),
}  # fmt: skip


@pytest.mark.parametrize("name", DIALECTS)
def test_a_dialect_is_read_as_its_trainer_means_it(name: str, tmp_path: Path) -> None:
    """A key that is read in another sense, or not at all: the head loads, and only its drafts are worse."""
    dialect = DIALECTS[name]
    (tmp_path / "config.json").write_text(json.dumps(dialect.config))
    save_file({n: t.contiguous() for n, t in dialect.stored.items()}, tmp_path / "model.safetensors")
    if isinstance(dialect.right, str):
        with pytest.raises(ModelError, match=dialect.right):
            read_head(tmp_path, norm_output=dialect.option)
        return
    config, read = checkpoint = read_head(tmp_path, norm_output=dialect.option)
    norms = len(read["fc_norm.weight"]) if "fc_norm.weight" in read else 0
    cosines, sines = rotations_of(config, 2)
    half = config.head_dim // 2
    frequencies = torch.atan2(sines[1, :half].double(), cosines[1, :half].double())
    assert frequencies.tolist() == pytest.approx(list(dialect.right.frequencies), rel=1e-5, abs=1e-9)
    got = Reading(
        taps=taps_of(config, NUM_LAYERS),
        norm=("all" if norms == 1 else "each") if norms else "",
        feed=config.norm_output,
        norm_before_residual=config.norm_before_residual,
        layers=config.num_layers,
        qk=config.qk_norm,
        bias=config.qkv_bias and config.output_bias,
        window=config.window,
        vocabulary=config.draft_vocab_size,
        frequencies=dialect.right.frequencies,
        scale=pytest.approx(float(cosines[0, 0])),
        own_output=not config.shares_lm_head,
    )
    assert got == dialect.right
    assert config.vocab_size == V
    write_head(tmp_path / "again", checkpoint)
    assert read_head(tmp_path / "again").config == config


def test_derived_maps_and_dequantised_weights_are_the_stored_ones(tmp_path: Path) -> None:
    """Draft tokens sent to other tokens than their rows of the output layer; a weight read without its scale."""

    def read(stored: dict[str, Tensor]) -> dict[str, Tensor]:
        (tmp_path / "config.json").write_text(json.dumps(conf()))
        save_file({n: t.contiguous() for n, t in stored.items()}, tmp_path / "model.safetensors")
        return read_head(tmp_path).tensors

    whole = mid()
    for stored in (mid(t2d=False), reversed_maps(), {n: t for n, t in reversed_maps().items() if n != "t2d"}):
        got = read(stored)
        assert all(torch.equal(got[name], whole[name]) for name in ("d2t", "t2d", "lm_head.weight"))
    scale = torch.linspace(0.5, 2.0, I)[:, None]
    stored = quantised(torch.float8_e4m3fn, up=scale)
    expected = stored["layers.0.mlp.up_proj.weight"].float() * scale
    assert torch.equal(read(stored)["midlayer.mlp.up_proj.weight"], expected)

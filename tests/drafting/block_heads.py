"""P-EAGLE, DFlash and DSpark heads made on the spot: random weights in the published forms, and the papers' forward in float64.

Names and sizes are written out from the trainers' code, not taken from the code under test.

    >>> tensors = save_block(folder, "DSpark, DeepSpec", target)
    >>> states = block_states(tensors, target.embedding, features, [last_token, *[MASK] * 4])
"""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from drafting.eagle_heads import layer_shapes, random_tensor, save_files
from drafting.eagle_reference import layer_output, rms_norm, section
from torch import Tensor

from ragspec.drafting.block.checkpoint import read_block
from ragspec.drafting.block.network import BlockNetwork
from ragspec.engine.target import Target

MASK, BLOCK, RANK, HEADS, KV_HEADS, HEAD_DIM, BETWEEN, EPS, THETA = 3, 5, 8, 4, 2, 16, 96, 1e-6, 1e6
TAPS = (1, 2)
"""Layers 0 and 1, whose outputs are the inputs of layers 1 and 2."""
SHAPE: dict[str, Any] = {
    "model_type": "qwen3", "hidden_act": "silu", "head_dim": HEAD_DIM, "intermediate_size": BETWEEN, "rms_norm_eps": EPS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "num_hidden_layers": 2, "rope_theta": THETA,
    "rope_scaling": None, "layer_types": ["full_attention"] * 2, "max_position_embeddings": 4096, "attention_bias": False,
    "sliding_window": None, "use_sliding_window": False, "max_window_layers": 2, "attention_dropout": 0.0,
}  # fmt: skip
ATTENTION = SimpleNamespace(
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    rms_norm_eps=EPS,
    rope_theta=THETA,
    rope={},
    max_positions=4096,
    qk_norm=True,
)
MARKOV: dict[str, Any] = {"markov_rank": RANK, "markov_head_type": "vanilla", "num_anchors": 512}
CONFIDENCE: dict[str, Any] = {"enable_confidence_head": True, "confidence_head_with_markov": True}
BLOCKS: dict[str, Any] = {"block_size": BLOCK, "mask_token_id": MASK}
SECTION: dict[str, Any] = {"block_size": BLOCK, "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1]}}
PAIRS: dict[str, Any] = {"mask_token_id": MASK, "eagle_aux_hidden_state_layer_ids": [1, 2]}


def speculators(name: str, **keys: Any) -> dict[str, Any]:
    return {"speculators_model_type": name, "speculators_config": {"algorithm": name}, **keys}


FORMS: dict[str, dict[str, Any]] = {
    "DFlash, z-lab": {"architectures": ["DFlashDraftModel"], "num_target_layers": 4, **SECTION},
    "DFlash, speculators": speculators("dflash", aux_hidden_state_layer_ids=[1, 2], **BLOCKS),
    "DSpark, DeepSpec": {
        "architectures": ["Qwen3DSparkModel"],
        "target_layer_ids": [0, 1],
        **(BLOCKS | MARKOV | CONFIDENCE),
    },
    "DSpark, SpecForge": {"architectures": ["DSparkDraftModel"], "dspark_bonus_anchor": True, **SECTION, **MARKOV},
    "P-EAGLE, SpecForge": {"architectures": ["PEagleDraftModel"], **PAIRS},
    "P-EAGLE, speculators": speculators("peagle", norm_before_residual=True, **PAIRS),
}


def save_block(folder: Path, form: str, target: Target, seed: int = 0) -> dict[str, Tensor]:
    """A directory in one of FORMS. Returns its tensors."""
    own, sizes = FORMS[form], {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    raw = {**own, "transformer_layer_config": SHAPE | sizes} if "speculators_config" in own else SHAPE | sizes | own
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: random_tensor(size, generator) for name, size in _shapes(form, target).items()}
    save_files(folder, raw, tensors)
    return tensors


def network_for(target: Target, folder: Path, form: str, dtype: torch.dtype | None = None) -> BlockNetwork:
    save_block(folder, form, target)
    return BlockNetwork(read_block(folder), target, 400, dtype)


def _shapes(form: str, target: Target) -> dict[str, tuple[int, ...]]:
    width, vocab, is_eagle = target.hidden_size, target.vocab_size, form.startswith("P-EAGLE")
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (width, len(TAPS) * width), "norm.weight": (width,)}
    for i in range(2):
        layer, inputs = f"layers.{i}.", 2 * width if is_eagle and i == 0 else width
        shapes |= layer_shapes(layer, inputs, width, BETWEEN, HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
        shapes[f"{layer}input_layernorm.weight"] = (width,)
        if not is_eagle:
            shapes |= {f"{layer}self_attn.{part}_norm.weight": (HEAD_DIM,) for part in "qk"}
    if is_eagle:
        shapes |= {"layers.0.hidden_norm.weight": (width,), "mask_hidden": (1, 1, len(TAPS) * width)}
        return shapes | {"embed_tokens.weight": (vocab, width), "lm_head.weight": (vocab, width)}
    shapes["hidden_norm.weight"] = (width,)
    if form.startswith("DSpark"):
        shapes |= {f"markov_head.markov_{part}.weight": (vocab, RANK) for part in ("w1", "w2")}
    if form == "DSpark, DeepSpec":
        shapes |= {"embed_tokens.weight": (vocab, width), "lm_head.weight": (vocab, width)}
        shapes |= {"confidence_head.proj.weight": (1, width + RANK), "confidence_head.proj.bias": (1,)}
    return shapes


def block_states(tensors: dict[str, Tensor], embedding: Tensor, features: Tensor, block: Sequence[int]) -> Tensor:
    """DFlash and DSpark: the normed states of a block's rows behind the whole text. Shapes: float64 [T, F] -> [B, H]."""
    held = {name: tensor.double() for name, tensor in tensors.items()}
    text = rms_norm(features @ held["fc.weight"].T, held["hidden_norm.weight"], EPS)
    hidden = held.get("embed_tokens.weight", embedding.double())[list(block)]
    unseen = torch.zeros([len(text) + len(block)] * 2, dtype=torch.bool)  # each row sees the text and the whole block
    for i in range(2):
        layer = section(held, f"layers.{i}.")
        rows = torch.cat([text, rms_norm(hidden, layer["input_layernorm.weight"], EPS)])
        hidden = layer_output(ATTENTION, layer, hidden, rows, unseen)
    return rms_norm(hidden, held["norm.weight"], EPS)

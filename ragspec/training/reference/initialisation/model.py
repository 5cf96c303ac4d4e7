"""The sizes of the reference target and how a fresh one is built.

Owns the architecture figures; never reads data. `build_target(SIZES["cpu"])` gives a model ready for training.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ragspec.training.reference.initialisation.stream_layout import HEAD_DIM
from ragspec.training.reference.initialisation.structured_init import ROPE_THETA, structured_init

MAX_POSITIONS = 2048


@dataclass(frozen=True)
class TargetSize:
    """Llama dimensions. Attention heads are a multiple of four, so four tensor-parallel ranks hold whole heads."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int
    vocab_size: int


SIZES = {
    "tiny": TargetSize(hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=4, ffn_size=128, vocab_size=512),
    "cpu": TargetSize(hidden_size=416, num_layers=6, num_heads=4, num_kv_heads=4, ffn_size=768, vocab_size=6144),
    "gpu": TargetSize(hidden_size=416, num_layers=8, num_heads=4, num_kv_heads=4, ffn_size=768, vocab_size=8192),
}


def target_config(size: TargetSize, pad_token_id: int, eos_token_id: int) -> LlamaConfig:
    """The Hugging Face configuration of one size."""
    return LlamaConfig(
        hidden_size=size.hidden_size,
        intermediate_size=size.ffn_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        head_dim=HEAD_DIM,
        vocab_size=size.vocab_size,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        attention_bias=True,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=pad_token_id,
        eos_token_id=eos_token_id,
    )


def build_target(
    size: TargetSize,
    pieces: Sequence[str],
    pad_token_id: int = 0,
    eos_token_id: int = 5,
    seed: int = 0,
    meanings: Tensor | None = None,
) -> LlamaForCausalLM:
    """A freshly initialised target in float32; the same seed gives the same weights. `pieces`, `meanings`: of the tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(target_config(size, pad_token_id, eos_token_id))
    structured_init(model, pieces, meanings, seed + 1)
    return model

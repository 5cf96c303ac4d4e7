"""Models of random weights that the suite `backends` runs over."""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from ragspec.config import TargetConfig
from ragspec.engine.target import Target

KV_SLOTS = 4096


class Shape(NamedTuple):
    """A Llama of random weights."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden, num_hidden_layers=self.layers, num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads, intermediate_size=self.inner, vocab_size=self.vocab,
            max_position_embeddings=2048, tie_word_embeddings=False, eos_token_id=None,
        )  # fmt: skip


SMALL = Shape("small", 128, 2, 4, 2, 256, 49_152)
SHAPES = (
    Shape("0.1 B", 576, 30, 9, 3, 1536, 49_152),
    Shape("1 B", 2048, 16, 32, 8, 8192, 128_256),
    Shape("8 B", 4096, 32, 32, 8, 14_336, 128_256),
    Shape("32 B", 5120, 64, 40, 8, 27_648, 152_064),
)


def random_target(shape: Shape, tokenizer: str, config: TargetConfig) -> Target:
    """The same weights every time on one device."""
    with torch.random.fork_rng(), torch.device(config.device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            shape.config(), dtype=getattr(torch, config.dtype), attn_implementation="ragspec"
        ).eval()
    return Target(model, AutoTokenizer.from_pretrained(tokenizer), config, KV_SLOTS)

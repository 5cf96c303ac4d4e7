"""Targets of random weights, for suites that measure time alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from ragspec.config import DraftingConfig, EngineConfig, TargetConfig
from ragspec.drafting.cost_model import CostTable
from ragspec.drafting.planner import Planner
from ragspec.engine.admission import Admission
from ragspec.engine.checkpoints.weights import model_classes
from ragspec.engine.engine import Engine
from ragspec.engine.loading import make_drafters, measure_costs
from ragspec.engine.target import Target

KV_SLOTS = 4096
MAX_CONTEXT_TOKENS = 2048


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
            max_position_embeddings=MAX_CONTEXT_TOKENS, tie_word_embeddings=False, eos_token_id=None,
        )  # fmt: skip


SMALL = Shape("small", 128, 2, 4, 2, 256, 49_152)
SHAPES = (
    Shape("0.1 B", 576, 30, 9, 3, 1536, 49_152),
    Shape("1 B", 2048, 16, 32, 8, 8192, 128_256),
    Shape("8 B", 4096, 32, 32, 8, 14_336, 128_256),
    Shape("32 B", 5120, 64, 40, 8, 27_648, 152_064),
)


def random_model(shape: Shape, config: TargetConfig) -> Any:
    """The same weights every time on one device, ready to become a `Target`."""
    with torch.random.fork_rng(), torch.device(config.device):
        torch.manual_seed(0)
        return (
            model_classes()
            .from_config(shape.config(), dtype=getattr(torch, config.dtype), attn_implementation="ragspec")
            .eval()
        )


def random_target(shape: Shape, config: TargetConfig) -> Target:
    """The first 256 tokens are bytes; no other has text."""
    return Target(random_model(shape, config), _byte_tokenizer(), config, KV_SLOTS)


def engine_over(target: Target, config: EngineConfig, costs: CostTable | None = None) -> Engine:
    """An engine with the default drafters over a loaded target, whose pool it replaces. Measures `costs` if none are given."""
    drafting = DraftingConfig()
    target.reset_pool(config.max_kv_tokens)
    drafters, costs = make_drafters(target, drafting), costs or measure_costs(target, config.max_step_tokens)
    planner = Planner(drafters, costs, drafting.max_tree_nodes, target.vocab_size)
    return Engine(target, planner, Admission(target, "benchmark"), config)


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)

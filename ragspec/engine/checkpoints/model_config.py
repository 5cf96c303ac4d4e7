"""Reads a model's configuration and tokenizer: whether it can be served, its heads, its end tokens, its logit transform."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase, TokenizersBackend

from ragspec.engine.checkpoints.weights import model_errors
from ragspec.errors import ModelError
from ragspec.numerics.attention import AttentionShape


def check_servable(model: Any, config: Any) -> None:
    """Raises: ModelError for a model that the engine cannot compute correctly."""
    unknown = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ModelError(f"{type(model).__name__} attends in a way that is not known: {', '.join(sorted(unknown))}")
    missing = [name for name in ("model", "lm_head") if not hasattr(model, name)]
    if missing or not getattr(config, "max_position_embeddings", None):
        raise ModelError(f"{type(model).__name__} is not laid out as the engine expects; it serves Llama-like models")


class LogitTransform(NamedTuple):
    """A model's own change of its logits, in float32: a factor (Cohere), a divisor (Granite), a soft cap (Gemma 2)."""

    factor: float
    divisor: float
    softcap: float

    @classmethod
    def of(cls, config: Any) -> LogitTransform:
        names = ("logit_scale", "logits_scaling", "final_logit_softcapping")
        return cls(*(float(getattr(config, name, None) or none) for name, none in zip(names, (1, 1, 0), strict=True)))

    def __call__(self, logits: Tensor) -> Tensor:
        if self.factor != 1.0:
            logits = logits * self.factor
        if self.divisor != 1.0:
            logits = logits / self.divisor
        if self.softcap:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def attention_shapes(config: Any, num_ranks: int) -> list[AttentionShape]:
    heads, dim = int(config.num_attention_heads), head_dim(config)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    shape = AttentionShape(heads // num_ranks, kv_heads // num_ranks, dim, dim**-0.5)
    return [shape] * config.num_hidden_layers


def eos_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    found: set[int] = set()
    for given in (tokenizer.eos_token_id, model.config.eos_token_id, model.generation_config.eos_token_id):
        found.update(given if isinstance(given, list) else [] if given is None else [given])
    return tuple(sorted(found))


def read_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder or name. Raises: ModelError."""
    with model_errors(folder):
        config = _plain_config(Path(folder))
        if config is not None and (config.model_type, config.tokenizer_class) == ("llama", TokenizersBackend.__name__):
            return cast(PreTrainedTokenizerBase, TokenizersBackend.from_pretrained(folder))
        from transformers import AutoTokenizer  # Why here: it reads the tables of all models, half a second of a start

        return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(folder, config=config))


def _plain_config(folder: Path) -> PretrainedConfig | None:
    """What the choice of a tokenizer's class needs of a model's configuration. None: transformers reads it itself.

    Why: importing the class of a model's configuration takes a second of a start.
    """
    try:
        own, model = (
            json.loads((folder / f"{name}.json").read_text("utf-8")) for name in ("tokenizer_config", "config")
        )
    except (OSError, ValueError):
        return None
    if "tokenizer_class" not in own or "auto_map" in own or "model_type" not in model:
        return None
    config = PretrainedConfig()
    vars(config).update(model, _name_or_path=str(folder), tokenizer_class=own["tokenizer_class"])
    return config

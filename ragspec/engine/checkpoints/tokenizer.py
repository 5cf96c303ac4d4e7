"""Reads a model's tokenizer from its folder, without the tables of all models where the folder names a plain one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

from transformers import PretrainedConfig, PreTrainedTokenizerBase, TokenizersBackend

from ragspec.engine.checkpoints.weights import model_errors


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
            json.loads((folder / name).read_text("utf-8")) for name in ("tokenizer_config.json", "config.json")
        )
    except (OSError, ValueError):
        return None
    if "tokenizer_class" not in own or "auto_map" in own or "model_type" not in model:
        return None
    config = PretrainedConfig()
    vars(config).update(model, _name_or_path=str(folder), tokenizer_class=own["tokenizer_class"])
    return config

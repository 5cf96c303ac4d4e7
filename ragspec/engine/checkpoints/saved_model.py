"""A target from its saved int8 weights, without the model classes of transformers.

Importing those classes and building a model takes three seconds, and a start whose quantised weights are on disk needs the
model's shapes alone. They come from the checkpoint's headers, and from the configuration that was saved with the weights. Only
Llama-like decoders without windows are built here; `tests/engine/test_saved_model.py` compares their bits with those of the model
that transformers builds.

>>> model = load_saved(folder, torch.float32, arena, saved.config)      # None: load the model itself
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig

from ragspec.engine.checkpoints.weights import find_file, model_errors, tensor_files
from ragspec.numerics.cpu.int8 import Int8Decoder, Int8Linear
from ragspec.numerics.cpu.int8_weights import WeightArena
from ragspec.numerics.ranks import ONE_RANK

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_LARGE = 2**30
"""Parameters of a model whose shapes are on torch's device "meta". Why not of all: its operators import torch's compiler, which
takes more than a second. Operators copy bytes that share one place in memory, which takes less for smaller models."""


class SavedModel(nn.Module):
    """Embedding, decoder and output layer of a causal LM, as `Target` uses them."""

    def __init__(
        self, config: Any, generation: Any, embedding: Tensor, shapes: dict[str, Tensor], arena: WeightArena
    ) -> None:
        """`generation`: has `eos_token_id`."""
        super().__init__()
        self.config, self.generation_config = config, generation
        self._num_parameters = sum(shape.numel() for shape in shapes.values())
        assert arena.rotations is not None, "saved together with the configuration"
        cos, sin = arena.rotations
        skeleton = _skeleton(config, shapes)
        skeleton.embed_tokens = nn.Embedding.from_pretrained(embedding)
        self.model = Int8Decoder(skeleton, cos, sin, ONE_RANK, arena)
        self.lm_head = Int8Linear(shapes.get(_HEAD, shapes[_EMBEDDING]), None, ONE_RANK, arena)

    def get_input_embeddings(self) -> nn.Module:
        embedding: nn.Module = self.model.embedding
        return embedding

    def num_parameters(self) -> int:
        """As transformers' method."""
        return self._num_parameters


def load_saved(
    folder: str, dtype: torch.dtype, arena: WeightArena | None, saved: dict[str, Any] | None
) -> SavedModel | None:
    """The model on a saved arena. None if it must be loaded as transformers has it. Raises: ModelError."""
    if arena is None or saved is None:
        return None
    with model_errors(folder):
        config: Any = PretrainedConfig(**saved)
        files = tensor_files(folder)
        if getattr(config, "sliding_window", None) or any(path.suffix != ".safetensors" for path in files.values()):
            return None
        names = {name.removeprefix("model."): name for name in files}
        if config.tie_word_embeddings:
            names.pop(_HEAD, None)
        shapes = _shapes(files, names)
        with safe_open(files[names[_EMBEDDING]], "pt") as tensors:
            embedding = tensors.get_tensor(names[_EMBEDDING]).to(dtype)
        path = find_file(folder, "generation_config.json")
        generation = json.loads(path.read_text(encoding="utf-8")) if path else {}
        ends = SimpleNamespace(eos_token_id=generation.get("eos_token_id"))
        return SavedModel(config, ends, embedding, shapes, arena)


def _shapes(files: dict[str, Path], names: dict[str, str]) -> dict[str, Tensor]:
    """Tensors without values, by name."""
    sizes: dict[str, list[int]] = {}
    for path in set(files.values()):
        with safe_open(path, "pt") as tensors:
            sizes |= {n: tensors.get_slice(stored).get_shape() for n, stored in names.items() if files[stored] == path}
    if sum(map(math.prod, sizes.values())) > _LARGE:
        return {name: torch.empty(size, device="meta") for name, size in sizes.items()}
    return {name: torch.zeros((), dtype=torch.int8).expand(size) for name, size in sizes.items()}


def _skeleton(config: Any, shapes: dict[str, Tensor]) -> SimpleNamespace:
    """What `Int8Decoder` reads of a transformers decoder: layers with attention, feed-forward and norms."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    norm = {"variance_epsilon": config.rms_norm_eps}
    layers = []
    for number in range(config.num_hidden_layers):
        layer = _part(shapes, f"layers.{number}.", norm)
        vars(layer.self_attn).update(layer_idx=number, head_dim=head_dim, scaling=head_dim**-0.5, config=config)
        layers.append(layer)
    return SimpleNamespace(config=config, layers=layers, norm=_part(shapes, "norm.", norm))


def _part(shapes: dict[str, Tensor], prefix: str, attributes: dict[str, Any]) -> SimpleNamespace:
    """The module of a prefix, with its children; the attributes go to every module with a weight."""
    inside = {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
    if "weight" in inside:
        return SimpleNamespace(weight=inside["weight"], bias=inside.get("bias"), **attributes)
    children = {name.partition(".")[0] for name in inside}
    return SimpleNamespace(**{child: _part(inside, f"{child}.", attributes) for child in children})

"""Keeps quantised weights on disk, and builds a target from them without the model classes of transformers.

Importing those classes and building a model takes three seconds, and a start whose quantised weights are on disk needs the
model's shapes alone. They come from the checkpoint's headers, and from the configuration that was saved with the weights. Only
Llama-like decoders without windows are built here; `tests/engine/test_saved_model.py` compares their bits with those of the model
that transformers builds.

>>> model = load_saved(folder, torch.float32, arena, saved.config)      # None: load the model itself
"""

import contextlib
import json
import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PretrainedConfig

from ragspec.config import TargetConfig
from ragspec.disk import TEMPORARY
from ragspec.engine.checkpoints.model_config import head_dim
from ragspec.engine.checkpoints.target_files import converted_folder, files_digest, is_unused
from ragspec.engine.checkpoints.weights import find_file, model_errors, tensor_files
from ragspec.errors import ModelError
from ragspec.numerics.cpu.int8 import Int8Decoder, Int8Linear
from ragspec.numerics.cpu.int8_weights import FORMAT, WeightArena
from ragspec.numerics.cpu.streamed_weights import StreamedArena
from ragspec.numerics.ranks import ONE_RANK, Ranks

log = logging.getLogger(__name__)

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
    dim = head_dim(config)
    norm = {"variance_epsilon": config.rms_norm_eps}
    layers = []
    for number in range(config.num_hidden_layers):
        layer = _part(shapes, f"layers.{number}.", norm)
        vars(layer.self_attn).update(layer_idx=number, head_dim=dim, scaling=dim**-0.5, config=config)
        layers.append(layer)
    return SimpleNamespace(config=config, layers=layers, norm=_part(shapes, "norm.", norm))


def _part(shapes: dict[str, Tensor], prefix: str, attributes: dict[str, Any]) -> SimpleNamespace:
    """The module of a prefix, with its children; the attributes go to every module with a weight."""
    inside = {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
    if "weight" in inside:
        return SimpleNamespace(weight=inside["weight"], bias=inside.get("bias"), **attributes)
    children = {name.partition(".")[0] for name in inside}
    return SimpleNamespace(**{child: _part(inside, f"{child}.", attributes) for child in children})


def is_prepared(config: TargetConfig) -> bool:
    """Whether an earlier start converted and quantised the target, so that it loads in seconds. Raises: ModelError."""
    folder = converted_folder(config)
    needs_int8 = config.is_int8 and config.backend_name == "cpu"
    return folder is not None and (not needs_int8 or SavedWeights(str(folder), config, ONE_RANK).exists)


class SavedWeights:
    """One rank's quantised weights in the target's cache. Models by name of a hub have no files to take a digest of."""

    def __init__(self, folder: str, config: TargetConfig, ranks: Ranks) -> None:
        cache, model = Path(config.cache_dir).expanduser(), Path(folder)
        self._path: Path | None = None
        self._max_bytes = config.max_weight_bytes
        self.config: dict[str, Any] | None = None
        """The whole configuration of the model, once `load` has found it; files of earlier versions lack it."""
        if model.is_dir():
            is_conversion = model.parent == cache and model.with_suffix(".lock").is_file()
            digest = model.name if is_conversion else files_digest(model, config.dtype)[:32]
            self._path = cache / "int8" / f"{digest}-{FORMAT}-{ranks.rank}-of-{ranks.size}.safetensors"

    @property
    def exists(self) -> bool:
        """Whether an earlier start left the weights."""
        return self._path is not None and self._path.is_file()

    def load(self) -> WeightArena:
        """The saved arena, or an empty one. Raises: ModelError for a damaged file of weights that may not fit in memory."""
        if self._path is None or not self.exists:
            return WeightArena()
        try:
            arena = (
                StreamedArena(self._path, self._max_bytes) if self._max_bytes else WeightArena(load_file(self._path))
            )
            with safe_open(self._path, "pt") as tensors:
                found = (tensors.metadata() or {}).get("config")
            self.config = json.loads(found) if found else None
        except (OSError, SafetensorError) as cause:
            if self._max_bytes:
                raise ModelError(
                    f"{self._path} cannot be read: {cause}; remove it, and the next start quantises anew, for which the whole "
                    "target must fit in memory once, whatever target.max_weight_bytes says"
                ) from cause
            log.warning("quantised weights cannot be read and are made anew: %s", cause)
            return WeightArena()
        with contextlib.suppress(OSError):  # a read-only cache
            self._path.touch()
        return arena

    def save(self, arena: WeightArena, rotations: Sequence[Tensor], config: Any) -> None:
        """Write a new arena, with the decoder's table of rotations and the model's configuration, and remove files that nobody
        used for MAX_UNUSED_DAYS.

        A full disk is logged, not raised.
        """
        if self._path is None or (arena.is_saved and (arena.streams or self.config is not None)):
            return
        building = self._path.with_name(f"{TEMPORARY}{os.getpid()}-{self._path.name}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            tensors = {**arena.tensors, "rotations": torch.stack(list(rotations))}
            save_file(tensors, building, {"config": config.to_json_string(use_diff=False)})
            os.replace(building, self._path)
            for path in self._path.parent.iterdir():
                if is_unused(path):
                    path.unlink()
        except (OSError, SafetensorError) as cause:
            log.warning("quantised weights are not kept: %s", cause)
        finally:
            with contextlib.suppress(OSError):
                building.unlink()

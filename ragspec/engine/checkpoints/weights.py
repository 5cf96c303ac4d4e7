"""Loads a target's weights from its directory: the whole model, or one rank's shards of it.

    >>> model = load_whole(folder, torch.float32)                      # as transformers loads it
    >>> model, shards = load_shards(folder, torch.float32, ranks)      # only this rank's columns

No rank ever holds the whole model: shards are read in blocks of rows, and the file is closed after each block, because mapped
pages count as the process's memory.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.utils.hub import cached_file

from ragspec.engine.hf_attention import register_attention
from ragspec.errors import ModelError
from ragspec.numerics.layers import is_supported, unsplittable
from ragspec.numerics.ranks import Ranks, first_line
from ragspec.numerics.sharding import WeightSlice, check_head_counts, weight_slice

log = logging.getLogger(__name__)

_FILES = ("model.safetensors", "pytorch_model.bin")
_BLOCK_BYTES = 2**24
_HARMLESS_KEYS = frozenset({
    "model_type", "auto_map", "torch_dtype", "rope_theta", "rope_scaling", "quantization_config", "tokenizer_class", "use_cache",
    "output_attentions", "attn_implementation", "torchscript", "gradient_checkpointing", "finetuning_task",
    "task_specific_params", "pruned_heads", "use_bfloat16", "unsloth_version", "unsloth_fixed",
})  # fmt: skip
"""Keys of config.json that every class of transformers reads, or that change no number."""


@contextmanager
def model_errors(path: str) -> Iterator[None]:
    """Turn any error of transformers, safetensors or torch into a ModelError."""
    try:
        yield
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, TypeError) as cause:
        raise ModelError(f"cannot load the target {path}: {first_line(cause)}") from cause
    except Exception as cause:  # safetensors and pickle raise classes of their own
        raise ModelError(f"cannot load the target {path}: {type(cause).__name__}: {first_line(cause)}") from cause


def load_whole(folder: str, dtype: torch.dtype) -> Any:
    """The model as transformers loads it. Raises: ModelError."""
    with model_errors(folder):
        loaded: Any = model_classes().from_pretrained(
            folder, dtype=dtype, attn_implementation="ragspec", output_loading_info=True
        )
    model, report = loaded
    check_complete(folder, sorted(report["missing_keys"]))
    name_undefined_keys(model.config, folder)
    return model


class WeightShards(NamedTuple):
    """Where one rank's shards come from: its group, the checkpoint, and the number of parameters of the whole model."""

    ranks: Ranks
    checkpoint: Checkpoint
    num_parameters: int


def load_shards(
    folder: str, dtype: torch.dtype, ranks: Ranks, *, only_embedding: bool = False
) -> tuple[Any, WeightShards]:
    """The model with this rank's shard of every weight, or of the embedding alone. Raises: ModelError."""
    with model_errors(folder):
        from transformers import AutoConfig  # Why here: the classes of configurations take a second

        shape: Any = AutoConfig.from_pretrained(folder)
        check_head_counts(shape.get_text_config(), ranks.size)
        if ranks.rank == 0:
            name_undefined_keys(shape, folder)
        with torch.device("meta"):
            model: Any = model_classes().from_config(shape, dtype=dtype, attn_implementation="ragspec")
        if not is_supported(model):
            raise unsplittable(model)
        if find_file(folder, "generation_config.json"):
            model.generation_config = GenerationConfig.from_pretrained(folder)
        checkpoint = Checkpoint(folder, model, dtype)
        num_parameters = int(sum(p.numel() for p in model.parameters()))
        checkpoint.fill(model, ranks, only="embed_tokens" if only_embedding else "")
        if only_embedding and ranks.size == 1:
            model.tie_weights()
        _fill_rotary(model)
    return model, WeightShards(ranks, checkpoint, num_parameters)


class Checkpoint:
    """The tensors of a model directory by the model's names for them, in safetensors or in torch's own format.

    Raises: ModelError for a tensor that is missing or has another shape than the model's.
    """

    def __init__(self, path: str, model: Any, dtype: torch.dtype) -> None:
        self._path, self._dtype = path, dtype
        self._files = tensor_files(path)
        self._shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
        tied = bool(model.config.get_text_config().tie_word_embeddings)
        self._stored = {name: self._stored_name(name, tied) for name in self._shapes}
        check_complete(path, sorted(name for name, stored in self._stored.items() if stored not in self._files))

    def whole(self, name: str) -> Tensor:
        return self.part(name, None)

    def part(self, name: str, cut: WeightSlice | None) -> Tensor:
        """A copy of a tensor or of a rank's slice of it, padded with zeros to the slice's width."""
        shape = self._shapes[name]
        start, stop, wide = ([0] * len(shape), list(shape), list(shape))
        if cut is not None:
            start[cut.dim], stop[cut.dim], wide[cut.dim] = cut.start, cut.stop, cut.width
        part = torch.zeros(wide, dtype=self._dtype)
        bytes_a_row = 4 * max(1, int(torch.Size(shape[1:]).numel()))
        num_rows = max(1, _BLOCK_BYTES // bytes_a_row)
        for first in range(start[0], stop[0], num_rows):
            last = min(first + num_rows, stop[0])
            block = self._read(name, (slice(first, last), *map(slice, start[1:], stop[1:])))
            part[(slice(first - start[0], last - start[0]), *(slice(n) for n in block.shape[1:]))] = block
        return part

    def fill(self, model: Any, ranks: Ranks, only: str = "") -> None:
        """Set the parameters of `model` to this rank's part of the tensor; those whose names lack `only` to its shape alone."""
        for name, shape in self._shapes.items():
            owner, _, leaf = name.rpartition(".")
            cut = weight_slice(name, shape, ranks)
            if only in name:
                part = self.part(name, cut)
            elif cut and ranks.size > 1:
                part = torch.empty((*shape[: cut.dim], cut.width, *shape[cut.dim + 1 :]), device="meta")
            else:
                continue
            setattr(model.get_submodule(owner), leaf, nn.Parameter(part, requires_grad=False))

    def _read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        stored = self._stored[name]
        path = self._files[stored]
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as tensors:
                found = tensors.get_slice(stored)
                self._check(name, tuple(found.get_shape()))
                return cast(Tensor, found[index].to(self._dtype, copy=True))
        tensor: Tensor = torch.load(path, map_location="cpu", mmap=True, weights_only=True)[stored]
        self._check(name, tuple(tensor.shape))
        return tensor[index].to(self._dtype, copy=True)

    def _check(self, name: str, found: tuple[int, ...]) -> None:
        if found != self._shapes[name]:
            raise ModelError(f"{self._path}: {name} has the shape {found}, the model needs {self._shapes[name]}")

    def _stored_name(self, name: str, tied: bool) -> str:
        """The tensor's name in the files. A tied LM head is not stored; a model saved without its head has no prefix."""
        if tied and name == "lm_head.weight":
            return self._stored_name("model.embed_tokens.weight", tied)
        return name if name in self._files else name.removeprefix("model.")


def tensor_files(path: str) -> dict[str, Path]:
    """Which file holds each tensor. Raises: ModelError."""
    for name in _FILES:
        if single := find_file(path, name):
            return dict.fromkeys(_names_in(single), single)
        if index := find_file(path, f"{name}.index.json"):
            places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {file: find_file(path, file) for file in places.values()}
            if missing := [file for file, found in files.items() if found is None]:
                raise ModelError(f"{path} lacks {missing[0]}, which its index names")
            return {tensor: cast(Path, files[file]) for tensor, file in places.items()}
    raise ModelError(f"{path} has no weights: neither {' nor '.join(_FILES)}")


def _names_in(path: Path) -> list[str]:
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as tensors:
            return list(tensors.keys())
    return list(torch.load(path, map_location="cpu", mmap=True, weights_only=True))


def find_file(path: str, name: str) -> Path | None:
    found = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def model_classes() -> Any:
    """transformers' `AutoModelForCausalLM`, with the engine's attention registered. Why here: two seconds of imports."""
    from transformers import AutoModelForCausalLM

    register_attention()
    return AutoModelForCausalLM


def _fill_rotary(model: Any) -> None:
    """Rotary angles are computed, not stored: build the modules again that were made without values."""
    for name, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, type(module)(module.config))


def check_complete(path: str, absent: list[str]) -> None:
    if absent:
        raise ModelError(f"{path} lacks {len(absent)} of the model's tensors, the first is {absent[0]}")


def undefined_keys(config: Any, folder: str) -> list[str]:
    """Keys of a model's config.json that the class of `config` does not define: transformers keeps and ignores them."""
    path = find_file(folder, "config.json")
    written: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path else {}
    defined = {*vars(type(config)()), *type(config).attribute_map, *GenerationConfig().to_dict(), *_HARMLESS_KEYS}
    return sorted(key for key in written if key not in defined and not key.startswith("_"))


def name_undefined_keys(config: Any, folder: str) -> None:
    """Log the undefined keys of a model, once in a process."""
    if keys := undefined_keys(config, folder):
        _warn(f"config.json of {config.model_type}: transformers does not define {', '.join(keys)}, and ignores them")


@functools.cache
def _warn(message: str) -> None:
    log.warning(message)

"""The attention of single heads of the target, from one row of a sequence to every position before it.

Some heads look from where an answer begins to the text that it is copied from: retrieval heads. Their attention is computed
beside the forward, from the stream that enters their layer and from the cached keys, so every backend has it, and no drafter,
batch or cached prefix changes it. Source: Wu et al., Retrieval Head Mechanistically Explains Long-Context Factuality (2024).

    >>> PromptAttention(folder, config, shape, rotations).row((21, 8), stream, keys)
    (0.31, 0.0002, ...)
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ragspec.engine.checkpoints.weights import tensor_files
from ragspec.errors import ModelError
from ragspec.numerics.attention import AttentionShape, Floats

Doubles = NDArray[np.float64]
_NONE = np.empty(0, np.float32)


class _Query(NamedTuple):
    """What makes a head's query. Shapes: norm [H], weight [D, H], bias [D], own_norm [D]; the last two may be empty."""

    norm: Floats
    weight: Floats
    bias: Floats
    own_norm: Floats


class PromptAttention:
    """Of a Llama, Mistral, Qwen2 or Qwen3 model. `shape`: of the whole model's attention."""

    def __init__(
        self, folder: str, config: Any, shape: AttentionShape, rotations: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """`folder`: of the weights. Shapes: rotations (cosines, sines) [positions, head_dim]."""
        self._folder, self._config, self._shape, self._rotations = folder, config, shape, rotations
        self._queries: dict[tuple[int, int], _Query | None] = {}

    def has(self, place: tuple[int, int]) -> bool:
        """Whether the model has this (layer, head), in safetensors. Callable from any thread. Raises: ModelError."""
        layer, head = place
        if not (0 <= layer < self._config.num_hidden_layers and 0 <= head < self._shape.num_heads):
            return False
        if place not in self._queries:
            self._queries[place] = self._read(layer, head)
        return self._queries[place] is not None

    def kv_head(self, head: int) -> int:
        return head // (self._shape.num_heads // self._shape.num_kv_heads)

    def row(self, place: tuple[int, int], stream: torch.Tensor, keys: Floats) -> tuple[float, ...]:
        """The attention of a head that the model has, from the last position to each; sums to 1.

        Shapes: stream [H], entering the layer at the last position; keys [T, head_dim], rotated, of all positions -> [T].
        """
        query = self._queries[place]
        assert query is not None
        # Why einsum: the order of its sums depends on no number of threads. Why float64: processors differ in that order, and
        # what follows is rounded to far fewer digits
        states = np.einsum("dh,h->d", query.weight, self._normalised(stream.double().cpu().numpy(), query.norm))
        states = states + query.bias if len(query.bias) else states
        states = self._normalised(states, query.own_norm) if len(query.own_norm) else states
        cos, sin = (table[len(keys) - 1].double().cpu().numpy() for table in self._rotations)
        half = len(states) // 2
        rotated = states * cos + np.concatenate([-states[half:], states[:half]]) * sin
        seen = keys[-self._window(place[0]) :]
        scores = np.einsum("td,d->t", seen.astype(np.float64), rotated) * self._shape.scale
        exponentials = np.exp(scores - scores.max())
        return (*[0.0] * (len(keys) - len(seen)), *(exponentials / exponentials.sum()).tolist())

    def _normalised(self, states: Doubles, weight: Floats) -> Doubles:
        return np.asarray(states / np.sqrt((states * states).mean() + self._config.rms_norm_eps) * weight)

    def _window(self, layer: int) -> int:
        """How many positions the layer sees; 0: all."""
        kinds = getattr(self._config, "layer_types", None)
        is_whole = kinds is not None and kinds[layer] != "sliding_attention"
        return 0 if is_whole else getattr(self._config, "sliding_window", None) or 0

    def _read(self, layer: int, head: int) -> _Query | None:
        """None where the weights are not in safetensors."""
        files, name, dim = tensor_files(self._folder), f"layers.{layer}", self._shape.head_dim
        own, whole = slice(head * dim, (head + 1) * dim), slice(None)
        norm = self._part(files, f"{name}.input_layernorm.weight", whole)
        weight = self._part(files, f"{name}.self_attn.q_proj.weight", own)
        bias = self._part(files, f"{name}.self_attn.q_proj.bias", own)
        own_norm = self._part(files, f"{name}.self_attn.q_norm.weight", whole)
        return _Query(norm, weight, bias, own_norm) if len(norm) and len(weight) else None

    def _part(self, files: dict[str, Path], name: str, rows: slice) -> Floats:
        """Rows of a stored tensor; empty if there is none."""
        stored = next((each for each in (f"model.{name}", name) if each in files), "")
        if not stored or files[stored].suffix != ".safetensors":
            return _NONE
        try:
            with safe_open(files[stored], "pt") as tensors:
                return np.asarray(tensors.get_slice(stored)[rows].float().numpy())
        except (OSError, SafetensorError) as cause:
            raise ModelError(f"{files[stored]} cannot be read: {cause}") from cause

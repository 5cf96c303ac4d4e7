"""The part of a target that heads need."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ragspec.numerics.backend import Backend

FINAL = -1
"""The tap of the target's final norm (`ragspec.engine.target`)."""


def float_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which dtype a backend takes the weights of products in `dtype`."""
    return torch.float32 if dtype == torch.int8 else dtype


class HeadTarget(Protocol):
    """See `ragspec.engine.target`."""

    vocab_size: int
    hidden_size: int
    backend: Backend

    @property
    def embedding(self) -> Tensor:
        """On the backend's device. Shape: [V, H]."""

    @property
    def num_layers(self) -> int: ...

    @property
    def text_config(self) -> Any:
        """The model's configuration, as transformers reads it."""

    def logits_of(self, states: Tensor) -> Tensor: ...

"""The part of a target that drafters with a network need. A draft model is a target, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ragspec.numerics.attention import AttentionMetadata, Ints
from ragspec.numerics.backend import Backend, LogitRows
from ragspec.numerics.kv_cache import KvPool

FINAL = -1
"""The tap of the target's final norm (`ragspec.engine.target`)."""


def float_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which dtype a backend takes the weights of products in `dtype`."""
    return torch.float32 if dtype == torch.int8 else dtype


class DraftTarget(Protocol):
    """See `ragspec.engine.target.Target`."""

    vocab_size: int
    hidden_size: int
    num_positions: int
    backend: Backend
    pool: KvPool

    @property
    def embedding(self) -> Tensor:
        """On the backend's device. Shape: [V, H]."""

    @property
    def num_layers(self) -> int: ...

    @property
    def text_config(self) -> Any:
        """The model's configuration, as transformers reads it."""

    def forward_tapped(
        self, token_ids: Ints | Tensor, metadata: AttentionMetadata, logit_rows: Ints, taps: Sequence[int]
    ) -> tuple[LogitRows, Mapping[int, Tensor]]: ...

    def states_through(
        self, layers: Sequence[int], token_ids: Ints | Tensor, metadata: AttentionMetadata
    ) -> Tensor: ...

    def logits_of(self, states: Tensor) -> Tensor: ...

"""The seam between the engine and a device: what a backend computes for a target.

A backend owns products, norms, attention over the KV pool, the pool's storage and keyed sampling. Scheduler, planner, drafters,
prefix cache and the engine's loop know none of them: they see token ids and numpy arrays.

    cpu      compiled kernels; logits are numpy arrays, and tokens are sampled one by one along the accepted path
    torch    plain torch operators on any device; logits stay there, and tokens of all rows are sampled there at once
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ragspec.numerics.attention import AttentionMetadata, AttentionShape, Floats, Ints
from ragspec.numerics.kv_cache import KvPool
from ragspec.numerics.ranks import Ranks
from ragspec.numerics.torch.sampling import TorchLogits

LogitRows = Floats | TorchLogits
"""Logits of some rows of a forward, float32 [W, V], where the backend keeps them."""


class ForwardContext(Protocol):
    """What every attention layer of one forward reads and writes beside hidden states: the pool, and which rows see what.

    Models whose own forward runs hand it to attention as the keyword `forward_context`.
    """

    @property
    def pool(self) -> KvPool: ...

    @property
    def metadata(self) -> AttentionMetadata: ...

    def attend(self, layer: int, qkv: Tensor, shape: AttentionShape, rotations: tuple[Tensor, Tensor] | None) -> Tensor:
        """Write keys and values into the pool and attend.

        Shapes: qkv [N, heads + 2 KV heads, head_dim] (queries, keys, values; rotated by `rotations`, cosines and sines
        [positions, head_dim], unless None); returns [N, heads, head_dim] in the dtype of `qkv`. Rows beyond the metadata's are
        ignored and come back as anything finite.
        """


class LayerModule(Protocol):
    """A decoder layer that keeps its keys in a pool."""

    shape: AttentionShape

    def __call__(self, stream: Tensor, x: Tensor, context: ForwardContext) -> Tensor:
        """The stream behind the layer. Shapes: stream [N, H], x [N, inputs] -> [N, H]."""

    def write(self, x: Tensor, context: ForwardContext) -> None:
        """Only write the rows' keys and values."""


class Backend(Protocol):
    """See the module. `least_rows`: a forward of fewer rows doubles its row. `kv_itemsize`: bytes of a number in the pool.
    `runs_ahead`: a forward returns while the device still computes it."""

    name: str
    device: torch.device
    least_rows: int
    kv_itemsize: int
    runs_ahead: bool

    @property
    def alone(self) -> Backend:
        """The same device and products, for a weight that is not split over ranks."""

    def for_head(self, dtype: torch.dtype) -> Backend:
        """The same device, with a head's products in `dtype` whatever the target's are; int8 quantises weights in floats."""

    def place(self, model: nn.Module) -> None:
        """Move a loaded model to the device, in place."""

    def make_pool(self, shapes: list[AttentionShape], num_slots: int) -> KvPool: ...

    def make_linear(self, weight: Tensor, bias: Tensor | None = None) -> nn.Module: ...

    def make_norm(self, norm: Any, *, residual: bool = False) -> nn.Module:
        """An RMS norm's replacement: x -> normalised; with `residual` (x, block) -> (x + block, normalised)."""

    def make_decoder(self, model: Any, rotations: tuple[Tensor, Tensor], ranks: Ranks) -> nn.Module | None:
        """A decoder of the backend's own for a whole supported model; None: `ragspec.numerics.layers.Decoder` runs it."""

    def make_layer(
        self, layer: Any, shape: AttentionShape, rotations: tuple[Tensor, Tensor], index: int
    ) -> LayerModule | None:
        """A decoder layer of the backend's own over given inputs, with keys under `index`; None: products and norms make one."""

    def tokens(self, token_ids: NDArray[np.integer[Any]] | Tensor) -> Tensor:
        """Token ids or row numbers on the device, int64; a tensor is there already."""

    def context(self, pool: KvPool, metadata: AttentionMetadata) -> ForwardContext: ...

    def decode(
        self, decoder: Any, token_ids: Ints | Tensor, pool: KvPool, metadata: AttentionMetadata, taps: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """One forward of `make_decoder`'s or `ragspec.numerics.layers.Decoder`: hidden states [N, H], and by tap."""

    def wait(self) -> None:
        """Until the device has finished everything that it was given."""

    def logits(self, values: Tensor, token_ids: Tensor | None = None, vocab_size: int = 0) -> LogitRows:
        """An output layer's rows as engine and drafters get them; column i is token
        `token_ids[i]` of `vocab_size` (none given: token i).

        Shapes: values float32 [W, V], token_ids int64 [V], rising.
        """

    def best_tokens(self, logits: Tensor, logit_rows: Ints, num_rows: int) -> Tensor:
        """The token of the largest logit of each row of a forward, on the host after the next `wait`; -1 in a row without logits.

        Shapes: logits float32 [W, V], logit_rows int32 [W] -> int64 [num_rows].
        """

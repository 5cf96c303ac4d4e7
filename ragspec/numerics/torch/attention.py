"""Attention over the paged slot pool in plain torch operators; `ragspec.numerics.attention` says which rows see what.

A row gathers the keys and values that it sees in logical order, in blocks of BLOCK positions. Every product has the shape of one
block, and sums run in a tree of additions whose result zeros on the right do not change. So a row's bits depend neither on the
other rows nor on the longest context among them.

Layout of the pool, two flat tensors a layer: [slots, KV heads, padded head_dim] each.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ragspec.numerics.attention import AttentionMetadata, AttentionShape, padded
from ragspec.numerics.kv_cache import KvPool
from ragspec.numerics.torch.transfer import to_device

BLOCK = 64
_GATHERED_BYTES = 2**28
"""Rows are computed in groups whose gathered keys take at most so much memory."""


def tree_sum(x: Tensor) -> Tensor:
    """The sum over the last dimension, neighbours first, then neighbouring pairs, and so on. Shapes: [..., K] -> [..., 1]."""
    while x.shape[-1] > 1:
        x = F.pad(x, (0, x.shape[-1] % 2))
        x = x[..., 0::2] + x[..., 1::2]
    return x


class _VisibleSlots(NamedTuple):
    """What rows see, in logical order. Shapes: slots int64 [N, P], P a multiple of BLOCK; lengths int64 [N, 1]."""

    slots: Tensor
    lengths: Tensor


class TorchForward:
    """See `ragspec.numerics.backend.ForwardContext`."""

    def __init__(self, pool: KvPool, metadata: AttentionMetadata, device: torch.device) -> None:
        self.pool, self.metadata, self._device = pool, metadata, device
        path_lengths = np.diff(metadata.path_start)
        self._num_positions = -(-int((metadata.context_end + path_lengths).max()) // BLOCK) * BLOCK

    @functools.cached_property
    def _slots(self) -> Tensor:
        return self._upload(self.metadata.slots)

    @functools.cached_property
    def _positions(self) -> Tensor:
        return self._upload(self.metadata.positions)

    @functools.cached_property
    def _visible(self) -> _VisibleSlots:
        """Positions below `context_end` are the sequence's context, the next ones the row's path; the rest repeats the last."""
        data = self.metadata
        sequences = np.repeat(np.arange(len(data.row_start) - 1), np.diff(data.row_start))
        slots = self._upload(np.concatenate([data.context_slots, data.path_slots]))
        starts = self._upload(data.context_start[sequences])[:, None]
        ends = self._upload(data.context_end)[:, None]
        paths = self._upload(data.path_start[:-1] + len(data.context_slots))[:, None]
        lengths = ends + self._upload(np.diff(data.path_start))[:, None]
        at = torch.arange(self._num_positions, device=self._device)[None].minimum(lengths - 1)  # [N, P]
        return _VisibleSlots(slots[torch.where(at < ends, starts + at, paths + at - ends)], lengths)

    def attend(
        self, layer: int, qkv: Tensor, shape: AttentionShape, rotations: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        num_rows = len(self.metadata.slots)
        counts = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        queries, new_keys, new_values = qkv[:num_rows].float().split(counts, 1)
        if rotations is not None:
            cos, sin = (table[self._positions][:, None] for table in rotations)
            queries, new_keys = _rotated(queries, cos, sin), _rotated(new_keys, cos, sin)
        widths = (0, padded(shape.head_dim) - shape.head_dim)
        queries, new_keys, new_values = (F.pad(part, widths) for part in (queries, new_keys, new_values))
        room = (self.pool.num_slots, shape.num_kv_heads, padded(shape.head_dim))
        keys, values = self.pool.keys[layer].view(room), self.pool.values[layer].view(room)
        keys[self._slots], values[self._slots] = new_keys.to(keys.dtype), new_values.to(values.dtype)
        size = max(1, _GATHERED_BYTES // (4 * self._num_positions * room[1] * room[2]))
        groups = zip(*(x.split(size) for x in (queries, *self._visible)), strict=True)
        parts = [_attend(rows, keys, values, _VisibleSlots(slots, lengths), shape) for rows, slots, lengths in groups]
        return torch.cat(parts)[..., : shape.head_dim].to(qkv.dtype)

    def _upload(self, array: NDArray[np.integer[Any]]) -> Tensor:
        return to_device(array.astype(np.int64), self._device)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding. Shapes: x [N, heads, head_dim], cos and sin [N, 1, head_dim]."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _attend(queries: Tensor, keys: Tensor, values: Tensor, visible: _VisibleSlots, shape: AttentionShape) -> Tensor:
    """Shapes: queries [N, heads, D], keys and values [slots, KV heads, D] -> [N, heads, D]."""
    num_rows, num_positions = visible.slots.shape
    kv_heads, head_dim = keys.shape[1:]
    # [N, KV heads, blocks, BLOCK, D]
    blocks = (num_rows, num_positions // BLOCK, BLOCK, kv_heads, head_dim)
    seen_keys, seen_values = (x[visible.slots].float().view(blocks).permute(0, 3, 1, 2, 4) for x in (keys, values))
    grouped = queries.view(num_rows, kv_heads, 1, -1, head_dim)  # [N, KV heads, 1, group, D]
    scores = (grouped @ seen_keys.transpose(-1, -2)) * shape.scale  # [N, KV heads, blocks, group, BLOCK]
    if shape.softcap:
        scores = torch.tanh(scores / shape.softcap) * shape.softcap
    at = torch.arange(num_positions, device=scores.device).view(1, -1)
    hidden = at >= visible.lengths
    if shape.window:
        hidden = hidden | (at < visible.lengths - shape.window)
    scores = scores.masked_fill(hidden.view(num_rows, 1, -1, 1, BLOCK), -torch.inf)
    weights = torch.exp(scores - scores.amax((2, 4), keepdim=True))
    # [N, KV heads, group, D, blocks] and [N, KV heads, group, blocks]
    sums, totals = (weights @ seen_values).permute(0, 1, 3, 4, 2), tree_sum(weights)[..., 0].transpose(2, 3)
    return (tree_sum(sums)[..., 0] / tree_sum(totals)).reshape(num_rows, -1, head_dim)

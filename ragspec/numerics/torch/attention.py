"""Attention over the paged slot pool in plain torch operators; `ragspec.numerics.attention` says which rows see what.

A row gathers the keys and values that it sees in logical order, in blocks of BLOCK positions. Every product has the shape of one
block, and sums run in a tree of additions whose result zeros on the right do not change. So a row's bits depend neither on the
other rows nor on the longest context among them.

Layout of the pool, two flat tensors a layer: [slots, KV heads, padded head_dim] each.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ragspec.numerics.attention import AttentionMetadata, AttentionShape, Ints, padded
from ragspec.numerics.kv_cache import KvPool
from ragspec.numerics.torch.transfer import to_device

BLOCK = 64
_NUM_COLUMNS = 6
"""Numbers of a row in the inputs of a forward."""
_GATHERED_BYTES = 2**28
"""Rows are computed in groups whose gathered keys take at most so much memory."""


def power_of_two(number: int) -> int:
    """The least that is not smaller."""
    return 1 << max(0, number - 1).bit_length()


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


class ForwardInputs:
    """The metadata of one forward as the device reads it: rows, context and tiles may be padded, and all arrays are one int64
    array, so that one copy brings them.

    Padded rows (to `num_rows`, and all else to powers of two) write to the pool's spare slot and see it alone.
    `num_positions`: of the longest row, a multiple of BLOCK. Path slots that are on the device already stay there.
    Shapes: slots, positions, starts, ends, paths, lengths [R]; seen [C]: context slots of all sequences, then path slots. Row n
    sees seen[starts[n] :][: ends[n]], then seen[paths[n] :][: lengths[n] - ends[n]].
    """

    def __init__(self, data: AttentionMetadata, spare_slot: int, num_rows: int = 0) -> None:
        sequences = np.repeat(np.arange(len(data.row_start) - 1), np.diff(data.row_start))
        seen = np.concatenate([data.context_slots, _on_host(data.path_slots), [spare_slot]])
        self._paths = (len(data.context_slots), data.path_slots)
        lengths = data.context_end + np.diff(data.path_start)
        self.spare_place = len(seen) - 1
        more_rows = max(0, num_rows - len(data.slots))
        columns = (
            (data.slots, spare_slot),
            (data.positions, 0),
            (data.context_start[sequences], self.spare_place),
            (data.context_end, 1),
            (data.path_start[:-1] + len(data.context_slots), 0),
            (lengths, 1),
        )
        self.num_rows = len(data.slots) + more_rows
        self.num_seen = power_of_two(len(seen)) if num_rows else len(seen)
        rows = [np.concatenate([column, np.full(more_rows, rest)]) for column, rest in columns]
        seen = np.pad(seen, (0, self.num_seen - len(seen)), constant_values=spare_slot)
        num_blocks = -(-int(lengths.max()) // BLOCK)
        self.num_positions = BLOCK * (power_of_two(num_blocks) if num_rows else num_blocks)
        self.packed = np.concatenate([*rows, seen]).astype(np.int64)

    @property
    def shape_key(self) -> tuple[Any, ...]:
        """Which shapes a captured forward of these inputs has."""
        return (self.num_rows, self.num_seen, self.num_positions)

    def sent(self, device: torch.device, token_ids: Ints | Tensor | None = None) -> Tensor:
        """The array on the device, behind the tokens, one for each row, if there are any. Shape: int64 [numbers]."""
        packed, first = self.packed, 0
        if token_ids is not None:
            more_rows, first = np.zeros(self.num_rows - len(token_ids), np.int64), self.num_rows
            packed = np.concatenate([_on_host(token_ids), more_rows, packed])
        sent, (num_context, paths) = to_device(packed, device), self._paths
        if isinstance(token_ids, Tensor):
            sent[: len(token_ids)] = token_ids
        if isinstance(paths, Tensor):
            first += _NUM_COLUMNS * self.num_rows + num_context
            sent[first : first + len(paths)] = paths
        return sent


def _on_host(numbers: Ints | Tensor) -> Ints:
    """Zeros for numbers that the host does not know."""
    return np.zeros(len(numbers), np.int32) if isinstance(numbers, Tensor) else numbers


class TorchForward:
    """See `ragspec.numerics.backend.ForwardContext`. `packed`: the inputs on the device."""

    def __init__(self, pool: KvPool, metadata: AttentionMetadata, inputs: ForwardInputs, packed: Tensor) -> None:
        self.pool, self.metadata = pool, metadata
        self._num_positions, num_rows = inputs.num_positions, inputs.num_rows
        rows, self._seen, self._rest = packed.tensor_split(
            [_NUM_COLUMNS * num_rows, _NUM_COLUMNS * num_rows + inputs.num_seen]
        )
        self._slots, self._positions, self._starts, self._ends, self._paths, self._lengths = rows.split(num_rows)

    @functools.cached_property
    def _visible(self) -> _VisibleSlots:
        lengths, ends = self._lengths[:, None], self._ends[:, None]
        at = torch.arange(self._num_positions, device=lengths.device)[None].minimum(lengths - 1)  # [N, P]
        places = torch.where(at < ends, self._starts[:, None] + at, self._paths[:, None] + at - ends)
        return _VisibleSlots(self._seen[places], lengths)

    def attend(
        self, layer: int, qkv: Tensor, shape: AttentionShape, rotations: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        num_rows = len(self._slots)
        counts = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        queries, new_keys, new_values = qkv[:num_rows].float().split(counts, 1)
        if rotations is not None:
            cos, sin = (table[self._positions][:, None] for table in rotations)
            queries, new_keys = _rotated(queries, cos, sin), _rotated(new_keys, cos, sin)
        widths = (0, padded(shape.head_dim) - shape.head_dim)
        queries, new_keys, new_values = (F.pad(part, widths) for part in (queries, new_keys, new_values))
        room = (-1, shape.num_kv_heads, padded(shape.head_dim))
        keys, values = self.pool.keys[layer].view(room), self.pool.values[layer].view(room)
        keys[self._slots], values[self._slots] = new_keys.to(keys.dtype), new_values.to(values.dtype)
        size = max(1, _GATHERED_BYTES // (4 * self._num_positions * room[1] * room[2]))
        groups = zip(*(x.split(size) for x in (queries, *self._visible)), strict=True)
        parts = [_attend(rows, keys, values, _VisibleSlots(slots, lengths), shape) for rows, slots, lengths in groups]
        return torch.cat(parts)[..., : shape.head_dim].to(qkv.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding. Shapes: x [N, heads, head_dim], cos and sin [N, 1, head_dim]."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _attend(queries: Tensor, keys: Tensor, values: Tensor, visible: _VisibleSlots, shape: AttentionShape) -> Tensor:
    """Shapes: queries [N, heads, D], keys and values [slots, KV heads, D] -> [N, heads, D]."""
    num_rows, num_positions = visible.slots.shape
    kv_heads, head_dim = keys.shape[1:]
    # [N, KV heads, blocks, BLOCK, D]; contiguous, because a product of one row and one block would take another path with strides
    blocks = (num_rows, num_positions // BLOCK, BLOCK, kv_heads, head_dim)
    gathered = (x[visible.slots].float().view(blocks) for x in (keys, values))
    seen_keys, seen_values = (x.permute(0, 3, 1, 2, 4).contiguous() for x in gathered)
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

"""Row-invariant attention over a paged slot pool: one kernel for prefill, decode and verification.

A row (one query position) sees a prefix of its sequence's context and then its own path through the tree. Every sum runs in
the order of the visible *logical* positions, so a row's result is the same alone, in a batch, in any tree, in any order of
slots and in any chunking of the prompt.

Layout of the pool, one pair of arrays a layer, float32 or bfloat16 (held as uint16; arithmetic stays float32):

    keys    [pages, KV heads, head_dim, 16]     a page holds 16 slots; keys transposed, so 16 scores are one vector
    values  [pages, KV heads, 16, head_dim]

Scores are computed page by page in physical order (each is its own chain of additions, so the order does not matter), then
gathered into logical order, where the softmax and the weighted sum run.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ragspec.numerics.cpu.kernels import Buffer, Column, Kind
from ragspec.numerics.cpu.llvm_code import LANES
from ragspec.numerics.cpu.phases import floats_of, make_table
from ragspec.numerics.cpu.product_code import room_for_rows
from ragspec.numerics.cpu.thread_pool import Phases, run

PAGE = LANES
ROWS_A_TILE = 32
"""AttentionMetadata that share one pass over the keys; a tile's scores stay in the cache of a core."""

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
PoolArray = NDArray[np.float32] | NDArray[np.uint16]


class AttentionMetadata(NamedTuple):
    """The rows of one forward and the positions that each row may see. All arrays int32; [a, b) ranges are half-open.

    slots [N]                 slot of each row's key and value
    positions [N]             rotary position of each row
    row_start [B + 1]         rows of sequence b: [row_start[b], row_start[b + 1])
    page_start [B + 1]        pages of sequence b in `pages`
    context_start [B + 1]     context of sequence b in `context_slots` and `context_index`
    context_index             the same positions as an index into the sequence's own pages: rank * 16 + lane
    context_end [N]           how many context positions the row sees: kept positions, known tokens, nodes of the tree's trunk
    path_start [N + 1]        the row's path beside the trunk in `path_slots` and `path_index` (the row itself last; may be empty)

    `path_slots` may be int64 on the device that computes the forward; backend `cpu` has them on the host.
    """

    slots: Ints
    positions: Ints
    row_start: Ints
    pages: Ints
    page_start: Ints
    context_slots: Ints
    context_index: Ints
    context_start: Ints
    context_end: Ints
    path_slots: Ints | Tensor
    path_index: Ints
    path_start: Ints
    tiles: Ints
    """[tiles, 3]: first row, last row (exclusive), sequence; at most ROWS_A_TILE rows each."""


class AttentionShape(NamedTuple):
    """What a layer's attention is: `window` 0 and `softcap` 0.0 mean none; `scale` multiplies the scores."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0


def shape_of(attention: Any, num_ranks: int = 1) -> AttentionShape:
    """One rank's part of a transformers attention layer."""
    config = attention.config
    per_layer = hasattr(attention, "layer_type") or hasattr(attention, "sliding_window")
    window = getattr(attention if per_layer else config, "sliding_window", None)
    num_heads, num_kv_heads = config.num_attention_heads // num_ranks, config.num_key_value_heads // num_ranks
    return AttentionShape(num_heads, num_kv_heads, attention.head_dim, attention.scaling, window or 0)


def padded(head_dim: int) -> int:
    """Head dimension as stored: a multiple of 16, the rest zeros."""
    return -(-head_dim // LANES) * LANES


def make_tiles(row_start: Ints) -> Ints:
    """Cut every sequence's rows into tiles of at most ROWS_A_TILE. Shapes: [B + 1] -> [tiles, 3]."""
    counts = -(-np.diff(row_start) // ROWS_A_TILE)
    owners = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = row_start[:-1][owners] + within * ROWS_A_TILE
    return np.column_stack([first, np.minimum(first + ROWS_A_TILE, row_start[1:][owners]), owners]).astype(np.int32)


def attend(
    qkv: Floats,
    keys: PoolArray,
    values: PoolArray,
    metadata: AttentionMetadata,
    shape: AttentionShape,
    cos: Floats | None = None,
    sin: Floats | None = None,
) -> Floats:
    """Write this step's keys and values into the pool and attend.

    Shapes: qkv float32 [N, heads + 2 KV heads, head_dim] (queries, keys, values; rotated here if `cos` and `sin`
    [positions, head_dim] are given); keys and values: one layer of the pool, flat. Returns float32 [N, heads, head_dim]; rows of
    `qkv` beyond the metadata's are ignored and come back as zeros.
    """
    num_rows = len(metadata.slots)
    out = np.zeros((qkv.shape[0], shape.num_heads, shape.head_dim), np.float32)
    rotations = (cos, sin) if cos is not None else (np.empty((0, shape.head_dim), np.float32),) * 2
    run(
        _phases(shape.window), num_rows, len(metadata.tiles) * shape.num_kv_heads, *_NO_PRODUCTS, rotations,
        floats_of({Buffer.QKV: qkv[:num_rows], Buffer.OWN_HEADS: out[:num_rows]}), _NO_ROWS, *attention_arguments(
            metadata, (keys[None], values[None]), shape
        ),
    )  # fmt: skip
    return out


_NO_PRODUCTS = (np.empty(0, np.int8), np.empty(0, np.float32))
_NO_ROWS = room_for_rows(0, 0)


@functools.cache
def _phases(window: int) -> Phases:
    return make_table(
        [
            {Column.KIND: Kind.ROTATE, Column.LAYER: 0},
            {Column.KIND: Kind.ATTEND, Column.LAYER: 0, Column.WINDOW: window},
        ]
    )


def attention_arguments(
    metadata: AttentionMetadata, pool: tuple[PoolArray, PoolArray], shape: AttentionShape
) -> tuple[Any, ...]:
    """The last arguments of the compiled step. Shapes: pool (keys, values) [layers, numbers of a layer] each."""
    limits = (np.float32(shape.scale), np.float32(shape.softcap))
    return metadata, pool, (shape.num_heads, shape.num_kv_heads), limits, (0,) * (padded(shape.head_dim) // LANES)

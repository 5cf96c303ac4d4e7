"""Triton kernels whose rows do not see their neighbours: product, RMS norm, rotation with KV write, paged tree attention.

Every kernel has one fixed tile and one fixed order of K for any number of rows, so a row's bits depend on the row alone. They run
on CUDA devices, and on CPUs under Triton's interpreter (TRITON_INTERPRET=1), which is how the tests run them.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE_ROWS = 16
"""Rows of a product's tile, and (row, query head) pairs of an attention tile: the least that `tl.dot` takes."""
BLOCK_OUT, BLOCK_IN = 64, 64
BLOCK = 64
"""Positions of an attention block. A row's blocks begin at multiples of it, counted in its own logical positions."""


@triton.jit
def product_kernel(
    x, weight, bias, out, num_rows, num_outputs, num_inputs,
    HAS_BIAS: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """out = x W^T + b, one tile of rows and outputs a program. Shapes: x [N, in], weight [out, in], out [N, out]."""
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    outputs = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row_exists, output_exists = rows < num_rows, outputs < num_outputs
    total = tl.zeros((TILE_ROWS, BLOCK_OUT), tl.float32)
    for start in range(0, num_inputs, BLOCK_IN):
        inputs = start + tl.arange(0, BLOCK_IN)
        input_exists = inputs < num_inputs
        x_at = x + rows[:, None].to(tl.int64) * num_inputs + inputs[None, :]
        w_at = weight + outputs[None, :].to(tl.int64) * num_inputs + inputs[:, None]
        x_tile = tl.load(x_at, mask=row_exists[:, None] & input_exists[None, :], other=0.0)
        w_tile = tl.load(w_at, mask=output_exists[None, :] & input_exists[:, None], other=0.0)
        total = tl.dot(x_tile, w_tile, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=output_exists, other=0.0).to(tl.float32)[None, :]
    out_at = out + rows[:, None].to(tl.int64) * num_outputs + outputs[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=row_exists[:, None] & output_exists[None, :])


@triton.jit
def int8_product_kernel(
    x, weight, out, num_rows, num_outputs, num_inputs,
    TILE_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """out = x W^T in whole numbers, the two bytes of x apart.

    Shapes: x int16 [N, in], weight int8 [out, in], out int64 [N, out].
    """
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    outputs = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row_exists, output_exists = rows < num_rows, outputs < num_outputs
    upper, lower = tl.zeros((TILE_ROWS, BLOCK_OUT), tl.int32), tl.zeros((TILE_ROWS, BLOCK_OUT), tl.int32)
    for start in range(0, num_inputs, BLOCK_IN):
        inputs = start + tl.arange(0, BLOCK_IN)
        input_exists = inputs < num_inputs
        x_at = x + rows[:, None].to(tl.int64) * num_inputs + inputs[None, :]
        w_at = weight + outputs[None, :].to(tl.int64) * num_inputs + inputs[:, None]
        x_tile = tl.load(x_at, mask=row_exists[:, None] & input_exists[None, :], other=0).to(tl.int32)
        w_tile = tl.load(w_at, mask=output_exists[None, :] & input_exists[:, None], other=0)
        high = (x_tile + 128) >> 8
        upper = tl.dot(high.to(tl.int8), w_tile, upper, out_dtype=tl.int32)
        lower = tl.dot((x_tile - high * 256).to(tl.int8), w_tile, lower, out_dtype=tl.int32)
    out_at = out + rows[:, None].to(tl.int64) * num_outputs + outputs[None, :]
    total = upper.to(tl.int64) * 256 + lower.to(tl.int64)
    tl.store(out_at, total, mask=row_exists[:, None] & output_exists[None, :])


@triton.jit
def norm_kernel(x, block, weight, total, out, epsilon, width, HAS_BLOCK: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """One row a program: total = x + block, out = total / rms(total) * weight. Shapes: [N, H], weight [H]."""
    columns = tl.arange(0, BLOCK_WIDTH)
    exists = columns < width
    at = tl.program_id(0).to(tl.int64) * width + columns
    wide = tl.load(x + at, mask=exists, other=0.0).to(tl.float32)
    if HAS_BLOCK:
        rounded = (wide + tl.load(block + at, mask=exists, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=exists)
        wide = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 0) / width + epsilon)
    normalised = (wide * scale).to(out.dtype.element_ty).to(tl.float32)
    result = normalised * tl.load(weight + columns, mask=exists, other=0.0).to(tl.float32)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=exists)


@triton.jit
def rotate_kernel(
    qkv, queries, keys, values, slots, positions, cos, sin, num_heads, num_kv_heads, head_dim, stored_dim,
    ROTATE: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """One row and head a program: rotates queries and keys, writes keys and values to the row's slot of the pool.

    Shapes: qkv [N, heads + 2 KV heads, D], queries [N, heads, D], keys and values [slots, KV heads, stored D], cos and sin
    [positions, D].
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half = head_dim // 2
    columns = tl.arange(0, BLOCK_HALF)
    exists = columns < half
    source = qkv + (row * (num_heads + 2 * num_kv_heads) + head) * head_dim
    first = tl.load(source + columns, mask=exists, other=0.0).to(tl.float32)
    second = tl.load(source + half + columns, mask=exists, other=0.0).to(tl.float32)
    if ROTATE:  # noqa: SIM102  a constant of the compilation beside a number of the device
        if head < num_heads + num_kv_heads:
            angle = tl.load(positions + row) * head_dim + columns
            cos_1, sin_1 = tl.load(cos + angle, mask=exists, other=0.0), tl.load(sin + angle, mask=exists, other=0.0)
            cos_2 = tl.load(cos + angle + half, mask=exists, other=0.0)
            sin_2 = tl.load(sin + angle + half, mask=exists, other=0.0)
            turned = first * cos_1 - second * sin_1
            second = second * cos_2 + first * sin_2
            first = turned
    if head < num_heads:
        target = queries + (row * num_heads + head) * head_dim
        tl.store(target + columns, first.to(queries.dtype.element_ty), mask=exists)
        tl.store(target + half + columns, second.to(queries.dtype.element_ty), mask=exists)
    else:
        stored = tl.load(slots + row) * num_kv_heads
        if head < num_heads + num_kv_heads:
            target = keys + (stored + head - num_heads) * stored_dim
            tl.store(target + columns, first.to(keys.dtype.element_ty), mask=exists)
            tl.store(target + half + columns, second.to(keys.dtype.element_ty), mask=exists)
        else:
            target = values + (stored + head - num_heads - num_kv_heads) * stored_dim
            tl.store(target + columns, first.to(values.dtype.element_ty), mask=exists)
            tl.store(target + half + columns, second.to(values.dtype.element_ty), mask=exists)


@triton.jit
def _attend_block(
    query, keys, values, slots, seen, best, total, sums, scale, softcap, stride, dims, dim_exists,
    HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One block of the softmax. A row that sees nothing of the block keeps its state to the last bit.

    Shapes: query [M, D], slots int64 [BLOCK], seen bool [M, BLOCK]; state: best, total [M], sums [M, D].
    """
    used = tl.max(seen.to(tl.int32), 0) > 0
    at = slots[:, None] * stride + dims[None, :]
    mask = used[:, None] & dim_exists[None, :]
    key, value = tl.load(keys + at, mask=mask, other=0.0), tl.load(values + at, mask=mask, other=0.0)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale  # [M, BLOCK]
    if HAS_SOFTCAP:
        scores = softcap * (2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0)
    scores = tl.where(seen, scores, -1.0e38)
    higher = tl.maximum(best, tl.max(scores, 1))
    weights = tl.where(seen, tl.exp(scores - higher[:, None]), 0.0)
    shrunk = tl.exp(best - higher)
    product = tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return higher, total * shrunk + tl.sum(weights, 1), sums * shrunk[:, None] + product


@triton.jit
def attention_kernel(
    queries, keys, values, out, tiles, seen_slots, context_end, path_start, row_length,
    scale, softcap, window, num_heads, num_kv_heads, head_dim, stored_dim,
    GROUP: tl.constexpr, HAS_SOFTCAP: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """A tile of one sequence's rows and one KV head a program.

    Blocks below `shared_end` hold context alone and are read once for all rows of the tile; later blocks are gathered for each
    row in its own logical order. Both go through one product of one shape, so where a block is read changes no bit.

    Shapes: queries, out [N, heads, D]; tiles int64 [tiles, 5]: first row, last row (exclusive), start of the context in
    `seen_slots`, `shared_end`, end of the longest row. A row's path begins at `path_start` of `seen_slots`.
    """
    tile, kv_head = tiles + tl.program_id(0) * 5, tl.program_id(1)
    first, last, context = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    shared_end, longest = tl.load(tile + 3), tl.load(tile + 4)
    pairs = tl.arange(0, TILE_ROWS)
    rows = first + pairs // GROUP  # the last pairs may be beyond the tile's rows
    exists = (pairs < TILE_ROWS // GROUP * GROUP) & (rows < last)
    rows = tl.where(exists, rows, first)
    dims = tl.arange(0, BLOCK_DIM)
    dim_exists = dims < head_dim
    place = (rows * num_heads + kv_head * GROUP + pairs % GROUP) * head_dim
    at, mask = place[:, None] + dims[None, :], exists[:, None] & dim_exists[None, :]
    query = tl.load(queries + at, mask=mask, other=0.0)
    lengths = tl.load(row_length + rows)
    oldest = tl.where(window > 0, tl.maximum(lengths - window, 0), 0)
    stride = num_kv_heads * stored_dim
    keys, values = keys + kv_head * stored_dim, values + kv_head * stored_dim
    best, total = tl.full((TILE_ROWS,), -1.0e38, tl.float32), tl.zeros((TILE_ROWS,), tl.float32)
    sums = tl.zeros((TILE_ROWS, BLOCK_DIM), tl.float32)
    for start in range(0, shared_end, BLOCK):
        logical = start + tl.arange(0, BLOCK)
        slots = tl.load(seen_slots + context + logical, mask=logical < shared_end, other=0)
        seen = (logical[None, :] < lengths[:, None]) & (logical[None, :] >= oldest[:, None]) & exists[:, None]
        best, total, sums = _attend_block(
            query, keys, values, slots, seen, best, total, sums, scale, softcap, stride, dims, dim_exists, HAS_SOFTCAP
        )
    for start in range(shared_end, longest, BLOCK):
        logical = start + tl.arange(0, BLOCK)
        for row in range(first, last):
            end, path, length = tl.load(context_end + row), tl.load(path_start + row), tl.load(row_length + row)
            in_context, in_path = logical < end, (logical >= end) & (logical < length)
            slots = tl.load(seen_slots + context + logical, mask=in_context, other=0)
            slots += tl.load(seen_slots + path + logical - end, mask=in_path, other=0)
            seen = (logical[None, :] < length) & (logical[None, :] >= oldest[:, None]) & (rows == row)[:, None]
            best, total, sums = _attend_block(
                query, keys, values, slots, seen & exists[:, None], best, total, sums, scale, softcap, stride, dims,
                dim_exists, HAS_SOFTCAP,
            )  # fmt: skip
    total = tl.where(exists, total, 1.0)
    tl.store(out + at, (sums / total[:, None]).to(out.dtype.element_ty), mask=mask)

"""Triton kernels whose rows do not see their neighbours: products, RMS norm, rotation with KV write, paged tree attention.

A product adds its inputs in an order that the weight fixes, attention its positions in chunks at fixed logical places, whatever
tiles and programs share the work. So a row's bits depend on the row alone. Where programs share a sum, each writes its part, and
whoever arrives last adds the parts in their order; `arrivals` counts and adds up no number of a result. The kernels run on CUDA
devices, and on CPUs under Triton's interpreter (TRITON_INTERPRET=1), which is how the tests run them.
"""

import triton
import triton.language as tl

BLOCK = 64
"""Positions of an attention block. A row's blocks begin at multiples of it, counted in its own logical positions."""
LEAST_PAIRS = 16
"""Rows of the smallest tile that `tl.dot` takes."""
NUM_ARRIVALS = 2**16
"""Programs that share a sum of one launch, counted by their tile."""


@triton.jit
def _is_last(arrivals, count):
    """Whether the other programs of this sum have written their parts. Sets the count back for the next launch."""
    tl.debug_barrier()  # all threads of this program have written theirs
    arrived = tl.atomic_add(arrivals, 1, sem="acq_rel")
    is_last = arrived == count - 1
    if is_last:
        tl.store(arrivals, 0)
    return is_last


@triton.jit
def _inputs_added(
    x, weight, rows, outputs, row_exists, output_exists, start, end, num_inputs, total,
    BLOCK_IN: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """total + x W^T over the inputs from `start` to `end`, block by block. Shapes: rows [M], outputs [O], total [M, O]."""
    for first in range(start, end, BLOCK_IN):
        inputs = first + tl.arange(0, BLOCK_IN)
        x_at = x + rows[:, None].to(tl.int64) * num_inputs + inputs[None, :]
        w_at = weight + outputs[None, :].to(tl.int64) * num_inputs + inputs[:, None]
        if IS_EVEN:
            x_tile = tl.load(x_at, mask=row_exists[:, None], other=0.0)
            w_tile = tl.load(w_at, mask=output_exists[None, :], other=0.0)
        else:
            exists = inputs < end
            x_tile = tl.load(x_at, mask=row_exists[:, None] & exists[None, :], other=0.0)
            w_tile = tl.load(w_at, mask=output_exists[None, :] & exists[:, None], other=0.0)
        total = tl.dot(x_tile, w_tile, total, input_precision="ieee")
    return total


@triton.jit
def product_kernel(
    x, weight, bias, out, parts, arrivals, num_rows, num_outputs, num_inputs, part_inputs,
    HAS_BIAS: tl.constexpr, SPLIT: tl.constexpr, IS_EVEN: tl.constexpr,
    TILE_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """out = x W^T + b: a tile of rows and outputs, and one part of the inputs, a program.

    Shapes: x [N, in], weight [out, in], out [N, out], parts float32 [SPLIT, N, out], arrivals int32 [tiles].
    """
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    outputs = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row_exists, output_exists = rows < num_rows, outputs < num_outputs
    mask = row_exists[:, None] & output_exists[None, :]
    at = rows[:, None].to(tl.int64) * num_outputs + outputs[None, :]
    start = tl.program_id(2) * part_inputs
    end = tl.minimum(start + part_inputs, num_inputs)
    total = tl.zeros((TILE_ROWS, BLOCK_OUT), tl.float32)
    total = _inputs_added(
        x, weight, rows, outputs, row_exists, output_exists, start, end, num_inputs, total, BLOCK_IN, IS_EVEN
    )
    if SPLIT > 1:
        size = num_rows.to(tl.int64) * num_outputs
        tl.store(parts + tl.program_id(2) * size + at, total, mask=mask)
        if not _is_last(arrivals + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), SPLIT):
            return
        total = tl.load(parts + at, mask=mask, other=0.0)
        for part in tl.static_range(1, SPLIT):
            total += tl.load(parts + part * size + at, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=output_exists, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gated_product_kernel(
    x, weight, bias, out, num_rows, num_outputs, num_inputs,
    HAS_BIAS: tl.constexpr, IS_EVEN: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """out = silu(gate) * up, each rounded to the type of `out` as products and their activation are.

    Shapes: x [N, in], weight [2 out, in] (gate, then up), bias [2 out], out [N, out].
    """
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    outputs = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row_exists, output_exists = rows < num_rows, outputs < num_outputs
    gate, up = tl.zeros((TILE_ROWS, BLOCK_OUT), tl.float32), tl.zeros((TILE_ROWS, BLOCK_OUT), tl.float32)
    for first in range(0, num_inputs, BLOCK_IN):
        inputs = first + tl.arange(0, BLOCK_IN)
        exists = IS_EVEN | (inputs < num_inputs)
        x_at = x + rows[:, None].to(tl.int64) * num_inputs + inputs[None, :]
        gate_at = weight + outputs[None, :].to(tl.int64) * num_inputs + inputs[:, None]
        up_at = gate_at + num_outputs.to(tl.int64) * num_inputs
        x_tile = tl.load(x_at, mask=row_exists[:, None] & exists[None, :], other=0.0)
        gate = tl.dot(
            x_tile,
            tl.load(gate_at, mask=output_exists[None, :] & exists[:, None], other=0.0),
            gate,
            input_precision="ieee",
        )
        up = tl.dot(
            x_tile, tl.load(up_at, mask=output_exists[None, :] & exists[:, None], other=0.0), up, input_precision="ieee"
        )
    if HAS_BIAS:
        gate += tl.load(bias + outputs, mask=output_exists, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + num_outputs + outputs, mask=output_exists, other=0.0).to(tl.float32)[None, :]
    gate, up = gate.to(out.dtype.element_ty).to(tl.float32), up.to(out.dtype.element_ty).to(tl.float32)
    active = tl.div_rn(gate, 1.0 + tl.exp(-gate)).to(out.dtype.element_ty).to(tl.float32)
    at = out + rows[:, None].to(tl.int64) * num_outputs + outputs[None, :]
    tl.store(at, (active * up).to(out.dtype.element_ty), mask=row_exists[:, None] & output_exists[None, :])


@triton.jit
def quantise_kernel(x, numbers, scales, num_inputs, num_stored, greatest, BLOCK_WIDTH: tl.constexpr):
    """One row a program, as `ragspec.numerics.torch.int8.quantised_rows`.

    Shapes: x [N, in], numbers int16 [N, stored], scales float32 [N].
    """
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_WIDTH)
    wide = tl.load(x + row * num_inputs + columns, mask=columns < num_inputs, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(wide), 0), greatest)
    scale = tl.where(scale == 0.0, 1.0, scale)
    # The addend leaves no bits behind the point, so the sum is rounded to the nearest whole number, halves to the even one.
    rounded = (tl.div_rn(wide, scale) + 12582912.0) - 12582912.0
    tl.store(numbers + row * num_stored + columns, rounded.to(tl.int16), mask=columns < num_stored)
    tl.store(scales + row, scale)


@triton.jit
def int8_product_kernel(
    x, weight, row_scales, scales, bias, out, num_rows, num_outputs, num_inputs,
    HAS_BIAS: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """out = x W^T in whole numbers, the two bytes of x apart, then scaled.

    Shapes: x int16 [N, in], weight int8 [out, in], row_scales float32 [N], scales and bias float32 [out], out [N, out].
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
    total = (upper.to(tl.int64) * 256 + lower.to(tl.int64)).to(tl.float32)
    total = total * tl.load(row_scales + rows, mask=row_exists, other=0.0)[:, None]
    total = total * tl.load(scales + outputs, mask=output_exists, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=output_exists, other=0.0)[None, :]
    out_at = out + rows[:, None].to(tl.int64) * num_outputs + outputs[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=row_exists[:, None] & output_exists[None, :])


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
def chunk_start(chunk):
    """The first logical position of an attention chunk: chunks have 128 positions, from 4,096 on 1,024, from 32,768 on 4,096."""
    middle, far = tl.maximum(tl.minimum(chunk - 32, 28), 0), tl.maximum(chunk - 60, 0)
    return 128 * tl.minimum(chunk, 32) + 1024 * middle + 4096 * far


@triton.jit
def chunk_at(position):
    """The chunk of a logical position."""
    middle, far = tl.maximum(tl.minimum(position - 4096, 28672), 0), tl.maximum(position - 32768, 0)
    return tl.minimum(position, 4096) // 128 + middle // 1024 + far // 4096


def num_chunks(num_positions: int) -> int:
    """Chunks of so many positions, as `chunk_at` has them."""
    last = num_positions - 1
    return 1 + min(last, 4096) // 128 + max(min(last - 4096, 28672), 0) // 1024 + max(last - 32768, 0) // 4096


@triton.jit
def _attend_block(
    query, keys, values, slots, seen, best, total, sums, scale, softcap, stride, dims, dim_exists,
    HAS_SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of the softmax. A row that sees nothing of the block keeps its state to the last bit.

    Weights are added up by a product too: the order of a reduction depends on the tile, that of a product does not.
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
    weights = tl.where(seen, tl.exp(scores - higher[:, None]), 0.0).to(value.dtype)
    shrunk = tl.exp(best - higher)
    product = tl.dot(weights, value, input_precision="ieee")
    mass = tl.max(
        tl.dot(weights, tl.full((BLOCK, 16), 1.0, tl.float32).to(value.dtype), input_precision="ieee"), 1
    )  # 16 equal columns
    return higher, total * shrunk + mass, sums * shrunk[:, None] + product


@triton.jit
def _folded(best, total, sums, more_best, more_total, more_sums):
    """Two states of a softmax as one. A state of nothing changes no bit. Shapes: best, total [M], sums [M, D]."""
    higher = tl.maximum(best, more_best)
    kept, added = tl.exp(best - higher), tl.exp(more_best - higher)
    return higher, total * kept + more_total * added, sums * kept[:, None] + more_sums * added[:, None]


@triton.jit
def attention_kernel(
    queries, keys, values, out, tiles, seen_slots, context_end, path_start, row_length, part_states, part_sums, arrivals,
    scale, softcap, window, num_rows, num_heads, num_kv_heads, head_dim, stored_dim,
    GROUP: tl.constexpr, HAS_SOFTCAP: tl.constexpr, IS_SPREAD: tl.constexpr,
    TILE_PAIRS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """A tile of one sequence's rows and one KV head a program; if the work is spread, one chunk of it.

    A chunk's blocks make one state of the softmax, and the states of a row's chunks are folded in order: by the program that has
    all chunks, or by the last program that has one. Blocks below `shared_end` hold context alone and are read once for all rows
    of the tile; later blocks are gathered for each row in its own logical order. Both go through products of one shape.

    Shapes: queries, out [N, heads, D]; tiles int64 [tiles, 5]: first row, last row (exclusive), start of the context in
    `seen_slots`, `shared_end`, end of the longest row. A row's path begins at `path_start` of `seen_slots`. If spread:
    part_states float32 [chunks, N heads, 2], part_sums float32 [chunks, N heads, BLOCK_DIM].
    """
    tile, kv_head = tiles + tl.program_id(0) * 5, tl.program_id(1)
    first, last, context = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    shared_end, longest = tl.load(tile + 3), tl.load(tile + 4)
    if longest == 0:
        return  # an empty tile
    pairs = tl.arange(0, TILE_PAIRS)
    rows = first + pairs // GROUP  # the last pairs may be beyond the tile's rows
    exists = (pairs < TILE_PAIRS // GROUP * GROUP) & (rows < last)
    rows = tl.where(exists, rows, first)
    dims = tl.arange(0, BLOCK_DIM)
    dim_exists = dims < head_dim
    pair = rows * num_heads + kv_head * GROUP + pairs % GROUP
    at, mask = pair[:, None] * head_dim + dims[None, :], exists[:, None] & dim_exists[None, :]
    query = tl.load(queries + at, mask=mask, other=0.0)
    lengths = tl.load(row_length + rows)
    oldest = tl.where(window > 0, tl.maximum(lengths - window, 0), 0)
    first_chunk, end_chunk = chunk_at(tl.min(oldest, 0)), chunk_at(longest - 1) + 1
    if IS_SPREAD:
        own = first_chunk + tl.program_id(2)
        if own >= end_chunk:
            return
        begin_chunk, stop_chunk = own, own + 1
    else:
        begin_chunk, stop_chunk = first_chunk, end_chunk
    stride = num_kv_heads * stored_dim
    keys, values = keys + kv_head * stored_dim, values + kv_head * stored_dim
    none, nothing = tl.full((TILE_PAIRS,), -1.0e38, tl.float32), tl.zeros((TILE_PAIRS,), tl.float32)
    no_sums = tl.zeros((TILE_PAIRS, BLOCK_DIM), tl.float32)
    all_best, all_total, all_sums = none, nothing, no_sums
    for chunk in range(begin_chunk, stop_chunk):
        begin, finish = chunk_start(chunk), tl.minimum(chunk_start(chunk + 1), longest)
        best, total, sums = none, nothing, no_sums
        for start in range(begin, tl.minimum(shared_end, finish), BLOCK):
            logical = start + tl.arange(0, BLOCK)
            slots = tl.load(seen_slots + context + logical, mask=logical < shared_end, other=0)
            seen = (logical[None, :] < lengths[:, None]) & (logical[None, :] >= oldest[:, None]) & exists[:, None]
            best, total, sums = _attend_block(
                query, keys, values, slots, seen, best, total, sums, scale, softcap, stride, dims, dim_exists,
                HAS_SOFTCAP, BLOCK,
            )  # fmt: skip
        for start in range(tl.maximum(shared_end, begin), finish, BLOCK):
            logical = start + tl.arange(0, BLOCK)
            for row in range(first, last):
                end, path, length = tl.load(context_end + row), tl.load(path_start + row), tl.load(row_length + row)
                in_context, in_path = logical < end, (logical >= end) & (logical < length)
                slots = tl.load(seen_slots + context + logical, mask=in_context, other=0)
                slots += tl.load(seen_slots + path + logical - end, mask=in_path, other=0)
                seen = (logical[None, :] < length) & (logical[None, :] >= oldest[:, None]) & (rows == row)[:, None]
                best, total, sums = _attend_block(
                    query, keys, values, slots, seen & exists[:, None], best, total, sums, scale, softcap, stride, dims,
                    dim_exists, HAS_SOFTCAP, BLOCK,
                )  # fmt: skip
        if IS_SPREAD:
            place = (chunk - first_chunk) * (num_rows * num_heads) + pair
            tl.store(part_states + 2 * place, best, mask=exists)
            tl.store(part_states + 2 * place + 1, total, mask=exists)
            tl.store(part_sums + place[:, None] * BLOCK_DIM + dims[None, :], sums, mask=exists[:, None])
        else:
            all_best, all_total, all_sums = _folded(all_best, all_total, all_sums, best, total, sums)
    if IS_SPREAD:
        count = end_chunk - first_chunk
        if not _is_last(arrivals + tl.program_id(0) * num_kv_heads + kv_head, count):
            return
        for number in range(count):
            place = number * (num_rows * num_heads) + pair
            best = tl.load(part_states + 2 * place, mask=exists, other=-1.0e38)
            total = tl.load(part_states + 2 * place + 1, mask=exists, other=0.0)
            sums = tl.load(part_sums + place[:, None] * BLOCK_DIM + dims[None, :], mask=exists[:, None], other=0.0)
            all_best, all_total, all_sums = _folded(all_best, all_total, all_sums, best, total, sums)
    all_total = tl.where(exists, all_total, 1.0)
    tl.store(out + at, tl.div_rn(all_sums, all_total[:, None]).to(out.dtype.element_ty), mask=mask)

"""Vector code for numba: the inner loops of attention, written as LLVM instructions.

Numba has no fixed-width vectors, and a loop that LLVM vectorises by itself may add in another order beside other code. Here
the width is 16 lanes and the order of every addition is written down, so a result depends on its operands alone:

* `dot_pages`: q . k for 16 slots at once, one fused multiply-add chain over the head dimension in each lane;
* `are_consecutive`, `scale_block`: 16 scores into logical order, where their places follow each other, and their maximum;
* `exp_and_sum`: e^(x - m) in place and its sum, lane = logical position modulo 16, lanes added as one fixed tree;
* `add_weighted`: out += sum_j p[j] V[slot j], one chain over j in each lane, rows side by side.

Machines without 16-lane registers split the vectors; the result is the same. The head dimension reaches them as `vectors`, a
tuple with one element for each 16 columns: its length is part of the type, so loops over it are unrolled.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ragspec.numerics.cpu.llvm_code import (
    INT,
    INT_VECTOR,
    LANES,
    LONG,
    NUM_SUMS,
    VECTOR,
    Loop,
    array_data,
    call,
    constant,
    fma,
    fold,
    load,
    splat,
    store,
)  # fmt: skip

# e^r on |r| <= ln(2)/2: Taylor coefficients of degree 7 to 0 in float32; the error stays under 2 units in the last place.
_EXP_COEFFICIENTS = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)
_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_SMALLEST = -87.0


def make_dot_pages(num_rows: int, num_pages: int) -> Any:
    """Scores of `num_rows` queries against `num_pages` pages of 16 keys.

    Shapes: q float32 flat, row r at `q_offset + r * head_dim`; keys float32 flat, a page is [head_dim, 16] at
    `page_offsets[page_index + p]`; out float32 flat, written at `out_offset + r * out_stride + p * 16`.
    """

    @intrinsic
    def dot_pages(
        typing: Any,
        q: Any,
        q_offset: Any,
        keys: Any,
        page_offsets: Any,
        page_index: Any,
        out: Any,
        out_offset: Any,
        out_stride: Any,
        vectors: Any,
    ) -> Any:
        long = types.int64
        signature = types.void(q, long, keys, page_offsets, long, out, long, long, vectors)
        head_dim = LANES * len(vectors)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            q_data, key_data, out_data = (array_data(context, builder, signature, args, i) for i in (0, 2, 5))
            offset_data = array_data(context, builder, signature, args, 3)
            pages = [
                builder.load(builder.gep(offset_data, [builder.add(args[4], ir.Constant(LONG, p))]))
                for p in range(num_pages)
            ]
            loop = Loop(builder, ir.Constant(LONG, head_dim), [constant(0.0)] * (num_rows * num_pages))
            lane = builder.mul(loop.index, ir.Constant(LONG, LANES))
            key_vectors = [load(builder, key_data, builder.add(page, lane)) for page in pages]
            sums = list[Any]()
            for row in range(num_rows):
                at = builder.add(builder.add(args[1], ir.Constant(LONG, row * head_dim)), loop.index)
                query = splat(builder, builder.load(builder.gep(q_data, [at])))
                for page in range(num_pages):
                    sums.append(fma(builder, query, key_vectors[page], loop.values[row * num_pages + page]))
            totals = loop.close(sums)
            for row in range(num_rows):
                start = builder.add(args[6], builder.mul(args[7], ir.Constant(LONG, row)))
                for page in range(num_pages):
                    store(
                        builder,
                        totals[row * num_pages + page],
                        out_data,
                        builder.add(start, ir.Constant(LONG, page * LANES)),
                    )
            return context.get_dummy_value()

        return signature, generate

    return dot_pages


@intrinsic
def are_consecutive(typing: Any, index: Any, at: Any) -> Any:
    """Whether index[at + i] = index[at] + i for 16 places. Shapes: index int32 flat."""
    signature = types.boolean(index, types.int64)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = array_data(context, builder, signature, args, 0)
        found = builder.load(builder.bitcast(builder.gep(data, [args[1]]), INT_VECTOR.as_pointer()))
        found.align = 4
        first = splat(builder, builder.extract_element(found, ir.Constant(INT, 0)), INT_VECTOR)
        expected = builder.add(first, ir.Constant(INT_VECTOR, list(range(LANES))))
        same = builder.bitcast(builder.icmp_signed("==", found, expected), ir.IntType(LANES))
        return builder.icmp_signed("==", same, ir.Constant(ir.IntType(LANES), -1))

    return signature, generate


@intrinsic
def scale_block(typing: Any, scores: Any, offset: Any, out: Any, at: Any, scale: Any) -> Any:
    """out[at : at + 16] = scores[offset : offset + 16] * scale; returns the greatest of them."""
    signature = types.float32(scores, types.int64, out, types.int64, types.float32)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        score_data, out_data = (array_data(context, builder, signature, args, i) for i in (0, 2))
        scaled = builder.fmul(load(builder, score_data, args[1]), splat(builder, args[4]))
        store(builder, scaled, out_data, args[3])
        return fold(builder, scaled, lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))

    return signature, generate


def exponential(builder: Any, x: Any) -> Any:
    """e^x in each lane for x up to 88; exactly 0 below -87."""
    too_small = builder.fcmp_ordered("<", x, constant(_SMALLEST))
    x = builder.select(too_small, constant(_SMALLEST), x)
    power = call(builder, "llvm.rint.v16f32", VECTOR, builder.fmul(x, constant(_LOG2_E)))
    rest = fma(builder, power, constant(-_LN2_HIGH), x)
    rest = fma(builder, power, constant(-_LN2_LOW), rest)
    value = constant(_EXP_COEFFICIENTS[0])
    for coefficient in _EXP_COEFFICIENTS[1:]:
        value = fma(builder, value, rest, constant(coefficient))
    exponent = builder.add(builder.fptosi(power, INT_VECTOR), ir.Constant(INT_VECTOR, [127] * LANES))
    scale = builder.bitcast(builder.shl(exponent, ir.Constant(INT_VECTOR, [23] * LANES)), VECTOR)
    return builder.select(too_small, constant(0.0), builder.fmul(value, scale))


@intrinsic
def exp_and_sum(typing: Any, scores: Any, offset: Any, num_blocks: Any, maximum: Any) -> Any:
    """Replace x by e^(x - maximum) in `num_blocks` blocks of 16 from `offset` on; returns the sum. -inf becomes exactly 0."""
    signature = types.float32(scores, types.int64, types.int64, types.float32)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = array_data(context, builder, signature, args, 0)
        shift = splat(builder, args[3])
        loop = Loop(builder, args[2], [constant(0.0)])
        at = builder.add(args[1], builder.mul(loop.index, ir.Constant(LONG, LANES)))
        x = builder.fsub(load(builder, data, at), shift)
        value = exponential(builder, x)
        store(builder, value, data, at)
        (total,) = loop.close([builder.fadd(loop.values[0], value)])
        return fold(builder, total, builder.fadd)

    return signature, generate


def make_add_weighted(num_rows: int) -> Any:
    """`out[r] += sum_j p[r, j] * values[slot j]` for `num_rows` rows over the same slots, in the order of j.

    As many columns at a time as registers hold; the slots are read once for each such group of columns.

    Shapes, all flat: row r of p at `p_offset + r * p_stride`, row r of out at
    `out_offset + r * head_dim`; the value of slot s for one head at
    `(s // 16) * page_stride + head_offset + (s % 16) * head_dim`.
    """

    @intrinsic
    def add_weighted(
        typing: Any,
        p: Any,
        p_offset: Any,
        p_stride: Any,
        values: Any,
        slots: Any,
        slot_offset: Any,
        count: Any,
        page_stride: Any,
        head_offset: Any,
        out: Any,
        out_offset: Any,
        vectors: Any,
    ) -> Any:
        long = types.int64
        signature = types.void(p, long, long, values, slots, long, long, long, long, out, long, vectors)
        num_vectors, head_dim = len(vectors), LANES * len(vectors)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            p_data, value_data, slot_data, out_data = (
                array_data(context, builder, signature, args, i) for i in (0, 3, 4, 9)
            )
            num_beside = max(1, NUM_SUMS // num_rows)
            for first in range(0, num_vectors, num_beside):
                columns = range(first, min(first + num_beside, num_vectors))
                at = [
                    builder.add(args[10], ir.Constant(LONG, row * head_dim + column * LANES))
                    for row in range(num_rows)
                    for column in columns
                ]
                loop = Loop(builder, args[6], [load(builder, out_data, offset) for offset in at])
                slot = builder.zext(builder.load(builder.gep(slot_data, [builder.add(args[5], loop.index)])), LONG)
                page = builder.mul(builder.lshr(slot, ir.Constant(LONG, 4)), args[7])
                lane = builder.mul(builder.and_(slot, ir.Constant(LONG, LANES - 1)), ir.Constant(LONG, head_dim))
                start = builder.add(builder.add(page, args[8]), lane)
                values_of = [
                    load(builder, value_data, builder.add(start, ir.Constant(LONG, column * LANES)))
                    for column in columns
                ]
                sums = list[Any]()
                for row in range(num_rows):
                    of_row = builder.add(args[1], builder.mul(args[2], ir.Constant(LONG, row)))
                    weight_at = builder.add(of_row, loop.index)
                    weight = splat(builder, builder.load(builder.gep(p_data, [weight_at])))
                    for vector in values_of:
                        sums.append(fma(builder, weight, vector, loop.values[len(sums)]))
                for total, offset in zip(loop.close(sums), at, strict=True):
                    store(builder, total, out_data, offset)
            return context.get_dummy_value()

        return signature, generate

    return add_weighted

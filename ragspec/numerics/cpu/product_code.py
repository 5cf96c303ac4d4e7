"""Vector code of the int8 product: 16-bit activations times 8-bit weights, added up in 32 bits without rounding.

An integer sum is exact, so its bits depend on no order: any number of rows, tiling, thread count or instruction set gives the
same product. `INSTRUCTION_SETS` has the multiply-adds of x86 processors; others get the same sums from plain vectors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ragspec.numerics.cpu.attention_code import exponential
from ragspec.numerics.cpu.llvm_code import (
    FLOAT,
    INT,
    INT_VECTOR,
    LANES,
    LONG,
    VECTOR,
    Loop,
    array_data,
    constant,
    fold,
    has_feature,
    load,
    splat,
    store,
)  # fmt: skip

_BYTE, _SHORT = ir.IntType(8), ir.IntType(16)
_SHORTS = ir.VectorType(_SHORT, LANES)
_LEAST_SUMS = 8
"""So many sums run side by side at least: one alone would wait for its last multiply-add, four to five cycles each."""
_LARGEST = 87.0
"""e^x of more is not needed: its sigmoid rounds to 0 or 1 in float32."""
_ROUNDING, _ROUNDING_BITS = 1.5 * 2.0**23, 0x4B400000
"""Added to a small number, its last bits are the nearest integer."""


def _plain(builder: Any, sums: Any, x: Any, y: Any) -> Any:
    order = [list(range(first, x.type.count, 2)) for first in (0, 1)]

    def every_other(vector: Any, first: int) -> Any:
        mask = ir.Constant(ir.VectorType(INT, len(order[first])), order[first])
        return builder.sext(builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask), sums.type)

    even, odd = (builder.mul(every_other(x, first), every_other(y, first)) for first in (0, 1))
    return builder.add(sums, builder.add(even, odd))


def _multiply_then_add(name: str) -> Callable[..., Any]:
    def multiply_add(builder: Any, sums: Any, x: Any, y: Any) -> Any:
        return builder.add(sums, _call(builder, name, sums.type, x, y))

    return multiply_add


def _dot_product(builder: Any, sums: Any, x: Any, y: Any) -> Any:
    """One instruction, which does not saturate."""
    name = "llvm.x86.avx512.vpdpwssd.512"
    return _call(builder, name, sums.type, sums, builder.bitcast(x, sums.type), builder.bitcast(y, sums.type))


def _call(builder: Any, name: str, result: Any, *values: Any) -> Any:
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), values)


class InstructionSet(NamedTuple):
    """`multiply_add(builder, sums, x, y)`: sums[i] + x[2i] * y[2i] + x[2i + 1] * y[2i + 1] in 32 bits, for `num_sums` sums.

    `num_rows`: so many rows are multiplied at a time, as the registers hold sums for; in falling order, the last is 1.
    """

    feature: str | None
    num_sums: int
    num_rows: tuple[int, ...]
    multiply_add: Callable[..., Any]


INSTRUCTION_SETS = {
    "avx512_vnni": InstructionSet("avx512vnni", 16, (16, 8, 4, 2, 1), _dot_product),
    "avx512": InstructionSet("avx512bw", 16, (16, 8, 4, 2, 1), _multiply_then_add("llvm.x86.avx512.pmaddw.d.512")),
    "avx2": InstructionSet("avx2", 8, (6, 4, 2, 1), _multiply_then_add("llvm.x86.avx2.pmadd.wd")),
    "plain": InstructionSet(None, 8, (6, 4, 2, 1), _plain),
}
"""By name, the fastest first. A processor with the feature (LLVM's name) has the instructions."""

FASTEST = next(each for each in INSTRUCTION_SETS.values() if each.feature is None or has_feature(each.feature))
"""The instructions of this processor."""


def make_multiply(num_rows: int, instructions: InstructionSet = FASTEST) -> Any:
    """Products of `num_rows` rows with one block of 16 outputs, times the scales of row and output.

    Shapes, all flat: x int16, row r at `x_offset + r * num_inputs`; weight int8 [num_inputs / 2, 16, 2] at `weight_offset`;
    scales float32 [16] at `scale_offset`; row_scales float32 [num_rows] at `first_row`; out float32, row r at
    `out_offset + r * out_stride`.
    """
    sums_type = ir.VectorType(INT, instructions.num_sums)
    num_parts = LANES // instructions.num_sums
    unrolled = max(1, _LEAST_SUMS // (num_rows * num_parts))

    @intrinsic
    def multiply(
        typing: Any,
        x: Any,
        x_offset: Any,
        weight: Any,
        weight_offset: Any,
        num_inputs: Any,
        scales: Any,
        scale_offset: Any,
        row_scales: Any,
        first_row: Any,
        out: Any,
        out_offset: Any,
        out_stride: Any,
    ) -> Any:
        long = types.int64
        signature = types.void(x, long, weight, long, long, scales, long, row_scales, long, out, long, long)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            x_data, weight_data, scale_data, row_data, out_data = (
                array_data(context, builder, signature, args, i) for i in (0, 2, 5, 7, 9)
            )
            pairs = builder.bitcast(x_data, INT.as_pointer())
            num_pairs = builder.lshr(args[4], ir.Constant(LONG, 1))
            first_pair = builder.lshr(args[1], ir.Constant(LONG, 1))
            zero = ir.Constant(sums_type, [0] * instructions.num_sums)
            turns = builder.lshr(num_pairs, ir.Constant(LONG, unrolled.bit_length() - 1))
            loop = Loop(builder, turns, [zero] * (unrolled * num_rows * num_parts))
            sums = list[Any]()
            for turn in range(unrolled):
                index = builder.add(builder.mul(loop.index, ir.Constant(LONG, unrolled)), ir.Constant(LONG, turn))
                start = builder.add(args[3], builder.mul(index, ir.Constant(LONG, 2 * LANES)))
                parts = [_load_weights(builder, weight_data, start, part, sums_type.count) for part in range(num_parts)]
                for row in range(num_rows):
                    offset = builder.add(first_pair, builder.mul(num_pairs, ir.Constant(LONG, row)))
                    pair = builder.load(builder.gep(pairs, [builder.add(offset, index)]))
                    pair.align = 2
                    both = builder.bitcast(splat(builder, pair, sums_type), parts[0].type)
                    for weights in parts:
                        sums.append(instructions.multiply_add(builder, loop.values[len(sums)], both, weights))
            totals, num_own = loop.close(sums), num_rows * num_parts
            totals = [functools.reduce(builder.add, totals[own::num_own]) for own in range(num_own)]
            output_scales = load(builder, scale_data, args[6])
            for row in range(num_rows):
                total = _join(builder, totals[num_parts * row : num_parts * (row + 1)])
                scaled = builder.fmul(builder.sitofp(total, VECTOR), output_scales)
                row_scale = builder.load(builder.gep(row_data, [builder.add(args[8], ir.Constant(LONG, row))]))
                at = builder.add(args[10], builder.mul(args[11], ir.Constant(LONG, row)))
                store(builder, builder.fmul(scaled, splat(builder, row_scale)), out_data, at)
            return context.get_dummy_value()

        return signature, generate

    return multiply


def _load_weights(builder: Any, base: Any, start: Any, part: int, num_outputs: int) -> Any:
    """The weights of the block's outputs [part * num_outputs, ...) for one pair of inputs, as 16-bit numbers."""
    at = builder.gep(base, [builder.add(start, ir.Constant(LONG, 2 * num_outputs * part))])
    weights = builder.load(builder.bitcast(at, ir.VectorType(_BYTE, 2 * num_outputs).as_pointer()))
    weights.align = 1
    return builder.sext(weights, ir.VectorType(_SHORT, 2 * num_outputs))


def _join(builder: Any, parts: list[Any]) -> Any:
    order = ir.Constant(INT_VECTOR, list(range(LANES)))
    return parts[0] if len(parts) == 1 else builder.shuffle_vector(parts[0], parts[1], order)


@intrinsic
def gate_block(typing: Any, gate: Any, gate_offset: Any, up: Any, up_offset: Any, out: Any, out_offset: Any) -> Any:
    """out = silu(gate) * up for 16 columns. Shapes: float32 flat, 16 numbers at each offset."""
    long = types.int64
    signature = types.void(gate, long, up, long, out, long)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        gate_data, up_data, out_data = (array_data(context, builder, signature, args, i) for i in (0, 2, 4))
        x = load(builder, gate_data, args[1])
        negative = builder.fsub(constant(0.0), x)
        bounded = builder.select(builder.fcmp_ordered(">", negative, constant(_LARGEST)), constant(_LARGEST), negative)
        sigmoid = builder.fdiv(constant(1.0), builder.fadd(constant(1.0), exponential(builder, bounded)))
        silu = builder.fmul(x, sigmoid)
        store(builder, builder.fmul(silu, load(builder, up_data, args[3])), out_data, args[5])
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def quantise_row(typing: Any, x: Any, offset: Any, count: Any, most: Any, out: Any, out_offset: Any) -> Any:
    """Round 16-lane blocks of a row to int16 with the scale max|x| / most; returns the scale (NaN if max|x| is not finite).

    Shapes: x float32 flat, `count` numbers at `offset`, a multiple of 16; out int16 flat.
    """
    long = types.int64
    signature = types.float32(x, long, long, types.float32, out, long)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data, out_data = (array_data(context, builder, signature, args, i) for i in (0, 4))
        num_blocks = builder.lshr(args[2], ir.Constant(LONG, 4))
        top = _largest(builder, data, args[1], num_blocks)
        is_finite = builder.fcmp_ordered("<", top, ir.Constant(FLOAT, 3.4e38))
        usable = builder.and_(is_finite, builder.fcmp_ordered(">", top, ir.Constant(FLOAT, 1e-30)))
        factor = builder.select(usable, builder.fdiv(args[3], top), ir.Constant(FLOAT, 0.0))
        factors = splat(builder, factor)
        loop = Loop(builder, num_blocks, [])
        at = builder.mul(loop.index, ir.Constant(LONG, LANES))
        scaled = builder.fmul(load(builder, data, builder.add(args[1], at)), factors)
        bits = builder.bitcast(builder.fadd(scaled, constant(_ROUNDING)), INT_VECTOR)
        numbers = builder.trunc(builder.sub(bits, ir.Constant(INT_VECTOR, [_ROUNDING_BITS] * LANES)), _SHORTS)
        place = builder.bitcast(builder.gep(out_data, [builder.add(args[5], at)]), _SHORTS.as_pointer())
        builder.store(numbers, place).align = 2
        loop.close([])
        scale = builder.select(usable, builder.fdiv(top, args[3]), ir.Constant(FLOAT, 0.0))
        return builder.select(is_finite, scale, ir.Constant(FLOAT, float("nan")))

    return signature, generate


def _largest(builder: Any, data: Any, offset: Any, num_blocks: Any) -> Any:
    """max |x| over blocks of 16. Compares bits: without the sign they are ordered like the numbers, and NaN is the greatest."""
    no_sign = ir.Constant(INT_VECTOR, [0x7FFFFFFF] * LANES)
    loop = Loop(builder, num_blocks, [ir.Constant(INT_VECTOR, [0] * LANES)])
    at = builder.add(offset, builder.mul(loop.index, ir.Constant(LONG, LANES)))
    bits = builder.and_(builder.bitcast(load(builder, data, at), INT_VECTOR), no_sign)
    (tops,) = loop.close([_greater(builder, loop.values[0], bits)])
    return builder.bitcast(fold(builder, tops, lambda a, b: _greater(builder, a, b)), FLOAT)


def _greater(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_signed(">", a, b), a, b)

"""Vector code of the int8 product: 16-bit activations times 8-bit weights, added up in 32 bits without rounding.

An integer sum is exact, so its bits depend on no order: any number of rows, tiling, thread count or instruction set gives the
same product. `INSTRUCTION_SETS` has the multiply-adds of x86 processors; others get the same sums from plain vectors.

Activations are rounded so that nearly all of them fit 8 bits. Instructions that multiply bytes take those, and what the few
outliers exceed 8 bits by is added one number at a time: twice as fast as 16-bit products, with the same sums.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ragspec.numerics.compiled import inner
from ragspec.numerics.cpu.attention_code import exponential
from ragspec.numerics.cpu.llvm_code import (
    FLOAT,
    INT,
    INT_VECTOR,
    LANES,
    LONG,
    SHORT,
    SHORT_VECTOR,
    VECTOR,
    Loop,
    array_data,
    call,
    constant,
    fold,
    has_feature,
    load,
    splat,
    store,
)  # fmt: skip

_BYTE = ir.IntType(8)
_LEAST_SUMS = 8
"""So many sums run side by side at least: one alone would wait for its last multiply-add, four to five cycles each."""
_TYPICAL = 6
"""So many times the mean of |x|, zeros left out, fits 8 bits. Of a language model's activations one in a hundred is greater."""
_LARGEST = 87.0
"""e^x of more is not needed: its sigmoid rounds to 0 or 1 in float32."""
_ROUNDING, _ROUNDING_BITS = 1.5 * 2.0**23, 0x4B400000
"""Added to a small number, its last bits are the nearest integer."""


def _plain(builder: Any, sums: Any, x: Any, weights: Any) -> Any:
    def every_other(vector: Any, first: int) -> Any:
        mask = ir.Constant(ir.VectorType(INT, sums.type.count), list(range(first, vector.type.count, 2)))
        return builder.sext(builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask), sums.type)

    shorts = builder.bitcast(x, weights.type)
    even, odd = (builder.mul(every_other(shorts, first), every_other(weights, first)) for first in (0, 1))
    return builder.add(sums, builder.add(even, odd))


def _multiply_then_add(name: str) -> Callable[..., Any]:
    def multiply_add(builder: Any, sums: Any, x: Any, weights: Any) -> Any:
        return builder.add(sums, call(builder, name, sums.type, builder.bitcast(x, weights.type), weights))

    return multiply_add


def _bytes_dot_product(builder: Any, sums: Any, x: Any, weights: Any) -> Any:
    """Unsigned bytes of weights times signed bytes of x; does not saturate."""
    return call(builder, "llvm.x86.avx512.vpdpbusd.512", sums.type, sums, builder.bitcast(weights, sums.type), x)


class InstructionSet(NamedTuple):
    """How a processor adds products of activations and weights to 32-bit sums.

    `feature`: LLVM's name of what the processor must have. `num_sums`: of a register. `num_rows`: so many rows are a tile,
    multiplied at a time, as the registers hold sums for, in falling order; the last is 1. `num_inputs` 2:
    `multiply_add(builder, sums, x, weights)` takes 16-bit pairs; 4: it takes low bytes of activations and weights plus 128,
    and outliers are added after it.
    """

    feature: str | None
    num_sums: int
    num_rows: tuple[int, ...]
    num_inputs: int
    multiply_add: Callable[..., Any]


INSTRUCTION_SETS = {
    "avx512_vnni": InstructionSet("avx512vnni", 16, (16, 8, 4, 2, 1), 4, _bytes_dot_product),
    "avx512": InstructionSet("avx512bw", 16, (16, 8, 4, 2, 1), 2, _multiply_then_add("llvm.x86.avx512.pmaddw.d.512")),
    "avx2": InstructionSet("avx2", 8, (8, 4, 2, 1), 2, _multiply_then_add("llvm.x86.avx2.pmadd.wd")),
    "plain": InstructionSet(None, 8, (8, 4, 2, 1), 2, _plain),
}
"""By name, the fastest first."""

FASTEST = next(each for each in INSTRUCTION_SETS.values() if each.feature is None or has_feature(each.feature))
"""The instructions of this processor."""


class RoundedRows(NamedTuple):
    """Activations in whole numbers, tile by tile as the product multiplies them, with their outliers beside.

    Shapes, of N rows: tiles int32 flat, each of R rows [num_inputs / g, R], an element g numbers of a row: bytes or 16-bit
    numbers; sums int32 [N], of a row's numbers; num_outliers int32 [N]; outliers int32 [N, most, 2], (column, what a number
    exceeds 8 bits by). Where products take 16-bit numbers, the last three are not used.

    Why tiles: rows apart from each other are as many streams of memory, of which processors follow fewer than 16.
    """

    tiles: Any
    sums: Any
    num_outliers: Any
    outliers: Any


def room_for_rows(num_rows: int, width: int, instructions: InstructionSet = FASTEST) -> RoundedRows:
    """Room for rows of up to `width` numbers. Less than one number in `_TYPICAL` can be greater than that many times the mean."""
    return RoundedRows(
        tiles=np.empty(num_rows * width // instructions.num_inputs, np.int32),
        sums=np.empty(num_rows, np.int32),
        num_outliers=np.empty(num_rows, np.int32),
        outliers=np.empty((num_rows, width // _TYPICAL + 1, 2), np.int32),
    )


def make_multiply(instructions: InstructionSet = FASTEST) -> Any:
    """Products of quantised rows with one block of 16 outputs, times the scales of row and output.

    Shapes, flat unless `RoundedRows` says otherwise, of `num_rows` rows: weight int8 [num_inputs / g, 16, g] at `weight_offset`,
    g the instructions' inputs; scales float32 [16] at `scale_offset`; row_scales float32 [N]; out float32, row r at
    `out_offset + r * out_stride`.
    """

    @intrinsic
    def multiply(
        typing: Any,
        rows: Any,
        num_rows: Any,
        weight: Any,
        weight_offset: Any,
        num_inputs: Any,
        scales: Any,
        scale_offset: Any,
        row_scales: Any,
        out: Any,
        out_offset: Any,
        out_stride: Any,
    ) -> Any:
        long = types.int64
        signature = types.void(rows, long, weight, long, long, scales, long, row_scales, out, long, long)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            arrays = quantised_arrays(context, builder, signature.args[0], args[0])
            weight_data, scale_data, row_data, out_data = (
                array_data(context, builder, signature, args, i) for i in (2, 5, 7, 8)
            )
            num_groups = builder.udiv(args[4], ir.Constant(LONG, instructions.num_inputs))
            output_scales = load(builder, scale_data, args[6])
            outliers = builder.extract_value(args[0], len(arrays) - 1)
            shape = context.make_array(signature.args[0].types[-1])(context, builder, outliers).shape
            stride = builder.extract_value(shape, 1)
            following = ir.Constant(LONG, 0)
            for size in instructions.num_rows:
                num_tiles = builder.udiv(builder.sub(args[1], following), ir.Constant(LONG, size))
                loop = Loop(builder, num_tiles, [following])
                tile = builder.gep(arrays.tiles, [builder.mul(loop.values[0], num_groups)])
                weights = builder.gep(weight_data, [args[3]])
                totals = _sums_of_tile(builder, tile, size, weights, num_groups, instructions)
                for number, total in enumerate(totals):
                    row = builder.add(loop.values[0], ir.Constant(LONG, number))
                    if instructions.num_inputs == 4:
                        total = _add_outliers(builder, total, arrays, row, stride, weights)
                    scaled = builder.fmul(builder.sitofp(total, VECTOR), output_scales)
                    scaled = builder.fmul(scaled, splat(builder, builder.load(builder.gep(row_data, [row]))))
                    store(builder, scaled, out_data, builder.add(args[9], builder.mul(args[10], row)))
                (following,) = loop.close([builder.add(loop.values[0], ir.Constant(LONG, size))])
            return context.get_dummy_value()

        return signature, generate

    return multiply


def _sums_of_tile(
    builder: Any, tile: Any, size: int, weights: Any, num_groups: Any, instructions: InstructionSet
) -> list[Any]:
    """The sums of each row of a tile for the block's 16 outputs."""
    num_sums, group = instructions.num_sums, instructions.num_inputs
    sums_type, num_parts = ir.VectorType(INT, num_sums), LANES // num_sums
    unrolled = min(LANES // group, max(1, _LEAST_SUMS // (size * num_parts)))  # inputs are a multiple of 16
    zero = ir.Constant(sums_type, [0] * num_sums)
    turns = builder.udiv(num_groups, ir.Constant(LONG, unrolled))
    loop = Loop(builder, turns, [zero] * (unrolled * size * num_parts))
    sums = list[Any]()
    for turn in range(unrolled):
        index = builder.add(builder.mul(loop.index, ir.Constant(LONG, unrolled)), ir.Constant(LONG, turn))
        start = builder.mul(index, ir.Constant(LONG, group * LANES))
        parts = [_load_weights(builder, weights, start, part, instructions) for part in range(num_parts)]
        first = builder.mul(index, ir.Constant(LONG, size))
        for row in range(size):
            at = builder.gep(tile, [builder.add(first, ir.Constant(LONG, row))])
            numbers = splat(builder, builder.load(at), sums_type)
            for part in parts:
                sums.append(instructions.multiply_add(builder, loop.values[len(sums)], numbers, part))
    totals, num_own = loop.close(sums), size * num_parts
    totals = [functools.reduce(builder.add, totals[own::num_own]) for own in range(num_own)]
    return [_join(builder, totals[num_parts * row : num_parts * (row + 1)]) for row in range(size)]


def _load_weights(builder: Any, base: Any, start: Any, part: int, instructions: InstructionSet) -> Any:
    """The weights of a part of the block's outputs for one group of inputs: bytes as they are, or as 16-bit numbers."""
    count = instructions.num_sums * instructions.num_inputs
    at = builder.gep(base, [builder.add(start, ir.Constant(LONG, count * part))])
    weights = builder.load(builder.bitcast(at, ir.VectorType(_BYTE, count).as_pointer()))
    weights.align = 1
    return weights if instructions.num_inputs == 4 else builder.sext(weights, ir.VectorType(SHORT, count))


def _add_outliers(builder: Any, total: Any, rows: RoundedRows, row: Any, stride: Any, weight: Any) -> Any:
    """The rest of a row's products. Weights hold 128 more than they mean, so 128 times the row's sum is too much."""
    row_sum = builder.load(builder.gep(rows.sums, [row]))
    total = builder.sub(total, splat(builder, builder.shl(row_sum, ir.Constant(INT, 7)), INT_VECTOR))
    count = builder.sext(builder.load(builder.gep(rows.num_outliers, [row])), LONG)
    pairs = builder.mul(builder.mul(row, stride), ir.Constant(LONG, 2))
    loop = Loop(builder, count, [total])
    at = builder.add(pairs, builder.mul(loop.index, ir.Constant(LONG, 2)))
    column = builder.load(builder.gep(rows.outliers, [at]))
    rest = builder.load(builder.gep(rows.outliers, [builder.add(at, ir.Constant(LONG, 1))]))
    four = builder.sext(builder.and_(column, ir.Constant(INT, -4)), LONG)
    place = builder.gep(weight, [builder.mul(four, ir.Constant(LONG, LANES))])
    weights = builder.load(builder.bitcast(place, INT_VECTOR.as_pointer()))
    weights.align = 1
    shift = builder.shl(builder.and_(column, ir.Constant(INT, 3)), ir.Constant(INT, 3))
    own = builder.lshr(weights, splat(builder, shift, INT_VECTOR))
    own = builder.and_(own, ir.Constant(INT_VECTOR, [255] * LANES))
    product = builder.mul(own, splat(builder, rest, INT_VECTOR))
    (total,) = loop.close([builder.add(loop.values[0], product)])
    return total


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


def make_quantise(instructions: InstructionSet = FASTEST) -> Any:
    """Compiled code that rounds a row to whole numbers: `quantise(x, offset, width, most, rows, row, num_rows, spare)`.

    It writes the row's part of `rows`, a `RoundedRows` of `num_rows` rows, and returns its scale (NaN if max|x| is not finite).
    The scale turns `_TYPICAL` times the mean of |x|, zeros left out, into the greatest byte, or max|x| into the number `most`
    where that needs more.

    Shapes: x float32 flat, `width` numbers at `offset`, a multiple of 16; spare int16 [width + width / 16], is overwritten.
    """
    group, sizes = instructions.num_inputs, instructions.num_rows
    round_row = _make_round_row(group)

    @inner
    def quantise(x: Any, offset: int, width: int, most: Any, rows: Any, row: int, num_rows: int, spare: Any) -> Any:
        first, size = _tile_of(row, num_rows, sizes)
        tile = (first * (width // group) + row - first, size)
        scale = round_row(x, offset, width, most, rows, row, tile, spare)
        if group == 4:
            _note_outliers(rows, row, width, spare)
        return scale

    return quantise


@inner
def _tile_of(row: int, num_rows: int, sizes: Any) -> Any:
    """The first row of a row's tile, and how many rows it has."""
    first = 0
    for size in sizes:
        last = first + (num_rows - first) // size * size
        if row < last:
            return row - (row - first) % size, size
        first = last
    return row, 1


def _make_round_row(group: int) -> Any:
    """Shapes: tile (place, stride), the row's groups of `group` numbers are at place, place + stride, ... of the tiles; spare as
    of `quantise`: for groups of 4 the numbers in 16 bits, and behind them a bit for every number that leaves 8 bits."""

    @intrinsic
    def round_row(
        typing: Any, x: Any, start: Any, count: Any, most: Any, rows: Any, row: Any, tile: Any, spare: Any
    ) -> Any:
        long = types.int64
        signature = types.float32(x, long, long, types.float32, rows, long, tile, spare)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data, spare_data = (array_data(context, builder, signature, args, i) for i in (0, 7))
            place, stride = (builder.extract_value(args[6], number) for number in (0, 1))
            arrays = quantised_arrays(context, builder, signature.args[4], args[4])
            num_blocks = builder.lshr(args[2], ir.Constant(LONG, 4))
            top, mean = _greatest_and_mean(builder, data, args[1], num_blocks)
            is_finite = builder.fcmp_ordered("<", top, ir.Constant(FLOAT, 3.4e38))
            usable = builder.and_(is_finite, builder.fcmp_ordered(">", top, ir.Constant(FLOAT, 1e-30)))
            scale, least = builder.fmul(mean, ir.Constant(FLOAT, _TYPICAL / 127)), builder.fdiv(top, args[3])
            scale = builder.select(builder.fcmp_ordered(">", scale, least), scale, least)
            factor = builder.select(usable, builder.fdiv(ir.Constant(FLOAT, 1.0), scale), ir.Constant(FLOAT, 0.0))
            factors = splat(builder, factor)
            loop = Loop(builder, num_blocks, [ir.Constant(INT_VECTOR, [0] * LANES)])
            at = builder.mul(loop.index, ir.Constant(LONG, LANES))
            scaled = builder.fmul(load(builder, data, builder.add(args[1], at)), factors)
            bits = builder.bitcast(builder.fadd(scaled, constant(_ROUNDING)), INT_VECTOR)
            whole = builder.sub(bits, ir.Constant(INT_VECTOR, [_ROUNDING_BITS] * LANES))
            whole = builder.select(usable, whole, ir.Constant(INT_VECTOR, [0] * LANES))  # NaN has bits of its own
            low, shorts = _limited(builder, whole), builder.trunc(whole, SHORT_VECTOR)
            if group == 4:
                numbers = builder.bitcast(builder.gep(spare_data, [at]), SHORT_VECTOR.as_pointer())
                builder.store(shorts, numbers).align = 2
                leaves = builder.bitcast(builder.icmp_signed("!=", low, whole), SHORT)
                builder.store(leaves, builder.gep(spare_data, [builder.add(args[2], loop.index)]))
            num_groups = LANES // group
            packed = shorts if group == 2 else builder.trunc(low, ir.VectorType(_BYTE, LANES))
            packed = builder.bitcast(packed, ir.VectorType(INT, num_groups))
            first = builder.mul(loop.index, ir.Constant(LONG, num_groups))
            for number in range(num_groups):
                to = builder.add(place, builder.mul(stride, builder.add(first, ir.Constant(LONG, number))))
                element = builder.extract_element(packed, ir.Constant(INT, number))
                builder.store(element, builder.gep(arrays.tiles, [to]))
            (sums,) = loop.close([builder.add(loop.values[0], whole)])
            builder.store(fold(builder, sums, builder.add), builder.gep(arrays.sums, [args[5]]))
            scale = builder.select(usable, scale, ir.Constant(FLOAT, 0.0))
            return builder.select(is_finite, scale, ir.Constant(FLOAT, float("nan")))

        return signature, generate

    return round_row


def quantised_arrays(context: Any, builder: Any, kind: Any, rows: Any) -> RoundedRows:
    """The data of each array of a `RoundedRows`."""
    parts = (builder.extract_value(rows, number) for number in range(len(kind.types)))
    return RoundedRows(
        *(context.make_array(each)(context, builder, part).data for each, part in zip(kind.types, parts, strict=True))
    )


def _limited(builder: Any, numbers: Any) -> Any:
    for limit, is_out in ((127, ">"), (-128, "<")):
        limits = ir.Constant(INT_VECTOR, [limit] * LANES)
        numbers = builder.select(builder.icmp_signed(is_out, numbers, limits), limits, numbers)
    return numbers


def _greatest_and_mean(builder: Any, data: Any, offset: Any, num_blocks: Any) -> tuple[Any, Any]:
    """max |x| and the mean of |x| over blocks of 16. Zeros do not count, so padding changes nothing.

    The maximum compares bits: without the sign they are ordered like the numbers, and NaN is the greatest.
    """
    no_sign, zero = ir.Constant(INT_VECTOR, [0x7FFFFFFF] * LANES), ir.Constant(INT_VECTOR, [0] * LANES)
    loop = Loop(builder, num_blocks, [zero, zero, constant(0.0)])
    at = builder.add(offset, builder.mul(loop.index, ir.Constant(LONG, LANES)))
    bits = builder.and_(builder.bitcast(load(builder, data, at), INT_VECTOR), no_sign)
    counted = builder.zext(builder.icmp_signed("!=", bits, zero), INT_VECTOR)
    top, count, total = loop.values
    tops, counts, totals = loop.close(
        [
            _greater(builder, top, bits),
            builder.add(count, counted),
            builder.fadd(total, builder.bitcast(bits, VECTOR)),
        ]
    )
    top = builder.bitcast(fold(builder, tops, lambda a, b: _greater(builder, a, b)), FLOAT)
    count = builder.sitofp(fold(builder, counts, builder.add), FLOAT)
    return top, builder.fdiv(fold(builder, totals, builder.fadd), count)


def _greater(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_signed(">", a, b), a, b)


@inner
def _note_outliers(rows: Any, row: int, width: int, spare: Any) -> None:
    """Writes the row's outliers, from what `round_row` left in `spare`."""
    found = 0
    for block in range(width // LANES):
        if spare[width + block] != 0:
            for column in range(block * LANES, (block + 1) * LANES):
                number = np.int32(spare[column])
                rest = number - min(max(number, np.int32(-128)), np.int32(127))
                if rest != 0:
                    rows.outliers[row, found, 0], rows.outliers[row, found, 1] = column, rest
                    found += 1
    rows.num_outliers[row] = found

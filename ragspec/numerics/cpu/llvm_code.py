"""Building blocks of vector code for numba: LLVM values, fixed-width vectors, counted loops.

Everything is 16 lanes wide; machines without 16-lane registers split the vectors, with the same result.
"""

import functools
from collections.abc import Callable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 16
FLOAT = ir.FloatType()
SHORT = ir.IntType(16)
INT = ir.IntType(32)
LONG = ir.IntType(64)
VECTOR = ir.VectorType(FLOAT, LANES)
INT_VECTOR = ir.VectorType(INT, LANES)
SHORT_VECTOR = ir.VectorType(SHORT, LANES)


@functools.cache
def has_feature(name: str) -> bool:
    """Whether this processor has an LLVM feature, such as "avx2"."""
    return bool(llvmlite.binding.get_host_cpu_features().get(name))


NUM_SUMS = 16 if has_feature("avx512f") else 4
"""How many 16-lane running sums a loop keeps in registers, beside its operands. More would be written to memory in every turn."""


def array_data(context: Any, builder: Any, signature: Any, args: Any, index: int) -> Any:
    return context.make_array(signature.args[index])(context, builder, args[index]).data


def splat(builder: Any, scalar: Any, vector_type: Any = VECTOR) -> Any:
    first = builder.insert_element(ir.Constant(vector_type, ir.Undefined), scalar, ir.Constant(INT, 0))
    mask = ir.Constant(ir.VectorType(INT, vector_type.count), [0] * vector_type.count)
    return builder.shuffle_vector(first, ir.Constant(vector_type, ir.Undefined), mask)


def constant(value: float) -> Any:
    return ir.Constant(VECTOR, [value] * LANES)


def load(builder: Any, base: Any, offset: Any) -> Any:
    """16 floats. Of an array of 16-bit integers: bfloat16 numbers, widened."""
    is_bfloat16 = base.type.pointee == SHORT
    kind = SHORT_VECTOR if is_bfloat16 else VECTOR
    instruction = builder.load(builder.bitcast(builder.gep(base, [offset]), kind.as_pointer()))
    instruction.align = 2 if is_bfloat16 else 4
    if not is_bfloat16:
        return instruction
    high = builder.shl(builder.zext(instruction, INT_VECTOR), ir.Constant(INT_VECTOR, [16] * LANES))
    return builder.bitcast(high, VECTOR)


def store(builder: Any, vector: Any, base: Any, offset: Any) -> None:
    instruction = builder.store(vector, builder.bitcast(builder.gep(base, [offset]), VECTOR.as_pointer()))
    instruction.align = 4


@intrinsic
def store_number(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """array[index] = value. Of an array of 16-bit integers: the nearest bfloat16 number, ties to even; NaN stays NaN."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        base, number = array_data(context, builder, signature, args, 0), args[2]
        if base.type.pointee == SHORT:
            bits = builder.bitcast(number, INT)
            odd = builder.and_(builder.lshr(bits, ir.Constant(INT, 16)), ir.Constant(INT, 1))
            rounded = builder.add(bits, builder.add(odd, ir.Constant(INT, 0x7FFF)))
            is_nan = builder.fcmp_unordered("uno", number, number)
            rounded = builder.select(is_nan, ir.Constant(INT, 0x7FC00000), rounded)
            number = builder.trunc(builder.lshr(rounded, ir.Constant(INT, 16)), SHORT)
        builder.store(number, builder.gep(base, [args[1]]))
        return context.get_dummy_value()

    return types.void(array, types.int64, types.float32), generate


def call(builder: Any, name: str, result: Any, *values: Any) -> Any:
    """Call a function of LLVM or of the process by its name."""
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), values)


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return call(builder, "llvm.fma.v16f32", VECTOR, a, b, c)


def fold(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """All lanes combined as one fixed tree: lane i with lane i + 8, then i + 4, ..."""
    width = LANES
    while width > 1:
        width //= 2
        order = [(i + width) % LANES for i in range(LANES)]
        moved = builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), ir.Constant(INT_VECTOR, order))
        vector = combine(vector, moved)
    return builder.extract_element(vector, ir.Constant(INT, 0))


class Loop:
    """`for i in [0, count)` with values carried from turn to turn (phi nodes)."""

    def __init__(self, builder: Any, count: Any, carried: list[Any]) -> None:
        self._builder, self._count = builder, count
        self._before = builder.block
        self._body, self._after = builder.append_basic_block("body"), builder.append_basic_block("after")
        self._runs = builder.icmp_signed(">", count, ir.Constant(LONG, 0))
        builder.cbranch(self._runs, self._body, self._after)
        builder.position_at_end(self._body)
        self.index = builder.phi(LONG)
        self.index.add_incoming(ir.Constant(LONG, 0), self._before)
        self._initial = carried
        self.values = [builder.phi(value.type) for value in carried]
        for phi, value in zip(self.values, carried, strict=True):
            phi.add_incoming(value, self._before)

    def close(self, carried: list[Any]) -> list[Any]:
        """End the body; returns the carried values after the last turn."""
        builder = self._builder
        following = builder.add(self.index, ir.Constant(LONG, 1))
        last = builder.block
        self.index.add_incoming(following, last)
        for phi, value in zip(self.values, carried, strict=True):
            phi.add_incoming(value, last)
        builder.cbranch(builder.icmp_signed("<", following, self._count), self._body, self._after)
        builder.position_at_end(self._after)
        results = []
        for initial, value in zip(self._initial, carried, strict=True):
            result = builder.phi(value.type)
            result.add_incoming(initial, self._before)
            result.add_incoming(value, last)
            results.append(result)
        return results


TAKEN, DONE, FAILED = 0, 8, 9
"""Where an int64 array of 16 counts the chunks taken, and in another cache line those done and those that raised."""


@intrinsic
def load_count(typing: Any, counters: Any, index: Any) -> Any:
    """counters[index], with every write that came before it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.gep(array_data(context, builder, signature, args, 0), [args[1]])
        return builder.load_atomic(place, "acquire", 8)

    return types.int64(counters, types.int64), generate


@intrinsic
def add_one(typing: Any, counters: Any, index: Any) -> Any:
    """counters[index] += 1, after every write of this thread; returns the earlier value."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.gep(array_data(context, builder, signature, args, 0), [args[1]])
        return builder.atomic_rmw("add", place, ir.Constant(LONG, 1), "seq_cst")

    return types.int64(counters, types.int64), generate


@intrinsic
def take(typing: Any, counters: Any, index: Any, expected: Any) -> Any:
    """Raise counters[index] from `expected` by one; whether it was `expected`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.gep(array_data(context, builder, signature, args, 0), [args[1]])
        following = builder.add(args[2], ir.Constant(LONG, 1))
        result = builder.cmpxchg(place, args[2], following, "seq_cst", "acquire")
        return builder.extract_value(result, 1)

    return types.boolean(counters, types.int64, types.int64), generate


@intrinsic
def yield_processor(typing: Any) -> Any:
    """Let another thread of the machine run (POSIX sched_yield)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call(builder, "sched_yield", INT)
        return context.get_dummy_value()

    return types.void(), generate

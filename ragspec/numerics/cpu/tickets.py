"""Atomic operations for kernels that several threads run together.

A step is a list of phases, each cut into chunks. Chunks are numbered through the whole step; a thread takes the next number once
every chunk of the earlier phases is done. Nobody waits for a thread that has taken nothing, so a helper that other load keeps
from running costs nothing but its help.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ragspec.numerics.cpu.llvm_code import INT, LONG, array_data

TAKEN, DONE = 0, 8
"""Where an int64 array of 16 counts the chunks taken and done: in different cache lines."""


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
        name = "sched_yield"
        function = builder.module.globals.get(name) or ir.Function(builder.module, ir.FunctionType(INT, []), name)
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), generate

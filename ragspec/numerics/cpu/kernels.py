"""The compiled step: every phase of a decoder's forward with int8 weights, run by all threads together.

A phase is a row of the table that `ragspec.numerics.cpu.phases` builds. `work` takes chunks of phases until none is left;
`ragspec.numerics.cpu.thread_pool` says how threads share them. Between two products everything is float32, row by row in a fixed
order, so a row's bits do not depend on other rows or on threads.
"""

from enum import IntEnum
from typing import Any

import numpy as np

from ragspec.numerics.compiled import assign, compiled, inner
from ragspec.numerics.cpu.attention_kernel import one_tile, rotate, write
from ragspec.numerics.cpu.llvm_code import DONE, FAILED, LANES, TAKEN, add_one, load_count, take, yield_processor
from ragspec.numerics.cpu.product_code import gate_block, make_multiply, make_quantise
from ragspec.numerics.norms import add_and_normalise

_SPINS = 500
"""How often a waiting thread looks before it lets others run."""
_CHUNKS_A_THREAD = 4


class Kind(IntEnum):
    """The work of a phase; a chunk is some rows, some blocks of 16 outputs, or a tile of one KV head."""

    NORM = 0  # stream += block; its norm is quantised
    QUANTISE = 1
    PRODUCT = 2
    GATED_PRODUCT = 3  # silu(gate) * up; blocks of gate and up take turns
    ROTATE = 4  # norms of queries and keys, rotation, writing keys and values
    ATTEND = 5
    FINAL_NORM = 6  # stream += block; its norm stays float


class Column(IntEnum):
    """Columns of the phase table. Offsets are those of the arrays `weights` and `parameters`; -1: none."""

    KIND = 0
    FIRST = 1  # number of the phase's first chunk
    SIZE = 2  # rows or blocks of a chunk
    COUNT = 3  # rows, blocks or tiles of the phase
    SOURCE = 4  # `Buffer` that is quantised
    OUT = 5  # `Buffer` that is written
    WIDTH = 6  # numbers of a row that is read
    WEIGHT = 7
    SCALES = 8  # of the outputs
    BIAS = 9
    MOST = 10  # greatest quantised activation
    NORM_WEIGHT = 11  # the norm's epsilon stands before it
    KEY_NORM = 12
    LAYER = 13
    WINDOW = 14
    TAP = 15  # which tap gets the stream


class Buffer(IntEnum):
    """The float32 arrays of a forward over N rows, each flat. In a group OWN_ buffers hold one rank's columns."""

    STREAM = 0  # [N, H]
    BLOCK = 1  # [N, H]: what the next norm adds to the stream
    QKV = 2  # [N, heads + 2 KV heads, head_dim]
    OWN_HEADS = 3  # [N, heads, head_dim]
    HEADS = 4
    OWN_INNER = 5  # [N, F]
    INNER = 6
    OWN_BLOCK = 7
    STATES = 8  # [N, H]: after the final norm
    LOGITS = 9
    TAPS = 10  # [taps, N, H]
    ROW_SCALES = 11  # [N]: of the quantised rows


_KIND, _FIRST, _SIZE, _COUNT, _SOURCE, _OUT, _WIDTH, _WEIGHT = (int(column) for column in list(Column)[:8])
_SCALES, _BIAS, _MOST, _NORM_WEIGHT, _KEY_NORM, _LAYER, _WINDOW, _TAP = (int(column) for column in list(Column)[8:])
_NORM, _QUANTISE, _PRODUCT, _GATED, _ROTATE, _ATTEND, _FINAL_NORM = map(int, Kind)
_STREAM, _BLOCK, _QKV, _OWN_HEADS, _HEADS, _OWN_INNER = (int(buffer) for buffer in list(Buffer)[:6])
_INNER, _OWN_BLOCK, _STATES, _LOGITS, _TAPS, _ROW_SCALES = (int(buffer) for buffer in list(Buffer)[6:])


_quantise = make_quantise()


@inner
def norm_rows(phase: Any, first: int, last: int, num_rows: int, parameters: Any, floats: Any, quantised: Any) -> None:
    width, at = phase[_WIDTH], phase[_NORM_WEIGHT]
    weight, epsilon = parameters[at : at + width], parameters[at - 1]
    normalised, squares = np.empty(width, np.float32), np.empty(LANES, np.float32)
    spare = np.empty(width + width // LANES, np.int16)
    for row in range(first, last):
        here = row * width
        stream, block = floats[_STREAM][here : here + width], floats[_BLOCK][here : here + width]
        add_and_normalise(stream, block, weight, epsilon, stream, normalised, squares)
        if phase[_TAP] >= 0:
            tap = (phase[_TAP] * num_rows + row) * width
            assign(floats[_TAPS][tap : tap + width], stream)
        if phase[_KIND] == _NORM:
            most = np.float32(phase[_MOST])
            floats[_ROW_SCALES][row] = _quantise(normalised, 0, width, most, quantised, row, num_rows, spare)
        else:
            assign(floats[_STATES][here : here + width], normalised)


@inner
def quantise_rows(phase: Any, first: int, last: int, num_rows: int, floats: Any, quantised: Any) -> None:
    width, most = phase[_WIDTH], np.float32(phase[_MOST])
    source, scales = floats[phase[_SOURCE]], floats[_ROW_SCALES]
    spare = np.empty(width + width // LANES, np.int16)
    for row in range(first, last):
        scales[row] = _quantise(source, row * width, width, most, quantised, row, num_rows, spare)


_multiply = make_multiply()


@inner
def product_blocks(
    phase: Any, first: int, last: int, num_rows: int, weights: Any, parameters: Any, floats: Any, rounded: Any
) -> None:
    """Blocks of 16 outputs for all rows.

    Why one function: a call for each block would pass some eighty words and count references to a dozen arrays.
    """
    is_gated, scales = phase[_KIND] == _GATED, floats[_ROW_SCALES]
    stride, width = phase[_COUNT] * LANES, phase[_WIDTH]
    out = np.empty(num_rows * 2 * LANES, np.float32) if is_gated else floats[phase[_OUT]]
    turns = 2 if is_gated else 1
    step = 2 * LANES if is_gated else stride
    for block in range(first * turns, last * turns):
        to = (block % 2) * LANES if is_gated else block * LANES
        weight_at, scale_at = phase[_WEIGHT] + block * LANES * width, phase[_SCALES] + block * LANES
        _multiply(rounded, num_rows, weights, weight_at, width, parameters, scale_at, scales, out, to, step)
        if phase[_BIAS] >= 0:
            bias_at = phase[_BIAS] + block * LANES
            for row in range(num_rows):
                for lane in range(LANES):
                    out[to + row * step + lane] += parameters[bias_at + lane]
        if is_gated and block % 2:
            for row in range(num_rows):
                gate = row * 2 * LANES
                gate_block(out, gate, out, gate + LANES, floats[phase[_OUT]], row * stride + block // 2 * LANES)


@inner
def norm_heads(qkv: Any, first_head: int, last_head: int, at: int, parameters: Any) -> None:
    """RMS norm of each head. Shapes: qkv [N, heads, head_dim]; the weight [head_dim] at `at`, its epsilon before it."""
    head_dim = qkv.shape[2]
    weight, epsilon = parameters[at : at + head_dim], parameters[at - 1]
    zeros, total = np.zeros(head_dim, np.float32), np.empty(head_dim, np.float32)
    squares = np.empty(LANES, np.float32)
    for row in range(qkv.shape[0]):
        for head in range(first_head, last_head):
            add_and_normalise(qkv[row, head], zeros, weight, epsilon, total, qkv[row, head], squares)


@inner
def rotate_rows(
    phase: Any,
    first: int,
    last: int,
    qkv: Any,
    parameters: Any,
    rotations: Any,
    rows: Any,
    pool: Any,
    shape: Any,
    vectors: Any,
) -> None:
    own = qkv[first:last]
    num_heads, num_kv_heads, layer = shape[0], shape[1], phase[_LAYER]
    if phase[_NORM_WEIGHT] >= 0:
        norm_heads(own, 0, num_heads, phase[_NORM_WEIGHT], parameters)
        norm_heads(own, num_heads, num_heads + num_kv_heads, phase[_KEY_NORM], parameters)
    if rotations[0].shape[0] > 0:
        rotate(own, rows.positions[first:last], num_heads + num_kv_heads, rotations[0], rotations[1])
    write(own, pool[0][layer], pool[1][layer], rows.slots[first:last], shape, vectors)


@compiled(nogil=True)
def number_chunks(
    phases: Any, num_rows: int, num_tiles: int, num_threads: int, least_shared: int
) -> tuple[Any, int, int]:
    """The table with its chunks numbered, their number, and that of the threads: one if there are products, but fewer than
    `least_shared` of a weight and a row. A copy: helpers that are late still read the table of their call."""
    phases, num_chunks, num_weights = phases.copy(), 0, 0
    for phase in phases:
        if phase[_KIND] in (_PRODUCT, _GATED):
            num_weights += phase[_COUNT] * LANES * phase[_WIDTH] * (2 if phase[_KIND] == _GATED else 1)
    if 0 < num_weights * num_rows < least_shared:
        num_threads = 1
    shares = 1 if num_threads == 1 else _CHUNKS_A_THREAD * num_threads
    for phase in phases:
        kind = phase[_KIND]
        if kind not in (_PRODUCT, _GATED):
            phase[_COUNT] = num_tiles if kind == _ATTEND else num_rows
        phase[_SIZE] = 1 if kind == _ATTEND else max(1, -(-phase[_COUNT] // shares))
        phase[_FIRST] = num_chunks
        num_chunks += -(-phase[_COUNT] // phase[_SIZE])
    return phases, num_chunks, num_threads


@compiled(nogil=True)
def work(
    phases: Any,
    num_chunks: int,
    counters: Any,
    waits: bool,
    num_rows: int,
    weights: Any,
    parameters: Any,
    rotations: Any,
    floats: Any,
    quantised: Any,
    rows: Any,
    pool: Any,
    shape: Any,
    limits: Any,
    vectors: Any,
) -> None:
    """Take chunks until none is left or one has failed. `waits`: return only when every chunk is done or one has failed.

    Shapes: phases int64 [P, columns], counters int64 [16], weights int8 flat, parameters float32 flat, rotations (cos, sin)
    float32 [positions, head_dim], floats one flat array for each `Buffer`, quantised a `RoundedRows`, rows an
    `AttentionMetadata`, pool (keys, values) float32 or uint16 [layers, numbers of a layer], shape (heads, KV heads), limits
    (scale, softcap).
    """
    head_dim = rotations[0].shape[1]
    qkv = floats[_QKV].reshape(-1, shape[0] + 2 * shape[1], head_dim)
    heads = floats[_OWN_HEADS].reshape(-1, shape[0], head_dim)
    index, spins = 0, 0
    while True:
        chunk = load_count(counters, TAKEN)
        if chunk >= num_chunks or load_count(counters, FAILED) > 0:
            break
        while index + 1 < phases.shape[0] and chunk >= phases[index + 1, _FIRST]:
            index += 1
        phase = phases[index]
        if load_count(counters, DONE) < phase[_FIRST]:
            spins += 1
            if spins % _SPINS == 0:
                yield_processor()
            continue
        if not take(counters, TAKEN, chunk):
            continue
        kind, first = phase[_KIND], (chunk - phase[_FIRST]) * phase[_SIZE]
        last = min(first + phase[_SIZE], phase[_COUNT])
        if kind in (_PRODUCT, _GATED):
            product_blocks(phase, first, last, num_rows, weights, parameters, floats, quantised)
        elif kind in (_NORM, _FINAL_NORM):
            norm_rows(phase, first, last, num_rows, parameters, floats, quantised)
        elif kind == _QUANTISE:
            quantise_rows(phase, first, last, num_rows, floats, quantised)
        elif kind == _ROTATE:
            rotate_rows(phase, first, last, qkv, parameters, rotations, rows, pool, shape, vectors)
        else:
            tile, layer = rows.tiles[first // shape[1]], phase[_LAYER]
            bounds = (tile[0], tile[1], tile[2])
            one_tile(
                qkv, pool[0][layer], pool[1][layer], rows, bounds, first % shape[1], shape, limits, phase[_WINDOW],
                heads, vectors,
            )  # fmt: skip
        add_one(counters, DONE)
    while waits and load_count(counters, DONE) < num_chunks and load_count(counters, FAILED) == 0:
        spins += 1
        if spins % _SPINS == 0:
            yield_processor()


@compiled(nogil=True)
def count_failure(counters: Any) -> None:
    """A thread ends here with a chunk that it took and did not finish."""
    add_one(counters, FAILED)


@compiled(nogil=True)
def take_rest(counters: Any, num_chunks: int) -> int:
    """Take every chunk that is left, so that no thread begins another; returns their number."""
    num_taken = 0
    while True:
        chunk = load_count(counters, TAKEN)
        if chunk >= num_chunks:
            return num_taken
        if take(counters, TAKEN, chunk):
            num_taken += 1

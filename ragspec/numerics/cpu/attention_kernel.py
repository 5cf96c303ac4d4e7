"""The compiled attention kernels; `ragspec.numerics.attention` says what it computes and how the pool is laid out.

`rows` is the `AttentionMetadata`, `shape` (heads, KV heads), `vectors` a tuple with one element for each 16 columns of a head.
"""

import math
from typing import Any

import numpy as np

from ragspec.numerics.compiled import assign, inner
from ragspec.numerics.cpu.attention_code import (
    are_consecutive,
    exp_and_sum,
    make_add_weighted,
    make_dot_pages,
    scale_block,
)
from ragspec.numerics.cpu.llvm_code import NUM_SUMS, store_number

_PAGES = NUM_SUMS // 4
"""Pages beside each other for four queries."""
dot_4xn, dot_4x1, dot_2x2, dot_1x4, dot_1x1 = (
    make_dot_pages(*size) for size in ((4, _PAGES), (4, 1), (2, 2), (1, 4), (1, 1))
)
add_weighted, add_weighted_2, add_weighted_4 = (make_add_weighted(num_rows) for num_rows in (1, 2, 4))


@inner
def score_pages(q: Any, num_rows: int, keys: Any, offsets: Any, scores: Any, vectors: Any) -> None:
    head_dim = 16 * len(vectors)
    num_pages = offsets.shape[0]
    stride = num_pages * 16
    row = 0
    while row + 4 <= num_rows:
        page = 0
        while page + _PAGES <= num_pages:
            dot_4xn(q, row * head_dim, keys, offsets, page, scores, row * stride + page * 16, stride, vectors)
            page += _PAGES
        while page < num_pages:
            dot_4x1(q, row * head_dim, keys, offsets, page, scores, row * stride + page * 16, stride, vectors)
            page += 1
        row += 4
    if row + 2 <= num_rows:
        page = 0
        while page + 2 <= num_pages:
            dot_2x2(q, row * head_dim, keys, offsets, page, scores, row * stride + page * 16, stride, vectors)
            page += 2
        if page < num_pages:
            for r in range(row, row + 2):
                dot_1x1(q, r * head_dim, keys, offsets, page, scores, r * stride + page * 16, stride, vectors)
        row += 2
    while row < num_rows:
        page = 0
        while page + 4 <= num_pages:
            dot_1x4(q, row * head_dim, keys, offsets, page, scores, row * stride + page * 16, stride, vectors)
            page += 4
        while page < num_pages:
            dot_1x1(q, row * head_dim, keys, offsets, page, scores, row * stride + page * 16, stride, vectors)
            page += 1
        row += 1


@inner
def gather(
    scores: Any, base: int, index: Any, start: int, end: int, out: Any, at: int, scale: Any, softcap: Any
) -> Any:
    best = np.float32(-np.inf)
    j = start
    while j < end:
        if softcap <= 0 and j + 16 <= end and are_consecutive(index, j):
            best = max(best, scale_block(scores, base + index[j], out, at + j - start, scale))
            j += 16
            continue
        x = scores[base + index[j]] * scale
        if softcap > 0:
            x = np.float32(softcap * math.tanh(x / softcap))
        out[at + j - start] = x
        best = max(best, x)
        j += 1
    return best


@inner
def used_pages(rows: Any, first: int, last: int, context: int) -> int:
    longest, highest = 0, 0
    for row in range(first, last):
        longest = max(longest, rows.context_end[row])
        for j in range(rows.path_start[row], rows.path_start[row + 1]):
            highest = max(highest, rows.path_index[j])
    for j in range(context, context + longest):
        highest = max(highest, rows.context_index[j])
    return highest // 16 + 1


@inner
def collect_queries(qkv: Any, first: int, last: int, head: int, group: int, head_dim: int) -> Any:
    queries = np.zeros((last - first) * group * head_dim, np.float32)
    at = 0
    for row in range(first, last):
        for h in range(head * group, (head + 1) * group):
            assign(queries[at : at + qkv.shape[2]], qkv[row, h])
            at += head_dim
    return queries


@inner
def softmax(scores: Any, i: int, rows: Any, view: Any, limits: Any, weights: Any, at: int) -> Any:
    """Unnormalised weights of query i over `view` = what its row sees, from `at` on; returns their sum."""
    scale, softcap = limits
    first, length, path_first, path_length = view
    base = i * (scores.shape[1])
    flat = scores.reshape(-1)
    best = max(
        gather(flat, base, rows.context_index, first, first + length, weights, at, scale, softcap),
        gather(flat, base, rows.path_index, path_first, path_first + path_length, weights, at + length, scale, softcap),
    )
    visible = length + path_length
    num_blocks = (visible + 15) // 16
    weights[at + visible : at + num_blocks * 16] = -np.inf
    return exp_and_sum(weights, at, num_blocks, best)


@inner
def visible_to(row: int, rows: Any, context: int, window: int) -> Any:
    """[first, length) of the context and of the path that a row sees; a window hides the oldest positions."""
    begin, depth = rows.path_start[row], rows.path_start[row + 1] - rows.path_start[row]
    end = rows.context_end[row]
    hidden = max(0, end + depth - window) if window > 0 else 0
    length = max(0, end - hidden)
    hidden_path = max(0, hidden - end)
    return context + end - length, length, begin + hidden_path, depth - hidden_path


@inner
def score_tile(qkv: Any, keys: Any, rows: Any, tile: Any, head: int, shape: Any, vectors: Any) -> Any:
    """Raw scores of a tile's queries against every page they may see. Shape: [queries, pages * 16]."""
    first, last, b = tile
    group, head_dim = shape[0] // shape[1], 16 * len(vectors)
    num_pages = used_pages(rows, first, last, rows.context_start[b])
    offsets = np.empty(num_pages, np.int64)
    for p in range(num_pages):
        page = np.int64(rows.pages[rows.page_start[b] + p])
        offsets[p] = (page * shape[1] + head) * 16 * head_dim
    num_queries = (last - first) * group
    scores = np.empty((num_queries, num_pages * 16), np.float32)
    queries = collect_queries(qkv, first, last, head, group, head_dim)
    score_pages(queries, num_queries, keys, offsets, scores.reshape(-1), vectors)
    return scores


@inner
def add_shared(
    num_beside: int,
    weights: Any,
    stride: int,
    values: Any,
    slots: Any,
    start: int,
    count: int,
    where: Any,
    out: Any,
    vectors: Any,
) -> None:
    """What queries side by side see in common, read once for all of them."""
    if num_beside == 4:
        add_weighted_4(weights, 0, stride, values, slots, start, count, where[0], where[1], out, 0, vectors)
    elif num_beside == 2:
        add_weighted_2(weights, 0, stride, values, slots, start, count, where[0], where[1], out, 0, vectors)


@inner
def weigh_values(
    scores: Any,
    i: int,
    views: Any,
    values: Any,
    rows: Any,
    where: Any,
    limits: Any,
    weights: Any,
    totals: Any,
    vectors: Any,
) -> Any:
    """Softmax and weighted sum for the queries i, i + 1, ... with the given views; returns their norms."""
    num_beside, stride, head_dim = len(views), scores.shape[1] + 16, 16 * len(vectors)
    norms = np.empty(num_beside, np.float32)
    totals[:] = 0.0
    start, shared = views[0, 0], views[0, 1]
    for r in range(num_beside):
        norms[r] = softmax(scores, i + r, rows, views[r], limits, weights, r * stride)
        shared = min(shared, views[r, 1]) if views[r, 0] == start else 0
    if num_beside == 1:
        shared = 0
    add_shared(num_beside, weights, stride, values, rows.context_slots, start, shared, where, totals, vectors)
    for r in range(num_beside):
        seen, length, path, depth = views[r]
        at, to = r * stride, r * head_dim
        add_weighted(
            weights, at + shared, 0, values, rows.context_slots, seen + shared, length - shared,
            where[0], where[1], totals, to, vectors,
        )  # fmt: skip
        add_weighted(
            weights, at + length, 0, values, rows.path_slots, path, depth, where[0], where[1], totals, to, vectors
        )
    return norms


@inner
def one_tile(
    qkv: Any,
    keys: Any,
    values: Any,
    rows: Any,
    tile: Any,
    head: int,
    shape: Any,
    limits: Any,
    window: int,
    out: Any,
    vectors: Any,
) -> None:
    first, b = tile[0], tile[2]
    group, context, head_dim = shape[0] // shape[1], rows.context_start[b], 16 * len(vectors)
    where = (shape[1] * 16 * head_dim, head * 16 * head_dim)
    scores = score_tile(qkv, keys, rows, tile, head, shape, vectors)
    weights = np.empty(4 * (scores.shape[1] + 16), np.float32)
    totals = np.empty(4 * head_dim, np.float32)
    views = np.empty((4, 4), np.int64)
    i = 0
    while i < len(scores):
        left = len(scores) - i
        num_beside = 4 if left >= 4 else 2 if left >= 2 else 1
        for r in range(num_beside):
            row = first + (i + r) // group
            views[r, 0], views[r, 1], views[r, 2], views[r, 3] = visible_to(row, rows, context, window)
        norms = weigh_values(scores, i, views[:num_beside], values, rows, where, limits, weights, totals, vectors)
        for r in range(num_beside):
            of_head, norm = out[first + (i + r) // group, head * group + (i + r) % group], norms[r]
            for d in range(out.shape[2]):
                of_head[d] = totals[r * head_dim + d] / norm
        i += num_beside


@inner
def rotate(qkv: Any, positions: Any, num_rotated: int, cos: Any, sin: Any) -> None:
    half = qkv.shape[2] // 2
    for row in range(qkv.shape[0]):
        p = positions[row]
        for h in range(num_rotated):
            for d in range(half):
                x, y = qkv[row, h, d], qkv[row, h, d + half]
                qkv[row, h, d] = x * cos[p, d] - y * sin[p, d]
                qkv[row, h, d + half] = y * cos[p, d + half] + x * sin[p, d + half]


@inner
def write(qkv: Any, keys: Any, values: Any, slots: Any, shape: Any, vectors: Any) -> None:
    head_dim = 16 * len(vectors)
    for row in range(qkv.shape[0]):
        page, lane = slots[row] // 16, slots[row] % 16
        for h in range(shape[1]):
            block = (np.int64(page) * shape[1] + h) * head_dim * 16
            for d in range(qkv.shape[2]):
                store_number(keys, block + d * 16 + lane, qkv[row, shape[0] + h, d])
                store_number(values, block + lane * head_dim + d, qkv[row, shape[0] + shape[1] + h, d])

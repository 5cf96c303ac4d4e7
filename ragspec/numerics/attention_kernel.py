"""The compiled attention kernel; `ragspec.numerics.attention` says what it computes and how the pool is laid out."""

from __future__ import annotations

import functools
import math
from typing import Any

import numba
import numpy as np

from ragspec.numerics.vector_code import exp_and_sum, make_add_weighted, make_dot_pages


@functools.cache
def attention_kernel(head_dim: int) -> Any:
    """The compiled kernel for one padded head dimension."""
    dot_4x2, dot_4x1 = make_dot_pages(4, 2, head_dim), make_dot_pages(4, 1, head_dim)
    dot_1x4, dot_1x1 = make_dot_pages(1, 4, head_dim), make_dot_pages(1, 1, head_dim)
    add_weighted, add_weighted_2, add_weighted_4 = (make_add_weighted(n, head_dim) for n in (1, 2, 4))

    @numba.njit
    def score_pages(q: Any, num_rows: int, keys: Any, offsets: Any, scores: Any) -> None:
        num_pages = offsets.shape[0]
        stride = num_pages * 16
        row = 0
        while row + 4 <= num_rows:
            page = 0
            while page + 2 <= num_pages:
                dot_4x2(q, row * head_dim, keys, offsets, page, scores, row * stride + page * 16, stride)
                page += 2
            if page < num_pages:
                dot_4x1(q, row * head_dim, keys, offsets, page, scores, row * stride + page * 16, stride)
            row += 4
        while row < num_rows:
            page = 0
            while page + 4 <= num_pages:
                dot_1x4(q, row * head_dim, keys, offsets, page, scores, row * stride + page * 16, stride)
                page += 4
            while page < num_pages:
                dot_1x1(q, row * head_dim, keys, offsets, page, scores, row * stride + page * 16, stride)
                page += 1
            row += 1

    @numba.njit
    def gather(
        scores: Any, base: int, index: Any, start: int, end: int, out: Any, at: int, scale: Any, softcap: Any
    ) -> Any:
        best = np.float32(-np.inf)
        for j in range(start, end):
            x = scores[base + index[j]] * scale
            if softcap > 0:
                x = np.float32(softcap * math.tanh(x / softcap))
            out[at + j - start] = x
            best = max(best, x)
        return best

    @numba.njit
    def used_pages(rows: Any, first: int, last: int, context: int) -> int:
        longest, highest = 0, 0
        for row in range(first, last):
            longest = max(longest, rows.context_end[row])
            for j in range(rows.path_start[row], rows.path_start[row + 1]):
                highest = max(highest, rows.path_index[j])
        for j in range(context, context + longest):
            highest = max(highest, rows.context_index[j])
        return highest // 16 + 1

    @numba.njit
    def collect_queries(qkv: Any, first: int, last: int, head: int, group: int) -> Any:
        queries = np.zeros((last - first) * group * head_dim, np.float32)
        at = 0
        for row in range(first, last):
            for h in range(head * group, (head + 1) * group):
                for d in range(qkv.shape[2]):
                    queries[at + d] = qkv[row, h, d]
                at += head_dim
        return queries

    @numba.njit
    def softmax(scores: Any, i: int, row: int, rows: Any, view: Any, limits: Any, weights: Any, at: int) -> Any:
        """Unnormalised weights of query i over `view` = what its row sees, from `at` on; returns their sum."""
        scale, softcap = limits
        first, length, path_first, path_length = view
        base = i * (scores.shape[1])
        flat = scores.reshape(-1)
        best = max(
            gather(flat, base, rows.context_index, first, first + length, weights, at, scale, softcap),
            gather(
                flat, base, rows.path_index, path_first, path_first + path_length, weights, at + length, scale, softcap
            ),
        )
        visible = length + path_length
        num_blocks = (visible + 15) // 16
        weights[at + visible : at + num_blocks * 16] = -np.inf
        return exp_and_sum(weights, at, num_blocks, best)

    @numba.njit
    def visible_to(row: int, rows: Any, context: int, window: int) -> Any:
        """[first, length) of the context and of the path that a row sees; a window hides the oldest positions."""
        begin, depth = rows.path_start[row], rows.path_start[row + 1] - rows.path_start[row]
        end = rows.context_end[row]
        hidden = max(0, end + depth - window) if window > 0 else 0
        length = max(0, end - hidden)
        hidden_path = max(0, hidden - end)
        return context + end - length, length, begin + hidden_path, depth - hidden_path

    @numba.njit
    def one_tile(
        qkv: Any,
        keys: Any,
        values: Any,
        rows: Any,
        tile: int,
        head: int,
        shape: Any,
        limits: Any,
        window: int,
        out: Any,
    ) -> None:
        first, last, b = rows.tiles[tile, 0], rows.tiles[tile, 1], rows.tiles[tile, 2]
        group = shape[0] // shape[1]
        context = rows.context_start[b]
        num_pages = used_pages(rows, first, last, context)
        page_stride, head_offset = shape[1] * 16 * head_dim, head * 16 * head_dim
        offsets = np.empty(num_pages, np.int64)
        for p in range(num_pages):
            offsets[p] = np.int64(rows.pages[rows.page_start[b] + p]) * page_stride + head_offset
        num_queries = (last - first) * group
        stride = num_pages * 16
        scores = np.empty((num_queries, stride), np.float32)
        score_pages(collect_queries(qkv, first, last, head, group), num_queries, keys, offsets, scores.reshape(-1))
        weights = np.empty(4 * (stride + 16), np.float32)
        totals = np.empty(4 * head_dim, np.float32)
        norms = np.empty(4, np.float32)
        i = 0
        while i < num_queries:
            left = num_queries - i
            num_beside = 4 if left >= 4 else 2 if left >= 2 else 1
            totals[:] = 0.0
            shared = stride
            start = visible_to(first + i // group, rows, context, window)[0]
            for r in range(num_beside):
                row = first + (i + r) // group
                view = visible_to(row, rows, context, window)
                norms[r] = softmax(scores, i + r, row, rows, view, limits, weights, r * (stride + 16))
                shared = min(shared, view[1]) if view[0] == start else 0
            if num_beside == 4:
                add_weighted_4(
                    weights,
                    0,
                    stride + 16,
                    values,
                    rows.context_slots,
                    start,
                    shared,
                    page_stride,
                    head_offset,
                    totals,
                    0,
                )
            elif num_beside == 2:
                add_weighted_2(
                    weights,
                    0,
                    stride + 16,
                    values,
                    rows.context_slots,
                    start,
                    shared,
                    page_stride,
                    head_offset,
                    totals,
                    0,
                )
            else:
                shared = 0
            for r in range(num_beside):
                row = first + (i + r) // group
                seen, length, path_first, path_length = visible_to(row, rows, context, window)
                at, to = r * (stride + 16), r * head_dim
                add_weighted(
                    weights,
                    at + shared,
                    0,
                    values,
                    rows.context_slots,
                    seen + shared,
                    length - shared,
                    page_stride,
                    head_offset,
                    totals,
                    to,
                )
                add_weighted(
                    weights,
                    at + length,
                    0,
                    values,
                    rows.path_slots,
                    path_first,
                    path_length,
                    page_stride,
                    head_offset,
                    totals,
                    to,
                )
                for d in range(out.shape[2]):
                    out[row, head * group + (i + r) % group, d] = totals[to + d] / norms[r]
            i += num_beside

    @numba.njit
    def rotate(qkv: Any, positions: Any, num_rotated: int, cos: Any, sin: Any) -> None:
        half = qkv.shape[2] // 2
        for row in range(qkv.shape[0]):
            p = positions[row]
            for h in range(num_rotated):
                for d in range(half):
                    x, y = qkv[row, h, d], qkv[row, h, d + half]
                    qkv[row, h, d] = x * cos[p, d] - y * sin[p, d]
                    qkv[row, h, d + half] = y * cos[p, d + half] + x * sin[p, d + half]

    @numba.njit
    def write(qkv: Any, keys: Any, values: Any, slots: Any, shape: Any) -> None:
        for row in range(qkv.shape[0]):
            page, lane = slots[row] // 16, slots[row] % 16
            for h in range(shape[1]):
                block = (np.int64(page) * shape[1] + h) * head_dim * 16
                for d in range(qkv.shape[2]):
                    keys[block + d * 16 + lane] = qkv[row, shape[0] + h, d]
                    values[block + lane * head_dim + d] = qkv[row, shape[0] + shape[1] + h, d]

    @numba.njit(nogil=True, parallel=True)
    def kernel(
        qkv: Any,
        keys: Any,
        values: Any,
        rows: Any,
        shape: Any,
        cos: Any,
        sin: Any,
        limits: Any,
        window: int,
        out: Any,
    ) -> None:
        if cos.shape[0] > 0:
            rotate(qkv, rows.positions, shape[0] + shape[1], cos, sin)
        write(qkv, keys, values, rows.slots, shape)
        for item in numba.prange(rows.tiles.shape[0] * shape[1]):
            one_tile(qkv, keys, values, rows, item // shape[1], item % shape[1], shape, limits, window, out)

    return kernel

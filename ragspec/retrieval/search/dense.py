"""Exact search: the best rows by cosine, bit for bit the same alone or in a batch.

Candidates come from a copy of the vectors in 8 bits, which a query reads in a quarter of the time. A row's score is *defined* as
the sequential float64 sum of the products of the stored float32 values. How far an 8-bit score can be from it is known for every
row, so the search widens whenever a better row may be missing: the result is the exact top k.

    >>> ExactIndex(segment.vectors).search(encoder.encode(["rain"], "query"), k=3)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ragspec.errors import StoreCorrupt
from ragspec.numerics.compiled import compiled
from ragspec.numerics.threads import compute_threads, num_processors
from ragspec.retrieval.encoder import FloatArray

Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]
Item = TypeVar("Item")
Result = TypeVar("Result")

_BLOCK_ROWS = 16_384
_QUERIES_AT_ONCE = 64
_ROWS_FOR_THREADS = 250_000
"""Scores of a search that are computed without threads: starting these takes up to a few milliseconds on a busy machine."""
FEW_ROWS_SHARE = 0.05
"""At most this share of allowed rows is scanned without the index."""


class ScoredRows(NamedTuple):
    """Rows and their canonical scores, unordered: at least the best k, and every row that ties with the k-th."""

    rows: Rows
    scores: NDArray[np.float64]


class DenseIndex(Protocol):
    """Finds rows for query vectors."""

    def search(self, queries: FloatArray, k: int, allowed: Mask | None = None) -> list[ScoredRows]:
        """The best `k` allowed rows of each query; fewer only if fewer are allowed.

        Shapes: queries [B, E] float32, L2-normalised; allowed [K].
        """
        ...


class RoundedRows(NamedTuple):
    """Rows [first, first + K) in 8 bits, and how far the score of each can be from its canonical score.

    A vector is about its scale times its numbers times the widths of the coordinates. Why widths: a few coordinates of a language
    model's states are far larger than the others. `longest`: the greatest length of a vector divided by the widths.
    Shapes: numbers [K, E] int8; float32 scales [K], errors [K] and widths [E].
    """

    first: int
    numbers: NDArray[np.int8]
    scales: FloatArray
    errors: FloatArray
    widths: FloatArray
    longest: float

    @classmethod
    def of(cls, vectors: FloatArray, first: int) -> RoundedRows:
        """Rounds rows from `first` on, a block at most.

        By Cauchy and Schwarz, the error of a score is at most the length of what rounding takes away.
        """
        own = np.asarray(vectors[first : first + _BLOCK_ROWS])
        with np.errstate(invalid="ignore", over="ignore"):  # a file that was overwritten may hold anything
            widths = np.sqrt(np.mean(np.square(own), axis=0))
            widths[(widths == 0) | ~np.isfinite(widths)] = 1.0
            scales = np.max(np.abs(own / widths), axis=1) / np.float32(127)
            scales[scales == 0] = 1.0
            numbers = np.rint(own / widths / scales[:, None]).astype(np.int8)
            restored = numbers * scales[:, None]
            errors = np.linalg.norm(own - restored * widths, axis=1)
            lengths = np.linalg.norm(restored, axis=1)
            longest = float(np.max(lengths, where=np.isfinite(lengths), initial=0.0))
        # scores and errors are sums in float32, as is a query times the widths; a hundredth for norms that are not quite 1
        errors = 1.01 * (errors + np.float32(float32_error_bound(own.shape[1] + 4)))
        return cls(first, numbers, scales, errors, widths, longest)

    def bounds(self, queries: FloatArray, allowed: Mask | None) -> FloatArray:
        """The most that each canonical score can be. Shapes: queries [B, E] -> [B, K]; -inf where a row is not allowed."""
        bounds, wide = np.empty((len(queries), len(self.numbers)), np.float32), queries * self.widths
        with np.errstate(invalid="ignore", over="ignore"):  # as in `of`
            most = min(32767, (2**31 - 1) // (127 * wide.shape[1]))
            steps = np.max(np.abs(wide), axis=1) / np.float32(most)
            steps[steps == 0] = 1.0
            rounded = np.rint(wide / steps[:, None]).astype(np.int16)
            # by Cauchy and Schwarz
            lost = 1.01 * self.longest * np.linalg.norm(wide - rounded * steps[:, None], axis=1)
        _bound_scores(self.numbers, self.scales, self.errors, rounded, steps, lost.astype(np.float32), bounds)
        if allowed is not None:
            bounds[:, ~allowed[self.first : self.first + len(self.numbers)]] = -np.inf
        return bounds


@compiled(nogil=True)
def _bound_scores(numbers: Any, scales: Any, errors: Any, queries: Any, steps: Any, lost: Any, bounds: Any) -> None:
    """The most that each score can be. All queries share the reading of a row.

    Queries have 16 bits, so that a product with 8 takes one instruction; a sum has at most 31.
    Shapes: [K, E], two [K], [B, E], two [B]; out: [B, K].
    """
    for row in range(numbers.shape[0]):
        for query in range(queries.shape[0]):
            total = np.int32(0)
            for i in range(numbers.shape[1]):
                total = np.int32(total + np.int32(numbers[row, i]) * np.int32(queries[query, i]))
            bounds[query, row] = np.float32(total) * (steps[query] * scales[row]) + (errors[row] + lost[query])


class ExactIndex:
    """Scores every row. Holds a copy of the mapped vectors in 8 bits."""

    def __init__(self, vectors: FloatArray) -> None:
        self._vectors = vectors  # [K, E]
        starts = range(0, len(vectors), _BLOCK_ROWS)
        self._blocks = _each(starts, lambda first: RoundedRows.of(vectors, first), len(vectors))

    def search(self, queries: FloatArray, k: int, allowed: Mask | None = None) -> list[ScoredRows]:
        num_allowed = len(self._vectors) if allowed is None else int(np.count_nonzero(allowed))
        if k < 1 or num_allowed == 0:
            return [_NOTHING for _ in queries]
        if allowed is not None and num_allowed <= FEW_ROWS_SHARE * len(allowed):
            return search_rows(self._vectors, np.flatnonzero(allowed), queries, k)
        num_candidates = min(rescoring_depth(k), num_allowed)
        found: list[ScoredRows] = []
        for first in range(0, len(queries), _QUERIES_AT_ONCE):
            some = np.ascontiguousarray(queries[first : first + _QUERIES_AT_ONCE])
            bounds, rows = self._candidates(some, num_candidates, allowed)
            found += [self._rank(*each, k, allowed) for each in zip(some, bounds, rows, strict=True)]
        return found

    def _candidates(self, queries: FloatArray, num_candidates: int, allowed: Mask | None) -> tuple[FloatArray, Rows]:
        """The rows whose scores may be greatest, unordered. Shapes: queries [B, E] -> two [B, num_candidates]."""

        def best_of(block: RoundedRows) -> tuple[FloatArray, Rows]:
            bounds, places = _greatest(block.bounds(queries, allowed), num_candidates)
            return bounds, places + block.first

        parts = _each(self._blocks, best_of, len(queries) * len(self._vectors))
        bounds, rows = (np.concatenate(each, axis=1) for each in zip(*parts, strict=True))
        bounds, places = _greatest(bounds, num_candidates)
        return bounds, np.take_along_axis(rows, places, axis=1)

    def _rank(self, query: FloatArray, bounds: FloatArray, rows: Rows, k: int, allowed: Mask | None) -> ScoredRows:
        """The canonical top k of one query, given its candidates."""
        best = top_k(ScoredRows(rows, canonical_scores(query, self._vectors[rows])), k)
        kth = float(best.scores.min())
        if len(rows) == len(self._vectors) or float(bounds.min()) < kth:
            return best
        return search_rows(self._vectors, self._rows_above(query, kth, allowed), query[None], k)[0]

    def _rows_above(self, query: FloatArray, threshold: float, allowed: Mask | None) -> Rows:
        """Every row whose canonical score reaches `threshold`, and rows that nearly do."""
        error = float32_error_bound(len(query))

        def near(block: RoundedRows) -> Rows:
            rows = np.flatnonzero(block.bounds(query[None], allowed)[0] >= threshold) + block.first
            return rows[self._vectors[rows] @ query >= threshold - error]

        return np.concatenate(_each(self._blocks, near, len(self._vectors)))


def _greatest(scores: FloatArray, count: int) -> tuple[FloatArray, Rows]:
    """The greatest scores of each row and their places, unordered. Shapes: [B, K] -> two [B, count], or all."""
    if count >= scores.shape[1]:
        return scores, np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
    places = np.argpartition(scores, -count, axis=1)[:, -count:]
    return np.take_along_axis(scores, places, axis=1), places


def _each(items: Sequence[Item], call: Callable[[Item], Result], num_rows: int) -> list[Result]:
    """The results of all items, in order; in threads if there are many rows to compute."""
    if num_rows < _ROWS_FOR_THREADS or num_processors() == 1:
        return [call(item) for item in items]
    return list(compute_threads(num_processors()).map(call, items))


_NOTHING = ScoredRows(np.empty(0, np.int64), np.empty(0, np.float64))


def search_rows(vectors: FloatArray, rows: Rows, queries: FloatArray, k: int) -> list[ScoredRows]:
    """The best of the given rows, block by block. Shapes: vectors [K, E], rows ascending, queries [B, E]."""
    found = [_NOTHING for _ in queries]
    for first in range(0, len(rows) if k > 0 else 0, _BLOCK_ROWS):
        some = rows[first : first + _BLOCK_ROWS]
        block = np.asarray(vectors[some])
        for number, query in enumerate(queries):
            scores = np.append(found[number].scores, canonical_scores(query, block))
            found[number] = top_k(ScoredRows(np.append(found[number].rows, some), scores), k)
    return found


def top_k(scored: ScoredRows, k: int) -> ScoredRows:
    """The best `k` rows, and the rows that tie with the k-th."""
    if len(scored.rows) <= k:
        return scored
    kept = scored.scores >= np.partition(scored.scores, -k)[-k]
    return ScoredRows(scored.rows[kept], scored.scores[kept])


def rescoring_depth(k: int) -> int:
    """How many candidates are scored canonically for a top `k`."""
    return max(4 * k, k + 32)


def canonical_scores(query: FloatArray, vectors: FloatArray) -> NDArray[np.float64]:
    """Dot products with the same bits on every machine and in every batch.

    A product of two float32 is exact in float64, and the sum goes strictly from left to right.
    Shapes: query [E], vectors [K, E] float32 -> [K]. Raises: StoreCorrupt for a vector that is not finite.
    """
    sums = np.empty(len(vectors), np.float64)
    _sum_products(np.ascontiguousarray(vectors), np.ascontiguousarray(query), sums)
    if not np.isfinite(sums).all():
        raise StoreCorrupt("a stored vector holds no numbers: its file was changed while it was in use")
    return sums


@compiled(nogil=True)
def _sum_products(vectors: Any, query: Any, sums: Any) -> None:
    """Dot products of rows with a query, four rows at a time: each addition waits for the one before it in its row.

    Shapes: [K, E], [E]; out: [K].
    """
    num_rows = vectors.shape[0]
    for first in range(0, num_rows - 3, 4):
        a, b, c, d = 0.0, 0.0, 0.0, 0.0
        for i in range(vectors.shape[1]):
            x = np.float64(query[i])
            a += np.float64(vectors[first, i]) * x
            b += np.float64(vectors[first + 1, i]) * x
            c += np.float64(vectors[first + 2, i]) * x
            d += np.float64(vectors[first + 3, i]) * x
        sums[first], sums[first + 1], sums[first + 2], sums[first + 3] = a, b, c, d
    for row in range(num_rows - num_rows % 4, num_rows):
        total = 0.0
        for i in range(vectors.shape[1]):
            total += np.float64(vectors[row, i]) * np.float64(query[i])
        sums[row] = total


def float32_error_bound(dimension: int) -> float:
    """How far a float32 dot product of unit vectors can be from the exact one, in any order of summation (Higham 2002, 3.1)."""
    return 1.01 * (dimension + 2) * 2.0**-24

"""Exact search: the best rows by cosine, bit for bit the same alone or in a batch.

A packed matrix product (float32, block by block) proposes candidates. Their score is *defined* as the sequential float64 sum of
the products of the stored float32 values. The error of a float32 score has a known bound, so the search widens whenever a better
row may be missing: the result is the exact top k for any last bits of the product.

    >>> ExactIndex(segment.vectors).search(encoder.encode(["rain"], "query"), k=3)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.errors import ConfigError, StoreCorrupt
from ragspec.numerics.linear import PackedLinear, packing_available
from ragspec.numerics.threads import num_processors, run_in_thread
from ragspec.retrieval.encoder import FloatArray

Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]

_BLOCK_ROWS = 16_384
_QUERIES_PER_PRODUCT = 64
FEW_ROWS_SHARE = 0.05
"""At most this share of allowed rows is scanned without the index."""


def load_faiss() -> Any:
    """The module, imported when an index needs it. Raises: ConfigError if it is not installed."""
    try:
        import faiss
    except ImportError as cause:
        raise ConfigError("this index needs FAISS: install ragspec[cpu] or ragspec[gpu]") from cause
    return faiss


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


class ExactIndex:
    """Scores every row. Holds a packed copy of the mapped vectors."""

    def __init__(self, vectors: FloatArray) -> None:
        self._vectors = vectors  # [K, E]
        packed = packing_available()
        starts = range(0, len(vectors), _BLOCK_ROWS)
        self._blocks = run_in_thread(
            lambda: [_block(vectors[i : i + _BLOCK_ROWS], packed) for i in starts], num_processors()
        )
        self._max_error = float32_error_bound(vectors.shape[1])

    def search(self, queries: FloatArray, k: int, allowed: Mask | None = None) -> list[ScoredRows]:
        num_allowed = len(self._vectors) if allowed is None else int(np.count_nonzero(allowed))
        if k < 1 or num_allowed == 0:
            return [_NOTHING for _ in queries]
        if allowed is not None and num_allowed <= FEW_ROWS_SHARE * len(allowed):
            return search_rows(self._vectors, np.flatnonzero(allowed), queries, k)
        num_candidates = min(rescoring_depth(k), num_allowed)
        return run_in_thread(lambda: self._search(queries, k, num_candidates, allowed), num_processors())

    def _search(self, queries: FloatArray, k: int, num_candidates: int, allowed: Mask | None) -> list[ScoredRows]:
        forbidden = None if allowed is None else torch.from_numpy(~allowed)
        found: list[ScoredRows] = []
        for first in range(0, len(queries), _QUERIES_PER_PRODUCT):
            some = queries[first : first + _QUERIES_PER_PRODUCT]
            scores, rows = self._candidates(torch.from_numpy(np.ascontiguousarray(some)), num_candidates, forbidden)
            found += [self._rank(*each, k, forbidden) for each in zip(some, scores, rows, strict=True)]
        return found

    def _candidates(self, queries: Tensor, num_candidates: int, forbidden: Tensor | None) -> tuple[FloatArray, Rows]:
        """The best rows by float32 score, unordered. Shapes: queries [B, E] -> two [B, num_candidates]."""
        scores, rows = [], []
        for number in range(len(self._blocks)):
            block_scores = self._block_scores(number, queries, forbidden)
            top = torch.topk(block_scores, min(num_candidates, block_scores.shape[1]), sorted=False)
            scores.append(top.values)
            rows.append(top.indices + number * _BLOCK_ROWS)
        best = torch.topk(torch.cat(scores, dim=1), num_candidates, sorted=False)
        return best.values.numpy(), torch.cat(rows, dim=1).gather(1, best.indices).numpy()

    def _block_scores(self, number: int, queries: Tensor, forbidden: Tensor | None) -> Tensor:
        """Shapes: queries [B, E] -> [B, block]; -inf where a row is forbidden."""
        scores = self._blocks[number](queries)
        if forbidden is not None:
            start = number * _BLOCK_ROWS
            scores.masked_fill_(forbidden[start : start + scores.shape[1]], -torch.inf)
        return scores

    def _rank(self, query: FloatArray, scores: FloatArray, rows: Rows, k: int, forbidden: Tensor | None) -> ScoredRows:
        """The canonical top k of one query, given its candidates."""
        best = top_k(ScoredRows(rows, canonical_scores(query, self._vectors[rows])), k)
        kth = float(best.scores.min())
        if len(rows) == len(self._vectors) or float(scores.min()) + self._max_error < kth:
            return best
        more = self._rows_above(query, kth - self._max_error, forbidden)
        return search_rows(self._vectors, more, query[None], k)[0]

    def _rows_above(self, query: FloatArray, threshold: float, forbidden: Tensor | None) -> Rows:
        """Every row whose float32 score reaches `threshold`: the candidates, and rows that nearly tie with the last of them."""
        one = torch.from_numpy(query)[None]
        found = [
            (self._block_scores(number, one, forbidden)[0] >= threshold).nonzero()[:, 0] + number * _BLOCK_ROWS
            for number in range(len(self._blocks))
        ]
        return torch.cat(found).numpy()


_NOTHING = ScoredRows(np.empty(0, np.int64), np.empty(0, np.float64))


def search_rows(vectors: FloatArray, rows: Rows, queries: FloatArray, k: int) -> list[ScoredRows]:
    """The best of the given rows, block by block. Shapes: vectors [K, E], rows ascending, queries [B, E]."""
    found = [_NOTHING for _ in queries]
    for first in range(0, len(rows) if k > 0 else 0, _BLOCK_ROWS):
        some = rows[first : first + _BLOCK_ROWS]
        block = np.asarray(vectors[some], np.float64)
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


def canonical_scores(query: FloatArray, vectors: NDArray[np.floating]) -> NDArray[np.float64]:
    """Dot products with the same bits on every machine and in every batch.

    A product of two float32 is exact in float64, and `accumulate` adds strictly from left to right.
    Shapes: query [E], vectors [K, E] -> [K]. Raises: StoreCorrupt for a vector that is not finite.
    """
    products = vectors.astype(np.float64, copy=False) * query.astype(np.float64)  # [K, E]
    sums: NDArray[np.float64] = np.add.accumulate(products, axis=1)[:, -1]
    if not np.isfinite(sums).all():
        raise StoreCorrupt("a stored vector holds no numbers: its file was changed while it was in use")
    return sums


def float32_error_bound(dimension: int) -> float:
    """How far a float32 dot product of unit vectors can be from the exact one, in any order of summation (Higham 2002, 3.1)."""
    return 1.01 * (dimension + 2) * 2.0**-24


def _block(vectors: FloatArray, packed: bool) -> Callable[[Tensor], Tensor]:
    weight = torch.from_numpy(np.array(vectors))  # Why a copy: the mapped file is read-only, which torch warns about
    return PackedLinear(weight) if packed else lambda queries: queries @ weight.T

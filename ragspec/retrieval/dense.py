"""Exact search: the best rows by cosine, in one canonical order, bit for bit the same alone or in a batch.

A packed matrix product (float32, block by block) proposes candidates; their score is *defined* as the sequential float64 sum of
the products of the stored float32 values. A float32 score is off by at most a known bound, so candidates that could hide a better
row are found out and the search is widened: the result is the exact top k whatever the product's last bits are.

    >>> ExactIndex(store.vectors, store.passage_key).search(encoder.encode(["rain"], "query"), k=3)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.numerics.linear import PackedLinear, packing_available
from ragspec.numerics.threads import compute_apart, num_processors
from ragspec.retrieval.encoder import FloatArray

_BLOCK_ROWS = 16_384
_QUERIES_PER_PRODUCT = 64


class Hit(NamedTuple):
    row: int
    score: float


class DenseIndex(Protocol):
    """Finds rows for query vectors; every implementation returns its hits in the canonical order."""

    def search(self, queries: FloatArray, k: int) -> list[list[Hit]]:
        """Up to `k` hits a query, sorted by (-score, document id, ordinal). Shapes: queries [B, E] float32, L2-normalised."""
        ...


class ExactIndex:
    """Every row is looked at. Holds a packed copy of the vectors beside the mapped ones."""

    def __init__(self, vectors: FloatArray, passage_key: Callable[[int], tuple[str, int]]) -> None:
        self._vectors = vectors  # [K, E]
        self._passage_key = passage_key
        self._packed = packing_available()
        starts = range(0, len(vectors), _BLOCK_ROWS)
        self._blocks = compute_apart(
            lambda: [_block(vectors[i : i + _BLOCK_ROWS], self._packed) for i in starts], num_processors()
        )
        self._max_error = _float32_error(vectors.shape[1])

    def search(self, queries: FloatArray, k: int) -> list[list[Hit]]:
        num_candidates = min(max(4 * k, k + 32), len(self._vectors))
        if k < 1 or num_candidates == 0:
            return [[] for _ in queries]
        return compute_apart(lambda: self._search(queries, k, num_candidates), num_processors())

    def _search(self, queries: FloatArray, k: int, num_candidates: int) -> list[list[Hit]]:
        hits: list[list[Hit]] = []
        for first in range(0, len(queries), _QUERIES_PER_PRODUCT):
            some = queries[first : first + _QUERIES_PER_PRODUCT]
            scores, rows = self._candidates(torch.from_numpy(np.ascontiguousarray(some)), num_candidates)
            hits += [self._rank(*each, k) for each in zip(some, scores, rows, strict=True)]
        return hits

    def _candidates(self, queries: Tensor, num_candidates: int) -> tuple[FloatArray, NDArray[np.int64]]:
        """The best rows by float32 score, unordered. Shapes: queries [B, E] -> two [B, num_candidates]."""
        scores, rows = [], []
        for number, block in enumerate(self._blocks):
            block_scores = block(queries)  # [B, block]
            top = torch.topk(block_scores, min(num_candidates, block_scores.shape[1]), sorted=False)
            scores.append(top.values)
            rows.append(top.indices + number * _BLOCK_ROWS)
        best = torch.topk(torch.cat(scores, dim=1), num_candidates, sorted=False)
        return best.values.numpy(), torch.cat(rows, dim=1).gather(1, best.indices).numpy()

    def _rank(self, query: FloatArray, scores: FloatArray, rows: NDArray[np.int64], k: int) -> list[Hit]:
        """The canonical top k of one query, given its candidates."""
        exact = canonical_scores(query, self._vectors[rows])
        kth = float(np.sort(exact)[-min(k, len(exact))])
        if len(rows) < len(self._vectors) and float(scores.min()) + self._max_error >= kth:
            rows = self._rows_above(query, kth - self._max_error)
            exact = canonical_scores(query, self._vectors[rows])
        kept = exact >= kth
        hits = [Hit(int(row), float(score)) for row, score in zip(rows[kept], exact[kept], strict=True)]
        return sorted(hits, key=lambda hit: (-hit.score, *self._passage_key(hit.row)))[:k]

    def _rows_above(self, query: FloatArray, threshold: float) -> NDArray[np.int64]:
        """Every row whose float32 score reaches `threshold`: duplicates and near ties at the border of the candidates."""
        one = torch.from_numpy(query)[None]
        found = [
            (block(one)[0] >= threshold).nonzero()[:, 0] + number * _BLOCK_ROWS
            for number, block in enumerate(self._blocks)
        ]
        return torch.cat(found).numpy()


def canonical_scores(query: FloatArray, vectors: FloatArray) -> NDArray[np.float64]:
    """Dot products that no machine, batch or library changes.

    A product of two float32 is exact in float64, and `accumulate` adds strictly from left to right.
    Shapes: query [E], vectors [K, E] -> [K].
    """
    products = vectors.astype(np.float64) * query.astype(np.float64)  # [K, E]
    sums: NDArray[np.float64] = np.add.accumulate(products, axis=1)[:, -1]
    return sums


def _float32_error(dimension: int) -> float:
    """How far a float32 dot product of unit vectors can be from the exact one, in any order of summation (Higham 2002, 3.1)."""
    return 1.01 * (dimension + 2) * 2.0**-24


def _block(vectors: FloatArray, packed: bool) -> Callable[[Tensor], Tensor]:
    weight = torch.from_numpy(np.array(vectors))  # Why a copy: the mapped file is read-only, which torch warns about
    return PackedLinear(weight) if packed else lambda queries: queries @ weight.T

"""Exact search in the canonical order."""

from __future__ import annotations

from math import fsum

import numpy as np
import pytest

from ragspec.retrieval import dense
from ragspec.retrieval.dense import ExactIndex, Hit, canonical_scores
from ragspec.retrieval.encoder import FloatArray


def unit(rng: np.random.Generator, rows: int, dimension: int = 64) -> FloatArray:
    vectors = rng.standard_normal((rows, dimension)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def by_row(row: int) -> tuple[str, int]:
    return f"{row:08d}", 0


def canonical(queries: FloatArray, vectors: FloatArray, k: int) -> list[list[Hit]]:
    """The definition, without blocks, candidates or packing."""
    found = []
    for query in queries:
        scores = canonical_scores(query, vectors)
        order = sorted(range(len(vectors)), key=lambda row: (-scores[row], by_row(row)))[:k]
        found.append([Hit(row, float(scores[row])) for row in order])
    return found


@pytest.mark.parametrize("rows", [1, 7, 300, 20_000])
def test_search_is_exact_and_the_same_alone_or_in_a_batch(rows: int) -> None:
    """Approximate candidates or batch-dependent bits give other passages for the same question."""
    rng = np.random.default_rng(rows)
    vectors, queries = unit(rng, rows), unit(rng, 9)
    index = ExactIndex(vectors, by_row)
    for k in (1, 20):
        together = index.search(queries, k)
        assert together == canonical(queries, vectors, k)
        assert together == [index.search(query[None], k)[0] for query in queries]


@pytest.mark.parametrize("packed", [True, False])
def test_equal_scores_are_ordered_by_document_id(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more duplicates than candidates, an arbitrary subset of them was ranked: another one on every machine."""
    monkeypatch.setattr(dense, "packing_available", lambda: packed)
    monkeypatch.setattr(dense, "_BLOCK_ROWS", 100)
    rng = np.random.default_rng(1)
    vectors = np.concatenate([unit(rng, 50), np.repeat(unit(rng, 1), 400, axis=0), unit(rng, 50)])
    index = ExactIndex(vectors, lambda row: (f"{9999 - row}", 0))  # the last row is the first in order
    assert [hit.row for hit in index.search(vectors[60:61], 3)[0]] == [449, 448, 447]


def test_near_ties_at_the_border_of_the_candidates_are_found() -> None:
    """Scores closer than float32 can tell apart: the best of them may not be among the float32 candidates."""
    rng = np.random.default_rng(2)
    near = np.repeat(unit(rng, 1, 384), 2000, axis=0) + rng.standard_normal((2000, 384)).astype(np.float32) * 1e-8
    vectors = np.concatenate([near, unit(rng, 2000, 384)]).astype(np.float32)
    queries = near[:3]
    assert ExactIndex(vectors, by_row).search(queries, 4) == canonical(queries, vectors, 4)


def test_fewer_rows_than_asked_and_nothing_asked() -> None:
    """topk of more than there is raises."""
    vectors = unit(np.random.default_rng(3), 2)
    index = ExactIndex(vectors, by_row)
    assert len(index.search(vectors[:1], 10)[0]) == 2
    assert index.search(vectors[:1], 0) == [[]]
    assert index.search(vectors[:0], 3) == []
    assert ExactIndex(vectors[:0], by_row).search(vectors[:1], 3) == [[]]


def test_canonical_scores_are_exact_to_the_last_bits() -> None:
    """A score summed in float32, or in an order that depends on the width of vectors, differs between machines."""
    rng = np.random.default_rng(4)
    vectors, query = unit(rng, 50, 384), unit(rng, 1, 384)[0]
    for row, score in enumerate(canonical_scores(query, vectors)):
        products = [float(a) * float(b) for a, b in zip(vectors[row], query, strict=True)]
        in_order = 0.0
        for product in products:
            in_order += product
        assert score == in_order
        assert abs(score - fsum(products)) < 1e-14


def test_results_equal_faiss() -> None:
    """A second implementation, written by others."""
    faiss = pytest.importorskip("faiss")
    rng = np.random.default_rng(5)
    vectors, queries = unit(rng, 5000, 384), unit(rng, 20, 384)
    flat = faiss.IndexFlatIP(384)
    flat.add(vectors)
    scores, rows = flat.search(queries, 10)
    found = ExactIndex(vectors, by_row).search(queries, 10)
    assert [[hit.row for hit in hits] for hits in found] == rows.tolist()
    np.testing.assert_allclose([[hit.score for hit in hits] for hits in found], scores, atol=1e-6)

"""Exact search in the canonical order."""

from math import fsum

import numpy as np
import pytest
from numpy.typing import NDArray
from unit_vectors import unit

from ragspec.retrieval.encoder import FloatArray
from ragspec.retrieval.search import dense
from ragspec.retrieval.search.dense import ExactIndex, RoundedRows, ScoredRows, canonical_scores


def canonical(
    queries: FloatArray, vectors: FloatArray, k: int, rows: NDArray[np.int64] | None = None
) -> list[list[tuple[int, float]]]:
    """The definition, without blocks or candidates: (row, score), ties by row."""
    rows = np.arange(len(vectors)) if rows is None else rows
    found = []
    for query in queries:
        scores = canonical_scores(query, vectors[rows])
        order = sorted(range(len(rows)), key=lambda place: (-scores[place], rows[place]))[:k]
        found.append([(int(rows[place]), float(scores[place])) for place in order])
    return found


def ranked(found: list[ScoredRows], k: int) -> list[list[tuple[int, float]]]:
    return [
        sorted(zip(each.rows.tolist(), each.scores.tolist(), strict=True), key=lambda hit: (-hit[1], hit[0]))[:k]
        for each in found
    ]


@pytest.fixture(params=[False, True], ids=["one thread", "threads"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small searches compute in one thread, large ones in several."""
    if request.param:
        monkeypatch.setattr(dense, "_ROWS_FOR_THREADS", 0)
        monkeypatch.setattr(dense, "num_processors", lambda: 3)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rows", [7, 2500])
def test_search_is_exact_and_the_same_alone_or_in_a_batch(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Approximate candidates or batch-dependent bits give other passages for the same question."""
    monkeypatch.setattr(dense, "_BLOCK_ROWS", 1000)
    rng = np.random.default_rng(rows)
    vectors, queries = unit(rng, rows), unit(rng, 9)
    index = ExactIndex(vectors)
    for k in (1, 20):
        together = ranked(index.search(queries, k), k)
        assert together == canonical(queries, vectors, k)
        assert together == [ranked(index.search(query[None], k), k)[0] for query in queries]


@pytest.mark.usefixtures("threads")
def test_everything_that_ties_with_the_last_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more duplicates than candidates, an arbitrary subset of them was ranked: another one on every machine."""
    monkeypatch.setattr(dense, "_BLOCK_ROWS", 100)
    rng = np.random.default_rng(1)
    vectors = np.concatenate([unit(rng, 50), np.repeat(unit(rng, 1), 400, axis=0), unit(rng, 50)])
    (found,) = ExactIndex(vectors).search(vectors[60:61], 3)
    assert sorted(found.rows.tolist()) == list(range(50, 450))


def test_near_ties_at_the_border_of_the_candidates_are_found() -> None:
    """Scores closer than float32 can tell apart: the best of them may not be among the candidates."""
    rng = np.random.default_rng(2)
    near = np.repeat(unit(rng, 1, 384), 2000, axis=0) + rng.standard_normal((2000, 384)).astype(np.float32) * 1e-8
    vectors = np.concatenate([near, unit(rng, 2000, 384)]).astype(np.float32)
    queries = near[:3]
    assert ranked(ExactIndex(vectors).search(queries, 4), 4) == canonical(queries, vectors, 4)


def test_fewer_rows_than_asked_and_nothing_asked() -> None:
    """A selection of more rows than there are raises."""
    vectors = unit(np.random.default_rng(3), 2)
    index = ExactIndex(vectors)
    assert len(index.search(vectors[:1], 10)[0].rows) == 2
    assert index.search(vectors[:0], 3) == []
    nothing = [index.search(vectors[:1], 0), index.search(vectors[:1], 3, np.zeros(2, bool))]
    assert all(len(found.rows) == 0 for (found,) in [*nothing, ExactIndex(vectors[:0]).search(vectors[:1], 3)])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("share", [0.001, 0.04, 0.06, 0.5, 0.999])
def test_only_allowed_rows_are_found_and_all_of_them(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter that is applied to the best hits leaves fewer than were asked for, or none."""
    monkeypatch.setattr(dense, "_BLOCK_ROWS", 1000)
    rng = np.random.default_rng(6)
    vectors, queries = unit(rng, 5000), unit(rng, 5)
    allowed = rng.random(5000) < share
    expected = canonical(queries, vectors, 20, np.flatnonzero(allowed))
    assert ranked(ExactIndex(vectors).search(queries, 20, allowed), 20) == expected
    assert all(len(hits) == min(20, int(allowed.sum())) for hits in expected)


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
    found = ranked(ExactIndex(vectors).search(queries, 10), 10)
    assert [[row for row, _ in hits] for hits in found] == rows.tolist()
    np.testing.assert_allclose([[score for _, score in hits] for hits in found], scores, atol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 0.0])
def test_no_score_exceeds_its_bound(scale: float) -> None:
    """A bound too low drops a passage from the best without a trace."""
    rng = np.random.default_rng(7)
    spikes = np.zeros((300, 384), np.float32)
    spikes[np.arange(300), np.arange(300) % 7] = 1.0  # one coordinate far above the others: 8 bits keep little of these
    vectors = np.concatenate([unit(rng, 300, 384), spikes + scale * unit(rng, 300, 384)]).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    queries = np.concatenate([unit(rng, 6, 384), vectors[-3:]])
    bounds = RoundedRows.of(vectors, 0).bounds(queries, None)
    for query, own in zip(queries, bounds, strict=True):
        assert (own >= canonical_scores(query, vectors)).all()
        assert ranked(ExactIndex(vectors).search(query[None], 5), 5) == canonical(query[None], vectors, 5)


@pytest.mark.parametrize("share", [0.0, 0.8])
def test_a_coordinate_that_dominates_all_rows_leaves_the_bounds_tight(share: float) -> None:
    """States of language models have such coordinates; then nearly every row might be the best, and all were scored exactly."""
    rng = np.random.default_rng(8)
    vectors = unit(rng, 3000, 576) * np.float32((1 - share**2) ** 0.5)
    vectors[:, 5] += np.float32(share)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    scores = canonical_scores(vectors[7], vectors)
    reach = RoundedRows.of(vectors, 0).bounds(vectors[7:8], None)[0] >= np.sort(scores)[-8]
    assert 8 <= reach.sum() < 100

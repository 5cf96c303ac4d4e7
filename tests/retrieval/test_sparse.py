"""BM25: the formula to the last bit, whatever the layout, and files that depend on nothing but the rows."""

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from bm25_formula import formula_scores
from hypothesis import given, settings
from hypothesis import strategies as st

from ragspec.errors import StoreCorrupt
from ragspec.retrieval.search import bm25 as sparse
from ragspec.retrieval.search.bm25 import (
    K1,
    POSTING_FILES,
    B,
    Mask,
    Postings,
    PostingsBuilder,
    SparseQuery,
    TermStatistics,
    sparse_query,
)

Rows = list[list[str]]
TERMS = ["a", "b", "rain", "über", "雨", "雨が", "🌧", "\U00010000", "\uffff", ""]

rows_of_terms = st.lists(st.lists(st.sampled_from(TERMS), max_size=12), max_size=30)
queries = st.lists(st.sampled_from([*TERMS, "nowhere"]), max_size=6)


def build(rows: Sequence[Sequence[str]], folder: Path) -> Postings:
    folder.mkdir(exist_ok=True)
    builder = PostingsBuilder()
    for terms in rows:
        builder.add(terms)
    builder.write(folder)
    return Postings(folder)


def written(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in POSTING_FILES}


def search(segments: Sequence[Postings], masks: Sequence[Mask | None], query: list[str]) -> dict[int, float]:
    """Scores by global row number over segments that follow one another."""
    parts = [postings.statistics(query, mask) for postings, mask in zip(segments, masks, strict=True)]
    asked = sparse_query(query, sum(parts, TermStatistics()))
    found: dict[int, float] = {}
    first = 0
    for postings, mask in zip(segments, masks, strict=True):
        rows, scores = postings.scores(asked, mask)
        assert rows.dtype == np.int64 and scores.dtype == np.float64 and np.all(np.diff(rows) > 0)
        found.update(zip((rows + first).tolist(), scores.tolist(), strict=True))
        first += postings.num_rows
    return found


@settings(max_examples=40, deadline=None)
@given(rows_of_terms, queries, st.data())
def test_scores_equal_the_formula_bit_for_bit_over_any_layout(
    rows: Rows, query: list[str], data: st.DataObject
) -> None:
    """Local statistics, another order of summation or a fused multiply-add make shards rank otherwise than one machine."""
    readable = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    bounds = [0, *cuts, len(rows)]
    expected = formula_scores(rows, readable, query)
    with tempfile.TemporaryDirectory() as folder:
        spans = [slice(*bounds[i : i + 2]) for i in range(len(bounds) - 1)]
        segments = [build(rows[span], Path(folder) / str(number)) for number, span in enumerate(spans)]
        assert search(segments, [np.array(readable[span], bool) for span in spans], query) == expected
        if all(readable):
            assert search(segments, [None] * len(segments), query) == expected


@settings(max_examples=20, deadline=None)
@given(st.lists(rows_of_terms, max_size=4), st.data())
def test_merging_writes_the_bytes_that_adding_the_kept_rows_writes(parts: list[Rows], data: st.DataObject) -> None:
    """Terms of deleted rows that stay, or another order, give a compacted index other hashes than a rebuilt one."""
    kept = [sorted(data.draw(st.sets(st.integers(0, len(rows) - 1)))) if rows else [] for rows in parts]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        segments = [build(rows, folder / str(number)) for number, rows in enumerate(parts)]
        (folder / "merged").mkdir()
        builder = PostingsBuilder()
        for segment, k in zip(segments, kept, strict=True):
            builder.add_postings(segment, np.array(k, np.int64))
        builder.write(folder / "merged")
        build([rows[i] for rows, k in zip(parts, kept, strict=True) for i in k], folder / "rebuilt")
        assert written(folder / "merged") == written(folder / "rebuilt")


@pytest.mark.parametrize("block_terms", [1, 7, 1000])
def test_the_size_of_blocks_changes_no_byte(block_terms: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row lost or counted twice where one block ends, or an index that depends on the memory there was."""
    rng = np.random.default_rng(1)
    rows = [[f"t{t}" for t in rng.zipf(1.5, size=rng.integers(0, 9))] for _ in range(200)]
    build(rows, tmp_path / "whole")
    monkeypatch.setattr(sparse, "_BLOCK_TERMS", block_terms)
    build(rows, tmp_path / "blocks")
    assert written(tmp_path / "blocks") == written(tmp_path / "whole")


def test_rows_beyond_one_scoring_block_score_as_within_it(tmp_path: Path) -> None:
    """The kernel works through blocks of rows; a sum left over in one block falls to a row of the next."""
    num_rows = 2 * sparse._BLOCK_ROWS + 5
    rows = [["common"] + ["rare"] * (n % 5000 == 3) + ["filler"] * (n % 7) for n in range(num_rows)]
    query = ["common", "rare"]
    whole = build(rows, tmp_path / "whole")
    parts = [build(rows[i : i + 1000], tmp_path / str(i)) for i in range(0, num_rows, 1000)]
    found = search([whole], [None], query)
    assert len(found) == num_rows
    assert found == search(parts, [None] * len(parts), query)
    rare = [n for n in range(num_rows) if n % 5000 == 3]
    assert sorted(sorted(found, key=lambda n: -found[n])[: len(rare)]) == rare
    only = np.zeros(num_rows, bool)
    only[[3, 8191, 8192, num_rows - 1]] = True
    rows_found, _ = whole.scores(sparse_query(query, whole.statistics(query)), only)
    assert rows_found.tolist() == [3, 8191, 8192, num_rows - 1]


def test_a_term_may_occur_more_often_than_a_byte_counts(tmp_path: Path) -> None:
    """Counts in one byte wrap around at 256: the passage that is all about rain looks as if it never mentioned it."""
    rows = [["rain"] * n for n in (255, 256, 70_000)] + [["snow"]]
    found = search([build(rows, tmp_path / "whole")], [None], ["rain"])
    assert found == formula_scores(rows, [True] * 4, ["rain"])
    builder = PostingsBuilder()
    builder.add_postings(Postings(tmp_path / "whole"), np.array([0, 3]))
    builder.write(tmp_path)
    assert Postings(tmp_path).counts.dtype == np.uint8


def test_document_frequencies_count_readable_rows_only(tmp_path: Path) -> None:
    """A deleted or foreign passage that still counts tells a tenant about texts it may not read."""
    postings = build([["rain"], ["rain", "snow", "rain"], [], ["snow"]], tmp_path / "s")
    assert postings.statistics(["rain", "snow", "hail"]).frequencies == {"rain": 2, "snow": 2, "hail": 0}
    readable = np.array([True, False, True, True])
    assert postings.statistics(["snow", "rain", "rain"], readable) == TermStatistics(3, 2, {"rain": 1, "snow": 1})
    assert postings.frequency("hail", readable) == 0


def test_statistics_add_up_whatever_the_order() -> None:
    """Shards answer in any order, and some have nothing to say."""
    parts = [TermStatistics(3, 10, {"a": 1}), TermStatistics(), TermStatistics(4, 5, {"b": 2, "a": 3})]
    expected = TermStatistics(7, 15, {"a": 4, "b": 2})
    assert sum(parts, TermStatistics()) == sum(parts[::-1], TermStatistics()) == expected


def test_nothing_to_search_and_nothing_asked_give_nothing(tmp_path: Path) -> None:
    """An empty segment cannot be mapped by every numpy; an average length of nothing divides by zero."""
    for number, rows in enumerate(([], [[]], [["rain"]])):
        postings = build(rows, tmp_path / str(number))
        assert postings.num_rows == len(rows)
        assert search([postings], [None], []) == {}
        assert search([postings], [None], ["nowhere", ""]) == {}
        assert search([postings], [np.zeros(len(rows), bool)], ["rain"]) == {}


def test_terms_are_found_among_many_whatever_their_script(tmp_path: Path) -> None:
    """Sorting by UTF-16 units or by locale puts some terms where the binary search never looks."""
    rng = np.random.default_rng(0)
    planes = ((0x20, 0x7F), (0xC0, 0x250), (0x4E00, 0x9FFF), (0xFF00, 0xFFFF), (0x1F300, 0x1F600))
    terms = sorted({"".join(chr(rng.integers(*planes[rng.integers(5)])) for _ in range(3)) for _ in range(3000)})
    postings = build([[term] for term in terms], tmp_path / "s")
    assert [term.encode() for term in postings.terms] == sorted(term.encode() for term in terms)
    for number, term in enumerate(terms):
        assert postings.rows[postings.postings(term)].tolist() == [number]
        assert postings.frequency(term + "x") == 0


@pytest.mark.parametrize("name", POSTING_FILES)
def test_files_that_do_not_fit_together_are_refused(name: str, tmp_path: Path) -> None:
    """A file of another segment, copied over, would read beyond the end of an array in compiled code."""
    build([["rain", "snow"], ["rain"]], tmp_path / "s")
    path = tmp_path / "s" / name
    for damage in (lambda a: a[:-1], lambda a: a.astype(np.float32), lambda a: a[None]):
        whole = path.read_bytes()
        np.save(path, damage(np.load(path)))
        with pytest.raises(StoreCorrupt):
            Postings(tmp_path / "s")
        path.write_bytes(whole)
    path.unlink()
    with pytest.raises(StoreCorrupt):
        Postings(tmp_path / "s")


def test_scores_agree_with_another_library(tmp_path: Path) -> None:
    """A formula that only agrees with its own copy in the tests may be another formula."""
    bm25s = pytest.importorskip("bm25s", reason="the comparison needs bm25s")
    rng = np.random.default_rng(0)
    rows = [[f"t{t}" for t in rng.zipf(1.3, size=rng.integers(1, 60)) if t < 5000] or ["t1"] for _ in range(500)]
    peer = bm25s.BM25(method="lucene", k1=K1, b=B)
    peer.index(rows, show_progress=False)
    postings = build(rows, tmp_path / "s")
    for _ in range(30):
        query = sorted({f"t{t}" for t in rng.zipf(1.3, size=5)} & {term for terms in rows for term in terms})
        scores = np.zeros(len(rows))
        found = search([postings], [None], query)
        scores[list(found)] = list(found.values())
        np.testing.assert_allclose(peer.get_scores(query), scores, rtol=1e-4, atol=1e-6)


def test_a_query_is_the_same_in_any_order_of_its_terms() -> None:
    """Float sums depend on their order: "rain snow" and "snow rain" would score a passage differently."""
    statistics = TermStatistics(10, 50, {"a": 3, "b": 1})
    query = sparse_query(["b", "a", "b"], statistics)
    assert query == sparse_query(["b", "b", "a"], statistics)
    assert isinstance(query, SparseQuery) and query.terms == ("a", "b") and query.average_length == 5.0
    assert query.weights == (math.log(1 + 7.5 / 3.5), 2 * math.log(1 + 9.5 / 1.5))

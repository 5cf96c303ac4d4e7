"""The parts of the retrieval suite: what is timed, what is compared, what is made up."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from letter_encoder import LetterEncoder
from stand_ins import no_tick

from ragspec.config import ChunkingConfig
from ragspec.core import Document
from ragspec.evaluation.machine import held_mb
from ragspec.evaluation.suites.retrieval import timing
from ragspec.evaluation.suites.retrieval.collections import DIMENSION, Mixture, synthetic_documents, write_vectors
from ragspec.evaluation.suites.retrieval.identity import (
    NUM_COMMITS,
    IdentityCheck,
    IdentityCounts,
    IndexLayout,
    layouts,
)
from ragspec.evaluation.suites.retrieval.quality import MODES
from ragspec.evaluation.suites.retrieval.speed import EXACT, FLAT, best_rows, contenders, faiss_contender, recall
from ragspec.evaluation.suites.retrieval.timing import Blocks, TimedEncoder, TimingPlan, build_speed, timed_blocks
from ragspec.retrieval.chunking import chunk
from ragspec.retrieval.encoder import FloatArray, TextKind
from ragspec.retrieval.index.manifest import VECTORS
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.retriever import build_index
from ragspec.retrieval.search.dense import ScoredRows
from ragspec.retrieval.search.segment_search import Shard


class BatchDependent(LetterEncoder):
    """A query's vector changes its last bits with the size of its batch, as many libraries' do."""

    def encode(self, texts: Sequence[str], kind: TextKind = "document") -> FloatArray:
        vectors = super().encode(texts, kind)
        return np.nextafter(vectors, np.float32(2.0)) if kind == "query" and len(texts) > 1 else vectors


class OrderDependent(LetterEncoder):
    """A document's vector depends on what was encoded beside it."""

    def encode(self, texts: Sequence[str], kind: TextKind = "document") -> FloatArray:
        vectors = super().encode(texts, kind)
        if kind == "document" and len(texts) > 1:
            vectors[0] = np.nextafter(vectors[0], np.float32(2.0))
        return vectors


def documents(count: int = 60) -> list[Document]:
    words = ("rain", "mill", "river", "bridge", "stone", "sand", "hill", "boat")
    return [Document(f"d{n}", f"The {words[n % 8]} of {words[n // 8 % 8]} is number {n}.") for n in range(count)]


QUERIES = [
    "rain of mill",
    "stone bridge",
    "boat number 7",
    "sand",
    "hill of rain",
    "river river",
    "number 41",
    "old mill",
]


def test_identity_holds_for_an_honest_encoder(tmp_path: Path) -> None:
    """Bug guarded: an index whose answers depend on batch, layout, compaction or the order of its documents."""
    identical = IdentityCheck(LetterEncoder(), documents(), QUERIES).measure(tmp_path, no_tick)
    assert identical.share == 1.0
    assert set(identical.counts()) == set(MODES)
    assert set(identical.counts()["dense"].values()) == {"8/8"} and len(identical.counts()["dense"]) == 7


@pytest.mark.parametrize(
    ("encoder", "way"), [(BatchDependent(), "batches of 7"), (OrderDependent(), "rebuilt in another order")]
)
def test_identity_fails_for_a_bit_that_differs(encoder: LetterEncoder, way: str, tmp_path: Path) -> None:
    """The check can fail: one last bit of one vector is found out, in the mode that uses vectors alone."""
    identical = IdentityCheck(encoder, documents(), QUERIES).measure(tmp_path, no_tick)
    assert identical.share < 1.0
    assert identical.same["dense"][way] < len(QUERIES)
    assert identical.same["sparse"][way] == len(QUERIES)


def test_identity_fails_for_a_lost_segment(tmp_path: Path) -> None:
    """The check can fail: a layout that forgets a segment."""
    identity = IdentityCheck(LetterEncoder(), documents(), QUERIES)
    identity.measure(tmp_path, no_tick)
    store = Store.open(tmp_path / "grown")
    identical = IdentityCounts(len(QUERIES), {mode: Counter() for mode in MODES})
    truth = {mode: identity.answers(IndexLayout("alone", store, 1), mode, no_tick) for mode in MODES}
    forgetful = IndexLayout("forgetful", store, 64, lambda opened: Shard.open([]))
    identity.compare([forgetful], truth, identical, no_tick)
    assert identical.share == 0.0


def test_layouts_need_several_segments(tmp_path: Path) -> None:
    """Bug guarded: one segment, in which case every layout is the same and the check empty."""
    build_index(documents(), tmp_path, LetterEncoder())
    with pytest.raises(AssertionError):
        list(layouts(Store.open(tmp_path)))
    assert NUM_COMMITS > 3


def test_contenders_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: all calls of one contender after all of another, so that a machine's mood decides; uncounted batches."""
    calls: list[str] = []
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))

    def search(queries: FloatArray) -> None:
        clock.now_s += 0.001 * len(queries)

    def contender(name: str) -> tuple[Callable[[FloatArray], None], Callable[[Callable[[], None]], None]]:
        def run(block: Callable[[], None]) -> None:
            calls.append(name)
            block()

        return search, run

    queries = np.zeros((8, 4), np.float32)
    plan = TimingPlan(8, (1, 4), num_rounds=2, block_s=0.0)
    blocks = timed_blocks({"a": contender("a"), "b": contender("b")}, queries, plan)
    assert calls == ["a", "b"] * 4
    assert all(len(blocks.calls_ms[name][batch]) == 2 for name in "ab" for batch in (1, 4))
    assert blocks.p50_ms("a", 4) == pytest.approx(4.0)
    assert blocks.ratio(("a", 4), ("a", 1)) == pytest.approx(4.0)


def test_ratio_is_formed_within_a_round() -> None:
    """Bug guarded: a round on a slow machine divided by one on a fast machine."""
    factors = (1.0, 10.0, 1.0)
    blocks = Blocks(
        {"a": {1: [[factor, factor, 9.0 * factor] for factor in factors], 16: [[2.0 * f] for f in factors]}}
    )
    assert blocks.ratio(("a", 16), ("a", 1)) == 2.0
    assert blocks.summary("a")["p95 ms, batch 1"] > blocks.summary("a")["p50 ms, batch 1"]


def test_memory_held_is_seen() -> None:
    """Bug guarded: sizes of zero because freed memory was taken again."""
    before = held_mb()
    block = np.ones(5_000_000)
    assert 35.0 < held_mb() - before < 45.0
    del block
    assert abs(held_mb() - before) < 5.0


def test_recall_and_best_rows() -> None:
    """Bug guarded: rows beyond the tenth, or in another order, counted as found."""
    scored = ScoredRows(np.arange(12), np.array([0.5] * 11 + [0.9]))
    assert best_rows([scored]) == [[11, *range(9)]]
    assert recall([[1, 2]], [[2, 3]]) == 0.5


def test_contenders_agree_where_both_are_exact(tmp_path: Path) -> None:
    """Bug guarded: a comparison of searches that do not look for the same."""
    mixture = Mixture(500, seed=0)
    write_vectors(tmp_path / VECTORS, mixture, 500)
    found = {each.name: each for each in contenders(tmp_path, ("hnsw",))}
    queries = mixture.draw(20)
    assert recall(found[FLAT].found(queries), found[EXACT].found(queries)) == 1.0
    assert found["FAISS HNSW"].column["build s"] > 0 and found[EXACT].column["file MB"] > 0.7
    assert "HNSW" not in found, "the rule builds none of so few rows"


def test_vectors_are_a_function_of_the_seed(tmp_path: Path) -> None:
    """Bug guarded: other vectors in every run, or vectors whose dot product is no cosine."""
    write_vectors(tmp_path / "a.npy", Mixture(300, seed=1), 300)
    vectors = np.load(tmp_path / "a.npy")
    assert np.array_equal(vectors, Mixture(300, seed=1).draw(300))
    assert not np.array_equal(vectors, Mixture(300, seed=2).draw(300))
    assert vectors.shape == (300, DIMENSION) and vectors.dtype == np.float32
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)


def test_nearest_vectors_are_as_near_as_passages_are() -> None:
    """Bug guarded: clusters so tight that every approximate search finds everything."""
    mixture = Mixture(5_000, seed=0)
    vectors, queries = mixture.draw(5_000), mixture.draw(50)
    tenth = np.sort(queries @ vectors.T, axis=1)[:, -10]
    assert 0.35 < float(tenth.mean()) < 0.6


def test_synthetic_documents_have_the_length_they_say() -> None:
    """Bug guarded: texts so short that the encoder's time, and with it every share of it, means nothing."""
    made = list(synthetic_documents(10, seed=0))
    assert made[:3] == list(synthetic_documents(3, seed=0))
    counts = [len(chunk(document, ChunkingConfig())) for document in made]
    assert np.mean(counts) == pytest.approx(7, abs=1.0)


def test_build_tells_the_encoder_from_the_rest(tmp_path: Path) -> None:
    """Bug guarded: an overhead that is always nothing, or time of the encoder counted as overhead."""

    class Slow(LetterEncoder):
        def encode(self, texts: Sequence[str], kind: TextKind = "document") -> FloatArray:
            time.sleep(0.3)
            return super().encode(texts, kind)

    built = build_speed(Slow(), 70, tmp_path, 0, no_tick)
    assert 70 <= built["num_passages"] < 140 and 60 < built["chars_per_passage"] < 101
    assert built["encoder_s"] >= 0.3 and built["total_s"] > built["encoder_s"] + built["count_tokens_s"]
    assert built["overhead_share"] == pytest.approx(built["total_s"] / built["encoder_s"] - 1)
    assert built["file_mb"] > 0.01


def test_timed_encoder_is_the_encoder() -> None:
    """Bug guarded: an index built by another encoder than the one it names."""
    timed = TimedEncoder(LetterEncoder())
    assert timed.identity == LetterEncoder.identity and timed.max_tokens == 256
    assert np.array_equal(timed.encode(["rain"]), LetterEncoder().encode(["rain"]))


def test_plain_faiss_runs_with_the_threads_it_says() -> None:
    """Bug guarded: a contender measured with other threads than its name says."""
    faiss = pytest.importorskip("faiss")
    index = faiss.IndexFlatIP(4)
    seen: list[int] = []
    for threads in (1, 2):
        faiss_contender("x", index, threads).run(lambda: seen.append(faiss.omp_get_max_threads()))
    assert seen == [1, 2]

"""The retrieval suite runs from end to end on a tiny collection, and every check of it can fail."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from letter_encoder import WordEncoder
from numpy.typing import NDArray
from rich.console import Console
from stand_ins import no_tick

from ragspec.core import Document
from ragspec.errors import ConfigError, InputError
from ragspec.evaluation.datasets import cached_store
from ragspec.evaluation.report import Result, complete, goals_met, render, summary, write_figures
from ragspec.evaluation.suite import Outcome, Settings, run_suite
from ragspec.evaluation.suites.retrieval import speed
from ragspec.evaluation.suites.retrieval import suite as retrieval_suite
from ragspec.evaluation.suites.retrieval.collections import Collection, WholeTexts
from ragspec.evaluation.suites.retrieval.quality import WHOLE, Quality, ranking_scores
from ragspec.evaluation.suites.retrieval.report import METRICS, NOTES, draw_retrieval, retrieval_tables
from ragspec.evaluation.suites.retrieval.suite import RetrievalPlan, RetrievalSuite, retrieval_plan
from ragspec.evaluation.suites.retrieval.timing import TimingPlan
from ragspec.retrieval.encoder import FloatArray, TextKind
from ragspec.retrieval.search import approximate

REQUIRED = (
    "ndcg_cranfield_bm25", "recall10_squad_dense", "recall10_squad_hybrid", "exact_p50_ms_100k",
    "exact_batch16_over_batch1", "hnsw_recall10", "build_passages_per_s", "identical_across_batches",
)  # fmt: skip
ROWS = 1_000


class HashEncoder(WordEncoder):
    """Counts the documents that it encodes."""

    num_documents = 0

    def encode(self, texts: Sequence[str], kind: TextKind = "document") -> FloatArray:
        self.num_documents += len(texts) if kind == "document" else 0
        return super().encode(texts, kind)


class Backwards:
    """A reranker that likes the texts that mention rain."""

    def scores(self, query: str, texts: Sequence[str]) -> NDArray[np.float64]:
        return np.array([float("rain" in text) for text in texts])


def write_lines(path: Path, rows: Sequence[object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))


@pytest.fixture(scope="module")
def data(small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small data folder with the files that only this suite reads."""
    folder = shutil.copytree(small_data, tmp_path_factory.mktemp("retrieval") / "data")
    asked = {"id": "nq-0", "question": "what does a mill need", "answers": ["water"], "gold": "d0"}
    write_lines(folder / "squad_open/questions_nq.jsonl", [asked])
    texts = ("wing in a slipstream", "heat in a slab", "")
    beir = folder / "cranfield/beir"
    write_lines(beir / "corpus.jsonl", [{"_id": f"{n}", "title": "", "text": text} for n, text in enumerate(texts)])
    write_lines(beir / "queries.jsonl", [{"_id": "1", "text": "heat of a slab"}, {"_id": "2", "text": "wings"}])
    write_lines(beir / "qrels.tsv", ["query-id\tcorpus-id\tscore", "1\t1\t1", "2\t0\t1"])
    return folder


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Approximate indexes of very few rows; those few stand in for the 100,000 of the headline."""
    monkeypatch.setattr(approximate, "MIN_ROWS", ROWS)
    monkeypatch.setattr(speed, "MIN_ROWS", ROWS)
    monkeypatch.setattr(retrieval_suite, "REFERENCE_ROWS", ROWS)


def tiny_plan() -> RetrievalPlan:
    timing = TimingPlan(num_queries=32, batches=(1, 16), num_rounds=1, block_s=0.0)
    sizes = ((ROWS // 2, retrieval_suite.BOTH), (ROWS, retrieval_suite.BOTH))
    return RetrievalPlan(None, None, 2, sizes, 14, 14, 20, timing)


def whole_result(data: Path, tmp_path: Path) -> Result:
    suite = RetrievalSuite(data, tmp_path / "cache", HashEncoder(), tiny_plan(), no_tick, Backwards())
    return complete(
        {"suite": "retrieval", "target": None, "dtype": "float32", "commit": "abc", "threads": 2} | suite.measure()
    )


@pytest.mark.slow
def test_everything_is_measured_shown_and_drawn(
    data: Path, tmp_path: Path, few_rows: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug guarded: a key that is missing or null, a table that cannot be printed, a plot without lines."""
    result = whole_result(data, tmp_path)
    assert [key for key in (*REQUIRED, *(metric.name for metric in METRICS)) if result.get(key) is None] == []
    assert result["identical_across_batches"] == 1.0 and len(result["identity"]["hybrid"]) == 7
    assert result["num_questions"] == {"squad": 14, "squad_held_out": 10, "nq": 1, "cranfield": 2}
    assert result["hnsw_recall10_rows"] == ROWS and 0.8 < result["hnsw_recall10"] <= 1.0
    assert "hybrid, reranked, first 2" in result["quality_squad"]
    assert json.loads(json.dumps(result)) == result
    console = Console(width=400)
    for table in render(result, METRICS, NOTES, retrieval_tables(result)):
        console.print(table)
    printed = capsys.readouterr().out
    assert {"quality_nq", "identity", "build"} <= retrieval_tables(result).keys()
    assert all(word in printed for word in ("DPR *", "FAISS", "three shards", "overhead_share"))
    paths = write_figures(lambda: draw_retrieval(Outcome(result), ""), tmp_path / "plots")
    assert [path.name for path in paths] == ["retrieval_recall.png"] and paths[0].stat().st_size > 5_000


def test_missing_reranker_is_said(data: Path, tmp_path: Path, few_rows: None) -> None:
    """Bug guarded: a row left out in silence."""
    plan = dataclasses.replace(tiny_plan(), sizes=())
    found = RetrievalSuite(data, tmp_path, HashEncoder(), plan, no_tick).measure()
    assert "--reranker" in found["rerank"]
    assert ("rerank", "", found["rerank"]) in summary(found, METRICS, NOTES)
    assert found["exact_p50_ms_100k"] is None and "exact_p50_ms_100k" not in found["goals"]


def test_indexes_of_the_collections_are_kept(data: Path, tmp_path: Path) -> None:
    """Bug guarded: a minute of encoding before every run."""
    documents = [Document("a", "Rain falls."), Document("b", "Mills turn.")]
    for expected in (2, 0):
        encoder = HashEncoder()
        cached_store(documents, encoder, tmp_path, WHOLE)
        assert encoder.num_documents == expected


def test_whole_documents_are_one_passage(tmp_path: Path) -> None:
    """Bug guarded: documents cut in two, so that lengths and frequencies differ from bm25s's."""
    document = Document("a", "Rain falls on the mill. " * 400)
    store = cached_store([document], WholeTexts(HashEncoder()), tmp_path, WHOLE)
    assert store.manifest.num_passages == 1


def test_measures_are_those_of_the_ranking() -> None:
    """Bug guarded: ranks turned round, ties put in another order, queries that found nothing left out of the mean."""
    collection = Collection("c", [], {"q": "a", "r": "b"}, {"q": {"x": 1}, "r": {"y": 1}})
    scores = ranking_scores({"q": ["z", "x"], "r": []}, collection)
    assert scores["recall@1"] == 0.0 and scores["recall@5"] == 0.5
    assert scores["nDCG@10"] == pytest.approx(0.5 / np.log2(3))
    assert ranking_scores({"q": ["x"], "r": []}, collection.only({"q"}))["recall@1"] == 1.0


def test_modes_parts_and_reranker_are_told_apart(tmp_path: Path) -> None:
    """Bug guarded: one mode measured under the name of another, a part scored over all questions, a reranker not used."""
    documents = [Document("a", "Mills need water."), Document("b", "Mills in the rain."), Document("c", "Old bridges.")]
    store = cached_store(documents, HashEncoder(), tmp_path, WHOLE)
    relevant = {"q": {"a": 1}, "r": {"c": 1}}
    collection = Collection("c", documents, {"q": "mills need water", "r": "nothing alike"}, relevant)
    quality = Quality(store, HashEncoder(), Backwards())
    tables = quality.tables(collection, {"part": collection.only({"q"})}, 1, no_tick)
    assert tables["part"]["BM25"]["recall@1"] == tables["part"]["bm25s"]["recall@1"] == 1.0
    assert tables["c"]["BM25"]["recall@20"] == 0.5, "no word of the second question is in any text"
    assert tables["c"]["dense"]["recall@20"] == 1.0, "by meaning, everything is somewhere"
    assert tables["c"]["hybrid, first 1"]["recall@1"] == 1.0
    assert tables["c"]["hybrid, reranked, first 1"]["recall@1"] == 0.0


def test_goals_can_be_missed() -> None:
    """Bug guarded: a goal that is always met."""
    worse = {
        "recall10_squad_hybrid": 0.5, "recall10_squad_dense": 0.5, "recall10_squad_bm25": 0.4, "build_overhead": 0.2,
        "ndcg_cranfield_bm25": 0.3, "ndcg_cranfield_bm25s": 0.311, "exact_p50_ms_100k": 11.0,
        "exact_batch16_over_batch1": 2.1, "identical_across_batches": 0.999,
    }  # fmt: skip
    met = goals_met(worse, METRICS)
    assert not any(met.values()) and len(met) == 6
    assert sum("MISSED" in meaning for _, _, meaning in summary(worse, METRICS)) == 6


def test_plans_differ_in_size() -> None:
    """Bug guarded: a flag that is read and not used."""
    quick, usual, full = retrieval_plan(quick=True), retrieval_plan(), retrieval_plan(full=True)
    assert quick.num_build_passages < usual.num_build_passages < full.num_build_passages == 100_000
    assert usual.num_questions is None and full.num_identity_queries == 10_000 and full.sizes[-1][0] == 1_000_000
    assert retrieval_plan(num_questions=7).num_nq_questions == 7
    with pytest.raises(ConfigError, match="exclude"):
        retrieval_plan(quick=True, full=True)


def test_command_runs_the_suite(
    settings: Settings, data: Path, monkeypatch: pytest.MonkeyPatch, few_rows: None
) -> None:
    """Bug guarded: a suite that cannot be reached by its name, or forgets the folder it was given."""
    monkeypatch.setattr(retrieval_suite, "retrieval_plan", lambda *given: dataclasses.replace(tiny_plan(), sizes=()))
    monkeypatch.setattr(retrieval_suite.Encoder, "load", lambda config: HashEncoder())
    outcome = run_suite("retrieval", dataclasses.replace(settings, data_dir=data), no_tick)
    assert outcome.result["suite"] == "retrieval" and outcome.measured is None
    assert outcome.result["encoder"] == HashEncoder.identity.id and list(settings.cache_dir.iterdir())
    (data_without := data.parent / "without").mkdir(exist_ok=True)
    with pytest.raises(InputError):
        run_suite("retrieval", dataclasses.replace(settings, data_dir=data_without), no_tick)

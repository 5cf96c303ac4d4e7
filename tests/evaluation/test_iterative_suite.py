"""The suite of iterative answers: its arithmetic on made-up answers, and all of it on a random target."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from stand_ins import no_tick

from pipelines.batch.ray_session import ray_session
from ragspec.config import TargetConfig
from ragspec.core import Document, FinishReason, GenerationStats
from ragspec.engine.engine import Engine
from ragspec.evaluation import suite
from ragspec.evaluation.report import Result, complete, goals_met, render, summary, write_figures
from ragspec.evaluation.suite import Outcome, Settings, run_suite
from ragspec.evaluation.suites.iterative import suite as iterative_suite
from ragspec.evaluation.suites.iterative.knnlm import KnnPlan, RemoteKnn
from ragspec.evaluation.suites.iterative.report import METRICS, NOTES, draw_iterative, iterative_tables
from ragspec.evaluation.suites.iterative.rows import (
    IndexUnderTest,
    VariantComparison,
    headlines,
    optimum,
    optimum_of_answers,
    table_rows,
)
from ragspec.evaluation.suites.iterative.suite import (
    IterativePlan,
    RemoteIndex,
    RemoteOpeners,
    iterative_plan,
    knnlm_part,
    textbooks,
)
from ragspec.evaluation.suites.iterative.variants import (
    BASELINE,
    PSA,
    TABLE,
    VARIANTS,
    TimedUnit,
    Workload,
    WorkloadTimes,
)
from ragspec.rag.answer import Answer, AnswerStats, IterativeStats
from ragspec.rag.iterative.policies import Flare
from ragspec.retrieval.encoder import Encoder, TextEncoder
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.retriever import Retriever, build_index
from ragspec.retrieval.search import approximate
from ragspec.retrieval.search.index_types import IndexLike, Query, SearchResult
from ragspec.retrieval.speculative.stride_costs import StrideTiming

KNNLM = {
    "knnlm": [
        {"store": store, "k": 8, "temperature": 0.0, "baseline_s": 4.0, "speculative_s": 1.0, "speedup": speedup,
         "optimum": 5.0, "share_of_optimum": 0.8, "a_ms": 1.0, "b_ms": 2.0, "b_over_a": 2.0, "gamma": 0.9,
         "mean_stride": 3.0, "identical": True}
        for store, speedup in (("local", 0.98), ("remote", 4.0))
    ],
    "knnlm_entries": 10, "knnlm_bitwise": True, "identical": True,
}  # fmt: skip


def take(seconds: float, text: str = "yes", ids: tuple[int, ...] = (1, 2), **counters: object) -> TimedUnit:
    """One question answered in that time."""
    run = IterativeStats(**({"total_s": seconds, "num_rounds": 2} | counters))  # type: ignore[arg-type]
    stats = AnswerStats(0.0, 0.0, "", GenerationStats(), run)
    return TimedUnit(seconds, [Answer("?", text, (), (), (), FinishReason.STOP, ids, (), stats)])


def made_up_row(**changes: object) -> Result:
    """A row of the product on an index that takes 40 steps: baseline 8 s, product 2 s, half the guesses right."""
    counters = {"num_right": 3, "num_wrong": 1, "num_kept_tokens": 2, "num_lost_tokens": 8, "wait_s": 1.0}
    takes = {BASELINE: [[take(8.0, wait_s=6.0)]], PSA: [[take(2.0, **counters, strides=[2, 4])]]}
    timed = WorkloadTimes(takes, StrideTiming(0.01, lambda _: 0.4), {PSA: None})
    (row,) = table_rows(IndexUnderTest("far", 40.0, 0.3), Workload(TABLE, 1, 1, (BASELINE, PSA)), timed)
    return row | changes


def test_speed_is_the_ratio_of_summed_medians() -> None:
    """Bug guarded: the mean, which one slow run moves; a mean of ratios in place of the ratio of sums."""
    baseline = [[take(10.0), take(12.0), take(99.0)], [take(2.0)]]
    variant = [[take(4.0), take(3.0), take(4.0)], [take(2.0)]]
    comparison = VariantComparison(baseline, variant)
    assert comparison.speedup == pytest.approx(14.0 / 6.0)
    assert comparison.median_speedup == pytest.approx((3.0 + 1.0) / 2)


@pytest.mark.parametrize("other", [take(1.0, "no"), take(1.0, ids=(1, 3)), take(1.0, ids=(1, 2, 3))])
def test_one_different_answer_in_any_run_is_counted(other: TimedUnit) -> None:
    """Bug guarded: only texts, only tokens or only the first run compared."""
    comparison = VariantComparison([[take(1.0), take(1.0, "late")]], [[take(1.0), other]])
    assert comparison.identical() == (1, 2)


def test_shares_of_guesses_and_waiting_are_of_all_answers() -> None:
    """Bug guarded: a mean of shares, in which an answer of two tokens counts as much as a long one."""
    row = made_up_row()
    assert (row["gamma"], row["kept_after_mismatch"], row["mean_stride"]) == (0.75, 0.25, 3)
    assert (row["wait_share"], row["baseline_wait_share"]) == (0.5, 0.75)
    assert (row["a_ms"], row["b_ms"], row["b_over_a"]) == pytest.approx((10.0, 400.0, 40.0))
    assert (row["speedup"], row["identical"], row["service_ms"]) == (4.0, True, 300.0)
    assert row["share_of_optimum"] == pytest.approx(4.0 / row["optimum"])
    assert row["share_of_optimum_of_answers"] == pytest.approx(4.0 * (1.0 + 1.0 / row["optimum"]) / 2)


def test_where_nothing_was_guessed_right_guesses_are_the_bound() -> None:
    """Bug guarded: a division by zero, a chance of 0 reported, or a row without a share because speculation was off in it."""
    timed = WorkloadTimes(
        {BASELINE: [[take(1.0)]], PSA: [[take(1.0)]]}, StrideTiming(0.01, lambda size: 1e-4 * size), {PSA: None}
    )
    (row,) = table_rows(IndexUnderTest("here"), Workload(TABLE, 1, 1, (BASELINE, PSA)), timed)
    assert row["gamma"] is row["kept_after_mismatch"] is row["mean_stride"] is None
    assert row["optimum"] == row["share_of_optimum"] == 1.0
    (other,) = table_rows(IndexUnderTest("here"), Workload("FLARE", 1, 1, (BASELINE, PSA), Flare()), timed)
    assert other["optimum"] is other["share_of_optimum"] is None, "the formula is for a retrieval before every step"


@pytest.mark.parametrize(("b_over_a", "gamma", "asynchronous", "gain"), [
    (10.0, 0.8, False, 2.56), (10.0, 0.8, True, 2.59), (1.0, 0.6, True, 1.43), (0.5, 0.6, False, 1.00),
])  # fmt: skip
def test_optimum_is_the_published_one(b_over_a: float, gamma: float, asynchronous: bool, gain: float) -> None:
    """Bug guarded: another formula, or the asynchronous one for those that wait. Numbers: the formula worked out apart."""
    timing = StrideTiming(0.02, lambda _: 0.02 * b_over_a)
    assert optimum(timing, gamma, asynchronous).gain == pytest.approx(gain, abs=0.006)


def test_only_an_index_elsewhere_is_asked_beside_decoding() -> None:
    """Bug guarded: the prediction of a search on the same processors as if it had its own."""
    timed = WorkloadTimes(
        {BASELINE: [[take(2.0)]], PSA: [[take(1.0, num_right=600, num_wrong=400)]]},
        StrideTiming(0.01, lambda _: 0.01),
        {PSA: None},
    )
    workload = Workload(TABLE, 1, 1, (BASELINE, PSA))
    (here,), (there,) = (
        list(table_rows(place, workload, timed)) for place in (IndexUnderTest("here"), IndexUnderTest("far", 1.0, 0.0))
    )
    assert here["optimum"] == pytest.approx(1.07, abs=0.006) and there["optimum"] == pytest.approx(1.43, abs=0.006)


def test_first_retrieval_of_an_answer_cannot_be_guessed() -> None:
    """Bug guarded: a bound that an answer of one retrieval is measured against and nothing can reach."""
    assert optimum_of_answers([1, 1], 5.0) == 1.0
    assert optimum_of_answers([24], 6.0) == pytest.approx(24 / (1 + 23 / 6))
    assert optimum_of_answers([10_000], 6.0) == pytest.approx(6.0, abs=0.01)
    assert optimum_of_answers([3, 24], 1.0) == 1.0


def test_headlines_are_of_the_rows_they_name() -> None:
    """Bug guarded: a share or a speed-up of another variant, workload or distance; a slow row overlooked."""
    rows = [
        made_up_row(),
        made_up_row(stated_b_over_a=1.0, speedup=1.5, share_of_optimum=0.9),
        made_up_row(variant="+S", speedup=0.5, share_of_optimum=0.1, num_identical=0),
        made_up_row(workload="FLARE, T=0", speedup=0.9, share_of_optimum=None),
    ]
    found = headlines(rows, KNNLM["knnlm"])
    assert (found["speedup_b_over_a_40"], found["speedup_b_over_a_1"]) == (4.0, 1.5)
    assert found["share_of_optimum_min"] == min(0.9, rows[0]["share_of_optimum"])
    assert (found["slowdown_worst"], found["knnlm_best"], found["kept_after_mismatch"]) == (0.5, 4.0, 0.25)
    assert found["identical"] == pytest.approx(5 / 6)
    wrong = [row | {"identical": False} for row in KNNLM["knnlm"]]
    assert headlines(rows[:1], wrong)["identical"] == pytest.approx(1 / 3)
    assert headlines(rows[:1], [])["knnlm_best"] is None and headlines(rows[:1], [])["speedup_b_over_a_1"] is None


def test_goals_can_be_missed() -> None:
    """Bug guarded: a goal that is always met, or one of a number that was not measured."""
    worse = {"share_of_optimum_min": 0.89, "speedup_b_over_a_40": 2.39, "speedup_b_over_a_1": 1.39,
             "slowdown_worst": 0.969, "knnlm_best": 4.9, "kept_after_mismatch": 0.29, "identical": 0.999}  # fmt: skip
    met = goals_met(worse, METRICS)
    assert worse.keys() == met.keys() == {m.name for m in METRICS if m.goal} and not any(met.values())
    assert sum("MISSED" in meaning for _, _, meaning in summary(worse, METRICS)) == 7
    assert goals_met({"knnlm_best": None, "identical": 1.0}, METRICS) == {"identical": True}


def test_plans_differ_in_size() -> None:
    """Bug guarded: a flag that is read and not used, or a workload that is never asked."""
    quick, usual, three = iterative_plan(quick=True), iterative_plan(), iterative_plan(num_questions=3)
    assert usual.with_hnsw and not quick.with_hnsw, "20,000 passages take minutes"
    assert quick.num_local < usual.num_local and quick.knnlm_elsewhere.num_tokens < usual.knnlm_elsewhere.num_tokens
    assert quick.knnlm.num_entries < usual.knnlm.num_entries
    assert usual.knnlm_elsewhere.num_runs < usual.knnlm.num_runs == 3
    assert {three.num_local, three.num_extra, *dict(three.remote).values()} == {3}
    assert (
        usual.table(40.0).num_runs < usual.table(1.0).num_runs == 3
        and iterative_plan(num_runs=1).table(40.0).num_runs == 1
    )
    assert [w.name for w in usual.workloads(40.0)] == [TABLE]
    extra = list(usual.workloads(10.0))[1:]
    assert [w.temperature for w in extra] == [1.0, 0.0, 0.0, 0.0] and extra[-1].num_in_flight == 8
    assert [w.has_optimum for w in extra] == [True, False, False, False]
    assert all(w.variants == (BASELINE, PSA) for w in extra)


def test_questions_together_are_full_groups() -> None:
    """Bug guarded: a last group of one, that waits less than the others; one question asked eight times."""
    workload = Workload("", 9, 1, num_in_flight=4)
    assert workload.units("abcdefghij") == [tuple("abcd"), tuple("efgh")]
    assert Workload("", 2, 1).units("abc") == [("a",), ("b",)]


def test_knnlm_elsewhere_has_a_plan_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: minutes of waiting for a datastore elsewhere; its few runs in place of the many of the local datastore."""
    given: list[tuple[KnnPlan, RemoteKnn | None]] = []

    def measured(target: object, data: object, cache: object, plan: KnnPlan, tick: object, there: Any) -> Result:
        given.append((plan, there))
        return {}

    monkeypatch.setattr(iterative_suite, "measure_knnlm", measured)
    elsewhere = RemoteOpeners(lambda *_: nullcontext(), lambda *_: nullcontext())  # type: ignore[arg-type, return-value]
    settings, plan = Settings(TargetConfig(), Path("data"), Path("cache"), elsewhere=elsewhere), iterative_plan()
    knnlm_part(settings, plan, no_tick)
    knnlm_part(dataclasses.replace(settings, elsewhere=None), plan, no_tick)
    assert given == [(plan.knnlm, RemoteKnn(plan.knnlm_elsewhere, elsewhere.datastore)), (plan.knnlm, None)]


class Slow:
    """An index in this process that takes 5 ms longer."""

    def __init__(self, index: IndexLike) -> None:
        self._index = index
        self.generation, self.mode, self.relevance, self.is_elsewhere = (
            index.generation,
            index.mode,
            index.relevance,
            True,
        )

    def encode(self, texts: Sequence[str]) -> list[Query]:
        return self._index.encode(texts)

    def search(self, queries: Sequence[Query], k: int, *scope: object, **options: object) -> SearchResult:
        time.sleep(0.005)
        return self._index.search(queries, k, *scope, **options)  # type: ignore[arg-type]

    def pinned(self) -> Slow:
        return self


def tiny_plan() -> IterativePlan:
    remote = ((1.0, 1), (10.0, 1), (40.0, 1))
    return IterativePlan(num_local=1, remote=remote, num_extra=1, num_runs=1, max_tokens=12)


@pytest.fixture
def tiny(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """One question a row and twelve tokens; indexes elsewhere take 5 ms; KNN-LM is measured elsewhere."""
    encoder = Encoder.load(settings.encoder)

    def index(folder: Path, given: TextEncoder) -> nullcontext[RemoteIndex]:
        config = iterative_suite.RetrieverConfig(mode="dense")
        return nullcontext(RemoteIndex(Slow(Retriever(encoder, Store.open(folder), config)), lambda service_s: None))

    monkeypatch.setattr(iterative_suite, "iterative_plan", lambda *given: tiny_plan())
    monkeypatch.setattr(iterative_suite, "knnlm_part", lambda given, *_: KNNLM if given.data_dir else {})
    monkeypatch.setattr(iterative_suite, "IN_FLIGHT", 2)
    return dataclasses.replace(settings, elsewhere=RemoteOpeners(index, lambda folder: nullcontext()))  # type: ignore[arg-type]


@pytest.mark.slow
def test_everything_is_measured_shown_and_drawn(
    tiny: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug guarded: a key that is missing or null, a variant that writes something else, a table or plot that breaks."""
    purges: list[str] = []
    purge = Engine.purge
    monkeypatch.setattr(Engine, "purge", lambda self, salt: (purges.append(salt), purge(self, salt)))
    result = complete(run_suite("iterative", tiny, no_tick).result | {"commit": "abc", "threads": 2})
    table = [row for row in result["rows"] if row["workload"] == TABLE]
    assert len(table) == 6 * 5 and len(result["rows"]) == 6 * 5 + 1 + 4
    assert result["identical"] == 1.0 and result["goals"]["identical"] is True
    unknown = {key for key in (*(metric.name for metric in METRICS), "bitwise", "label") if result.get(key) is None}
    assert unknown <= {"kept_after_mismatch"}, (
        "whether a guess was wrong hangs on what the machine's speed made of them"
    )
    assert "stated" in next(row["retriever"] for row in table if row["stated_b_over_a"] == 40.0)
    assert len(purges) == 6 * 6 * 2 + 5 * 2 * 2, "once before every question, those that warm up included"
    assert json.loads(json.dumps(result)) == result
    tables = iterative_tables(result)
    assert {"KNN-LM: speed", f"{PSA}: speed"} <= tables.keys()
    console = Console(width=400)
    for table in render(result, METRICS, NOTES, tables):
        console.print(table)
    printed = capsys.readouterr().out
    assert all(
        word in printed for word in ("hybrid", "FLARE", "stride 3", "remote, k = 8", "3 % is predicted", "openstax")
    )
    paths = write_figures(lambda: draw_iterative(Outcome(result), "made up"), tmp_path / "plots")
    assert [path.name for path in paths] == ["iterative_b_over_a.png"] and paths[0].stat().st_size > 5_000


def test_what_could_not_be_measured_is_said(tiny: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: rows left out in silence; without data, a suite that asks for some."""
    monkeypatch.setattr(suite, "stdlib_list", lambda count: suite.squad_list(tiny.data_dir, count))  # type: ignore[arg-type]
    result = run_suite("iterative", dataclasses.replace(tiny, elsewhere=None, data_dir=None), no_tick).result
    notes = {
        name: text for name, _, text in summary(result, METRICS, NOTES) if name in ("hnsw", "elsewhere", "knnlm_note")
    }
    assert len(notes) == 3 and all("not measured" in text for text in notes.values())
    assert result["speedup_b_over_a_40"] is None and "speedup_b_over_a_40" not in result["goals"]
    assert {row["retriever"] for row in result["rows"]} == {"exact dense", "BM25", "hybrid"}


@pytest.mark.slow
def test_textbooks_fill_the_corpus_up_to_hnsw(tiny: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: a row called HNSW over an index that is searched exactly; ids that come twice in the textbooks."""
    assert tiny.data_dir is not None
    folder = shutil.copytree(tiny.data_dir, tmp_path / "data")
    (folder / "openstax").mkdir()
    module = json.dumps({"id": "same", "title": "Rain", "text": "Rain falls on the hills. " * 9})
    for name in ("a", "b"):
        (folder / f"openstax/{name}.jsonl").write_text(f"{module}\n{module}\n")
    assert [document.id for document in textbooks(folder)] == ["a.jsonl:0", "a.jsonl:1", "b.jsonl:0", "b.jsonl:1"]
    few = dataclasses.replace(tiny, data_dir=folder, elsewhere=None)
    assert run_suite("iterative", few, no_tick).result["hnsw"] is not None, "too few passages"
    monkeypatch.setattr(approximate, "MIN_ROWS", 4)
    result = run_suite("iterative", dataclasses.replace(few, cache_dir=tmp_path / "other"), no_tick).result
    assert result["hnsw"] is None and any(row["retriever"].startswith("HNSW") for row in result["rows"])
    assert result["identical"] == 1.0


@pytest.mark.slow
@pytest.mark.ray
def test_an_index_elsewhere_takes_its_time_and_ends_with_ray(tiny: Settings, tmp_path: Path) -> None:
    """Bug guarded: a service time that is stated and not taken, other passages from there, a Ray that goes on."""
    encoder = Encoder.load(tiny.encoder)
    build_index([Document("a", "Rain falls."), Document("b", "Mills turn.")], tmp_path / "index", encoder)
    config = iterative_suite.RetrieverConfig(mode="dense")
    here = Retriever(encoder, Store.open(tmp_path / "index"), config)
    with ray_session("local"):
        from pipelines.benchmarks.iterative import open_index

        with open_index(tmp_path / "index", encoder) as (remote, slow_down):
            slow_down(0.3)
            begin = time.perf_counter()
            found = remote.search(remote.encode(["When do mills turn?"]), 1)
            assert time.perf_counter() - begin >= 0.3
            assert found.passages == here.search(remote.encode(["When do mills turn?"]), 1).passages
    assert not sys.modules["ray"].is_initialized()


@pytest.mark.slow
@pytest.mark.ray
def test_rows_elsewhere_are_of_an_index_in_an_actor(
    tiny: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug guarded: a service time that is stated and not taken, other passages from there, a Ray that goes on."""
    opened: list[Path] = []
    slowed: list[float] = []
    with ray_session("local"):
        from pipelines.benchmarks.iterative import open_index

        @contextmanager
        def index(folder: Path, encoder: TextEncoder) -> Iterator[RemoteIndex]:
            opened.append(folder)
            with open_index(folder, encoder) as (remote, slow_down):
                yield RemoteIndex(remote, lambda service_s: (slowed.append(1e3 * service_s), slow_down(0.05))[1])

        plan = dataclasses.replace(tiny_plan(), remote=((0.3, 1), (40.0, 1)))
        monkeypatch.setattr(iterative_suite, "iterative_plan", lambda *given: plan)
        elsewhere = RemoteOpeners(index, lambda folder: nullcontext())  # type: ignore[arg-type, return-value]
        result = run_suite("iterative", dataclasses.replace(tiny, elsewhere=elsewhere), no_tick).result
    assert result["identical"] == 1.0 and len(opened) == 1, "a process for all rows"
    stated = [row["service_ms"] for row in result["rows"] if row["service_ms"] is not None]
    assert slowed == pytest.approx(sorted(set(stated))) and len(slowed) == 2
    far = [row for row in result["rows"] if row["stated_b_over_a"] == 40.0]
    assert len(far) == len(VARIANTS) - 1 and all(row["b_ms"] >= 50.0 for row in far)
    assert not sys.modules["ray"].is_initialized()


@pytest.mark.slow
def test_documents_are_indexed_once(tiny: Settings) -> None:
    """Bug guarded: minutes of encoding before every run."""
    stages: set[str] = set()

    def tick(stage: str, done: int, total: int) -> None:
        stages.add(stage)

    alone = dataclasses.replace(tiny, elsewhere=None)
    run_suite("iterative", alone, tick)
    assert any("(once)" in stage for stage in stages)
    stages.clear()
    run_suite("iterative", alone, tick)
    assert not any("(once)" in stage for stage in stages)

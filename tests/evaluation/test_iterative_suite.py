"""The suite iterative: its arithmetic on made-up answers, and its rows on a random target and a local index."""

from typing import Any

import pytest

from pipelines.benchmarks import iterative
from pipelines.benchmarks.harness import Row, Run, draw
from pipelines.benchmarks.iterative import (
    BASELINE,
    PSA,
    TABLE,
    Stopwatch,
    TimedUnit,
    Workload,
    WorkloadTimes,
    optimum,
    same_answers,
    summarise,
    timed_rows,
)
from ragspec.config import DraftingConfig, EngineConfig
from ragspec.core import FinishReason, GenerationStats
from ragspec.engine.loading import load_engine
from ragspec.rag.answer import Answer, AnswerStats, IterativeStats
from ragspec.rag.iterative.policies import Flare
from ragspec.retrieval.speculative.stride import StrideTiming


def take(seconds: float, text: str = "yes", ids: tuple[int, ...] = (1, 2), **counters: Any) -> TimedUnit:
    """One question answered in that time."""
    run = IterativeStats(**({"total_s": seconds, "num_rounds": 2} | counters))
    stats = AnswerStats(0.0, 0.0, "", GenerationStats(), run)
    return TimedUnit(seconds, [Answer("?", text, (), (), (), FinishReason.STOP, ids, (), stats)])


def made_up_row(asked: Workload | None = None, **changes: Any) -> Row:
    """A row of the product on an index that takes 40 steps: baseline 8 s, product 2 s, three of four guesses right."""
    counters = {"num_right": 3, "num_wrong": 1, "num_kept_tokens": 2, "num_lost_tokens": 8}
    takes = {BASELINE: [[take(8.0)]], PSA: [[take(2.0, **counters, strides=[2, 4])]]}
    timed = WorkloadTimes(takes, StrideTiming(0.01, lambda _: 0.4))
    chosen = asked or Workload(TABLE, 1, 1, (BASELINE, PSA))
    return {"row": ""} | iterative._row("far", 40.0, chosen, PSA, lambda: timed) | changes


@pytest.mark.parametrize("other", [take(1.0, "no"), take(1.0, ids=(1, 3)), take(1.0, ids=(1, 2, 3))])
def test_one_different_answer_in_any_run_is_counted(other: TimedUnit) -> None:
    """Bug guarded: only texts, only tokens or only the first run compared."""
    assert same_answers([[take(1.0), take(1.0, "late")]], [[take(1.0), other]]) == [True, False]


def test_speed_and_shares_of_guesses_are_of_all_answers() -> None:
    """Bug guarded: a mean of ratios in the place of the ratio of sums; a prediction for a policy without one."""
    row = made_up_row()
    assert (row["gamma"], row["mean_stride"], row["speedup"], row["b_over_a"]) == (0.75, 3, 4.0, pytest.approx(40.0))
    assert row["share_of_optimum"] == pytest.approx(4.0 / row["optimum"])
    other = made_up_row(Workload("FLARE", 1, 1, (BASELINE, PSA), Flare()))
    assert other["optimum"] is other["share_of_optimum"] is None


@pytest.mark.parametrize(("b_over_a", "gamma", "asynchronous", "gain"), [
    (10.0, 0.8, False, 2.56), (10.0, 0.8, True, 2.59), (1.0, 0.6, True, 1.43), (0.5, 0.6, False, 1.00),
])  # fmt: skip
def test_optimum_is_the_published_one(b_over_a: float, gamma: float, asynchronous: bool, gain: float) -> None:
    """Bug guarded: another formula, or the asynchronous one for those that wait. Numbers: the formula worked out apart."""
    timing = StrideTiming(0.02, lambda _: 0.02 * b_over_a)
    assert optimum(timing, gamma, asynchronous) == pytest.approx(gain, abs=0.006)


def test_headlines_are_of_the_rows_they_name() -> None:
    """Bug guarded: a share or a speed-up of another variant, workload or distance; a slow row overlooked."""
    rows = [
        made_up_row(),
        made_up_row(stated_b_over_a=1.0, speedup=1.5, share_of_optimum=0.9),
        made_up_row(variant="+S", speedup=0.5, share_of_optimum=0.1, num_identical=0),
        made_up_row(workload="FLARE, T=0", speedup=0.9, share_of_optimum=None),
    ]
    found = summarise(rows)
    assert (found["speedup_b_over_a_40"], found["speedup_b_over_a_1"]) == (4.0, 1.5)
    assert found["share_of_optimum_min"] == min(0.9, rows[0]["share_of_optimum"])
    assert (found["slowdown_worst"], found["kept_after_mismatch"], found["identical"]) == (0.5, 0.25, 0.75)
    assert summarise(rows[:1])["speedup_b_over_a_1"] is None
    assert draw(iterative.PLOT, rows, "made up").axes


def test_answers_of_a_random_target_are_the_baseline_s(run: Run) -> None:
    """Bug guarded: rows without answers, or variants that share a pipeline's schedule."""
    listed = run.questions(3)
    retriever = run.retriever(listed.documents)
    config = EngineConfig(max_num_seqs=4)
    with load_engine(run.target, config, DraftingConfig(), adaptive_threads=False) as engine:
        stopwatch = Stopwatch(run, engine, [question.text for question in listed.questions])
        rows = list(timed_rows(stopwatch, "local", None, retriever))
    assert [row["row"] for row in rows] == [f"local: {TABLE}, {PSA}"]
    assert rows[0]["num_identical"] == rows[0]["num_compared"] > 0 and rows[0]["a_ms"] > 0

"""Ranks beside one rank, and what the suites `cluster` and `chaos` say: a difference or a missed goal is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.benchmarks.chaos.run import recovery
from pipelines.benchmarks.chaos.suite import METRICS as CHAOS_METRICS
from pipelines.benchmarks.chaos.suite import chaos_tables
from pipelines.benchmarks.cluster.suite import METRICS, cluster_tables
from pipelines.benchmarks.cluster.tensor_parallel import RankMeasurement, compare_ranks, measure_ranks
from ragspec.config import TargetConfig
from ragspec.evaluation.cases import Case
from ragspec.evaluation.report import goals_met, summary
from ragspec.numerics.ranks import ONE_RANK

ALL = (*METRICS, *CHAOS_METRICS)
ALONE = RankMeasurement("abc", 7, {"off": [(1, 2), (3,)], "on": [(1, 2), (3,)]}, {1: 2.0, 8: 4.0}, "rs_1")


@pytest.mark.parametrize(
    ("group", "bitwise", "num_identical"),
    [
        (ALONE, True, 4),
        (ALONE._replace(bits="abd"), False, 4),
        (ALONE._replace(num_rows=6), False, 4),
        (ALONE._replace(answers={"off": [(1, 2), (3,)], "on": [(1, 2), (4,)]}), True, 3),
    ],
)
def test_one_other_bit_or_token_is_found(group: RankMeasurement, bitwise: bool, num_identical: int) -> None:
    """A group that computed less, or another token in one setting, taken for equal."""
    row = compare_ranks(ALONE, group)
    assert (row["bitwise"], row["num_identical"], row["num_compared"]) == (bitwise, num_identical, 4)


def test_one_rank_is_measured_by_its_own_logits(tiny_dir: Path) -> None:
    """Bits taken from something that no weight changes; settings that decode nothing."""
    cases = [Case(f"c{n}", "rag", tuple(range(30 + n, 60 + n)), (), 12) for n in range(2)]
    found = [
        measure_ranks(TargetConfig.model_validate({"model": str(tiny_dir), "dtype": dtype}), cases, ONE_RANK)
        for dtype in ("float32", "float32", "bfloat16")
    ]
    assert found[0].bits == found[1].bits != found[2].bits
    assert found[0].num_rows > 1_000 and len(found[0].answers) == 4
    assert found[0].answers == found[1].answers
    greedy_off, greedy_on, sampled_off, sampled_on = found[0].answers.values()
    assert greedy_off == greedy_on != sampled_off == sampled_on
    assert compare_ranks(found[0], found[1])["bitwise"] and not compare_ranks(found[0], found[2])["bitwise"]


def test_goals_are_missed_where_they_are_missed() -> None:
    """A goal that is met whatever the number says."""
    good = {"tp_identical": 1.0, "tp_bitwise": True, "step_overhead_b1": 0.05, "lost": 0, "recovery_max_s": 14.0}
    bad = {"tp_identical": 0.99, "tp_bitwise": False, "step_overhead_b1": 0.1, "lost": 1, "recovery_max_s": 16.0}
    assert all(goals_met(good, ALL).values()) and set(goals_met(good, ALL)) == set(good)
    assert not any(goals_met(bad, ALL).values()) and set(goals_met(bad, ALL)) == set(bad)
    assert goals_met({"lost": None}, ALL) == {}


def test_the_slowest_fault_counts() -> None:
    """Medians alone."""
    rows = [{"recovery_s": s} for s in (1.0, 60.0, 2.0)]
    assert recovery(rows, "recovery") == {"recovery_p50_s": 2.0, "recovery_max_s": 60.0}
    assert recovery([], "recovery") == {"recovery_p50_s": None, "recovery_max_s": None}


def test_tables_hold_every_row() -> None:
    """A row hidden behind another of the same name."""
    tp = [
        {"target": "target", "dtype": dtype, "ranks": ranks} | compare_ranks(ALONE, ALONE)
        for dtype in ("float32", "bfloat16")
        for ranks in (1, 2)
    ]
    shards = [{"shards": n, "copies": 1, "mode": "dense", "num_identical": 3, "num_compared": 4} for n in (1, 2)]
    result = {"tp_identical": 0.5, "tp_rows": tp, "step_rows": [], "shard_rows": shards, "notes": ["slow"]}
    tables = cluster_tables(result)
    assert len(tables["ranks"]["bits equal"]) == 4
    assert tables["sharded retrieval"]["answers equal"] == {"1 shards x 1, dense": "3/4", "2 shards x 1, dense": "3/4"}
    said = summary(result, METRICS, ("notes",))
    assert [name for name, _, _ in said] == ["tp_identical", "notes"]
    assert "MISSED" in said[0][2]
    fault = {"signal": "SIGKILL", "kind": "engine", "victim": "engine-0", "recovery_s": 1.0}
    assert len(chaos_tables({"fault_rows": [fault, fault]})["faults"]["victim"]) == 2
    assert summary({"lost": 1}, CHAOS_METRICS)[0][2].endswith("(goal: 0; MISSED)")

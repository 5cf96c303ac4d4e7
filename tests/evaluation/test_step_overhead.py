"""The share of a step that is not its forward: which steps count, and that real engines are timed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragspec.config import TargetConfig
from ragspec.core import CopySource, SourceKind
from ragspec.evaluation.cases import Case
from ragspec.evaluation.suites.step_overhead import (
    KV_SLOTS,
    Step,
    StepOverhead,
    TimedTarget,
    largest_overhead,
    overhead_of,
)

QUOTE = " ".join(f"Mill number {n} was built in {1800 + 7 * n} beside the old bridge." for n in range(12))


def test_steps_that_read_prompts_or_stand_before_a_pause_do_not_count() -> None:
    """A prompt's long forward flatters the share, and a pause between two runs ruins it."""
    steps = [
        Step(0.0, 0.9, 1, 1, True),
        Step(1.0, 0.8, 1, 1, True),
        Step(2.0, 9.9, 65, 1, False),
        Step(12.0, 0.5, 2, 2, True),
        Step(13.0, 0.7, 1, 1, True),
        Step(14.0, 0.7, 1, 1, True),
    ]
    row = overhead_of(steps, batch=1)
    assert row["num_steps"] == 2
    assert row["overhead"] == pytest.approx((0.1 + 0.3) / 2)
    assert row["outside_ms"] == pytest.approx(200.0)
    assert row["mean_overhead"] == pytest.approx(0.2)


def test_no_step_of_a_batch_is_no_share() -> None:
    """A goal that counts as met because nothing was measured."""
    rows = [overhead_of([], 8) | {"batch": 8}, {"batch": 8, "overhead": 0.1}, {"batch": 1, "overhead": 0.2}]
    assert rows[0]["overhead"] is None
    assert largest_overhead(rows, 8) is None and largest_overhead(rows, 1) == 0.2 and largest_overhead(rows, 2) is None


@pytest.mark.slow
def test_a_real_engine_is_timed_and_copies_are_accepted(tiny_dir: Path) -> None:
    """Steps that draft nothing timed as those of copy drafts; a forward that is longer than its step."""
    source = (CopySource(SourceKind.PASSAGE, QUOTE, "p#0"),)
    cases = [Case(f"c{n}", "rag", tuple(range(30 + n, 60 + n)), source, 600) for n in range(4)]
    target = TimedTarget.load(TargetConfig(model=str(tiny_dir)), KV_SLOTS)
    bench = StepOverhead(target, cases, dict.fromkeys((c.id for c in cases), QUOTE))
    rows = bench.measure(batch=2, num_cases=4, tick=lambda *_: None)
    assert [(row["way"], row["temperature"]) for row in rows] == [
        ("plain", 0.0), ("plain", 1.0), ("copy", 0.0), ("copy", 1.0)
    ]  # fmt: skip
    for row in rows:
        assert row["num_steps"] > 3 and 0.0 < row["overhead"] < 1.0
        assert row["forward_ms"] < row["step_ms"]
    assert rows[0]["acceptance_length"] == rows[1]["acceptance_length"] == 1.0

"""Measurements of earlier starts: taken over where they still hold, and nowhere else."""

import logging
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tiny_target import save_model

from ragspec.config import DraftingConfig, EngineConfig, TargetConfig
from ragspec.drafting.cost_model import CostTable
from ragspec.engine import loading, measurements
from ragspec.engine.measurements import kept_costs, kept_self_test
from ragspec.engine.target import Target
from ragspec.numerics.self_test import QUICK_ROWS, Failure, SelfTest

ROWS = [1, 16, 64]


@pytest.fixture
def target(tmp_path: Path) -> Target:
    config = TargetConfig(model=str(save_model("llama", tmp_path / "model")), cache_dir=str(tmp_path / "cache"))
    return Target.load(config, num_kv_slots=1024)


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the self-tests that run."""
    run, seen = measurements.self_test, list[int]()

    def counting(target: Target, longest: int, *others: Any) -> SelfTest:
        seen.append(longest)
        return run(target, longest, *others)

    monkeypatch.setattr(measurements, "self_test", counting)
    return seen


def test_a_self_test_that_passed_is_confirmed_by_a_short_one(target: Target, lengths: list[int]) -> None:
    """Every start of a real model computed ten thousand rows before its first answer."""
    first = kept_self_test(target, 2)
    assert lengths == [QUICK_ROWS, target.max_context_tokens] and first.num_rows > QUICK_ROWS
    lengths.clear()
    assert kept_self_test(target, 2) == first and lengths == [QUICK_ROWS]
    assert kept_self_test(target, 1).passed and lengths[1:] == [QUICK_ROWS, target.max_context_tokens]


def test_a_short_self_test_that_fails_is_believed(
    target: Target, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kept result would promise bits that another kernel does not give."""
    kept_self_test(target, 2)
    run, failure = measurements.self_test, Failure("whole", 1.0)
    monkeypatch.setattr(measurements, "self_test", lambda *given: run(*given)._replace(failures=(failure,)))
    lengths.clear()
    assert not kept_self_test(target, 2).passed and lengths == [QUICK_ROWS, target.max_context_tokens]


def costs(target: Target, forward_s: Callable[[int, int], float], measured: list[int]) -> CostTable:
    def measure() -> CostTable:
        measured.append(1)
        return CostTable({128: [forward_s(n, 128) for n in ROWS]}, ROWS)

    return kept_costs(target, "rs_0", 2, forward_s, measure)


def test_costs_are_taken_over_at_the_speed_of_today(target: Target) -> None:
    """Costs of a quiet machine planned the steps of a busy one."""
    measured: list[int] = []
    assert costs(target, lambda rows, _: rows * 1.0, measured).cost_s(64, 128) == 64.0
    assert costs(target, lambda rows, _: rows * 1.25, measured).cost_s(64, 128) == 80.0
    assert costs(target, lambda rows, _: 1.0 + rows, measured).cost_s(1, 128) == 2.0, "one row changed most"
    found = costs(target, lambda rows, _: 1.0 + rows, measured).cost_s(64, 128)
    assert 65.0 < found < 68.0, "as 16 rows changed, and half-way to the forward"
    assert len(measured) == 1


def test_costs_first_measured_beside_other_load_come_right(target: Target) -> None:
    """Load at the first start fell on one number of rows, which no tree had for as long as the costs were kept."""
    measured: list[int] = []
    costs(target, lambda rows, _: rows * (3.0 if rows == 64 else 1.0), measured)
    found = [costs(target, lambda rows, _: rows * 1.0, measured).cost_s(64, 128) for _ in range(9 * len(ROWS))]
    assert found == sorted(found, reverse=True) and found[-1] == pytest.approx(64.0, rel=0.01)
    assert len(measured) == 1


def test_each_context_is_corrected_by_its_own_forwards(target: Target) -> None:
    """What was wrong in a short context changed the costs in a long one too: four rows there seemed cheaper than one."""

    def start(slow: float) -> CostTable:
        def forward_s(rows: int, context: int) -> float:
            return rows * (slow if (rows, context) == (64, 128) else 1.0) + 0.01 * context

        measure = lambda: CostTable({c: [forward_s(n, c) for n in ROWS] for c in (128, 1024)}, ROWS)  # noqa: E731
        return kept_costs(target, "rs_0", 2, forward_s, measure)

    start(3.0)
    for _ in range(9 * len(ROWS)):
        found = start(1.0)
    assert found.cost_s(64, 1024) == pytest.approx(64.0 + 10.24, rel=0.01)
    assert found.cost_s(64, 128) == pytest.approx(64.0 + 1.28, rel=0.01)


def test_no_load_makes_a_start_measure_again(target: Target) -> None:
    """Two slow forwards, or another thread count because of them, made a start measure for seconds though nothing had changed."""
    measured: list[int] = []
    costs(target, lambda rows, _: rows * 1.0, measured)
    calls = iter(range(100))
    found = costs(target, lambda rows, _: rows * (1.0 if rows == 1 or next(calls) % 3 == 2 else 5.0), measured)
    assert found.cost_s(16, 128) == 16.0, "the fastest forward counts"
    costs(target, lambda rows, _: rows * (1.0 if rows == 1 else 5.0), measured)
    assert len(measured) == 1


def test_another_start_of_an_engine_measures_no_costs(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs were kept for the number of threads in use, which follows other load: the other number was measured anew."""
    measure = Mock(side_effect=loading.measure_costs)
    monkeypatch.setattr(loading, "measure_costs", measure)
    for num_threads in (2, 1, 2):
        monkeypatch.setattr(loading, "choose_num_threads", lambda target, most, chosen=num_threads: chosen)
        with loading.load_engine(target.config, EngineConfig(max_kv_tokens=1024, num_threads=2), DraftingConfig()):
            pass
    assert measure.call_count == 1


def test_forwards_are_timed_only_when_the_rest_of_a_start_has_ended(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imports and the encoder's self-test ran beside the timed forwards: the costs were those of a busy machine."""
    timed, calls = ("choose_num_threads", "kept_costs"), Mock()
    for name in timed:
        getattr(calls, name).side_effect = getattr(loading, name)
        monkeypatch.setattr(loading, name, getattr(calls, name))
    settings = target.config, EngineConfig(max_kv_tokens=1024, num_threads=2), DraftingConfig()
    with loading.load_engine(*settings, quiet=calls.quiet):
        pass
    assert [name for name, *_ in calls.mock_calls] == ["quiet", *timed]


def test_kept_measurements_do_not_name_the_machine(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that tells a host's name, and that is lost when a container gets another."""
    kept_self_test(target, 2)
    before = sorted((Path(target.config.cache_dir) / "measurements").iterdir())
    monkeypatch.setattr("platform.node", lambda: "elsewhere")
    kept_self_test(target, 2)
    assert sorted((Path(target.config.cache_dir) / "measurements").iterdir()) == before
    assert platform.node() not in before[0].name


def test_damaged_and_unwritable_files_only_cost_time(
    target: Target, lengths: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """A half-written file must not decide what is promised, nor stop an engine."""
    first = kept_self_test(target, 2)
    (kept,) = (Path(target.config.cache_dir) / "measurements").glob("*.json")
    for content in ("{", '{"rows": 3}'):
        kept.write_text(content)
        lengths.clear()
        assert kept_self_test(target, 2) == first and lengths == [QUICK_ROWS, target.max_context_tokens]
    kept.unlink()
    kept.parent.rmdir()
    kept.parent.write_text("a file")
    with caplog.at_level(logging.WARNING):
        assert kept_self_test(target, 2) == first
    assert "measurements are not kept" in caplog.text

"""The command: one JSON object as the last line of stdout, everything for people elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ragspec.evaluation.report import KEYS
from ragspec.evaluation.suite import Outcome, Settings, Suite, find_suite
from ragspec.evaluation.suites.generation import MeasuredGeneration
from ragspec.evaluation.timing import TimedGeneration, Timings
from typer.testing import CliRunner

from pipelines import benchmark


def outcome(settings: Settings) -> Outcome:
    runs = {
        "plain": [[TimedGeneration((1, 2, 3), 0.1, 0.4, 3)]],
        "speculative": [[TimedGeneration((1, 2, 3), 0.1, 0.1, 1)]],
    }
    result = {"suite": "rag", "label": "made up", "target": "tiny", "dtype": "float32", "num_prompts": 1}
    result |= {"identical": True, "speedup_vs_plain": 4.0, "parts": {"a": {"x": 1.0}}, "seed": settings.plan.seed}
    return Outcome(result, MeasuredGeneration(result, Timings(runs, [0.1]), None))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The suite is replaced: this is about the command."""
    seen: list[Settings] = []

    def measure_suite(name: str, settings: Settings, tick: object) -> tuple[Suite, Outcome]:
        seen.append(settings)
        return find_suite(name), outcome(settings)

    monkeypatch.setattr(benchmark, "measure_suite", measure_suite)
    return seen


def test_last_line_is_the_result_and_files_hold_the_same(seen: list[Settings], tmp_path: Path) -> None:
    """Bug guarded: tables on stdout, keys left out, a file that differs from the line."""
    options = ["--suite", "rag", "--seed", "7", "--json", str(tmp_path / "out" / "r.json"), "--plots", str(tmp_path)]
    done = CliRunner().invoke(benchmark.app, options)
    assert done.exit_code == 0, done.output
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    assert set(KEYS) <= result.keys() and result["seed"] == 7
    assert len(result["commit"].removesuffix("-dirty")) in (7, 40)
    assert json.loads((tmp_path / "out" / "r.json").read_text()) == result
    assert (tmp_path / "rag_float32_speed.png").stat().st_size > 5_000
    assert (tmp_path / "rag_float32_acceptance.png").stat().st_size > 5_000


def test_quick_means_one_run(seen: list[Settings]) -> None:
    """Bug guarded: a flag that is read and not used."""
    CliRunner().invoke(benchmark.app, ["--suite", "rag", "--quick", "--no-peers"])
    CliRunner().invoke(benchmark.app, ["--suite", "rag", "--dtype", "bfloat16"])
    quick, full = seen
    assert (quick.plan.num_runs, quick.quick, quick.peers) == (1, True, False)
    assert (full.plan.num_runs, full.quick, full.peers, full.target.dtype) == (3, False, True, "bfloat16")


@pytest.mark.parametrize("options", [["--data", "no/such/folder"], ["--target", "no/such/model", "--no-peers"]])
def test_errors_are_one_line(options: list[str]) -> None:
    """Bug guarded: a traceback for a wrong path."""
    done = CliRunner().invoke(benchmark.app, ["--suite", "rag", *options])
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    assert "error:" in done.stderr and done.stdout == ""


def test_grammar_without_data_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: a traceback on a machine without the data folder."""
    monkeypatch.setattr(benchmark, "DEFAULT_DATA", tmp_path / "none")
    done = CliRunner().invoke(benchmark.app, ["--suite", "grammar"])
    assert done.exit_code == 1
    assert "--data" in done.stderr and done.stdout == ""

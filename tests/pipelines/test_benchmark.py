"""The command and the frame of the suites: one flat JSON line, goals, and rows that survive a stop."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pipelines import benchmark
from pipelines.benchmarks.harness import Metric, Plot, Row, RowFile, Run, Suite, at_least, at_most, equal_to
from ragspec.config import TargetConfig


def run_two(run: Run) -> Iterator[Row]:
    for number, name in enumerate(("rag", "grammar")):
        yield run.row(name, lambda number=number: {"speedup": 2.0 + number, "share": 0.99999})


MADE_UP = Suite(
    "made up",
    run_two,
    lambda rows: {"slowest": min(row["speedup"] for row in rows), "identical": True, "share": rows[0]["share"]},
    (
        Metric("slowest", "the least speed-up", at_least(3.0)),
        Metric("share", "a share that is not all", equal_to(1)),
        Metric("identical", "tokens equal", equal_to(True)),
        Metric("not measured", "a figure of another machine", at_most(1.0)),
    ),
    Plot("row", {"speedup": "speed-up"}, lambda row: True),
)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """The suites are replaced: this is about the command."""
    seen: list[Run] = []

    def run_seen(run: Run) -> Iterator[Row]:
        seen.append(run)
        yield from run_two(run)

    monkeypatch.setattr(benchmark, "suite_of", lambda name: MADE_UP._replace(run=run_seen))
    return seen


def test_last_line_is_flat_and_the_file_holds_the_rows_too(seen: list[Run], tmp_path: Path) -> None:
    """Bug guarded: tables on stdout, nested values in the line, a file that differs from the line."""
    options = ["--suite", "gpu", "--seed", "7", "--json", str(tmp_path / "out" / "r.json"), "--plots", str(tmp_path)]
    done = CliRunner().invoke(benchmark.app, options)
    assert done.exit_code == 0, done.output
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    assert not any(isinstance(value, dict | list) for value in result.values())
    assert (result["seed"], result["slowest"], result["share"]) == (7, 2.0, 0.9999)
    assert result["goals_missed"] == "slowest, share"
    written = json.loads((tmp_path / "out" / "r.json").read_text())
    rows = written.pop("rows")
    assert written == result and [row["row"] for row in rows] == ["rag", "grammar"]
    assert {row["commit"] for row in rows} == {result["commit"]}
    assert (tmp_path / "made up.png").stat().st_size > 2_000


def test_quick_means_one_run(seen: list[Run]) -> None:
    """Bug guarded: a flag that is read and not used."""
    CliRunner().invoke(benchmark.app, ["--suite", "load", "--quick", "--no-peers", "--num-prompts", "3"])
    CliRunner().invoke(benchmark.app, ["--suite", "load", "--dtype", "bfloat16"])
    quick, full = seen
    assert (quick.num_runs, quick.quick, quick.peers, quick.count(200, 8)) == (1, True, False, 3)
    assert (full.num_runs, full.quick, full.peers, full.count(200, 8)) == (3, False, True, 200)
    assert full.target.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("suite", "options", "said"),
    [
        ("speculation", ["--data", "no/such/folder"], "not a folder"),
        ("nonsense", [], "unknown suite"),
        ("answers", [], "--data"),
    ],
)
def test_errors_are_one_line(suite: str, options: list[str], said: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Bug guarded: a traceback for a wrong path, for a misspelt suite, and on a machine without the data folder."""
    monkeypatch.setattr(benchmark, "DEFAULT_DATA", tmp_path / "none")
    done = CliRunner().invoke(benchmark.app, ["--suite", suite, *options])
    assert done.exit_code == 1 and isinstance(done.exception, SystemExit)
    assert "error:" in done.stderr and said in done.stderr.replace("\n", " ") and done.stdout == ""


def test_measured_rows_are_read_back_at_the_same_commit_alone(tmp_path: Path) -> None:
    """Bug guarded: a stopped run begins anew, or shows the figures of another commit or of other choices."""
    run = Run(TargetConfig(), tmp_path)
    first = run.resumed("made up", "a" * 40)
    assert first.row("x", lambda: {"value": 1}) == {"row": "x", "value": 1}
    for other in (run.resumed("made up", "b" * 40), replace(run, quick=True).resumed("made up", "a" * 40)):
        assert other.kept.get("x") is None
    for changed in ("a" * 40 + "-dirty", "unknown"):
        assert run.resumed("made up", changed) is run
    again = run.resumed("made up", "a" * 40)
    assert again.row("x", lambda: pytest.fail("measured again")) == {"row": "x", "value": 1}


def test_a_row_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    """Bug guarded: a run that was killed while it wrote could never go on."""
    path = tmp_path / "rows" / "made_up.jsonl"
    kept = RowFile(path)
    kept.add({"row": "x", "value": 1})
    path.write_text(path.read_text() + '\n{"row": "y", "val')
    kept = RowFile(path)
    assert kept.get("x") == {"row": "x", "value": 1} and kept.get("y") is None
    kept.add({"row": "y", "value": 2})
    assert RowFile(path).get("y") == {"row": "y", "value": 2}

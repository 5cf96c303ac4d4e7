"""The results page: figures of one target and machine, each with its commit, between two markers."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines import results_page
from pipelines.results_page import BEGIN, END, MAX_ROWS, measured_part, write_page
from ragspec.errors import ConfigError

RESULT = {"target": "tiny", "dtype": "int8", "machine": "2 x one", "versions": "python 3", "commit": "a" * 40}


def result(suite: str, **figures: Any) -> dict[str, Any]:
    return {"suite": suite, **RESULT, **figures}


def test_every_figure_has_its_commit_and_the_rest_of_the_page_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug guarded: a page that is overwritten; a figure without the commit that measured it."""
    page = tmp_path / "README.md"
    page.write_text(f"before\n{BEGIN}\nolder\n{END}\nafter\n\n![old](old.png)\n")
    monkeypatch.setattr(results_page, "PAGE", page)
    files = {"iterative": tmp_path / "iterative.json", "gpu": tmp_path / "gpu.json"}
    files["iterative"].write_text(json.dumps(result("iterative", slowdown_worst=0.98, rows=[])))
    files["gpu"].write_text(json.dumps(result("gpu", machine="another", on_off_min=1.1)))
    write_page(files)
    text = page.read_text()
    assert text.startswith("before\n") and "after\n" in text and "older" not in text and "old.png" not in text
    assert "| iterative | `slowdown_worst` | 0.98 |" in text and "| 0.97 at least | aaaaaaa |" in text
    assert "| gpu | `on_off_min` | 1.1 |" in text
    write_page(files)
    assert page.read_text() == text


def test_two_targets_or_machines_are_refused() -> None:
    """Bug guarded: figures of several machines side by side, as if they could be compared."""
    with pytest.raises(ConfigError, match="machine"):
        measured_part({"iterative": result("iterative"), "answers": result("answers", machine="2 x another")})


def test_figures_without_a_goal_leave_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: a page that grows without end, or that leaves out a missed goal."""
    monkeypatch.setattr(results_page, "MAX_ROWS", 2)
    part = measured_part({"answers": result("answers", follow_up_recall=0.5, doc_top1=0.7, doc_top3=0.9)})
    assert "doc_top1" in part and "doc_top3" in part and "follow_up_recall" not in part and MAX_ROWS == 60

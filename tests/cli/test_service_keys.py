"""`ragspec keys`, and how `ragspec serve` refuses a call that cannot be meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ragspec.cli import main
from services.keys import KeyFile


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(args)
    return int(end.value.code or 0)


def test_a_key_is_shown_once_and_listed_without_its_hash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A list that is pasted into a ticket opens the service."""
    file = str(tmp_path / "keys.json")
    assert run("keys", "add", "--file", file, "--tenant", "ann", "--id", "a", "--concurrency", "2", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["tenant"] == "ann"
    assert run("keys", "add", "--file", file, "--id", "own", "--json") == 0
    assert json.loads(capsys.readouterr().out)["tenant"] == "own"  # not nobody, which is everybody
    found = KeyFile(Path(file)).caller(made["key"])
    assert found is not None and found.tenant == "ann" and found.limits is not None and found.limits.concurrency == 2
    for options in ([], ["--json"]):
        assert run("keys", "list", "--file", file, *options) == 0
        shown = capsys.readouterr().out
        assert "ann" in shown and "concurrency" in shown and made["key"] not in shown
        assert json.loads(Path(file).read_text())["keys"][0]["sha256"] not in shown
    assert run("keys", "revoke", "a", "--file", file) == 0
    assert KeyFile(Path(file)).caller(made["key"]) is None


def test_what_cannot_be_done_ends_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A traceback, or success where nothing happened."""
    file = str(tmp_path / "keys.json")
    assert run("keys", "list", "--file", file) == 1
    assert run("keys", "revoke", "a", "--file", file) == 1
    assert run("serve", "--host", "0.0.0.0", "--index", str(tmp_path)) == 1
    assert run("serve", "--port", "70000") == 2
    told = capsys.readouterr().err
    assert told.count("error: ") == 3 and "ragspec keys add" in told and "Traceback" not in told

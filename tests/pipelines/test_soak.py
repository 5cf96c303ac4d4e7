"""The soak commands: items follow from seed and number alone, parts add up, and nothing that goes wrong is lost."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.benchmarks import load, soak
from pipelines.benchmarks.chaos import service_faults
from ragspec.retrieval.reading import file_reader


def die(seed: int, first: int, last: int) -> Counter[str]:
    os.kill(os.getpid(), signal.SIGKILL)
    return Counter()


def test_parts_add_up_to_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was stopped began anew, or counted a part twice."""
    monkeypatch.setitem(soak.BATCHES, "files", 40)
    of = {"kind": "files", "seed": 7}
    whole = soak.soak(of, soak.read_damaged, 120, tmp_path / "whole.json", 1e9)
    parts = tmp_path / "parts.json"
    assert sum(soak.soak(of, soak.read_damaged, 120, parts, 0.0).values()) == 0
    for count in (30, 100, 120):
        found = soak.soak(of, soak.read_damaged, count, parts, 1e9)
        assert sum(found.values()) == count == json.loads(parts.read_text())["done"]
    assert found == whole and whole["read"] and whole["refused"]
    assert not [name for name in soak.BAD if whole[name]]
    for other in ({"seed": 8}, {"kinds": ["clock"]}):
        with pytest.raises(SystemExit, match=r"belongs to .*files.*7"):
            soak.soak(of | other, soak.read_damaged, 120, parts, 1e9)


def test_a_run_remembers_its_kinds_of_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults of some kinds counted as those of others; a run from before kinds could be chosen that cannot go on."""
    asked = list[tuple[str, ...]]()

    def struck(seed: int, first: int, last: int, kinds: Sequence[str]) -> Counter[str]:
        asked.append(tuple(kinds))
        return Counter(dict.fromkeys(kinds, 1))

    monkeypatch.setattr(service_faults, "faults_batch", struck)
    earlier, chosen = tmp_path / "earlier.json", tmp_path / "chosen.json"
    earlier.write_text(json.dumps({"kind": "faults", "seed": 0, "done": 10, "counts": {"kill": 1}}))
    few = ["faults", "--count", "20", "--state", str(chosen)]
    assert soak.main(["faults", "--count", "20", "--state", str(earlier)]) == 0
    assert soak.main([*few, "--kinds", "clock", "upgrade"]) == 0
    assert asked == [service_faults.KINDS, *2 * [("clock", "upgrade")]]
    assert json.loads(earlier.read_text())["counts"]["kill"] == 2
    assert json.loads(chosen.read_text())["kinds"] == ["clock", "upgrade"]
    for given in (few, [*few, "--kinds", "clock"], [*few, "--kinds", "flood"], ["files", *few[1:], "--kinds", "clock"]):
        with pytest.raises(SystemExit) as ended:
            soak.main(given)
        assert ended.value.code != 0


def test_a_process_that_dies_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that takes its process along was a traceback of the command, and the next run began behind it."""
    monkeypatch.setattr(soak, "read_damaged", die)
    assert soak.files_batch(0, 0, 10) == Counter({"crash": 1})


def test_an_error_of_another_kind_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in a reader counted as a refusal."""

    def wrong(path: Path, name: str) -> list[Any]:
        raise KeyError("a bug")

    monkeypatch.setattr(file_reader, "read_file", wrong)
    assert soak.read_damaged(0, 0, 5) == Counter({"exception": 5})


def test_a_request_that_is_read_late_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients had gone before the service read their requests: three that were on their way out counted as left running."""
    running = iter([3, 3, 0])
    limiter = SimpleNamespace(running=0)

    def looked(engine: Any, tenants: Any) -> int:
        limiter.running = next(running, 0)
        return 0

    monkeypatch.setattr(load, "leaked_slots", looked)
    backend = SimpleNamespace(model="m", rate_limiter=limiter, engine=None)
    small = soak.SmallService(SimpleNamespace(url="", backend=backend, keys={"ann": "key"}))
    assert small._left_behind(Counter(left=1)) == Counter(left=1)
    running = iter([2])
    monkeypatch.setattr(soak, "_SETTLE_S", -1.0)
    assert small._left_behind(Counter()) == Counter({"left running": 2})


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("requests", 400), ("aborts", 100)])
def test_the_small_service_survives(kind: str, count: int, tmp_path: Path) -> None:
    """The full numbers are run by hand, in parts."""
    assert soak.main([kind, "--count", str(count), "--state", str(tmp_path / "state.json")]) == 0
    counts = json.loads((tmp_path / "state.json").read_text())["counts"]
    assert sum(counts.values()) == count and len(counts) > 1

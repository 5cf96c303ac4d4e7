"""Processes are told apart by their birth, and end even when they are stopped; a keeper says what its node has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ragspec.cluster.keeper import NodeKeeper, Versions
from ragspec.cluster.processes import Process, family, kill_all

_SLEEPER = "import time; time.sleep(600)"
_PARENT = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {_SLEEPER!r}]); time.sleep(600)"

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts Python code in a process that the test's end ends."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(code: str, *, session: bool = False) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", code], start_new_session=session))
        return started[-1]

    yield begin
    for child in started:
        kill_all(family(child.pid))
        child.wait()


def test_a_stopped_process_ends_at_once(start: Start) -> None:
    """SIGTERM, or an order that the process must read, waits until somebody lets it go on."""
    child = start(_SLEEPER)
    process = Process.of(child.pid)
    os.kill(child.pid, signal.SIGSTOP)
    while process.state() != "T":
        time.sleep(0.01)
    assert NodeKeeper().look([process]).states == ["T"]
    assert NodeKeeper().kill([process]) == []
    assert process.state() == ""
    assert child.wait() == -signal.SIGKILL


def test_a_number_that_was_given_out_again_is_another_process(start: Start) -> None:
    """A record outlives its process, and somebody else's process is killed."""
    child = start(_SLEEPER)
    process = Process.of(child.pid)
    earlier = process._replace(started=process.started - 1)
    assert earlier.state() == "" and not earlier.kill()
    assert kill_all([earlier]) == []
    assert process.state() != "" and child.poll() is None


def test_a_process_that_nobody_has_waited_for_has_ended(start: Start) -> None:
    """A zombie counts as alive, and whoever waits for its end waits for ever."""
    child = start("pass")
    process = Process.of(child.pid)
    deadline = time.monotonic() + 60.0
    while process.state() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.state() == "" and not process.kill()
    assert not family(child.pid)
    child.wait()
    with pytest.raises(ProcessLookupError):
        Process.of(child.pid)


def test_a_family_is_found_though_its_parent_is_dead(start: Start) -> None:
    """Children of a killed process belong to nobody by their parent's number, and stay."""
    leader = start(_PARENT, session=True)
    while len(family(leader.pid)) < 2:
        time.sleep(0.02)
    (orphan,) = (process for process in family(leader.pid) if process.pid != leader.pid)
    leader.kill()
    leader.wait()
    assert family(leader.pid) == [orphan]
    assert Process.of(os.getpid()) not in family(leader.pid)
    assert kill_all(family(leader.pid)) == [] and not orphan.state()


def test_a_keeper_names_what_is_missing(tmp_path: Path) -> None:
    """A node without the model is told of by the loader, minutes later."""
    (tmp_path / "there").mkdir()
    asked = [str(tmp_path / "there"), str(tmp_path / "missing")]
    assert NodeKeeper().missing(asked) == asked[1:]


def test_versions_differ_by_the_first_thing_that_differs() -> None:
    """Two checkouts with the same number are taken for the same code."""
    here = Versions.here()
    assert here.difference(here) == ""
    assert here.difference(here._replace(code="other", ray="1.0")) == f"ragspec {here.code} and other (code)"
    assert here.difference(here._replace(python="3.0")) == f"python {here.python} and 3.0"

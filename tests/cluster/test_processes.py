"""Processes are told apart by their start time, and end even when they are stopped."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from stand_ins import until

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
    until(lambda: process.state() == "T")
    assert kill_all([process]) == []
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
    until(lambda: process.state() == "")
    assert not process.kill()
    assert not family(child.pid)
    child.wait()
    with pytest.raises(ProcessLookupError):
        Process.of(child.pid)


def test_a_family_is_found_though_its_parent_is_dead(start: Start) -> None:
    """Children of a killed process belong to nobody by their parent's number, and stay."""
    leader = start(_PARENT, session=True)
    until(lambda: len(family(leader.pid)) >= 2)
    (orphan,) = (process for process in family(leader.pid) if process.pid != leader.pid)
    leader.kill()
    leader.wait()
    assert family(leader.pid) == [orphan]
    assert Process.of(os.getpid()) not in family(leader.pid)
    assert kill_all(family(leader.pid)) == [] and not orphan.state()

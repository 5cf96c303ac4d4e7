"""Processes of this machine by id and start time, so that a reused id is never mistaken for the old process.

>>> me = Process.of(os.getpid())
>>> me.state()
'R'
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_STATE, _PARENT, _SESSION, _STARTED = 0, 1, 3, 19
"""Fields of /proc/PID/stat, counted from the one after the command's name."""

_GONE = frozenset("ZXx")
STOPPED = frozenset("Tt")
_PAUSE_S = 0.02


class Process(NamedTuple):
    """`started` is in clock ticks since the machine's start."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Process:
        """Raises: ProcessLookupError."""
        fields = _stat(pid)
        if fields is None:
            raise ProcessLookupError(f"there is no process {pid}")
        return cls(pid, int(fields[_STARTED]))

    def state(self) -> str:
        """The kernel's letter: R runs, S sleeps, D waits for a disk, T is stopped; empty once it has ended."""
        fields = _stat(self.pid)
        if fields is None or int(fields[_STARTED]) != self.started or fields[_STATE] in _GONE:
            return ""
        return fields[_STATE]

    def kill(self, number: int = signal.SIGKILL) -> bool:
        """Send a signal; False if the process has ended."""
        if not self.state():
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True


def kill_all(processes: Iterable[Process], timeout_s: float = 5.0) -> list[Process]:
    """SIGKILL, then wait for the end. Gives the processes that still run after `timeout_s`, as when they wait for a disk."""
    left = [process for process in processes if process.kill()]
    deadline = time.monotonic() + timeout_s
    while (left := [process for process in left if process.state()]) and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
    return left


def family(pid: int) -> list[Process]:
    """The running processes among `pid`, its descendants and the session it leads, in no order."""
    parents: dict[int, int] = {}
    started: dict[int, int] = {}
    session: list[int] = []
    for other, fields in _all():
        if fields[_STATE] in _GONE:
            continue
        parents[other], started[other] = int(fields[_PARENT]), int(fields[_STARTED])
        if int(fields[_SESSION]) == pid:
            session.append(other)
    found = {pid, *session} & started.keys()
    while more := {other for other, parent in parents.items() if parent in found} - found:
        found |= more
    return [Process(other, started[other]) for other in found]


def _all() -> Iterator[tuple[int, list[str]]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))) is not None:
            yield int(entry.name), fields


def _stat(pid: int) -> list[str] | None:
    """Splits at the last bracket, because a command's name may contain spaces and brackets."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()

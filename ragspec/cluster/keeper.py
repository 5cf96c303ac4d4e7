"""The hand on a node: it kills what does not end by itself, says which processes are there, and what its node has.

Why: Ray ends an actor by asking its process, which a stopped one does not hear. A keeper knows nothing that its callers did not
tell it, so another can take its place at any time. One process a node, next to no processor time.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import threading
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import ray

from ragspec.cluster.processes import STOPPED, Process, kill_all
from ragspec.cluster.shell import Place

_USUAL_CROWD, _MOST_SLOWNESS = 4.0, 5.0
_LOOKS_STOPPED = 2
"""A process that is stopped this many times in a row hangs; once may be a debugger or a checkpoint passing by."""


class Versions(NamedTuple):
    """What must agree between all processes that talk to each other; `code` is a hash of ragspec's own files."""

    ragspec: str
    code: str
    ray: str
    python: str

    @classmethod
    def here(cls) -> Versions:
        return cls(version("ragspec"), _code(), ray.__version__, platform.python_version())

    def difference(self, other: Versions) -> str:
        """The first that differs, as `name: own and other's`; empty if none does."""
        for name, own, others in zip(self._fields, self, other, strict=True):
            if own != others:
                return f"{name} {own} and {others}" if name != "code" else f"ragspec {own} and {others} (code)"
        return ""


class Look(NamedTuple):
    """The state of each process, as `Process.state`, and how many want each of the node's processors, over the last minute."""

    states: list[str]
    crowd: float


def slowness(crowd: float) -> float:
    return min(max(crowd / _USUAL_CROWD, 1.0), _MOST_SLOWNESS)


class NodeKeeper:
    """Safe to call from several threads."""

    def __init__(self) -> None:
        self._watched: Process | None = None

    def ping(self) -> Place:
        return Place(Process.of(os.getpid()), ray.get_runtime_context().get_node_id())

    def look(self, processes: Sequence[Process]) -> Look:
        return Look([process.state() for process in processes], _crowd())

    def kill(self, processes: Sequence[Process]) -> list[Process]:
        """SIGKILL; those that are still there after 5 s."""
        return kill_all(processes)

    def versions(self) -> Versions:
        return Versions.here()

    def missing(self, paths: Sequence[str]) -> list[str]:
        """Those of the paths that this node does not have."""
        return [path for path in paths if not Path(path).exists()]

    def free_address(self) -> tuple[str, int]:
        """This node's address among the nodes, and a port nobody listens on."""
        with socket.socket() as free:
            free.bind(("", 0))
            address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            return address, int(free.getsockname()[1])

    def guard(self, supervisor: Any, process: Process, heartbeat_s: float, hang_s: float) -> None:
        """Kill that process of this node when it hangs, so that Ray starts the supervisor again; until told of another."""
        if self._watched != process:
            self._watched = process
            arguments = (supervisor, process, heartbeat_s, hang_s)
            threading.Thread(target=self._guard, args=arguments, daemon=True).start()

    def _guard(self, supervisor: Any, process: Process, heartbeat_s: float, hang_s: float) -> None:
        num_stopped, answered = 0, time.monotonic()
        call = None
        while self._watched == process and (state := process.state()):
            num_stopped = num_stopped + 1 if state in STOPPED else 0
            call = call or supervisor.ping.remote()
            if ray.wait([call], timeout=heartbeat_s)[0]:
                call, answered = None, time.monotonic()
                time.sleep(heartbeat_s)
            if num_stopped >= _LOOKS_STOPPED or time.monotonic() - answered > hang_s * slowness(_crowd()):
                process.kill()


def keeper_class() -> Any:
    """The actor class of a `NodeKeeper`, whose node and name are still to be told by `options`."""
    fixed: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 8, "max_restarts": 0}
    return ray.remote(**fixed)(NodeKeeper)


def _crowd() -> float:
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def _code() -> str:
    """The first letters of a hash over every Python file of ragspec, by name."""
    root = Path(__file__).parents[1]
    files = sorted(root.rglob("*.py"))
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]

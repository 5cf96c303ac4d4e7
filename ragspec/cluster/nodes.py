"""A Ray cluster on this machine: real `ray start` processes, one family of them a node, ended by their recorded ids alone.

For one machine, for tests and to show what happens when a node dies. All of it listens on the loopback address only, and wants a
token. Never `ray stop`: that ends every Ray of the machine.

    >>> with LocalNodes(folder, os.environ) as nodes:
    ...     head, worker = nodes.add(num_cpus=2), nodes.add(num_cpus=2)
    ...     os.environ.update(nodes.environment)         # before Ray is imported
    ...     ray.init(nodes.address)
    ...     nodes.kill(worker)
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from ragspec.cluster.processes import Process, family, kill_all
from ragspec.errors import EngineError, SaveError

LOOPBACK = "127.0.0.2"
"""Why not ...1: Ray takes that for this machine's name, and listens on its outer address. All of 127.0.0.0/8 is loopback."""

_START_TIMEOUT_S = 90.0
_LOOK_S = 0.05
_STATE, _TOKEN = "cluster.json", "token"
_STARTED = "Ray runtime started"
_TOKEN_BYTES = 32
_PRIVATE = 0o700
_FORGOTTEN = ("RAY_ADDRESS", "RAY_AUTH_TOKEN")
_HEAD = ("--head", "--include-dashboard=false", f"--dashboard-host={LOOPBACK}")
_ANYWHERE = (
    f"--node-ip-address={LOOPBACK}",
    "--min-worker-port=0",
    "--max-worker-port=0",
    "--dashboard-agent-listen-port=0",
)
"""Why: with Ray's own numbers, two nodes or two clusters on one machine get into each other's way."""


class LocalNode(NamedTuple):
    """`leader` is the process of `ray start --block`; all others of the node belong to its session."""

    name: str
    leader: Process


class LocalNodes(AbstractContextManager["LocalNodes"]):
    """The first node is the head. What is needed to end them is in the folder, for whoever comes after a crash."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        """Starts nothing. `environment` is what the nodes' processes see, beside their own settings."""
        self._folder = folder
        self._seen = {name: value for name, value in environment.items() if name not in _FORGOTTEN}
        self._nodes: list[LocalNode] = []
        self._children: list[subprocess.Popen[bytes]] = []
        self._temporary = ""
        self.address = ""

    @classmethod
    def found(cls, folder: Path) -> LocalNodes | None:
        """What is recorded there, whether it runs or not. Raises: EngineError if the record cannot be read."""
        try:
            state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
            found = cls(folder, {})
            found.address, found._temporary = str(state["address"]), str(state["temporary"])
            is_older = state["boot"] != _boot()  # than the machine's last start: all its processes are gone
            found._nodes = [] if is_older else [LocalNode(name, Process(*leader)) for name, leader in state["nodes"]]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as cause:
            raise EngineError(f"{folder / _STATE} cannot be read: {cause}") from cause
        return found

    @property
    def environment(self) -> dict[str, str]:
        """What every process of the cluster has, and who connects must set before Ray is imported."""
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._folder / _TOKEN),
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    @property
    def running(self) -> bool:
        """Whether the head does."""
        return bool(self._nodes and self._nodes[0].leader.state())

    def add(self, num_cpus: int | None = None, options: Sequence[str] = ()) -> LocalNode:
        """Start a node and wait until it is part of the cluster. Raises: EngineError, SaveError.

        `num_cpus` None: as many as the machine has. `options` go to `ray start`.
        """
        if self._nodes:
            place = [f"--address={self.address}"]
        else:
            self._prepare()
            place = [*_HEAD, f"--port={self.address.rpartition(':')[2]}", f"--temp-dir={self._temporary}"]
        cpus = [] if num_cpus is None else [f"--num-cpus={num_cpus}"]
        name = f"node-{len(self._nodes)}"
        node = LocalNode(name, self._start(name, [*place, *cpus, *_ANYWHERE, *options]))
        self._nodes.append(node)
        self._write()
        self._await(node)
        return node

    def processes(self, node: LocalNode) -> list[Process]:
        """All that belong to it at the moment.

        Why nothing if its number is another's: the kernel gives no number out again while a session has it.
        """
        there = family(node.leader.pid)
        is_others = any(process.pid == node.leader.pid and process != node.leader for process in there)
        return [] if is_others else there

    def kill(self, node: LocalNode) -> None:
        """SIGKILL every process of it, as if its machine had lost power. Raises: EngineError if one does not end."""
        while there := self.processes(node):  # Why again: one may just have started another
            if left := kill_all(there):
                raise EngineError(f"{len(left)} processes of {node.name} do not end, the first is {left[0].pid}")

    def close(self) -> None:
        """End all nodes, the head last, and remove what was written. Safe to repeat, also after a crash."""
        for node in reversed(self._nodes):
            self.kill(node)
        for child in self._children:
            child.wait()
        self._nodes, self._children = [], []
        if self._temporary:  # else the folder is another's
            shutil.rmtree(self._temporary, ignore_errors=True)
            shutil.rmtree(self._folder, ignore_errors=True)
        self._temporary = ""

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(self) -> None:
        """Why a folder of its own in /tmp: paths of sockets must be short, and Ray's usual one tells others of this cluster."""
        try:
            self._folder.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
            token = os.open(self._folder / _TOKEN, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(token, "w", encoding="ascii") as file:
                file.write(secrets.token_hex(_TOKEN_BYTES))
            self._temporary = tempfile.mkdtemp(prefix="ragspec-ray-", dir="/tmp")
        except FileExistsError as cause:
            raise EngineError(f"{self._folder} belongs to another cluster") from cause
        except OSError as cause:
            raise SaveError(f"cannot write to {self._folder}: {cause}") from cause
        with socket.socket() as free:
            free.bind((LOOPBACK, 0))
            self.address = f"{LOOPBACK}:{free.getsockname()[1]}"

    def _start(self, name: str, arguments: Sequence[str]) -> Process:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *arguments]
        with open(self._log(name), "wb") as log:
            started = subprocess.Popen(
                command,
                env={**self._seen, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self._folder,
            )
        self._children.append(started)
        return Process.of(started.pid)

    def _await(self, node: LocalNode) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while _STARTED not in (text := self._log(node.name).read_text(encoding="utf-8", errors="replace")):
            if not node.leader.state() or time.monotonic() > deadline:
                lines = [line.strip() for line in text.splitlines() if line.strip()]
                self.kill(node)
                self._nodes.remove(node)
                raise EngineError(f"Ray's {node.name} did not start: {lines[-1] if lines else 'it says nothing'}")
            time.sleep(_LOOK_S)

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _write(self) -> None:
        state = {"address": self.address, "temporary": self._temporary, "nodes": self._nodes, "boot": _boot()}
        path = self._folder / f"{_STATE}.new"
        path.write_text(json.dumps(state), encoding="utf-8")
        path.replace(self._folder / _STATE)


def _boot() -> str:
    """Which of the machine's starts this is."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()

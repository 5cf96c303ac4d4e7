"""A Ray cluster on this machine: a session of `ray start` processes for each node, ended by their recorded ids alone.

For one machine, for tests and for node failures. All processes listen on the loopback address only and require a token. Never
runs `ray stop`, which ends every Ray of the machine.

    >>> with LocalCluster(folder, os.environ) as nodes:
    ...     head, worker = nodes.add(num_cpus=2), nodes.add(num_cpus=2)
    ...     os.environ.update(nodes.environment)         # before Ray is imported
    ...     ray.init(nodes.address)
    ...     nodes.kill(worker)
"""

from __future__ import annotations

import ipaddress
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
"""Why not ...1: Ray replaces it by the machine's outer address. All of 127.0.0.0/8 is loopback."""

RAY_DEFAULTS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
"""Why the niceness: workers of Ray's own, 15, did not answer a node's check within 120 s beside two busy processes."""

_START_TIMEOUT_S = 90.0
_LOOK_S = 0.05
_STATE, _TOKEN = "cluster.json", "token"
_STARTED = "Ray runtime started"
_TOKEN_BYTES = 32
_PRIVATE = 0o700
_FORGOTTEN = ("RAY_ADDRESS", "RAY_AUTH_TOKEN")
_HEAD = ("--head", "--include-dashboard=false", f"--dashboard-host={LOOPBACK}")
_FREE_PORTS = (
    f"--node-ip-address={LOOPBACK} --min-worker-port=0 --max-worker-port=0 --dashboard-agent-listen-port=0".split()
)
"""Why: with Ray's default ports, two nodes or two clusters on one machine collide."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class LocalNode(NamedTuple):
    """`leader`: the process of `ray start --block`; the node's other processes belong to its session."""

    name: str
    leader: Process


class LocalCluster(AbstractContextManager["LocalCluster"]):
    """The first node is the head. The folder records all processes, so that they can be ended after a crash."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        """Starts nothing. `environment`: of the nodes' processes, beside their own settings."""
        self._folder = folder
        self._seen = {name: value for name, value in environment.items() if name not in _FORGOTTEN}
        self._nodes: list[LocalNode] = []
        self._children: list[subprocess.Popen[bytes]] = []
        self._temporary = ""
        self.address = ""

    @classmethod
    def recorded(cls, folder: Path) -> LocalCluster | None:
        """The cluster recorded in the folder, whether it runs or not. Raises: EngineError if the record cannot be read."""
        try:
            state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
            cluster = cls(folder, {})
            cluster.address, cluster._temporary = str(state["address"]), str(state["temporary"])
            is_older = state["boot"] != _boot()  # the machine was restarted since: all its processes are gone
            cluster._nodes = [] if is_older else [LocalNode(name, Process(*leader)) for name, leader in state["nodes"]]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as cause:
            raise EngineError(f"{folder / _STATE} cannot be read: {cause}") from cause
        return cluster

    @property
    def environment(self) -> dict[str, str]:
        """Variables of every process of the cluster; a client must set them before it imports Ray."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self._folder / _TOKEN), **RAY_DEFAULTS}

    @property
    def running(self) -> bool:
        """Whether the head runs."""
        return bool(self._nodes and self._nodes[0].leader.state())

    def add(self, num_cpus: int | None = None) -> LocalNode:
        """Start a node and wait until it has joined. Raises: EngineError, SaveError.

        `num_cpus` None: as many as the machine has.
        """
        if self._nodes:
            join = [f"--address={self.address}"]
        else:
            self._prepare()
            join = [*_HEAD, f"--port={self.address.rpartition(':')[2]}", f"--temp-dir={self._temporary}"]
        cpus = [] if num_cpus is None else [f"--num-cpus={num_cpus}"]
        name = f"node-{len(self._nodes)}"
        node = LocalNode(name, self._start(name, [*join, *cpus, *_FREE_PORTS]))
        self._nodes.append(node)
        self._write()
        self._wait_until_joined(node)
        return node

    def processes(self, node: LocalNode) -> list[Process]:
        """The running processes of a node; none if its process id now belongs to a stranger.

        The kernel does not reuse a process id while a session has it.
        """
        members = family(node.leader.pid)
        is_others = any(process.pid == node.leader.pid and process != node.leader for process in members)
        return [] if is_others else members

    def kill(self, node: LocalNode) -> None:
        """SIGKILL every process of a node, like a power failure. Raises: EngineError if one does not end."""
        while members := self.processes(node):  # again, because one may have started another meanwhile
            if left := kill_all(members):
                raise EngineError(f"{len(left)} processes of {node.name} do not end, the first is {left[0].pid}")

    def close(self) -> None:
        """End all nodes, the head last, and remove the folder. Safe to repeat, also after a crash."""
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
        """Why a new folder in /tmp for Ray: socket paths must be short, and other clients find clusters in Ray's usual folder."""
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

    def _wait_until_joined(self, node: LocalNode) -> None:
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
    """The id of the machine's current start."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()

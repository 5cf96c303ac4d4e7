"""A process of a deployment: first nobody, with its imports done, then the member that it is told to become.

Owns nothing but the object that the member is, and forwards calls to it. Why generic: a warm process can take the place of
whatever died. Its heartbeat has a thread of its own, so that a long call is not taken for a hang.

    >>> actor = shell_class().options(num_cpus=0.5).remote()
    >>> facts = ray.get(actor.become.remote(Role(kind="engine", build=load_host, arguments=(config,))))
    >>> Handle(actor).poll.remote("client", 1.0)        # EngineHost.poll
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray

from ragspec.cluster.directory import Kind
from ragspec.cluster.processes import Process
from ragspec.errors import EngineError

_CALLS_AT_ONCE = 64
"""Each client of an engine holds one poll, and asks for other things beside it."""

_PROBE = "supervisor"
_READ_BYTES = 1 << 24
_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Why: threads of several processes share the cores, and would spin while others compute (measured: 2 ms became 9)."""


class Role(NamedTuple):
    """What a process becomes: `build(*arguments)`; then its `load()` and `facts()` are called, if it has them.

    `build` may be a name, as `package.module:name`, so that only the process that becomes it imports it.
    `serial`: its methods are called one at a time, those that `ray.method` puts into a concurrency group one at a time beside
    the others; else many at once. A follower's `run()` is called when all ranks are there.
    """

    kind: Kind
    build: Callable[..., Any] | str
    arguments: tuple[Any, ...] = ()
    serial: bool = False


class Place(NamedTuple):
    """Which process, on which node (Ray's id)."""

    process: Process
    node: str


class Shell:
    """Light to build: what goes wrong in a constructor reaches nobody."""

    def __init__(self) -> None:
        self._object: Any = None
        self._serial = False
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    @ray.method(concurrency_group="heartbeat")
    def ping(self) -> Place:
        return Place(Process.of(os.getpid()), ray.get_runtime_context().get_node_id())

    def warm(self, modules: Sequence[str], folders: Sequence[str]) -> None:
        """Import, and bring the files of the folders into the page cache."""
        for module in modules:
            importlib.import_module(module)
        for path in (path for folder in folders for path in Path(folder).rglob("*") if path.is_file()):
            with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
                while file.read(_READ_BYTES):
                    pass

    def become(self, role: Role) -> Any:
        """The facts of the object, once it is loaded. Raises: what building it raises."""
        built = _found(role.build)(*role.arguments)
        if hasattr(built, "load"):
            built.load()
        self._object, self._serial = built, role.serial
        return self._said()

    @ray.method(concurrency_group="heartbeat")
    def facts(self) -> Any:
        """What the object says of itself now."""
        return self._said()

    @ray.method(concurrency_group="heartbeat")
    def busy_s(self) -> float:
        """How long its step lasts by now, of an engine. Raises: ReplicaLost when it is dead inside a living process."""
        return float(self._object.poll(_PROBE, 0.0).busy_s) if hasattr(self._object, "poll") else 0.0

    def call(self, method: str, *arguments: Any) -> Any:
        if self._object is None:
            raise EngineError("this process has no part in the deployment yet")
        wanted = getattr(self._object, method)
        with self._turn(wanted):
            return wanted(*arguments)

    def _said(self) -> Any:
        return self._object.facts() if hasattr(self._object, "facts") else None

    def _turn(self, method: Any) -> contextlib.AbstractContextManager[Any]:
        if not self._serial:
            return contextlib.nullcontext()
        return self._locks[getattr(method, "__ray_concurrency_group__", "")]


def _found(build: Callable[..., Any] | str) -> Callable[..., Any]:
    if not isinstance(build, str):
        return build
    module, _, name = build.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def shell_class() -> Any:
    """The actor class of a `Shell`, whose resources and name are still to be told by `options`."""
    fixed: dict[str, Any] = {
        "concurrency_groups": {"heartbeat": 2},
        "max_concurrency": _CALLS_AT_ONCE,
        "max_restarts": 0,
        "runtime_env": {"env_vars": _ENVIRONMENT},
    }
    return ray.remote(**fixed)(Shell)


class Handle:
    """A member's actor as its clients see it: `handle.method.remote(*arguments)` calls the object's method.

    `handle.ping.remote()` is the process's own sign of life; `handle.call.remote("method", *arguments)` does the same as above.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return getattr(self._shell, method) if method in ("ping", "facts", "call") else _Method(self._shell, method)

    def __getstate__(self) -> dict[str, Any]:
        return {"_shell": self._shell}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class _Method(NamedTuple):
    shell: Any
    name: str

    def remote(self, *arguments: Any) -> Any:
        return self.shell.call.remote(self.name, *arguments)

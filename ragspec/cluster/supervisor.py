"""Keeps the members of a deployment alive: starts them, asks each for a sign of life, ends and replaces those that give none.

An actor that Ray starts again when it dies; it finds its members by name and goes on. Knows nothing of requests or texts.
States of a member: starting -> live -> lost -> starting with the next epoch. One thread each.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import ray
from ray._private.state import jobs

from ragspec.cluster.answers import whatever_happens
from ragspec.cluster.directory import Table
from ragspec.cluster.groups import Group, Tools, Wanted
from ragspec.cluster.keeper import Versions
from ragspec.cluster.keepers import Keepers, Timing, address_of
from ragspec.cluster.ledger import NAMESPACE, SUPERVISOR, Entry, Ledger
from ragspec.cluster.members import Members
from ragspec.cluster.minder import MemberStatus, Minder
from ragspec.cluster.processes import Process
from ragspec.cluster.shell import Place
from ragspec.cluster.spares import Spares, Warmth
from ragspec.cluster.teardown import bury, sweep
from ragspec.cluster.topology import Note
from ragspec.errors import ConfigError, EngineError, ModelError, StoreError

log = logging.getLogger(__name__)

_LOOK_S = 0.1
_WATCHERS = 64
_CALLS_AT_ONCE = 16


class Plan(NamedTuple):
    """All that a supervisor has to know. `paths` must be there on every node: path -> what it is.

    Without a note it stays until it is taken down. `identity` tells it from an earlier one of that name.
    """

    deployment: str
    members: tuple[Wanted, ...]
    timing: Timing
    warmth: Warmth = Warmth()
    paths: tuple[tuple[str, str], ...] = ()
    note: Note | None = None
    identity: str = ""


class Supervisor:
    """`begin` once; a supervisor that was started again begins by itself."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._members = Members(wanted.name for wanted in plan.members)
        self._ledger = Ledger(plan.deployment)
        self._keepers = Keepers(plan.deployment, plan.timing)
        self._minders: tuple[Minder, ...] = ()
        self._spares: Spares | None = None
        self._me = Place(Process.of(os.getpid()), ray.get_runtime_context().get_node_id())
        entry = self._ledger.read(SUPERVISOR)
        if entry is not None and entry.identity == plan.identity:  # else it is that of an earlier deployment
            self._write()
            threading.Thread(target=self._go_on, daemon=True).start()

    @ray.method(concurrency_group="heartbeat")
    def ping(self) -> Place:
        return self._me

    @ray.method(concurrency_group="watch")
    def table(self, after: int = -1, timeout_s: float = 0.0) -> Table:
        return self._members.table(after, timeout_s)

    def begin(self, versions: Versions) -> None:
        """Check every node, then start everything; does not wait for that. Raises: EngineError, ConfigError."""
        sweep(self._plan.deployment, self._me)  # what a `down` that died has left
        self._keepers.refresh()
        self._keepers.wait()
        self._check_nodes(versions)
        self._write()
        self._mind()

    def ready(self, timeout_s: float) -> bool:
        """Whether every member is live, after at most so many seconds. Raises: what cannot be mended by another start."""
        deadline = time.monotonic() + timeout_s
        while True:
            for minder in self._minders:
                if isinstance(minder.error, ConfigError | ModelError | StoreError):
                    raise minder.error
            if self._is_calm():
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_S)

    def report(self, name: str, epoch: int, why: str) -> None:
        for minder in self._minders:
            if minder.name == name:
                minder.condemn(epoch, why)

    def status(self) -> list[MemberStatus]:
        """Asks every engine for its load."""
        with ThreadPoolExecutor(max_workers=max(1, len(self._minders))) as threads:
            return list(threads.map(Minder.status, self._minders))

    def note(self) -> Note | None:
        return self._plan.note

    def _check_nodes(self, versions: Versions) -> None:
        """Raises: EngineError for other versions than the caller's, ConfigError for a path that a node lacks."""
        for node, theirs in self._keepers.ask("versions").items():
            if difference := versions.difference(theirs):
                raise EngineError(f"versions differ here and on node {address_of(node)}: {difference}")
        what = dict(self._plan.paths)
        for node, missing in self._keepers.ask("missing", list(what)).items():
            if missing:
                raise ConfigError(f"node {address_of(node)} has no {what[missing[0]]} {missing[0]}")

    def _write(self) -> None:
        self._ledger.write(SUPERVISOR, Entry(1, places=(self._me,), live=True, identity=self._plan.identity))

    def _go_on(self) -> None:
        """What `begin` does, of a supervisor that was started again. If it cannot, the process ends and another tries."""
        try:
            self._keepers.refresh()
            time.sleep(2 * self._plan.timing.heartbeat_s)
            self._mind()
        except Exception:
            log.exception("the supervisor cannot go on")
            os._exit(1)

    def _mind(self) -> None:
        plan = self._plan
        self._spares = Spares(plan.deployment, plan.warmth, self._keepers, plan.timing, self._is_calm)
        tools = Tools(
            plan.deployment, plan.timing, self._keepers, self._spares, self._ledger, self._used, threading.Lock()
        )
        self._minders = tuple(Minder(Group(wanted, tools), self._members) for wanted in plan.members)
        for minder in self._minders:
            minder.begin(plan.timing.heartbeat_s)
        threading.Thread(target=self._look_after_nodes, daemon=True).start()

    def _look_after_nodes(self) -> None:
        me = ray.get_runtime_context().current_actor
        while True:
            with whatever_happens():
                self._keepers.refresh()
                if keeper := self._keepers.keeper(self._me.node):
                    keeper.guard.remote(me, self._me.process, self._plan.timing.heartbeat_s, self._plan.timing.hang_s)
                if (note := self._plan.note) and note.job and _has_ended(note.job):
                    bury(self._plan.deployment)
                    return
            time.sleep(2 * self._plan.timing.heartbeat_s)

    def _is_calm(self) -> bool:
        return bool(self._minders) and all(minder.state == "live" for minder in self._minders)

    def _used(self, kind: str) -> dict[str, float]:
        """How many members of that kind a node has, and a little for each other one."""
        used: defaultdict[str, float] = defaultdict(float)
        for minder in self._minders:
            used[minder.node] += 1.0 if minder.kind == kind else 1e-3
        return used


def start_supervisor(plan: Plan) -> Any:
    """Its actor. Raises: ValueError if a deployment of that name is there."""
    groups = {"heartbeat": 2, "watch": _WATCHERS}
    remote: Any = ray.remote(concurrency_groups=groups)  # type: ignore[call-overload]
    options = {"name": f"{plan.deployment}/{SUPERVISOR}", "namespace": NAMESPACE, "lifetime": "detached"}
    restarted = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": 0, "max_concurrency": _CALLS_AT_ONCE}
    return remote(Supervisor).options(**restarted, **options).remote(plan._replace(identity=uuid.uuid4().hex))


def _has_ended(job: str) -> bool:
    """Whether Ray says that the driver of that job is gone."""
    return any(known["JobID"] == job and known["IsDead"] for known in jobs())  # type: ignore[no-untyped-call]

"""Actors of one kind with nobody over them but who asks them: for one process, without a deployment.

>>> actors = OwnActors("shard", ShardActor, count=3)   # a Directory
>>> ClusterRetriever(config, encoder, actors)
>>> actors.close()
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from ragspec.cluster.directory import Kind, Member, Table
from ragspec.cluster.pool import cpus_per_worker

HEALTH, OPENING = "health", "opening"
"""Calls of these groups do not wait for those of others: an actor that computes is alive, and one that opens files answers."""

_GROUPS = {HEALTH: 1, OPENING: 1}
_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Why: its threads share the cores with an engine's, and would spin while those compute (measured: a search of 2 ms took 9)."""
_LOOK_S = 0.05


class ActorFacts(NamedTuple):
    """Where an actor is."""

    pid: int
    node_id: str


class Alive:
    """What every actor of this folder has, in a group of its own. Light to build: what a constructor raises reaches nobody."""

    @ray.method(concurrency_group=HEALTH)
    def ping(self) -> None:
        """Answered while the actor works."""

    @ray.method(concurrency_group=HEALTH)
    def facts(self) -> ActorFacts:
        return ActorFacts(os.getpid(), ray.get_runtime_context().get_node_id())


def remote_class(kind: type) -> Any:
    """What starts actors of this class, once it is told their `num_cpus` in `options`."""
    remote: Any = ray.remote  # Why: its types know no groups
    return remote(concurrency_groups=_GROUPS, max_restarts=0, runtime_env={"env_vars": _ENVIRONMENT})(kind)


class _Own(NamedTuple):
    member: Member
    ping: Any


class OwnActors:
    """A `Directory`. An actor is starting until it answers, then live; one that is reported is killed and replaced."""

    def __init__(
        self, kind: Kind, actor_class: type, arguments: tuple[Any, ...] = (), count: int = 1, prefix: str = ""
    ) -> None:
        """Needs Ray to be initialised; does not wait for the actors."""
        self._kind, self._arguments = kind, arguments
        self._remote = remote_class(actor_class).options(num_cpus=cpus_per_worker(count))
        self._lock = threading.Lock()
        self._version = 0
        self._closed = False
        self._actors = {name: self._start(name, 0) for name in (f"{prefix or kind}-{i}" for i in range(count))}

    def table(self, after: int = -1, timeout_s: float = 0.0) -> Table:
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                starting = self._look()
                if self._version > after or time.monotonic() >= deadline or self._is_over():
                    return Table(self._version, tuple(own.member for own in self._actors.values()))
            if starting and ray.is_initialized():
                ray.wait(starting, timeout=min(_LOOK_S, max(0.0, deadline - time.monotonic())))
            else:
                time.sleep(_LOOK_S)

    def report(self, name: str, epoch: int, why: str) -> None:
        with self._lock:
            own = self._actors.get(name)
            if own is not None and own.member.epoch == epoch and not self._is_over():
                self._replace(own.member)

    def close(self) -> None:
        """End the actors and what they are at."""
        with self._lock:
            self._closed = True
            self._version += 1
            for name, (member, ping) in self._actors.items():
                _kill(member.actor)
                self._actors[name] = _Own(member._replace(state="lost"), ping)

    def _look(self) -> list[Any]:
        """Pings that are still awaited. Those who answered are live; those who died before are started once more."""
        starting = {own.ping: own.member for own in self._actors.values() if own.member.state == "starting"}
        if not starting or self._is_over():
            return []
        answered, waiting = ray.wait(list(starting), num_returns=len(starting), timeout=0)
        for ping in answered:
            member = starting[ping]
            try:
                facts = ray.get(ping)
            except RayError:
                self._replace(member)
            else:
                self._actors[member.name] = _Own(member._replace(state="live", facts=facts, node=facts.node_id), ping)
                self._version += 1
        return waiting

    def _is_over(self) -> bool:
        """Why Ray is asked: a call would start another one."""
        return self._closed or not ray.is_initialized()

    def _replace(self, member: Member) -> None:
        _kill(member.actor)
        self._actors[member.name] = self._start(member.name, member.epoch + 1)
        self._version += 1

    def _start(self, name: str, epoch: int) -> _Own:
        actor = self._remote.remote(*self._arguments)
        return _Own(Member(self._kind, name, epoch, "starting", None, actor, ""), actor.facts.remote())


def _kill(actor: Any) -> None:
    if ray.is_initialized():
        ray.kill(actor)

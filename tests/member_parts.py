"""What tests of supervisors share: members that are quick to start, plans made of them, and waiting with a bound.

>>> supervisor = begin(plan("a", echoes(2)))
>>> members = live(supervisor, 2)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import ray

from ragspec.cluster.directory import Member
from ragspec.cluster.groups import Rank, Wanted
from ragspec.cluster.keeper import Versions
from ragspec.cluster.keepers import Timing
from ragspec.cluster.shell import Role
from ragspec.cluster.spares import Warmth
from ragspec.cluster.supervisor import Plan, start_supervisor
from ragspec.errors import ModelError, ReplicaLost

BOUND_S = 120.0
Found = TypeVar("Found")


class Echo:
    """Says its word."""

    def __init__(self, word: str) -> None:
        self._word = word

    def say(self) -> tuple[str, int]:
        return self._word, os.getpid()


class Unloadable:
    def __init__(self, log: str) -> None:
        with open(log, "a", encoding="utf-8") as file:
            file.write(".")

    def load(self) -> None:
        raise ModelError("no weights in the folder")


class Leader(Echo):
    """Polled as a host is."""

    def __init__(self, word: str, rank: Rank) -> None:
        super().__init__(f"{word} {rank.rank} of {rank.size}")
        self._broken = False

    def break_down(self) -> None:
        self._broken = True

    def poll(self, client: str, wait_s: float) -> Any:
        if self._broken:
            raise ReplicaLost("the group is broken")
        return SimpleNamespace(busy_s=0.0)


class Follower:
    def __init__(self, word: str, rank: Rank) -> None:
        assert rank.rank > 0

    def run(self) -> None:
        time.sleep(3600.0)


def echoes(count: int) -> tuple[Wanted, ...]:
    return tuple(Wanted(f"shard-{i}", "shard", Role("shard", Echo, (f"word {i}",)), cpus=0.01) for i in range(count))


def pair(name: str) -> Wanted:
    roles = Role("engine", Leader, (name,)), Role("engine", Follower, (name,))
    return Wanted(name, "engine", *roles, num_ranks=2, cpus=0.01)


def plan(name: str, members: Sequence[Wanted], num_spares: int = 0, **more: Any) -> Plan:
    return Plan(name, tuple(members), Timing(0.25, 5.0, BOUND_S), Warmth(num_spares), **more)


def begin(wanted: Plan) -> Any:
    supervisor = start_supervisor(wanted)
    ray.get(supervisor.begin.remote(Versions.here()), timeout=BOUND_S)
    return supervisor


def wait_for(look: Callable[[], Found], what: str = "what was waited for") -> Found:
    """What `look` finds, once it finds something; errors of Ray's count as nothing."""
    deadline = time.monotonic() + BOUND_S
    while time.monotonic() < deadline:
        try:
            if found := look():
                return found
        except ray.exceptions.RayError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"not within {BOUND_S:g} s: {what}")


def live(supervisor: Any, count: int) -> list[Member]:
    def look() -> list[Member]:
        members = ray.get(supervisor.table.remote(), timeout=5.0).members
        found = [member for member in members if member.state == "live"]
        return found if len(found) == count else []

    return wait_for(look, f"{count} live members")


def replaced(supervisor: Any, old: Member) -> Member:
    """The member of that name, live in a later epoch."""

    def look() -> Member | None:
        members = ray.get(supervisor.table.remote(), timeout=5.0).members
        found = (m for m in members if m.name == old.name and m.state == "live" and m.epoch > old.epoch)
        return next(found, None)

    return wait_for(look, f"{old.name} in an epoch after {old.epoch}")


def said(member: Member) -> tuple[str, int]:
    word, pid = ray.get(member.actor.say.remote(), timeout=BOUND_S)
    return word, pid


def is_gone(pid: int) -> bool:
    """A zombie counts: whoever started it has not looked yet."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True

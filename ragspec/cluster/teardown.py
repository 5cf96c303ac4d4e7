"""Ends all that a deployment consists of, in whatever state it is: what `down` does, and what happens after a crash.

>>> sweep("ragspec")        # nothing there: nothing happens
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import ray
from ray.util import list_named_actors
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ragspec.cluster.answers import answers, whatever_happens
from ragspec.cluster.keeper import keeper_class
from ragspec.cluster.keepers import rooms
from ragspec.cluster.ledger import NAMESPACE, SUPERVISOR, Ledger
from ragspec.cluster.processes import Process
from ragspec.cluster.shell import Place
from ragspec.errors import EngineError

_ASK_TIMEOUT_S = 2.0
_START_TIMEOUT_S = 30.0
_GONE_TIMEOUT_S = 20.0


def sweep(deployment: str, sparing: Place | None = None) -> None:
    """Returns when no actor, placement group or process of it is left on nodes that Ray believes in; safe to repeat.

    `sparing`: a new supervisor of that name calls, and stays. Raises: EngineError if something of it remains.
    """
    ledger = Ledger(deployment)
    own, sparing_places = f"{deployment}/{SUPERVISOR}", {sparing}
    if sparing is None:
        _kill_actors([own])  # Why first: it would start again what ends
    deadline = time.monotonic() + _GONE_TIMEOUT_S
    while names := [name for name in actors_of(deployment) if sparing is None or name != own]:
        if time.monotonic() > deadline:
            raise EngineError(f"{len(names)} actors of {deployment} cannot be ended, the first is {names[0]}")
        places = {place for entry in ledger.entries().values() for place in entry.places} | _asked(names)
        _kill_processes(places - sparing_places)
        _kill_actors(names)
        time.sleep(0.1)
    places = {place for entry in ledger.entries().values() for place in entry.places}
    _kill_processes(
        places - sparing_places
    )  # Why again: of an actor that Ray has buried, a stopped process may be left
    remove_placement_groups(f"{deployment}/")
    for name in ledger.entries():
        ledger.remove(name)


def actors_of(deployment: str) -> list[str]:
    """The names of its actors, as far as Ray knows them."""
    found: list[dict[str, str]] = list_named_actors(all_namespaces=True)
    there = [each["name"] for each in found if each["namespace"] == NAMESPACE]
    return [name for name in there if name.startswith(f"{deployment}/")]


class Undertaker:
    """An actor that takes a deployment down from outside it, and ends."""

    def bury(self, deployment: str) -> None:
        sweep(deployment)
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]


def bury(deployment: str) -> None:
    """`sweep` in an actor of its own, without waiting: also for who is part of the deployment."""
    actor: Any = ray.remote(Undertaker)
    name = f"undertaker-{deployment}-{time.time_ns():x}"
    options = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0}
    actor.options(**options).remote().bury.remote(deployment)


def _asked(names: Iterable[str]) -> set[Place]:
    """Where the actors are that answer; the ledger may not know of those that were started last."""
    pings: list[Any] = []
    for name in names:
        with whatever_happens():
            pings.append(ray.get_actor(name, namespace=NAMESPACE).ping.remote())
    if not pings:
        return set()
    places: set[Place] = set()
    for ping in ray.wait(pings, num_returns=len(pings), timeout=_ASK_TIMEOUT_S)[0]:
        with whatever_happens():
            places.update(answers([ping], 0.0, "an actor"))
    return places


def _kill_processes(places: Iterable[Place]) -> None:
    """SIGKILL through a keeper of each node that Ray believes in; a dead node's processes ended with it."""
    by_node: dict[str, list[Process]] = {}
    for place in places:
        by_node.setdefault(place.node, []).append(place.process)
    alive = {room.name for room in rooms()}
    keepers = {node: _own_keeper(node) for node in by_node.keys() & alive}
    calls = {node: keeper.kill.remote(by_node[node]) for node, keeper in keepers.items()}
    try:
        for node, call in calls.items():
            (left,) = answers([call], _START_TIMEOUT_S, f"node {node[:8]}")
            if left:
                raise EngineError(f"process {left[0].pid} on node {node[:8]} does not end")
    finally:
        for keeper in keepers.values():
            ray.kill(keeper)


def _own_keeper(node: str) -> Any:
    """Why another than the deployment's: that one may hang, and is to be ended too."""
    return keeper_class().options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()


def _kill_actors(names: Iterable[str]) -> None:
    for name in names:
        with whatever_happens():
            ray.kill(ray.get_actor(name, namespace=NAMESPACE))


def remove_placement_groups(prefix: str) -> None:
    """Those whose names begin so."""
    table: dict[str, dict[str, Any]] = placement_group_table()
    for identity, group in table.items():
        if group["name"].startswith(f"{NAMESPACE}/{prefix}") and group["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(identity))))

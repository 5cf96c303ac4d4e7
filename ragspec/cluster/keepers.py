"""The nodes of a cluster as a supervisor sees them: each with a keeper that answers.

A node whose keeper does not answer gets nothing to do until it does. Ray itself notices a dead node after about 15 seconds.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ragspec.cluster.answers import answers, one_line, whatever_happens
from ragspec.cluster.keeper import Look, keeper_class, slowness
from ragspec.cluster.ledger import NAMESPACE, Entry, Ledger
from ragspec.cluster.processes import Process
from ragspec.cluster.shell import Place
from ragspec.cluster.topology import NodeRoom
from ragspec.errors import EngineError

log = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0
_KILL_TIMEOUT_S = 8.0
_GLANCE_S = 1.0


class Timing(NamedTuple):
    heartbeat_s: float
    hang_s: float
    start_timeout_s: float


def rooms() -> list[NodeRoom]:
    """All nodes that Ray believes in, by their ids."""
    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    return [
        NodeRoom(node["NodeID"], float(node["Resources"].get("CPU", 0.0)), float(node["Resources"].get("GPU", 0.0)))
        for node in nodes
    ]


def address_of(node: str) -> str:
    """How an error names a node: its address, and as much of its id as tells it from others there."""
    found = [known["NodeManagerAddress"] for known in ray.nodes() if known["NodeID"] == node]  # type: ignore[no-untyped-call]
    return f"{found[0] if found else 'unknown'} ({node[:8]})"


def detached(name: str, node: str) -> dict[str, Any]:
    """Options of an actor that outlives whoever starts it, on that node and no other."""
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "scheduling_strategy": strategy}


class Keepers:
    """Safe to use from several threads."""

    def __init__(self, deployment: str, timing: Timing) -> None:
        self._deployment, self._timing = deployment, timing
        self._nodes: dict[str, _Node] = {}
        self._lock = threading.Lock()

    def refresh(self) -> None:
        """Begin to watch nodes that came, and forget those that Ray has given up."""
        there = {room.name: room for room in rooms()}
        with self._lock:
            for name in self._nodes.keys() - there.keys():
                self._nodes.pop(name).stop()
            for name in there.keys() - self._nodes.keys():
                self._nodes[name] = _Node(self._deployment, there[name], self._timing)

    def wait(self) -> None:
        """Until every node's keeper has answered or failed to. Raises: EngineError, naming the node."""
        for node in list(self._nodes.values()):
            if not node.asked.wait(_START_TIMEOUT_S) or not node.answering:
                reason = node.error or f"it did not start within {_START_TIMEOUT_S:g} s"
                raise EngineError(f"nothing can be started on node {address_of(node.name)}: {reason}")

    def ask(self, method: str, *arguments: Any) -> dict[str, Any]:
        """The answers of the keepers that answer, by node."""
        nodes = [node for node in self._nodes.values() if node.answering]
        calls = [getattr(node.keeper, method).remote(*arguments) for node in nodes]
        return dict(zip((node.name for node in nodes), answers(calls, _START_TIMEOUT_S, "a keeper"), strict=True))

    @property
    def answering(self) -> list[str]:
        """The ids of the nodes whose keepers answer."""
        return [node.name for node in list(self._nodes.values()) if node.answering]

    def keeper(self, node: str) -> Any | None:
        """None while it does not answer."""
        found = self._nodes.get(node)
        return found.keeper if found and found.answering else None

    def free_address(self, node: str) -> tuple[str, int]:
        keeper = self.keeper(node)
        if keeper is None:
            raise EngineError(f"node {address_of(node)} does not answer")
        (found,) = answers([keeper.free_address.remote()], self._timing.hang_s, "a keeper")
        return found  # type: ignore[no-any-return]

    def look(self, places: Sequence[Place]) -> Look | None:
        """At processes of one node; None when its keeper does not answer."""
        keeper = self.keeper(places[0].node) if places else None
        if keeper is None:
            return None
        try:
            (found,) = answers([keeper.look.remote([place.process for place in places])], _GLANCE_S, "a keeper")
        except EngineError:
            return None
        return found  # type: ignore[no-any-return]

    def slowness(self, node: str) -> float:
        found = self._nodes.get(node)
        return found.slowness if found else 1.0

    def kill(self, places: Iterable[Place]) -> None:
        """SIGKILL, and wait for the end; on a node that does not answer, as soon as it does."""
        by_node: dict[str, list[Process]] = {}
        for place in places:
            by_node.setdefault(place.node, []).append(place.process)
        calls = []
        for name, processes in by_node.items():
            if node := self._nodes.get(name):
                calls += node.kill(processes)
        with whatever_happens():
            answers(calls, _KILL_TIMEOUT_S, "a keeper") if calls else None

    def choose(self, cpus: float, gpus: float, used: Mapping[str, float]) -> str:
        """The node with room in all whose number in `used` is least. Raises: EngineError."""
        fitting = [
            (used.get(node.name, 0.0), node.name)
            for node in list(self._nodes.values())
            if node.answering and node.room.cpus >= cpus and node.room.gpus >= gpus
        ]
        if not fitting:
            raise EngineError(f"no node that answers has {cpus:g} CPUs and {gpus:g} GPUs")
        return min(fitting)[1]


class _Node:
    """One node, in the care of a thread that asks its keeper, and starts another when it dies or hangs."""

    def __init__(self, deployment: str, room: NodeRoom, timing: Timing) -> None:
        self.room, self.name = room, room.name
        self.keeper: Any = None
        self.answering, self.error = False, ""
        self.asked = threading.Event()
        self._deployment, self._timing = deployment, timing
        self._ledger = Ledger(deployment)
        self._late: list[Process] = []
        self._crowd = 0.0
        self._stopped = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        self.answering = False
        self._stopped.set()

    def kill(self, processes: Sequence[Process]) -> list[Any]:
        """The call that does it, if the keeper answers."""
        self._late.extend(processes)  # Why all: an answer that never comes must not end the memory of them
        keeper = self.keeper
        return [keeper.kill.remote(list(processes))] if self.answering and keeper is not None else []

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._round()
                self.answering, self.error = True, ""
            except Exception as error:  # Why all: whatever it is, the node is asked again
                self.answering, self.error = False, one_line(error)
                log.warning("node %s: %s", self.name[:8], self.error)
            self.asked.set()
            self._stopped.wait(self._timing.heartbeat_s)

    def _round(self) -> None:
        if self.keeper is None:
            self.keeper = self._adopted() or self._started()
        try:
            (look,) = answers([self.keeper.look.remote([])], self._timing.hang_s * self.slowness, "the keeper")
        except EngineError:
            self.answering, self.keeper = False, None
            raise
        self._crowd = look.crowd
        if late := list(self._late):
            (left,) = answers([self.keeper.kill.remote(late)], _KILL_TIMEOUT_S, "the keeper")
            self._late = [process for process in self._late if process not in late or process in left]

    @property
    def slowness(self) -> float:
        """How much later an answer may come. Why: where many processes share a processor, a healthy one answers late, and to end
        and load it again makes the others later still."""
        return slowness(self._crowd)

    @property
    def _entry(self) -> str:
        return f"keeper-{self.name[:12]}"

    def _adopted(self) -> Any:
        """The keeper that an earlier supervisor started, if it answers."""
        entry = self._ledger.read(self._entry)
        with whatever_happens():
            if entry is not None:
                keeper = ray.get_actor(entry.actors[0], namespace=NAMESPACE)
                answers([keeper.ping.remote()], self._timing.hang_s, "the keeper")
                return keeper
        return None

    def _started(self) -> Any:
        """A new one; it ends the last one, which may hang."""
        old = self._ledger.read(self._entry)
        epoch = old.epoch + 1 if old else 1
        name = f"{self._deployment}/{self._entry}@{epoch}"
        keeper = keeper_class().options(**detached(name, self.name)).remote()
        try:
            (place,) = answers([keeper.ping.remote()], _START_TIMEOUT_S, "the keeper")
        except EngineError:
            ray.kill(keeper)
            raise
        if old is not None:
            keeper.kill.remote([place.process for place in old.places])
            with whatever_happens():
                ray.kill(ray.get_actor(old.actors[0], namespace=NAMESPACE))
        self._ledger.write(self._entry, Entry(epoch, (name,), (place,), live=True))
        return keeper

"""The injector of the suite `faults`: strikes one part of a deployment after the other, and waits until everything has recovered.

    >>> injector.strike(Fault("engine", "kill"))["answered_s"]

Signals reach only processes of the deployment and processes that the suite has started. Answers are compared elsewhere.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM
from typing import TYPE_CHECKING, NamedTuple

from pipelines.benchmarks.fault_injection.clients import FaultClients
from pipelines.benchmarks.fault_injection.targets import GatewayProcess, SmallDisk
from pipelines.benchmarks.harness import Row
from ragspec.cluster.local_cluster import LocalCluster, LocalNode
from ragspec.cluster.processes import Process
from ragspec.errors import EngineError, RagspecError

if TYPE_CHECKING:
    from ragspec.cluster.registry import ReplicaStatus, Status

NODE_CPUS = 2
REPLICAS = ("engine", "rank", "shard", "encoder")
"""Parts that Ray restarts. A rank is a process of an engine other than its first."""
_HOLD_S = (0.5, 2.0)
"""How long a fault lasts that passes by itself: a stopped service, a full disk."""
_DRAIN_S = 240.0
_RECOVERY_S = 180.0
_LOOK_S = 0.1


class Fault(NamedTuple):
    """`part`: what is struck. `how`: kill and stop are SIGKILL and SIGSTOP; restart is SIGTERM and a new start."""

    part: str
    how: str

    @property
    def may_cut(self) -> bool:
        """Whether open streams may end: only where the service itself is killed."""
        return self == Fault("service", "kill")

    @property
    def may_refuse(self) -> bool:
        """Whether requests may fail, to be sent again: where the service or its disk fails."""
        return self.part in ("service", "disk")


@dataclass(slots=True)
class Injected:
    """The victims of a fault: replicas with their epochs at the time of the fault, and a node that was hit as a whole."""

    victim: str
    replicas: dict[str, float] = field(default_factory=dict)
    node: LocalNode | None = None


@dataclass
class Injector:
    """Strikes one part after the other. `workers`: the nodes that may die; a killed node is replaced, as an operator would."""

    nodes: LocalCluster
    workers: list[LocalNode]
    status: Callable[[], Status]
    service: GatewayProcess
    disk: SmallDisk
    clients: FaultClients
    draw: random.Random
    num_service_ends: int = 0
    """How often the service ended although no fault had killed it."""

    def strike(self, fault: Fault) -> Row:
        """Inject a fault, wait for recovery and repair. Raises: EngineError if there is no part to strike."""
        before, begin_s = Counter(self.clients.counts), time.monotonic()
        injected = self._inject(fault)
        cleared_s = begin_s if fault.how == "kill" else time.monotonic()
        answered_s = self._until(lambda: self._answered_since(cleared_s), cleared_s)
        live_s = self._until(lambda: self._all_live(injected), begin_s)
        self._replace(injected.node)
        counts = Counter(self.clients.counts) - before
        lost = counts["cut"] * (not fault.may_cut) + counts["refused"] * (not fault.may_refuse)
        return {
            "fault": f"{fault.part} {fault.how}",
            "victim": injected.victim,
            "answered_s": answered_s,
            "live_again_s": live_s if injected.replicas else None,
            "recovered": max(answered_s, live_s) < _RECOVERY_S,
            "streams_cut": counts["cut"],
            "requests_refused": counts["refused"],
            "lost": lost,
            "changed": counts["changed"],
        }

    def _inject(self, fault: Fault) -> Injected:
        """Strike, and return when a fault that passes by itself is over."""
        hold_s = self.draw.uniform(*_HOLD_S)
        time.sleep(hold_s)  # Why: the moment is random, so that it hits any part of an answer
        if fault.part in REPLICAS:
            return self._strike_replica(fault)
        match fault:
            case Fault("node", _):
                return self._strike_node(fault)
            case Fault("service", "kill"):
                self.service.kill()
                self.service.start()
            case Fault("service", "stop"):
                self.service.send(SIGSTOP)
                time.sleep(hold_s)
                self.service.send(SIGCONT)
            case Fault("service", "restart"):
                self.service.send(SIGTERM)
                if not self.service.has_ended(_DRAIN_S):
                    raise EngineError(f"the service did not end within {_DRAIN_S:g} s of SIGTERM")
                self.service.start()
            case Fault("disk", "full"):
                self.disk.fill()
                time.sleep(hold_s)
                self.disk.empty()
        return Injected(fault.part)

    def _strike_replica(self, fault: Fault) -> Injected:
        kind, process = ("engine", 1) if fault.part == "rank" else (fault.part, 0)
        fitting = [replica for replica in self._live() if replica.kind == kind and len(replica.pids) > process]
        if not fitting:
            raise EngineError(f"there is no {fault.part} to strike")
        victim = self.draw.choice(fitting)
        if not Process.of(victim.pids[process]).kill(SIGKILL if fault.how == "kill" else SIGSTOP):
            raise EngineError(f"{victim.name} ended before it was struck")
        return Injected(victim.name, {victim.name: victim.epoch})

    def _strike_node(self, fault: Fault) -> Injected:
        """Kill or stop every process of a worker node that holds replicas."""
        epochs = {}
        for node in self.workers:
            pids = {process.pid for process in self.nodes.processes(node)}
            epochs[node] = {replica.name: replica.epoch for replica in self._live() if pids & set(replica.pids)}
        holding = [node for node, replicas in epochs.items() if replicas]
        if not holding:
            raise EngineError("no worker node holds a live replica")
        node = self.draw.choice(holding)
        if fault.how == "kill":
            self.nodes.kill(node)
        for process in self.nodes.processes(node):
            process.kill(SIGSTOP)
        return Injected(node.name, epochs[node], node)

    def _replace(self, node: LocalNode | None) -> None:
        if node is None:
            return
        self.nodes.kill(node)  # a stopped node still exists
        self.workers.remove(node)
        self.workers.append(self.nodes.add(num_cpus=NODE_CPUS))

    def wait_for_clients(self) -> None:
        """Returns after every operation of clients has succeeded once."""
        self._until(lambda: self._answered_since(0.0), time.monotonic())

    def _until(self, is_so: Callable[[], bool], since_s: float) -> float:
        """Seconds from `since_s` until it is so, at most `_RECOVERY_S`. A service that ends meanwhile is started again."""
        while not is_so() and time.monotonic() < since_s + _RECOVERY_S:
            if not self.service.is_up:
                self.num_service_ends += 1
                self.service.start()
            time.sleep(_LOOK_S)
        return min(time.monotonic() - since_s, _RECOVERY_S)

    def _answered_since(self, moment_s: float) -> bool:
        """Whether every operation of clients has succeeded that began after the moment."""
        return min(self.clients.succeeded_s.values()) > moment_s

    def _all_live(self, injected: Injected) -> bool:
        """Whether every replica is live, and the victims in new processes."""
        try:
            return all_live(self.status(), injected.replicas)
        except RagspecError:
            return False

    def _live(self) -> list[ReplicaStatus]:
        return [replica for replica in self.status().replicas if replica.state == "live"]


def all_live(status: Status, struck: Mapping[str, float]) -> bool:
    """`struck`: names of replicas and the epochs of the processes that were struck."""
    epochs = {replica.name: replica.epoch for replica in status.replicas}
    return status.is_complete and all(epochs.get(name, 0.0) > epoch for name, epoch in struck.items())

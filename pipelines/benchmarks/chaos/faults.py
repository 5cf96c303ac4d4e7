"""The faults of the suite `chaos`: which process is hit, by which signal, and when everything works again.

Sends signals only to processes of the deployment's replicas and to nodes that the suite has started.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from signal import SIGKILL, SIGSTOP, Signals
from typing import NamedTuple

from pipelines.benchmarks.chaos.check import StreamLog, slowest_gap_s
from pipelines.benchmarks.chaos.load import Probe
from pipelines.benchmarks.harness import Result
from ragspec.cluster.local_cluster import LocalCluster, LocalNode
from ragspec.cluster.processes import Process
from ragspec.cluster.registry import ReplicaStatus, Status
from ragspec.errors import EngineError, RagspecError

KINDS = ("engine", "rank", "shard", "encoder", "node")
SIGNALS = (SIGKILL, SIGSTOP)
_MOST_S = 120.0
_LEAST_WORKERS = 2
"""So many nodes hold all replicas; with fewer, one more is started before the next fault."""

_MOST_FAILED_STARTS = 10
_LOOK_S = 0.2
_STATUS_S = 60.0


class Fault(NamedTuple):
    """`kind` of `KINDS`. A rank is never its group's first rank; a node is never the head."""

    kind: str
    signal: Signals


def faults(count: int, seed: int, kinds: Sequence[str] = KINDS) -> list[Fault]:
    """Kinds and signals in turn, so that two rounds of the kinds are all pairs; in a seeded order."""
    chosen = [Fault(kinds[i % len(kinds)], SIGNALS[sum(divmod(i, len(kinds))) % len(SIGNALS)]) for i in range(count)]
    random.Random(seed).shuffle(chosen)
    return chosen


@dataclass(slots=True)
class InjectedFault:
    """The replicas that a fault has hit, each with its epoch then. `node`: the node that was hit as a whole."""

    fault: Fault
    victim: str
    moment_s: float
    replicas: dict[str, float]
    node: LocalNode | None = None


@dataclass
class FaultInjector:
    """The deployment and its nodes. `workers`: nodes that may die, usually `num_workers`; each has `node_cpus`."""

    nodes: LocalCluster
    status: Callable[[], Status]
    rng: random.Random
    workers: list[LocalNode]
    node_cpus: int
    num_workers: int = 3
    failed_starts: list[str] = field(default_factory=list)
    begin_s: float = field(default_factory=time.monotonic)

    def inject(self, fault: Fault) -> InjectedFault:
        """Choose a victim and send the signal. Raises: EngineError if there is none of that kind."""
        live = self._live()
        if fault.kind == "node":
            return self._strike_node(fault, live)
        kind, rank = ("engine", 1) if fault.kind == "rank" else (fault.kind, 0)
        fitting = [replica for replica in live if replica.kind == kind and len(replica.pids) > rank]
        if not fitting:
            raise EngineError(f"there is no {fault.kind} to be hit")
        victim = self.rng.choice(fitting)
        process, moment = Process.of(victim.pids[rank]), time.monotonic()
        if not process.kill(fault.signal):
            raise EngineError(f"{victim.name} had ended before it could be hit")
        return InjectedFault(fault, victim.name, moment, {victim.name: victim.epoch})

    def clear(self, struck: InjectedFault) -> None:
        """Replace a killed node, as an operator would. Raises: EngineError if too few nodes start."""
        if struck.node is None:
            return
        self.nodes.kill(struck.node)
        self.workers.remove(struck.node)
        while len(self.workers) < self.num_workers:
            try:
                self.workers.append(self.nodes.add(num_cpus=self.node_cpus))
            except EngineError as error:  # Why: beside such a load Ray's own processes may not find each other in time
                self.failed_starts.append(str(error))
                if len(self.workers) >= _LEAST_WORKERS:
                    return
                if len(self.failed_starts) > _MOST_FAILED_STARTS:
                    raise

    def live_again(self, struck: InjectedFault) -> bool:
        """Whether all replicas are live, and those that were hit in another process."""
        try:
            return all_live(self.status(), struck.replicas)
        except RagspecError:
            return False

    def _live(self) -> list[ReplicaStatus]:
        """The live replicas; waits for a status, which fails while Ray restarts the deployment's record. Raises: EngineError."""
        deadline = time.monotonic() + _STATUS_S
        while True:
            try:
                return [replica for replica in self.status().replicas if replica.state == "live"]
            except EngineError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_LOOK_S)

    def _strike_node(self, fault: Fault, live: Sequence[ReplicaStatus]) -> InjectedFault:
        """Hit every process of a node that replicas run on."""
        hit = {node: self._epochs_on(node, live) for node in self.workers}
        node = self.rng.choice([node for node, replicas in hit.items() if replicas])
        moment = time.monotonic()
        if fault.signal == SIGKILL:
            self.nodes.kill(node)
        else:
            for process in self.nodes.processes(node):
                process.kill(fault.signal)
        return InjectedFault(fault, f"{node.name} ({', '.join(hit[node])})", moment, hit[node], node)

    def _epochs_on(self, node: LocalNode, live: Sequence[ReplicaStatus]) -> dict[str, float]:
        pids = {process.pid for process in self.nodes.processes(node)}
        return {replica.name: replica.epoch for replica in live if pids & set(replica.pids)}


def all_live(status: Status, hit: Mapping[str, float]) -> bool:
    """`hit`: replicas and the epochs in which they were hit."""
    epochs = {replica.name: replica.epoch for replica in status.replicas}
    return status.is_complete and all(epochs.get(name, 0.0) > epoch for name, epoch in hit.items())


def recovered(
    struck: InjectedFault,
    observed: Callable[[], tuple[Sequence[StreamLog], Sequence[Probe]]],
    live_again: Callable[[InjectedFault], bool],
    most_s: float = _MOST_S,
) -> Result:
    """Wait until the deployment has recovered; returns the time of each part, in seconds from the signal.

    `observed` returns all streams and lookups so far. `streams_s`: every open stream had a further delta. `retrieval_s`: a
    lookup started after the signal was answered. `recovery_s`: the later of the two. `live_again_s`: all replicas were live.
    A part later than `most_s` counts as `most_s`, and the fault as not recovered.
    """
    moment, live_s = struck.moment_s, None
    while True:
        now_s = time.monotonic() - moment
        streams, probes = observed()
        streams_s, retrieval_s = slowest_gap_s(streams, moment), answered_s(probes, moment)
        if live_s is None and live_again(struck):
            live_s = now_s
        done = live_s is not None and retrieval_s is not None and (streams_s is None or streams_s < float("inf"))
        if done or now_s > most_s:
            break
        time.sleep(_LOOK_S)
    parts = [most_s if part is None else min(part, most_s) for part in (streams_s or 0.0, retrieval_s)]
    return {
        "kind": struck.fault.kind,
        "signal": struck.fault.signal.name,
        "victim": struck.victim,
        "streams_s": parts[0],
        "retrieval_s": parts[1],
        "recovery_s": max(parts),
        "live_again_s": most_s if live_s is None else live_s,
        "recovered": done,
        "num_streams_open": sum(stream.is_open(moment) for stream in streams),
        "replicas": sorted(struck.replicas),
    }


def answered_s(probes: Sequence[Probe], moment_s: float) -> float | None:
    """Seconds from the moment to the end of the first right lookup that started after the moment; None without
    one."""
    ends = [probe.end_s for probe in probes if probe.begin_s >= moment_s and probe.right]
    return min(ends) - moment_s if ends else None

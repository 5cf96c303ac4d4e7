"""The suite `faults`: users, conversations and a batch job go on while processes, the network and the disk fail.

    python -m pipelines.benchmark --suite faults --quick
    python -m pipelines.benchmark --suite faults --minutes 600          a soak: rounds of all faults until the time is over

A deployment of engines, shards and encoders runs on several Ray nodes of this machine, with `ragspec serve --cluster` in front.
Every answer is compared with the answer to the same request before the first fault. One injector strikes one part after the
other; the next fault comes after everything has recovered. Signals reach only processes that this suite has started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from transformers import AutoConfig

from pipelines.batch.ray_session import ray_session
from pipelines.benchmarks.fault_clients import FaultClients
from pipelines.benchmarks.fault_targets import (
    BatchJob,
    GatewayProcess,
    Judged,
    Network,
    SmallDisk,
    comparable_rows,
    judge_rows,
    small_disk,
)
from pipelines.benchmarks.harness import Metric, Result, Row, Run, Suite, at_most, equal_to
from ragspec.cluster.local_cluster import LocalCluster, LocalNode
from ragspec.cluster.processes import Process
from ragspec.config import EngineConfig, PipelineConfig, RetrieverConfig, TargetConfig
from ragspec.core import Document
from ragspec.engine.checkpoints.target_files import target_folder
from ragspec.errors import EngineError, RagspecError
from ragspec.retrieval.encoder import Encoder
from ragspec.retrieval.index.writer import IndexWriter
from services.keys import add_key

if TYPE_CHECKING:
    from ragspec.cluster.deployment import Deployment
    from ragspec.cluster.registry import ReplicaStatus, Status
    from ragspec.cluster.topology import Topology

_DEPLOYMENT = "faults"
_ENGINE = EngineConfig(num_threads=1, max_running=8, max_kv_tokens=16_384)
"""One thread an engine, because all processes share the machine's cores."""
_NODE_CPUS = 2
_NUM_SEGMENTS = 4
_HOLD_S = (0.5, 2.0)
"""How long a fault lasts that passes by itself: a stopped service, a parted or slow network, a full disk."""
_DRAIN_S = 240.0
_RECOVERY_S = 180.0
_START_S = 900.0
_LOOK_S = 0.1
_RAY_VARIABLES = ("RAY_ADDRESS", "RAY_AUTH_TOKEN")
"""Settings of another cluster, which would win over this suite's."""


class Fault(NamedTuple):
    """`part`: what is struck. `how`: kill and stop are SIGKILL and SIGSTOP; restart is SIGTERM and a new start."""

    part: str
    how: str

    @property
    def may_cut(self) -> bool:
        """Whether open streams may end: only where their own connection is lost."""
        return self in (Fault("service", "kill"), Fault("network", "cut"))

    @property
    def may_refuse(self) -> bool:
        """Whether requests may fail, to be sent again: where the service, its network or its disk fails."""
        return self.part in ("service", "network", "disk")


_REPLICAS = ("engine", "rank", "shard", "encoder")
FAULTS = (
    *(Fault(part, how) for part in (*_REPLICAS, "node") for how in ("kill", "stop")),
    *(Fault("service", how) for how in ("kill", "stop", "restart")),
    *(Fault("network", how) for how in ("cut", "part", "delay")),
    Fault("disk", "full"),
    Fault("job", "kill"),
)
QUICK = tuple(
    Fault(*words.split())
    for words in ("engine kill", "shard stop", "service kill", "network cut", "disk full", "job kill")
)


class Sizes(NamedTuple):
    """`num_workers`: Ray nodes that may die."""

    num_workers: int
    num_questions: int
    num_rows: int
    num_documents: int
    max_tokens: int


@dataclass(slots=True)
class Injected:
    """The victims of a fault: replicas with their epochs at the time of the fault, and a node that was hit as a whole."""

    victim: str
    replicas: dict[str, float] = field(default_factory=dict)
    node: LocalNode | None = None


@dataclass
class Injector:
    """Strikes one part after the other. `workers`: the nodes that may die; a killed node is replaced, as an operator would.

    `call`: runs a function on the event loop of `network` and the clients.
    """

    nodes: LocalCluster
    workers: list[LocalNode]
    status: Callable[[], Status]
    service: GatewayProcess
    network: Network
    disk: SmallDisk
    job: BatchJob
    clients: FaultClients
    call: Callable[[Callable[[], Any]], Any]
    draw: random.Random
    num_service_ends: int = 0
    """How often the service ended although no fault had killed it."""

    def strike(self, fault: Fault) -> Row:
        """Inject a fault, wait for recovery and repair. Raises: EngineError if there is no part to strike."""
        before, begin_s = Counter(self.clients.counts), time.monotonic()
        injected = self._inject(fault)
        cleared_s = begin_s if fault.how in ("kill", "cut") else time.monotonic()
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
        if fault.part in _REPLICAS:
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
            case Fault("network", "cut"):
                self.call(self.network.cut)
            case Fault("network", "part"):
                self.call(lambda: self.network.part(True))
                time.sleep(hold_s)
                self.call(lambda: self.network.part(False))
            case Fault("network", "delay"):
                self.network.delay_s = hold_s / 4
                time.sleep(hold_s)
                self.network.delay_s = 0.0
            case Fault("disk", "full"):
                self.disk.fill()
                time.sleep(hold_s)
                self.disk.empty()
            case Fault("job", "kill"):
                self.job.kill()
        return Injected(fault.part)

    def _strike_replica(self, fault: Fault) -> Injected:
        """A rank is a process of an engine other than its first."""
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
        node = self.draw.choice([node for node, replicas in epochs.items() if replicas])
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
        self.workers.append(self.nodes.add(num_cpus=_NODE_CPUS))

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


def run_faults(run: Run) -> Iterator[Row]:
    """One row a fault, then one row about all answers. Raises: EngineError, ModelError, SaveError."""
    sizes = Sizes(2, 8, 12, 60, 24) if run.quick else Sizes(3, 40, 120, 600, 48)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragspec-faults-")))
        nodes = stack.enter_context(LocalCluster(folder / "nodes", os.environ))
        nodes.add(num_cpus=0)
        workers = [nodes.add(num_cpus=_NODE_CPUS) for _ in range(sizes.num_workers)]
        environment = stack.enter_context(_connected(nodes))
        deployment = stack.enter_context(_deployment(run, sizes, folder / "index"))
        disk = stack.enter_context(small_disk(folder / "disk"))
        cluster = ("--cluster", _DEPLOYMENT, "--address", nodes.address)
        service = stack.enter_context(GatewayProcess(folder, disk.folder, cluster, environment))
        key, _ = add_key(service.keys_file, "ann", trusted=True)
        service.start()
        loop = stack.enter_context(_event_loop())

        def call(function: Callable[[], Any]) -> Any:
            return asyncio.run_coroutine_threadsafe(_called(function), loop).result()

        network = Network(service.port)
        asyncio.run_coroutine_threadsafe(network.__aenter__(), loop).result()
        stack.callback(call, network.cut)
        questions = [question.text for question in run.questions(sizes.num_questions).questions]
        clients = FaultClients(network.url, key, questions, sizes.max_tokens)
        asyncio.run_coroutine_threadsafe(clients.learn(), loop).result()
        rows = _job_rows(questions, sizes)
        job = BatchJob(rows, folder / "job", (*cluster, "--seed", str(run.seed), "--strict"), environment)
        expected = job.undisturbed()
        draw = random.Random(run.seed)
        injector = Injector(nodes, workers, deployment.status, service, network, disk, job, clients, call, draw)
        load = asyncio.run_coroutine_threadsafe(clients.run(), loop)
        with job:
            injector._until(lambda: injector._answered_since(0.0), time.monotonic())
            for number, fault in enumerate(_chosen(run, deployment.topology, disk), 1):
                yield run.row(f"{number} {fault.part} {fault.how}", partial(injector.strike, fault))
                run.tick("faults", number, number + 1)
            job.finish()
        load.cancel()
        with contextlib.suppress(CancelledError):
            load.result()
        asyncio.run_coroutine_threadsafe(clients.check(), loop).result()
        judged = [judge_rows(expected, list(comparable_rows(out))) for out in job.passes]
        yield {"row": "answers"} | _answers(clients, judged, len(expected), job.num_failures, injector.num_service_ends)


async def _called(function: Callable[[], Any]) -> Any:
    return function()


def _job_rows(questions: Sequence[str], sizes: Sizes) -> list[dict[str, Any]]:
    """Half greedy, half sampled. The rows ask for log-probabilities, which name the tokens behind a text."""
    shared = {"max_tokens": sizes.max_tokens, "logprobs": 0}
    texts = [questions[number % len(questions)] for number in range(sizes.num_rows)]
    return [{"id": f"r{n}", "question": text, "temperature": float(n % 2), **shared} for n, text in enumerate(texts)]


def _chosen(run: Run, topology: Topology, disk: SmallDisk) -> Iterator[Fault]:
    """Every possible fault once in a seeded order; again, in other orders, until the minutes are over."""
    left_out = set()
    if topology.tensor_parallel == 1:
        left_out.add("rank")
    if not disk.is_mounted:
        left_out.add("disk")
    faults = [fault for fault in (QUICK if run.quick else FAULTS) if fault.part not in left_out]
    draw, end_s = random.Random(run.seed), time.monotonic() + 60 * run.minutes
    while True:
        draw.shuffle(faults)
        yield from faults
        if time.monotonic() >= end_s:
            return


def _answers(clients: FaultClients, judged: Sequence[Judged], num_rows: int, num_failures: int, num_ends: int) -> Row:
    return {
        "streams": clients.counts["streams"],
        "turns": clients.counts["turns"],
        "lost": clients.counts["lost"],
        "doubled": clients.counts["doubled"],
        "changed": clients.counts["changed"],
        "job_rows": num_rows * len(judged),
        "driver_lost": sum(len(each.lost) for each in judged),
        "driver_doubled": sum(len(each.doubled) for each in judged),
        "driver_changed": sum(len(each.changed) for each in judged),
        "driver_failures": num_failures,
        "service_ends": num_ends,
    }


@contextlib.contextmanager
def _connected(nodes: LocalCluster) -> Iterator[Mapping[str, str]]:
    """Connect this process to the nodes. Yields the environment for other processes that connect.

    Why Ray is imported later: Ray reads its environment at its import.
    """
    before = dict(os.environ)
    for variable in _RAY_VARIABLES:
        os.environ.pop(variable, None)
    os.environ.update(nodes.environment)
    try:
        with ray_session(nodes.address):
            yield dict(os.environ)
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _deployment(run: Run, sizes: Sizes, index_dir: Path) -> Iterator[Deployment]:
    """Two of everything, over an index of several segments. Raises: EngineError, ModelError, SaveError."""
    from ragspec.cluster.deployment import Deployment
    from ragspec.cluster.topology import Topology

    _build_index(run.questions(sizes.num_questions).documents[: sizes.num_documents], index_dir, run)
    retriever = RetrieverConfig(index_dir=str(index_dir))
    config = PipelineConfig(target=run.target, encoder=run.encoder, engine=_ENGINE, retriever=retriever)
    ranks = num_ranks(run.target)
    topology = Topology(
        replicas=2, tensor_parallel=ranks, num_shards=2, shard_replicas=2, num_encoders=2, cpus_per_rank=1 / ranks
    )
    with Deployment.up(topology, config, name=_DEPLOYMENT, timeout_s=_START_S) as deployment:
        yield deployment


def num_ranks(target: TargetConfig) -> Literal[1, 2]:
    """Two ranks an engine, or one where two cannot share the target's heads. Raises: ModelError."""
    config = AutoConfig.from_pretrained(target_folder(target)).get_text_config()
    return 1 if config.num_attention_heads % 2 or config.num_key_value_heads % 2 else 2


def _build_index(documents: Sequence[Document], folder: Path, run: Run) -> None:
    """Several segments, so that shards hold different documents."""
    with IndexWriter(folder, Encoder.load(run.encoder)) as writer:
        for number in range(_NUM_SEGMENTS):
            for document in documents[number::_NUM_SEGMENTS]:
                writer.upsert(document)
            writer.commit()


@contextlib.contextmanager
def _event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="fault-clients", daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


def summarise(rows: Sequence[Row]) -> Result:
    """Sums over all faults and answers; times of all faults."""
    faults = [row for row in rows if "fault" in row]
    (answers,) = [row for row in rows if "fault" not in row]
    found: Result = {
        "faults": len(faults),
        "recovered": sum(row["recovered"] for row in faults),
        "driver_kills": sum(row["fault"] == "job kill" for row in faults),
    }
    for name in ("answered", "live_again"):
        seconds = [row[f"{name}_s"] for row in faults if row[f"{name}_s"] is not None]
        found |= {
            f"{name}_p50_s": median(seconds) if seconds else None,
            f"{name}_max_s": max(seconds, default=None),
        }
    found |= {key: value for key, value in answers.items() if key not in ("row", "commit")}
    return found | {"lost": answers["lost"] + sum(row["lost"] for row in faults)}


METRICS = (
    Metric("faults", "faults injected under load"),
    Metric("recovered", "faults after which every operation and every replica went on"),
    Metric(
        "lost", "acknowledged turns missing; streams cut or requests refused where no fault excuses it", equal_to(0)
    ),
    Metric("doubled", "turns kept twice", equal_to(0)),
    Metric("changed", "streams and turns with another text than without faults", equal_to(0)),
    Metric("driver_kills", "kill -9 of a batch job's driver, which was then started again"),
    Metric("driver_lost", "rows that the job's output lacks", equal_to(0)),
    Metric("driver_doubled", "rows that the output holds twice", equal_to(0)),
    Metric("driver_changed", "rows with another answer than without faults", equal_to(0)),
    Metric("answered_p50_s", "seconds from a fault until requests sent after it were answered, median"),
    Metric("answered_max_s", "the same, the slowest", at_most(60)),
    Metric("live_again_p50_s", "seconds from a fault until every replica was live, median"),
    Metric("live_again_max_s", "the same, the slowest"),
    Metric("service_ends", "how often the service ended although no fault had killed it", equal_to(0)),
)
SUITE = Suite("faults", run_faults, summarise, METRICS)

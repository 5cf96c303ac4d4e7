"""The suite `faults`: users and conversations go on while processes and nodes fail and the disk is full.

    python -m pipelines.benchmark --suite faults --quick
    python -m pipelines.benchmark --suite faults --minutes 600          a soak: rounds of all faults until the time is over

A deployment of engines, shards and encoders runs on several Ray nodes of this machine, with `ragspec serve --cluster` in front.
Every answer is compared with the answer to the same request before the first fault. One injector strikes one part after the
other; the next fault comes after everything has recovered.
"""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Literal, NamedTuple

from anyio.from_thread import start_blocking_portal
from transformers import AutoConfig

from pipelines.batch.ray_session import ray_session
from pipelines.benchmarks.fault_injection.clients import FaultClients
from pipelines.benchmarks.fault_injection.injector import NODE_CPUS, REPLICAS, Fault, Injector
from pipelines.benchmarks.fault_injection.targets import GatewayProcess, SmallDisk, small_disk
from pipelines.benchmarks.harness import Result, Row, Run, Suite, metrics_of
from ragspec.cluster.local_cluster import LocalCluster
from ragspec.config import EngineConfig, PipelineConfig, RetrieverConfig, TargetConfig
from ragspec.core import Document
from ragspec.engine.checkpoints.target_files import target_folder
from ragspec.retrieval.encoder import Encoder
from ragspec.retrieval.index.writer import IndexWriter
from services.keys import add_key

if TYPE_CHECKING:
    from ragspec.cluster.deployment import Deployment
    from ragspec.cluster.topology import Topology

_DEPLOYMENT = "faults"
_ENGINE = EngineConfig(num_threads=1, max_num_seqs=8, max_kv_tokens=16_384)
"""One thread an engine, because all processes share the machine's cores."""
_NUM_SEGMENTS = 4
_START_S = 900.0
_RAY_VARIABLES = ("RAY_ADDRESS", "RAY_AUTH_TOKEN")
"""Settings of another cluster, which would win over this suite's."""


FAULTS = (
    *(Fault(part, how) for part in (*REPLICAS, "node") for how in ("kill", "stop")),
    *(Fault("service", how) for how in ("kill", "stop", "restart")),
    Fault("disk", "full"),
)
QUICK = tuple(Fault(*words.split()) for words in ("engine kill", "shard stop", "service kill", "disk full"))


class Sizes(NamedTuple):
    """`num_workers`: Ray nodes that may die."""

    num_workers: int
    num_questions: int
    num_documents: int
    max_tokens: int


def run_faults(run: Run) -> Iterator[Row]:
    """One row a fault, then one row about all answers. Raises: EngineError, ModelError, SaveError."""
    sizes = Sizes(2, 8, 60, 24) if run.quick else Sizes(3, 40, 600, 48)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragspec-faults-")))
        nodes = stack.enter_context(LocalCluster(folder / "nodes", os.environ))
        nodes.add(num_cpus=0)
        workers = [nodes.add(num_cpus=NODE_CPUS) for _ in range(sizes.num_workers)]
        environment = stack.enter_context(_connected(nodes))
        deployment = stack.enter_context(_deployment(run, sizes, folder / "index"))
        disk = stack.enter_context(small_disk(folder / "disk"))
        cluster = ("--cluster", _DEPLOYMENT, "--address", nodes.address)
        service = stack.enter_context(GatewayProcess(folder, disk.folder, cluster, environment))
        key, _ = add_key(service.keys_file, "ann", trusted=True)
        service.start()
        portal = stack.enter_context(start_blocking_portal())
        questions = [question.text for question in run.questions(sizes.num_questions).questions]
        clients = FaultClients(service.url, key, questions, sizes.max_tokens)
        portal.call(clients.learn)
        draw = random.Random(run.seed)
        injector = Injector(nodes, workers, deployment.status, service, disk, clients, draw)
        load = portal.start_task_soon(clients.run)
        injector.wait_for_clients()
        for number, fault in enumerate(_chosen(run, deployment.topology, disk), 1):
            yield run.row(f"{number} {fault.part} {fault.how}", partial(injector.strike, fault))
            run.tick("faults", number, number + 1)
        load.cancel()
        with contextlib.suppress(CancelledError):
            load.result()
        portal.call(clients.check)
        counts = {name: clients.counts[name] for name in ("streams", "turns", "lost", "doubled", "changed")}
        yield {"row": "answers"} | counts | {"service_ends": injector.num_service_ends}


def _chosen(run: Run, topology: Topology, disk: SmallDisk) -> Iterator[Fault]:
    """Every possible fault once in a seeded order; again, in other orders, until the minutes are over."""
    left_out = set()
    if topology.tensor_parallel_size == 1:
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
        num_replicas=2,
        tensor_parallel_size=ranks,
        num_shards=2,
        shard_replicas=2,
        num_encoders=2,
        cpus_per_rank=1 / ranks,
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


def summarise(rows: Sequence[Row]) -> Result:
    """Sums over all faults and answers; times of all faults."""
    faults = [row for row in rows if "fault" in row]
    (answers,) = [row for row in rows if "fault" not in row]
    found: Result = {"faults": len(faults), "recovered": sum(row["recovered"] for row in faults)}
    for name in ("answered", "live_again"):
        seconds = [row[f"{name}_s"] for row in faults if row[f"{name}_s"] is not None]
        found |= {f"{name}_p50_s": median(seconds) if seconds else None, f"{name}_max_s": max(seconds, default=None)}
    found |= {key: value for key, value in answers.items() if key not in ("row", "commit")}
    return found | {"lost": answers["lost"] + sum(row["lost"] for row in faults)}


SUITE = Suite("faults", run_faults, summarise, metrics_of("faults"))

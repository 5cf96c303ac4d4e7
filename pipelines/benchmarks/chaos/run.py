"""One run of the suite `chaos`: a deployment under load, repeated faults, and the comparison of all outputs."""

from __future__ import annotations

import json
import logging
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pipelines.benchmarks.chaos.check import Expected, StreamLog, Verdict, judge_rows, judge_streams
from pipelines.benchmarks.chaos.drivers import driver_kills
from pipelines.benchmarks.chaos.faults import Fault, FaultInjector, faults, recovered
from pipelines.benchmarks.chaos.load import BatchJob, BatchLoad, LookupLoad, Probe, StreamLoad, written_rows
from pipelines.benchmarks.chaos.oracle import ChaosWorkload, ExpectedResults, comparable_row
from ragspec.cluster.deployment import Deployment
from ragspec.cluster.local_cluster import LocalCluster, LocalNode
from ragspec.cluster.remote_retrieval.cluster_retriever import ClusterRetriever
from ragspec.cluster.routing.router import Router
from ragspec.cluster.topology import Topology
from ragspec.config import PipelineConfig
from ragspec.engine.target import load_tokenizer
from ragspec.evaluation.report import Result
from ragspec.evaluation.timing import Tick
from ragspec.rag.prompt import PromptBuilder

log = logging.getLogger(__name__)

TOPOLOGY = Topology(
    replicas=2,
    tensor_parallel=2,
    num_shards=2,
    shard_replicas=2,
    num_encoders=2,
    cpus_per_rank=0.5,
)
_PATIENCE_S = 180.0
_SETTLE_S = (0.5, 2.5)
_MOST_NAMES = 20


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """Sizes of the load and number of faults. `concurrency`: streams at a time."""

    num_faults: int = 20
    num_streams: int = 100
    num_rows: int = 300
    num_driver_kills: int = 5
    concurrency: int = 8
    max_tokens: int = 48
    quick: bool = False

    @classmethod
    def quickly(cls) -> ChaosPlan:
        return cls(6, 24, 40, 2, 6, 32, quick=True)


@dataclass
class ChaosLoads:
    """The loads beside the faults."""

    asked: StreamLoad
    lookups: LookupLoad
    batch: BatchLoad

    @property
    def streams(self) -> Sequence[StreamLog]:
        return self.asked.streams

    @property
    def probes(self) -> Sequence[Probe]:
        return self.lookups.probes

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run all loads; stop them at the end, or abandon them after an error."""
        parts = (self.asked, self.lookups, self.batch)
        try:
            for part in parts:
                part.start()
            yield
            for part in parts:
                part.stop()
        except BaseException:
            for part in parts:
                part.abandon()
            raise


class ChaosRun:
    """Injects faults one after the other, each after recovery from the previous fault."""

    def __init__(
        self,
        deployment: Deployment,
        scene: FaultInjector,
        work: ChaosWorkload,
        expected: ExpectedResults,
        plan: ChaosPlan,
        folder: Path,
    ) -> None:
        """`folder`: for the batch job's files."""
        self._deployment, self._scene, self._plan, self._folder = deployment, scene, plan, folder
        self._work, self._expected = work, expected
        self._job = batch_job(deployment, scene.nodes.address, work, folder)

    def measure(self, tick: Tick) -> Result:
        """Raises: EngineError if the deployment does not answer at all."""
        rows: list[Result] = []
        plan = self._plan
        chosen = faults(plan.num_faults, self._work.seed, plan.quick)
        with self._deployment.engine() as engine, closing(self._deployment.retriever()) as retriever:
            loads = self._loads(engine, retriever)
            with loads.running():
                self._warm_up(loads)
                for number, fault in enumerate(chosen, 1):
                    rows.append(self._one(fault, loads))
                    tick("faults", number, len(chosen))
        result = {"fault_rows": rows, "faults": len(rows)} | self._judged(loads)
        result |= recovery(rows, "recovery_s") | recovery(rows, "live_again_s")
        result |= {"recovered": sum(row["recovered"] for row in rows), "failed_node_starts": self._scene.failed_starts}
        own = self._folder / "killed"
        kills = driver_kills(self._job, own, self._expected.rows, plan.num_driver_kills, self._scene.rng, tick)
        return result | kills

    def _loads(self, engine: Router, retriever: ClusterRetriever) -> ChaosLoads:
        plan, config = self._plan, self._deployment.config
        prompts = PromptBuilder(load_tokenizer(config.target), engine.max_context_tokens)
        streams = StreamLoad(retriever, engine, prompts, self._work.streams, plan.concurrency, _PATIENCE_S)
        k = config.retriever.num_passages
        lookups = LookupLoad(retriever, self._work.lookups, self._expected.lookups, k)
        return ChaosLoads(streams, lookups, BatchLoad(self._job, self._folder))

    def _warm_up(self, loads: ChaosLoads) -> None:
        """Wait until streams end, lookups are answered and the batch job has written its first row."""
        deadline = time.monotonic() + _PATIENCE_S
        first = self._folder / "pass-0"
        while time.monotonic() < deadline and not (
            any(stream.ended for stream in loads.streams) and loads.probes and any(written_rows(first))
        ):
            time.sleep(0.1)

    def _one(self, fault: Fault, loads: ChaosLoads) -> Result:
        """Inject a fault at a random moment, wait for recovery, and replace a lost node."""
        scene = self._scene
        time.sleep(scene.rng.uniform(*_SETTLE_S))
        struck = scene.inject(fault)
        row = recovered(struck, loads, scene.live_again) | {"moment_s": struck.moment_s - scene.begin_s}
        log.info("%s", row)
        scene.clear(struck)
        return row

    def _judged(self, loads: ChaosLoads) -> Result:
        """Counts of differences between all outputs and the expected outputs."""
        heard = loads.asked.heard
        streams = judge_streams(by_round(self._expected.streams, heard), heard)
        passes = [
            judge_rows(self._expected.rows, [(name, comparable_row(record)) for name, record in written_rows(out)])
            for out in loads.batch.passes
        ]
        wrong = sum(probe.right is False for probe in loads.probes)
        counts = {
            mark: len(getattr(streams, mark)) + sum(len(getattr(each, mark)) for each in passes)
            for mark in Verdict._fields
        }
        counts["changed"] += wrong
        finals = [delta.stats for stream in heard.values() for delta in stream.deltas if delta.stats]
        return counts | {
            "streams": len(heard),
            "rows": len(self._expected.rows) * len(passes),
            "lookups": len(loads.probes),
            "lookups_failed": [probe.error for probe in loads.probes if probe.right is None][:_MOST_NAMES],
            "lookups_wrong": wrong,
            "replays": sum(stats.num_replays for stats in finals),
            "batch_failures": loads.batch.failures,
            "errors": [stream.error for stream in heard.values() if stream.error][:_MOST_NAMES],
            "streams_marked": {mark: list(getattr(streams, mark))[:_MOST_NAMES] for mark in Verdict._fields},
            "rows_marked": [{m: list(getattr(p, m))[:_MOST_NAMES] for m in Verdict._fields} for p in passes],
        }


def recovery(rows: Sequence[Mapping[str, Any]], name: str) -> Result:
    """Median and slowest of one kind of recovery, in seconds; None without faults."""
    seconds = [row[name] for row in rows]
    prefix = name.removesuffix("_s")
    return {f"{prefix}_p50_s": median(seconds) if seconds else None, f"{prefix}_max_s": max(seconds, default=None)}


def by_round(expected: Mapping[str, Expected], heard: Mapping[str, StreamLog]) -> dict[str, Expected]:
    """Expected completions of every stream that ran, and of the whole first round."""
    names = [*(f"0/{name}" for name in expected), *heard]
    return {name: expected[name.partition("/")[2]] for name in names if name.partition("/")[2] in expected}


def batch_job(deployment: Deployment, address: str, work: ChaosWorkload, folder: Path) -> BatchJob:
    """Write the rows to a file; returns the job that answers them on the deployment."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in work.rows), encoding="utf-8")
    options = ("--cluster", deployment.name, "--address", address, "--seed", str(work.seed), "--strict")
    return BatchJob(rows, options, dict(os.environ))


def fault_injector(
    deployment: Deployment, nodes: LocalCluster, workers: Sequence[LocalNode], node_cpus: int, seed: int
) -> FaultInjector:
    """The fault injector of the deployment, seeded."""
    rng = random.Random(seed)
    return FaultInjector(nodes, deployment.status, rng, list(workers), node_cpus, len(workers))


def config_of(index_dir: Path, base: PipelineConfig) -> PipelineConfig:
    """One thread an engine, because ranks share the cores with everything else."""
    engine = base.engine.model_copy(update={"num_threads": 1, "max_running": 8, "max_kv_tokens": 16_384})
    retriever = base.retriever.model_copy(update={"index_dir": str(index_dir)})
    return base.model_copy(update={"engine": engine, "retriever": retriever})

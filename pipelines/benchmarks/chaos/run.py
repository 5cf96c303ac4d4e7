"""One run of the suite `chaos`: a deployment under load, repeated faults, and the comparison of all outputs."""

from __future__ import annotations

import json
import logging
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

from transformers import AutoConfig

from pipelines.benchmarks.chaos.batch_job import BatchJob, BatchLoad, driver_kills, judge_output, written_rows
from pipelines.benchmarks.chaos.check import StreamLog, Verdict, judge_streams, slowest_gap_s
from pipelines.benchmarks.chaos.faults import KINDS, Fault, FaultInjector, faults, recovered
from pipelines.benchmarks.chaos.load import LookupLoad, StreamLoad
from pipelines.benchmarks.chaos.oracle import ChaosWorkload, ExpectedResults, expected_results
from pipelines.benchmarks.cluster.shards import segmented_index
from ragspec.cluster.deployment import Deployment
from ragspec.cluster.local_cluster import LocalCluster, LocalNode
from ragspec.cluster.topology import Topology
from ragspec.config import EngineConfig, PipelineConfig, RetrieverConfig, TargetConfig
from ragspec.engine.checkpoints.target_files import target_folder
from ragspec.engine.target import load_tokenizer
from ragspec.evaluation.report import Result
from ragspec.evaluation.suite import Settings
from ragspec.evaluation.timing import Tick
from ragspec.rag.prompt import PromptBuilder
from ragspec.retrieval.encoder import Encoder

log = logging.getLogger(__name__)

ENGINE = EngineConfig(num_threads=1, max_running=8, max_kv_tokens=16_384)
"""One thread an engine, because ranks share the cores with everything else."""

_DEPLOYMENT = "chaos"
_START_S = 300.0
_PATIENCE_S = 180.0
_SETTLE_S = (0.5, 2.5)
_MOST_NAMES = 20


def topology_for(target: TargetConfig) -> Topology:
    """Engines of two ranks, or of one where two cannot share the target's heads. Raises: ModelError."""
    config = AutoConfig.from_pretrained(target_folder(target)).get_text_config()
    ranks: Literal[1, 2] = 1 if config.num_attention_heads % 2 or config.num_key_value_heads % 2 else 2
    return Topology(
        replicas=2, tensor_parallel=ranks, num_shards=2, shard_replicas=2, num_encoders=2, cpus_per_rank=1 / ranks
    )


class ChaosPlan(NamedTuple):
    """Sizes of the load and number of faults. `concurrency`: streams at a time."""

    num_faults: int = 20
    num_streams: int = 100
    num_rows: int = 300
    num_driver_kills: int = 5
    concurrency: int = 8
    max_tokens: int = 48
    num_documents: int = 600


QUICK = ChaosPlan(6, 24, 40, 2, 6, 32, 150)


def measure_chaos(
    settings: Settings, nodes: LocalCluster, workers: Sequence[LocalNode], node_cpus: int, folder: Path, tick: Tick
) -> Result:
    """`workers`: the nodes that may die. `folder`: for the batch job's files. Raises: EngineError, ModelError, SaveError."""
    plan, seed = QUICK if settings.quick else ChaosPlan(), settings.plan.seed
    listed = settings.questions(plan.num_streams + plan.num_rows)
    documents = listed.documents[: plan.num_documents]
    tick("index and expected answers", 0, 2)
    index_dir = segmented_index(documents, Encoder.load(settings.encoder), settings.cache_dir)
    retriever = RetrieverConfig(index_dir=str(index_dir))
    config = PipelineConfig(target=settings.target, encoder=settings.encoder, engine=ENGINE, retriever=retriever)
    work = ChaosWorkload.of(listed.questions, plan.num_streams, plan.num_rows, plan.max_tokens, seed)
    tick("index and expected answers", 1, 2)
    expected = expected_results(work, config)
    tick("index and expected answers", 2, 2)
    topology = topology_for(settings.target)
    with Deployment.up(topology, config, name=_DEPLOYMENT, timeout_s=_START_S) as deployment:
        injector = FaultInjector(nodes, deployment.status, random.Random(seed), list(workers), node_cpus, len(workers))
        result = ChaosRun(deployment, injector, work, expected, plan, folder).measure(tick)
    return result | {
        "label": f"{listed.label}; {len(workers)} worker nodes on one machine",
        "identical": not (result["lost"] or result["doubled"] or result["changed"]),
        "num_prompts": plan.num_streams + plan.num_rows,
        "topology": topology.model_dump(),
        "concurrency": plan.concurrency,
        "notes": [
            f"{plan.num_streams} streams asked round after round, {plan.concurrency} at a time, beside a batch job of "
            f"{plan.num_rows} rows and one lookup after the other; half at T=0, half at T=1",
            "expected outputs: one engine of one rank in one process, without speculation",
        ],
    }


@dataclass(frozen=True)
class ChaosRun:
    """Injects faults one after the other, each after recovery from the previous fault. `folder`: for the batch job's files."""

    deployment: Deployment
    injector: FaultInjector
    work: ChaosWorkload
    expected: ExpectedResults
    plan: ChaosPlan
    folder: Path

    def measure(self, tick: Tick) -> Result:
        """Raises: EngineError if the deployment does not answer at all."""
        plan, config, work, expected = self.plan, self.deployment.config, self.work, self.expected
        job = self._batch_job()
        has_ranks = self.deployment.topology.tensor_parallel > 1
        chosen = faults(plan.num_faults, work.seed, KINDS if has_ranks else [kind for kind in KINDS if kind != "rank"])
        rows: list[Result] = []
        with self.deployment.engine() as engine, closing(self.deployment.retriever()) as retriever:
            prompts = PromptBuilder(load_tokenizer(config.target), engine.max_context_tokens, config.wording)
            with (
                BatchLoad(job, self.folder) as batch,
                LookupLoad(retriever, work.lookups, expected.lookups, config.retriever.num_passages) as lookups,
                StreamLoad(retriever, engine, prompts, work.streams, plan.concurrency, _PATIENCE_S) as streams,
            ):
                self._warm_up(streams, lookups)
                for number, fault in enumerate(chosen, 1):
                    rows.append(self._one(fault, streams, lookups))
                    tick("faults", number, len(chosen))
        result = {"fault_rows": rows, "faults": len(rows)} | self._judged(streams, lookups, batch)
        for name in ("recovery", "undisturbed", "live_again"):
            result |= recovery(rows, name)
        result |= {"recovered": sum(row["recovered"] for row in rows)}
        result |= {"failed_node_starts": self.injector.failed_starts}
        out = self.folder / "killed"
        return result | driver_kills(job, out, expected.rows, plan.num_driver_kills, self.injector.rng, tick)

    def _batch_job(self) -> BatchJob:
        rows = self.folder / "rows.jsonl"
        rows.write_text("".join(f"{json.dumps(row)}\n" for row in self.work.rows), encoding="utf-8")
        cluster = ("--cluster", self.deployment.name, "--address", self.injector.nodes.address)
        return BatchJob(rows, (*cluster, "--seed", str(self.work.seed), "--strict"), dict(os.environ))

    def _warm_up(self, streams: StreamLoad, lookups: LookupLoad) -> None:
        """Wait until streams end, lookups are answered and the batch job has written its first row."""
        deadline = time.monotonic() + _PATIENCE_S
        first = self.folder / "pass-0"
        while time.monotonic() < deadline and not (
            any(stream.ended for stream in streams.streams) and lookups.probes and any(written_rows(first))
        ):
            time.sleep(0.1)

    def _one(self, fault: Fault, streams: StreamLoad, lookups: LookupLoad) -> Result:
        """Inject a fault at a random moment, wait for recovery, and replace a lost node."""
        injector = self.injector
        wait_s = undisturbed_s(lambda: streams.streams)
        time.sleep(injector.rng.uniform(*_SETTLE_S))
        struck = injector.inject(fault)
        row = recovered(struck, lambda: (streams.streams, lookups.probes), injector.live_again)
        row |= {"moment_s": struck.moment_s - injector.begin_s, "undisturbed_s": wait_s}
        log.info("%s", row)
        injector.clear(struck)
        return row

    def _judged(self, load: StreamLoad, lookups: LookupLoad, batch: BatchLoad) -> Result:
        """Counts of differences between all outputs and the expected outputs."""
        heard, probes, own = load.heard, lookups.probes, self.expected.streams
        names = {*(f"0/{name}" for name in own), *heard}  # "round/id": at least the whole first round
        streams = judge_streams({name: own[name.partition("/")[2]] for name in names}, heard)
        passes = [judge_output(self.expected.rows, out) for out in batch.passes]
        counts = {mark: sum(len(getattr(each, mark)) for each in (streams, *passes)) for mark in Verdict._fields}
        wrong = sum(probe.right is False for probe in probes)
        counts["changed"] += wrong
        finals = [delta.stats for stream in heard.values() for delta in stream.deltas if delta.stats]
        return counts | {
            "streams": len(heard),
            "rows": len(self.expected.rows) * len(passes),
            "lookups": len(probes),
            "lookups_failed": [probe.error for probe in probes if probe.right is None][:_MOST_NAMES],
            "lookups_wrong": wrong,
            "replays": sum(stats.num_replays for stats in finals),
            "batch_failures": batch.failures,
            "errors": [stream.error for stream in heard.values() if stream.error][:_MOST_NAMES],
            "streams_marked": marked(streams),
            "rows_marked": [marked(each) for each in passes],
        }


def undisturbed_s(observed: Callable[[], Sequence[StreamLog]], most_s: float = _PATIENCE_S) -> float | None:
    """Seconds until every stream that is open now had a further delta, without a fault; None without open streams.

    `observed` returns all streams so far. The load alone causes this wait, so the `streams_s` of a recovery holds it too.
    """
    moment = time.monotonic()
    while (gap_s := slowest_gap_s(observed(), moment)) == math.inf and time.monotonic() - moment < most_s:
        time.sleep(0.1)
    return gap_s and min(gap_s, most_s)


def recovery(rows: Sequence[Result], name: str) -> Result:
    """Median and slowest of one time of each fault, in seconds; None where no fault has it."""
    seconds = [row[f"{name}_s"] for row in rows if row[f"{name}_s"] is not None]
    return {f"{name}_p50_s": median(seconds) if seconds else None, f"{name}_max_s": max(seconds, default=None)}


def marked(verdict: Verdict) -> dict[str, list[str]]:
    """The first names of each mark."""
    return {mark: list(names)[:_MOST_NAMES] for mark, names in verdict._asdict().items()}

"""The suite `chaos`: a deployment on several Ray nodes of this machine loses its parts one by one, under load.

An engine, a rank, a shard, an encoder or a whole node is killed or stopped; streams and a batch job go on meanwhile. Expected
outputs come from one undisturbed engine before. Everything is taken down in the end, also after Ctrl-C.

    >>> run_chaos(settings, tick).result["lost"]
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.batch.ray_session import ray_session
from ragspec.cluster.local_cluster import LocalCluster, LocalNode
from ragspec.config import PipelineConfig
from ragspec.evaluation.machine import PeakMemory
from ragspec.evaluation.report import Metric, Result, Table, at_most, equal_to, select
from ragspec.evaluation.suite import Outcome, Settings, Suite
from ragspec.evaluation.timing import Tick

if TYPE_CHECKING:
    from pipelines.benchmarks.chaos.run import ChaosPlan

NUM_WORKERS = 3
NODE_CPUS = 2
_DEPLOYMENT = "chaos"
_START_S = 300.0
_NUM_DOCUMENTS = {True: 150, False: 600}
_OURS = ("RAY_ADDRESS", "RAY_AUTH_TOKEN")
"""Settings of another cluster, which would win over this one's."""


def run_chaos(settings: Settings, tick: Tick) -> Outcome:
    """Raises: EngineError, ModelError, SaveError."""
    memory = PeakMemory()
    with tempfile.TemporaryDirectory(prefix="ragspec-chaos-") as name:
        folder = Path(name)
        with LocalCluster(folder / "nodes", os.environ) as nodes:
            tick("nodes", 0, 1 + NUM_WORKERS)
            nodes.add(num_cpus=0)
            workers = [nodes.add(num_cpus=NODE_CPUS) for _ in range(NUM_WORKERS)]
            tick("nodes", 1 + NUM_WORKERS, 1 + NUM_WORKERS)
            with connected(nodes):
                from pipelines.benchmarks.chaos.run import ChaosPlan

                plan = ChaosPlan.quickly() if settings.quick else ChaosPlan()
                result = _measured(settings, plan, nodes, workers, folder, tick)
    return Outcome(result | {"peak_pss_mb": memory.look()})


@contextlib.contextmanager
def connected(nodes: LocalCluster) -> Iterator[None]:
    """This process as a driver on the nodes. Why the imports are later: Ray reads its environment when it is imported."""
    before = dict(os.environ)
    for variable in _OURS:
        os.environ.pop(variable, None)
    os.environ.update(nodes.environment)
    try:
        with ray_session(nodes.address):
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _measured(
    settings: Settings, plan: ChaosPlan, nodes: LocalCluster, workers: list[LocalNode], folder: Path, tick: Tick
) -> Result:
    from pipelines.benchmarks.chaos.oracle import ChaosWorkload, expected_results
    from pipelines.benchmarks.chaos.run import TOPOLOGY, ChaosRun, config_of, fault_injector
    from pipelines.benchmarks.cluster.shards import segmented_index
    from ragspec.cluster.deployment import Deployment
    from ragspec.retrieval.encoder import Encoder

    seed = settings.plan.seed
    count = plan.num_streams + plan.num_rows
    listed = settings.questions(count)
    documents = listed.documents[: _NUM_DOCUMENTS[settings.quick]]
    tick("index and expected answers", 0, 2)
    index_dir = segmented_index(documents, Encoder.load(settings.encoder), settings.cache_dir)
    base = PipelineConfig(target=settings.target, encoder=settings.encoder)
    config = config_of(index_dir, base)
    work = ChaosWorkload.of(listed.questions, plan.num_streams, plan.num_rows, plan.max_tokens, seed)
    tick("index and expected answers", 1, 2)
    expected = expected_results(work, config)
    tick("index and expected answers", 2, 2)
    with Deployment.up(TOPOLOGY, config, name=_DEPLOYMENT, timeout_s=_START_S) as deployment:
        scene = fault_injector(deployment, nodes, workers, NODE_CPUS, seed)
        result = ChaosRun(deployment, scene, work, expected, plan, folder).measure(tick)
    identical = not (result["lost"] or result["duplicated"] or result["changed"])
    return result | {
        "label": f"{listed.label}; {NUM_WORKERS} worker nodes on one machine",
        "identical": identical,
        "num_prompts": plan.num_streams + plan.num_rows,
        "topology": TOPOLOGY.model_dump(),
        "concurrency": plan.concurrency,
        "notes": [
            f"{plan.num_streams} streams asked round after round, {plan.concurrency} at a time, beside a batch job of "
            f"{plan.num_rows} rows and one lookup after the other; half at T=0, half at T=1",
            "expected outputs: one engine of one rank in one process, without speculation",
        ],
    }


METRICS = (
    Metric("faults", "signals that hit while streams and a batch job ran"),
    Metric("lost", "streams and rows without an end, or with tokens missing", equal_to(0)),
    Metric("duplicated", "streams and rows delivered twice, in whole or in part", equal_to(0)),
    Metric("changed", "streams and rows with another token, text, probability or citation", equal_to(0)),
    Metric("recovery_p50_s", "seconds from a fault until everything it had hit went on, median", at_most(5)),
    Metric("recovery_max_s", "the same, the slowest", at_most(15)),
    Metric("live_again_p50_s", "seconds from a fault until the table showed every member live, median"),
    Metric("live_again_max_s", "the same, the slowest"),
    Metric("driver_kills", "kill -9 of a batch job's driver, which was then started again"),
    Metric("driver_duplicated", "rows that its output holds twice", equal_to(0)),
    Metric("driver_lost", "rows that its output lacks", equal_to(0)),
    Metric("driver_changed", "rows with another answer", equal_to(0)),
)


def chaos_tables(result: Result) -> dict[str, Table]:
    """One row a fault."""
    faults = {f"{n}. {r['signal']} {r['kind']}": r for n, r in enumerate(result["fault_rows"], 1)}
    keys = ("victim", "moment_s", "recovery_s", "streams_s", "retrieval_s", "live_again_s", "num_streams_open")
    return {"faults": select(faults, keys)} if faults else {}


SUITE = Suite("chaos", run_chaos, METRICS, ("notes",), chaos_tables)

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

from pipelines.batch.ray_session import ray_session
from ragspec.cluster.local_cluster import LocalCluster
from ragspec.evaluation.machine import PeakMemory
from ragspec.evaluation.report import Metric, Result, Table, at_most, equal_to, select
from ragspec.evaluation.suite import Outcome, Settings, Suite
from ragspec.evaluation.timing import Tick

NUM_WORKERS = 3
NODE_CPUS = 2
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
                from pipelines.benchmarks.chaos.run import measure_chaos

                result = measure_chaos(settings, nodes, workers, NODE_CPUS, folder, tick)
    return Outcome(result | {"peak_pss_mb": memory.look()})


@contextlib.contextmanager
def connected(nodes: LocalCluster) -> Iterator[None]:
    """This process as a driver on the nodes. Why the import is later: Ray reads its environment when it is imported."""
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


METRICS = (
    Metric("faults", "signals that hit while streams and a batch job ran"),
    Metric("lost", "streams and rows without an end, or with tokens missing", equal_to(0)),
    Metric("doubled", "streams and rows delivered twice, in whole or in part", equal_to(0)),
    Metric("changed", "streams and rows with another token, text, probability or citation", equal_to(0)),
    Metric("recovery_p50_s", "seconds from a fault until everything it had hit went on, median", at_most(5)),
    Metric("recovery_max_s", "the same, the slowest", at_most(15)),
    Metric("undisturbed_p50_s", "the longest wait of an open stream shortly before a fault, median"),
    Metric("undisturbed_max_s", "the same, the slowest"),
    Metric("live_again_p50_s", "seconds from a fault until the table showed every replica live, median"),
    Metric("live_again_max_s", "the same, the slowest"),
    Metric("driver_kills", "kill -9 of a batch job's driver, which was then started again"),
    Metric("driver_doubled", "rows that its output holds twice", equal_to(0)),
    Metric("driver_lost", "rows that its output lacks", equal_to(0)),
    Metric("driver_changed", "rows with another answer", equal_to(0)),
)


def chaos_tables(result: Result) -> dict[str, Table]:
    """One row a fault."""
    faults = {f"{n}. {r['signal']} {r['kind']}": r for n, r in enumerate(result["fault_rows"], 1)}
    keys = ("victim", "moment_s", "streams_s", "undisturbed_s", "retrieval_s", "live_again_s", "num_streams_open")
    return {"faults": select(faults, keys)} if faults else {}


SUITE = Suite("chaos", run_chaos, METRICS, ("notes",), chaos_tables)

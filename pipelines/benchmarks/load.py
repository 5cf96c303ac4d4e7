"""The suite `load`: a service under mixed clients, some of which go away half-way. Nothing may fail, hang or leak.

>>> run_load(settings, tick).result["kv_leaked"]
0
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pipelines.benchmarks.service import backend_of, run_clients, service_here
from ragspec.engine.engine import Engine
from ragspec.evaluation.machine import PeakMemory
from ragspec.evaluation.report import Metric, Result, equal_to
from ragspec.evaluation.suite import Outcome, Settings, Suite
from ragspec.evaluation.timing import Tick
from ragspec.numerics.kv_cache import PAGE

NUM_CLIENTS = 32
_SECONDS, _QUICK_S = 60.0, 10.0
_TENANTS = ("ann", "bob", "cleo")
_SETTLE_S = 10.0


def run_load(settings: Settings, tick: Tick) -> Outcome:
    """Raises: ConfigError, ModelError, StoreError, EngineError."""
    seconds, memory = (_QUICK_S if settings.quick else _SECONDS), PeakMemory()
    with backend_of(settings, tick) as (backend, listed), service_here(backend, _TENANTS) as service:
        orders = {
            "url": service.url,
            "keys": list(service.keys.values()),
            "model": backend.model,
            "questions": [question.text for question in listed.questions],
            "seconds": seconds,
            "num_clients": NUM_CLIENTS,
            "seed": settings.plan.seed,
        }
        with _ticking(tick, seconds):
            found: Result = run_clients(orders)
        assert isinstance(backend.engine, Engine)
        found |= {"kv_leaked": leaked_slots(backend.engine, _TENANTS), "left_running": backend.rate_limiter.running}
    rest = {"label": listed.label, "num_prompts": len(listed.questions), "peak_pss_mb": memory.look()}
    return Outcome(found | rest | {"num_clients": NUM_CLIENTS, "seconds": seconds})


def leaked_slots(engine: Engine, tenants: tuple[str, ...]) -> int:
    """KV slots still held when nothing runs and every tenant's cache is purged."""
    pool, deadline = engine.target.pool, time.monotonic() + _SETTLE_S
    free: list[int] = []
    while True:
        for tenant in tenants:
            engine.purge(tenant)
        engine.between_steps(lambda: free.append(pool.num_free_pages))
        if free[-1] == pool.num_pages or time.monotonic() > deadline:
            return (pool.num_pages - free[-1]) * PAGE
        time.sleep(0.1)


@contextmanager
def _ticking(tick: Tick, seconds: float) -> Iterator[None]:
    done = threading.Event()

    def follow() -> None:
        begin = time.monotonic()
        while not done.wait(1.0):
            tick("seconds of load", min(int(time.monotonic() - begin), int(seconds)), int(seconds))

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


METRICS = (
    Metric("requests", "requests of mixed clients"),
    Metric("given_up", "requests whose client went away half-way"),
    Metric("errors_5xx", "answers that blame the service", equal_to(0)),
    Metric("num_faults", "connections dropped, streams without an end, wrong statuses", equal_to(0)),
    Metric("hangs", "requests not answered within 30 s", equal_to(0)),
    Metric("kv_leaked", "KV slots still held when nothing ran and every tenant's cache was purged", equal_to(0)),
    Metric("left_running", "requests counted as running when none was", equal_to(0)),
    Metric("p50_ms", "from sending a request to the end of its answer, median"),
    Metric("p99_ms", "the same, 99 of 100"),
)
SUITE = Suite(
    "load",
    run_load,
    METRICS,
    tables=lambda result: {"answers by status": result["statuses"], "faults": result["faults"]},
)

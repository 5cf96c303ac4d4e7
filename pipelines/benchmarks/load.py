"""The suite `load`: one service under users. Throughput and latencies by the number of users, with speculation and without; the
service's overhead to the first token; and clients that go away half-way.

    python -m pipelines.benchmark --suite load --quick
"""

import asyncio
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from statistics import median
from typing import Any, cast

from pipelines.benchmarks.harness import Metric, Plot, Result, Row, Run, Suite, at_least, at_most, equal_to
from pipelines.benchmarks.users.clients import Answer, chat_body
from pipelines.benchmarks.users.llama_server import llama_row, llama_server
from pipelines.benchmarks.users.load_curve import MIXED, RAG, Body, curve_row, mixes_of, sent_by
from pipelines.benchmarks.users.service import Service, backend_of, free_port, run_clients, service_here, started
from ragspec.config import DEFAULT_TARGET
from ragspec.core import Request, SamplingParams
from ragspec.engine.engine import Engine
from ragspec.errors import EngineError
from ragspec.numerics.attention import PAGE
from ragspec.rag.steps import copy_sources
from services.health import CANARY_SALT

_CROWD = "cleo"
_TENANTS = ("ann", "bob", _CROWD)
_NUM_CLIENTS = 32
_PEER_USERS = (8, 32)
_LEAST_RUNS = 2
"""With speculation first, then without speculation first."""
_FIRST_TOKENS = 8
_SETTLE_S = 10.0
_READY_S = 300.0


def run_load(run: Run) -> Iterator[Row]:
    """Raises: ConfigError, ModelError, StoreError, EngineError."""
    users = (1, 8, 32) if run.quick else (1, 2, 4, 8, 16, 32, 64)
    with backend_of(run) as (backend, listed), service_here(backend, _TENANTS, (_CROWD,)) as service:
        asked = [question.text for question in listed.questions]
        questions = asked[: run.count(32, 8)]
        mixes = mixes_of(backend.model, asked[: max(*users, len(questions))], run.seed)
        sent = partial(_sent, mixes, len(questions))
        yield from _curve_rows(run, service, sent, (RAG, MIXED) if run.quick else tuple(mixes), users)
        if run.peers and llama_server() is not None:
            for number in _PEER_USERS:
                folder = run.cache_dir / "llama_cpp"
                measure = partial(llama_row, service, sent(MIXED, number), number, run.num_runs, folder)
                yield run.row(f"llama-server {number}", measure)
        for at_once in (1, 16):
            measure = partial(first_tokens, service, questions, at_once, run.num_runs, run.seed)
            yield run.row(f"first token {at_once}", measure)
        yield run.row("mixed clients", lambda: _mixed_clients(run, service, questions))
        yield run.row("start", lambda: _start(run, backend.config.retriever.index_dir))


def _sent(mixes: Mapping[str, Sequence[Body]], num_questions: int, mix: str, users: int) -> list[Body]:
    return sent_by(users, mix, mixes[mix], num_questions)


def _curve_rows(
    run: Run, service: Service, sent: Callable[[str, int], list[Body]], mixes: Sequence[str], users: Sequence[int]
) -> Iterator[Row]:
    """Every mix by every number of users."""
    num_runs = max(run.num_runs, _LEAST_RUNS)
    # The first of a kind compiles kernels and teaches the drafters
    curve_row(service, MIXED, sent(MIXED, max(users)), max(users), 1, _CROWD)
    for i, mix in enumerate(mixes):
        for j, number in enumerate(users, 1):
            measure = partial(curve_row, service, mix, sent(mix, number), number, num_runs, _CROWD)
            yield run.row(f"{mix} {number}", measure)
            run.tick("users", i * len(users) + j, len(mixes) * len(users))


def first_tokens(service: Service, questions: Sequence[str], at_once: int, num_runs: int, seed: int) -> Row:
    """Time to the first token straight from the engine, over HTTP, and over HTTP with retrieval; in turns.

    Units: milliseconds, medians over all requests of all runs after an uncounted run. Raises: EngineError.
    """
    model = service.backend.model
    plain = {"max_tokens": _FIRST_TOKENS, "temperature": 0.0, "seed": seed}
    bodies = [chat_body(model, question, **plain) for question in questions]
    without = [body | {"retrieval": False} for body in bodies]
    ways: Mapping[str, Callable[[], list[float]]] = {
        "engine": lambda: asyncio.run(_engine_first_s(service, questions, at_once, seed)),
        "http": lambda: _first_s(service.timed(without, at_once)),
        "http_with_retrieval": lambda: _first_s(service.timed(bodies, at_once)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(1 + num_runs):
        for name, send in ways.items():
            seconds[name] += send() if number else send()[:0]
    row: Row = {f"{name}_ttft_ms": 1e3 * median(found) for name, found in seconds.items()}
    row["gateway_ttft_ms"] = row["http_ttft_ms"] - row["engine_ttft_ms"]
    row["retrieval_ttft_ms"] = row["http_with_retrieval_ttft_ms"] - row["http_ttft_ms"]
    return row


def _first_s(answers: Sequence[Answer]) -> list[float]:
    """Raises: EngineError for an answer without text."""
    seconds = [answer["first_s"] for answer in answers if answer["first_s"] is not None]
    if len(seconds) < len(answers):
        raise EngineError(f"{len(answers) - len(seconds)} of {len(answers)} answers had no text")
    return seconds


async def _engine_first_s(service: Service, questions: Sequence[str], at_once: int, seed: int) -> list[float]:
    """The same prompts straight to the engine, `at_once` at a time."""
    waiting, seconds = iter(questions), list[float]()

    async def client() -> None:
        for question in waiting:
            params = SamplingParams(max_tokens=_FIRST_TOKENS, seed=seed)
            prompt = service.backend.target.prompts.build(question, (), _FIRST_TOKENS).prompt_ids
            salt = next(iter(service.keys))
            request = Request(uuid.uuid4().hex, prompt, params, copy_sources(question, ()), salt)
            begin = time.perf_counter()
            # Why the cast: every asynchronous generator can be closed
            async with aclosing(cast(Any, service.backend.target.engine.stream(request))) as stream:
                seconds.extend([time.perf_counter() - begin async for delta in stream if delta.text][:1])

    await asyncio.gather(*(client() for _ in range(at_once)))
    return seconds


def _mixed_clients(run: Run, service: Service, questions: Sequence[str]) -> Row:
    """Outcomes of mixed clients, and everything that they left: KV slots, requests counted as running."""
    backend = service.backend
    orders: Row = {
        "url": service.url,
        "keys": list(service.keys.values()),
        "model": backend.model,
        "questions": questions,
    }
    orders |= {"seconds": 10.0 if run.quick else 60.0, "num_clients": _NUM_CLIENTS, "seed": run.seed}
    engine = backend.target.engine
    assert isinstance(engine, Engine)
    num_free = free_pages(engine, _TENANTS)
    found: Row = run_clients(orders)
    leaked = leaked_slots(engine, _TENANTS, num_free)
    return found | {"leaked": leaked, "left_running": backend.rate_limiter.running}


def leaked_slots(engine: Engine, tenants: Sequence[str], num_free: int) -> int:
    """KV slots still held when nothing runs and the caches are purged, beyond those that left `num_free` pages before."""
    deadline = time.monotonic() + _SETTLE_S
    while (left := free_pages(engine, tenants)) < num_free and time.monotonic() < deadline:
        time.sleep(0.1)
    return (num_free - left) * PAGE


def free_pages(engine: Engine, tenants: Sequence[str]) -> int:
    """Free pages of the KV pool with the caches of all tenants and of the health check purged. What the engine pinned is held."""
    free = list[int]()
    for tenant in (*tenants, CANARY_SALT):
        engine.purge(tenant)
    engine.between_steps(lambda: free.append(engine.target.pool.num_free_pages))
    return free[-1]


def _start(run: Run, index_dir: str) -> Row:
    """Seconds until `ragspec serve` is ready, the second time."""
    target = [] if run.target.model == DEFAULT_TARGET else ["--target", run.target.model]
    for _ in range(2):
        port = str(free_port())
        command = [sys.executable, "-m", "ragspec.cli", "serve", "--index", index_dir, *target, "--port", port]
        with started(command, f"http://127.0.0.1:{port}/health/ready", _READY_S) as seconds:
            ready_s = seconds
    return {"ready_again_s": ready_s}


def summarise(rows: Sequence[Row]) -> Result:
    """The flat figures of all rows; None where a row is missing."""
    by_name = {row["row"]: row for row in rows}
    curve = [row for row in rows if "on_off" in row]
    found: Result = {
        "on_off_min": min(row["on_off"] for row in curve),
        "on_off_p99_min": min(row["on_off_p99"] for row in curve),
    }
    for users in _PEER_USERS:
        llama = by_name.get(f"llama-server {users}", {}).get("llama_tokens_per_s")
        found[f"rag_on_off_{users}"] = by_name[f"{RAG} {users}"]["on_off"]
        found[f"vs_llama_server_{users}"] = by_name[f"{MIXED} {users}"]["on_tokens_per_s"] / llama if llama else None
    for at_once in (1, 16):
        for name in ("gateway_ttft_ms", "retrieval_ttft_ms"):
            found[f"{name}_c{at_once}"] = by_name[f"first token {at_once}"][name]
    for name in ("mixed clients", "start"):
        found |= {key: value for key, value in by_name[name].items() if key not in ("row", "commit")}
    return found


METRICS = (
    Metric("on_off_min", "tokens a second with speculation over without, closed loops, the least", at_least(0.97)),
    Metric("on_off_p99_min", "99th percentile of the time a token, without speculation over with, the least"),
    Metric("rag_on_off_8", "tokens a second with speculation over without, RAG, 8 users", at_least(1.5)),
    Metric("rag_on_off_32", "the same, 32 users", at_least(1.2)),
    Metric("vs_llama_server_8", "tokens a second over llama-server's best, mix of all kinds, 8 users", at_least(2)),
    Metric("vs_llama_server_32", "the same, 32 users", at_least(2)),
    Metric("gateway_ttft_ms_c1", "time to first token over HTTP minus the engine's, one request", at_most(5)),
    Metric("gateway_ttft_ms_c16", "the same, 16 at once", at_most(20)),
    Metric("retrieval_ttft_ms_c16", "added by retrieval, 16 at once", at_most(120)),
    Metric("requests", "requests of mixed clients"),
    Metric("given_up", "requests whose client went away half-way"),
    Metric("errors_5xx", "answers that blame the service", equal_to(0)),
    Metric("num_faults", "connections dropped, streams without an end, wrong statuses", equal_to(0)),
    Metric("hangs", "requests not answered within 30 s", equal_to(0)),
    Metric("leaked", "KV slots still held when nothing ran and every tenant's cache was purged", equal_to(0)),
    Metric("left_running", "requests counted as running when none was", equal_to(0)),
    Metric("p50_ms", "from sending a request to the end of its answer, median"),
    Metric("p99_ms", "the same, 99 of 100"),
    Metric("ready_again_s", "second start of ragspec serve until it is ready", at_most(5)),
)


PLOT = Plot(
    "users",
    {"on_tokens_per_s": "tokens a second, speculation on", "off_tokens_per_s": "off"},
    lambda row: row.get("mix") == MIXED,
    has_log_x=True,
)
SUITE = Suite("load", run_load, summarise, METRICS, PLOT)

"""The suite `load`: throughput and latencies by the number of users, with speculation and without; what the service adds to the
engine's first token; how long starts take; and whether mixed clients, some of which go away half-way, leave anything behind.

>>> run_load(settings, tick).result["on_off_min"]
1.02
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from pipelines.benchmarks.attack import ATTACKER, VICTIM, attacking
from pipelines.benchmarks.chat.first_token import FirstTokens
from pipelines.benchmarks.clients import Answer, chat_body
from pipelines.benchmarks.llama_server import LlamaServers, llama_server
from pipelines.benchmarks.load_curve import MIXED, RAG, Body, LoadCurve, bursts, mixes_of, poisson
from pipelines.benchmarks.service import Service, backend_of, free_port, run_clients, service_here, started
from ragspec.config import DEFAULT_TARGET
from ragspec.engine.engine import Engine
from ragspec.evaluation.machine import PeakMemory
from ragspec.evaluation.report import (
    OTHER,
    OWN,
    Figures,
    Metric,
    Result,
    Table,
    at_least,
    at_most,
    equal_to,
    new_figure,
)
from ragspec.evaluation.suite import Outcome, Settings, Suite
from ragspec.evaluation.timing import Tick
from ragspec.numerics.kv_cache import PAGE

NUM_CLIENTS = 32
USERS, USERS_QUICK = (1, 2, 4, 8, 16, 32, 64), (1, 8, 32)
NUM_QUESTIONS, NUM_QUESTIONS_QUICK = 32, 8
"""Of the first tokens and the fairness, and bodies of a run by few users. Each of many users asks a question of its own."""
_SECONDS, _QUICK_S = 60.0, 10.0
_CROWD = "cleo"
_TENANTS = (ATTACKER, VICTIM, _CROWD)
_SETTLE_S = 10.0
_READY_S = 300.0
_PEER_USERS = (8, 32)
_LEAST_RUNS = 2
"""With speculation first, then without it first."""
_OPEN_USERS, _OPEN_SHARE = 8, 0.7
"""Open arrivals come at this share of the answers a second of so many users without speculation."""
_FIRST_TOKENS = {"gateway_ttft_ms": (1, 16), "retrieval_ttft_ms": (16,)}


def run_load(settings: Settings, tick: Tick) -> Outcome:
    """Raises: ConfigError, ModelError, StoreError, EngineError."""
    seconds, memory = (_QUICK_S if settings.quick else _SECONDS), PeakMemory()
    users, count = (USERS_QUICK, NUM_QUESTIONS_QUICK) if settings.quick else (USERS, NUM_QUESTIONS)
    with backend_of(settings, tick) as (backend, listed), service_here(backend, _TENANTS, (_CROWD,)) as service:
        asked = [question.text for question in listed.questions]
        questions = asked[: settings.num_prompts or count]
        mixes = mixes_of(backend.model, asked[: max(*users, len(questions))], settings.plan.seed)
        curve = LoadCurve(service, mixes, tick, _CROWD, len(questions))
        rows = load_rows(curve, users, [*mixes], settings.plan.num_runs)
        against = vs_llama_server(service, mixes, rows, settings, tick, len(questions))
        first = FirstTokens(service, questions, settings.plan.seed)
        ttft = {number: first.measure(number, settings.plan.num_runs, tick) for number in (1, 16)}
        fairness = fairness_ratio(service, questions)
        left = left_behind(service, questions, seconds, settings.plan.seed, tick)
        starts = start_times(settings.target.model, backend.config.retriever.index_dir, tick)
    found = headline(rows) | against | {"fairness_ratio": fairness} | starts | left
    found |= {f"{name}_c{at}": ttft[at][name] for name, counts in _FIRST_TOKENS.items() for at in counts}
    rest = {"label": listed.label, "num_prompts": len(questions), "peak_pss_mb": memory.look(), "rows": rows}
    return Outcome(found | rest | {"num_clients": NUM_CLIENTS, "seconds": seconds})


def load_rows(curve: LoadCurve, users: Sequence[int], mixes: Sequence[str], num_runs: int) -> list[Result]:
    """Every mix by every number of users, and the mix of all kinds with open arrivals."""
    curve.warm_up(max(users))
    num_runs = max(num_runs, _LEAST_RUNS)
    rows = [curve.row(mix, number, num_runs) for mix in mixes for number in users]
    (closed,) = (row for row in rows if (row["mix"], row["users"]) == (MIXED, _OPEN_USERS))
    rate = _OPEN_SHARE * closed["off"]["answers_per_s"]
    return [*rows, *(curve.row(MIXED, _OPEN_USERS, num_runs, arrivals, rate) for arrivals in (poisson, bursts))]


def headline(rows: Sequence[Result]) -> Result:
    rag = {row["users"]: row["on_off"] for row in rows if row["mix"] == RAG}
    return {
        "on_off_min": min(row["on_off"] for row in rows if row["arrivals"] == "closed"),
        "on_off_p99_min": min(row["on_off_p99"] for row in rows),
        "rag_on_off_8": rag.get(8),
        "rag_on_off_32": rag.get(32),
    }


def vs_llama_server(
    service: Service,
    mixes: Mapping[str, Sequence[Body]],
    rows: Sequence[Result],
    settings: Settings,
    tick: Tick,
    num_questions: int,
) -> Result:
    """Tokens a second of the mix of all kinds over llama-server's; None where it was not built or peers are not wanted.

    Raises: ModelError for a target that is no plain Llama, EngineError.
    """
    if not settings.peers or llama_server() is None:
        return dict.fromkeys(f"vs_llama_server_{users}" for users in _PEER_USERS)
    peer = LlamaServers(service, {MIXED: mixes[MIXED]}, settings.cache_dir / "llama_cpp", tick, num_questions)
    ours = {row["users"]: row["on"]["tokens_per_s"] for row in rows if row["mix"] == MIXED}
    return {
        f"vs_llama_server_{users}": ours[users] / peer.tokens_per_s(MIXED, users, settings.plan.num_runs)
        for users in _PEER_USERS
    }


def fairness_ratio(service: Service, questions: Sequence[str]) -> float:
    """Time to first token of one tenant's short chats beside 240 choices of another, over the same when it is quiet."""
    bodies = [chat_body(service.backend.model, text, max_tokens=8, retrieval=False) for text in questions]
    quiet = _first_s(service.timed(bodies, tenant=VICTIM))
    with attacking(service, "streams"):
        return _first_s(service.timed(bodies, tenant=VICTIM)) / quiet


def _first_s(answers: Sequence[Answer]) -> float:
    return median(answer["first_s"] or answer["total_s"] for answer in answers)


def left_behind(service: Service, questions: Sequence[str], seconds: float, seed: int, tick: Tick) -> Result:
    """What mixed clients met, and what they left: KV slots, requests counted as running."""
    backend = service.backend
    orders: Mapping[str, Any] = {
        "url": service.url,
        "keys": list(service.keys.values()),
        "model": backend.model,
        "questions": questions,
        "seconds": seconds,
        "num_clients": NUM_CLIENTS,
        "seed": seed,
    }
    tick("mixed clients", 0, 1)
    found: Result = run_clients(orders)
    tick("mixed clients", 1, 1)
    assert isinstance(backend.engine, Engine)
    leaked = leaked_slots(backend.engine, _TENANTS)
    return found | {"leaked": leaked, "left_running": backend.rate_limiter.running}


def start_times(model: str, index_dir: str, tick: Tick) -> Result:
    """Seconds until `ragspec serve` is ready, the second time, and until `ragspec ask` refuses an index that is not there."""
    target = [] if model == DEFAULT_TARGET else ["--target", model]
    ready_s = []
    for number in range(2):
        ready_s.append(_ready_s(["serve", "--index", index_dir, *target]))
        tick("starts", number + 1, 2)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ragspec-") as folder:
        subprocess.run(_command(["ask", "Why?", "--index", f"{folder}/none"]), capture_output=True, check=False)
    return {"ready_again_s": ready_s[-1], "usage_error_s": time.perf_counter() - begin}


def _ready_s(arguments: Sequence[str]) -> float:
    port = str(free_port())
    with started(_command([*arguments, "--port", port]), f"http://127.0.0.1:{port}/health/ready", _READY_S) as seconds:
        return seconds


def _command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "ragspec.cli", *arguments]


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


METRICS = (
    Metric("on_off_min", "tokens a second with speculation over without, closed loops, the least", at_least(0.97)),
    Metric("on_off_p99_min", "99th percentile of the time a token, without speculation over with, the least"),
    Metric("rag_on_off_8", "tokens a second with speculation over without, RAG, 8 users", at_least(1.5)),
    Metric("rag_on_off_32", "the same, 32 users", at_least(1.2)),
    Metric("vs_llama_server_8", "tokens a second over llama-server's best, mix of all kinds, 8 users", at_least(2)),
    Metric("vs_llama_server_32", "the same, 32 users", at_least(2)),
    Metric("gateway_ttft_ms_c1", "time to first token over HTTP minus the engine's, one request", at_most(5)),
    Metric("gateway_ttft_ms_c16", "the same, 16 at once", at_most(20)),
    Metric("retrieval_ttft_ms_c16", "what retrieval adds to it, 16 at once", at_most(120)),
    Metric("ready_again_s", "second start of ragspec serve until it is ready", at_most(5)),
    Metric("usage_error_s", "ragspec ask until it refuses an index that is not there", at_most(1)),
    Metric("fairness_ratio", "first token of a short chat beside another tenant's 240 choices, over quiet", at_most(2)),
    Metric("requests", "requests of mixed clients"),
    Metric("given_up", "requests whose client went away half-way"),
    Metric("errors_5xx", "answers that blame the service", equal_to(0)),
    Metric("num_faults", "connections dropped, streams without an end, wrong statuses", equal_to(0)),
    Metric("hangs", "requests not answered within 30 s", equal_to(0)),
    Metric("leaked", "KV slots still held when nothing ran and every tenant's cache was purged", equal_to(0)),
    Metric("left_running", "requests counted as running when none was", equal_to(0)),
    Metric("p50_ms", "from sending a request to the end of its answer, median"),
    Metric("p99_ms", "the same, 99 of 100"),
)


def _tables(result: Result) -> dict[str, Table]:
    names = [f"{row['mix']}, {row['users']} users, {row['arrivals']}" for row in result["rows"]]
    columns = {key: [row[key] for row in result["rows"]] for key in ("on_off", "on_off_p99")}
    for way in ("on", "off"):
        for key in ("tokens_per_s", "first_p50_ms", "first_p99_ms", "token_p50_ms", "token_p99_ms", "goodput_per_s"):
            columns[f"{way}: {key}"] = [row[way][key] for row in result["rows"]]
    curve = {title: dict(zip(names, values, strict=True)) for title, values in columns.items()}
    return {"users": curve, "answers by status": result["statuses"], "faults": result["faults"]}


def _draw(outcome: Outcome, title: str) -> Figures:
    """One picture a mix: tokens a second by the number of users, with speculation and without."""
    figures: Figures = {}
    closed = [row for row in outcome.result["rows"] if row["arrivals"] == "closed"]
    for mix in dict.fromkeys(row["mix"] for row in closed):
        rows = [row for row in closed if row["mix"] == mix]
        figure, axes = new_figure(6.4, 3.6, f"{mix}: tokens a second by users at once")
        for way, label, color in (("on", "speculation on", OWN), ("off", "off", OTHER)):
            at, speeds = [row["users"] for row in rows], [row[way]["tokens_per_s"] for row in rows]
            axes.plot(at, speeds, marker="o", color=color, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks([row["users"] for row in rows], [str(row["users"]) for row in rows])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("users")
        axes.set_ylabel("tokens/s")
        axes.legend(frameon=False)
        figures[f"load_{mix}"] = figure
    return figures


SUITE = Suite("load", run_load, METRICS, tables=_tables, draw=_draw)

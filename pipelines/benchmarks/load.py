"""The suite `load`: one service under users. Throughput and latencies by the number of users, with speculation and without; the
service's overhead to the first token; and clients that go away half-way.

The load curve: a mix is a list of chat bodies, and a cell is a mix with a number of users, or with arrivals. Every user sends the
next body after an answer has ended, so users of a faster service ask more; arrivals are the same with speculation and without, as
many as three quarters of those that eight users make without it. A pair of runs is one with speculation and one without, in
turns. A run sends bodies for 20 seconds, two for each user at least. No run shares a cached prefix with another.

All cells get their first pair, then their second, and so on. A cell has 5 to 12 pairs: it ends when the standard errors of the
ratios of throughput and of slow tokens are at most 2 % of them. A cell is slower with speculation where its ratio and two
standard errors are under 0.98 (0.95 for the 95th percentile of the time a token), a mix where the mean of its users' cells and
two of its errors are under 1. With --quick there are two short pairs, no arrivals and no such verdicts; --runs has no effect.

llama.cpp's own server runs beside, with the same prompts as token ids, by the same clients, one program at a time. It gets
prompts ready, retrieval included, so its time has no retrieval in it. Both types of weights run, and the faster counts; each slot
has room for the longest prompt and its answer, so nothing is cut.

    python -m pipelines.benchmark --suite load --quick
"""

import asyncio
import itertools
import math
import random
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from operator import sub
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, cast

from prometheus_client.parser import text_string_to_metric_families

from pipelines.benchmarks.harness import Plot, Result, Row, Run, Suite, metrics_of
from pipelines.benchmarks.peers import llama_files, load_peer
from pipelines.benchmarks.users.clients import Answer, chat_body, quantile
from pipelines.benchmarks.users.service import (
    Service,
    Users,
    backend_of,
    free_port,
    llama_server,
    run_clients,
    service_here,
    serving_llama,
    started,
    timed_answers,
)
from ragspec.config import DEFAULT_TARGET
from ragspec.core import Message, Request, SamplingParams
from ragspec.engine.engine import Engine
from ragspec.errors import EngineError
from ragspec.numerics.attention import PAGE
from ragspec.rag.chat.history import ChatTurn
from ragspec.rag.steps import copy_sources, parse_scope
from ragspec.rag.wording import GRAMMAR_REQUEST
from services.health import CANARY_SALT

Body = dict[str, Any]

RAG, MIXED = "rag", "mixed"
GOOD_FIRST_S = 2.0
"""An answer is good if its first token came within this time, and the others followed within `GOOD_TOKEN_S` each."""
GOOD_TOKEN_S = 0.1
"""The time of a token of a good answer."""

_MAX_TOKENS = 64
_SALTS = itertools.count()
_ARRIVALS, _ARRIVALS_SHARE = "arrivals", 0.75
_LEAST_S, _QUICK_PAIRS, _LEAST_PAIRS, _MOST_PAIRS, _KNOWN_ERROR = 20.0, 2, 5, 12, 0.02
_RATIOS = (
    ("on_off", "on_tokens_per_s", "off_tokens_per_s"),
    ("on_off_p95", "off_token_p95_ms", "on_token_p95_ms"),
    ("on_off_first", "off_first_p50_ms", "on_first_p50_ms"),
)
_SLOWER = {"on_off": 0.98, "on_off_p95": 0.95}
_COUNTERS = (
    "vllm:generation_tokens",
    "vllm:spec_decode_num_drafts",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
    "ragspec_draft_seconds",
)


def mixes_of(model: str, questions: Sequence[str], seed: int) -> dict[str, list[Body]]:
    """One body of each kind for each question; `MIXED` has all of them."""
    drawn = {"max_tokens": _MAX_TOKENS, "seed": seed}
    free = drawn | {"retrieval": False}
    kinds: dict[str, list[Body]] = {RAG: [], "chat": [], "grammar": [], "creative": []}
    for question in questions:
        follow_up = (question, "I do not know. What do you mean?", f"I mean this: {question}")
        story = f"Write a story that begins like this: {question}"
        wrong = f"he ask me: {question}"
        copied = {"type": "content", "content": wrong}
        kinds[RAG].append(chat_body(model, question, **drawn))
        kinds["chat"].append(chat_body(model, *follow_up, **free))
        kinds["grammar"].append(chat_body(model, GRAMMAR_REQUEST + wrong, prediction=copied, **free))
        kinds["creative"].append(chat_body(model, story, temperature=1.0, **free))
    return kinds | {MIXED: [body for group in zip(*kinds.values(), strict=True) for body in group]}


def sent_by(bodies: Sequence[Body], count: int) -> list[Body]:
    """So many bodies, from the first again where there are fewer; each further turn has a cache of its own."""
    turns = -(-count // len(bodies))
    return [{**body, "cache_salt": f"turn-{turn}"} for turn in range(turns) for body in bodies][:count]


def _is_enough(run: Run, pairs: Sequence[Row]) -> bool:
    if run.quick or len(pairs) < _LEAST_PAIRS:
        return run.quick and len(pairs) >= _QUICK_PAIRS
    cell = pooled(pairs)
    is_known = all(cell[f"{name}_error"] <= _KNOWN_ERROR * cell[name] for name in _SLOWER)
    return is_known or len(pairs) >= _MOST_PAIRS


def pair_row(service: Service, bodies: Sequence[Body], users: Users, number: int, tenant: str = "") -> Row:
    """Figures of a run with speculation (`on_...`) and of one without (`off_...`); in even pairs the first comes first.

    `users`, `tenant`: as of `Service.timed`. Raises: EngineError.
    """
    ways = (True, False) if number % 2 == 0 else (False, True)
    found = {on: _timed(service, bodies, users, on, tenant) for on in ways}
    return {f"{way}_{name}": value for way, on in (("on", True), ("off", False)) for name, value in found[on].items()}


def _timed(service: Service, bodies: Sequence[Body], users: Users, speculation: bool, tenant: str) -> Row:
    salt = f"run-{next(_SALTS)}-"
    own = [{**body, "speculation": speculation, "cache_salt": salt + body.get("cache_salt", "")} for body in bodies]
    before = _counted(service)
    found = measured(service.timed(own, users, tenant=tenant))
    tokens, steps, drafted, accepted, draft_s, processor_s = map(sub, _counted(service), before)
    counts = {
        "drafted_a_step": drafted / steps,
        "accepted_a_step": accepted / steps,
        "draft_us_a_step": 1e6 * draft_s / steps,
    }
    return found | counts | {"processor_ms_a_token": 1e3 * processor_s / tokens}


def _counted(service: Service) -> list[float]:
    """The service's counters `_COUNTERS`, and the processor seconds of this process."""
    families = text_string_to_metric_families(service.backend.metrics.text().decode())
    values = {sample.name: sample.value for family in families for sample in family.samples}
    return [values[f"{name}_total"] for name in _COUNTERS] + [time.process_time()]


def pooled(pairs: Sequence[Row]) -> Row:
    """Medians of all figures, and the ratios of the pairs: geometric means, with their standard errors.

    `on_off`: tokens a second with speculation over without; `on_off_p95`, `on_off_first`: the 95th percentile of the time a
    token, and the median of the time to the first, without speculation over with.
    """
    row: Row = {"num_pairs": len(pairs)}
    for name, above, below in _RATIOS:
        logs = [math.log(pair[above] / pair[below]) for pair in pairs]
        row[name] = math.exp(fmean(logs))
        row[f"{name}_error"] = row[name] * stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    return row | {name: median(pair[name] for pair in pairs) for name in pairs[0] if name.startswith(("on_", "off_"))}


def measured(answers: Sequence[Answer]) -> Row:
    """Throughput, latencies and goodput of one run. Raises: EngineError for an answer without an end."""
    if failed := [answer for answer in answers if not answer["ended"]]:
        raise EngineError(f"{len(failed)} of {len(answers)} answers did not end: {failed[0].get('error')}")
    first_s, token_s, num_tokens = list[float](), list[float](), 0
    for answer in answers:
        count = answer["usage"]["completion_tokens"]
        num_tokens += count
        first_s.append(answer["total_s"] if answer["first_s"] is None else answer["first_s"])
        token_s.append((answer["total_s"] - first_s[-1]) / max(1, count - 1))
    wall_s = max(a["begin_s"] + a["total_s"] for a in answers) - min(a["begin_s"] for a in answers)
    good = [first <= GOOD_FIRST_S and token <= GOOD_TOKEN_S for first, token in zip(first_s, token_s, strict=True)]
    row: Row = {"tokens_per_s": num_tokens / wall_s, "answers_per_s": len(answers) / wall_s}
    for name, seconds in (("first", sorted(first_s)), ("token", sorted(token_s))):
        row |= {f"{name}_p{share}_ms": 1e3 * quantile(seconds, share / 100) for share in (50, 95)}
    return row | {"goodput_per_s": sum(good) / wall_s}


def llama_row(service: Service, bodies: Sequence[Body], users: int, num_runs: int, folder: Path) -> Row:
    """Tokens a second of the faster type of weights, the median over runs. `folder`: keeps the converted weights.

    Raises: ModelError for a target that is no plain Llama, EngineError.
    """
    backend = service.backend
    prompts = prompts_of(service, bodies)
    room = max(len(prompt["prompt"]) + prompt["max_tokens"] for prompt in prompts)
    speeds = list[float]()
    for path in llama_files(load_peer(backend.config.target), folder, backend.target.prompts.tokenizer).values():
        with serving_llama(path, users, room) as url:
            runs = [measured(timed_answers(url, "", "/v1/completions", prompts, users)) for _ in range(num_runs)]
        speeds.append(median(run["tokens_per_s"] for run in runs))
    return {"users": users, "llama_tokens_per_s": max(speeds)}


def prompts_of(service: Service, bodies: Sequence[Body]) -> list[dict[str, Any]]:
    """Chats as completions of their prompts' token ids: retrieved, rewritten and laid out as the service does it."""
    backend, scope = service.backend, parse_scope(next(iter(service.keys)), None)
    prepared = []
    for number, body in enumerate(bodies):
        params = SamplingParams(max_tokens=body["max_tokens"], temperature=body.get("temperature", 0.0), seed=0)
        turn = ChatTurn(
            id=f"prompt-{number}",
            messages=tuple(Message(each["role"], each["content"]) for each in body["messages"]),
            params=params,
            scope=scope,
            num_passages=backend.config.retriever.num_passages,
            when="never" if body.get("retrieval") is False else backend.config.retriever.when,
        )
        prompt = backend.target.chat.prepare(turn).request.prompt_ids
        options = {"stream": True, "stream_options": {"include_usage": True}, "cache_prompt": False}
        sampling = {"max_tokens": params.max_tokens, "temperature": params.temperature, "seed": body["seed"]}
        prepared.append({"model": "llama", "prompt": list(prompt), **sampling, **options})
    return prepared


_CROWD = "cleo"
_TENANTS = ("ann", "bob", _CROWD)
_NUM_CLIENTS = 32
_PEER_USERS = (8, 32)
_FIRST_TOKENS = 8
_SETTLE_S = 10.0
_READY_S = 300.0


def run_load(run: Run) -> Iterator[Row]:
    """Raises: ConfigError, ModelError, StoreError, EngineError."""
    with backend_of(run) as (backend, listed), service_here(backend, _TENANTS, (_CROWD,)) as service:
        asked = [question.text for question in listed.questions]
        questions = asked[: run.count(32, 8)]
        mixes = mixes_of(backend.model, asked[: run.count(len(asked), 8)], run.seed)
        curve = {row["row"]: row for row in _curve_rows(run, service, mixes)}
        yield from curve.values()
        if run.peers and llama_server() is not None:
            for number in _PEER_USERS:
                sent = sent_by(mixes[MIXED], curve[f"{MIXED} {number}"]["num_bodies"])
                measure = partial(llama_row, service, sent, number, run.num_runs, run.cache_dir / "llama_cpp")
                yield run.row(f"llama-server {number}", measure)
        for at_once in (1, 16):
            measure = partial(first_tokens, service, questions, at_once, run.num_runs, run.seed)
            yield run.row(f"first token {at_once}", measure)
        yield run.row("mixed clients", lambda: _mixed_clients(run, service, questions))
        yield run.row("start", lambda: _start(run, backend.config.retriever.index_dir))


def _curve_rows(run: Run, service: Service, mixes: Mapping[str, Sequence[Body]]) -> Iterator[Row]:
    """Every mix by every number of users, and with arrivals. The pairs are kept one by one."""
    # The first of a kind compiles kernels and teaches the drafters
    pair_row(service, sent_by(mixes[MIXED], _NUM_CLIENTS), _NUM_CLIENTS, 0, _CROWD)
    users = [(mix, str(users)) for mix in ((RAG, MIXED) if run.quick else mixes) for users in (1, 8, 32)]
    cells = users if run.quick else [*users, (MIXED, "64"), *((mix, _ARRIVALS) for mix in mixes)]
    pairs: dict[tuple[str, str], list[Row]] = {cell: [] for cell in cells}
    while left := [cell for cell in cells if not _is_enough(run, pairs[cell])]:
        for at, (mix, load) in enumerate(left, 1):
            number = len(pairs[mix, load])
            sent, asking = _sent(run, service, mix, mixes[mix], load, number)
            measure = partial(pair_row, service, sent, asking, number, _CROWD)
            pairs[mix, load].append(run.row(f"{mix} {load}: pair {number}", measure))
            run.tick(f"pair {number + 1}", at, len(left))
    for (mix, load), own in pairs.items():
        sent, asking = _sent(run, service, mix, mixes[mix], load, 0)
        cell = {"mix": mix, "num_bodies": len(sent)} | ({"users": asking} if isinstance(asking, int) else {})
        yield run.row(f"{mix} {load}", partial(pooled, own)) | cell


def _sent(
    run: Run, service: Service, mix: str, bodies: Sequence[Body], load: str, pair: int
) -> tuple[list[Body], Users]:
    """Bodies, and users or arrivals, of a pair of runs."""
    if load == _ARRIVALS:
        of_users = run.kept.get(f"{mix} 8: pair 0")
        assert of_users is not None, "cells with users come first"
        draw, arrivals = random.Random(f"{run.seed} {mix} {pair}"), [0.0]
        while arrivals[-1] < _LEAST_S:
            arrivals.append(arrivals[-1] + draw.expovariate(_ARRIVALS_SHARE * of_users["off_answers_per_s"]))
        return sent_by(bodies, len(arrivals)), arrivals
    users = int(load)
    count = max(users, len(bodies))
    if not run.quick:
        first = partial(_timed, service, sent_by(bodies, 2 * users), users, True, _CROWD)
        answers_per_s = run.row(f"{mix} {load}: first", first)["answers_per_s"]
        count = max(2 * users, math.ceil(_LEAST_S * answers_per_s))
    return sent_by(bodies, count), users


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
    orders: Row = {"url": service.url, "keys": [*service.keys.values()], "model": backend.model, "questions": questions}
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
    with_users = [row for row in curve if "users" in row]
    found, is_known = Result(), all(row["num_pairs"] >= _LEAST_PAIRS for row in curve)
    for name, least in _SLOWER.items():
        cells = with_users if name == "on_off" else curve  # as many tokens arrive with speculation as without
        found[f"{name}_min"] = min(row[name] for row in cells)
        if is_known:
            found[f"{name}_slower"] = sum(row[name] + 2 * row[f"{name}_error"] < least for row in cells)
    if is_known:
        mixes = {row["mix"] for row in with_users}
        found["mixes_slower"] = sum(_is_slower([row for row in with_users if row["mix"] == mix]) for mix in mixes)
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


def _is_slower(cells: Sequence[Row]) -> bool:
    """Whether the mean of a mix's cells is surely under 1."""
    error = math.hypot(*(cell["on_off_error"] for cell in cells)) / len(cells)
    return fmean(cell["on_off"] for cell in cells) + 2 * error < 1.0


PLOT = Plot(
    "users",
    {"on_tokens_per_s": "tokens a second, speculation on", "off_tokens_per_s": "off"},
    lambda row: row.get("mix") == MIXED and "users" in row,
    is_curve=True,
)
SUITE = Suite("load", run_load, summarise, metrics_of("load"), PLOT)

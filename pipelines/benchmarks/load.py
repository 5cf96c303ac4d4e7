"""The suite `load`: one service under users. Throughput and latencies by the number of users, with speculation and without; the
service's overhead to the first token; and clients that go away half-way.

The load curve: a mix is a list of chat bodies. A run sends each body once, and at least one for each user; every user sends the
next body after an answer has ended. No run shares a cached prefix with another. llama.cpp's own server runs beside, with the
same prompts as token ids, by the same clients, one program at a time. It gets prompts ready, retrieval included, so its time
has no retrieval in it. Both types of weights run, and the faster counts; each slot has room for the longest prompt and its
answer, so nothing is cut.

    python -m pipelines.benchmark --suite load --quick
"""

import asyncio
import itertools
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast

from pipelines.benchmarks.harness import Metric, Plot, Result, Row, Run, Suite, at_least, at_most, equal_to
from pipelines.benchmarks.peers import llama_files, load_peer
from pipelines.benchmarks.users.clients import Answer, chat_body, quantile
from pipelines.benchmarks.users.service import (
    Service,
    backend_of,
    free_port,
    run_clients,
    service_here,
    started,
    timed_answers,
)
from ragspec.config import DEFAULT_TARGET
from ragspec.core import Message, Request, SamplingParams
from ragspec.engine.engine import Engine
from ragspec.errors import EngineError
from ragspec.numerics.attention import PAGE
from ragspec.numerics.threads import num_processors
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
_NUM_KINDS = 4
_SALTS = itertools.count()


def mixes_of(model: str, questions: Sequence[str], seed: int) -> dict[str, list[Body]]:
    """One body of each kind for each question; `MIXED` has all of them."""
    drawn = {"max_tokens": _MAX_TOKENS, "seed": seed}
    free = drawn | {"retrieval": False}
    kinds: dict[str, list[Body]] = {RAG: [], "chat": [], "grammar": [], "creative": []}
    for question in questions:
        follow_up = (question, "I do not know. What do you mean?", f"I mean this: {question}")
        story = f"Write a story that begins like this: {question}"
        kinds[RAG].append(chat_body(model, question, **drawn))
        kinds["chat"].append(chat_body(model, *follow_up, **free))
        kinds["grammar"].append(_correction(model, f"he ask me: {question}", free))
        kinds["creative"].append(chat_body(model, story, temperature=1.0, **free))
    return kinds | {MIXED: [body for group in zip(*kinds.values(), strict=True) for body in group]}


def _correction(model: str, sentence: str, drawn: Mapping[str, Any]) -> Body:
    prediction = {"type": "content", "content": sentence}
    return chat_body(model, GRAMMAR_REQUEST + sentence, prediction=prediction, **drawn)


def sent_by(users: int, mix: str, bodies: Sequence[Body], num_questions: int | None = None) -> list[Body]:
    """The bodies of a run: those of `num_questions` questions (None: all), and at least one for each user.

    A body comes again only where there are more users than bodies.
    """
    num_least = len(bodies) if num_questions is None else num_questions * (_NUM_KINDS if mix == MIXED else 1)
    return list(itertools.islice(itertools.cycle(bodies), max(users, num_least)))


def curve_row(service: Service, mix: str, bodies: Sequence[Body], users: int, num_runs: int, tenant: str = "") -> Row:
    """Medians of runs with speculation (`on_...`) and without (`off_...`). `tenant`: as of `Service.timed`.

    `on_off`: tokens a second with speculation over without; `on_off_p99`: the 99th percentile of the time a token without
    speculation over with. Raises: EngineError.
    """
    runs: dict[bool, list[Row]] = {True: [], False: []}
    for number in range(num_runs):
        for on in (True, False) if number % 2 == 0 else (False, True):
            salt = f"run-{next(_SALTS)}"
            own = [{**body, "speculation": on, "cache_salt": salt} for body in bodies]
            runs[on].append(measured(service.timed(own, users, tenant=tenant)))
    on_medians, off_medians = _medians(runs[True]), _medians(runs[False])
    return {
        "mix": mix,
        "users": users,
        "on_off": on_medians["tokens_per_s"] / off_medians["tokens_per_s"],
        "on_off_p99": off_medians["token_p99_ms"] / on_medians["token_p99_ms"],
        **{f"on_{name}": value for name, value in on_medians.items()},
        **{f"off_{name}": value for name, value in off_medians.items()},
    }


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
        row |= {f"{name}_p{share}_ms": 1e3 * quantile(seconds, share / 100) for share in (50, 99)}
    return row | {"goodput_per_s": sum(good) / wall_s}


def _medians(runs: Sequence[Row]) -> Row:
    return {name: median(run[name] for run in runs) for name in runs[0]}


_PATH = "/v1/completions"
_START_S = 120.0
_PAGE = 256
"""llama.cpp rounds the room of a slot up to so many tokens."""
_NAME = "llama-server"


def llama_server() -> str | None:
    """The program that `make peers` puts beside Python, or one on the path."""
    beside = Path(sys.executable).with_name(_NAME)
    return str(beside) if beside.is_file() else shutil.which(_NAME)


def llama_row(service: Service, bodies: Sequence[Body], users: int, num_runs: int, folder: Path) -> Row:
    """Tokens a second of the faster type of weights, the median over runs. `folder`: keeps the converted weights.

    Raises: ModelError for a target that is no plain Llama, EngineError.
    """
    backend = service.backend
    prompts = prompts_of(service, bodies)
    room = max(len(prompt["prompt"]) + prompt["max_tokens"] for prompt in prompts)
    speeds = list[float]()
    for path in llama_files(load_peer(backend.config.target), folder, backend.target.prompts.tokenizer).values():
        with serving(path, users, room) as url:
            runs = [measured(timed_answers(url, "", _PATH, prompts, users)) for _ in range(num_runs)]
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


@contextmanager
def serving(path: Path, users: int, room: int) -> Iterator[str]:
    """The address of a server with a slot of `room` tokens for each user. Raises: EngineError."""
    program = llama_server()
    assert program is not None, "whoever calls this has asked for the program"
    slot_tokens, port, threads = -(-(room + 1) // _PAGE) * _PAGE, str(free_port()), str(num_processors())
    options = ["-np", str(users), "-c", str(users * slot_tokens), "-t", threads, "-tb", threads, "--no-webui"]
    url, command = f"http://127.0.0.1:{port}", [program, "-m", str(path), "--host", "127.0.0.1", "--port", port]
    with started([*command, *options], f"{url}/health", _START_S):
        yield url


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
    found: Result = {f"{name}_min": min(row[name] for row in curve) for name in ("on_off", "on_off_p99")}
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
    is_curve=True,
)
SUITE = Suite("load", run_load, summarise, METRICS, PLOT)

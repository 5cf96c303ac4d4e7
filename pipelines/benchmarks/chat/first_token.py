"""Time to the first token: the same requests through HTTP, straight to the engine, and through Ray Serve, in turns.

>>> FirstTokens(service, questions, seed=0).measure(concurrency=16, num_runs=3, tick=tick)["gateway_ttft_ms"]
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, cast

from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from ray import serve

from pipelines.benchmarks.clients import Answer, chat_body
from pipelines.benchmarks.service import CHAT, Service, free_port, timed_answers
from ragspec.core import Request, SamplingParams
from ragspec.errors import EngineError
from ragspec.evaluation.report import Result
from ragspec.evaluation.timing import Tick, warm_turns
from ragspec.rag.steps import copy_sources
from services.keys import add_key
from services.serving import build_app
from services.settings import ServiceConfig

_MAX_TOKENS = 8


class FirstTokens:
    """`questions` are sent without passages, so that all ways give the engine the same prompts."""

    def __init__(self, service: Service, questions: Sequence[str], seed: int) -> None:
        self._service, self._questions, self._seed = service, list(questions), seed

    def measure(self, concurrency: int, num_runs: int, tick: Tick) -> Result:
        """Medians over all requests of all runs, in milliseconds; ways take turns, after one uncounted run."""
        ways: dict[str, Callable[[], list[float]]] = {
            "engine": lambda: asyncio.run(self._straight(concurrency)),
            "http": lambda: self._over_http(concurrency, retrieval=False),
            "http_with_retrieval": lambda: self._over_http(concurrency, retrieval=True),
        }
        times = warm_turns(ways, num_runs, tick, f"first tokens, {concurrency} at once")
        medians = {f"{name}_ttft_ms": _median_ms(runs) for name, runs in times.items()}
        added = {
            "gateway_ttft_ms": medians["http_ttft_ms"] - medians["engine_ttft_ms"],
            "retrieval_ttft_ms": medians["http_with_retrieval_ttft_ms"] - medians["http_ttft_ms"],
        }
        return {"concurrency": concurrency, **medians, **added}

    def _over_http(self, concurrency: int, retrieval: bool) -> list[float]:
        model = self._service.backend.model
        bodies = [_body(model, question, self._seed, retrieval) for question in self._questions]
        return _first_s(self._service.timed(bodies, concurrency), CHAT)

    async def _straight(self, concurrency: int) -> list[float]:
        """Send the service's requests straight to the engine, so many at a time."""
        requests = [self._request(question) for question in self._questions]
        waiting, times = iter(requests), list[float]()

        async def client() -> None:
            for request in waiting:
                begin = time.perf_counter()
                # Why the cast: every asynchronous generator can be closed
                async with aclosing(cast(Any, self._service.backend.engine.stream(request))) as stream:
                    texts_s = [time.perf_counter() - begin async for delta in stream if delta.text]
                times.extend(texts_s[:1])

        await asyncio.gather(*(client() for _ in range(concurrency)))
        return times

    def _request(self, question: str) -> Request:
        params = SamplingParams(max_tokens=_MAX_TOKENS, seed=self._seed)
        prompt = self._service.backend.prompts.build(question, (), _MAX_TOKENS)
        return Request(
            uuid.uuid4().hex, prompt.prompt_ids, params, copy_sources(question, ()), next(iter(self._service.keys))
        )


def _body(model: str, question: str, seed: int, retrieval: bool) -> dict[str, Any]:
    fields = {} if retrieval else {"retrieval": False}
    return chat_body(model, question, max_tokens=_MAX_TOKENS, temperature=0.0, seed=seed, **fields)


def _first_s(answers: Sequence[Answer], path: str) -> list[float]:
    """Seconds to each first text. Raises: EngineError for an answer without text."""
    times = [answer["first_s"] for answer in answers if answer["first_s"] is not None]
    if len(times) < len(answers):
        raise EngineError(f"{len(answers) - len(times)} of {len(answers)} answers of {path} had no text")
    return times


_ONE_WORD = json.dumps({"choices": [{"index": 0, "delta": {"content": "a"}}]})


def serve_rows(config: ServiceConfig, questions: Sequence[str], seed: int, num_runs: int, tick: Tick) -> Result:
    """Medians of the time to the first text through Serve, one request at a time, in milliseconds. Needs a running
    Ray.

    Raises: EngineError.
    """
    bodies = [_body(config.model_name, question, seed, retrieval=False) for question in questions]
    with tempfile.TemporaryDirectory(prefix="ragspec-") as folder, _serving(config, Path(folder)) as (url, key):

        def first_s(path: str) -> list[float]:
            return _first_s(timed_answers(url, key, path, bodies, concurrency=1), path)

        ways = {"serve_noop_ms": partial(first_s, "/noop/"), "serve_chat_ms": partial(first_s, CHAT)}
        times = warm_turns(ways, num_runs, tick, "first tokens through Serve")
    return {name: _median_ms(runs) for name, runs in times.items()}


def _median_ms(runs: Sequence[Sequence[float]]) -> float:
    return 1e3 * median(chain.from_iterable(runs))


@contextmanager
def _serving(config: ServiceConfig, folder: Path) -> Iterator[tuple[str, str]]:
    """Serve both applications; yields their address and key."""
    key, _ = add_key(folder / "keys.json", "ann", trusted=True)
    port = free_port()
    settings: dict[str, Any] = config.model_dump(mode="json")
    settings["service"] |= {"keys_file": str(folder / "keys.json"), "data_dir": str(folder)}
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        serve.run(build_app({"config": settings}), route_prefix="/", name="chat")
        serve.run(serve.deployment(serve.ingress(_noop)(Noop)).bind(), route_prefix="/noop", name="noop")
        yield f"http://127.0.0.1:{port}", key
    finally:
        serve.shutdown()


class Noop:
    """Answers with one word."""


def _noop() -> FastAPI:
    app = FastAPI()

    @app.post("/")
    async def one_word() -> StreamingResponse:
        return StreamingResponse(iter([f"data: {_ONE_WORD}\n\n"]), media_type="text/event-stream")

    return app

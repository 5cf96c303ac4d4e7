"""The service as a Ray Serve application, beside a deployment that does nothing: what of the first token's time is Serve's own.

>>> with ray_session("local"):
...     serve_rows(backend.config, questions, seed=0, num_runs=3, tick=tick)["serve_noop_ms"]
"""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from ray import serve

from pipelines.benchmarks.chat.first_token import chat_body
from pipelines.benchmarks.chat.service_here import run_clients
from ragspec.errors import EngineError
from ragspec.evaluation.comparison import Tick
from ragspec.evaluation.report import Result
from services.keys import add_key
from services.serving import build_app
from services.settings import ServiceConfig

_ONE_WORD = json.dumps({"choices": [{"index": 0, "delta": {"content": "a"}}]})


def serve_rows(config: ServiceConfig, questions: Sequence[str], seed: int, num_runs: int, tick: Tick) -> Result:
    """Medians of the time to the first text, one request at a time, in turns; in milliseconds. Needs a Ray that is running.

    Raises: EngineError.
    """
    bodies = [chat_body(config.model_name, question, seed, retrieval=False) for question in questions]
    paths = {"serve_noop_ms": "/noop/", "serve_chat_ms": "/v1/chat/completions"}
    times: dict[str, list[float]] = {name: [] for name in paths}
    with tempfile.TemporaryDirectory(prefix="ragspec-") as folder, _serving(config, Path(folder)) as (url, key):
        for run in range(num_runs + 1):
            for name, path in paths.items():
                orders = {"url": url, "key": key, "path": path, "bodies": bodies, "concurrency": 1}
                answers = run_clients("pipelines.benchmarks.chat.timed_clients", orders)
                if silent := [answer for answer in answers if answer["first_s"] is None]:
                    raise EngineError(f"{len(silent)} of {len(answers)} requests to {path} had no first token")
                times[name] += [answer["first_s"] * 1e3 for answer in answers] if run else []
            tick("first tokens through Serve", run, num_runs)
    return {name: median(taken) for name, taken in times.items()}


@contextmanager
def _serving(config: ServiceConfig, folder: Path) -> Iterator[tuple[str, str]]:
    """Address and key of both applications."""
    key, _ = add_key(folder / "keys.json", "ann", trusted=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
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
    """Answers, and that is all."""


def _noop() -> FastAPI:
    app = FastAPI()

    @app.post("/")
    async def one_word() -> StreamingResponse:
        return StreamingResponse(iter([f"data: {_ONE_WORD}\n\n"]), media_type="text/event-stream")

    return app

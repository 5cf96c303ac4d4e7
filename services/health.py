"""Health checks and metrics over HTTP.

`/health/live`: the process answers. `/health/ready`: the service is not draining, and the engine has just written a token, or is
busy and makes progress. `/metrics`: Prometheus' text format, for trusted keys. Owns the canary request; never restarts anything.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, cast

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from ragspec.core import Request as Generation
from ragspec.core import SamplingParams
from ragspec.engine.engine import Engine
from ragspec.errors import Overloaded, RagspecError
from ragspec.speculation import OFF
from services.backend import ServedModel, ServiceBackend
from services.errors import ApiError
from services.settings import CANARY_S

log = logging.getLogger(__name__)

_FRESH_S = 1.0
CANARY_SALT = "~canary"
"""The tenant of the health check's token."""


class Canary:
    """Generates one token as a health check. Concurrent checks, and checks within a second, share one result."""

    def __init__(self, model: ServedModel) -> None:
        self._engine, self._timeout_s = model.engine, CANARY_S
        self._prompt_ids = tuple(model.prompts.tokenizer("ready?")["input_ids"])
        self._checked_s, self._is_healthy = -_FRESH_S, False
        self._last_progress = -1
        self._task: asyncio.Task[bool] | None = None

    async def check(self) -> bool:
        if self._task is None or self._task.done():
            if time.monotonic() - self._checked_s < _FRESH_S:
                return self._is_healthy
            self._task = asyncio.create_task(self._generate())
        return await asyncio.shield(self._task)

    def _progress(self) -> int:
        """A number that rises while the engine, or any engine of a deployment, makes steps."""
        engine = self._engine
        return engine.load().num_steps if isinstance(engine, Engine) else getattr(engine, "num_heard", lambda: 0)()

    async def _generate(self) -> bool:
        params = SamplingParams(max_tokens=1, ignore_eos=True, seed=0)
        request = Generation(secrets.token_hex(16), self._prompt_ids, params, salt=CANARY_SALT, speculation=OFF)
        self._is_healthy, before = False, self._progress()
        try:
            async with asyncio.timeout(self._timeout_s), aclosing(cast(Any, self._engine.stream(request))) as stream:
                async for delta in stream:
                    self._is_healthy = bool(delta.token_ids)
        except TimeoutError:  # a busy engine that makes progress is healthy
            self._is_healthy = self._progress() > before
        except Overloaded:  # likewise, if it made progress since the last check
            self._is_healthy = before > self._last_progress
        except RagspecError as error:
            log.error("the engine wrote no token", extra={"reason": type(error).__name__})
        self._checked_s, self._last_progress = time.monotonic(), before
        return self._is_healthy


def ready(backend: ServiceBackend) -> Callable[[], Awaitable[bool]]:
    """A check whether every model writes tokens."""
    canaries = [Canary(model) for model in backend.models.values()]

    async def check() -> bool:
        return all(await asyncio.gather(*(canary.check() for canary in canaries)))

    return check


def routes(backend: ServiceBackend) -> APIRouter:
    router, is_ready = APIRouter(tags=["health"]), ready(backend)

    @router.get("/health/live")
    async def live() -> dict[str, str]:
        """The process answers."""
        return {"status": "live"}

    @router.get("/health")
    @router.get("/health/ready")
    async def can_answer() -> JSONResponse:
        """The service can answer questions."""
        if backend.rate_limiter.draining:
            return JSONResponse({"status": "draining"}, 503)
        healthy = await is_ready()
        return JSONResponse({"status": "ready" if healthy else "not ready"}, 200 if healthy else 503)

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        """The counters in Prometheus' text format."""
        if not request.state.caller.trusted:
            raise ApiError(403, "this needs a trusted key")
        return Response(backend.metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return router

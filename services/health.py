"""Whether the service lives, whether it can answer, and what it counted.

`/health/live`: the process answers. `/health/ready`: a token was written just now, through the whole engine, and the service is
not about to stop. `/metrics`: for Prometheus, which asks with a trusted key.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import aclosing
from typing import Any, cast

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from ragspec.core import Request as Generation
from ragspec.core import SamplingParams
from ragspec.engine.engine import Engine
from ragspec.errors import Overloaded, RagspecError
from ragspec.speculation import OFF
from services.backend import Backend
from services.errors import ApiError
from services.logs import log_of
from services.metrics import CONTENT_TYPE

log = log_of(__name__)

_FRESH_S = 1.0
_SALT = "~canary"


class Canary:
    """Asks the engine for one token; whoever asks at once, or within a second, shares the answer."""

    def __init__(self, backend: Backend) -> None:
        self._engine, self._timeout_s = backend.engine, backend.config.service.timeouts.canary_s
        self._prompt_ids = tuple(backend.prompts.tokenizer("ready?")["input_ids"])
        self._asked_at, self._sang = -_FRESH_S, False
        self._last_progress = -1
        self._asking: asyncio.Task[bool] | None = None

    async def sings(self) -> bool:
        if self._asking is None or self._asking.done():
            if time.monotonic() - self._asked_at < _FRESH_S:
                return self._sang
            self._asking = asyncio.create_task(self._ask())
        return await asyncio.shield(self._asking)

    def _progress(self) -> int:
        """What rises as long as the engine, or any of a deployment's, goes on."""
        engine = self._engine
        return engine.load().num_steps if isinstance(engine, Engine) else getattr(engine, "num_heard", lambda: 0)()

    async def _ask(self) -> bool:
        params = SamplingParams(max_tokens=1, ignore_eos=True, seed=0)
        request = Generation(secrets.token_hex(16), self._prompt_ids, params, salt=_SALT, speculation=OFF)
        self._sang, before = False, self._progress()
        try:
            async with asyncio.timeout(self._timeout_s), aclosing(cast(Any, self._engine.stream(request))) as stream:
                async for delta in stream:
                    self._sang = bool(delta.token_ids)
        except TimeoutError:  # Why not an error by itself: a full engine has others before it, and goes on with them
            self._sang = self._progress() > before
        except Overloaded:  # likewise, if it has gone on since the last time
            self._sang = before > self._last_progress
        except RagspecError as error:
            log.error("the engine wrote no token", extra={"reason": type(error).__name__})
        self._asked_at, self._last_progress = time.monotonic(), before
        return self._sang


def routes(backend: Backend) -> APIRouter:
    router, canary = APIRouter(tags=["health"]), Canary(backend)

    @router.get("/health/live")
    async def live() -> dict[str, str]:
        """The process answers."""
        return {"status": "live"}

    @router.get("/health")
    @router.get("/health/ready")
    async def ready() -> JSONResponse:
        """It can answer questions."""
        if backend.gate.draining:
            return JSONResponse({"status": "draining"}, 503)
        is_ready = await canary.sings()
        return JSONResponse({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        """What was counted, in Prometheus' text format."""
        if not request.state.caller.trusted:
            raise ApiError(403, "this needs a trusted key")
        return Response(backend.metrics.text(), media_type=CONTENT_TYPE)

    return router

"""The app: every route behind the guard. The same in one process and in Ray Serve.

>>> uvicorn.run(build_app(backend, KeyFile(Path("keys.json"))))
"""

from __future__ import annotations

from importlib.metadata import version
from typing import NoReturn

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from services import health
from services.auth_middleware import Guard
from services.backend import Backend
from services.errors import ApiError, validation_error
from services.keys import Ring
from services.languagetool import routes as languagetool
from services.openai import routes as openai_routes
from services.request_limits import ClientGone
from services.stores import routes as stores
from services.telemetry import Spans
from services.web import routes as web

_SEEN = ["x-request-id", "retry-after"]


def build_app(backend: Backend, ring: Ring) -> FastAPI:
    """`ring` says who may ask. The backend is not closed with the app."""
    app = FastAPI(title="ragspec", version=version("ragspec"), docs_url=None, redoc_url=None, redirect_slashes=False)
    for part in (health, openai_routes, stores, languagetool, web):
        app.include_router(part.routes(backend))
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _not_valid)
    if backend.telemetry is not None:
        app.add_middleware(Spans, telemetry=backend.telemetry)
    app.add_middleware(Guard, backend=backend, ring=ring)
    if origins := backend.config.service.cors_origins:  # outside the guard: a browser asks for leave without a key
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=_SEEN
        )
    return app


async def _refused(_: Request, error: Exception) -> NoReturn:
    """What the framework refuses: no such route, not by this method; or what it met while it read a form, in its own words."""
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, ApiError | ClientGone):
        raise error.__cause__ from None
    raise ApiError(error.status_code, str(error.detail), headers=error.headers) from None


async def _not_valid(_: Request, error: Exception) -> NoReturn:
    assert isinstance(error, RequestValidationError)
    raise validation_error(error.errors()) from None

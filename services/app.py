"""The FastAPI app: all routes behind the middleware. The same in one process and in Ray Serve.

Owns the order of middleware, and turns FastAPI's own errors into `ApiError`.

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
from services.auth_middleware import AuthMiddleware
from services.backend import ServiceBackend
from services.errors import ApiError, ClientGone, validation_error
from services.keys import KeyStore
from services.languagetool import routes as languagetool
from services.openai import routes as openai_routes
from services.stores import routes as stores
from services.telemetry import TracingMiddleware
from services.web import routes as web

_EXPOSED = ["x-request-id", "retry-after"]


def build_app(backend: ServiceBackend, keys: KeyStore) -> FastAPI:
    """The caller closes the backend."""
    app = FastAPI(title="ragspec", version=version("ragspec"), docs_url=None, redoc_url=None, redirect_slashes=False)
    for part in (openai_routes, health, stores, languagetool, web):  # the busiest are matched first
        app.include_router(part.routes(backend))
    app.add_exception_handler(HTTPException, _raise_http_error)
    app.add_exception_handler(RequestValidationError, _raise_validation_error)
    if backend.telemetry is not None:
        app.add_middleware(TracingMiddleware, telemetry=backend.telemetry)
    app.add_middleware(AuthMiddleware, backend=backend, keys=keys)
    if origins := backend.config.service.cors_origins:  # outermost: browsers send preflight requests without a key
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=_EXPOSED
        )
    return app


async def _raise_http_error(_: Request, error: Exception) -> NoReturn:
    """Unknown routes and methods, and errors that FastAPI wrapped while it read a form."""
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, ApiError | ClientGone):
        raise error.__cause__ from None
    raise ApiError(error.status_code, str(error.detail), headers=error.headers) from None


async def _raise_validation_error(_: Request, error: Exception) -> NoReturn:
    assert isinstance(error, RequestValidationError)
    raise validation_error(error.errors()) from None

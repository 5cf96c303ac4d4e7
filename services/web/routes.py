"""Serves the pages: `GET /` the chat, `GET /grammar` the editor, `GET /web/...` their files.

Owns the headers that keep foreign code off the pages. The pages call the service like any other client. `StaticFiles`
finds files inside the folder only.

    >>> app.include_router(routes(backend))
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from services.backend import ServiceBackend
from services.request_limits import SECURITY_HEADERS

STATIC = Path(__file__).parent / "static"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = SECURITY_HEADERS | {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # browsers ask again each time and get 304 by the ETag
}


def routes(_: ServiceBackend) -> APIRouter:
    router, files = APIRouter(include_in_schema=False), StaticFiles(directory=STATIC)

    async def respond(name: str, request: Request) -> Response:
        try:
            response = await files.get_response(name, request.scope)
        except HTTPException as cause:
            raise HTTPException(404, "there is no such file") from cause
        response.headers.update(HEADERS)
        return response

    @router.api_route("/", methods=["GET", "HEAD"])
    async def index(request: Request) -> Response:
        return await respond("index.html", request)

    @router.api_route("/grammar", methods=["GET", "HEAD"])
    async def grammar(request: Request) -> Response:
        return await respond("grammar.html", request)

    @router.api_route("/web/{path:path}", methods=["GET", "HEAD"])
    async def static(path: str, request: Request) -> Response:
        return await respond(path, request)

    return router

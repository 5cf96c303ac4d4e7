"""Serves the pages: `GET /` the chat, `GET /grammar` the editor, `GET /web/...` their files.

Owns the headers that keep foreign code off the pages. The pages call the service like any other client. Files are read once, and
only their exact names are found, so no path leads out of the folder.

    >>> app.include_router(routes(backend))
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from services.backend import ServiceBackend
from services.request_limits import SECURITY_HEADERS

STATIC = Path(__file__).parent / "static"
_CONTENT_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
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
    router = APIRouter(include_in_schema=False)
    files = {
        path.relative_to(STATIC).as_posix(): path.read_bytes()
        for path in sorted(STATIC.rglob("*"))
        if path.suffix in _CONTENT_TYPES
    }
    tags = {name: f'"{hashlib.sha256(content).hexdigest()[:32]}"' for name, content in files.items()}

    def respond(name: str, request: Request) -> Response:
        if name not in files:
            raise HTTPException(404, "there is no such file")
        headers = HEADERS | {"ETag": tags[name]}
        if tags[name] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(files[name], headers=headers, media_type=_CONTENT_TYPES[Path(name).suffix])

    @router.api_route("/", methods=["GET", "HEAD"])
    async def index(request: Request) -> Response:
        return respond("index.html", request)

    @router.api_route("/grammar", methods=["GET", "HEAD"])
    async def grammar(request: Request) -> Response:
        return respond("grammar.html", request)

    @router.api_route("/web/{path:path}", methods=["GET", "HEAD"])
    async def static(path: str, request: Request) -> Response:
        return respond(path, request)

    return router

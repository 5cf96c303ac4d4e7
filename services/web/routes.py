"""Serves the pages, each file under a policy that lets nothing in which is not served here.

    >>> app.include_router(routes(backend))     # GET / is the chat, GET /grammar the editor, GET /web/... what they consist of

The files are read once. A name that is not among them is not found, so no path leads anywhere else.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from services.backend import Backend

STATIC = Path(__file__).parent / "static"
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-cache",  # asked for again each time, answered by its tag
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    kind: str
    tag: str


def routes(_: Backend) -> APIRouter:
    """The pages need nothing of the backend: they ask the service, like any other client."""
    router, files = APIRouter(include_in_schema=False), _read(STATIC)

    def page(name: str) -> None:
        async def send(request: Request) -> Response:
            return _reply(files[f"{name}.html"], request)

        router.add_api_route("/" if name == "index" else f"/{name}", send, methods=["GET", "HEAD"], name=name)

    for name in sorted(path.removesuffix(".html") for path in files if path.endswith(".html")):
        page(name)

    @router.api_route("/web/{path:path}", methods=["GET", "HEAD"])
    async def part(path: str, request: Request) -> Response:
        if path not in files:
            raise HTTPException(404, "there is no such file")
        return _reply(files[path], request)

    return router


def _read(folder: Path) -> dict[str, _File]:
    """Every file of a known kind, by its path in the folder."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if (kind := _KINDS.get(path.suffix)) is not None:
            content = path.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            files[path.relative_to(folder).as_posix()] = _File(content, f"{kind}; charset=utf-8", tag)
    return files


def _reply(file: _File, request: Request) -> Response:
    headers = HEADERS | {"ETag": file.tag}
    if file.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.kind)

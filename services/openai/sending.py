"""A response that does its work while it is sent.

Everything it holds (a place in the engine, tokens of a key) is taken and given back inside one coroutine, which the guard cancels
when the client leaves; nothing is held between a route and its response. Until its first byte an error still has its own status.

    >>> return Writing(lambda sender: answer(body, sender))
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_JSON = (b"content-type", b"application/json")
_EVENTS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # a proxy in between must not collect what is told step by step
)


class Sender:
    """One HTTP response: either a value as JSON, or events."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def json(self, value: Mapping[str, Any]) -> None:
        content = json.dumps(value).encode()
        headers = [_JSON, (b"content-length", str(len(content)).encode())]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": content})

    async def begin_events(self) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": list(_EVENTS)})

    async def event(self, frame: bytes) -> None:
        await self._send({"type": "http.response.body", "body": frame, "more_body": True})

    async def end(self, frame: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": frame})


class Writing(Response):
    """See the module."""

    def __init__(self, write: Callable[[Sender], Awaitable[None]]) -> None:
        super().__init__()
        self._write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._write(Sender(send))

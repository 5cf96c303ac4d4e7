"""What a client is sent: the headers that every response has, and how it ends if something goes wrong on the way."""

from __future__ import annotations

import asyncio
import json

from starlette.types import Message, Send

from services.errors import ApiError

_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", _CSP.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
)
_STREAM = b"text/event-stream"


class ClientTooSlow(Exception):
    """The client did not take what it was sent."""


class Reply:
    """The response of one request, as the app sends it. States: nothing -> started -> complete."""

    def __init__(self, send: Send, path: str, request_id: str, slow_client_s: float) -> None:
        self._send, self._path, self._slow_client_s = send, path, slow_client_s
        self._own = [*_HEADERS, (b"x-request-id", request_id.encode())]
        self._is_stream = False
        self.status = 0
        self.is_complete = False

    async def send(self, message: Message) -> None:
        """Raises: ClientTooSlow."""
        if message["type"] == "http.response.start":
            message = {**message, "headers": self._with_own(message.get("headers", ()))}
            self.status = message["status"]
        try:
            async with asyncio.timeout(self._slow_client_s):
                await self._send(message)
        except TimeoutError:
            raise ClientTooSlow from None
        self.is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)

    async def fail(self, error: ApiError, close: bool = False) -> None:
        """As the response; in a stream that has begun, as its last event; any other response that has begun just breaks off."""
        if self.is_complete:
            return
        if not self.status:
            headers, content = error.reply(self._path)
            if close:
                headers.append((b"connection", b"close"))
            await self.send({"type": "http.response.start", "status": error.status, "headers": headers})
            await self.send({"type": "http.response.body", "body": content})
        elif self._is_stream:
            event = f"data: {json.dumps(error.body())}\n\n".encode()
            await self.send({"type": "http.response.body", "body": event})

    def _with_own(self, headers: object) -> list[tuple[bytes, bytes]]:
        given = [(bytes(name), bytes(value)) for name, value in headers]  # type: ignore[attr-defined]
        names = {name.lower() for name, _ in given}
        self._is_stream = any(name.lower() == b"content-type" and value.startswith(_STREAM) for name, value in given)
        own = [(name, value) for name, value in self._own if name not in names]
        if b"cache-control" not in names:
            own.append((b"cache-control", b"no-store"))
        return [*given, *own]

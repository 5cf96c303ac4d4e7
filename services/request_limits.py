"""Reads a request and sends its response within their limits: size, time, content type, encoding, JSON depth.

Owns all reading and sending. The whole body is read before the route runs, except uploads of files, which stream. After that the
request watches whether the client is still there. Every response gets security headers and a request id. Never interprets a body
beyond these checks.

    >>> incoming = IncomingRequest(method, path, headers, receive, limits)
    >>> incoming.check_head()
    >>> await incoming.read(30.0, rate_limiter.large_bodies(caller.key_id))
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any, NoReturn
from urllib.parse import parse_qs

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Send

from services.errors import ApiError, ClientGone, ClientTooSlow, is_languagetool
from services.limits import LargeBodies
from services.settings import Limits

_METHODS_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_JSON, _FORM, _FILES = "application/json", "application/x-www-form-urlencoded", "multipart/form-data"
_INLINE_BYTES = 2**17
"""Larger bodies are checked in a thread, so that the event loop goes on streaming other answers."""
_MAX_FIELDS = 64
_MAX_JSON_KEYS = 32_768
"""Keys of all objects of a body. Why so few: validation makes an error of every unknown key."""
_CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "Content-Security-Policy": _CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}
"""Of every response; a route's own headers win."""
_RAW_HEADERS = tuple((name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items())
_CHARSET = re.compile(r"charset[^=;]*=\s*\"?([^\";\s]*)", re.IGNORECASE)


class IncomingRequest:
    """One request. The route reads it through `receive` in place of the server's."""

    def __init__(self, method: str, path: str, headers: Headers, receive: Receive, limits: Limits) -> None:
        self._path, self._headers = path, headers
        self._receive, self._limits = receive, limits
        self._num_bytes, self._deadline_s = 0, 0.0
        self._body: bytes | None = None
        self.is_complete = False  # whether the whole body was received
        self._gone = asyncio.Event()
        self._on_gone: Callable[[], None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._may_have_body = method in _METHODS_WITH_BODY
        self._content_type = headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def is_gone(self) -> bool:
        """Whether the client left."""
        return self._gone.is_set()

    @property
    def has_body(self) -> bool:
        """Whether the head announces a body."""
        return self._headers.get("content-length", "0") != "0" or "transfer-encoding" in self._headers

    def check_head(self) -> None:
        """Refuses a request by its head, before any of its body is read. Raises: ApiError 400, 413, 415."""
        length = self._headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()):
            raise ApiError(400, "Content-Length is no number")
        if int(length[:20]) > self._limits.body_bytes:
            self._refuse_size()
        if not (self._may_have_body and self.has_body):
            return
        allowed = (_FORM if is_languagetool(self._path) else _JSON, _FILES)
        if self._content_type not in allowed:
            raise ApiError(415, f"Content-Type must be {' or '.join(allowed)}")
        charsets = _CHARSET.findall(self._headers.get("content-type", ""))
        if any(charset.lower() not in ("utf-8", "utf8") for charset in charsets):
            raise ApiError(415, "the charset must be UTF-8")  # checks all of them: parsers differ in which one they use

    async def read(self, timeout_s: float, large_bodies: LargeBodies) -> None:
        """Reads the whole body, except of uploads, which get a deadline. A large one is read as fast as `large_bodies` lets it.

        Raises: ApiError 400, 408, 413; ClientGone.
        """
        if self._body is not None:
            return
        if self._content_type == _FILES and self._may_have_body:
            self._deadline_s = asyncio.get_running_loop().time() + timeout_s
            return
        parts = []
        try:
            async with asyncio.timeout(timeout_s) as limit:
                while not self.is_complete:
                    parts.append((await self._next()).get("body", b""))
                    if self._num_bytes > _INLINE_BYTES and (wait_s := large_bodies.wait_s(len(parts[-1]))):
                        limit.reschedule((limit.when() or 0.0) + wait_s)
                        await asyncio.sleep(wait_s)
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {timeout_s:g} s") from None
        self._body = b"".join(parts)
        if self._content_type == _JSON and self._body:
            if len(self._body) > _INLINE_BYTES:
                async with large_bodies.checking:
                    await asyncio.to_thread(check_json, self._body, self._limits)
            else:
                check_json(self._body, self._limits)

    async def form(self) -> dict[str, list[str]]:
        """The fields of a form. Raises: ApiError 400."""
        return await read_form(self._body) if self._content_type == _FORM and self._body else {}

    async def receive(self) -> Message:
        """For the route: the body, then `http.disconnect` when the client leaves."""
        if self._body is not None:
            body, self._body = self._body, None
            self._watch_client()
            return {"type": "http.request", "body": body, "more_body": False}
        if not self.is_complete:
            try:
                async with asyncio.timeout_at(self._deadline_s):
                    message = await self._next()
            except TimeoutError:
                raise ApiError(408, "the upload took too long") from None
            self._watch_client()
            return message
        await self._gone.wait()
        return {"type": "http.disconnect"}

    def when_gone(self, callback: Callable[[], None]) -> None:
        """Calls `callback` if the client leaves before `close`."""
        self._on_gone = callback
        self._watch_client()

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()

    def _watch_client(self) -> None:
        """After the body, the only message left is `http.disconnect`."""
        if self.is_complete and self._watcher is None and self._on_gone is not None:
            self._watcher = asyncio.create_task(self._wait_for_disconnect(self._on_gone))

    async def _wait_for_disconnect(self, callback: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone.set()
        callback()

    async def _next(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._gone.set()
            raise ClientGone
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._limits.body_bytes:
            self._refuse_size()
        self.is_complete = not message.get("more_body", False)
        return message

    def _refuse_size(self) -> NoReturn:
        raise ApiError(413, f"the body is larger than {self._limits.body_bytes} bytes")


class OutgoingResponse:
    """The response to one request. States: not started -> started -> complete."""

    def __init__(self, send: Send, path: str, request_id: str, slow_client_s: float) -> None:
        self._send, self._path, self._slow_client_s = send, path, slow_client_s
        self._headers = (*_RAW_HEADERS, (b"x-request-id", request_id.encode()))
        self._is_event_stream = False
        self.status = 0
        self.is_complete = False

    async def send(self, message: Message) -> None:
        """Raises: ClientTooSlow."""
        if message["type"] == "http.response.start":
            headers = dict(message.get("headers", []))
            own = [header for header in self._headers if header[0] not in headers]
            message = {**message, "headers": [*message.get("headers", []), *own]}
            self._is_event_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
            self.status = message["status"]
        try:
            async with asyncio.timeout(self._slow_client_s):
                await self._send(message)
        except TimeoutError:
            raise ClientTooSlow from None
        self.is_complete = message["type"] == "http.response.body" and not message.get("more_body", False)

    async def fail(self, error: ApiError, *, close: bool = False) -> None:
        """Sends an error: as the response if none has started, as the last event of a stream. Other responses break off."""
        if self.is_complete:
            return
        if not self.status:
            response = error.response(self._path)
            if close:
                response.headers["connection"] = "close"
            start = {"type": "http.response.start", "status": error.status, "headers": response.raw_headers}
            await self.send(start)
            await self.send({"type": "http.response.body", "body": response.body})
        elif self._is_event_stream:
            event = f"data: {json.dumps(error.body())}\n\n".encode()
            await self.send({"type": "http.response.body", "body": event})


def form_fields(raw: bytes) -> dict[str, list[str]]:
    """The fields of a form or a query string. Raises: ApiError 400."""
    try:
        return parse_qs(raw.decode(), keep_blank_values=True, max_num_fields=_MAX_FIELDS, errors="strict")
    except ValueError:
        raise ApiError(400, f"the form is not UTF-8, or has more than {_MAX_FIELDS} fields") from None


async def read_form(raw: bytes) -> dict[str, list[str]]:
    """As `form_fields`; large forms are read in a thread."""
    return await asyncio.to_thread(form_fields, raw) if len(raw) > _INLINE_BYTES else form_fields(raw)


def check_num_items(body: bytes, max_items: int) -> None:
    """Refuses JSON with too many lists, objects and items, or too many keys, without parsing it. Raises: ApiError 413.

    Why: a few megabytes of empty lists become gigabytes of objects.
    """
    pieces = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # the only quotation marks left are the ends of strings
    if pieces.count(b'"') <= 2 * (max_items + _MAX_JSON_KEYS):
        outside = b"".join(pieces.split(b'"')[::2])
        num_items = sum(map(outside.count, (b",", b"[", b"{")))
        if num_items <= max_items and outside.count(b":") <= _MAX_JSON_KEYS:
            return
    raise ApiError(413, f"the body holds more than {max_items} items, or more than {_MAX_JSON_KEYS} keys")


def at_most(max_items: int) -> BeforeValidator:
    """Refuses a longer list or object before its items are validated: each of them might add an error."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > max_items:
            raise PydanticCustomError("too_long", "at most {limit} items are allowed", {"limit": max_items})
        return value

    return BeforeValidator(check)


def check_json(body: bytes, limits: Limits) -> None:
    """Refuses JSON that is unsafe to pass on.

    Raises: ApiError 413 if it has too many items; 400 if it is not UTF-8 or not JSON (NaN and Infinity are not), is nested too
    deep, or has a string with a NUL character or half a surrogate pair.
    """
    check_num_items(body, limits.json_items)
    max_depth = limits.json_depth
    try:
        value = _STRICT_JSON.decode(body.decode("utf-8"))
    except UnicodeDecodeError as cause:
        raise ApiError(400, f"the body is not UTF-8: byte {cause.start}") from None
    except RecursionError:
        raise ApiError(400, f"the body is nested more than {max_depth} deep") from None
    except json.JSONDecodeError as cause:
        raise ApiError(400, f"the body is not JSON: {cause.msg} at character {cause.pos}") from None
    except ValueError as cause:  # a number of thousands of digits
        raise ApiError(400, f"the body is not JSON: {cause}") from None
    level, depth = [value], 0
    while level:
        if depth > max_depth:
            raise ApiError(400, f"the body is nested more than {max_depth} deep")
        children: list[Any] = []
        for each in level:
            if isinstance(each, str):
                _check_string(each)
            elif isinstance(each, dict):
                children += [*each.keys(), *each.values()]
            elif isinstance(each, list):
                children += each
        level, depth = children, depth + 1


def _check_string(text: str) -> None:
    try:
        has_nul = b"\0" in text.encode("utf-8")
    except UnicodeEncodeError:
        raise ApiError(400, "a string of the body holds half a surrogate pair") from None
    if has_nul:
        raise ApiError(400, "a string of the body holds a NUL character")


def _refuse_constant(name: str) -> NoReturn:
    raise ApiError(400, f"the body is not JSON: {name} is no number")


_STRICT_JSON = json.JSONDecoder(parse_constant=_refuse_constant)

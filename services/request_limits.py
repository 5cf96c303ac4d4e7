"""What a client sends: how much, how long it may take, and what no parser should see.

Owns everything that is read of a request. All of it is read before a route is asked, uploads of files apart, which stream; from
then on it listens whether the client is still there.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any, NoReturn
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.types import Message, Receive

from services.errors import LANGUAGETOOL, ApiError
from services.settings import Limits

_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_FORM, _FILES = "application/x-www-form-urlencoded", "multipart/form-data"
_APART_BYTES = 2**17
"""Larger bodies are parsed in a thread: the event loop streams other answers meanwhile."""
_MAX_FIELDS = 64
_CHARSET = re.compile(r"charset[^=;]*=\s*\"?([^\";\s]*)", re.IGNORECASE)


class ClientGone(Exception):
    """The client left before all of its request had come."""


class Incoming:
    """The body of one request. `receive` is what the route gets in place of the server's."""

    def __init__(self, method: str, path: str, headers: Headers, receive: Receive, limits: Limits) -> None:
        self._method, self._path, self._headers = method, path, headers
        self._receive, self._limits = receive, limits
        self._num_bytes, self._deadline = 0, 0.0
        self._held: bytes | None = None
        self.is_complete = False  # all of it has come
        self._gone = asyncio.Event()
        self._on_gone: Callable[[], None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self.kind = headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def is_gone(self) -> bool:
        """Whether the client left."""
        return self._gone.is_set()

    @property
    def has_body(self) -> bool:
        """Whether one is announced."""
        return self._headers.get("content-length", "0") != "0" or "transfer-encoding" in self._headers

    def check_head(self) -> None:
        """What can be refused before a byte is read. Raises: ApiError 400, 413, 415."""
        announced = self._headers.get("content-length")
        if announced is not None and not (announced.isascii() and announced.isdigit()):
            raise ApiError(400, "Content-Length is no number")
        if announced is not None and int(announced[:20]) > self._limits.body_bytes:
            self._too_large()
        if self._method not in _WITH_BODY or not self.has_body:
            return
        spoken = (_FORM, _FILES) if _is_under(self._path, LANGUAGETOOL) else ("application/json", _FILES)
        if self.kind not in spoken:
            raise ApiError(415, f"Content-Type must be {' or '.join(spoken)}")
        charsets = _CHARSET.findall(self._headers.get("content-type", ""))
        if any(
            charset.lower() not in ("utf-8", "utf8") for charset in charsets
        ):  # parsers differ in which of several they take
            raise ApiError(415, "the charset must be UTF-8")

    async def read(self, timeout_s: float) -> None:
        """All of it, unless files are uploaded. Raises: ApiError 400, 408, 413; ClientGone."""
        if self._held is not None:
            return
        if self.kind == _FILES and self._method in _WITH_BODY:
            self._deadline = asyncio.get_running_loop().time() + timeout_s
            return
        parts = []
        try:
            async with asyncio.timeout(timeout_s):
                while not self.is_complete:
                    parts.append((await self._next()).get("body", b""))
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {timeout_s:g} s") from None
        self._held = b"".join(parts)
        if self.kind == "application/json" and self._held:
            check = json_checker(self._held, self._limits.json_depth)
            await (asyncio.to_thread(check) if len(self._held) > _APART_BYTES else _at_once(check))

    def form(self) -> dict[str, list[str]]:
        """The fields of a form. Raises: ApiError 400."""
        return form_fields(self._held) if self.kind == _FORM and self._held else {}

    async def receive(self) -> Message:
        """For the route: the body, then, when that happens, that the client left."""
        if self._held is not None:
            body, self._held = self._held, None
            self._listen()
            return {"type": "http.request", "body": body, "more_body": False}
        if not self.is_complete:
            try:
                async with asyncio.timeout_at(self._deadline):
                    message = await self._next()
            except TimeoutError:
                raise ApiError(408, "the upload took too long") from None
            self._listen()
            return message
        await self._gone.wait()
        return {"type": "http.disconnect"}

    def when_gone(self, call: Callable[[], None]) -> None:
        """Call it if the client leaves before `close`."""
        self._on_gone = call
        self._listen()

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()

    def _listen(self) -> None:
        """Once everything has come: whatever comes next is that the client left."""
        if self.is_complete and self._watcher is None and self._on_gone is not None:
            self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone.set()
        if self._on_gone is not None:
            self._on_gone()

    async def _next(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._gone.set()
            raise ClientGone
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._limits.body_bytes:
            self._too_large()
        self.is_complete = not message.get("more_body", False)
        return message

    def _too_large(self) -> NoReturn:
        raise ApiError(413, f"the body is larger than {self._limits.body_bytes} bytes")


def form_fields(raw: bytes) -> dict[str, list[str]]:
    """Of a form, or of an address behind its question mark. Raises: ApiError 400."""
    try:
        return parse_qs(raw.decode(), keep_blank_values=True, max_num_fields=_MAX_FIELDS, errors="strict")
    except ValueError:
        raise ApiError(400, f"the form is not UTF-8, or has more than {_MAX_FIELDS} fields") from None


def json_checker(body: bytes, max_depth: int) -> Callable[[], None]:
    """What refuses JSON that a route must not see. It raises ApiError 400: not UTF-8, not JSON (NaN and Infinity are not), too
    deep, a NUL character or half a surrogate pair in any string."""

    def check() -> None:
        try:
            value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
        except UnicodeDecodeError as cause:
            raise ApiError(400, f"the body is not UTF-8: byte {cause.start}") from None
        except RecursionError:
            raise ApiError(400, f"the body is nested more than {max_depth} deep") from None
        except json.JSONDecodeError as cause:
            raise ApiError(400, f"the body is not JSON: {cause.msg} at character {cause.pos}") from None
        except ValueError as cause:  # a number of thousands of digits
            raise ApiError(400, f"the body is not JSON: {cause}") from None
        _check_value(value, max_depth)

    return check


def _check_value(value: Any, max_depth: int) -> None:
    level, depth = [value], 0
    while level:
        if depth > max_depth:
            raise ApiError(400, f"the body is nested more than {max_depth} deep")
        below: list[Any] = []
        for each in level:
            if isinstance(each, str):
                _check_string(each)
            elif isinstance(each, dict):
                below += each.keys()
                below += each.values()
            elif isinstance(each, list):
                below += each
        level, depth = below, depth + 1


def _check_string(text: str) -> None:
    if text.isascii():
        if "\0" in text:
            raise ApiError(400, "a string of the body holds a NUL character")
        return
    try:
        encoded = text.encode("utf-8")
    except UnicodeEncodeError:
        raise ApiError(400, "a string of the body holds half a surrogate pair") from None
    if b"\0" in encoded:
        raise ApiError(400, "a string of the body holds a NUL character")


def _refuse_constant(name: str) -> NoReturn:
    raise ApiError(400, f"the body is not JSON: {name} is no number")


def _is_under(path: str, top: str) -> bool:
    return path == top or path.startswith(top + "/")


async def _at_once(call: Callable[[], None]) -> None:
    call()

"""Admits or refuses every request before any route sees it, reads its body, and sends its response.

`AuthMiddleware` owns, in this order: checks of the head (host, size), the key, the rate limits, reading the body, and the time
limit of the route. Every error becomes a response that the client can read. Routes never check keys. `IncomingRequest` reads the
whole body before the route runs, except uploads of files, which stream; after that it watches whether the client is still there.
`OutgoingResponse` adds security headers and the request's id. The limits are in `services.limits`.

Why plain ASGI middleware: responses stream through it, and a client that leaves must cancel the route's task.

    >>> app.add_middleware(AuthMiddleware, backend=backend, keys=KeyFile(Path("keys.json")))
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import NoReturn

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services import limits
from services.backend import ServiceBackend
from services.errors import ApiError, ClientGone, ClientTooSlow, api_error, is_expected, is_languagetool
from services.keys import Caller, KeyStore
from services.logs import current_request
from services.settings import Limits

log = logging.getLogger(__name__)

PUBLIC = frozenset({"/health", "/health/live", "/health/ready", "/v2/healthcheck", "/", "/document", "/grammar"})
"""Paths served without a key, beside the pages' files below `/web/`."""
METRICS = "/metrics"
ANONYMOUS = Caller("~stranger", "~stranger")
"""The caller under /v2 where no key is needed."""
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}
"""Headers of every response; a route's own headers win."""

_RAW_HEADERS = tuple((name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items())
_NO_CALLER = Caller("", "")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
_METHODS_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_JSON, _FORM, _FILES = "application/json", "application/x-www-form-urlencoded", "multipart/form-data"
_CHARSET = re.compile(r"charset[^=;]*=\s*\"?([^\";\s]*)", re.IGNORECASE)


class AuthMiddleware:
    """ASGI middleware around the whole app."""

    def __init__(self, app: ASGIApp, backend: ServiceBackend, keys: KeyStore) -> None:
        self._app, self._keys = app, keys
        self._settings, self._metrics = backend.config.service, backend.metrics
        self._rate_limiter = backend.rate_limiter
        host = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
        names = self._settings.allowed_hosts or ((*_LOCAL_NAMES, host) if self._settings.is_local else ())
        self._hosts = frozenset(name.lower() for name in names)
        self._anonymous_forms: Counter[str] = Counter()  # being read, by network

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":  # there are no websocket routes
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._respond(scope, receive, send)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin_s, headers, path = time.perf_counter(), Headers(scope=scope), str(scope["path"])
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(16)}"
        scope.setdefault("state", {}).update(request_id=request_id, caller=_NO_CALLER, begin=begin_s)
        token = current_request.set(request_id)
        incoming = IncomingRequest(scope["method"], path, headers, receive, self._settings.limits)
        response = OutgoingResponse(send, path, request_id, self._settings.timeouts.client_s)
        try:
            await self._admit(scope, incoming, response)
        except ClientTooSlow:
            self._metrics.aborted("client_too_slow")
        except ClientGone:
            self._metrics.aborted("client_gone")
        except Exception as cause:
            if not is_expected(cause):
                log.error("a request failed", exc_info=cause)
            await self._fail(scope, response, api_error(cause), close=not incoming.is_complete)
        finally:
            incoming.close()
            self._record(scope, response.status, time.perf_counter() - begin_s)
            current_request.reset(token)

    async def _admit(self, scope: Scope, incoming: IncomingRequest, response: OutgoingResponse) -> None:
        """Raises: ApiError, and the route's errors."""
        self._check_head(scope)
        incoming.check_head()
        if is_public(scope["path"]):
            if incoming.has_body:
                raise ApiError(400, "this address takes no body")
            await self._run_route(scope, incoming, response)
            return
        caller = self._keys.caller(_key_of(scope))
        if caller is None and is_languagetool(scope["path"]):
            caller = await self._languagetool_caller(scope, incoming)
        if caller is None:
            self._metrics.rejected("key")
            raise ApiError(401, "a valid key is needed: Authorization: Bearer ...")
        scope["state"]["caller"] = caller
        is_uncounted = caller.trusted and scope["path"] == METRICS  # Why: a full or draining service must stay visible
        with nullcontext() if is_uncounted else self._rate_limiter.admit(caller):
            await self._run_route(scope, incoming, response)

    async def _run_route(self, scope: Scope, incoming: IncomingRequest, response: OutgoingResponse) -> None:
        """Reads the body and runs the route until it ends, its time is up, or its client leaves."""
        timeouts = self._settings.timeouts
        await incoming.read(timeouts.client_s, self._rate_limiter.large_bodies(scope["state"]["caller"].key_id))
        try:
            async with asyncio.timeout(timeouts.request_s) as limit:
                incoming.when_gone(lambda: limit.reschedule(asyncio.get_running_loop().time()))
                await self._app(scope, incoming.receive, response.send)
                incoming.close()
        except TimeoutError:
            incoming.close()
            if not limit.expired():
                raise
            if incoming.gone.is_set():
                self._metrics.aborted("client_gone")
                return
            self._metrics.aborted("timeout")
            raise ApiError(504, f"the answer took longer than {timeouts.request_s:g} s") from None

    def _check_head(self, scope: Scope) -> None:
        """Raises: ApiError 400, 403, 431."""
        num_bytes = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if num_bytes + len(scope.get("raw_path") or b"") + len(scope["query_string"]) > limits.HEADER_BYTES:
            raise ApiError(431, f"the request's head is larger than {limits.HEADER_BYTES} bytes")
        if "\0" in scope["path"] or b"%00" in scope["query_string"]:
            raise ApiError(400, "the address holds a NUL character")
        hosts = [value.decode("latin-1").lower() for name, value in scope["headers"] if name == b"host"]
        if self._hosts and (len(hosts) != 1 or re.sub(r":\d{1,5}$", "", hosts[0]) not in self._hosts):
            # Why: DNS rebinding gives another site's name this machine's address, and its pages could ask here
            raise ApiError(403, "this service is not known by that Host name", code="host_not_allowed")

    async def _languagetool_caller(self, scope: Scope, incoming: IncomingRequest) -> Caller | None:
        """LanguageTool's clients send the key as the field `apiKey`, or cannot send one."""
        if self._settings.is_languagetool_open:
            self._check_origin(Headers(scope=scope))
            return ANONYMOUS
        fields = limits.form_fields(scope["query_string"])
        if "apiKey" not in fields:
            fields = await self._read_anonymous_form(limits.network_of(scope["client"]), incoming)
        return self._keys.caller(fields.get("apiKey", [""])[0])

    def _check_origin(self, headers: Headers) -> None:
        """Keeps other sites' pages from asking through a visitor's browser where no key is needed. Raises: ApiError 403.

        Editors send no origin and browser extensions send another scheme; "null" is a page that hides its origin. Images and
        links of a page are fetched without an origin, but browsers say whose they are in `Sec-Fetch-Site`.
        """
        scheme, _, host = headers.get("origin", "").partition("://")
        is_own = scheme not in ("http", "https", "null") or host == headers.get("host")
        is_foreign = not scheme and headers.get("sec-fetch-site", "").lower() in ("cross-site", "same-site")
        if is_foreign or (not is_own and f"{scheme}://{host}" not in self._settings.allowed_origins):
            raise ApiError(403, "pages of other sites may not ask here", code="origin_not_allowed")

    async def _read_anonymous_form(self, network: str, incoming: IncomingRequest) -> dict[str, list[str]]:
        """Bounded in number: these requests have no key yet, and each may hold megabytes."""
        forms = self._anonymous_forms
        if forms[network] >= limits.MAX_FORMS_PER_NETWORK or forms.total() >= limits.MAX_ANONYMOUS_FORMS:
            self._metrics.rejected("queue")
            raise ApiError(429, "too many forms at once", code="server_overloaded", retry_after_s=1.0)
        forms[network] += 1
        try:
            await incoming.read(self._settings.timeouts.client_s, self._rate_limiter.large_bodies(network))
        finally:
            forms[network] -= 1
            forms += Counter()  # drops zeros
        return await incoming.form()

    async def _fail(self, scope: Scope, response: OutgoingResponse, error: ApiError, close: bool) -> None:
        if error.status in (401, 429):
            name = scope["state"]["caller"].key_id or limits.network_of(scope["client"])
            await asyncio.sleep(self._rate_limiter.refusal_wait_s(name))
        try:
            await response.fail(error, close=close)
        except ClientTooSlow:
            self._metrics.aborted("client_too_slow")

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        method, route = scope["method"], str(getattr(scope.get("route"), "path", "") or "none")
        self._metrics.answered(method, route, status)
        key_id = scope["state"]["caller"].key_id
        extra = {"method": method, "route": route, "status": status, "seconds": round(seconds, 4), "key": key_id}
        log.info("request", extra=extra)


def is_public(path: str) -> bool:
    """Whether anybody may read `path` without a key."""
    return path in PUBLIC or (path.startswith("/web/") and "/../" not in path)


def _key_of(scope: Scope) -> str:
    """The request's key; empty if there is none, or more than one."""
    keys = []
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.decode("latin-1").partition(" ")
            keys.append(key.strip() if scheme.lower() == "bearer" else "")
        elif name == b"x-api-key":
            keys.append(value.decode("latin-1").strip())
    return keys[0] if len(keys) == 1 else ""


class IncomingRequest:
    """One request. The route reads it through `receive` in place of the server's."""

    def __init__(self, method: str, path: str, headers: Headers, receive: Receive, own: Limits) -> None:
        self._path, self._headers = path, headers
        self._receive, self._limits = receive, own
        self._num_bytes, self._deadline_s = 0, 0.0
        self._body: bytes | None = None
        self.is_complete = False  # whether the whole body was received
        self.gone = asyncio.Event()  # set when the client leaves
        self._on_gone: Callable[[], None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._may_have_body = method in _METHODS_WITH_BODY
        self._content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if is_languagetool(path) and self._content_type == _JSON:
            self._content_type = _FORM  # Why: LTeX calls its forms JSON, and LanguageTool reads every body as a form

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

    async def read(self, timeout_s: float, large_bodies: limits.LargeBodies) -> None:
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
                    if self._num_bytes > limits.INLINE_BYTES and (wait_s := large_bodies.wait_s(len(parts[-1]))):
                        limit.reschedule((limit.when() or 0.0) + wait_s)
                        await asyncio.sleep(wait_s)
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {timeout_s:g} s") from None
        self._body = b"".join(parts)
        if self._content_type == _JSON and self._body:
            if len(self._body) > limits.INLINE_BYTES:
                async with large_bodies.checking:
                    await asyncio.to_thread(limits.check_json, self._body)
            else:
                limits.check_json(self._body)

    async def form(self) -> dict[str, list[str]]:
        """The fields of a form. Raises: ApiError 400."""
        return await limits.read_form(self._body) if self._content_type == _FORM and self._body else {}

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
        await self.gone.wait()
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
        self.gone.set()
        callback()

    async def _next(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.gone.set()
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

    def __init__(self, send: Send, path: str, request_id: str, client_s: float) -> None:
        self._send, self._path, self._client_s = send, path, client_s
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
            async with asyncio.timeout(self._client_s):
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

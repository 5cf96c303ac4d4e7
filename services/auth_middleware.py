"""The one way in. Every request goes through here before any route, and none is served that is not let in.

In this order: its head (host, size), who asks, how much is asked at once, its body; then the route, for a limited time and only
as long as its client is there. Whatever goes wrong becomes the error that a client can read.

Plain ASGI on purpose: responses stream through, and a client that leaves cancels the route's task, whatever the route is.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from services.backend import Backend
from services.errors import LANGUAGETOOL, ApiError, api_error, is_known
from services.keys import Caller, Ring
from services.logs import current_request, log_of
from services.replies import ClientTooSlow, Reply
from services.request_limits import ClientGone, Incoming, form_fields

log = log_of(__name__)

PUBLIC = ("/health", "/health/live", "/health/ready", "/v2/healthcheck", "/", "/grammar", "/web/*")
"""All that is served to those without a key; `*` stands for any name below."""
STRANGER = Caller("~stranger", "~stranger")
"""Who asks under /v2 where nobody is asked for a key."""

_PLAIN_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
_NO_CALLER = Caller("", "")
_MOST_STRANGERS = 32


class Guard:
    """ASGI middleware around the whole app."""

    def __init__(self, app: ASGIApp, backend: Backend, ring: Ring) -> None:
        self._app, self._ring = app, ring
        self._settings, self._gate, self._metrics = backend.config.service, backend.gate, backend.metrics
        host = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
        names = self._settings.allowed_hosts or ((*_LOCAL_NAMES, host) if self._settings.is_local else ())
        self._num_strangers = 0
        self._hosts = frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":  # there are none
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin, headers, path = time.perf_counter(), Headers(scope=scope), str(scope["path"])
        given = headers.get("x-request-id", "")
        request_id = given if _PLAIN_ID.fullmatch(given) else f"req_{secrets.token_hex(16)}"
        visit = scope.setdefault("state", {})
        visit["request_id"], visit["caller"], visit["begin"] = request_id, _NO_CALLER, begin
        token = current_request.set(request_id)
        timeouts = self._settings.timeouts
        incoming = Incoming(scope["method"], path, headers, receive, self._settings.limits)
        reply = Reply(send, path, request_id, timeouts.slow_client_s)
        try:
            await self._admitted(scope, incoming, reply)
        except ClientTooSlow:
            self._metrics.aborted("client_too_slow")
        except ClientGone:
            self._metrics.aborted("client_gone")
        except Exception as cause:
            if not is_known(cause):
                log.error("a request failed", exc_info=cause)
            await self._fail(reply, api_error(cause), close=not incoming.is_complete)
        finally:
            incoming.close()
            self._note(scope, reply, time.perf_counter() - begin)
            current_request.reset(token)

    async def _admitted(self, scope: Scope, incoming: Incoming, reply: Reply) -> None:
        """Raises: ApiError, and what the route raises."""
        self._check_head(scope)
        incoming.check_head()
        if is_public(scope["path"]):
            if incoming.has_body:
                raise ApiError(400, "nothing is to be sent here")
            await incoming.read(self._settings.timeouts.upload_s)
            await self._timed(scope, incoming, reply)
            return
        caller = self._known(_presented(scope))
        if caller is None and _speaks_languagetool(scope["path"]):
            caller = await self._by_form(scope, incoming)
        if caller is None:
            self._metrics.rejected("key")
            raise ApiError(401, "a valid key is needed: Authorization: Bearer ...")
        scope["state"]["caller"] = caller
        with self._gate.request(caller):
            await incoming.read(self._settings.timeouts.upload_s)
            await self._timed(scope, incoming, reply)

    async def _timed(self, scope: Scope, incoming: Incoming, reply: Reply) -> None:
        """The route, until it is done, its time is up, or its client has left."""
        try:
            async with asyncio.timeout(self._settings.timeouts.request_s) as limit:
                incoming.when_gone(lambda: limit.reschedule(asyncio.get_running_loop().time()))
                await self._app(scope, incoming.receive, reply.send)
                incoming.close()
        except TimeoutError:
            incoming.close()  # it listens no longer than there is something to give up
            if not limit.expired():
                raise
            if incoming.is_gone:
                self._metrics.aborted("client_gone")
                return
            self._metrics.aborted("timeout")
            raise ApiError(504, f"the answer took longer than {self._settings.timeouts.request_s:g} s") from None

    def _check_head(self, scope: Scope) -> None:
        """Raises: ApiError 400, 403, 431."""
        size = sum(len(name) + len(value) + 4 for name, value in scope["headers"]) + len(scope.get("raw_path") or b"")
        if size + len(scope["query_string"]) > self._settings.limits.header_bytes:
            raise ApiError(431, f"the request's head is larger than {self._settings.limits.header_bytes} bytes")
        if "\0" in scope["path"] or b"%00" in scope["query_string"]:
            raise ApiError(400, "the address holds a NUL character")
        hosts = [value.decode("latin-1").lower() for name, value in scope["headers"] if name == b"host"]
        if self._hosts and (len(hosts) != 1 or re.sub(r":\d{1,5}$", "", hosts[0]) not in self._hosts):
            # Why: a page elsewhere can give its own name this machine's address, and ask with its visitor's browser
            raise ApiError(403, "this service is not known by that Host name", code="host_not_allowed")

    def _known(self, key: str) -> Caller | None:
        return self._ring.caller(key) if key else None

    async def _by_form(self, scope: Scope, incoming: Incoming) -> Caller | None:
        """LanguageTool's clients send their key as a field, or cannot send one."""
        if self._settings.is_languagetool_open:
            self._check_origin(Headers(scope=scope))
            return STRANGER
        fields = form_fields(scope["query_string"])
        if "apiKey" not in fields:
            fields = await self._form_of_stranger(incoming)
        return self._known(fields.get("apiKey", [""])[0])

    def _check_origin(self, headers: Headers) -> None:
        """Where nobody is asked for a key, pages elsewhere must not ask through their visitors' browsers. Raises: ApiError 403.

        Editors and extensions of browsers send no origin, or one that is no page's; "null" is that of a page that hides it.
        """
        scheme, _, page = headers.get("origin", "").partition("://")
        own = scheme not in ("http", "https", "null") or page == headers.get("host")
        if not own and f"{scheme}://{page}" not in self._settings.cors_origins:
            raise ApiError(403, "pages of other sites may not ask here", code="origin_not_allowed")

    async def _form_of_stranger(self, incoming: Incoming) -> dict[str, list[str]]:
        """Why only so many at once: nobody has been let in yet, and every one may be megabytes."""
        if self._num_strangers >= _MOST_STRANGERS:
            self._metrics.rejected("queue")
            raise ApiError(429, "too many forms at once", code="server_overloaded", retry_after_s=1.0)
        self._num_strangers += 1
        try:
            await incoming.read(self._settings.timeouts.upload_s)
        finally:
            self._num_strangers -= 1
        return incoming.form()

    async def _fail(self, reply: Reply, error: ApiError, close: bool) -> None:
        try:
            await reply.fail(error, close)
        except ClientTooSlow:
            self._metrics.aborted("client_too_slow")

    def _note(self, scope: Scope, reply: Reply, seconds: float) -> None:
        route: Any = scope.get("route")
        pattern, caller = str(getattr(route, "path", "") or "none"), scope["state"]["caller"]
        self._metrics.answered(scope["method"], pattern, reply.status)
        log.info(
            "request",
            extra={
                "method": scope["method"],
                "route": pattern,
                "status": reply.status,
                "seconds": round(seconds, 4),
                "key": caller.key_id,
            },
        )


def is_public(path: str) -> bool:
    return any(
        path == known or (known.endswith("/*") and path.startswith(known[:-1]) and "/../" not in path)
        for known in PUBLIC
    )


def _speaks_languagetool(path: str) -> bool:
    return path == LANGUAGETOOL or path.startswith(LANGUAGETOOL + "/")


def _presented(scope: Scope) -> str:
    """The key that a request comes with; empty: none, or more than one."""
    keys = []
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.decode("latin-1").partition(" ")
            keys.append(key.strip() if scheme.lower() == "bearer" else "")
        elif name == b"x-api-key":
            keys.append(value.decode("latin-1").strip())
    return keys[0] if len(keys) == 1 else ""

"""Admits or refuses every request before any route sees it.

Owns, in this order: checks of the head (host, size), the key, the rate limits, reading the body, and the time limit of the route.
Every error becomes a response that the client can read. Routes never check keys.

Plain ASGI middleware, because responses stream through it and a client that leaves must cancel the route's task.

    >>> app.add_middleware(AuthMiddleware, backend=backend, keys=KeyFile(Path("keys.json")))
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections import Counter

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from services.backend import ServiceBackend
from services.errors import ApiError, ClientGone, ClientTooSlow, api_error, is_expected, is_languagetool
from services.keys import Caller, KeyStore
from services.limits import network_of
from services.logs import current_request
from services.request_limits import IncomingRequest, OutgoingResponse, form_fields

log = logging.getLogger(__name__)

PUBLIC = ("/health", "/health/live", "/health/ready", "/v2/healthcheck", "/", "/grammar", "/web/*")
"""Paths served without a key; `*` stands for any path below."""
METRICS = "/metrics"
ANONYMOUS = Caller("~stranger", "~stranger")
"""The caller under /v2 where no key is needed."""

_NO_CALLER = Caller("", "")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
_MAX_ANONYMOUS_FORMS = 64
_MAX_FORMS_PER_ADDRESS = 8


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
        response = OutgoingResponse(send, path, request_id, self._settings.timeouts.slow_client_s)
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
        caller = self._caller(_key_of(scope))
        if caller is None and is_languagetool(scope["path"]):
            caller = await self._languagetool_caller(scope, incoming)
        if caller is None:
            self._metrics.rejected("key")
            raise ApiError(401, "a valid key is needed: Authorization: Bearer ...")
        scope["state"]["caller"] = caller
        if caller.trusted and scope["path"] == METRICS:  # Why uncounted: a full or draining service must stay visible
            await self._run_route(scope, incoming, response)
            return
        with self._rate_limiter.admit(caller):
            await self._run_route(scope, incoming, response)

    async def _run_route(self, scope: Scope, incoming: IncomingRequest, response: OutgoingResponse) -> None:
        """Reads the body and runs the route until it ends, its time is up, or its client leaves."""
        timeouts = self._settings.timeouts
        await incoming.read(timeouts.upload_s, self._rate_limiter.large_bodies(scope["state"]["caller"].key_id))
        try:
            async with asyncio.timeout(timeouts.request_s) as limit:
                incoming.when_gone(lambda: limit.reschedule(asyncio.get_running_loop().time()))
                await self._app(scope, incoming.receive, response.send)
                incoming.close()
        except TimeoutError:
            incoming.close()
            if not limit.expired():
                raise
            if incoming.is_gone:
                self._metrics.aborted("client_gone")
                return
            self._metrics.aborted("timeout")
            raise ApiError(504, f"the answer took longer than {timeouts.request_s:g} s") from None

    def _check_head(self, scope: Scope) -> None:
        """Raises: ApiError 400, 403, 431."""
        max_bytes = self._settings.limits.header_bytes
        num_bytes = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if num_bytes + len(scope.get("raw_path") or b"") + len(scope["query_string"]) > max_bytes:
            raise ApiError(431, f"the request's head is larger than {max_bytes} bytes")
        if "\0" in scope["path"] or b"%00" in scope["query_string"]:
            raise ApiError(400, "the address holds a NUL character")
        hosts = [value.decode("latin-1").lower() for name, value in scope["headers"] if name == b"host"]
        if self._hosts and (len(hosts) != 1 or re.sub(r":\d{1,5}$", "", hosts[0]) not in self._hosts):
            # Why: DNS rebinding gives another site's name this machine's address, and its pages could ask here
            raise ApiError(403, "this service is not known by that Host name", code="host_not_allowed")

    def _caller(self, key: str) -> Caller | None:
        return self._keys.caller(key) if key else None

    async def _languagetool_caller(self, scope: Scope, incoming: IncomingRequest) -> Caller | None:
        """LanguageTool's clients send the key as the field `apiKey`, or cannot send one."""
        if self._settings.is_languagetool_open:
            self._check_origin(Headers(scope=scope))
            return ANONYMOUS
        fields = form_fields(scope["query_string"])
        if "apiKey" not in fields:
            fields = await self._read_anonymous_form(network_of(scope["client"]), incoming)
        return self._caller(fields.get("apiKey", [""])[0])

    def _check_origin(self, headers: Headers) -> None:
        """Keeps other sites' pages from asking through a visitor's browser where no key is needed. Raises: ApiError 403.

        Editors send no origin and browser extensions send another scheme; "null" is a page that hides its origin. Images and
        links of a page are fetched without an origin, but browsers say whose they are in `Sec-Fetch-Site`.
        """
        scheme, _, host = headers.get("origin", "").partition("://")
        is_own = scheme not in ("http", "https", "null") or host == headers.get("host")
        is_foreign = not scheme and headers.get("sec-fetch-site", "").lower() in ("cross-site", "same-site")
        if is_foreign or (not is_own and f"{scheme}://{host}" not in self._settings.cors_origins):
            raise ApiError(403, "pages of other sites may not ask here", code="origin_not_allowed")

    async def _read_anonymous_form(self, network: str, incoming: IncomingRequest) -> dict[str, list[str]]:
        """Bounded in number: these requests have no key yet, and each may hold megabytes."""
        forms = self._anonymous_forms
        if forms[network] >= _MAX_FORMS_PER_ADDRESS or forms.total() >= _MAX_ANONYMOUS_FORMS:
            self._metrics.rejected("queue")
            raise ApiError(429, "too many forms at once", code="server_overloaded", retry_after_s=1.0)
        forms[network] += 1
        try:
            await incoming.read(self._settings.timeouts.upload_s, self._rate_limiter.large_bodies(network))
        finally:
            forms[network] -= 1
            forms += Counter()  # drops zeros
        return await incoming.form()

    async def _fail(self, scope: Scope, response: OutgoingResponse, error: ApiError, close: bool) -> None:
        if error.status in (401, 429):
            name = scope["state"]["caller"].key_id or network_of(scope["client"])
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
    return any(
        path == known or (known.endswith("/*") and path.startswith(known[:-1]) and "/../" not in path)
        for known in PUBLIC
    )


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

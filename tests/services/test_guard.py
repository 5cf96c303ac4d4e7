"""The one way in: nobody without a key, nothing too large, too slow or malformed, and nothing of a client that left."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any, cast

import pytest
from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from raw_http import ask, exchange, head, opened
from service_parts import Service, Serving, soon
from starlette.types import Send

from services.app import build_app
from services.errors import ApiError
from services.guard import PUBLIC, is_public
from services.keys import OneKey

SLOW = {"service.timeouts.header_s": 0.4, "service.timeouts.upload_s": 0.4, "service.timeouts.request_s": 1.5}


@pytest.fixture(scope="module")
def hasty(serving: Serving) -> Iterator[Service]:
    """With little patience, and small bodies."""
    with serving(**SLOW, **{"service.limits.body_bytes": 8192}) as running:
        yield running


def bearer(service: Service) -> str:
    return f"Authorization: Bearer {service.keys.trusted}"


def aborts(service: Service, reason: str) -> float:
    """How many answers were given up for that reason."""
    line = f'ragspec_aborts_total{{model_name="tiny",reason="{reason}"}} '
    return sum(float(row.removeprefix(line)) for row in service.metrics() if row.startswith(line))


def every_route(service: Service) -> list[tuple[str, str]]:
    """(method, path) of every operation, from the service's own description of itself."""
    with service.client() as client:
        described = client.get("/openapi.json").json()
    return [(method, path) for path, methods in described["paths"].items() for method in methods]


def test_every_route_but_the_named_ones_needs_a_key(hasty: Service) -> None:
    """A route that somebody adds is open until somebody notices."""
    operations = [*every_route(hasty), ("get", "/openapi.json"), ("get", "/nothing"), ("options", "/v1/models")]
    assert len(operations) > 4
    with hasty.client("") as stranger, hasty.client("rs-wrong") as liar:
        for method, path in operations:
            if is_public(path) or path.startswith("/v2/healthcheck"):
                continue
            for client in (stranger, liar):
                reply = client.request(method, path.replace("{", "").replace("}", ""))
                assert reply.status_code == 401, (method, path)
                assert reply.headers["www-authenticate"] == "Bearer"


def test_the_public_paths_are_these() -> None:
    """A wildcard lets more through than it was meant for."""
    assert set(PUBLIC) == {"/health", "/health/live", "/health/ready", "/v2/healthcheck", "/", "/grammar", "/web/*"}
    assert is_public("/web/chat.js") and not is_public("/web/../v1/models")
    assert not any(
        map(is_public, ("/health/", "/healthx", "/v1/models", "/metrics", "//", "/web", "/v2/healthcheck/x"))
    )


@pytest.mark.parametrize(
    "lines",
    [
        ("Authorization: {key}",),
        ("Authorization: Basic {key}",),
        ("Authorization: Bearer",),
        ("Authorization: Bearer {key}x",),
        ("Authorization: Bearer {key}", "Authorization: Bearer {key}"),
        ("X-Api-Key: {key}", "Authorization: Bearer wrong"),
        ("Authorization: Bearer \xff\xfe",),
    ],
)
def test_a_key_that_is_not_plainly_given_is_none(hasty: Service, lines: tuple[str, ...]) -> None:
    """Two parts of a system read two different keys out of one request; or a header breaks the comparison."""
    filled = [line.replace("{key}", hasty.keys.trusted) for line in lines]
    assert ask(hasty.url, head("GET", "/v1/models", *filled)).status == 401


@pytest.mark.parametrize("line", ["Authorization: bearer {key}", "X-Api-Key: {key}"])
def test_a_key_may_come_in_either_header(hasty: Service, line: str) -> None:
    """Clients of other services' protocols are refused with a right key."""
    assert ask(hasty.url, head("GET", "/v1/models", line.replace("{key}", hasty.keys.trusted))).status == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "localhost:80:80", "127.0.0.2", ""])
def test_a_local_service_answers_to_local_names_only(hasty: Service, host: str) -> None:
    """A page elsewhere gives its own name this machine's address, and reads answers with its visitor's browser."""
    reply = ask(hasty.url, head("GET", "/health/live", host=host))
    assert (reply.status, reply.json()["error"]["code"]) == (403, "host_not_allowed")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000"])
def test_local_names_with_any_port_are_known(hasty: Service, host: str) -> None:
    """A forwarded port is refused."""
    assert ask(hasty.url, head("GET", "/health/live", host=host)).status == 200


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"model": "tiny", ', "not JSON"),
        (b"", ""),
        (b'{"model": "t\xffny"}', "not UTF-8: byte 12"),
        (b'{"model": "\xed\xa0\x80"}', "not UTF-8"),
        (b'{"model": "\\ud800"}', "half a surrogate pair"),
        (b'{"\\udfff": 1}', "half a surrogate pair"),
        (b'{"model": "a\\u0000b"}', "NUL"),
        (b'{"model": "\xc3\xa9\\u0000"}', "NUL"),
        (b'{"model": "a\x00b"}', "not JSON"),
        (b'{"temperature": NaN}', "NaN is no number"),
        (b'{"temperature": -Infinity}', "is no number"),
        (b'{"seed": ' + b"1" * 3000 + b"9" * 1090 + b"}", ""),
        (b'{"messages": ' + b"[" * 65 + b"]" * 65 + b"}", "nested more than 64 deep"),
        (b"[" * 4000, "nested more than 64 deep"),
        (b'{"a":' * 700 + b"1" + b"}" * 700, "nested more than 64 deep"),
        (b"[]", ""),
        (b"null", ""),
        (b'"text"', ""),
    ],
)
def test_a_malformed_body_is_the_client_s_mistake(hasty: Service, body: bytes, said: str) -> None:
    """A tokenizer, a database or the reply itself breaks on what a client sent: 500."""
    reply = ask(
        hasty.url,
        head(
            "POST",
            "/v1/chat/completions",
            bearer(hasty),
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ),
        body,
    )
    error = reply.json()["error"]
    assert (reply.status, error["type"]) == (400, "invalid_request_error"), error
    assert said in error["message"]


def test_a_body_of_another_kind_is_refused_as_such(hasty: Service) -> None:
    """Text that a page elsewhere may post without asking is read as JSON."""
    with hasty.client() as client:
        for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
            reply = client.post("/v1/chat/completions", content=b"{}", headers={"Content-Type": kind})
            assert reply.status_code == 415, kind
        reply = client.post("/v2/check", content=b"{}", headers={"Content-Type": "application/json"})
        assert reply.status_code == 415 and reply.text.startswith("Error: ")


def test_a_body_that_is_announced_too_large_is_refused_unread(hasty: Service) -> None:
    """Ten gigabytes are read before they are refused."""
    lines = (bearer(hasty), "Content-Type: application/json", "Content-Length: 10000000000")
    reply = ask(hasty.url, head("POST", "/v1/chat/completions", *lines))
    assert (reply.status, reply.json()["error"]["code"]) == (413, "request_too_large")


def test_a_body_without_a_length_is_counted_as_it_comes(hasty: Service) -> None:
    """A body in chunks has no length to refuse it by, and fills the memory."""
    lines = (bearer(hasty), "Content-Type: application/json", "Transfer-Encoding: chunked")
    chunk = b"400\r\n" + b" " * 1024 + b"\r\n"
    reply = ask(hasty.url, head("POST", "/v1/chat/completions", *lines), *[chunk] * 10)
    assert reply.status == 413


def test_files_are_counted_as_they_come_too(hasty: Service) -> None:
    """An upload streams past the limit that other bodies have."""
    with hasty.client() as client:
        reply = client.post(
            "/v1/files", files={"file": ("a.txt", b"x" * 9000, "text/plain")}, data={"purpose": "assistants"}
        )
    assert reply.status_code == 413


@pytest.mark.parametrize("lengths", [("-1",), ("abc",), ("1e3",), ("5", "6"), ("9" * 400,)])
def test_a_length_that_is_none_is_refused(hasty: Service, lengths: tuple[str, ...]) -> None:
    """Two readers of one connection see two different requests."""
    lines = (bearer(hasty), "Content-Type: application/json", *(f"Content-Length: {n}" for n in lengths))
    assert ask(hasty.url, head("POST", "/v1/chat/completions", *lines), b"{}").status in (400, 413)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"a" * 40_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"X-%d: 1\r\n" % n for n in range(4000)) + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 100,
        b"GET / HTTP/1.1\r\nHost: localhost\r\nBad Header: 1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\0b\r\n\r\n",
        b"get\0 / HTTP/1.1\r\n\r\n",
        b"\r\n\r\n" * 10_000,
    ],
)
def test_what_is_no_http_or_too_large_a_head_ends_the_connection(hasty: Service, request_bytes: bytes) -> None:
    """One request with a giant header takes the memory of the process; one that is no HTTP breaks the server's loop."""
    assert ask(hasty.url, request_bytes).status in (0, 400, 431)
    assert ask(hasty.url, head("GET", "/health/live")).status == 200


@pytest.mark.parametrize(
    "path", ["/v1/files/a%00b", "/v1/files?after=%00", "/v1/files/%ff%fe", "/v1/files/" + "a" * 9000]
)
def test_an_odd_address_is_the_client_s_mistake(hasty: Service, path: str) -> None:
    """A path with a NUL character reaches a database or a file system."""
    assert ask(hasty.url, head("GET", path, bearer(hasty))).status in (400, 404)


def test_a_head_that_does_not_come_ends_the_connection(hasty: Service) -> None:
    """Connections on which nothing, or a byte now and then, comes use up all there are."""
    begin = time.monotonic()
    with opened(hasty.url) as silent, opened(hasty.url) as slow:
        slow.sendall(b"GET /health/live HTTP/1.1\r\nHost: loc")
        assert exchange(silent, ()).status == exchange(slow, ()).status == 0
    assert time.monotonic() - begin < 20.0


def test_a_second_head_on_a_connection_has_to_come_in_time_as_well(hasty: Service) -> None:
    """Only the first request of a connection is watched."""
    with opened(hasty.url) as connection:
        connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200" in connection.recv(65536)
        connection.sendall(b"GET /health")
        assert exchange(connection, ()).status == 0


def test_a_body_that_does_not_come_is_given_up(hasty: Service) -> None:
    """A client that announces a body and sends none keeps its place at the gate for ever."""
    lines = (bearer(hasty), "Content-Type: application/json", "Content-Length: 100")
    reply = ask(hasty.url, head("POST", "/v1/chat/completions", *lines), b"{")
    assert (reply.status, reply.json()["error"]["code"]) == (408, "timeout")
    assert hasty.backend.gate.running == 0


def test_a_client_that_leaves_while_it_sends_leaves_nothing_behind(hasty: Service) -> None:
    """Half a body is handed to a route, or the place at the gate is never given back."""
    with opened(hasty.url) as connection:
        lines = (bearer(hasty), "Content-Type: application/json", "Content-Length: 100")
        connection.sendall(head("POST", "/v1/chat/completions", *lines) + b"{")
    assert soon(lambda: not hasty.backend.gate.running and aborts(hasty, "client_gone") == 1)


def test_every_response_is_named_and_guarded(hasty: Service) -> None:
    """A browser runs what a response was not meant to be; an error cannot be found in the log."""
    with hasty.client() as client:
        replies = [client.get(path) for path in ("/health/live", "/v1/models", "/nothing", "/", "/metrics")]
        replies.append(client.post("/v1/chat/completions", content=b"{", headers={"Content-Type": "application/json"}))
    for reply in replies:
        assert reply.headers["x-request-id"] and reply.headers["x-content-type-options"] == "nosniff"
        policy = reply.headers["content-security-policy"]
        assert "unsafe-inline" not in policy and "frame-ancestors 'none'" in policy and "default-src 'none'" in policy
        assert reply.headers["referrer-policy"] == "no-referrer" and "server" not in reply.headers
    assert len({reply.headers["x-request-id"] for reply in replies}) == len(replies)


@pytest.mark.parametrize(
    ("given", "kept"),
    [("abc-1.2_3", True), ("a" * 64, True), ("a" * 65, False), ("a b", False), ("<b>", False), ("", False)],
)
def test_a_caller_s_request_id_is_kept_if_it_is_short_and_plain(hasty: Service, given: str, kept: bool) -> None:
    """Lines of a log are forged through an id."""
    with hasty.client() as client:
        answered = client.get("/health/live", headers={"X-Request-ID": given}).headers["x-request-id"]
    assert (answered == given) is kept


def test_browsers_of_listed_pages_may_ask_and_others_may_not(serving: Serving) -> None:
    """Any page that a user visits asks the service with the key that the browser holds; or the listed ones cannot."""
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    with serving(**{"service.cors_origins": ["https://app.example"]}) as service, service.client("") as client:
        known = client.options("/v1/chat/completions", headers={"Origin": "https://app.example", **asked})
        assert known.status_code == 200 and known.headers["access-control-allow-origin"] == "https://app.example"
        other = client.options("/v1/chat/completions", headers={"Origin": "https://evil.example", **asked})
        assert "access-control-allow-origin" not in other.headers
        refused = client.post("/v1/chat/completions", headers={"Origin": "https://app.example"})
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://app.example"


def test_without_a_list_no_other_page_may_ask(hasty: Service) -> None:
    """The default lets every page read answers."""
    with hasty.client() as client:
        reply = client.get("/v1/models", headers={"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in reply.headers


class Closing(StreamingResponse):
    """Ends what writes it however it ends itself; by itself that is left to the garbage collector."""

    async def stream_response(self, send: Send) -> None:
        async with aclosing(cast(Any, self.body_iterator)):
            await super().stream_response(send)


class Probe:
    """Routes that do what real ones do at their worst, and notes of how they ended."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.how = ""

    def routes(self) -> APIRouter:
        router = APIRouter()

        @router.post("/probe/wait")
        async def wait(request: Request) -> dict[str, str]:
            try:
                await asyncio.sleep(20.0)
            except asyncio.CancelledError:
                self.how = "cancelled"
                self.ended.set()
                raise
            return {}

        @router.post("/probe/break")
        async def fail(request: Request) -> dict[str, str]:
            raise RuntimeError("a secret of the user")

        @router.post("/probe/stream/{how}")
        async def stream(how: str) -> StreamingResponse:
            return Closing(self.pieces(how), media_type="text/event-stream")

        return router

    async def pieces(self, how: str) -> AsyncIterator[str]:
        try:
            yield "data: {}\n\n"
            if how == "breaks":
                raise RuntimeError("a secret of the user")
            if how == "refuses":
                raise ApiError(503, "no more", code="unavailable")
            while True:
                yield "data: " + "x" * (65536 if how == "floods" else 1) + "\n\n"
                await asyncio.sleep(0.0 if how == "floods" else 0.02)
        finally:
            self.how = "closed"
            self.ended.set()


@pytest.fixture(scope="module")
def probed(serving: Serving) -> Iterator[tuple[Service, Probe]]:
    """A service with those routes behind the same guard."""
    probe = Probe()
    with serving(**SLOW, **{"service.timeouts.slow_client_s": 0.3}) as service:
        app = build_app(service.backend, OneKey(service.keys.trusted))
        app.include_router(probe.routes())
        service.server.config.loaded_app = app
        yield service, probe


def read_until(connection: socket.socket, sign: bytes) -> bytes:
    received = b""
    while sign not in received:
        data = connection.recv(65536)
        assert data, received
        received += data
    return received


@pytest.mark.parametrize("path", ["/probe/wait", "/probe/stream/goes-on"])
def test_a_client_that_leaves_ends_the_work(probed: tuple[Service, Probe], path: str) -> None:
    """Nobody waits for the answer, streamed or not, and the engine writes it to its end."""
    service, probe = probed
    probe.ended.clear()
    with opened(service.url) as connection:
        connection.sendall(head("POST", path, bearer(service), "Content-Length: 0"))
        if "stream" in path:
            read_until(connection, b"data: ")
        else:
            assert soon(lambda: service.backend.gate.running == 1)
    assert probe.ended.wait(10.0) and probe.how in ("cancelled", "closed")
    assert soon(lambda: aborts(service, "client_gone") > 0 and not service.backend.gate.running)


def test_an_unexpected_error_says_nothing_of_itself(
    probed: tuple[Service, Probe], caplog: pytest.LogCaptureFixture
) -> None:
    """A traceback, or what another user wrote, is in a reply or a log; or there is nothing to find the error by."""
    service, _ = probed
    with service.client() as client:
        reply = client.post("/probe/break", headers={"X-Request-ID": "abc"})
    assert reply.status_code == 500 and reply.headers["x-request-id"] == "abc"
    assert reply.json()["error"]["code"] == "internal_error" and "secret" not in reply.text
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == ["a request failed"]


@pytest.mark.parametrize(
    ("how", "code"), [("breaks", "internal_error"), ("refuses", "unavailable"), ("goes-on", "timeout")]
)
def test_a_stream_that_cannot_go_on_says_so_and_ends(probed: tuple[Service, Probe], how: str, code: str) -> None:
    """A stream that breaks off in silence looks like an answer that is complete."""
    service, _ = probed
    with service.client() as client:
        reply = client.post(f"/probe/stream/{how}")
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert reply.status_code == 200 and json.loads(events[-1])["error"]["code"] == code
    assert "secret" not in reply.text


def test_an_answer_that_takes_too_long_is_given_up(probed: tuple[Service, Probe]) -> None:
    """A request that hangs keeps its place at the gate for ever."""
    service, probe = probed
    probe.ended.clear()
    with service.client() as client:
        reply = client.post("/probe/wait")
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "timeout")
    assert probe.ended.is_set() and service.backend.gate.running == 0


def test_a_client_that_does_not_read_is_given_up(probed: tuple[Service, Probe]) -> None:
    """What a slow client does not take piles up in memory."""
    service, probe = probed
    probe.ended.clear()
    with opened(service.url) as connection:
        connection.sendall(head("POST", "/probe/stream/floods", bearer(service), "Content-Length: 0"))
        assert probe.ended.wait(20.0)
    assert soon(lambda: aborts(service, "client_too_slow") == 1)


def test_more_than_fits_is_refused_with_a_time_to_come_back(probed: tuple[Service, Probe]) -> None:
    """Requests pile up until the machine gives way."""
    service, _ = probed
    gate = service.backend.gate
    limits, gate._limits = gate._limits, gate._limits.model_copy(update={"max_in_flight": 1})
    try:
        with opened(service.url) as connection, service.client() as client:
            connection.sendall(head("POST", "/probe/wait", bearer(service), "Content-Length: 0"))
            assert soon(lambda: gate.running == 1)
            refused = client.post("/probe/wait")
            assert client.get("/health/live").status_code == 200
    finally:
        gate._limits = limits
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "server_overloaded")
    assert int(refused.headers["retry-after"]) >= 1


def test_the_description_of_the_service_is_for_those_with_a_key(hasty: Service) -> None:
    """The map of a service is open to everybody; or nobody can read it."""
    with hasty.client() as client:
        assert client.get("/openapi.json").status_code == 200
    with hasty.client("") as stranger:
        assert stranger.get("/openapi.json").status_code == 401

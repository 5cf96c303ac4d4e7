"""How an answer ends: with its client, with its time, with an error that says nothing of itself."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, cast

import pytest
from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from raw_http import head, opened
from service_parts import HASTY, Service, Serving, soon
from starlette.types import Send

from services.app import build_app
from services.errors import ApiError
from services.keys import KeyFile


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
                await asyncio.sleep(3600.0)
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


@contextmanager
def probing(serving: Serving, **settings: float) -> Iterator[tuple[Service, Probe]]:
    """A service with those routes behind the same guard."""
    probe = Probe()
    with serving(**HASTY | settings) as service:
        app = build_app(service.backend, KeyFile(service.keys.path))
        app.include_router(probe.routes())
        service.server.config.loaded_app = app
        yield service, probe


@pytest.fixture(scope="module")
def probed(serving: Serving) -> Iterator[tuple[Service, Probe]]:
    with probing(serving) as both:
        yield both


@pytest.fixture(scope="module")
def impatient(serving: Serving) -> Iterator[tuple[Service, Probe]]:
    """One that gives answers up soon."""
    with probing(serving, **{"service.timeouts.request_s": 0.5}) as both:
        yield both


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
        connection.sendall(head("POST", path, service.bearer, "Content-Length: 0"))
        if "stream" in path:
            read_until(connection, b"data: ")
        else:
            assert soon(lambda: service.backend.rate_limiter.running == 1)
    assert probe.ended.wait(10.0) and probe.how in ("cancelled", "closed")
    assert soon(lambda: service.aborts("client_gone") > 0 and not service.backend.rate_limiter.running)


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
def test_a_stream_that_cannot_go_on_says_so_and_ends(impatient: tuple[Service, Probe], how: str, code: str) -> None:
    """A stream that breaks off in silence looks like an answer that is complete."""
    service, _ = impatient
    with service.client() as client:
        reply = client.post(f"/probe/stream/{how}")
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert reply.status_code == 200 and json.loads(events[-1])["error"]["code"] == code
    assert "secret" not in reply.text


def test_an_answer_that_takes_too_long_is_given_up(impatient: tuple[Service, Probe]) -> None:
    """A request that hangs keeps its place at the gate for ever."""
    service, probe = impatient
    probe.ended.clear()
    with service.client() as client:
        reply = client.post("/probe/wait")
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "timeout")
    assert probe.ended.is_set() and service.backend.rate_limiter.running == 0


def test_a_client_that_does_not_read_is_given_up(probed: tuple[Service, Probe]) -> None:
    """What a slow client does not take piles up in memory."""
    service, probe = probed
    probe.ended.clear()
    with opened(service.url) as connection:
        connection.sendall(head("POST", "/probe/stream/floods", service.bearer, "Content-Length: 0"))
        assert probe.ended.wait(20.0)
    assert soon(lambda: service.aborts("client_too_slow") == 1)

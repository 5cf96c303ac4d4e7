"""What a client sends: malformed, too large, too slow, not all of it, or random."""

import contextlib
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from raw_http import ask, exchange, head, opened
from service_parts import MODEL, Service, soon


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
        (b'{"model": "tiny", "max_tokens": 1e400}', ""),
        (b'{"model": "tiny", "max_tokens": 99999999999999999999999}', ""),
        (b"\xef\xbb\xbf{}", ""),
        (b"[]", ""),
        (b"null", ""),
        (b'"text"', ""),
    ],
)
def test_a_malformed_body_is_the_client_s_mistake(hasty: Service, body: bytes, said: str) -> None:
    """A tokenizer, a database or the reply itself breaks on what a client sent: 500."""
    for path in ("chat/completions", "completions", "embeddings", "vector_stores", "conversations"):
        reply = ask(hasty.url, hasty.json_head(f"Content-Length: {len(body)}", path=f"/v1/{path}"), body)
        if said or path == "chat/completions":
            error = reply.json()["error"]
            assert (reply.status, error["type"]) == (400, "invalid_request_error"), error
            assert said in error["message"]
        assert reply.status < 500


def test_a_body_of_another_kind_is_refused_as_such(hasty: Service) -> None:
    """Text that a page elsewhere may post without asking is read as JSON."""
    with hasty.client() as client:
        for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
            reply = client.post("/v1/chat/completions", content=b"{}", headers={"Content-Type": kind})
            assert reply.status_code == 415, kind
        reply = client.post("/v2/check", content=b"{}", headers={"Content-Type": "text/plain"})
        assert reply.status_code == 415 and reply.text.startswith("Error: ")
        reply = client.post("/v2/check", content=b"{}", headers={"Content-Type": "application/json"})
        assert (
            reply.status_code == 400 and "Missing 'text' or 'data'" in reply.text
        )  # a form, whatever its client calls it


def test_a_body_that_is_announced_too_large_is_refused_unread(hasty: Service) -> None:
    """Ten gigabytes are read before they are refused."""
    reply = ask(hasty.url, hasty.json_head("Content-Length: 10000000000"))
    assert (reply.status, reply.json()["error"]["code"]) == (413, "request_too_large")


PART = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\n'


@pytest.mark.parametrize(
    ("path", "kind", "first"),
    [("/v1/chat/completions", "application/json", b" "), ("/v1/files", "multipart/form-data; boundary=x", PART)],
)
def test_a_body_without_a_length_is_counted_as_it_comes(hasty: Service, path: str, kind: str, first: bytes) -> None:
    """A body in chunks has no length to refuse it by, and fills the memory; or an upload streams past the limit."""
    chunks = [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (first, *[b" " * 1024] * 10)]
    lines = (hasty.bearer, f"Content-Type: {kind}", "Transfer-Encoding: chunked")
    reply = ask(hasty.url, head("POST", path, *lines), *chunks)
    assert (reply.status, reply.json()["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("lengths", [("-1",), ("abc",), ("1e3",), ("5", "6"), ("9" * 400,)])
def test_a_length_that_is_none_is_refused(hasty: Service, lengths: tuple[str, ...]) -> None:
    """Two readers of one connection see two different requests."""
    assert ask(hasty.url, hasty.json_head(*(f"Content-Length: {n}" for n in lengths)), b"{}").status in (400, 413)


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
        b"GET /health/live HTTP/1.1\r\nConnection: close\r\n\r\n",
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
    assert ask(hasty.url, head("GET", path, hasty.bearer)).status in (400, 404)


def test_a_head_that_does_not_come_ends_the_connection(hasty: Service) -> None:
    """Connections on which nothing, or a byte now and then, comes use up all there are."""
    with opened(hasty.url) as silent, opened(hasty.url) as slow:
        slow.sendall(b"GET /health/live HTTP/1.1\r\nHost: loc")
        assert exchange(silent, ()).status == exchange(slow, ()).status == 0


@pytest.mark.parametrize("second", [b"GET /health", b"\r\n"])
def test_a_second_head_on_a_connection_has_to_come_in_time_as_well(hasty: Service, second: bytes) -> None:
    """Only the first request of a connection is watched; or blank lines end the wait, and nothing else begins to wait."""
    with opened(hasty.url) as connection:
        connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200" in connection.recv(65536)
        connection.sendall(second)
        assert exchange(connection, ()).status in (0, 400)


@pytest.mark.parametrize("piece", [b"X-Long: " + b"a" * 60_000, b"X: 1\r\n" * 10_000])
def test_trailers_are_limited_as_heads_are(hasty: Service, piece: bytes) -> None:
    """What follows the last chunk is kept by the parser, and no limit of a body counts it."""
    begun = hasty.json_head("Transfer-Encoding: chunked")
    assert ask(hasty.url, begun, b"0\r\n", *[piece] * 20).status in (0, 400)
    small = ask(hasty.url, begun, b"2\r\n{}\r\n0\r\nHost: evil\r\n\r\n")
    assert small.status == 422 or (small.status == 400 and "model" in small.json()["error"]["message"])


@pytest.mark.parametrize(
    "lines",
    [
        ("Content-Length: 2", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: chunked, identity",),
        ("Transfer-Encoding: xchunked",),
        ("Transfer-Encoding:",),
        ("Host: other",),
        ("X: a\r\n b",),
    ],
)
def test_a_head_with_two_meanings_is_refused(hasty: Service, lines: tuple[str, ...]) -> None:
    """A proxy in front reads it in the other one, and sees a request where this service sees a body."""
    second = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert ask(hasty.url, hasty.json_head(*lines), b"0\r\n\r\n" + second).status in (0, 400)


@pytest.mark.parametrize("wanted", ["h2c", "websocket"])
def test_a_client_may_ask_for_another_protocol(hasty: Service, wanted: str) -> None:
    """Some clients always offer HTTP/2; the body that follows was taken for a second request."""
    inner = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + hasty.bearer.encode() + b"\r\n\r\n"
    http2 = "HTTP2-Settings: AAMAAABkAAQAAP__"
    given = hasty.json_head(f"Upgrade: {wanted}", http2, f"Content-Length: {len(inner)}")
    reply = ask(hasty.url, given.replace(b"Connection: close", b"Connection: close, Upgrade"), inner)
    assert reply.status == 400 and b"not JSON" in reply.body and b"HTTP/1.1" not in reply.body


def test_requests_sent_at_once_are_read_one_after_the_other(hasty: Service) -> None:
    """A quarter of a megabyte of them became five thousand requests in memory, each answer let in more, and health waited."""
    first_of_many = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50_000
    with opened(hasty.url) as connection, hasty.client() as other:
        connection.settimeout(0.2)
        with contextlib.suppress(OSError):
            connection.sendall(first_of_many)
        assert len(hasty.server.server_state.tasks) < 100 and other.get("/health/live").status_code == 200


def test_a_body_that_does_not_come_is_given_up(hasty: Service) -> None:
    """A client that announces a body and sends none keeps its place at the gate for ever."""
    reply = ask(hasty.url, hasty.json_head("Content-Length: 100"), b"{")
    assert (reply.status, reply.json()["error"]["code"]) == (408, "timeout")
    assert hasty.backend.rate_limiter.running == 0


def test_a_client_that_leaves_while_it_sends_leaves_nothing_behind(hasty: Service) -> None:
    """Half a body is handed to a route, or the place at the gate is never given back."""
    num_gone = hasty.aborts("client_gone")
    with opened(hasty.url) as connection:
        connection.sendall(hasty.json_head("Content-Length: 100") + b"{")
    assert soon(lambda: not hasty.backend.rate_limiter.running and hasty.aborts("client_gone") == num_gone + 1)


NUM_EACH = 12


@pytest.mark.slow
def test_generated_requests_blame_nobody_but_the_client(service: Service) -> None:
    """A generated request met a 500. Of every route, requests that keep to its schema and as many that do not."""
    schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis (extra dev)")
    statuses: Counter[int] = Counter()
    with service.client() as client:
        schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
    for result in schema.get_all_operations():
        operation = result.ok()
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            options: dict[str, Any] = {"suppress_health_check": list(HealthCheck), "phases": (Phase.generate,)}

            @seed(0)
            @settings(max_examples=NUM_EACH, database=None, deadline=None, **options)
            @given(operation.as_strategy(generation_mode=mode))
            def send(case: Any) -> None:
                answer = case.call(base_url=service.url, headers=service.headers(), timeout=60.0)
                statuses[answer.status_code] += 1
                assert answer.status_code < 500, (case.as_curl_command(), answer.text[:500])

            with contextlib.suppress(Unsatisfiable):  # a route without a body or a parameter cannot be asked wrongly
                send()
    assert 200 in statuses and 400 in statuses and sum(statuses.values()) >= 400
    with service.client() as client:
        body = {"model": MODEL, "prompt": "Who built the bridge?", "max_tokens": 4}
        assert client.post("/v1/completions", json=body).status_code == 200
        assert client.get("/health/ready").status_code == 200
    assert service.backend.rate_limiter.running == 0

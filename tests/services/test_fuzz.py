"""Whatever is sent, the service answers with a result or with an error of the client's, and goes on."""

from __future__ import annotations

import contextlib
import random
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from service_parts import MODEL, Service

_SURROGATE = '{"annotation": [{"markup": "<b>", "interpretAs": "He \\ud800 go."}]}'
FORMS: tuple[dict[str, str], ...] = (
    {},
    {"text": "", "language": "en-US"},
    {"text": "a", "language": ""},
    {"text": "a", "language": "xx-YY"},
    {"text": "a", "data": "{}", "language": "en-US"},
    {"data": "{", "language": "en-US"},
    {"data": '{"annotation": 1}', "language": "en-US"},
    {"data": '{"annotation": [{"text": "a", "markup": "b"}]}', "language": "en-US"},
    {"data": '{"annotation": [{"markup": "b", "interpretAs": 3}]}', "language": "en-US"},
    {"data": _SURROGATE, "language": "en-US"},
    {"text": "a\0b", "language": "en-US", "word": "a\0b"},
    {"word": "", "dict": "\u0001"},
    {"word": "a b", "offset": "-1", "limit": "x"},
    {"dicts": ",".join("a" * 5_000), "limit": "99999999999999999999"},
    {"text": "a", "language": "auto", "preferredVariants": "en-GB,,,", "motherTongue": "?", "level": "?"},
    {f"field{number}": "" for number in range(80)},
)
"""Fields that no editor should send."""


@pytest.fixture
def fuzzed(service: Service) -> Iterator[Counter[int]]:
    """Counts statuses; in the end the service must be as good as before."""
    statuses: Counter[int] = Counter()
    yield statuses
    assert not [status for status in statuses if status >= 500], statuses
    with service.client() as client:
        body = {"model": MODEL, "prompt": "Who built the bridge?", "max_tokens": 4}
        assert client.post("/v1/completions", json=body).status_code == 200
        assert client.get("/health/ready").status_code == 200
    assert service.backend.rate_limiter.running == 0


def fuzz(service: Service, statuses: Counter[int], num_each: int) -> None:
    """`num_each` requests of every route that keep to its schema, and as many that do not."""
    schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis (extra dev)")
    with service.client() as client:
        schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
    for result in schema.get_all_operations():
        operation = result.ok()
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):

            @seed(0)
            @settings(
                max_examples=num_each,
                database=None,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                phases=(Phase.generate,),
            )
            @given(operation.as_strategy(generation_mode=mode))
            def send(case: Any) -> None:
                answer = case.call(base_url=service.url, headers=service.headers(), timeout=60.0)
                statuses[answer.status_code] += 1
                assert answer.status_code < 500, (case.as_curl_command(), answer.text[:500])

            with contextlib.suppress(Unsatisfiable):  # a route without a body or a parameter cannot be asked wrongly
                send()


@pytest.mark.slow
def test_two_thousand_requests_blame_nobody_but_the_client(service: Service, fuzzed: Counter[int]) -> None:
    """A generated request met a 500."""
    fuzz(service, fuzzed, 60)
    assert 200 in fuzzed and 400 in fuzzed
    assert sum(fuzzed.values()) >= 2_000


@pytest.mark.parametrize("path", ["/v2/check", "/v2/words/add", "/v2/words/delete", "/v2/words", "/v2/configinfo"])
def test_wrong_forms_are_the_clients_fault(service: Service, fuzzed: Counter[int], path: str) -> None:
    """A form that no editor sends met a 500."""
    for form in FORMS:
        for send in ({"data": form}, {"params": form}):
            method = "GET" if path in ("/v2/words", "/v2/configinfo") or "params" in send else "POST"
            answer = requests.request(method, service.url + path, headers=service.headers(), timeout=60.0, **send)
            fuzzed[answer.status_code] += 1
    assert fuzzed


@pytest.mark.slow
def test_what_is_hardly_http_is_refused(service: Service, fuzzed: Counter[int]) -> None:
    """A malformed request ended the server, or was never answered."""
    draw = random.Random(0)
    where = urlsplit(service.url)
    assert where.hostname and where.port
    for number in range(80):
        with socket.create_connection((where.hostname, where.port), timeout=0.5) as connection:
            connection.sendall(_mangled(draw, number, service.headers()["Authorization"]))
            with contextlib.suppress(TimeoutError):  # it waits for the rest
                head = connection.recv(65_536).split(b"\r\n", 1)[0]
                assert not head or head.startswith(b"HTTP/1."), head
                fuzzed[int(head.split()[1]) if head else 400] += 1
    assert set(fuzzed) - {400, 401}, "nothing got as far as a route"


def _mangled(draw: random.Random, number: int, authorization: str) -> bytes:
    """A right request with a few bytes changed, left out or doubled; every tenth is noise from the beginning."""
    if number % 10 == 0:
        return draw.randbytes(draw.randint(1, 400))
    body = b'{"model": "tiny", "prompt": "a", "max_tokens": 2}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: {authorization}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    raw = bytearray(head.encode() + body)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(raw))
        change = draw.choice(("flip", "drop", "double"))
        if change == "flip":
            raw[at] = draw.randrange(256)
        elif change == "drop":
            del raw[at : at + draw.randint(1, 8)]
        else:
            raw[at:at] = raw[at : at + draw.randint(1, 30)]
    return bytes(raw)

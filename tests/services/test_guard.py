"""The one way in: nobody without a key, under no other name, and every response guarded."""

from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest
from raw_http import ask, head
from service_parts import Service, Serving
from starlette.responses import PlainTextResponse

from services.gateway import PUBLIC, AuthMiddleware, is_public
from services.keys import SingleKey
from services.limits import RateLimiter
from services.metrics import Metrics
from services.settings import ServiceConfig, ServiceSettings


def every_route(service: Service) -> list[tuple[str, str]]:
    """(method, path) of every operation, from the service's own description of itself."""
    with service.client() as client:
        described = client.get("/openapi.json").json()
    return [(method, path) for path, methods in described["paths"].items() for method in methods]


def test_every_route_but_the_named_ones_needs_a_key(hasty: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A route that somebody adds is open until somebody notices."""
    monkeypatch.setattr("services.limits.BUSY_S", 0.0)  # no refusal is delayed
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
    assert set(PUBLIC) == {"/health", "/health/live", "/health/ready", "/v2/healthcheck", "/", "/document", "/grammar"}
    assert is_public("/web/chat.js") and not is_public("/web/../v1/models")
    assert not any(
        map(is_public, ("/health/", "/healthx", "/v1/models", "/metrics", "//", "/web", "/v2/healthcheck/x"))
    )


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["Authorization: bearer {key}"], 200),
        (["X-Api-Key: {key}"], 200),
        (["Authorization: {key}"], 401),
        (["Authorization: Basic {key}"], 401),
        (["Authorization: Bearer"], 401),
        (["Authorization: Bearer {key}x"], 401),
        (["Authorization: Bearer {key}", "Authorization: Bearer {key}"], 401),
        (["X-Api-Key: {key}", "Authorization: Bearer wrong"], 401),
        (["Authorization: Bearer \xff\xfe"], 401),
    ],
)
def test_a_key_comes_plainly_in_either_header(hasty: Service, lines: list[str], status: int) -> None:
    """Two parts of a system read two different keys out of one request; a header breaks the comparison; or clients of other
    services' protocols are refused with a right key."""
    filled = [line.replace("{key}", hasty.keys.trusted) for line in lines]
    assert ask(hasty.url, head("GET", "/v1/models", *filled)).status == status


def test_a_local_service_answers_to_local_names_only(hasty: Service) -> None:
    """A page elsewhere gives its own name this machine's address, and reads answers with its visitor's browser; or a forwarded
    port is refused."""
    for host in ("evil.example", "localhost.evil.example", "localhost:80:80", "127.0.0.2", ""):
        reply = ask(hasty.url, head("GET", "/health/live", host=host))
        assert (reply.status, reply.json()["error"]["code"]) == (403, "host_not_allowed"), host
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000"):
        assert ask(hasty.url, head("GET", "/health/live", host=host)).status == 200, host


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
    with serving(**{"service.allowed_origins": ["https://app.example"]}) as service, service.client("") as client:
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
    assert reply.status_code == 200 and "access-control-allow-origin" not in reply.headers


def test_languagetool_s_clients_may_send_their_key_as_a_field(hasty: Service) -> None:
    """They cannot send headers; and a field that is no key must not do."""
    asked = {"text": " ", "language": "en-US"}  # which needs no engine
    with hasty.client("") as client:
        for given, status in ((hasty.keys.ann, 200), ("wrong", 401), ("", 401)):
            assert client.post("/v2/check", data={**asked, "apiKey": given}).status_code == status
            assert client.post("/v2/check", data=asked, params={"apiKey": given}).status_code == status
        refused = client.post("/v2/check", data=asked)
        assert refused.status_code == 401 and refused.text.startswith("Error: ")
        assert client.post("/v1/chat/completions", params={"apiKey": hasty.keys.ann}).status_code == 401


def test_what_strangers_send_is_bounded(hasty: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has no key fills the memory with forms that might hold one, or breaks what looks for it."""
    kind = "Content-Type: application/x-www-form-urlencoded"
    assert ask(hasty.url, head("GET", "/v2/check?" + "&" * 200)).status in (400, 401)
    assert ask(hasty.url, head("GET", "/v2/check?a=%ff&" + "b&" * 200)).status == 400
    assert ask(hasty.url, head("POST", "/v2/check", kind, "Content-Length: 9"), b"a&b=%ff&c").status == 400
    assert ask(hasty.url, head("POST", "/health/live", "Content-Length: 9"), b"a" * 9).status in (400, 415)
    assert ask(hasty.url, head("GET", "/health/live", "Content-Length: 9"), b"a" * 9).status == 400
    monkeypatch.setattr("services.limits.MAX_ANONYMOUS_FORMS", 0)
    assert ask(hasty.url, head("POST", "/v2/check", kind, "Content-Length: 9"), b"a&b=c&c=d").status == 429


def test_pages_of_other_sites_may_not_ask_where_nobody_is_asked_for_a_key(serving: Serving) -> None:
    """Any page that a user visits changes his dictionary and uses his processor. An image's address is fetched without an
    origin, but browsers say whose page it is."""
    asked, site = {"text": " ", "language": "en-US"}, "sec-fetch-site"
    extension = "chrome-extension://oldceeleldhonbafppcapldpdifcinji"
    with serving(**{"service.languagetool_open": True}) as service, service.client("") as client:
        foreign = [{"origin": each} for each in ("https://evil.example", "http://localhost:1", "null")]
        foreign += [{site: each} for each in ("cross-site", "same-site", "Cross-Site")]
        own = [{}, {"origin": service.url}, {site: "same-origin"}, {site: "none"}]
        own += [{"origin": extension}, {site: "cross-site", "origin": extension}]
        for status, cases in ((403, foreign), (200, own)):
            for headers in cases:
                assert client.post("/v2/check", data=asked, headers=headers).status_code == status, headers
                assert client.get("/v2/check", params=asked, headers=headers).status_code == status, headers


@pytest.mark.parametrize(
    "kind",
    [
        "multipart/form-data; boundary=x; charset=punycode",
        "multipart/form-data; charset=utf-8; charset=punycode; boundary=x",
        'multipart/form-data; x="charset=utf-8"; charset=utf-7; boundary=x',
        "application/json; charset=utf-16",
    ],
)
def test_no_charset_but_utf_8_is_read(hasty: Service, kind: str) -> None:
    """A parser breaks on the charset that a client names."""
    lines = (hasty.bearer, f"Content-Type: {kind}", "Content-Length: 2")
    assert ask(hasty.url, head("POST", "/v1/files", *lines), b"{}").status == 415


async def test_the_address_it_listens_at_is_a_name_it_knows() -> None:
    """--host 127.0.1.1 refused its own printed link."""
    for host, name, status in (
        ("127.0.1.1", "127.0.1.1", 200),
        ("::1", "[::1]", 200),
        ("localhost", "localhost", 200),
        ("127.0.1.1", "127.0.1.2", 403),
    ):
        config, metrics = ServiceConfig(service=ServiceSettings(host=host)), Metrics("m")
        limiter = RateLimiter(config.service.limits, metrics)
        backend: Any = SimpleNamespace(config=config, rate_limiter=limiter, metrics=metrics)
        transport = httpx.ASGITransport(AuthMiddleware(PlainTextResponse("live"), backend, SingleKey()))
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{name}:8000") as client:
            assert (await client.get("/health/live")).status_code == status

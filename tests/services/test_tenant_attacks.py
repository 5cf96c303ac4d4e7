"""What one client with one key, or with none, can do to the others: nothing."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import httpx2 as httpx
import pytest
from pydantic import BaseModel, ValidationError
from raw_http import ask, exchange, head, opened
from service_parts import MODEL, Service, Serving, soon

from ragspec.core import Passage
from ragspec.errors import ConfigError
from services import limits
from services.embedded import check_certificate, raised_descriptor_limit
from services.errors import ApiError, validation_error
from services.languagetool import check
from services.limits import MAX_JSON_KEYS, RateLimiter
from services.openai.answer_fields import url_of, view_url
from services.openai.types import EmbeddingBody
from services.settings import ServiceSettings

MAX_ITEMS, MAX_ERRORS = 250_000, 10_000
COUNTS = (1, 400, 240_000)
_LISTS = b"[" + b",".join([b"[]"] * 3_200_000) + b"]"
_KEYS = b",".join(b'"k%d":1' % number for number in range(800_000))
_QUOTED = b'"' + b'\\"[[[[,,,,::::' * 400_000 + b'\\\\"'


@contextmanager
def health_answered(service: Service, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> Iterator[None]:
    """Inside, the check of a body in `module` ends only after the health check, asked meanwhile, was answered."""
    begun, answered = threading.Event(), threading.Event()
    check = module.check_num_items

    def held(body: bytes, max_items: int) -> None:
        begun.set()
        assert answered.wait(60)
        check(body, max_items)

    def ask() -> None:
        assert begun.wait(60)
        with service.client("") as client:
            assert client.get("/health/live").status_code == 200
        answered.set()

    monkeypatch.setattr(module, "check_num_items", held)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(ask)
        yield
        asked.result()


def body_of(**fields: bytes) -> bytes:
    return b'{"model": "tiny", ' + b", ".join(b'"%s": %s' % (k.encode(), v) for k, v in fields.items()) + b"}"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", body_of(prompt=_LISTS)),
        ("/v1/completions", body_of(prompt=b"[[" + b"1," * 2_999_999 + b"1]]")),
        ("/v1/chat/completions", body_of(messages=b"[{" + _KEYS + b"}]")),
    ],
)
def test_a_body_of_millions_of_items_is_refused_unparsed(
    service: Service, monkeypatch: pytest.MonkeyPatch, path: str, body: bytes
) -> None:
    """Every fault becomes an object on the event loop: two minutes, four gigabytes, and health unanswered meanwhile."""
    with health_answered(service, monkeypatch, limits), service.client() as client:
        reply = client.post(path, content=body, headers={"content-type": "application/json"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")
        assert "items" in reply.json()["error"]["message"]


def test_a_long_text_full_of_brackets_is_a_text(client: httpx.Client) -> None:
    """Items are counted where only a string holds their marks: a long program as a prompt is refused."""
    reply = client.post(
        "/v1/completions", content=body_of(prompt=_QUOTED), headers={"content-type": "application/json"}
    )
    assert reply.status_code == 400 and "characters" in reply.json()["error"]["message"]


class WrongValue(NamedTuple):
    """In place of a part of a body. `num_items`, `num_keys`: over all its levels."""

    value: Any
    num_items: int = 0
    num_keys: int = 0

    def repeated(self) -> Iterator[WrongValue]:
        for count in COUNTS:
            if count * (1 + self.num_items) <= MAX_ITEMS and count * self.num_keys <= MAX_JSON_KEYS:
                yield WrongValue([self.value] * count, count * (1 + self.num_items), count * self.num_keys)

    def named(self, *names: str) -> WrongValue:
        return WrongValue(dict.fromkeys(names, self.value), len(names) + self.num_items, len(names) + self.num_keys)


def wrong_values(schema: dict[str, Any], schemas: dict[str, Any]) -> list[WrongValue]:
    """Of a part of a body and of all parts within it, with as many items as are let in and with fewer."""
    schema = schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    found = [*WrongValue(1).repeated(), *WrongValue({}).repeated()]
    if schema.get("additionalProperties"):
        found += [WrongValue([]).named(*map(str, range(count))) for count in (60, 30_000)]
    for each in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        found += wrong_values(each, schemas)
    for name, field in schema.get("properties", {}).items():
        found += [value.named(name) for value in wrong_values(field, schemas)]
    if "items" in schema:
        found += [several for value in wrong_values(schema["items"], schemas) for several in value.repeated()]
    return found


def subclasses(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


def num_errors_of(kind: type[BaseModel], value: Any) -> int:
    """Without those of unknown keys, which the number of keys bounds."""
    try:
        kind.model_validate(value)
    except ValidationError as cause:
        num_errors = cause.error_count()
        return num_errors if num_errors < MAX_ERRORS else sum(e["type"] != "extra_forbidden" for e in cause.errors())
    except ApiError:
        return 1
    return 0


def test_as_many_wrong_items_as_are_let_in_make_few_errors(client: httpx.Client) -> None:
    """An input of 250,000 numbers was validated for 2.3 s on the event loop, with an error for each of them."""
    api = client.get("/openapi.json").json()
    schemas, kinds = api["components"]["schemas"], {kind.__name__: kind for kind in subclasses(BaseModel)}
    routes = [route for path in api["paths"].values() for route in path.values()]
    found = [route.get("requestBody", {}).get("content", {}).get("application/json") for route in routes]
    bodies = {name for body in found for name in re.findall(r"schemas/(\w+)", json.dumps(body))}
    assert len(bodies) > 8 and {"ChatBody", "ResponseBody", "NewBatch", "GrammarRequest"} < bodies
    for name in bodies:
        for wrong in wrong_values(schemas[name], schemas):
            if wrong.num_items + wrong.num_keys > MAX_ERRORS // 4:  # a wrong item adds up to four errors
                num_errors = num_errors_of(kinds[name], wrong.value)
                assert num_errors < MAX_ERRORS, f"{name}: {num_errors} errors of {str(wrong.value)[:80]}"


def test_the_name_of_an_unknown_key_is_cut() -> None:
    """A key of ten megabytes comes back in the answer, and is written into the log."""
    with pytest.raises(ValidationError) as caught:
        EmbeddingBody.model_validate({"model": MODEL, "input": "a", "k" * 100_000: 1})
    assert len(json.dumps(validation_error(caught.value.errors()).body())) < 1000


def test_an_annotated_text_of_millions_of_items_is_refused_unparsed(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LanguageTool's clients send JSON within a form, which the check of bodies does not see."""
    fields = {"language": "en-US", "data": '{"annotation": ' + "[" + "[]," * 200_000 + "[]]}"}
    with health_answered(service, monkeypatch, check), service.client() as client:
        assert client.post("/v2/check", data=fields).status_code == 413


def test_half_sent_forms_of_one_address_leave_room_for_others(serving: Serving) -> None:
    """Thirty-two forms without a key, half sent, and no LanguageTool client of any address is answered."""
    lines = ("Content-Type: application/x-www-form-urlencoded", "Content-Length: 100")
    begun = head("POST", "/v2/check", *lines) + b"text=a"
    with (
        serving(**{"service.languagetool_open": False, "service.host": "0.0.0.0"}) as service,
        ExitStack() as open_ones,
    ):
        url = service.url.replace("0.0.0.0", "127.0.0.1")
        for _ in range(40):
            open_ones.enter_context(opened(url)).sendall(begun)
        assert soon(lambda: ask(url, head("POST", "/v2/check", *lines), b"text=a").status == 429)
        elsewhere = url.replace("127.0.0.1", "127.0.0.2")
        form = b"language=en-US&text=+&apiKey=" + service.keys.ann.encode()
        length = f"Content-Length: {len(form)}"
        with opened(elsewhere, source="127.0.0.2") as connection:
            reply = exchange(connection, [head("POST", "/v2/check", lines[0], length), form])
        assert reply.status == 200, reply.body


def test_connections_are_capped_and_others_are_still_answered(serving: Serving) -> None:
    """1,100 silent connections use up 1,024 descriptors, and nobody is answered any more."""
    settings = {"service.limits.connections": 40, "service.limits.address_connections": 30}
    with serving(**settings, **{"service.host": "0.0.0.0"}) as service:
        url = service.url.replace("0.0.0.0", "127.0.0.1")
        with ExitStack() as open_ones:
            silent = [open_ones.enter_context(opened(url)) for _ in range(60)]
            assert soon(lambda: sum(is_closed(connection) for connection in silent) == 30)
            with opened(url, source="127.0.0.3") as connection:
                assert exchange(connection, [head("GET", "/health/live")]).status == 200
            others = [open_ones.enter_context(opened(url, source="127.0.0.4")) for _ in range(20)]
            assert soon(lambda: sum(is_closed(connection) for connection in others) == 10)
        assert soon(lambda: ask(url, head("GET", "/health/live")).status == 200)


def test_refusals_of_a_key_or_an_address_are_counted(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is refused and asks again at once, with a key or without one, uses up the event loop."""
    held = list[str]()
    monkeypatch.setattr(RateLimiter, "refusal_wait_s", lambda self, name: held.append(name) or 0.0)
    with serving(**{"service.limits.key.requests_per_minute": 1}) as service:
        with service.client("wrong") as client:
            assert client.get("/v1/models").status_code == 401
        with service.client(service.keys.ann) as client:
            assert [client.get("/v1/models").status_code for _ in range(2)] == [200, 429]
            assert client.get("/v1/none").status_code == 429
    assert held[0] == "127.0.0.1" and held[1] == held[2] != held[0] and len(held) == 3


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side ended it."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_a_process_may_open_as_many_files_as_the_system_lets_it() -> None:
    """Most systems start a process with 1,024 descriptors and allow it many more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
        assert raised_descriptor_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(65_536, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_what_tenants_store_is_read_by_nobody_else_on_the_machine(
    serving: Serving, letter_index: Path, tmp_path: Path
) -> None:
    """Conversations and uploads are 0644, as is the index that uploads go into: any account of the machine reads them."""
    before = os.umask(0o022)
    index, library = Path(shutil.copytree(letter_index, tmp_path / "index")), tmp_path / "library"
    library.mkdir()
    for folder in (index, library):
        folder.chmod(0o755)
    earlier = {path.name for path in index.iterdir()}
    settings = {"service.data_dir": str(tmp_path / "data"), "service.library_dir": str(library)}
    try:
        with serving(index, **settings) as service, service.client(service.keys.ann) as client:
            client.post("/v1/conversations", json={})
            assert index.stat().st_mode & 0o777 == 0o755, "nobody's upload is in it yet"
            file = client.post("/v1/files", files={"file": ("a.txt", b"A zebra.")}, data={"purpose": "assistants"})
            store = client.post("/v1/vector_stores", json={"file_ids": [file.json()["id"]]}).json()["id"]
            assert soon(lambda: client.get(f"/v1/vector_stores/{store}").json()["file_counts"]["completed"] == 1)
            new = [path for path in index.iterdir() if path.name not in earlier]
            roots = [tmp_path / "data", library, index, *new]
            paths = [*roots, *(path for root in roots if root != index for path in root.rglob("*"))]
            assert len(new) > 1 and len(paths) > 8
            for path in paths:
                assert path.stat().st_mode & 0o077 == 0, path
    finally:
        os.umask(before)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    folder = tmp_path_factory.mktemp("certificate")
    certfile, keyfile = folder / "cert.pem", folder / "key.pem"
    options = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=127.0.0.1"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(keyfile), "-out", str(certfile)]
    subprocess.run(["openssl", "req", *options.split(), *names], check=True, capture_output=True)
    return certfile, keyfile


def test_a_certificate_keeps_keys_and_texts_from_the_network(serving: Serving, certificate: tuple[Path, Path]) -> None:
    """The README taught to serve a network in clear text, and there was no other way."""
    certfile, keyfile = certificate
    settings = {"service.ssl_certfile": str(certfile), "service.ssl_keyfile": str(keyfile)}
    with serving(**settings) as service:
        url = service.url.replace("http://", "https://")
        trusted = ssl.create_default_context(cafile=str(certfile))
        with httpx.Client(base_url=url, verify=trusted, headers=service.headers()) as client:
            assert client.get("/v1/models").status_code == 200
        assert ask(service.url, head("GET", "/health/live")).status == 0


def test_a_certificate_that_cannot_be_used_is_said_before_anything_is_loaded(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    """A minute of loading a model ends in a traceback, or in a service in clear text."""
    certfile, keyfile = map(str, certificate)
    (tmp_path / "no.pem").write_text("no certificate")
    for pair in ((str(tmp_path / "no.pem"), keyfile), (certfile, str(tmp_path / "none")), ("", keyfile)):
        with pytest.raises(ConfigError, match=r"ssl_certfile|cannot be used"):
            check_certificate(ServiceSettings(ssl_certfile=pair[0], ssl_keyfile=pair[1]))
    check_certificate(ServiceSettings(ssl_certfile=certfile, ssl_keyfile=keyfile))
    check_certificate(ServiceSettings())


@pytest.mark.parametrize(
    ("source", "is_kept"),
    [
        ("https://example.org/a?b=c:d", True),
        ("HTTP://example.org", True),
        ("docs/mill.md", False),
        ("my notes: part 2.txt", False),
        ("vs_1:file-2", False),
        ("javascript:alert(1)", False),
        (" \tJava\nScript\t:alert(1)", False),
        ("data:text/html,<script>", False),
        ("vbscript:x", False),
        ("file:///etc/passwd", False),
    ],
)
def test_a_document_s_source_brings_no_script_into_a_client_s_links(source: str, is_kept: bool) -> None:
    """Clients show a citation's `url` as a link: one click runs what an uploaded document names as its source."""
    url = url_of(Passage("d", 0, "Text.", 0, 5, source=source, anchor="top"), view_url("d:e", 0, 5))
    assert url == (f"{source}#top" if is_kept else "/document?id=d%3Ae&start=0&end=5")


def test_a_text_that_no_encoder_reads_is_refused_before_it_is_tokenised(
    service: Service, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine megabytes were tokenised for 38 seconds, and then refused."""

    def counting(texts: list[str]) -> list[int]:
        raise AssertionError("it was tokenised")

    monkeypatch.setattr(type(service.backend.encoder), "count_tokens", staticmethod(counting))
    body = {"model": MODEL, "input": ["a", "a " * 2_000_000]}
    reply = client.post("/v1/embeddings", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, "input.1", "context_length_exceeded")


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_an_output_beyond_the_context_is_named(client: httpx.Client, name: str) -> None:
    """The error named the messages, which were short."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "retrieval": False, name: 10**6}
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == name, reply.text


def test_the_openapi_schema_states_the_bounds(client: httpx.Client) -> None:
    """A client that is made from the schema sends what is refused."""
    bodies = client.get("/openapi.json").json()["components"]["schemas"]
    fields = bodies["CompletionBody"]["properties"]
    stated = {name: fields[name]["anyOf"] for name in ("n", "stop", "logit_bias", "logprobs")}
    assert (stated["n"][0]["minimum"], stated["n"][0]["maximum"]) == (1, 8)
    assert (stated["logprobs"][0]["minimum"], stated["logprobs"][0]["maximum"]) == (0, 20)
    assert bodies["ChatBody"]["properties"]["top_logprobs"]["anyOf"][0]["maximum"] == 20
    assert stated["logit_bias"][0]["maxProperties"] == 1024
    one, several, _ = stated["stop"]
    assert (one["maxLength"], several["maxItems"]) == (512, 16)

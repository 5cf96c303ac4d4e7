"""One process: how it starts, refuses to start, stops, and is stopped in the middle of an answer."""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest
from service_parts import MODEL, Service, Serving, serve_process, soon

from ragspec.cli import serve
from ragspec.cli.serve import run_serve
from ragspec.config import load_config
from ragspec.engine.engine import Engine
from ragspec.errors import ConfigError
from ragspec.rag.grammar.dictionaries import DictionaryStore
from ragspec.rag.pipeline import Pipeline
from services import embedded
from services.backend import ServiceBackend
from services.embedded import Server, listening
from services.keys import add_key
from services.settings import ServiceSettings
from services.stores.library import Library

MESSAGES = [{"role": "user", "content": "Who built the bridge?"}]
LONG = {"model": MODEL, "messages": MESSAGES, "retrieval": False, "seed": 3}


def asked(max_tokens: int, **more: Any) -> dict[str, Any]:
    return {**LONG, "max_tokens": max_tokens, "ignore_eos": True, "stream": True, "speculation": False, **more}


def events(text: str) -> list[Any]:
    """Of a stream; the last is None where it ended as it should."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [None if line == "[DONE]" else json.loads(line) for line in lines]


@contextlib.contextmanager
def begun(service: Service, body: dict[str, Any]) -> Iterator[tuple[httpx.Response, Iterator[str]]]:
    """A stream that has brought its first piece."""
    with service.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as reply:
        pieces = reply.iter_text()
        assert next(pieces)
        yield reply, pieces


def test_what_runs_ends_and_nothing_new_is_taken(serving: Serving) -> None:
    """A rolling update cuts answers off, or clients see connections refused instead of a time to come back."""
    with serving() as service, service.client() as other, begun(service, asked(300)) as (_, pieces):
        service.server.stop()
        assert soon(lambda: service.backend.rate_limiter.draining)
        assert other.get("/health/ready").status_code == 503 and other.get("/health/live").status_code == 200
        refused = other.post("/v1/chat/completions", json=asked(3))
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "shutting_down"
        assert events("data: {}\n\n" + "".join(pieces))[-1] is None
        assert soon(lambda: service.server.should_exit)


def test_what_takes_longer_than_the_drain_is_told_so(serving: Serving) -> None:
    """A stream that ends in silence looks complete; or the process never ends."""
    with serving(**{"service.drain_s": 0.0}) as service, begun(service, asked(900, n=4)) as (_, pieces):
        service.server.stop()
        last = events("".join(pieces))[-1]
        assert last["error"]["code"] == "unavailable"
        assert soon(lambda: service.server.should_exit)


def test_the_service_ends_with_its_engine(serving: Serving) -> None:
    """It answered its health checks though it could never write again, and nobody started it anew."""
    with serving() as service, service.client() as client:
        engine = service.backend.target.engine
        assert isinstance(engine, Engine) and not service.backend.lost
        assert client.get("/health/ready").status_code == 200
        engine.lost = "the target is lost"
        assert soon(lambda: not any(each.is_serving() for each in service.server.servers))
        assert service.backend.lost == engine.lost


def test_a_lost_engine_lets_answers_end_that_can(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that need no new question encoded were cut off in silence."""
    with serving() as service, begun(service, asked(300)) as (_, pieces):
        monkeypatch.setattr(ServiceBackend, "lost", "the encoder is lost")
        assert soon(lambda: service.backend.rate_limiter.draining)
        assert events("data: {}\n\n" + "".join(pieces))[-1] is None
        assert soon(lambda: not any(each.is_serving() for each in service.server.servers))
        monkeypatch.undo()


def test_a_service_whose_event_loop_hangs_ends(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No request was ever answered again, and a supervisor that waits for the end of the process never knew."""
    ended, goes_on = threading.Event(), threading.Event()
    with serving() as service, service.client() as client:
        assert client.get("/health/live").status_code == 200
        monkeypatch.setattr("os._exit", lambda status: ended.set() if status == 1 else None)
        monkeypatch.setattr(embedded, "_SILENT_S", 1)
        service.server.loop.call_soon_threadsafe(goes_on.wait)
        assert ended.wait(20.0)
        goes_on.set()
    told = capfd.readouterr().err
    assert "the event loop has run nothing for 1 s" in told and "uvicorn/server.py" in told


def test_only_a_loop_that_never_ran_between_many_looks_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent moments were added up; a process that was stopped for a minute was ended when it went on."""
    server: Any = Server.__new__(Server)
    server.should_exit, most = False, embedded._SILENT_S
    looks = [True, *[False] * (most - 1), True, *[False] * most]

    def sleep(_: float) -> None:
        server.has_ticked = looks.pop(0)

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("faulthandler.dump_traceback", lambda _: None)
    monkeypatch.setattr("os._exit", sys.exit)
    with pytest.raises(SystemExit):
        server.watch_loop()
    assert not looks


def test_a_part_that_cannot_be_closed_leaves_no_other_open(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's process lived on behind an error of the library, as did the databases."""
    closed, close_library, close_words = list[str](), Library.close, DictionaryStore.close

    def fail(library: Library) -> None:
        close_library(library)
        raise OSError("no space left")

    def note(store: DictionaryStore) -> None:
        close_words(store)
        closed.append("words")

    monkeypatch.setattr(Library, "close", fail)
    monkeypatch.setattr(DictionaryStore, "close", note)
    with pytest.raises(OSError, match="no space left"), serving():
        pass
    assert closed == ["words"]


def test_a_service_for_others_needs_keys() -> None:
    """Whoever reaches the machine asks, and reads every document."""
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(ConfigError, match="ragspec keys add"):
            run_serve(None, {"service.host": host}, None, None, verbose=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_is_this_machine_only(host: str) -> None:
    """Keys are asked for where nobody else can come, or not where somebody can."""
    assert ServiceSettings(host=host).is_local and ServiceSettings(host=host).is_languagetool_open
    assert not ServiceSettings(host=host, keys_file="k").is_languagetool_open
    assert not ServiceSettings(host="0.0.0.0").is_languagetool_open


def test_a_port_in_use_is_said_before_anything_is_loaded() -> None:
    """A minute of loading a model ends in a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = ServiceSettings(port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match=r"is in use.*--port"), listening(settings):
            pass
    with pytest.raises(ConfigError, match="no address"), listening(ServiceSettings(host="no.such.host.invalid")):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_process_told_to_stop_ends_its_answers_first_and_then_with_zero(parts: Path, sent: signal.Signals) -> None:
    """kill -TERM in the middle of a stream: the client has half an answer, or the supervisor sees a crash."""
    with serve_process(parts) as started, started.client() as client:
        with client.stream("POST", "/v1/chat/completions", json=asked(600)) as reply:
            pieces = reply.iter_text()
            first = next(pieces)
            started.process.send_signal(sent)
            assert soon(lambda: client.get("/health/ready").status_code == 503)
            told = events(first + "".join(pieces))
        assert started.process.wait(60) == 0, started.errors()
    assert told[-1] is None
    assert sum(bool(choice["delta"].get("content")) for event in told[:-1] for choice in event["choices"]) > 10


@pytest.mark.slow
def test_a_second_signal_ends_a_process_at_once(parts: Path) -> None:
    """An operator who wants it gone has to look for kill -9."""
    body = asked(900, n=4)
    with (
        serve_process(parts, drain_s=600.0) as started,
        started.client() as client,
        client.stream("POST", "/v1/chat/completions", json=body) as reply,
    ):
        pieces = reply.iter_text()
        assert next(pieces)
        started.process.send_signal(signal.SIGTERM)
        assert soon(lambda: client.get("/health/ready").status_code == 503)
        started.process.send_signal(signal.SIGTERM)
        assert started.process.wait(10) == 128 + signal.SIGTERM


@pytest.mark.slow
def test_a_process_logs_json_and_nothing_of_what_users_wrote(parts: Path) -> None:
    """A log that is kept for months holds every question, or the key that opens everything."""
    with serve_process(parts) as started, started.client() as client:
        question = {**LONG, "messages": [{"role": "user", "content": "What is the xylophone for?"}], "max_tokens": 4}
        answer = client.post("/v1/chat/completions", json=question, headers={"X-Request-ID": "mine-1"})
        client.post("/v1/chat/completions", json={**question, "model": "zylonite"})
        client.get("/v1/files/quagmire")
        started.process.send_signal(signal.SIGTERM)
        assert started.process.wait(60) == 0
        log, key = started.errors(), started.key
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert answer.status_code == 200 and "mine-1" in {line.get("request_id") for line in lines}
    assert not any(word in log for word in ("xylophone", "zylonite", "quagmire", key))
    assert all({"time", "level", "message"} <= line.keys() for line in lines)


@pytest.fixture
def printed(
    monkeypatch: pytest.MonkeyPatch, letter_index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[str, str]]]:
    """What `ragspec serve` prints to stdout and stderr until it serves, which it does not do here."""
    loaded = SimpleNamespace(model=MODEL, lost="")
    monkeypatch.setattr(serve, "_in_process", lambda *_: contextlib.nullcontext(loaded))
    monkeypatch.setattr("services.app.build_app", lambda *_: None)
    monkeypatch.setattr(embedded, "Server", lambda *_: SimpleNamespace(run=lambda: None))
    monkeypatch.setattr(embedded, "check_certificate", lambda _: None)
    monkeypatch.setattr("services.logs.start_logging", lambda _: None)

    def start(**settings: Any) -> tuple[str, str]:
        given = {"port": 0, "data_dir": str(tmp_path / "data"), **settings}
        overrides = {f"service.{name}": value for name, value in given.items()}
        run_serve(None, {"retriever.index_dir": str(letter_index), **overrides}, None, None, verbose=False)
        return tuple(capsys.readouterr())

    umask = os.umask(0o022)
    yield start
    os.umask(umask)


@pytest.mark.parametrize(
    ("settings", "is_warned"),
    [
        ({"host": "0.0.0.0"}, True),
        ({"host": "0.0.0.0", "ssl_certfile": "cert.pem", "ssl_keyfile": "key.pem"}, False),
        ({"host": "127.0.0.1"}, False),
    ],
)
def test_who_serves_a_network_in_clear_text_is_warned(
    printed: Callable[..., tuple[str, str]], tmp_path: Path, settings: dict[str, Any], is_warned: bool
) -> None:
    """The one line that keeps keys off the network was in no test."""
    key, _ = add_key(tmp_path / "keys.json", "ann")
    out, err = printed(keys_file=str(tmp_path / "keys.json"), **settings)
    assert ("clear text" in " ".join(err.split())) == is_warned
    assert ("https://" in out) == ("ssl_certfile" in settings) and key not in out + err


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_key_is_printed_to_a_terminal_only(
    printed: Callable[..., tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    """What a container prints is kept in logs that others read."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    out, err = printed()
    file = tmp_path / "data" / "local.key"
    key = file.read_text().strip()
    assert len(key) > 40 and (key in out) == is_terminal and key not in err
    assert (f"$(cat {file})" in out) != is_terminal and file.stat().st_mode & 0o777 == 0o600


def test_a_running_service_keeps_its_key_file(
    printed: Callable[..., tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second `ragspec serve` on another port replaced the first one's key, and the first one's clients read the wrong one."""
    file, seen = tmp_path / "data" / "local.key", list[str]()

    def second() -> None:
        seen.append(file.read_text())
        monkeypatch.setattr(embedded, "Server", lambda *_: SimpleNamespace(run=lambda: None))
        with pytest.raises(ConfigError, match="--port 0 --data FOLDER"):
            printed()
        printed(data_dir=str(tmp_path / "other"))
        seen.append(file.read_text())

    monkeypatch.setattr(embedded, "Server", lambda *_: SimpleNamespace(run=second))
    printed()
    assert seen[0] == seen[1] == file.read_text()
    printed()
    assert file.read_text() != seen[0]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_conversation_over_http_that_a_kill_interrupts_is_that_of_python(parts: Path, temperature: float) -> None:
    """Python's chat builds other prompts than the service; a killed service forgets the turns or their passages."""
    questions = ("What does the river do?", "And the mill?", "Who says so?", "When is it open?", "Why?")
    same = {"max_tokens": 24, "temperature": temperature, "seed": 5, "ignore_eos": True}
    texts, conversation = [], ""
    for some in (questions[:3], questions[3:]):
        with serve_process(parts) as started, started.client() as client:
            conversation = conversation or client.post("/v1/conversations", json={}).json()["id"]
            for question in some:
                body = same | {"model": MODEL, "conversation": conversation}
                body["messages"] = [{"role": "user", "content": question}]
                reply = client.post("/v1/chat/completions", json=body).json()
                texts.append(reply["choices"][0]["message"]["content"])
    config = load_config(parts / "service.yaml", **{"retriever.index_dir": str(parts / "index")})
    with Pipeline.from_config(config) as pipeline, pipeline.chat() as chat:
        assert [chat.ask(question, **same).text for question in questions] == texts
    assert len(set(texts)) > 2

"""A small service, real in every part: a tiny target's engine, an index of two tenants' documents, a server on a socket.

>>> with started(config, backend, keys) as service, service.client() as client:
...     client.get("/health/live")
"""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
from letter_encoder import LetterEncoder
from raw_http import head
from tiny_target import SENTENCES, tiny_engine

from ragspec.config import EncoderConfig, load_settings
from ragspec.core import Document
from ragspec.drafting.copy import CopyDrafter
from ragspec.engine.engine import Engine
from ragspec.engine.target import Target
from ragspec.retrieval.encoder import Encoder
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.retriever import Retriever, build_index
from services.app import build_app
from services.backend import LoadedModel, ServiceBackend
from services.embedded import Server, address_of, listening
from services.keys import KeyFile, add_key
from services.settings import ServiceConfig

MODEL = "tiny"
CONTEXT, KV_SLOTS = 1024, 4096
DOCUMENTS = (
    *(Document(f"all-{n}", text, title=f"Sentence {n}", source=f"sentences/{n}") for n, text in enumerate(SENTENCES)),
    Document("ann-1", "The password of the old mill is swordfish.", title="Ann's note", owner="ann"),
    Document("bob-1", "The bridge of the valley is closed on Mondays.", title="Bob's note", owner="bob"),
)


@dataclass(frozen=True)
class Keys:
    """Of a trusted caller without a tenant, and of two tenants."""

    trusted: str
    ann: str
    bob: str
    path: Path


@dataclass(frozen=True)
class Service:
    """One that runs: `url`, its backend, and clients."""

    url: str
    backend: ServiceBackend
    keys: Keys
    server: Server

    def headers(self, key: str | None = None) -> dict[str, str]:
        """With the trusted key unless another is named; "" is none."""
        key = self.keys.trusted if key is None else key
        return {"Authorization": f"Bearer {key}"} if key else {}

    def metrics(self) -> list[str]:
        """Lines of Prometheus' text."""
        return self.backend.metrics.text().decode().splitlines()

    @property
    def bearer(self) -> str:
        """A header, for requests that are written by hand."""
        return f"Authorization: Bearer {self.keys.trusted}"

    def counted(self, name: str) -> float:
        """The sum of the samples whose lines begin with `name`."""
        return sum(float(row.rpartition(" ")[2]) for row in self.metrics() if row.startswith(name))

    def aborts(self, reason: str) -> float:
        """How many answers were given up for that reason."""
        return self.counted(f'ragspec_aborts_total{{model_name="{MODEL}",reason="{reason}"}} ')

    def json_head(self, *lines: str, path: str = "/v1/chat/completions") -> bytes:
        """The head of a POST of JSON with the trusted key, and more lines, for `raw_http`."""
        return head("POST", path, self.bearer, "Content-Type: application/json", *lines)

    def client(self, key: str | None = None) -> httpx.Client:
        """Why the long timeout: the first request of an engine may compile kernels on a busy machine."""
        return httpx.Client(base_url=self.url, headers=self.headers(key), timeout=600.0)

    def openai(self, key: str | None = None) -> openai.OpenAI:
        """OpenAI's own client."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key or self.keys.trusted, max_retries=0)


HASTY = {"service.timeouts.client_s": 0.4, "service.limits.body_bytes": 8192}
"""Settings with little patience, and small bodies."""

Serving = Callable[..., AbstractContextManager[Service]]
"""`with serving(**{"service.limits.max_in_flight": 2}) as service:` starts one with these settings.

`index`: another folder than the shared index; `engine`: settings of the engine, as `tiny_engine` takes them.
"""


@contextmanager
def started(config: ServiceConfig, backend: ServiceBackend, keys: Keys) -> Iterator[Service]:
    """Served from a thread until the block ends."""
    with listening(config.service) as listener:
        server = Server(build_app(backend, KeyFile(keys.path)), backend, listener)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        try:
            yield Service(address_of(listener), backend, keys, server)
        finally:
            server.should_exit = True
            thread.join(30.0)
            assert not thread.is_alive(), "the server did not stop"


def make_keys(path: Path) -> Keys:
    trusted, _ = add_key(path, "", key_id="operator", trusted=True)
    ann, _ = add_key(path, "ann", key_id="ann")
    bob, _ = add_key(path, "bob", key_id="bob")
    return Keys(trusted, ann, bob, path)


def service_engine(target: Target, **options: Any) -> Engine:
    """Drafts by copying. `options`: as `tiny_engine` takes them."""
    drafter = CopyDrafter(target.tokenizer, target.eos_ids)
    return tiny_engine(target, [drafter], **{"num_kv_slots": KV_SLOTS, **options})


def make_backend(config: ServiceConfig, target: Target, engine: dict[str, Any]) -> ServiceBackend:
    return backend_of(service_engine(target, **engine), config)


def backend_of(engine: Engine, config: ServiceConfig) -> ServiceBackend:
    """On the index that `config` names, built by `LetterEncoder`."""
    encoder = LetterEncoder()
    store = Store.open(Path(config.retriever.index_dir), encoder.identity)
    retriever = Retriever(encoder, store, config.retriever)
    return ServiceBackend(
        {config.model_name: LoadedModel(engine, engine.target.tokenizer)}, retriever, config, engine.close
    )


@contextmanager
def served(engine: Engine, folder: Path, index: Path, **overrides: Any) -> Iterator[Service]:
    """A service of `engine` on an index, with keys and data in `folder`. `overrides`: settings by their dotted names."""
    keys = make_keys(folder / "keys.json")
    service = {"model": MODEL, "port": 0, "keys_file": str(keys.path), "data_dir": str(folder / "data")}
    settings = {f"service.{name}": value for name, value in service.items()} | {"retriever.index_dir": str(index)}
    config = load_settings(ServiceConfig, **settings | overrides)
    with backend_of(engine, config) as backend, started(config, backend, keys) as running:
        yield running


def save_parts(folder: Path, model: Path) -> Path:
    """For services in other processes: `folder` with a target, `model`, and an `index` by the packaged encoder."""
    (folder / "model").symlink_to(model)
    build_index(DOCUMENTS, folder / "index", Encoder.load(EncoderConfig()))
    return folder


class ServeProcess:
    """`ragspec serve` in a process of its own, of `save_parts`' folder. `settings`: of the service."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        config = {
            "target": {"model": str(folder / "model")},
            "engine": {"max_kv_tokens": 4096, "num_threads": 1},
            "service": {"model": MODEL, "data_dir": str(folder / "data"), **settings},
        }
        (folder / "service.yaml").write_text(json.dumps(config))
        command = [sys.executable, "-m", "ragspec.cli", "serve", "--config", str(folder / "service.yaml")]
        self.log = (folder / "log").open("w+")
        self.process = subprocess.Popen(
            [*command, "--index", str(folder / "index"), "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None
        self.url, self.key_file = "", Path()
        for line in self.process.stdout:
            if found := re.search(r"OPENAI_BASE_URL=(\S+)/v1", line):
                self.url = found[1]
            if found := re.search(r"OPENAI_API_KEY=\$\(cat (.+)\)", line):
                self.key_file = Path(found[1])
            assert "rs-" not in line, "a container's log holds the key"
            if "stops it" in line:
                break
        assert self.url and self.key_file.is_file(), self.errors()

    @property
    def key(self) -> str:
        return self.key_file.read_text().strip()

    def errors(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {self.key}"}, timeout=120.0)


@contextmanager
def serve_process(folder: Path, **settings: Any) -> Iterator[ServeProcess]:
    """Killed when the block ends."""
    started = ServeProcess(folder, **settings)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.communicate()
        started.log.close()


def soon(is_so: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    """Whether it becomes so, within a time that is long enough for any machine."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True

"""A service in this process, on a free port, and its clients in another process; llama.cpp's server beside.

>>> with service_here(backend, ("ann", "bob")) as service:
...     answers = service.timed(bodies, users=16)
"""

import gc
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.benchmarks.harness import Run
from pipelines.benchmarks.users.clients import CHAT, Answer
from ragspec.config import EngineConfig, RetrieverConfig
from ragspec.errors import EngineError
from ragspec.evaluation.datasets import NUM_QUESTIONS, RagList
from ragspec.numerics.threads import num_processors
from services.app import build_app
from services.backend import ServiceBackend
from services.embedded import Server, address_of, listening
from services.keys import KeyFile, add_key
from services.settings import KeyLimits, ServiceConfig, ServiceSettings

Users = int | Sequence[float]
"""How many ask at a time, or when each body is sent, in seconds from the beginning."""

_START_S = 30.0


@dataclass(frozen=True)
class Service:
    """`keys`: by tenant; all keys are trusted, so that clients see how answers were made."""

    url: str
    keys: Mapping[str, str]
    backend: ServiceBackend

    def timed(self, bodies: Sequence[Mapping[str, Any]], users: Users = 1, tenant: str = "") -> list[Answer]:
        """The answer to each chat; without a tenant, the first tenant asks. Raises: EngineError."""
        return timed_answers(self.url, self.keys[tenant or next(iter(self.keys))], CHAT, bodies, users)


@contextmanager
def service_here(
    backend: ServiceBackend, tenants: Sequence[str] = ("ann",), unlimited: Collection[str] = ()
) -> Iterator[Service]:
    """Serves until the block ends; the backend is not closed. `unlimited`: tenants whose keys have no limit of requests.

    Raises: ConfigError, EngineError if it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="ragspec-") as folder, listening(backend.config.service) as listener:
        file = Path(folder) / "keys.json"
        limits = dict.fromkeys(unlimited, KeyLimits(concurrency=backend.config.service.limits.max_in_flight))
        keys = {tenant: add_key(file, tenant, trusted=True, limits=limits.get(tenant))[0] for tenant in tenants}
        server = Server(build_app(backend, KeyFile(file)), backend, listener)
        thread = threading.Thread(target=server.run, name="ragspec-service", daemon=True)
        thread.start()
        deadline = time.monotonic() + _START_S
        while not server.started:
            if not thread.is_alive() or time.monotonic() > deadline:
                raise EngineError("the service did not start")
            time.sleep(0.01)
        gc.collect()
        gc.freeze()  # as `ragspec serve` does
        try:
            yield Service(address_of(listener), keys, backend)
        finally:
            gc.unfreeze()
            server.stop()
            thread.join()


@contextmanager
def backend_of(run: Run) -> Iterator[tuple[ServiceBackend, RagList]]:
    """A backend with room for many requests at once, over a copy of the corpus's index, and the questions to ask.

    Raises: ConfigError, ModelError, StoreError.
    """
    listed = run.questions(NUM_QUESTIONS)
    with tempfile.TemporaryDirectory(prefix="ragspec-") as folder:
        index_dir = Path(folder) / "index"
        shutil.copytree(run.store(listed.documents).index_dir, index_dir)
        config = ServiceConfig(
            encoder=run.encoder,
            target=run.target,
            engine=EngineConfig(max_num_seqs=32),
            retriever=RetrieverConfig(index_dir=str(index_dir)),
            service=ServiceSettings(port=0, data_dir=f"{folder}/data", languagetool_open=False),
        )
        with ServiceBackend.embedded(config) as backend:
            yield backend, listed


def timed_answers(url: str, key: str, path: str, bodies: Sequence[Mapping[str, Any]], users: Users) -> list[Answer]:
    """The answer to each body, timed by clients in their own process. Raises: EngineError."""
    sent = {"concurrency": users} if isinstance(users, int) else {"arrivals": list(users)}
    orders = {"url": url, "key": key, "path": path, "bodies": list(bodies), **sent}
    answers: list[Answer] = run_clients(orders)
    return answers


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        return int(free.getsockname()[1])


@contextmanager
def started(command: Sequence[str], url: str, most_s: float) -> Iterator[float]:
    """A program that runs until the block ends; yields the seconds until its address answered.

    Raises: EngineError if it does not answer in time.
    """
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not _answers(url):
            if time.perf_counter() - begin > most_s or process.poll() is not None:
                raise EngineError(f"{Path(command[0]).name} was not ready in time")
            time.sleep(0.05)
        yield time.perf_counter() - begin
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url):
            return True
    except (urllib.error.URLError, ConnectionError):
        return False


def run_clients(orders: Mapping[str, Any]) -> Any:
    """The result of `pipelines.benchmarks.users.clients` in their own process. Raises: EngineError with their last line."""
    command = [sys.executable, "-m", "pipelines.benchmarks.users.clients"]
    done = subprocess.run(command, input=json.dumps(orders), capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or "no word").splitlines()[-1]
        raise EngineError(f"the benchmark's clients failed: {last}")
    return json.loads(done.stdout.splitlines()[-1])


_LLAMA_START_S = 120.0
_LLAMA_PAGE = 256
"""llama.cpp rounds the room of a slot up to so many tokens."""


def llama_server() -> str | None:
    """The program that `make peers` puts beside Python, or one on the path."""
    beside = Path(sys.executable).with_name("llama-server")
    return str(beside) if beside.is_file() else shutil.which(beside.name)


@contextmanager
def serving_llama(path: Path, users: int, room: int) -> Iterator[str]:
    """The address of a server with a slot of `room` tokens for each user. Raises: EngineError."""
    program = llama_server()
    assert program is not None, "whoever calls this has asked for the program"
    slot_tokens, port, threads = -(-(room + 1) // _LLAMA_PAGE) * _LLAMA_PAGE, str(free_port()), str(num_processors())
    options = ["-np", str(users), "-c", str(users * slot_tokens), "-t", threads, "-tb", threads, "--no-webui"]
    url, command = f"http://127.0.0.1:{port}", [program, "-m", str(path), "--host", "127.0.0.1", "--port", port]
    with started([*command, *options], f"{url}/health", _LLAMA_START_S):
        yield url

"""The suite `attack`: one tenant does its worst while another chats. The service must live, answer, and share fairly.

    >>> run_attacks(settings, tick).result["attacks_survived"]
    echo '{"attack": "streams", "url": ..., "key": ..., "model": ...}' | python -m pipelines.benchmarks.attack

The attacker runs in its own process, until it is killed. Attacks without load are checks in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from pipelines.benchmarks.service import Service, backend_of, chat_body, service_here
from ragspec.errors import ConfigError, RagspecError
from ragspec.evaluation.report import Metric, Result, Table, at_least, at_most
from ragspec.evaluation.suite import Outcome, Settings, Suite
from ragspec.evaluation.timing import Tick
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.search.bm25 import POSTING_FILES, SparseConfig, TermStatistics, sparse_query

ATTACKER, VICTIM = "mallory", "bob"
_JSON = {"Content-Type": "application/json"}
_FORM = (
    b"POST /v2/check HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-www-form-urlencoded\r\nContent-Length: "
)
_FROM = ("127.0.0.2", 0)
"""The attacker's own address: connections are counted by address."""
_MAX_TOKENS, _BEGUN_S = 24, 1.0


class Attacker:
    """What a client with a key, or without one, can send. Every method goes on until its process is killed."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session, self._url, self._model = session, url, model

    async def bodies(self) -> None:
        lists = b'{"model": "m", "prompt": [' + b"[]," * 3_000_000 + b"[]]}"
        keys = b'{"model": "m", ' + b",".join(b'"k%d":1' % number for number in range(700_000)) + b"}"
        await self._forever(4, lambda number: self._post("/v1/completions", data=(lists, keys)[number % 2]))

    async def predictions(self) -> None:
        prediction = {"type": "content", "content": "a word " * 1_200_000}
        body = chat_body(self._model, "Say it.", max_tokens=8, retrieval=False, prediction=prediction)
        await self._forever(8, lambda _: self._post("/v1/chat/completions", json=body))

    async def streams(self) -> None:
        texts = [f"Tell me everything about number {number}." for number in range(30)]
        body = {"n": 8, "max_tokens": 256, "ignore_eos": True, "temperature": 1.0, "retrieval": False}
        await self._forever(
            30, lambda n: self._post("/v1/chat/completions", json=chat_body(self._model, texts[n], **body))
        )

    async def deletions(self) -> None:
        small = [await self._attached(f"{number}.txt", "A zebra.") for number in range(45)]
        await self._attached("large.csv", _rows(20_000))
        await asyncio.gather(*(self._session.delete(f"{self._url}/v1/files/{name}") for name in small))

    async def indexing(self) -> None:
        for number in range(4):
            await self._attached(f"{number}.csv", _rows(90_000))

    async def records(self) -> None:
        metadata = {f"key {number}": "x" * 500 for number in range(16)}
        await self._forever(8, lambda _: self._post("/v1/vector_stores", json={"metadata": metadata}))

    async def connections(self) -> None:
        await self._silent(1100, b"")

    async def forms(self) -> None:
        await self._silent(40, _FORM + b"100\r\n\r\ntext=a")

    async def embeddings(self) -> None:
        body = {"model": self._model, "input": "a word " * 1_200_000}
        await self._forever(4, lambda _: self._post("/v1/embeddings", json=body))

    async def _forever(self, at_once: int, send: Callable[[int], Awaitable[None]]) -> None:
        async def client(number: int) -> None:
            while True:
                with contextlib.suppress(aiohttp.ClientError, OSError):
                    await send(number)
                await asyncio.sleep(0.05)

        await asyncio.gather(*(client(number) for number in range(at_once)))

    async def _silent(self, count: int, sent: bytes) -> None:
        where = urlsplit(self._url)
        while True:
            opened = []
            for _ in range(count):
                with contextlib.suppress(OSError):
                    opened.append(await asyncio.open_connection(where.hostname, where.port, local_addr=_FROM))
                    opened[-1][1].write(sent)
            await asyncio.sleep(5.0)
            for _, writer in opened:
                writer.close()

    async def _post(self, path: str, **body: Any) -> None:
        headers = _JSON if "data" in body and isinstance(body["data"], bytes) else {}
        async with self._session.post(self._url + path, headers=headers, **body) as reply:
            await reply.read()

    async def _attached(self, name: str, text: str) -> str:
        """Uploads a file and attaches it to a new store; the file's id."""
        form = aiohttp.FormData({"purpose": "assistants"})
        form.add_field("file", text.encode(), filename=name)
        async with self._session.post(f"{self._url}/v1/files", data=form) as reply:
            file = str((await reply.json())["id"])
        await self._post("/v1/vector_stores", json={"file_ids": [file]})
        return file


def _rows(count: int) -> str:
    return "text\n" + "".join(f"Row number {number} says nothing of note.\n" for number in range(count))


LOADS = ("bodies", "predictions", "deletions", "indexing", "streams", "connections", "records", "forms", "embeddings")
"""Attacks that are methods of `Attacker`."""


def private_files(service: Service) -> bool:
    """Nobody else on the machine reads what tenants store."""
    folder = Path(service.backend.config.service.data_dir)
    return all(path.stat().st_mode & 0o077 == 0 for path in (folder, *folder.rglob("*")))


def overwriting(service: Service) -> bool:
    """A process whose open index is overwritten lives on."""
    folder = Path(service.backend.config.service.data_dir) / "overwritten"
    shutil.copytree(service.backend.config.retriever.index_dir, folder)
    ended = _attacker({"attack": "overwriting", "folder": str(folder)})
    ended.communicate()
    return ended.returncode == 0


def clear_text(service: Service) -> bool:
    """A service for a network needs keys, and a certificate that cannot be used is refused before anything is loaded."""
    from ragspec.cli.serve import run_serve

    refused = 0
    for options in ({"service.host": "0.0.0.0"}, {"service.ssl_certfile": __file__, "service.keys_file": __file__}):
        with contextlib.suppress(SystemExit):
            try:
                run_serve(
                    None,
                    {"retriever.index_dir": service.backend.config.retriever.index_dir, **options},
                    None,
                    None,
                    verbose=False,
                )
            except ConfigError:
                refused += 1
    return refused == 2


def pages(service: Service) -> bool:
    """A page elsewhere does not have its visitor's service check a text."""
    request = urllib.request.Request(
        f"{service.url}/v2/check?language=en-US&text=a", headers={"Sec-Fetch-Site": "cross-site"}
    )
    try:
        with urllib.request.urlopen(request):
            return False
    except urllib.error.HTTPError as refused:
        return refused.code in (401, 403)


CHECKS: Mapping[str, Callable[[Service], bool]] = {
    "private_files": private_files,
    "overwriting": overwriting,
    "clear_text": clear_text,
    "pages": pages,
}


def run_attacks(settings: Settings, tick: Tick) -> Outcome:
    """Raises: ConfigError, ModelError, StoreError, EngineError."""
    names, num_chats = (*LOADS, *CHECKS), 2 if settings.quick else 6
    rows: dict[str, Result] = {}
    with (
        backend_of(settings, tick, languagetool_open=False) as (backend, listed),
        service_here(backend, (ATTACKER, VICTIM)) as service,
    ):
        bodies = [
            chat_body(backend.model, question.text, max_tokens=_MAX_TOKENS, ignore_eos=True, seed=1)
            for question in listed.questions[:num_chats]
        ]
        service.timed(bodies, tenant=VICTIM)  # the first answers fill the caches
        quiet = service.timed(bodies, tenant=VICTIM)
        for number, name in enumerate(names):
            tick("attacks", number, len(names))
            rows[name] = attacked(service, name, bodies, quiet)
        tick("attacks", len(names), len(names))
    return Outcome(
        {
            "attacks_survived": sum(row["survived"] for row in rows.values()),
            "health_max_s": max(row["health_s"] for row in rows.values()),
            "other_tenant_ratio_max": max(row["ratio"] for row in rows.values()),
            "quiet_s": statistics.median(answer["total_s"] for answer in quiet),
            "num_attacks": len(names),
            "label": listed.label,
            "rows": rows,
        }
    )


def attacked(
    service: Service, name: str, bodies: Sequence[Mapping[str, Any]], quiet: Sequence[Mapping[str, Any]]
) -> Result:
    """The victim's chats and the health check during one attack. `ratio`: of the time of the same chats when it is quiet."""
    with _health(service.url) as health, _attacking(service, name):
        is_refused = CHECKS[name](service) if name in CHECKS else True
        answers = service.timed(bodies, tenant=VICTIM)
    is_whole = all(
        answer["ended"] and answer["text"] == one["text"] for answer, one in zip(answers, quiet, strict=True)
    )
    ratio = sum(answer["total_s"] for answer in answers) / sum(answer["total_s"] for answer in quiet)
    return {"survived": is_refused and is_whole, "health_s": max(health), "ratio": ratio}


@contextlib.contextmanager
def _attacking(service: Service, name: str) -> Iterator[None]:
    if name not in LOADS:
        yield
        return
    process = _attacker(
        {"attack": name, "url": service.url, "key": service.keys[ATTACKER], "model": service.backend.model}
    )
    time.sleep(_BEGUN_S)
    try:
        yield
    finally:
        process.kill()
        process.communicate()


def _attacker(orders: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "pipelines.benchmarks.attack"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{json.dumps(orders)}\n".encode())
    process.stdin.flush()
    process.stdout.readline()  # it has begun
    return process


@contextlib.contextmanager
def _health(url: str) -> Iterator[list[float]]:
    """Seconds of each answer of the health check until the block ends; 30 for one that failed."""
    seconds, ended = list[float](), threading.Event()

    def watch() -> None:
        while not ended.is_set() or not seconds:
            begin = time.perf_counter()
            try:
                with urllib.request.urlopen(f"{url}/health/live", timeout=30.0):
                    seconds.append(time.perf_counter() - begin)
            except OSError:
                seconds.append(30.0)
            ended.wait(0.1)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seconds
    finally:
        ended.set()
        thread.join()


def attack_tables(result: Result) -> dict[str, Table]:
    return {"attacks": result["rows"]}


METRICS = (
    Metric("attacks_survived", "attacks during which another tenant's chats ended with their own texts", at_least(13)),
    Metric("health_max_s", "seconds of the slowest health check during any attack", at_most(1)),
    Metric(
        "other_tenant_ratio_max", "time of another tenant's chats during an attack, of their quiet time", at_most(3)
    ),
    Metric("quiet_s", "seconds of a chat when it is quiet, median"),
)
SUITE = Suite("attack", run_attacks, METRICS, tables=attack_tables)


def overwrite(folder: Path) -> None:
    """Opens an index, overwrites its postings, and searches and reads it."""
    for store in [Store.open(folder)]:
        for name in POSTING_FILES:
            for path in folder.rglob(name):
                with open(path, "r+b") as file:
                    file.seek(128)
                    file.write(b"\xff" * (path.stat().st_size - 128))
        for live in store.segments:
            query = sparse_query(["the", "a"], TermStatistics(10, 100, {"the": 1, "a": 1}), SparseConfig())
            with contextlib.suppress(RagspecError):
                live.segment.postings.scores(query)


async def main(orders: Mapping[str, Any]) -> None:
    print("begun", flush=True)
    if orders["attack"] == "overwriting":
        overwrite(Path(orders["folder"]))
        return
    headers, timeout = {"Authorization": f"Bearer {orders['key']}"}, aiohttp.ClientTimeout(total=600.0)
    connector = aiohttp.TCPConnector(limit=0, family=socket.AF_INET, local_addr=_FROM)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
        await getattr(Attacker(session, orders["url"], orders["model"]), orders["attack"])()
        await asyncio.sleep(600.0)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.stdin.readline())))

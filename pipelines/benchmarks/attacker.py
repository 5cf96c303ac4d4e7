"""The attacker of the suite `attack`: what a client with a key, or without one, can send, until its process is killed.

    echo '{"attack": "streams", "url": ..., "key": ..., "model": ...}' | python -m pipelines.benchmarks.attacker

Prints a line when it begins, and one for each request that takes effect. Imports nothing of the service: a process that loads
torch first would begin its attack when the measurement is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from pipelines.benchmarks.clients import chat_body

_JSON = {"Content-Type": "application/json"}
_FORM = (
    b"POST /v2/check HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-www-form-urlencoded\r\nContent-Length: "
)
_FROM = ("127.0.0.2", 0)
"""The attacker's own address: connections are counted by address."""


class Attacker:
    """What a client with a key, or without one, can send. Every method goes on until its process is killed."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session, self._url, self._model = session, url, model

    async def bodies(self) -> None:
        lists = b'{"model": "m", "prompt": [' + b"[]," * 3_000_000 + b"[]]}"
        keys = b'{"model": "m", ' + b",".join(b'"k%d":1' % number for number in range(700_000)) + b"}"
        await self._forever(4, lambda number: self._post("/v1/completions", 413, data=(lists, keys)[number % 2]))

    async def predictions(self) -> None:
        prediction = {"type": "content", "content": "a word " * 1_200_000}
        body = chat_body(self._model, "Say it.", max_tokens=8, retrieval=False, prediction=prediction)
        data = json.dumps(body).encode()
        await self._forever(8, lambda _: self._post("/v1/chat/completions", 200, data=data))

    async def streams(self) -> None:
        texts = [f"Tell me everything about number {number}." for number in range(30)]
        body = {"n": 8, "max_tokens": 256, "ignore_eos": True, "temperature": 1.0, "retrieval": False}
        await self._forever(
            30, lambda n: self._post("/v1/chat/completions", 200, json=chat_body(self._model, texts[n], **body))
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
        await self._forever(8, lambda _: self._post("/v1/vector_stores", 200, json={"metadata": metadata}))

    async def connections(self) -> None:
        await self._silent(1100, b"")

    async def forms(self) -> None:
        await self._silent(40, _FORM + b"100\r\n\r\ntext=a")

    async def embeddings(self) -> None:
        body = {"model": self._model, "input": "a word " * 1_200_000}
        await self._forever(4, lambda _: self._post("/v1/embeddings", 400, json=body))

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
                    took_effect()
            await asyncio.sleep(5.0)
            for _, writer in opened:
                writer.close()

    async def _post(self, path: str, effect: int, **body: Any) -> None:
        """`effect`: the status of an answer to a request that was not held off earlier."""
        headers = _JSON if "data" in body and isinstance(body["data"], bytes) else {}
        async with self._session.post(self._url + path, headers=headers, **body) as reply:
            if reply.status == effect:
                took_effect()
            await reply.read()

    async def _attached(self, name: str, text: str) -> str:
        """Uploads a file and attaches it to a new store; the file's id."""
        form = aiohttp.FormData({"purpose": "assistants"})
        form.add_field("file", text.encode(), filename=name)
        async with self._session.post(f"{self._url}/v1/files", data=form) as reply:
            file = str((await reply.json())["id"])
        await self._post("/v1/vector_stores", 200, json={"file_ids": [file]})
        return file


def took_effect() -> None:
    print(flush=True)


def _rows(count: int) -> str:
    return "text\n" + "".join(f"Row number {number} says nothing of note.\n" for number in range(count))


def overwrite(folder: Path) -> None:
    """Opens an index, overwrites its postings, and searches and reads it."""
    from ragspec.errors import RagspecError
    from ragspec.retrieval.index.store import Store
    from ragspec.retrieval.search.bm25 import POSTING_FILES, SparseConfig, TermStatistics, sparse_query

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

"""Attacks of one tenant on a service, beside the chats of another tenant, which must end with their own texts.

    >>> attacked(service, "streams", bodies, quiet, least_s=5.0)["survived"]

The attacker is this module as a process, which is killed after each attack:

    echo '{"attack": "streams", "url": ..., "key": ..., "model": ...}' | python -m pipelines.benchmarks.users.attacks

It prints a line when it begins, and one for each request that takes effect. Why it imports nothing of the service: a process that
loads torch first would begin when the measurement is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp

from pipelines.benchmarks.users.clients import Answer, chat_body

if TYPE_CHECKING:
    from pipelines.benchmarks.users.service import Service

ATTACKER, VICTIM = "mallory", "bob"
ATTACKS = {
    "bodies": 4,
    "predictions": 2,
    "embeddings": 4,
    "streams": 4,
    "connections": 1000,
    "forms": 40,
    "records": 40,
    "indexing": 1,
}
"""Methods of `Attacker`, and how many requests take effect before an attack is measured. `indexing` leaves work behind, which
would be measured as the next attack, so it comes last."""

_BEGIN_S = 60.0
_FAILED_S = 30.0
_LISTS = b'{"model": "m", "prompt": [' + b"[]," * 3_000_000 + b"[]]}"
_FORM = (
    b"POST /v2/check HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-www-form-urlencoded\r\n"
    b"Content-Length: 100\r\n\r\ntext=a"
)
_ATTACKER_ADDRESS = ("127.0.0.2", 0)
"""Connections are counted by address."""


def attacked(
    service: Service,
    name: str,
    bodies: Sequence[Mapping[str, Any]],
    quiet: Sequence[Answer],
    least_s: float = 0.0,
    begin_s: float = _BEGIN_S,
) -> dict[str, Any]:
    """The victim's chats and the health check during an attack, for `least_s` and one round at least.

    `quiet`: the answers to the same bodies without an attack. `ratio` and `first_ratio`: the whole time of the chats and the time
    to their first tokens over the quiet times. `health_s`: the slowest health check. An attack without effect after `begin_s` is
    not survived: it attacked nothing.
    """
    pairs = list[tuple[Answer, Answer]]()
    with _health_checks(service.url) as health_s, attacking(service, name) as effects:
        deadline = time.monotonic() + begin_s
        while len(effects) < ATTACKS[name] and time.monotonic() < deadline:
            time.sleep(0.05)
        has_effect = len(effects) >= ATTACKS[name]
        end_s = time.monotonic() + least_s
        while not pairs or time.monotonic() < end_s:
            pairs += zip(service.timed(bodies, tenant=VICTIM), quiet, strict=True)
    return {
        "survived": has_effect and all(answer["ended"] and answer["text"] == own["text"] for answer, own in pairs),
        "health_s": max(health_s),
        "ratio": sum(answer["total_s"] for answer, _ in pairs) / sum(own["total_s"] for _, own in pairs),
        "first_ratio": sum(_first_s(answer) for answer, _ in pairs) / sum(_first_s(own) for _, own in pairs),
        "num_effects": len(effects),
    }


def _first_s(answer: Answer) -> float:
    return float(answer["first_s"] or answer["total_s"])


@contextlib.contextmanager
def attacking(service: Service, name: str) -> Iterator[Sequence[bytes]]:
    """The attack goes on until the block ends. Yields a list that grows with each request that takes effect."""
    effects = list[bytes]()
    orders = {"attack": name, "url": service.url, "key": service.keys[ATTACKER], "model": service.backend.model}
    command = [sys.executable, "-m", "pipelines.benchmarks.users.attacks"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{json.dumps(orders)}\n".encode())
        process.stdin.flush()
        process.stdout.readline()
        thread = threading.Thread(target=effects.extend, args=(process.stdout,))
        thread.start()
        try:
            yield effects
        finally:
            process.kill()
            thread.join()


@contextlib.contextmanager
def _health_checks(url: str) -> Iterator[list[float]]:
    """Seconds of each health check until the block ends; `_FAILED_S` for a check that failed."""
    seconds, ended = list[float](), threading.Event()

    def watch() -> None:
        while not ended.is_set() or not seconds:
            begin = time.perf_counter()
            try:
                with urllib.request.urlopen(f"{url}/health/live", timeout=_FAILED_S):
                    seconds.append(time.perf_counter() - begin)
            except OSError:
                seconds.append(_FAILED_S)
            ended.wait(0.1)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seconds
    finally:
        ended.set()
        thread.join()


class Attacker:
    """Requests of a client with a key, or without one. Every method goes on until its process is killed."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session, self._url, self._model = session, url, model

    async def bodies(self) -> None:
        """Bodies of millions of lists and of keys."""
        keys = b'{"model": "m", ' + b",".join(b'"k%d":1' % number for number in range(700_000)) + b"}"
        await self._forever(4, lambda number: self._post("/v1/completions", 413, data=(_LISTS, keys)[number % 2]))

    async def predictions(self) -> None:
        """Predicted outputs of megabytes."""
        prediction = {"type": "content", "content": "a word " * 1_200_000}
        body = chat_body(self._model, "Say it.", max_tokens=8, retrieval=False, prediction=prediction)
        data = json.dumps(body).encode()
        await self._forever(8, lambda _: self._post("/v1/chat/completions", 200, data=data))

    async def embeddings(self) -> None:
        """Inputs that no encoder reads."""
        body = {"model": self._model, "input": "a word " * 1_200_000}
        await self._forever(4, lambda _: self._post("/v1/embeddings", 400, json=body))

    async def streams(self) -> None:
        """A flood of 240 choices at once."""
        options = {"n": 8, "max_tokens": 256, "ignore_eos": True, "temperature": 1.0, "retrieval": False}
        bodies = [chat_body(self._model, f"Tell me everything about number {n}.", **options) for n in range(30)]
        await self._forever(30, lambda number: self._post("/v1/chat/completions", 200, json=bodies[number]))

    async def connections(self) -> None:
        """Silent connections."""
        await self._silent(1100, b"")

    async def forms(self) -> None:
        """Half-sent forms."""
        await self._silent(40, _FORM)

    async def records(self) -> None:
        """Empty stores with large metadata."""
        metadata = {f"key {number}": "x" * 500 for number in range(16)}
        await self._forever(8, lambda _: self._post("/v1/vector_stores", 200, json={"metadata": metadata}))

    async def indexing(self) -> None:
        """Four files of 90,000 rows each, for the index."""
        text = "text\n" + "".join(f"Row number {number} says nothing of note.\n" for number in range(90_000))
        for number in range(4):
            form = aiohttp.FormData({"purpose": "assistants"})
            form.add_field("file", text.encode(), filename=f"{number}.csv")
            async with self._session.post(f"{self._url}/v1/files", data=form) as reply:
                file = (await reply.json())["id"]
            await self._post("/v1/vector_stores", 200, json={"file_ids": [file]})

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
                    opened.append(
                        await asyncio.open_connection(where.hostname, where.port, local_addr=_ATTACKER_ADDRESS)
                    )
                    opened[-1][1].write(sent)
                    print(flush=True)
            await asyncio.sleep(5.0)
            for _, writer in opened:
                writer.close()

    async def _post(self, path: str, effect: int, **body: Any) -> None:
        """`effect`: the status of an answer to a request that was not held off earlier."""
        headers = {"Content-Type": "application/json"} if "data" in body else {}
        async with self._session.post(self._url + path, headers=headers, **body) as reply:
            if reply.status == effect:
                print(flush=True)
            await reply.read()


async def main(orders: Mapping[str, Any]) -> None:
    print("begun", flush=True)
    headers, timeout = {"Authorization": f"Bearer {orders['key']}"}, aiohttp.ClientTimeout(total=600.0)
    connector = aiohttp.TCPConnector(limit=0, family=socket.AF_INET, local_addr=_ATTACKER_ADDRESS)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
        await getattr(Attacker(session, orders["url"], orders["model"]), orders["attack"])()
        await asyncio.sleep(600.0)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.stdin.readline())))

"""Clients of a running service, in their own process.

    echo '{"url": ..., "key": ..., "path": "/v1/chat/completions", "bodies": [...], "concurrency": 16}' | \
        python -m pipelines.benchmarks.clients
    echo '{"url": ..., "keys": [...], "model": ..., "questions": [...], "seconds": 60, "num_clients": 32, "seed": 0}' | \
        python -m pipelines.benchmarks.clients

Orders with `bodies` send each body once and time its answer; streams are read as they come. The others send mixed requests side
by side, some abandoned half-way: what a client does next follows from the seed alone. The last line on stdout is JSON: the
answers in the order of the bodies, or the counts.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import aiohttp

Answer = dict[str, Any]
"""`begin_s`: when it was asked, from the first one; `first_s`: from sending to the first text; `total_s`: to the end; `text`,
`usage`, `metrics`, `status`. `ended`: the stream came to its proper end. Units: seconds."""

HANG_S = 30.0
"""A request without an answer for so long hangs."""

_GIVEN_UP = 0.2
"""The share of requests whose client goes away."""

_CHAT = "/v1/chat/completions"
_WRONG: tuple[tuple[str, Mapping[str, Any] | None, int], ...] = (
    (_CHAT, {"messages": []}, 400),
    (_CHAT, {"messages": [{"role": "user", "content": "a " * 9_000}]}, 400),
    (_CHAT, {"model": "nobody", "messages": [{"role": "user", "content": "a"}]}, 404),
    ("/v1/nowhere", None, 404),
)
"""Requests with errors: path, body, expected status."""


def chat_body(model: str, *texts: str, **fields: Any) -> dict[str, Any]:
    """A chat whose answer is streamed. `texts`: of the user and the assistant in turn."""
    messages = [
        {"role": role, "content": text} for role, text in zip(cycle(("user", "assistant")), texts, strict=False)
    ]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": model, "messages": messages, **options, **fields}


async def timed_answers(session: aiohttp.ClientSession, orders: Mapping[str, Any]) -> list[Answer]:
    """Every body once: `concurrency` at a time, or each at its time of `at_s`.

    Raises: aiohttp.ClientError where the service does not answer.
    """
    bodies: Sequence[Mapping[str, Any]] = orders["bodies"]
    answers: list[Answer] = [{} for _ in bodies]
    begin, at_s, waiting = time.perf_counter(), orders.get("at_s"), iter(range(len(bodies)))

    async def ask(number: int) -> None:
        if at_s is not None:
            await asyncio.sleep(max(0.0, begin + at_s[number] - time.perf_counter()))
        begin_s = time.perf_counter() - begin
        answers[number] = {"begin_s": begin_s, **await _timed_answer(session, orders, bodies[number])}

    async def client() -> None:
        for number in waiting:
            await ask(number)

    await asyncio.gather(*(client() for _ in range(len(bodies) if at_s is not None else orders["concurrency"])))
    return answers


async def _timed_answer(session: aiohttp.ClientSession, orders: Mapping[str, Any], body: Mapping[str, Any]) -> Answer:
    begin, headers = time.perf_counter(), {"Authorization": f"Bearer {orders['key']}"}
    first_s, parts, told, ended = None, list[str](), dict[str, Any](), False
    async with session.post(orders["path"], json=body, headers=headers) as answer:
        async for line in answer.content:
            ended = ended or line.startswith(b"data: [DONE]")
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[len(b"data: ") :])
            told |= {key: event[key] for key in ("usage", "metrics", "error") if event.get(key)}
            if text := _text_of(event):
                first_s = first_s or time.perf_counter() - begin
                parts.append(text)
        times = {"first_s": first_s, "total_s": time.perf_counter() - begin}
        ended = ended and "error" not in told
        return {**times, **told, "text": "".join(parts), "status": answer.status, "ended": ended}


def _text_of(event: Mapping[str, Any]) -> str:
    """Text that an event adds to the first choice."""
    choices = [choice for choice in event.get("choices") or () if choice["index"] == 0]
    return "".join(choice.get("text") or (choice.get("delta") or {}).get("content") or "" for choice in choices)


@dataclass
class LoadStats:
    """Counts and times of the clients' requests. Seconds: from sending a request to the end of its answer, for
    complete answers."""

    num_requests: int = 0
    num_given_up: int = 0
    num_hangs: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    answered_s: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        ordered = sorted(self.answered_s)
        return {
            "requests": self.num_requests,
            "given_up": self.num_given_up,
            "hangs": self.num_hangs,
            "errors_5xx": sum(count for status, count in self.statuses.items() if status >= 500),
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "num_faults": sum(self.faults.values()),
            "faults": dict(self.faults),
            "p50_ms": _quantile_ms(ordered, 0.5),
            "p99_ms": _quantile_ms(ordered, 0.99),
        }


@dataclass(frozen=True)
class LoadRequest:
    """One request: path, body, and the expected status."""

    path: str
    body: Mapping[str, Any] | None
    expected: int = 200
    streams: bool = False


class MixedClients:
    """`num_clients` clients, each sending one request after the other until the time is over."""

    def __init__(self, orders: Mapping[str, Any]) -> None:
        self._orders = orders
        self.tally = LoadStats()

    async def run(self, session: aiohttp.ClientSession) -> LoadStats:
        until = time.monotonic() + self._orders["seconds"]
        await asyncio.gather(*(self._client(session, i, until) for i in range(self._orders["num_clients"])))
        return self.tally

    async def _client(self, session: aiohttp.ClientSession, number: int, until: float) -> None:
        draw, keys = random.Random(f"{self._orders['seed']} {number}"), self._orders["keys"]
        headers = {"Authorization": f"Bearer {keys[number % len(keys)]}"}
        while time.monotonic() < until:
            order = self._order(draw)
            leaves_after_s = draw.expovariate(2.0) if draw.random() < _GIVEN_UP else None
            self.tally.num_requests += 1
            await self._meet(lambda order=order: self._ask(session, order, headers), order, leaves_after_s)

    async def _meet(self, ask: Callable[[], Awaitable[int]], order: LoadRequest, leaves_after_s: float | None) -> None:
        """Send a request and count its outcome."""
        begin = time.monotonic()
        try:
            status = await asyncio.wait_for(ask(), HANG_S if leaves_after_s is None else leaves_after_s)
        except TimeoutError:
            if leaves_after_s is None:
                self.tally.num_hangs += 1
            else:
                self.tally.num_given_up += 1
            return
        except aiohttp.ClientError as error:
            self.tally.faults[type(error).__name__] += 1
            return
        self.tally.statuses[status] += 1
        if status not in (order.expected, 429):
            self.tally.faults[f"{order.path}: {status}"] += 1
        if status == 200:
            self.tally.answered_s.append(time.monotonic() - begin)

    async def _ask(self, session: aiohttp.ClientSession, order: LoadRequest, headers: Mapping[str, str]) -> int:
        """The status of a complete answer. A stream without an end counts as a fault."""
        method = "GET" if order.body is None else "POST"
        async with session.request(method, order.path, json=order.body, headers=headers) as answer:
            body = await answer.read()
            if order.streams and answer.status == 200 and not body.rstrip().endswith(b"data: [DONE]"):
                self.tally.faults["a stream without an end"] += 1
            if answer.status == 429:
                await asyncio.sleep(min(1.0, float(answer.headers.get("Retry-After", 1))))
            return answer.status

    def _order(self, draw: random.Random) -> LoadRequest:
        """A random request: mostly chat, sometimes other routes or errors."""
        kind = draw.choices(("chat", "completion", "embedding", "models", "wrong"), (70, 12, 8, 4, 6))[0]
        question = draw.choice(self._orders["questions"])
        if kind == "chat":
            return self._chat(question, draw)
        if kind == "completion":
            streams = draw.random() < 0.5
            body = {"prompt": question, "max_tokens": draw.randint(1, 32), "stream": streams, **self._how(draw)}
            return LoadRequest("/v1/completions", self._named(body), streams=streams)
        if kind == "embedding":
            return LoadRequest("/v1/embeddings", self._named({"input": [question] * draw.randint(1, 8)}))
        if kind == "models":
            return LoadRequest("/v1/models", None)
        path, wrong, status = draw.choice(_WRONG)
        return LoadRequest(path, wrong and self._named(wrong), status)

    def _chat(self, question: str, draw: random.Random) -> LoadRequest:
        messages = [{"role": "user", "content": question}]
        if draw.random() < 0.3:
            messages += [{"role": "assistant", "content": question}, {"role": "user", "content": "And why?"}]
        streams = draw.random() < 0.6
        body = {"messages": messages, "max_tokens": draw.randint(1, 64), "stream": streams, **self._how(draw)}
        body |= {"retrieval": False} if draw.random() < 0.3 else {}
        return LoadRequest(_CHAT, self._named(body), streams=streams)

    def _named(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {"model": self._orders["model"], **body}

    @staticmethod
    def _how(draw: random.Random) -> dict[str, Any]:
        how: dict[str, Any] = {"temperature": draw.choice((0.0, 1.0)), "seed": draw.randint(0, 9)}
        how |= {"n": 2} if draw.random() < 0.1 else {}
        how |= {"speculation": False} if draw.random() < 0.2 else {}
        return how


def _quantile_ms(ordered: list[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3 if ordered else None


async def main(orders: Mapping[str, Any]) -> Any:
    """The result of the orders, for JSON."""
    # Why a connection for each timed answer: llama-server closes a kept one while the next request is on its way
    connector = aiohttp.TCPConnector(limit=0, force_close="bodies" in orders)
    async with aiohttp.ClientSession(orders["url"], connector=connector) as session:
        if "bodies" in orders:
            return await timed_answers(session, orders)
        return (await MixedClients(orders).run(session)).summary()


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(json.load(sys.stdin)))), flush=True)

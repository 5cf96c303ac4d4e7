"""Clients of a running service, in their own process.

    echo '{"url": ..., "key": ..., "path": "/v1/chat/completions", "bodies": [...], "concurrency": 16}' | \
        python -m pipelines.benchmarks.users.clients
    echo '{"url": ..., "keys": [...], "model": ..., "questions": [...], "seconds": 60, "num_clients": 32, "seed": 0}' | \
        python -m pipelines.benchmarks.users.clients

Orders with `bodies` send each body once and time its answer; streams are read as they come. With `arrivals` in the place of
`concurrency` each is sent at its time, in seconds from the beginning. The others send mixed requests side
by side, some abandoned half-way: what a client does next follows from the seed alone. The last line on stdout is JSON: the
answers in the order of the bodies, or the counts.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from itertools import cycle
from typing import Any

import aiohttp

Answer = dict[str, Any]
"""`begin_s`: when the request was sent, from the start of the run; `first_s`: from sending to the first text, None without
text; `total_s`: from sending to the end; `text`, `usage`, `metrics`, `status`. `ended`: whether the stream came to its proper
end. Units: seconds."""

HANG_S = 30.0
"""A request without an answer after this time hangs."""

_GIVEN_UP = 0.2
"""The share of requests whose client goes away before the answer ends."""

CHAT = "/v1/chat/completions"
_WRONG: tuple[tuple[str, Mapping[str, Any], int], ...] = (
    (CHAT, {"messages": []}, 400),
    (CHAT, {"messages": [{"role": "user", "content": "a " * 9_000}]}, 400),
    (CHAT, {"model": "nobody", "messages": [{"role": "user", "content": "a"}]}, 404),
    ("/v1/nowhere", {}, 404),
)
"""Requests with errors: path, body, expected status."""

_COUNTED = ("requests", "given_up", "hangs", "errors_5xx", "num_faults")


def chat_body(model: str, *texts: str, **fields: Any) -> dict[str, Any]:
    """A chat whose answer is streamed. `texts`: of the user and the assistant in turn."""
    said = zip(cycle(("user", "assistant")), texts, strict=False)
    messages = [{"role": role, "content": text} for role, text in said]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": model, "messages": messages, **options, **fields}


async def timed_answers(session: aiohttp.ClientSession, orders: Mapping[str, Any]) -> list[Answer]:
    """Every body once, `concurrency` at a time or at its time of `arrivals`.

    Raises: aiohttp.ClientError where the service does not answer.
    """
    bodies: Sequence[Mapping[str, Any]] = orders["bodies"]
    answers: list[Answer] = [{} for _ in bodies]
    arrivals = orders.get("arrivals") or [0.0] * len(bodies)
    begin, waiting = time.perf_counter(), iter(range(len(bodies)))

    async def client() -> None:
        for number in waiting:
            await asyncio.sleep(arrivals[number] - (time.perf_counter() - begin))
            begin_s = time.perf_counter() - begin
            answers[number] = {"begin_s": begin_s, **await _timed_answer(session, orders, bodies[number])}

    await asyncio.gather(*(client() for _ in range(orders.get("concurrency", len(bodies)))))
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


class MixedClients:
    """`num_clients` clients, each with one request after the other until the time is over; some go away before the end.

    `counts`: requests, given_up, hangs, errors_5xx, and `num_faults`: lost connections, streams without an end, wrong statuses.
    """

    def __init__(self, orders: Mapping[str, Any]) -> None:
        self._orders = orders
        self.counts = Counter[str]()
        self.answered_s = list[float]()
        """Seconds from sending a request to the end of its answer, for complete answers."""

    async def run(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        until_s = time.monotonic() + self._orders["seconds"]
        await asyncio.gather(*(self._client(session, i, until_s) for i in range(self._orders["num_clients"])))
        ordered = sorted(self.answered_s)
        times = {f"p{share}_ms": 1e3 * quantile(ordered, share / 100) for share in (50, 99)} if ordered else {}
        return {name: self.counts[name] for name in _COUNTED} | times

    async def _client(self, session: aiohttp.ClientSession, number: int, until_s: float) -> None:
        draw, keys = random.Random(f"{self._orders['seed']} {number}"), self._orders["keys"]
        headers = {"Authorization": f"Bearer {keys[number % len(keys)]}"}
        while time.monotonic() < until_s:
            path, body, expected = self._order(draw)
            leaves_after_s = draw.expovariate(2.0) if draw.random() < _GIVEN_UP else None
            await self.meet(self._ask(session, path, body, headers), expected, leaves_after_s)

    async def meet(self, asked: Awaitable[int], expected: int, leaves_after_s: float | None) -> None:
        """Await the status of an answer, or leave before, and count the outcome."""
        begin_s = time.monotonic()
        self.counts["requests"] += 1
        try:
            status = await asyncio.wait_for(asked, HANG_S if leaves_after_s is None else leaves_after_s)
        except TimeoutError:
            self.counts["hangs" if leaves_after_s is None else "given_up"] += 1
            return
        except aiohttp.ClientError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            self.counts["num_faults"] += 1
            return
        self.counts["errors_5xx"] += status >= 500
        self.counts["num_faults"] += status not in (expected, 429)
        if status == 200:
            self.answered_s.append(time.monotonic() - begin_s)

    async def _ask(
        self, session: aiohttp.ClientSession, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> int:
        """The status of a complete answer; 0 for a stream without an end."""
        async with session.post(path, json=body, headers=headers) as answer:
            raw = await answer.read()
            if answer.status == 429:
                await asyncio.sleep(min(1.0, float(answer.headers.get("Retry-After", 1))))
            is_cut = body.get("stream") and answer.status == 200 and not raw.rstrip().endswith(b"data: [DONE]")
            return 0 if is_cut else answer.status

    def _order(self, draw: random.Random) -> tuple[str, Mapping[str, Any], int]:
        """The path, body and expected status of a random request: mostly chats, sometimes other routes or errors."""
        kind = draw.choices(("chat", "completion", "embedding", "wrong"), (72, 12, 10, 6))[0]
        model, question = self._orders["model"], draw.choice(self._orders["questions"])
        sampling = {"temperature": draw.choice((0.0, 1.0)), "seed": draw.randint(0, 9), "n": draw.choice((1, 1, 1, 2))}
        options = sampling | {"speculation": draw.random() < 0.8, "max_tokens": draw.randint(1, 64)}
        if kind == "chat":
            texts = (question, question, "And why?") if draw.random() < 0.3 else (question,)
            return CHAT, chat_body(model, *texts, retrieval=draw.random() < 0.7, **options), 200
        if kind == "completion":
            body = {"model": model, "prompt": question, "stream": draw.random() < 0.5, **options}
            return "/v1/completions", body, 200
        if kind == "embedding":
            return "/v1/embeddings", {"model": model, "input": [question] * draw.randint(1, 8)}, 200
        path, wrong, status = draw.choice(_WRONG)
        return path, {"model": model, **wrong}, status


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which this share of the sorted values lies."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def main(orders: Mapping[str, Any]) -> Any:
    """The result of the orders, for JSON."""
    # Why a connection for each timed answer: llama-server closes a kept one while the next request is on its way
    connector = aiohttp.TCPConnector(limit=0, force_close="bodies" in orders)
    async with aiohttp.ClientSession(orders["url"], connector=connector) as session:
        if "bodies" in orders:
            return await timed_answers(session, orders)
        return await MixedClients(orders).run(session)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(json.load(sys.stdin)))), flush=True)

"""Clients of a running service, in their own process: send requests, a fixed number at a time, and time each answer.

    echo '{"url": ..., "key": ..., "path": "/v1/chat/completions", "bodies": [...], "concurrency": 16}' | \
        python -m pipelines.benchmarks.chat.timed_clients

Reads its orders from stdin; the last line on stdout is one JSON list, in the order of the bodies. Streams are read as they come.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

Answer = dict[str, Any]
"""`first_s`: from sending to the first text; `total_s`: to the end; `text`, `usage`, `metrics`, `status`. `ended`: the
stream came to its proper end. Units: seconds."""


async def ask_all(orders: Mapping[str, Any]) -> list[Answer]:
    """Every body once. Raises: aiohttp.ClientError where the service does not answer."""
    bodies: Sequence[Mapping[str, Any]] = orders["bodies"]
    answers: list[Answer] = [{} for _ in bodies]
    waiting = iter(range(len(bodies)))
    headers = {"Authorization": f"Bearer {orders['key']}"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(orders["url"], connector=connector, headers=headers) as session:

        async def client() -> None:
            for number in waiting:
                answers[number] = await _ask(session, orders["path"], bodies[number])

        await asyncio.gather(*(client() for _ in range(orders["concurrency"])))
    return answers


async def _ask(session: aiohttp.ClientSession, path: str, body: Mapping[str, Any]) -> Answer:
    begin = time.perf_counter()
    first_s, parts, told, ended = None, list[str](), dict[str, Any](), False
    async with session.post(path, json=body) as answer:
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
        return {
            **times,
            **told,
            "text": "".join(parts),
            "status": answer.status,
            "ended": ended and "error" not in told,
        }


def _text_of(event: Mapping[str, Any]) -> str:
    """Text that an event adds to the first choice."""
    choices = [choice for choice in event.get("choices") or () if choice["index"] == 0]
    return "".join(choice.get("text") or (choice.get("delta") or {}).get("content") or "" for choice in choices)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(ask_all(json.load(sys.stdin)))), flush=True)

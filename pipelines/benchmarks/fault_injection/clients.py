"""Clients of a service that fails: streamed answers and conversations, each compared with the same answer without faults.

    clients = FaultClients(url, key, questions, max_tokens=24)
    await clients.learn()                            # answers without faults and without speculation
    task = asyncio.create_task(clients.run())        # until the task is cancelled, while faults come
    await clients.check()                            # every acknowledged turn is there, once and unchanged

Clients send a failed request again. A failed request may have been carried out or not; an acknowledged one may not be missing,
doubled or changed afterwards.
"""

import asyncio
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp

from pipelines.benchmarks.fault_injection.targets import MODEL
from pipelines.benchmarks.users.clients import chat_body

OPERATIONS = ("streams", "turns")
_NUM_STREAMS = 4
"""Streams at a time."""
_NUM_TURNS = 8
"""Turns of one conversation; then another begins."""
_PAUSE_S = 0.1
_REQUEST_S = 120.0


class Refused(Exception):
    """The service answered with an error, or a stream ended early."""


class FaultClients:
    """`succeeded_s`: for each operation, when the last one that succeeded had begun, on the monotonic clock.

    `counts`: operations that succeeded, `cut` streams and `refused` requests, and `lost`, `doubled` and `changed` answers.
    """

    def __init__(self, url: str, key: str, questions: Sequence[str], max_tokens: int) -> None:
        self._url, self._key = url, key
        self._questions, self._max_tokens = list(questions), max_tokens
        self.expected = list[str]()
        self.turns = dict[str, list[tuple[str, str]]]()
        """Acknowledged questions and answers, by conversation."""
        self.unsure = set[str]()
        """Questions whose answer did not come: they may be kept or not."""
        self.succeeded_s = dict.fromkeys(OPERATIONS, 0.0)
        self.counts = Counter[str]()
        self._numbers = itertools.count(1)

    async def learn(self) -> None:
        """Ask every question once, without speculation. Raises: Refused, aiohttp.ClientError."""
        async with self._session() as session:
            for number in range(len(self._questions)):
                self.expected.append(await self._stream(session, number, speculation=False))

    async def run(self) -> None:
        """Send requests until this is cancelled."""
        async with self._session() as session:
            streams = (self._repeat("streams", lambda: self._checked_stream(session)) for _ in range(_NUM_STREAMS))
            await asyncio.gather(*streams, self._repeat("turns", lambda: self._turn(session)))

    async def check(self) -> None:
        """Compare all conversations with their acknowledged turns. Raises: Refused, aiohttp.ClientError."""
        async with self._session() as session:
            for name, turns in self.turns.items():
                self._compare(name, turns, await self._kept_turns(session, name))

    def _session(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=_REQUEST_S)
        return aiohttp.ClientSession(self._url, headers={"Authorization": f"Bearer {self._key}"}, timeout=timeout)

    async def _repeat(self, operation: str, send: Callable[[], Awaitable[None]]) -> None:
        while True:
            begin_s = time.monotonic()
            try:
                await send()
                self.succeeded_s[operation] = max(self.succeeded_s[operation], begin_s)
                self.counts[operation] += 1
            except (aiohttp.ClientError, TimeoutError, OSError, Refused) as error:
                self.counts["refused"] += 1
                print(f"{operation}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            await asyncio.sleep(_PAUSE_S)

    def _mark(self, mark: str, reason: str) -> None:
        self.counts[mark] += 1
        print(f"{mark}: {reason}", file=sys.stderr, flush=True)

    async def _checked_stream(self, session: aiohttp.ClientSession) -> None:
        await self._stream(session, next(self._numbers) % len(self._questions))

    async def _stream(self, session: aiohttp.ClientSession, number: int, **options: Any) -> str:
        """The whole text: greedy for even questions, sampled for odd ones. Raises: Refused for a stream without an end.

        A fault may cut a stream anywhere, but may not change its beginning.
        """
        sampling = {"max_tokens": self._max_tokens, "seed": number, "temperature": float(number % 2)}
        body = chat_body(MODEL, self._questions[number], ignore_eos=True, **sampling, **options)
        text, is_open, is_whole = "", False, False
        try:
            async with session.post("/v1/chat/completions", json=body) as reply:
                if reply.status != 200:
                    raise Refused(f"{reply.status} {(await reply.read())[:200]!r}")
                is_open = True
                async for line in reply.content:
                    if line.startswith(b"data: [DONE]"):
                        is_open, is_whole = False, True
                        return text
                    text += _text_of(line)
            raise Refused(f"a stream ended after {len(text)} characters")
        except asyncio.CancelledError:
            is_open = False
            raise
        finally:
            self.counts["cut"] += is_open
            for expected in self.expected[number : number + 1]:
                if text != (expected if is_whole else expected[: len(text)]):
                    self._mark("changed", f"stream {number}: {text!r} is not {expected!r}")

    async def _turn(self, session: aiohttp.ClientSession) -> None:
        """One more question in the youngest conversation. Raises: Refused."""
        name = next(reversed(self.turns), "")
        if not name or len(self.turns[name]) >= _NUM_TURNS:
            name = (await self._call(session, "POST", "/v1/conversations", json={}))["id"]
            self.turns[name] = []
        question = f"Question {next(self._numbers)}?"
        self.unsure.add(question)
        body = chat_body(MODEL, question, max_tokens=4, conversation=name, ignore_eos=True, retrieval=False)
        body |= {"stream": False, "stream_options": None}
        answer = await self._call(session, "POST", "/v1/chat/completions", json=body)
        if not answer["ragspec"]["kept"]:
            raise Refused("the turn was not kept")
        self.unsure.discard(question)
        text = answer["choices"][0]["message"]["content"].replace("\0", "\ufffd")  # as conversations keep it
        self.turns[name].append((question, text))

    async def _call(self, session: aiohttp.ClientSession, method: str, path: str, **body: Any) -> Any:
        """Raises: Refused, aiohttp.ClientError, TimeoutError."""
        async with session.request(method, path, **body) as reply:
            raw = await reply.read()
            if reply.status >= 300:
                raise Refused(f"{method} {path}: {reply.status} {raw[:200]!r}")
            return json.loads(raw)

    async def _kept_turns(self, session: aiohttp.ClientSession, name: str) -> list[tuple[str, str]]:
        """All questions and answers that the service keeps of a conversation, page by page."""
        texts, page = list[str](), {"limit": "100", "order": "asc"}
        while True:
            listed = await self._call(session, "GET", f"/v1/conversations/{name}/items", params=page)
            texts += [item["content"][0]["text"] for item in listed["data"]]
            if not listed["has_more"]:
                return list(zip(texts[::2], texts[1::2], strict=True))
            page["after"] = listed["data"][-1]["id"]

    def _compare(self, name: str, turns: list[tuple[str, str]], kept: list[tuple[str, str]]) -> None:
        for question, count in Counter(question for question, _ in kept).items():
            if count > 1:
                self._mark("doubled", f"{question} in {name}")
        sure = [turn for turn in kept if turn[0] not in self.unsure]
        answers = dict(sure)
        for question, answer in turns:
            if question not in answers:
                self._mark("lost", f"{question} in {name}")
            elif answers[question] != answer:
                self._mark("changed", f"{question} in {name}: {answers[question]!r} is not {answer!r}")
        if sorted(sure) == sorted(turns) and sure != turns:
            self._mark("changed", f"the order of {name}")


def _text_of(line: bytes) -> str:
    """The text that a line of a stream adds. A line that was cut off adds nothing. Raises: Refused for an error event."""
    if not line.startswith(b"data: {") or not line.endswith(b"}\n"):
        return ""
    event = json.loads(line[len(b"data: ") :])
    if "error" in event:
        raise Refused(f"the stream ended with an error: {event['error']}")
    return "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))

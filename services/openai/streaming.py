"""Server-sent events: cuts a streamed answer into deltas, paces them, and encodes and pads their chunks.

Normally new text is sent at once. With `privacy: strict`, every tick sends one chunk of a fixed size, with or without new
text, so that packet sizes and times tell an eavesdropper how long the answer took and nothing else.

Why chunks are padded: a step's length depends on the draft, and so on the documents. Sizes of encrypted packets would show it.
Like OpenAI, each chunk is filled up with random letters to a multiple of some bytes.

    >>> async for delta in immediate(stream):
    ...     await sender.event(encoder.event([{"index": 0, "delta": {"content": delta.text}}]))
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ragspec.core import Delta, TokenLogprob
from services.openai.engine_stream import ChoiceKey, EngineStream

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting\n\n"
"""A comment, which clients skip; it keeps proxies from closing the connection."""
KEEP_ALIVE_S = 10.0
TICK_S = 0.05
PAD_BYTES = 128
STRICT_PAD_BYTES = 1024
STRICT_TEXT_BYTES = 256
"""Most text of a strict chunk, in bytes of escaped JSON; with its envelope it fits `STRICT_PAD_BYTES`."""

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_PADDING = "".join(random.Random(secrets.randbits(64)).choices(_LETTERS, k=8192)).encode()
_PADDING_FIELD = b', "obfuscation": "'
END = b"}\n\n"
_JSON = (b"content-type", b"application/json")
_EVENTS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # keeps nginx from collecting the events
)

Chunk = tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]
"""The choices of a chunk, and its other fields."""


class ResponseSender:
    """One HTTP response, either JSON or events."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def json(self, value: Mapping[str, Any]) -> None:
        content = json.dumps(value).encode()
        headers = [_JSON, (b"content-length", str(len(content)).encode())]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.event(content, is_last=True)

    async def begin_events(self) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": list(_EVENTS)})

    async def event(self, frame: bytes, *, is_last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": frame, "more_body": not is_last})


class GenerationResponse(Response):
    """A response whose answer is generated while it is sent.

    `write` takes and returns all it holds (the engine's slots, the key's tokens) in one coroutine, which the middleware cancels
    when the client leaves. An error before the first byte still gets its own status.
    """

    def __init__(self, write: Callable[[ResponseSender], Awaitable[None]]) -> None:
        super().__init__()
        self._write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Why a task: otherwise each of a stream's events wakes all the middleware around the route."""

        async def write() -> None:
            await self._write(ResponseSender(send))

        await asyncio.create_task(write())


class ChunkEncoder:
    """Encodes the chunks of one stream as events; encodes their common head once."""

    def __init__(self, head: Mapping[str, Any], pad_bytes: int = PAD_BYTES, *, with_usage: bool = False) -> None:
        """`pad_bytes` 0: no padding. `with_usage`: chunks without usage hold `"usage": null`, as OpenAI's do."""
        self._head = b"data: " + json.dumps(head)[:-1].encode() + b', "choices": '
        self._pad_bytes = pad_bytes
        self._usage = b', "usage": null' if with_usage else b""

    def event(self, choices: Sequence[Mapping[str, Any]], **fields: Any) -> bytes:
        """Pure ASCII, because some clients end a line at any line break of Unicode."""
        parts = [self._head, json.dumps(choices).encode()]
        if "usage" not in fields:
            parts.append(self._usage)
        parts += [f', "{name}": {json.dumps(value)}'.encode() for name, value in fields.items()]
        frame = b"".join(parts)
        return frame + padding(len(frame), self._pad_bytes) + END


def padding(num_bytes: int, pad_bytes: int = PAD_BYTES) -> bytes:
    """A field of random letters: with it and `END`, an event of `num_bytes` has a multiple of `pad_bytes`. 0: none."""
    if not pad_bytes:
        return b""
    length = -(num_bytes + len(_PADDING_FIELD) + 1 + len(END)) % pad_bytes
    start = random.randrange(len(_PADDING) - length)
    return b'%b%b"' % (_PADDING_FIELD, _PADDING[start : start + length])


class ChoiceDelta(NamedTuple):
    """New text of one choice; `steps` are the engine's messages since the last one."""

    key: ChoiceKey
    text: str
    steps: tuple[Delta, ...]
    is_last: bool

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [logprob for step in self.steps for logprob in step.logprobs]


async def immediate(stream: EngineStream) -> AsyncIterator[ChoiceDelta | None]:
    """New text as it comes; None after `KEEP_ALIVE_S` without any. Raises: as `EngineStream.next_deltas`."""
    while stream.is_open:
        by_choice = await stream.next_deltas(KEEP_ALIVE_S)
        if not by_choice:
            yield None
        for key, steps in by_choice.items():
            text = "".join(step.text for step in steps)
            yield ChoiceDelta(key, text, tuple(steps), steps[-1].finish_reason is not None)


async def paced(stream: EngineStream, tick_s: float = TICK_S) -> AsyncIterator[ChoiceDelta | None]:
    """One delta of every unfinished choice a tick. Raises: as `EngineStream.next_deltas`."""
    loop = asyncio.get_running_loop()
    due_s, backlog, ended = loop.time(), dict.fromkeys(stream.keys, ""), set[ChoiceKey]()
    while backlog:
        due_s = max(due_s + tick_s, loop.time())
        await asyncio.sleep(due_s - loop.time())
        by_choice = stream.take_deltas()
        for key, steps in by_choice.items():
            backlog[key] += "".join(step.text for step in steps)
            if steps[-1].finish_reason is not None:
                ended.add(key)
        for key, text in list(backlog.items()):
            cut = _num_fitting_chars(text)
            backlog[key] = text[cut:]
            is_last = key in ended and cut == len(text)
            if is_last:
                del backlog[key]
            yield ChoiceDelta(key, text[:cut], tuple(by_choice.get(key, ())), is_last)


def _num_fitting_chars(text: str) -> int:
    """Characters of `text` that fit into one strict chunk."""
    num_bytes = 0
    for count, letter in enumerate(text[:STRICT_TEXT_BYTES]):
        num_bytes += len(json.dumps(letter)) - 2
        if num_bytes > STRICT_TEXT_BYTES:
            return count
    return min(len(text), STRICT_TEXT_BYTES)

"""An answer in OpenAI's format, whole or as server-sent events. Chat, text completions and responses share it.

`AnswerFormat` owns the envelope: head, usage, per-request metrics, and the counters of an answer that has ended. Subclasses
format the choices. The second half sends it: `immediate` and `paced` cut a stream into deltas, `ChunkEncoder` encodes and pads
them. Never decides which tokens are written.

Normally new text is sent at once. With `privacy: strict`, every tick sends one chunk of a fixed size, with or without new
text, so that packet sizes and times tell an eavesdropper how long the answer took and nothing else. Why chunks are padded: a
step's length depends on the draft, and so on the documents. Sizes of encrypted packets would show it. Like OpenAI, each chunk is
filled up with random letters to a multiple of some bytes.

    >>> async with context.generate(requests) as stream:
    ...     await CompletionFormat(context, stream).send(sender)
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ragspec.core import Completion, Delta, GenerationStats, TokenLogprob
from ragspec.rag.openai_fields import usage
from services.openai.generation import AnyBody, ChoiceKey, EngineStream, RequestContext
from services.openai.types import ChatBody

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


class AnswerFormat(ABC, Generic[AnyBody]):
    """Formats and sends the answer to one request."""

    object_type: ClassVar[str]
    chunk_type: ClassVar[str]
    id_prefix: ClassVar[str]

    def __init__(self, context: RequestContext[AnyBody], stream: EngineStream) -> None:
        self.context, self.stream = context, stream
        self.indices = {key: index for index, key in enumerate(stream.keys)}
        # Why not an error for untrusted keys: the pages ask for metrics whoever uses them
        self._has_metrics = bool(context.body.metrics) and context.caller.trusted

    async def send(self, sender: ResponseSender) -> None:
        """Raises: as `EngineStream.completions`."""
        if self.context.body.stream:
            await self._send_stream(sender)
        else:
            await self._send_whole(sender)

    @abstractmethod
    async def choices(self, completions: Sequence[Completion]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The fields `choices` and `ragspec` of a whole answer."""

    def first_chunks(self) -> Sequence[Chunk]:
        """Chunks before any token. They wait for the first text, unless the answer `shows_sources`."""
        return []

    shows_sources = False
    """Whether a reader has something to read before the first token."""

    @abstractmethod
    def delta_choice(self, delta: ChoiceDelta) -> dict[str, Any]:
        """A choice of a chunk that holds new text."""

    @abstractmethod
    async def last_choice(self, key: ChoiceKey) -> tuple[dict[str, Any], dict[str, Any]]:
        """A choice of the chunk that ends this choice, and more fields of that chunk."""

    async def _send_whole(self, sender: ResponseSender) -> None:
        completions = await self.stream.completions()
        self._count()
        choices, ragspec = await self.choices(completions)
        fingerprint = completions[0].stats.system_fingerprint or self.context.model.engine.fingerprint
        head = self._head(self.object_type, fingerprint)
        await sender.json(head | {"choices": choices, "usage": self._usage(), "ragspec": ragspec} | self._metrics())

    async def _send_stream(self, sender: ResponseSender) -> None:
        options, is_strict = self.context.body.options, self.context.is_strict
        head = self._head(self.chunk_type, self.context.model.engine.fingerprint)
        pad_bytes = STRICT_PAD_BYTES if is_strict else PAD_BYTES * options.include_obfuscation
        encoder = ChunkEncoder(head, pad_bytes, with_usage=options.include_usage)

        held: list[bytes] = []  # Why held: each message to a socket costs as much as formatting it

        async def send(*chunks: Chunk, now: bool = False) -> None:
            held.extend(encoder.event(choices, **fields) for choices, fields in chunks)
            if held and (now or is_strict):
                await flush()

        async def flush(frame: bytes = b"", *, is_last: bool = False) -> None:
            frames, held[:] = b"".join([*held, frame]), []
            await sender.event(frames, is_last=is_last)

        await sender.begin_events()
        await send(*self.first_chunks(), now=self.shows_sources)
        async for delta in paced(self.stream) if is_strict else immediate(self.stream):
            if delta is None:
                await flush(KEEP_ALIVE)
                continue
            if delta.text or delta.logprobs or is_strict:
                await send(([self.delta_choice(delta)], self._progress(delta.key)), now=True)
            if delta.is_last:
                choice, fields = await self.last_choice(delta.key)
                # Only the last end waits: for the usage and the end of the stream, which follow at once
                await send(([choice], fields | self._progress(delta.key)), now=self.stream.is_open)
        self._count()
        if final := ({"usage": self._usage()} if options.include_usage else {}) | self._metrics():
            await send(([], final))
        await flush(DONE, is_last=True)

    def _head(self, object_type: str, fingerprint: str) -> dict[str, Any]:
        return {
            "id": f"{self.id_prefix}-{self.context.id}",
            "object": object_type,
            "created": self.context.created,
            "model": self.context.model.name,
            "system_fingerprint": fingerprint,
        }

    def _count(self) -> None:
        """Counts an answer whose choices have all ended."""
        metrics, begin_s = self.context.model.metrics, self.context.begin_s
        if self.stream.first_token_s:
            metrics.first_token(self.stream.first_token_s - begin_s)
        for key in self.stream.keys:
            completion = self.stream.completion(key)
            metrics.ended(completion.stats, completion.finish_reason, time.perf_counter() - begin_s)

    def _usage(self) -> dict[str, Any]:
        """Summed over all requests. The prompt of several choices counts once."""
        by_request: dict[str, list[GenerationStats]] = {}
        for key in self.stream.keys:
            by_request.setdefault(key[0], []).append(self.stream.completion(key).stats)
        return _summed([usage(choices) for choices in by_request.values()])

    def _metrics(self) -> dict[str, Any]:
        """The field `metrics`; null for several choices, as in vLLM."""
        if not self._has_metrics:
            return {}
        key, *others = self.stream.keys
        stats = self.stream.completion(key).stats
        return {"metrics": None if others else request_metrics(stats, self.stream.deltas(key)) | self._own_metrics()}

    def _own_metrics(self) -> dict[str, float]:
        """Fields of `metrics` that not every kind of answer has."""
        return {}

    def _progress(self, key: ChoiceKey) -> dict[str, Any]:
        """The field `metrics` of a chunk: tokens and steps so far."""
        if not self._has_metrics:
            return {}
        steps = self.stream.deltas(key)
        return {"metrics": {"num_output_tokens": sum(len(step.token_ids) for step in steps), "num_steps": len(steps)}}


class MessageFormat(AnswerFormat[ChatBody]):
    """A chat completion. Subclasses write its messages."""

    object_type, chunk_type, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def begun(self, content: str | None, ragspec: Mapping[str, Any]) -> list[Chunk]:
        """A chunk for each choice, whose message has its role; the first has the field `ragspec`."""
        role = {"role": "assistant", "content": content, "refusal": None}
        return [([self.chunk(key, role)], {} if index else {"ragspec": ragspec}) for key, index in self.indices.items()]

    def chunk(self, key: ChoiceKey, delta: Mapping[str, Any], logprobs: Any = None) -> dict[str, Any]:
        """A choice of a chunk."""
        return {"index": self.indices[key], "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def logprobs(self, logprobs: Iterable[TokenLogprob]) -> dict[str, Any] | None:
        """The field `logprobs`; None unless the body asks for it."""
        if not self.context.body.logprobs:
            return None
        return {"content": self.context.model.token_texts.chat(logprobs), "refusal": None}


def request_metrics(stats: GenerationStats, steps: Sequence[Delta]) -> dict[str, Any]:
    """vLLM's per-request metrics, with the drafters and sources of accepted tokens.

    Why for trusted keys only: accepted tokens tell which texts they were drafted from.
    """
    num_decoded = stats.num_output_tokens - stats.num_first_tokens
    return {
        "time_to_first_token_ms": 1e3 * (stats.queue_s + stats.prefill_s),
        "generation_time_ms": 1e3 * stats.decode_s,
        "queue_time_ms": 1e3 * stats.queue_s,
        "prefill_time_ms": 1e3 * stats.prefill_s,
        "mean_itl_ms": 1e3 * stats.decode_s / num_decoded if num_decoded > 0 else None,
        "tokens_per_second": num_decoded / stats.decode_s if num_decoded > 0 and stats.decode_s else None,
        "speculative_decoding": {
            "mean_acceptance_length": stats.acceptance_length,
            "draft_acceptance_rate": stats.num_accepted / stats.num_drafted if stats.num_drafted else None,
            "acceptance_histogram": _histogram([len(step.token_ids) for step in steps if step.token_ids]),
            "num_spec_steps": stats.num_steps,
            "num_accepted_draft_tokens": stats.num_accepted,
            "num_draft_tokens": stats.num_drafted,
            "drafted_by_source": dict(stats.drafted_by_source),
            "accepted_by_source": dict(stats.accepted_by_source),
        },
        "drafters": dict(stats.accepted_by_drafter),
        "exactness": stats.exactness,
        "num_near_ties": stats.num_near_ties,
        "num_replays": stats.num_replays,
    }


def _histogram(lengths: Sequence[int]) -> list[int]:
    """Item k: the number of steps that accepted k drafted tokens and so wrote k + 1."""
    counts = Counter(lengths)
    return [counts[length] for length in range(1, max(lengths, default=0) + 1)]


def _summed(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        name: _summed([each[name] for each in usages])
        if isinstance(value, dict)
        else sum(each[name] for each in usages)
        for name, value in usages[0].items()
    }


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

    def __init__(self, write: Callable[[ResponseSender], Coroutine[Any, Any, None]]) -> None:
        super().__init__()
        self._write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Why a task: otherwise each of a stream's events wakes all the middleware around the route."""
        await asyncio.create_task(self._write(ResponseSender(send)))


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


async def paced(stream: EngineStream) -> AsyncIterator[ChoiceDelta | None]:
    """One delta of every unfinished choice a tick. Raises: as `EngineStream.next_deltas`."""
    loop = asyncio.get_running_loop()
    due_s, backlog, ended = loop.time(), dict.fromkeys(stream.keys, ""), set[ChoiceKey]()
    while backlog:
        due_s = max(due_s + TICK_S, loop.time())
        await asyncio.sleep(due_s - loop.time())
        by_choice = stream.take_deltas()
        for key, steps in by_choice.items():
            backlog[key] += "".join(step.text for step in steps)
            if steps[-1].finish_reason is not None:
                ended.add(key)
        for key, text in list(backlog.items()):
            cut = num_fitting_chars(text)
            backlog[key] = text[cut:]
            is_last = key in ended and cut == len(text)
            if is_last:
                del backlog[key]
            yield ChoiceDelta(key, text[:cut], tuple(by_choice.get(key, ())), is_last)


def num_fitting_chars(text: str) -> int:
    """Characters of `text` that fit into one strict chunk."""
    num_bytes = 0
    for count, letter in enumerate(text[:STRICT_TEXT_BYTES]):
        num_bytes += len(json.dumps(letter)) - 2
        if num_bytes > STRICT_TEXT_BYTES:
            return count
    return min(len(text), STRICT_TEXT_BYTES)

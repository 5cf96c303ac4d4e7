"""One answer in OpenAI's format, whole or as the chunks of a stream. Chat and text completions share it.

Owns the envelope: head, usage, per-request metrics, and the counters of an answer that has ended. Subclasses format the
choices. Never decides which tokens are written.

    >>> async with context.generate(requests) as stream:
    ...     await CompletionFormat(context, stream, token_texts).send(sender)
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from ragspec.core import Completion, Delta, GenerationStats
from ragspec.rag.openai_fields import usage
from services.openai import streaming
from services.openai.engine_stream import ChoiceKey, EngineStream
from services.openai.request_context import RequestContext
from services.openai.streaming import ChoiceDelta, Chunk, ResponseSender


class AnswerFormat(ABC):
    """Formats and sends the answer to one request."""

    object_type: ClassVar[str]
    chunk_type: ClassVar[str]
    id_prefix: ClassVar[str]

    def __init__(self, context: RequestContext, stream: EngineStream) -> None:
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
        fingerprint = completions[0].stats.system_fingerprint or self.context.backend.engine.fingerprint
        head = self._head(self.object_type, fingerprint)
        await sender.json(head | {"choices": choices, "usage": self._usage(), "ragspec": ragspec} | self._metrics())

    async def _send_stream(self, sender: ResponseSender) -> None:
        options, is_strict = self.context.body.options, self.context.is_strict
        head = self._head(self.chunk_type, self.context.backend.engine.fingerprint)
        pad_bytes = streaming.STRICT_PAD_BYTES if is_strict else streaming.PAD_BYTES * options.include_obfuscation
        encoder = streaming.ChunkEncoder(head, pad_bytes, with_usage=options.include_usage)

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
        async for delta in streaming.paced(self.stream) if is_strict else streaming.immediate(self.stream):
            if delta is None:
                await flush(streaming.KEEP_ALIVE)
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
        await flush(streaming.DONE, is_last=True)

    def _head(self, object_type: str, fingerprint: str) -> dict[str, Any]:
        return {
            "id": f"{self.id_prefix}-{self.context.id}",
            "object": object_type,
            "created": self.context.created,
            "model": self.context.backend.model,
            "system_fingerprint": fingerprint,
        }

    def _count(self) -> None:
        """Counts an answer whose choices have all ended."""
        metrics, begin_s = self.context.backend.metrics, self.context.begin_s
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
        return {"metrics": None if others else request_metrics(stats, self.stream.deltas(key))}

    def _progress(self, key: ChoiceKey) -> dict[str, Any]:
        """The field `metrics` of a chunk: tokens and steps so far."""
        if not self._has_metrics:
            return {}
        steps = self.stream.deltas(key)
        return {"metrics": {"num_output_tokens": sum(len(step.token_ids) for step in steps), "num_steps": len(steps)}}


def request_metrics(stats: GenerationStats, steps: Sequence[Delta]) -> dict[str, Any]:
    """vLLM's per-request metrics, with the drafters and sources of accepted tokens.

    Why for trusted keys only: accepted tokens tell which texts they were drafted from.
    """
    num_decoded = stats.num_output_tokens - stats.num_first_tokens
    return {
        "time_to_first_token_ms": 1e3 * (stats.queue_s + stats.prefill_s),
        "generation_time_ms": 1e3 * stats.decode_s,
        "queue_time_ms": 1e3 * stats.queue_s,
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
    counts = [0] * max(lengths, default=0)
    for length in lengths:
        counts[length - 1] += 1
    return counts


def _summed(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    total = usages[0]
    for each in usages[1:]:
        total = {
            name: _summed([value, each[name]]) if isinstance(value, dict) else value + each[name]
            for name, value in total.items()
        }
    return total

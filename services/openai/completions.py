"""`POST /v1/completions`: prompts go on as they are, without retrieval.

Choices are numbered prompt by prompt. Text of a prompt is never read as a control token; token ids may be any of the vocabulary.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ragspec.core import CopySource, SourceKind, TokenLogprob, check_text
from ragspec.core import Request as Generation
from ragspec.errors import InputError, PromptTooLong
from ragspec.rag.cache_salts import cache_salt_of
from ragspec.rag.prompt import PromptBuilder
from ragspec.speculation import ON, Speculation
from services.backend import Backend
from services.errors import ApiError
from services.openai.engine_stream import Key, Mail, Run
from services.openai.logprobs import Offsets, TokenTexts
from services.openai.request_context import Asked, index_of, usage_of
from services.openai.sending import Sender, Writing
from services.openai.streaming import Chunk, Piece
from services.openai.types import CompletionBody


def routes(backend: Backend, mail: Mail) -> APIRouter:
    router, texts = APIRouter(tags=["completions"]), TokenTexts(backend.prompts.tokenizer)

    @router.post("/v1/completions", response_model=None)
    async def create(body: CompletionBody, request: Request) -> Response:
        """What follows each prompt."""
        return Writing(partial(_write, body, Asked.of(backend, mail, body, request), texts))

    return router


async def _write(body: CompletionBody, asked: Asked, texts: TokenTexts, sender: Sender) -> None:
    """The whole request, until its client has all of it. Raises: ApiError, RagspecError."""
    requests = await asyncio.to_thread(requests_of, body, asked)
    async with asked.running(requests) as run:
        reply = CompletionReply(body, asked, run, texts)
        if body.stream:
            head = asked.head("text_completion", "cmpl", asked.backend.engine.fingerprint)
            await asked.tell(sender, run, head, reply)
        else:
            await sender.json(await reply.whole())


def requests_of(body: CompletionBody, asked: Asked) -> list[Generation]:
    """One for each prompt. Raises: ApiError, InputError."""
    prompts, max_tokens = asked.backend.prompts, asked.params.max_tokens
    speculation = ON if body.speculation is None else Speculation.of(body.speculation)
    salt, requests = cache_salt_of(asked.caller.tenant, body.cache_salt or ""), []
    for prompt in body.prompt:
        prompt_ids = _token_ids(prompt, prompts)
        room = prompts.max_context_tokens - max_tokens
        if len(prompt_ids) > room:
            cause = PromptTooLong(len(prompt_ids), room, max_tokens)
            raise ApiError(400, str(cause), param="prompt", code="context_length_exceeded")
        text = prompt if isinstance(prompt, str) else prompts.tokenizer.decode(prompt_ids)
        source = CopySource(SourceKind.HISTORY, text)
        requests.append(
            Generation(
                secrets.token_hex(16), prompt_ids, asked.params, (source,), salt, speculation, affinity=text[:64]
            )
        )
    return requests


def _token_ids(prompt: str | list[int], prompts: PromptBuilder) -> tuple[int, ...]:
    """Raises: InputError."""
    if not isinstance(prompt, str):
        vocab_size = len(prompts.tokenizer)
        if any(not 0 <= token < vocab_size for token in prompt):
            raise InputError(f"the prompt holds a token id outside [0, {vocab_size})")
        return tuple(prompt)
    check_text(prompt, "the prompt")
    prompts.check(prompt)
    return tuple(prompts.plain_ids([prompt], begins=True)[0])


class CompletionReply:
    """The answer, in OpenAI's words. `streaming.Account` for its chunks."""

    def __init__(self, body: CompletionBody, asked: Asked, run: Run, texts: TokenTexts) -> None:
        self._body, self._asked, self._run, self._texts = body, asked, run, texts
        self._indices = index_of(run)
        self._offsets = [Offsets() for _ in run.keys]

    async def whole(self) -> dict[str, Any]:
        """Raises: as `Run.finished`."""
        completions = await self._run.finished()
        self._asked.count(self._run)
        choices = [
            _choice(index, each.text, self._logprobs(index, each.logprobs))
            | {"finish_reason": each.finish_reason.value}
            for index, each in enumerate(completions)
        ]
        head = self._asked.head("text_completion", "cmpl", completions[0].stats.system_fingerprint)
        told = head | {"choices": choices, "usage": usage_of(self._run), "ragspec": {"seed": self._asked.params.seed}}
        return told | self._asked.metrics(self._run)

    def opening(self) -> Sequence[Chunk]:
        return []

    def told(self, piece: Piece) -> Chunk:
        index = self._indices[piece.key]
        choice = _choice(index, piece.text, self._logprobs(index, piece.logprobs))
        return [choice], self._asked.progress(self._run, piece.key)

    async def ending(self, key: Key) -> Chunk:
        reason = self._run.completion(key).finish_reason.value
        return [_choice(self._indices[key], "", None) | {"finish_reason": reason}], self._asked.progress(self._run, key)

    def closing(self) -> Sequence[Chunk]:
        self._asked.count(self._run)
        return self._asked.last_chunk(self._run)

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return None if self._body.logprobs is None else self._texts.completion(logprobs, self._offsets[index])


def _choice(index: int, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

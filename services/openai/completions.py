"""`POST /v1/completions`: continues prompts as they are, without retrieval.

Owns the path from a completion body to requests, and the format of their answer. Choices are numbered prompt by prompt. A
prompt's text never becomes control tokens; token ids may be any of the vocabulary.
"""

import asyncio
import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ragspec.core import Completion, CopySource, SourceKind, TokenLogprob, check_text
from ragspec.core import Request as Generation
from ragspec.errors import InputError, PromptTooLong
from ragspec.rag.prompt import PromptBuilder
from services.backend import ServiceBackend
from services.errors import ApiError
from services.openai.answer_fields import TextOffsets
from services.openai.answers import AnswerFormat, ChoiceDelta, GenerationResponse, ResponseSender
from services.openai.generation import ChoiceKey, DeltaMailbox, EngineStream, RequestContext
from services.openai.types import CompletionBody


def add_completions(router: APIRouter, backend: ServiceBackend, mailbox: DeltaMailbox) -> None:
    @router.post("/v1/completions", response_model=None, tags=["completions"])
    async def create(body: CompletionBody, request: Request) -> Response:
        """A continuation of each prompt."""
        context = RequestContext.of(backend, mailbox, body, request)
        return GenerationResponse(partial(_write, context))


async def _write(context: RequestContext[CompletionBody], sender: ResponseSender) -> None:
    """Raises: ApiError, RagspecError."""
    requests = await asyncio.to_thread(requests_of, context)
    async with context.generate(requests) as stream:
        await CompletionFormat(context, stream).send(sender)


def requests_of(context: RequestContext[CompletionBody]) -> list[Generation]:
    """One request a prompt. Raises: ApiError, InputError."""
    prompts, max_tokens = context.model.prompts, context.params.max_tokens
    requests = []
    for prompt in context.body.prompt:
        prompt_ids = _token_ids(prompt, prompts)
        room = prompts.max_context_tokens - max_tokens
        if len(prompt_ids) > room:
            cause = PromptTooLong(len(prompt_ids), room, max_tokens)
            raise ApiError(400, str(cause), param="prompt", code="context_length_exceeded")
        text = prompt if isinstance(prompt, str) else prompts.tokenizer.decode(prompt_ids)
        options = context.params, (CopySource(SourceKind.HISTORY, text),), context.salt, context.drafting
        requests.append(Generation(secrets.token_hex(16), prompt_ids, *options, affinity=text[:64]))
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


class CompletionFormat(AnswerFormat[CompletionBody]):
    """A text completion."""

    object_type, chunk_type, id_prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, context: RequestContext[CompletionBody], stream: EngineStream) -> None:
        super().__init__(context, stream)
        self._offsets = [TextOffsets() for _ in stream.keys]

    async def choices(self, completions: Sequence[Completion]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        choices = [
            self._choice(index, each.text, each.logprobs, each.finish_reason.value)
            for index, each in enumerate(completions)
        ]
        return choices, {"seed": self.context.params.seed}

    def delta_choice(self, delta: ChoiceDelta) -> dict[str, Any]:
        return self._choice(self.indices[delta.key], delta.text, delta.logprobs)

    async def last_choice(self, key: ChoiceKey) -> tuple[dict[str, Any], dict[str, Any]]:
        return self._choice(self.indices[key], "", None, self.stream.completion(key).finish_reason.value), {}

    def _choice(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        shown = None
        if logprobs is not None and self.context.body.logprobs is not None:
            shown = self.context.model.token_texts.completion(logprobs, self._offsets[index])
        return {"index": index, "text": text, "logprobs": shown, "finish_reason": finish_reason}

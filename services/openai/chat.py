"""`POST /v1/chat/completions`: an answer from the documents, with citations, whole or as a stream.

Owns the path from a chat body to a turn, and the chat format of its answer. Retrieval, prompts and conversations are
`ragspec.rag.chat`'s. The field `ragspec` beside OpenAI's fields has the passages of the prompt and the answer's citations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ragspec.core import Completion
from ragspec.rag.answer import Answer
from ragspec.rag.chat.chat import PreparedTurn
from ragspec.rag.chat.history import ChatTurn
from ragspec.rag.steps import parse_scope
from ragspec.rag.wording import found_words
from ragspec.retrieval.search.segment_search import SearchScope
from services.backend import ServiceBackend
from services.openai import tools
from services.openai.answer_fields import citation_fields, passages_of, support_of
from services.openai.answers import ChoiceDelta, Chunk, GenerationResponse, MessageFormat, ResponseSender
from services.openai.generation import ChoiceKey, DeltaMailbox, EngineStream, RequestContext
from services.openai.types import ChatBody, RetrievalOptions

_INLINE_CHARS = 2048


def add_chat(router: APIRouter, backend: ServiceBackend, mailbox: DeltaMailbox, threads: Executor) -> None:
    """`threads` prepare turns."""

    @router.post("/v1/chat/completions", response_model=None, tags=["chat"])
    async def create(body: ChatBody, request: Request) -> Response:
        """An answer to the last message, after those before it."""
        context = RequestContext.of(backend, mailbox, body, request)
        return GenerationResponse(partial(write, context, threads, ChatFormat))


async def write(
    context: RequestContext[ChatBody], threads: Executor, form: type[ChatFormat], sender: ResponseSender
) -> None:
    """Raises: ApiError, RagspecError."""
    if context.body.uses_tools:
        await tools.write(context, sender)
        return
    if is_inline(context.body):
        ready = prepare(context)
    else:
        call = partial(copy_context().run, prepare, context)
        ready = await asyncio.get_running_loop().run_in_executor(threads, call)
    if ready.searched:
        context.model.metrics.retrieved(ready.retrieve_s, ready.times.encode_s, ready.times.search_s)
    async with context.generate([ready.request], ready) as stream:
        await form(context, stream, replace(ready, said=stream.said)).send(sender)


def is_inline(body: ChatBody) -> bool:
    """Whether the turn needs no retrieval and so little reading that a thread would cost more time than it saves."""
    num_chars = sum(len(message.content) for message in body.messages)
    has_lookup = body.retrieval_options.when != "never" or body.conversation
    return not has_lookup and len(body.messages) == 1 and num_chars <= _INLINE_CHARS


def prepare(context: RequestContext[ChatBody]) -> PreparedTurn:
    """Blocks. Raises: InputError, NotFound, PromptTooLong, RetrievalError, StoreError."""
    body, retriever = context.body, context.model.retriever
    options = body.retrieval_options
    for store_id in options.vector_store_ids or ():
        context.backend.library.records.store(context.caller.tenant, store_id)  # NotFound for another tenant's
    turn = ChatTurn(
        id=context.id,
        messages=tuple(message.message for message in body.messages),
        params=context.params,
        scope=_scope(context.caller.tenant, options),
        conversation=body.conversation or "",
        num_passages=options.num_passages or retriever.num_passages,
        when=options.when or retriever.when,
        speculation=context.drafting,
        prediction=body.prediction.content if body.prediction else "",
        cache_salt=body.cache_salt or "",
        abstain_below=retriever.abstain_below,
        keep=body.store is not False,
    )
    return context.model.chat.prepare(turn)


def _scope(tenant: str, options: RetrievalOptions) -> SearchScope:
    """Raises: InputError for an invalid filter."""
    filters = [options.filter] if options.filter is not None else []
    if options.vector_store_ids is not None:
        filters.append({"type": "in", "key": "vector_store_id", "value": options.vector_store_ids})
    return parse_scope(tenant, {"type": "and", "filters": filters} if filters else None)


class ChatFormat(MessageFormat):
    """An answer from the documents. Also stores the turn in its conversation."""

    def __init__(self, context: RequestContext[ChatBody], stream: EngineStream, ready: PreparedTurn) -> None:
        super().__init__(context, stream)
        self._ready = ready
        self._is_kept, self.shows_sources = False, bool(ready.prompt.passages)

    async def choices(self, completions: Sequence[Completion]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        answers = await self._answers(completions)
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.text, "refusal": None} | self._citations(answer),
                "logprobs": self.logprobs(answer.logprobs),
                "finish_reason": answer.finish_reason.value,
            }
            for index, answer in enumerate(answers)
        ]
        support = [self._support(answer, index) for index, answer in enumerate(answers)]
        merged = {name: [each for own in support for each in own[name]] for name in support[0]}
        return choices, self._turn_fields() | merged | self._kept_field()

    def first_chunks(self) -> Sequence[Chunk]:
        return self.begun("", self._turn_fields())

    def delta_choice(self, delta: ChoiceDelta) -> dict[str, Any]:
        if self._ready.require_support:  # the text comes with the last choice, once its support is known
            return self.chunk(delta.key, {"content": ""})
        return self.chunk(delta.key, {"content": delta.text}, self.logprobs(delta.logprobs))

    async def last_choice(self, key: ChoiceKey) -> tuple[dict[str, Any], dict[str, Any]]:
        index, completion = self.indices[key], self.stream.completion(key)
        (answer,) = await self._answers([completion])
        whole, logprobs = ({"content": answer.text}, answer.logprobs) if self._ready.require_support else ({}, None)
        told = None if logprobs is None else self.logprobs(logprobs)
        choice = self.chunk(key, whole | self._citations(answer), told)
        choice["finish_reason"] = answer.finish_reason.value
        kept = self._kept_field() if completion.choice == 0 else {}
        return choice, {"ragspec": self._support(answer, index) | kept}

    async def _answers(self, completions: Sequence[Completion]) -> list[Answer]:
        """Adds citations and stores the turn; in a thread if there are passages to search or a conversation to write."""
        if self._ready.prompt.passages or self._ready.turn.conversation:
            return await asyncio.to_thread(self._answers_blocking, completions)
        return self._answers_blocking(completions)

    def _answers_blocking(self, completions: Sequence[Completion]) -> list[Answer]:
        answers, is_kept = self.context.model.chat.answers(self._ready, completions)
        self._is_kept |= is_kept
        for answer in answers:
            self.context.model.metrics.labelled([sentence.label for sentence in answer.sentences])
        return answers

    def _turn_fields(self) -> dict[str, Any]:
        """Fields of `ragspec` that are known before the first token."""
        ready = self._ready
        return {
            "conversation": ready.turn.conversation or None,
            "question": ready.question,
            "rewritten": ready.question != ready.user_question,
            "searched": ready.searched,
            "passages": passages_of(ready.prompt.passages, ready.prompt.ranks),
            "passage_order": ready.prompt.order,
            "dropped_passages": len(ready.dropped_passages),
            "dropped_turns": ready.prompt.num_dropped_turns,
            "missing_segments": list(ready.missing),
            "abstained": bool(ready.said),
            "closeness": ready.closeness,
            "found": found_words(ready.closeness),
            "index_generation": ready.generation,
            "seed": self.context.params.seed,
        }

    def _kept_field(self) -> dict[str, Any]:
        """Whether the named conversation stored this turn."""
        return {"kept": self._is_kept} if self._ready.turn.conversation else {}

    def _own_metrics(self) -> dict[str, float]:
        ready = self._ready
        seconds = {"retrieval": ready.retrieve_s, "encode": ready.times.encode_s, "search": ready.times.search_s}
        return {f"{name}_time_ms": 1e3 * value for name, value in seconds.items()}

    def _citations(self, answer: Answer) -> dict[str, Any]:
        return citation_fields(answer, self.context.body.citations or "openai", self.context.base_url)

    def _support(self, answer: Answer, index: int) -> dict[str, list[dict[str, Any]]]:
        """The passages' support of the answer; each item has its choice's number if there are several choices."""
        choice = {"choice": index} if len(self.indices) > 1 else {}
        return {name: [each | choice for each in items] for name, items in support_of(answer).items()}

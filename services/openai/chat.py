"""`POST /v1/chat/completions`: an answer from the documents, with citations, at once or as a stream.

Beside OpenAI's fields an answer has `ragspec`: the passages that were given to the model, and where the answer quotes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ragspec.core import Completion
from ragspec.rag.answer import Answer
from ragspec.rag.chat.chat import Chat, ChatTurn, PreparedTurn
from ragspec.rag.steps import parse_scope
from ragspec.retrieval.search.segment_search import SearchScope
from ragspec.speculation import ON, Speculation
from services.backend import Backend
from services.openai.citing import Dialect, citations_of, passages_of, said_with
from services.openai.engine_stream import Key, Mail, Run
from services.openai.logprobs import TokenTexts
from services.openai.request_context import Asked, index_of, usage_of
from services.openai.sending import Sender, Writing
from services.openai.streaming import Chunk, Piece
from services.openai.types import ChatBody, Retrieval

_QUICK_CHARS = 2048
_PREPARED_AT_ONCE = 64
"""Most of their time these threads wait for a call of the index that they share."""


def routes(backend: Backend, mail: Mail) -> APIRouter:
    router, texts = APIRouter(tags=["chat"]), TokenTexts(backend.prompts.tokenizer)
    threads = ThreadPoolExecutor(_PREPARED_AT_ONCE, "ragspec-prepare")

    @router.post("/v1/chat/completions", response_model=None)
    async def create(body: ChatBody, request: Request) -> Response:
        """An answer to the last message, after those before it."""
        return Writing(partial(_write, body, Asked.of(backend, mail, body, request), texts, threads))

    return router


async def _write(body: ChatBody, asked: Asked, texts: TokenTexts, threads: Executor, sender: Sender) -> None:
    """The whole request, until its client has all of it. Raises: ApiError, RagspecError."""
    if is_quick(body):
        ready = prepared(body, asked)
    else:
        call = partial(copy_context().run, prepared, body, asked)
        ready = await asyncio.get_running_loop().run_in_executor(threads, call)
    if body.chosen is not None:
        asked.backend.metrics.retrieved(ready.retrieve_s)
    async with asked.running([ready.request], ready.retrieve_s) as run:
        reply = ChatReply(body, asked, ready, run, texts)
        if body.stream:
            head = asked.head("chat.completion.chunk", "chatcmpl", asked.backend.engine.fingerprint)
            await asked.tell(sender, run, head, reply)
        else:
            await sender.json(await reply.whole())


def is_quick(body: ChatBody) -> bool:
    """Whether a thread would take longer to begin than this takes: nothing is looked up, and there is little to read."""
    num_chars = sum(len(message.content) for message in body.messages)
    return body.chosen is None and not body.conversation and len(body.messages) == 1 and num_chars <= _QUICK_CHARS


def prepared(body: ChatBody, asked: Asked) -> PreparedTurn:
    """Blocks. Raises: InputError, NotFound, PromptTooLong, RetrievalError, StoreError."""
    for store_id in (body.chosen or Retrieval()).vector_store_ids or ():
        asked.backend.library.store(asked.caller.tenant, store_id)  # it is there, and the caller's
    return asked.backend.chat.prepare(turn_of(body, asked))


def turn_of(body: ChatBody, asked: Asked) -> ChatTurn:
    """Raises: InputError."""
    chosen = body.chosen
    return ChatTurn(
        id=asked.id,
        messages=tuple(message.message for message in body.messages),
        params=asked.params,
        scope=_scope(asked.caller.tenant, chosen or Retrieval()),
        conversation=body.conversation or "",
        num_passages=(chosen and chosen.num_passages) or asked.backend.config.retriever.num_passages,
        retrieve=chosen is not None,
        speculation=ON if body.speculation is None else Speculation.of(body.speculation),
        prediction=body.prediction.content if body.prediction else "",
        cache_salt=body.cache_salt or "",
    )


def _scope(tenant: str, chosen: Retrieval) -> SearchScope:
    """Raises: InputError for a filter that cannot be meant."""
    filters = [chosen.filter] if chosen.filter is not None else []
    if chosen.vector_store_ids is not None:
        filters.append({"type": "in", "key": "vector_store_id", "value": chosen.vector_store_ids})
    if not filters:
        return parse_scope(tenant, None)
    return parse_scope(tenant, {"type": "and", "filters": filters} if len(filters) > 1 else filters[0])


class ChatReply:
    """One answer, in OpenAI's words. `streaming.Account` for its chunks."""

    def __init__(self, body: ChatBody, asked: Asked, ready: PreparedTurn, run: Run, texts: TokenTexts) -> None:
        self._body, self._asked, self._ready, self._run, self._texts = body, asked, ready, run, texts
        self._indices = index_of(run)
        self._dialect: Dialect = body.citations or "openai"
        self._kept = False

    async def whole(self) -> dict[str, Any]:
        """Raises: as `Run.finished`."""
        completions = await self._run.finished()
        self._asked.count(self._run)
        answers = await self._done(completions)
        cited = [each for index, answer in enumerate(answers) for each in self._cited(answer, index)]
        head = self._asked.head("chat.completion", "chatcmpl", completions[0].stats.system_fingerprint)
        return {
            **head,
            "choices": [self._choice(index, answer) for index, answer in enumerate(answers)],
            "usage": usage_of(self._run),
            "ragspec": self._told_before() | {"citations": cited} | self._told_after(),
            **self._asked.metrics(self._run),
        }

    def opening(self) -> Sequence[Chunk]:
        role = {"role": "assistant", "content": "", "refusal": None}
        chunks: list[Chunk] = [([_delta(index, role)], {}) for index in self._indices.values()]
        chunks[0] = (chunks[0][0], {"ragspec": self._told_before()})
        return chunks

    def told(self, piece: Piece) -> Chunk:
        logprobs = {"content": self._texts.chat(piece.logprobs), "refusal": None} if self._body.logprobs else None
        choice = _delta(self._indices[piece.key], {"content": piece.text}, logprobs)
        return [choice], self._asked.progress(self._run, piece.key)

    async def ending(self, key: Key) -> Chunk:
        index, completion = self._indices[key], self._run.completion(key)
        (answer,) = await self._done([completion])
        choice = _delta(index, said_with(answer, self._dialect)) | {"finish_reason": answer.finish_reason.value}
        after = self._told_after() if completion.choice == 0 else {}
        more = {"ragspec": {"citations": self._cited(answer, index)} | after}
        return [choice], more | self._asked.progress(self._run, key)

    def closing(self) -> Sequence[Chunk]:
        self._asked.count(self._run)
        return self._asked.last_chunk(self._run)

    async def _done(self, completions: Sequence[Completion]) -> list[Answer]:
        """With citations, and kept for the turns after it."""
        if self._ready.prompt.passages or self._ready.conversation:
            return await asyncio.to_thread(self._answered, completions)
        return self._answered(completions)  # there is nothing to find, and nothing to keep

    def _answered(self, completions: Sequence[Completion]) -> list[Answer]:
        """May block. The first choice is what a conversation goes on with."""
        chat: Chat = self._asked.backend.chat
        answers = [chat.answered(self._ready, completion) for completion in completions]
        for answer, completion in zip(answers, completions, strict=True):
            if completion.choice == 0:
                self._kept = chat.remember(self._ready, answer)
        return answers

    def _told_before(self) -> dict[str, Any]:
        """What is known before a token is written."""
        ready = self._ready
        return {
            "conversation": ready.conversation or None,
            "question": ready.question,
            "rewritten": ready.rewritten,
            "passages": passages_of(ready.prompt.passages),
            "dropped_passages": len(ready.dropped_passages),
            "dropped_turns": ready.dropped_turns,
            "missing_segments": list(ready.missing),
            "index_generation": ready.generation,
            "seed": self._asked.params.seed,
        }

    def _told_after(self) -> dict[str, Any]:
        """Whether a conversation that was named goes on with this turn."""
        return {"kept": self._kept} if self._ready.conversation else {}

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.text, "refusal": None} | said_with(answer, self._dialect)
        logprobs = {"content": self._texts.chat(answer.logprobs), "refusal": None} if self._body.logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": answer.finish_reason.value}

    def _cited(self, answer: Answer, index: int) -> list[dict[str, Any]]:
        which = {"choice": index} if len(self._indices) > 1 else {}
        return [citation | which for citation in citations_of(answer)]


def _delta(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

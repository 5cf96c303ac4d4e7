"""`POST /v1/responses`: a chat turn in the format of OpenAI's newer API, whole or as events.

Owns the translation of bodies and answers. Nothing is stored: `previous_response_id` is refused; `conversation` names a stored
conversation. The field `ragspec` beside OpenAI's fields is that of a chat completion.
"""

import json
from collections.abc import Mapping
from concurrent.futures import Executor
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BeforeValidator, Field, ValidationError

from ragspec.core import FinishReason
from ragspec.rag.answer import Answer
from services.backend import ServiceBackend
from services.errors import ApiError, validation_error
from services.limits import at_most
from services.openai.answer_fields import citation_fields
from services.openai.answers import END, KEEP_ALIVE, GenerationResponse, ResponseSender, immediate, padding
from services.openai.chat import ChatFormat, write
from services.openai.generation import DeltaMailbox, RequestContext
from services.openai.types import MAX_MESSAGES, Body, ChatBody, GenerationBody, RetrievalField, ShortText

_SPOT = {"output_index": 0, "content_index": 0}


class TextFormat(Body):
    """As `response_format` of a chat completion, without its inner object."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = Field("", max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @property
    def response_format(self) -> dict[str, Any]:
        inner = {"name": self.name, "schema": self.schema_, "strict": self.strict}
        return {"type": self.type} | ({"json_schema": inner} if self.type == "json_schema" else {})


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Body):
    """Only the defaults: the model writes its answer at once, and there is no reasoning to summarise."""

    effort: Literal["none", "medium"] | None = None
    summary: Any = None


class ResponseStreamOptions(Body):
    include_obfuscation: bool = True


class NamedConversation(Body):
    id: ShortText


def _named(value: Any) -> Any:
    """A conversation as its name alone."""
    return NamedConversation.model_validate(value).id if isinstance(value, dict) else value


class FileSearch(Body):
    """OpenAI's tool that searches vector stores: here each answer searches them, as `retrieval` does."""

    type: Literal["file_search"]
    vector_store_ids: Annotated[list[ShortText], at_most(64), Field(min_length=1, max_length=64)]
    max_num_results: int | None = Field(None, ge=1, le=64)
    filters: dict[str, Any] | None = None


class ResponseBody(GenerationBody):
    """`POST /v1/responses`. `seed`, `speculation` and `retrieval` are ours. Fields without effect are ignored."""

    _supported = frozenset({"tools", "tool_choice"})
    model: str = Field(max_length=512)
    input: str | Annotated[list[dict[str, Any]], at_most(MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    stream_options: ResponseStreamOptions | None = None
    include: Annotated[list[Literal["reasoning.encrypted_content"]], at_most(1)] | None = None
    truncation: Literal["disabled", "auto"] | None = None
    reasoning: ReasoningOptions | None = None
    seed: int | None = None
    speculation: bool | dict[str, Any] | None = None
    retrieval: RetrievalField | None = None
    conversation: Annotated[ShortText, BeforeValidator(_named)] | None = None
    tools: Annotated[list[FileSearch], at_most(1), Field(max_length=1)] | None = None
    tool_choice: Literal["none", "auto", "required"] | None = None

    def chat_body(self) -> dict[str, Any]:
        """The body of the same chat completion. Raises: ApiError for an item that is no message."""
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        messages = [_message(item) for item in items if item.get("type") != "reasoning"]
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        same = ("model", "temperature", "top_p", "stream", "seed", "speculation", "conversation")
        return {name: getattr(self, name) for name in same} | {
            "max_tokens": self.max_output_tokens,
            "messages": messages,
            "retrieval": self._chat_retrieval(),
            "stream_options": self.stream_options and self.stream_options.model_dump(),
            "response_format": self.text and self.text.format and self.text.format.response_format,
        }

    def _chat_retrieval(self) -> bool | dict[str, Any] | None:
        if self.retrieval is not None:
            return self.retrieval if isinstance(self.retrieval, bool) else self.retrieval.model_dump()
        if not self.tools:
            return None
        if self.tool_choice == "none":
            return False
        (search,) = self.tools
        names = {"vector_store_ids": search.vector_store_ids, "num_passages": search.max_num_results}
        return names | {"filter": search.filters}


def add_responses(router: APIRouter, backend: ServiceBackend, mailbox: DeltaMailbox, threads: Executor) -> None:
    @router.post("/v1/responses", response_model=None, tags=["responses"])
    async def create(body: ResponseBody, request: Request) -> Response:
        """An answer to the input."""
        try:
            chat = ChatBody.model_validate(body.chat_body())
        except ValidationError as cause:
            raise validation_error([_named_here(error) for error in cause.errors()]) from None
        if chat.uses_tools:
            raise ApiError(400, "tools are called in chat completions only", param="input")
        context = RequestContext.of(backend, mailbox, chat, request)
        if context.is_strict and chat.stream:
            raise ApiError(400, "strict privacy streams chat completions only", param="stream")
        return GenerationResponse(partial(write, context, threads, ResponsesFormat))


class ResponsesFormat(ChatFormat):
    """A response with one message."""

    async def _send_whole(self, sender: ResponseSender) -> None:
        completions = await self.stream.completions()
        self._count()
        (answer,) = await self._answers(completions)
        await sender.json(self._response(answer))

    async def _send_stream(self, sender: ResponseSender) -> None:
        number = 0

        async def send(*events: tuple[str, Mapping[str, Any]], padded: bool = False) -> None:
            """In one message to the socket, which costs as much as formatting several events."""
            nonlocal number
            frames = [frame_of(*event, place, padded=padded) for place, event in enumerate(events, number)]
            number += len(events)
            await sender.event(b"".join(frames))

        async def send_text(text: str) -> None:
            told = spot | {"delta": text, "logprobs": []}
            await send(("response.output_text.delta", told), padded=self.context.body.options.include_obfuscation)

        item = self._item("in_progress", [])
        spot: dict[str, Any] = {**_SPOT, "item_id": item["id"]}
        await sender.begin_events()
        begun = {"response": self._envelope("in_progress", [])}
        await send(
            ("response.created", begun),
            ("response.in_progress", begun),
            ("response.output_item.added", {"output_index": 0, "item": item}),
            ("response.content_part.added", spot | {"part": _part("", [])}),
        )
        async for delta in immediate(self.stream):
            if delta is None:
                await sender.event(KEEP_ALIVE)
            elif delta.text and not self._ready.require_support:
                await send_text(delta.text)
        (answer,) = await self._answers([self.stream.completion(self.stream.keys[0])])
        if self._ready.require_support:
            await send_text(answer.text)
        self._count()
        response = self._response(answer)
        part, status = response["output"][0]["content"][0], response["status"]
        annotations = (
            spot | {"annotation_index": index, "annotation": annotation}
            for index, annotation in enumerate(part["annotations"])
        )
        await send(
            *(("response.output_text.annotation.added", fields) for fields in annotations),
            ("response.output_text.done", spot | {"text": answer.text, "logprobs": []}),
            ("response.content_part.done", spot | {"part": part}),
            ("response.output_item.done", {"output_index": 0, "item": response["output"][0]}),
            (f"response.{status}", {"response": response}),
        )
        await sender.event(b"", is_last=True)

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        name = f"msg_{self.context.id}"
        return {"type": "message", "id": name, "status": status, "role": "assistant", "content": content}

    def _response(self, answer: Answer) -> dict[str, Any]:
        is_cut = answer.finish_reason is FinishReason.LENGTH
        status = "incomplete" if is_cut else "completed"
        cited = citation_fields(answer, "openai", self.context.base_url)["annotations"]
        annotations = [{"type": each["type"], **each[each["type"]]} for each in cited]
        told = self._envelope(status, [self._item(status, [_part(answer.text, annotations)])])
        ragspec = self._turn_fields() | self._support(answer, 0) | self._kept_field()
        reason = {"reason": "max_output_tokens"} if is_cut else None
        return told | {"incomplete_details": reason, "usage": _usage(self._usage()), "ragspec": ragspec}

    def _envelope(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        params, conversation = self.context.params, self.context.body.conversation
        return {
            "id": f"resp_{self.context.id}",
            "object": "response",
            "created_at": self.context.created,
            "status": status,
            "conversation": {"id": conversation} if conversation else None,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "max_output_tokens": params.max_tokens,
            "metadata": {},
            "model": self.context.model.name,
            "output": output,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "tool_choice": "none",
            "tools": [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _named_here(error: Mapping[str, Any]) -> dict[str, Any]:
    """An error of the chat completion's body, with this body's name of the field."""
    first, *rest = error["loc"] or ("",)
    return {**error, "loc": ({"messages": "input", "max_tokens": "max_output_tokens"}.get(first, first), *rest)}


def _message(item: dict[str, Any]) -> dict[str, Any]:
    if item.get("type", "message") != "message" or "role" not in item:
        raise ApiError(400, f"the input holds an item of type {item.get('type')!r}, not a message", param="input")
    return {"role": item["role"], "content": item.get("content")}


def _part(text: str, annotations: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": annotations, "logprobs": []}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def frame_of(event: str, fields: Mapping[str, Any], number: int, *, padded: bool = False) -> bytes:
    """Pure ASCII, because some clients end a line at any line break of Unicode.

    `padded`: filled with random letters, as chunks of chat completions are.
    """
    data = {"type": event, "sequence_number": number, **fields}
    frame = f"event: {event}\ndata: {json.dumps(data)[:-1]}".encode()
    return frame + (padding(len(frame)) if padded else b"") + END

"""A chat completion with `tools`: the target writes text or calls, each held to its tool's JSON schema by a grammar.

Owns the engine's request and the format of calls, whole and streamed. `ragspec.rag.tools` knows how a target writes them. The
client calls the tools. Nothing is retrieved, and nothing is stored: an agent's documents are a tool of its own.
"""

import asyncio
import json
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from ragspec.core import Completion, CopySource, FinishReason, Request, SourceKind
from ragspec.errors import InputError, PromptTooLong
from ragspec.rag.tools import CallForm, ParsedAnswer, call_form, call_grammar, parse_calls
from services.errors import ApiError
from services.openai.answers import ChoiceDelta, Chunk, MessageFormat, ResponseSender
from services.openai.generation import ChoiceKey, EngineStream, RequestContext
from services.openai.types import ChatBody, NamedTool


async def write(context: RequestContext[ChatBody], sender: ResponseSender) -> None:
    """Raises: ApiError, RagspecError."""
    _check(context)
    form, request = await asyncio.to_thread(_request, context)
    async with context.generate([request]) as stream:
        await ToolFormat(context, stream, form).send(sender)


def _check(context: RequestContext[ChatBody]) -> None:
    """Raises: ApiError for a field that means nothing beside tools."""
    body = context.body
    others = {
        "retrieval": bool(body.retrieval),
        "conversation": bool(body.conversation),
        "citations": body.citations is not None,
        "response_format": bool(context.params.json_schema),
        "ignore_eos": context.params.ignore_eos,
        "min_tokens": bool(context.params.min_tokens),
        "privacy": context.is_strict and bool(body.stream),
    }
    if name := next((name for name, is_given in others.items() if is_given), ""):
        reason = f"{name} and tools exclude each other: an answer with calls follows their form alone"
        raise ApiError(400, reason, param=name)


def _request(context: RequestContext[ChatBody]) -> tuple[CallForm, Request]:
    """The engine's request. Drafters may copy all texts of the conversation, and the beginning of each tool's call.

    Raises: InputError, PromptTooLong.
    """
    body, prompts = context.body, context.model.prompts
    form, prompt_ids, schemas = call_form(prompts), _prompt_ids(context), _schemas(body)
    is_named = isinstance(body.tool_choice, NamedTool)
    is_parallel = body.parallel_tool_calls is not False and not is_named
    is_required = is_named or body.tool_choice == "required"
    grammar = call_grammar(form, schemas, required=is_required, parallel=is_parallel)
    copied = dict.fromkeys([*_texts(body, form), *map(form.head, schemas)])
    sources = tuple(CopySource(SourceKind.HISTORY, text[: prompts.max_chars]) for text in copied if text.strip())
    context.model.chat.caches.note(salt := context.salt)
    options = context.params, sources, salt, context.drafting
    return form, Request(context.id, prompt_ids, *options, grammar=grammar, affinity=salt)


def _prompt_ids(context: RequestContext[ChatBody]) -> tuple[int, ...]:
    """Raises: InputError, PromptTooLong."""
    prompts, max_tokens = context.model.prompts, context.params.max_tokens
    tools = [tool.model_dump(exclude_none=True) for tool in context.body.tools or ()]
    messages = [message.template_fields for message in context.body.messages]
    if prompts.writes_control([tools, messages]):
        raise InputError("a field of a tool is named as a control token of this model")
    prompt_ids = prompts.encode(messages, tools=tools or None, add_generation_prompt=True)
    if (room := prompts.max_context_tokens - max_tokens) < len(prompt_ids):
        raise PromptTooLong(len(prompt_ids), max(room, 0), max_tokens)
    return prompt_ids


def _schemas(body: ChatBody) -> dict[str, dict[str, Any]]:
    """Of the arguments of the tools that may be called, by name. Raises: InputError."""
    if body.tool_choice == "none":
        return {}
    schemas = {tool.function.name: tool.function.parameters for tool in body.tools or ()}
    if isinstance(body.tool_choice, NamedTool):
        if (chosen := body.tool_choice.function.name) not in schemas:
            raise InputError(f"tool_choice names {chosen!r}, which is not among the tools")
        return {chosen: schemas[chosen]}
    if body.tool_choice == "required" and not schemas:
        raise InputError("tool_choice is required, but there are no tools")
    return schemas


def _texts(body: ChatBody, form: CallForm) -> Iterator[str]:
    """The texts of the conversation, the latest first, calls as the target writes them."""
    for message in reversed(body.messages):
        yield message.content
        for call in message.tool_calls or ():
            yield f"{form.head(call.function.name)}{json.dumps(call.arguments, ensure_ascii=False)}{form.closing}"
    if body.prediction:
        yield body.prediction.content


class ToolFormat(MessageFormat):
    """A message may hold calls. A stream tells a call's id and name with the call's first arguments."""

    def __init__(self, context: RequestContext[ChatBody], stream: EngineStream, form: CallForm) -> None:
        super().__init__(context, stream)
        self._form = form
        self._names = [tool.function.name for tool in context.body.tools or ()]
        self._texts = dict.fromkeys(self.indices, "")
        self._sent = dict.fromkeys(self.indices, ParsedAnswer("", ()))

    async def choices(self, completions: Sequence[Completion]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        choices = []
        for index, completion in enumerate(completions):
            parsed = parse_calls(self._form, self._names, completion.text)
            message: dict[str, Any] = {"role": "assistant", "content": parsed.content or None, "refusal": None}
            if parsed.calls:
                message["tool_calls"] = [
                    {"id": _call_id(), "type": "function", "function": call._asdict()} for call in parsed.calls
                ]
            ended = {"finish_reason": _reason(completion, parsed), "logprobs": self.logprobs(completion.logprobs)}
            choices.append({"index": index, "message": message, **ended})
        return choices, {"seed": self.context.params.seed}

    def first_chunks(self) -> Sequence[Chunk]:
        return self.begun(None, {"seed": self.context.params.seed})

    def delta_choice(self, delta: ChoiceDelta) -> dict[str, Any]:
        self._texts[delta.key] += delta.text
        return self.chunk(delta.key, self._news(delta.key, is_whole=False), self.logprobs(delta.logprobs))

    async def last_choice(self, key: ChoiceKey) -> tuple[dict[str, Any], dict[str, Any]]:
        completion = self.stream.completion(key)
        self._texts[key] = completion.text
        choice = self.chunk(key, self._news(key, is_whole=True))
        choice["finish_reason"] = _reason(completion, self._sent[key])
        return choice, {}

    def _news(self, key: ChoiceKey, *, is_whole: bool) -> dict[str, Any]:
        """What the text so far says beyond what was sent."""
        before = self._sent[key]
        now = self._sent[key] = parse_calls(self._form, self._names, self._texts[key], is_whole=is_whole)
        told: dict[str, Any] = {}
        if content := now.content[len(before.content) :]:
            told["content"] = content
        calls = []
        for number, call in enumerate(now.calls):
            is_new = number >= len(before.calls)
            arguments = call.arguments if is_new else call.arguments[len(before.calls[number].arguments) :]
            if is_new:
                named = {"name": call.name, "arguments": arguments}
                calls.append({"index": number, "id": _call_id(), "type": "function", "function": named})
            elif arguments:
                calls.append({"index": number, "function": {"arguments": arguments}})
        return told | ({"tool_calls": calls} if calls else {})


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _reason(completion: Completion, parsed: ParsedAnswer) -> str:
    is_called = parsed.calls and completion.finish_reason is FinishReason.STOP
    return "tool_calls" if is_called else completion.finish_reason.value

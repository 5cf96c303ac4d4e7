"""Responses as the official client sees them, against a real server."""

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response

QUESTION = "Who built the bridge?"


def ask(api: openai.OpenAI, given: Any = QUESTION, **options: Any) -> Response:
    extra = {"seed": 5} | options.pop("extra_body", {})
    body = {"model": "tiny", "input": given, "max_output_tokens": 16, "extra_body": extra}
    got = api.responses.create(**body | options)
    assert isinstance(got, Response)
    return got


def test_a_response_has_openais_shape_and_the_chats_text(api: openai.OpenAI) -> None:
    """A field that clients rely on; another text than the same chat completion's."""
    got = ask(api)
    Response.model_validate(got.model_dump())
    messages: Any = [{"role": "user", "content": QUESTION}]
    chat = api.chat.completions.create(model="tiny", messages=messages, max_tokens=16, seed=5)
    assert got.output_text == chat.choices[0].message.content
    assert got.status == "incomplete" and got.incomplete_details.reason == "max_output_tokens"
    assert got.usage.output_tokens == 16 == chat.usage.completion_tokens
    assert got.usage.input_tokens == chat.usage.prompt_tokens
    assert got.model_extra["ragspec"]["passages"] == chat.model_extra["ragspec"]["passages"]
    assert got.output[0].content[0].annotations == chat.choices[0].message.annotations == []


def test_file_search_searches_its_vector_stores(api: openai.OpenAI) -> None:
    """OpenAI's usual way to a vector store, refused."""
    tools: Any = [{"type": "file_search", "vector_store_ids": ["vs_none"], "max_num_results": 2}]
    with pytest.raises(openai.NotFoundError, match="vs_none"):
        ask(api, tools=tools)
    unsearched = ask(api, extra_body={"retrieval": False})
    assert ask(api, tools=tools, tool_choice="none").output_text == unsearched.output_text


def test_instructions_and_messages_are_the_chats(api: openai.OpenAI) -> None:
    """Instructions or earlier turns that are dropped."""
    turns: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi!"}]},
        {"role": "user", "content": QUESTION},
    ]
    got = ask(api, turns, instructions="Be brief.")
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}]
    messages += [{"role": "assistant", "content": "Hi!"}, {"role": "user", "content": QUESTION}]
    chat = api.chat.completions.create(model="tiny", messages=messages, max_tokens=16, seed=5)
    assert got.output_text == chat.choices[0].message.content
    assert got.usage.input_tokens == chat.usage.prompt_tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stream_tells_the_same_in_openais_events(api: openai.OpenAI, temperature: float) -> None:
    """An event out of order, or a text that differs from the whole response's."""
    whole = ask(api, temperature=temperature, extra_body={"speculation": False})
    with api.responses.stream(
        model="tiny", input=QUESTION, max_output_tokens=16, temperature=temperature, extra_body={"seed": 5}
    ) as stream:
        events = list(stream)
    kinds = list(dict.fromkeys(event.type for event in events))
    first = ["created", "in_progress", "output_item.added", "content_part.added"]
    last = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert kinds[:4] == [f"response.{kind}" for kind in first]
    assert kinds[-4:] == [f"response.{kind}" for kind in last]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output_text == whole.output_text


def test_what_asks_for_nothing_is_taken(api: openai.OpenAI) -> None:
    """Clients that write every field with its default, or a conversation as the object it came as, were refused."""
    defaults: dict[str, Any] = {"tool_choice": "auto", "parallel_tool_calls": True, "include": [], "background": False}
    named = {"service_tier": "auto", "safety_identifier": "x", "prompt_cache_key": "x"}
    assert ask(api, **defaults, **named).output_text == ask(api).output_text
    conversation = api.conversations.create()
    got = ask(api, conversation={"id": conversation.id})
    assert got.conversation is not None and got.conversation.id == conversation.id
    assert len(list(api.conversations.items.list(conversation.id))) == 2
    with api.responses.stream(
        model="tiny", input=QUESTION, max_output_tokens=16, stream_options={"include_obfuscation": False}
    ) as stream:
        deltas = [event for event in stream if event.type == "response.output_text.delta"]
    assert deltas and not any("obfuscation" in (delta.model_extra or {}) for delta in deltas)


def test_a_response_follows_a_schema(api: openai.OpenAI) -> None:
    """A format that is accepted and ignored."""
    schema = {"type": "array", "items": {"enum": [1874, 1921]}, "minItems": 1, "maxItems": 2}
    got = ask(api, text={"format": {"type": "json_schema", "name": "years", "schema": schema, "strict": True}})
    assert set(json.loads(got.output_text)) <= {1874, 1921} and got.status == "completed"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"given": [{"type": "function_call_output", "call_id": "a", "output": "b"}]}, "input"),
        ({"given": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"given": [{"role": "wizard", "content": "x"}]}, "input"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(api: openai.OpenAI, options: dict[str, Any], param: str) -> None:
    """A stored response or a tool that is silently left out."""
    with pytest.raises(openai.BadRequestError) as caught:
        ask(api, **options)
    assert param in str(caught.value.param)

"""Tools in chat completions, with a target of random weights: whatever it writes, calls follow their schemas."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from service_parts import KV_SLOTS, MODEL, Service, served, service_engine
from tiny_target import save_model
from transformers import AutoTokenizer

from ragspec.config import TargetConfig
from ragspec.engine.target import Target

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% if not loop.first %}\n{% endif %}"
    '[call]{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}[/call]{% endfor %}</s>'
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
LIGHT = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "room": {"enum": ["hall", "kitchen"]}},
    "required": ["on"],
}


def tool(name: str, **fields: Any) -> Any:
    return {"type": "function", "function": {"name": name, **fields}}


TOOLS = [tool("light", description="Switches.", parameters=LIGHT), tool("stop")]
NAMED = tool("light")
SCHEMAS = {"light": LIGHT, "stop": {"type": "object", "maxProperties": 0}}
QUESTION = [{"role": "user", "content": "Light in the kitchen, please."}]


@pytest.fixture(scope="module")
def tool_service(tmp_path_factory: pytest.TempPathFactory, letter_index: Path) -> Iterator[Service]:
    folder = save_model("llama", tmp_path_factory.mktemp("tools"), max_position_embeddings=1024)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    target = Target.load(TargetConfig(model=str(folder)), num_kv_slots=KV_SLOTS)
    with served(service_engine(target), tmp_path_factory.mktemp("serving"), letter_index) as service:
        yield service


@pytest.fixture(scope="module")
def tools_api(tool_service: Service) -> Iterator[openai.OpenAI]:
    with tool_service.openai() as client:
        yield client


def asked(**options: Any) -> Any:
    return {"model": MODEL, "messages": QUESTION, "tools": TOOLS, "max_tokens": 300, "seed": 5, **options}


def checked(calls: Any, content: str | None, reason: str) -> list[tuple[str, str]]:
    """Names and arguments of an answer's calls, which must be valid unless its length was used up."""
    assert reason in ("tool_calls", "stop", "length") and (reason != "tool_calls" or calls)
    assert "[call]" not in (content or "") or reason == "length"
    for call in calls or ():
        if reason != "length":
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    assert len({call.id for call in calls or ()}) == len(calls or ())
    return [(call.function.name, call.function.arguments) for call in calls or ()]


def whole(api: openai.OpenAI, **options: Any) -> tuple[str, str, list[tuple[str, str]]]:
    (choice,) = api.chat.completions.create(**asked(**options)).choices
    calls = checked(choice.message.tool_calls, choice.message.content, choice.finish_reason)
    return choice.finish_reason, choice.message.content or "", calls


def streamed(api: openai.OpenAI, **options: Any) -> tuple[str, str, list[tuple[str, str]]]:
    """By the client's own accumulation of deltas."""
    with api.chat.completions.stream(**asked(**options)) as stream:
        try:
            done: Any = stream.get_final_completion()
        except openai.LengthFinishReasonError as cut:
            done = cut.completion
    (choice,) = done.choices
    calls = checked(choice.message.tool_calls, choice.message.content, choice.finish_reason)
    return choice.finish_reason, choice.message.content or "", calls


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"tool_choice": "auto", "temperature": 1.0}, 0),
        ({"tool_choice": "required", "temperature": 0.0}, 1),
        ({"tool_choice": "required", "temperature": 1.0, "parallel_tool_calls": False}, 1),
        ({"tool_choice": NAMED, "temperature": 1.0}, 1),
        ({"tool_choice": "none", "temperature": 1.0, "max_tokens": 60}, 0),
    ],
    ids=["auto", "required", "one", "named", "none"],
)
def test_calls_follow_their_schemas_whole_and_streamed(tools_api: openai.OpenAI, options: Any, least: int) -> None:
    """Arguments that a tool cannot read; a stream that adds up to another call; drafts that change a token."""
    for seed in (1, 2):
        reason, content, calls = whole(tools_api, **options, seed=seed)
        assert (reason, content, calls) == streamed(tools_api, **options, seed=seed)
        plain = whole(tools_api, **options, seed=seed, extra_body={"speculation": False})
        assert plain == (reason, content, calls)
        assert len(calls) >= least and (options["tool_choice"] != "none" or not calls)
        if options["tool_choice"] == NAMED or options.get("parallel_tool_calls") is False:
            assert len(calls) == 1 and reason == "tool_calls"
        if options["tool_choice"] == NAMED:
            assert calls[0][0] == "light"


def test_a_history_with_calls_and_results_is_read(tools_api: openai.OpenAI) -> None:
    """The second request of every agent, which sends the call and its result back; with and without tools."""
    call = tool("light", arguments='{"on": true}') | {"id": "c1", "index": 0}
    history = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    history.append({"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "done"}]})
    whole(tools_api, messages=history, temperature=0.0, max_tokens=16)
    told = tools_api.chat.completions.create(model=MODEL, messages=history, max_tokens=8, seed=1)  # type: ignore[arg-type]
    assert told.choices[0].message.content and "passages" not in told.model_dump()["ragspec"]


def test_arguments_are_drafted_from_the_conversation(tool_service: Service, tools_api: openai.OpenAI) -> None:
    """A call that is decoded token by token, though most of its text stands in the request."""
    told = tools_api.chat.completions.create(**asked(tool_choice=NAMED, extra_body={"metrics": True})).model_dump()
    assert told["metrics"]["drafters"].get("copy", 0) > 8


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tool_choice": tool("other")}, "'other'"),
        ({"tools": [], "tool_choice": "required"}, "no tools"),
        ({"tools": [tool("a b")]}, "tools.0.function.name"),
        ({"tools": [tool("a", parameters={"type": "objekt"})]}, "cannot be followed"),
        ({"response_format": {"type": "json_object"}}, "response_format and tools"),
        ({"extra_body": {"retrieval": True}}, "retrieval and tools"),
        ({"messages": [*QUESTION, {"role": "assistant", "tool_calls": [tool("light", arguments="{")]}]}, "JSON"),
        ({"max_tokens": 1000}, "tokens"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_reason(tools_api: openai.OpenAI, options: Any, reason: str) -> None:
    """A field that is ignored, or an answer without calls that the client waits for."""
    with pytest.raises(openai.BadRequestError, match=reason):
        tools_api.chat.completions.create(**asked(**options))


def test_a_template_without_tools_is_said_to_have_none(api: openai.OpenAI) -> None:
    """Tools that a model never sees."""
    with pytest.raises(openai.BadRequestError, match="chat template does not write calls"):
        api.chat.completions.create(**asked())
    assert api.chat.completions.create(**asked(tool_choice="none")).choices[0].message.content


def test_langchains_agents_get_their_calls(tool_service: Service) -> None:
    """A call that LangChain cannot parse, whole or from its chunks; a result that it sends back and is refused."""
    langchain = pytest.importorskip("langchain_openai", reason="the package langchain-openai is not installed")
    from langchain_core.messages import HumanMessage, ToolMessage

    access = {"base_url": f"{tool_service.url}/v1", "api_key": tool_service.keys.trusted}
    chat = langchain.ChatOpenAI(model=MODEL, **access, max_tokens=300, seed=3, temperature=0)
    agent = chat.bind_tools(TOOLS, tool_choice="light")
    question = HumanMessage("Light in the kitchen, please.")
    answer = agent.invoke([question])
    chunks = list(agent.stream([question]))
    for told in (answer, sum(chunks[1:], chunks[0])):
        (call,) = told.tool_calls
        assert call["name"] == "light" and not told.invalid_tool_calls
        jsonschema.validate(call["args"], LIGHT)
    result = ToolMessage("done", tool_call_id=answer.tool_calls[0]["id"])
    assert chat.bind_tools(TOOLS).invoke([question, answer, result], max_tokens=8) is not None

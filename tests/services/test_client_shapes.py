"""Requests as published clients send them, written by hand from the clients' sources, each answered as the client expects."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx2 as httpx
import pytest
from correcting_service import LATEX, annotation, applied, correcting
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from raw_http import ask, head
from service_parts import Service

from ragspec.engine.target import Target

# -- OpenAI's interface ------------------------------------------------------------------------------------------------

QUESTION = "Who built\nthe bridge?"
SYSTEM, HELLO, ASKED = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello."},
    {"role": "user", "content": QUESTION},
)
TURNS = [SYSTEM, HELLO, {"role": "assistant", "content": "Hi!"}, ASKED]
COMMON = {"model": "tiny", "temperature": 0, "seed": 5}
SHORT = {**COMMON, "max_tokens": 8}


def chat(answer: dict[str, Any], **options: Any) -> tuple[str, dict[str, Any]]:
    """The turns of `TURNS` with an earlier answer in a client's form."""
    messages = [SYSTEM, HELLO, {"role": "assistant", "content": "Hi!"} | answer, ASKED]
    return "chat/completions", {"messages": messages, **SHORT, **options}


STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
NULLS: dict[str, Any] = dict.fromkeys(
    ["audio", "function_call", "reasoning", "reasoning_content", "refusal", "annotations", "provider_specific_fields"]
)
PARTS = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in QUESTION.split("\n")]
WITH_PARTS = [*TURNS[:-1], {"role": "user", "content": PARTS}]
CHATS = {
    "openai-python, an answer of vLLM": chat(
        {**NULLS, "tool_calls": []}, reasoning_effort=None, verbosity=None, tools=None, top_logprobs=0, n=1
    ),
    "openai-python, an answer of SGLang": chat({"content": None, "refusal": "Hi!", "reasoning_content": "A greeting."}),
    "openai-node": chat({"refusal": None, "annotations": []}, **STREAMED, store=False, parallel_tool_calls=True),
    "LangChain": chat({"content": [{"type": "text", "text": "Hi!"}]}, **STREAMED, n=1, top_p=1.0, seed=-1, top_k=-1),
    "LlamaIndex": chat({}, messages=WITH_PARTS, stream=False, logprobs=None, top_logprobs=0),
    "LiteLLM": chat(
        NULLS
        | {"tool_calls": None, "provider_specific_fields": {"refusal": None}, "images": [], "thinking_blocks": []},
        stream=False,
        metadata={"user_api_key": "x"},
    ),
    "Open WebUI": chat({}, **STREAMED, stop=[], logit_bias={}, user={"name": "Ann", "id": "1", "role": "user"}),
    "Continue": chat({}, **STREAMED, top_p=None, frequency_penalty=None, presence_penalty=None, stop=None),
    "aider": chat({}, messages=WITH_PARTS, **STREAMED),
}


def chat_text(reply: httpx.Response, is_stream: bool) -> str:
    if not is_stream:
        whole = ChatCompletion.model_validate(reply.json())
        assert whole.usage is not None and whole.choices[0].finish_reason in ("stop", "length")
        return whole.choices[0].message.content or ""
    *events, last = (line.removeprefix("data: ") for line in reply.text.split("\n") if line.startswith("data: "))
    chunks = [ChatCompletionChunk.model_validate_json(event) for event in events]
    assert last == "[DONE]" and chunks[-1].usage is not None and not chunks[-1].choices
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_of_any_client_reads_the_same_turns(client: httpx.Client, name: str) -> None:
    """Null fields, an answer of another server in the history or text in parts were refused, or changed the prompt."""
    path, body = CHATS[name]
    reply = client.post(f"/v1/{path}", json=body)
    assert reply.status_code == 200, reply.text
    plain = client.post("/v1/chat/completions", json={"messages": TURNS, **SHORT})
    text = chat_text(reply, body.get("stream") is True)
    assert text and text == plain.json()["choices"][0]["message"]["content"]


def test_a_response_of_openai_node_reads_the_same_turns(client: httpx.Client) -> None:
    """The items of an earlier response, sent back whole with its reasoning, were refused."""
    answer = {"type": "output_text", "text": "Hi!", "annotations": [], "logprobs": []}
    items: list[dict[str, Any]] = [
        HELLO,
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [answer]},
        {"role": "user", "content": [{"type": "input_text", "text": text} for text in QUESTION.split("\n")]},
    ]
    asked = {"input": items, "instructions": "Be brief.", **COMMON, "max_output_tokens": 8, "stream": True}
    empty = dict.fromkeys(["previous_response_id", "max_tool_calls", "prompt", "top_logprobs", "truncation", "user"])
    defaults = {"tools": [], "tool_choice": "auto", "reasoning": {"effort": None}, "text": {"format": {"type": "text"}}}
    reply = client.post("/v1/responses", json=asked | empty | defaults | {"include": ["reasoning.encrypted_content"]})
    assert reply.status_code == 200, reply.text
    events = [json.loads(line[6:]) for line in reply.text.split("\n") if line.startswith("data: ")]
    plain = client.post("/v1/chat/completions", json={"messages": TURNS, **SHORT})
    (item,) = events[-1]["response"]["output"]
    assert item["content"][0]["text"] == plain.json()["choices"][0]["message"]["content"]


COMPLETIONS = {
    "LangChain": {
        "prompt": [QUESTION],
        "n": 1,
        "best_of": 1,
        "frequency_penalty": 0,
        "logit_bias": {},
        "logprobs": None,
    },
    "Continue, at the end of a file": {"prompt": QUESTION, "suffix": "", "stop": ["\n\n"], "stream": False},
}


@pytest.mark.parametrize("name", COMPLETIONS)
def test_a_completion_of_any_client_reads_the_same_prompt(client: httpx.Client, name: str) -> None:
    """A client that writes every field with its default was refused."""
    reply = client.post("/v1/completions", json=COMPLETIONS[name] | SHORT)
    assert reply.status_code == 200, reply.text
    plain = client.post("/v1/completions", json={"prompt": QUESTION, **SHORT})
    assert reply.json()["choices"][0]["text"] == plain.json()["choices"][0]["text"].split("\n\n")[0]


def test_embeddings_of_openai_node_come_as_base64(client: httpx.Client) -> None:
    """Null dimensions were refused."""
    asked = {"model": "tiny", "input": [QUESTION], "encoding_format": "base64", "dimensions": None, "user": None}
    packed = client.post("/v1/embeddings", json=asked).json()["data"][0]["embedding"]
    plain = client.post("/v1/embeddings", json={"model": "tiny", "input": QUESTION}).json()["data"][0]["embedding"]
    assert len(base64.b64decode(packed)) == 4 * len(plain)


# -- LanguageTool's interface ------------------------------------------------------------------------------------------

WRONG, RIGHT = "He go to a old mill.", "He goes to an old mill."


def better(sentence: str) -> str:
    return sentence.replace("go ", "goes ").replace("a old ", "an old ")


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory, letter_index: Path, service_target: Target) -> Iterator[Service]:
    with correcting(tmp_path_factory.mktemp("checker"), letter_index, service_target, better) as running:
        yield running


def placed(*nodes: dict[str, str]) -> str:
    """An annotated text as the npm package annotatedtext builds it: every node with its place."""
    end, built = 0, []
    for node in nodes:
        start, end = end, end + len(node.get("text", node.get("markup", "")))
        built.append(node | {"offset": {"start": start, "end": end}})
    return annotation(*built)


FORM = ("Content-Type: application/x-www-form-urlencoded",)
JAVA = (
    "Content-Type: application/json",
    "Connection: Upgrade, HTTP2-Settings",
    "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
    "Upgrade: h2c",
    "User-Agent: Java-http-client/17.0.7",
)
"""Headers of LTeX, which calls its form JSON and offers HTTP/2."""
MARKDOWN = (
    {"markup": "# ", "interpretAs": "# "},
    {"text": "He "},
    {"markup": "**", "interpretAs": ""},
    {"text": "go"},
    {"markup": "**", "interpretAs": ""},
    {"text": " to a old mill."},
)


def fields(words: str, **others: str) -> dict[str, str]:
    """Of a form: `name=value`, separated by blanks; values that hold blanks come apart."""
    return dict(word.split("=") for word in words.split()) | others


LTEX = "language=en-US level=picky motherTongue=de-DE enabledRules=EN_CONSISTENT_APOS,PASSIVE_VOICE"
LINTER = """language=auto preferredVariants=en-US disabledRules=DASH_RULE,EN_QUOTES,WHITESPACE_RULE
    disabledCategories=TYPOGRAPHY level=default"""
OBSIDIAN = "language=auto enabledOnly=false level=default preferredVariants=en-GB,de-AT motherTongue=de-DE"
ADD_ON = """textSessionId=9581:1700000000000 enableHiddenRules=true motherTongue=de level=default language=auto
    noopLanguages=de,en preferredLanguages=de,en preferredVariants=en-US,de-DE,pt-BR,ca-ES disabledRules=WHITESPACE_RULE
    useragent=chrome-extension mode=allButTextLevelOnly allowIncompleteResults=true c=1"""
IN_MAIL = json.dumps({"text": WRONG, "metaData": {"EmailToAddress": ""}})
UTF_8 = ("Content-Type: application/x-www-form-urlencoded;charset=UTF-8", "Accepts: application/json")
CHECKS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "VS Code LTeX": (JAVA, fields(LTEX, data=annotation(*LATEX))),
    "VS Code LanguageTool Linter": (UTF_8, fields(LINTER, data=placed(*MARKDOWN))),
    "VS Code LanguageTool Linter, plain text": (FORM, fields("language=en-US", data=placed({"text": WRONG}))),
    "Obsidian": (FORM, fields(OBSIDIAN, data=placed(*MARKDOWN))),
    "LibreOffice": (FORM, fields("language=en-US username=ann@example.org apiKey=none", text=WRONG)),
    "browser add-on": (FORM, fields(ADD_ON, data=IN_MAIL)),
    "Thunderbird": ((), fields("language=auto", data=json.dumps({"text": WRONG, "marker": ">"}))),
    "Overleaf": (FORM, fields("language=auto", data=annotation({"text": "He go to a old "}, {"text": "mill."}))),
    "OnlyOffice": (FORM, fields("language=en-GB username=u@x.org apiKey=none", text=WRONG)),
    "Emacs": (FORM, fields("language=en disabledRules= enabledOnly=no", text=WRONG)),
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_text_of_any_editor_is_corrected(checker: Service, name: str) -> None:
    """A node with other keys or a form called JSON was refused, and the client could not read the refusal."""
    lines, given = CHECKS[name]
    form = urlencode(given).encode()
    if lines:
        sent = head("POST", "/v2/check", *lines, f"Content-Length: {len(form)}"), form
    else:
        sent = head("GET", f"/v2/check?{form.decode()}"), b""
    reply = ask(checker.url, *sent)
    assert reply.status == 200, reply.body
    data = json.loads(given.get("data", "{}"))
    nodes = data.get("annotation", [{"text": given.get("text", data.get("text", ""))}])
    text = "".join(node.get("text", node.get("markup", "")) for node in nodes)
    assert applied(text, reply.json()["matches"]) == text.replace("go", "goes").replace(" a ", " an ")
    assert len(reply.json()["matches"]) == 2


def test_v1_grammar_reads_the_nodes_of_other_programs(checker: Service) -> None:
    """The same nodes were refused under /v1, and so were null fields."""
    nodes, empty = json.loads(placed(*MARKDOWN)), dict.fromkeys(["text", "language", "ignore", "temperature", "model"])
    with checker.client() as client:
        reply = client.post("/v1/grammar", json=nodes | empty | {"seed": -1})
    assert reply.status_code == 200, reply.text
    assert reply.json()["corrected"] == "# He **goes** to an old mill."

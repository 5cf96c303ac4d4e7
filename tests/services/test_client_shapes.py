"""Requests as published clients send them, written by hand from the clients' sources, each answered as the client expects."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx2 as httpx
import pytest
from correcting_service import Correcting, applied
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from raw_http import ask, head
from service_parts import Service

# -- OpenAI's interface ------------------------------------------------------------------------------------------------

REQUESTS = json.loads(Path(__file__).with_name("client_requests.json").read_text())
"""By client: bodies of chats and of completions; headers and form fields of checks, which are sent with GET without headers."""
QUESTION = "Who built\nthe bridge?"
HELLO = {"role": "user", "content": "Hello."}
TURNS = [
    {"role": "system", "content": "Be brief."},
    HELLO,
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": QUESTION},
]
COMMON = {"model": "tiny", "temperature": 0, "seed": 5}
SHORT = {**COMMON, "max_tokens": 8}


def chat_text(reply: httpx.Response, is_stream: bool) -> str:
    if not is_stream:
        whole = ChatCompletion.model_validate(reply.json())
        assert whole.usage is not None and whole.choices[0].finish_reason in ("stop", "length")
        return whole.choices[0].message.content or ""
    *events, last = (line.removeprefix("data: ") for line in reply.text.split("\n") if line.startswith("data: "))
    chunks = [ChatCompletionChunk.model_validate_json(event) for event in events]
    assert last == "[DONE]" and chunks[-1].usage is not None and not chunks[-1].choices
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])


@pytest.mark.parametrize("name", REQUESTS["chats"])
def test_a_chat_of_any_client_reads_the_same_turns(client: httpx.Client, name: str) -> None:
    """Null fields, an answer of another server in the history or text in parts were refused, or changed the prompt."""
    body = REQUESTS["chats"][name]
    reply = client.post("/v1/chat/completions", json=body)
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


@pytest.mark.parametrize("body", REQUESTS["completions"].values(), ids=REQUESTS["completions"])
def test_a_completion_of_any_client_reads_the_same_prompt(client: httpx.Client, body: dict[str, Any]) -> None:
    """A client that writes every field with its default was refused."""
    reply = client.post("/v1/completions", json=body | SHORT)
    assert reply.status_code == 200, reply.text
    plain = client.post("/v1/completions", json={"prompt": QUESTION, **SHORT})
    assert reply.json()["choices"][0]["text"] == plain.json()["choices"][0]["text"].split("\n\n")[0]


# -- LanguageTool's interface ------------------------------------------------------------------------------------------


def better(sentence: str) -> str:
    return sentence.replace("go ", "goes ").replace("a old ", "an old ")


@pytest.fixture(scope="module")
def checker(correcting: Correcting) -> Iterator[Service]:
    with correcting(better) as running:
        yield running


@pytest.mark.parametrize("name", REQUESTS["checks"])
def test_a_text_of_any_editor_is_corrected(checker: Service, name: str) -> None:
    """A node with other keys or a form called JSON was refused, and the client could not read the refusal."""
    lines, given = REQUESTS["checks"][name].values()
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
    nodes = json.loads(REQUESTS["checks"]["Obsidian"]["form"]["data"])
    empty = dict.fromkeys(["text", "language", "ignore", "temperature", "model"])
    with checker.client() as client:
        reply = client.post("/v1/grammar", json=nodes | empty | {"seed": -1})
    assert reply.status_code == 200, reply.text
    assert reply.json()["corrected"] == "# He **goes** to an old mill."

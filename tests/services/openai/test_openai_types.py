"""What may be asked under /v1, and what is refused in which words."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ragspec.core import Message, SamplingParams
from ragspec.errors import InputError
from ragspec.rag.openai_fields import IGNORED_FIELDS, SAMPLING_FIELDS, UNSUPPORTED_FIELDS
from services.errors import ApiError, validation_error
from services.languagetool.routes import GrammarRequest
from services.limits import RequestBody
from services.openai.responses import ResponseBody
from services.openai.types import ChatBody, CompletionBody, EmbeddingBody, SamplingBody
from services.stores.schemas import NewStore, SearchBody

WRONG = json.loads(Path(__file__).with_name("wrong_chats.json").read_text())
"""Fields of a chat's body, the field that is named as wrong, and the words."""
HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields: Any) -> ChatBody:
    return ChatBody.model_validate({"model": "tiny", "messages": HELLO} | fields)


@pytest.mark.parametrize(("fields", "param", "reason"), WRONG)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str | None, reason: str) -> None:
    """A misspelt or impossible parameter was left out in silence, or refused without its name."""
    with pytest.raises(ValidationError) as refused:
        chat(**fields)
    error = validation_error(refused.value.errors())
    assert (error.status, error.param) == (400, param)
    assert reason in error.message


@pytest.mark.parametrize("name", sorted(UNSUPPORTED_FIELDS.keys() - {"tools", "tool_choice"}))
def test_unsupported_fields_are_refused_with_the_reason(name: str) -> None:
    """A client waited for calls of tools that never come."""
    with pytest.raises(ApiError, match=UNSUPPORTED_FIELDS[name]) as refused:
        chat(**{name: [{"type": "function"}]})
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, name, "unsupported_parameter")
    for nothing in (None, [], {}, "", False):
        chat(**{name: nothing})


def test_a_null_field_is_an_absent_field() -> None:
    """Clients that write every field, and fields of other servers, with null were refused."""
    bodies: list[tuple[type[RequestBody], dict[str, Any]]] = [
        (ChatBody, {"model": "tiny", "messages": HELLO}),
        (CompletionBody, {"model": "tiny", "prompt": "a"}),
        (EmbeddingBody, {"model": "tiny", "input": ["a"]}),
        (ResponseBody, {"model": "tiny", "input": "a"}),
        (GrammarRequest, {"text": "a"}),
        (SearchBody, {"query": "a"}),
        (NewStore, {}),
    ]
    for kind, given in bodies:
        nulls = dict.fromkeys(kind.model_fields.keys() - given.keys() | {"field_of_another_server"})
        assert kind.model_validate(nulls | given) == kind.model_validate(given)


def test_minus_one_means_no_seed_and_no_limit_as_in_vllm() -> None:
    """`seed: -1` and `top_k: -1` were out of range."""
    defaults = SamplingParams(seed=7, top_k=20)
    assert len({chat(seed=-1, top_k=-1).params(defaults).seed for _ in range(20)} - {None}) == 20
    assert chat(top_k=-1).params(defaults) == replace(defaults, top_k=0) == chat(top_k=0).params(defaults)


ANSWERS: dict[str, dict[str, Any]] = {
    "a refusal": {"content": None, "refusal": "Hi"},
    "parts": {
        "content": [{"type": "thinking", "thinking": "x"}, {"type": "output_text", "text": "Hi", "logprobs": []}]
    },
    "a part that refuses": {"content": [{"type": "refusal", "refusal": "Hi"}], "name": "ann", "audio": {"id": "a"}},
    "ours": {
        "content": "Hi",
        "refusal": None,
        "annotations": [],
        "tool_calls": None,
        "content_blocks": [{"type": "a"}],
    },
}


@pytest.mark.parametrize("server", ANSWERS)
def test_an_answer_of_any_server_is_read_as_its_text(server: str) -> None:
    """A history with another server's answer was refused for fields that its client never wrote."""
    body = chat(messages=[*HELLO, {"role": "assistant", **ANSWERS[server]}, *HELLO])
    assert [message.message for message in body.messages][1] == Message("assistant", "Hi")
    assert chat(messages=[*HELLO, {"role": "assistant", "content": None}, *HELLO]).messages[1].content == ""


def test_what_changes_nothing_is_taken() -> None:
    """Clients that name their user were refused."""
    assert SamplingBody.model_fields.keys() >= IGNORED_FIELDS
    ignored = dict.fromkeys(IGNORED_FIELDS, "x") | {"store": True}
    body = chat(**ignored, tools=[], tool_choice="none", modalities=["text"])
    assert not {name for name in IGNORED_FIELDS if hasattr(body.params(SamplingParams()), name)}


def test_parts_and_roles_become_messages() -> None:
    """Text parts were joined without a line break, or a developer's words became the user's."""
    parts = [{"type": "text", "text": "a\u0308"}, {"type": "text", "text": " b"}]
    body = chat(messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}])
    assert [message.message for message in body.messages] == [
        Message("system", "Be brief."),
        Message("user", "a\u0308\n b"),
    ]


def test_parameters_mean_what_they_say() -> None:
    """A parameter was accepted and did nothing."""
    given: dict[str, Any] = {"temperature": 1, "top_p": 0.5, "top_k": 4, "min_p": 0.125, "seed": 3, "n": 2}
    given |= {"presence_penalty": 0.25, "frequency_penalty": -0.5, "repetition_penalty": 1.5, "verbatim_quotes": False}
    given |= {"stop": ["x", "y"], "max_completion_tokens": 7, "min_tokens": 1, "ignore_eos": True}
    given |= {"logit_bias": {"5": -100}, "first_token_bias": {"6": 4}}
    assert given.keys() | {"max_tokens", "response_format"} == SAMPLING_FIELDS.keys()  # a schema has tests of its own
    params = chat(**given, logprobs=True, top_logprobs=2).params(SamplingParams())
    del given["max_completion_tokens"]
    biases = {"logit_bias": {5: -100.0}, "first_token_bias": {6: 4.0}}
    assert params == SamplingParams(**given | biases | {"stop": ("x", "y"), "max_tokens": 7, "logprobs": 2})


def test_defaults_are_the_services_and_a_seed_is_drawn() -> None:
    """A field that was not given overrode the service's setting; a seed that a browser cannot write down exactly."""
    defaults = SamplingParams(temperature=0.7, max_tokens=33)
    drawn = [chat().params(defaults) for _ in range(20)]
    assert {(each.temperature, each.max_tokens, each.logprobs) for each in drawn} == {(0.7, 33, None)}
    assert len({each.seed for each in drawn}) == 20 and all(0 <= (each.seed or -1) < 2**53 for each in drawn)
    assert chat(logprobs=True).params(defaults).logprobs == 0


@pytest.mark.parametrize(
    "fields", [{"temperature": 1e9}, {"top_p": 0.0}, {"seed": -2}, {"max_tokens": 5, "max_completion_tokens": 6}]
)
def test_values_out_of_range_are_input_errors(fields: dict[str, Any]) -> None:
    """A value that no sampler knows was clamped in silence."""
    with pytest.raises(InputError):
        chat(**fields).params(SamplingParams())


@pytest.mark.parametrize(
    ("given", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2] * 50, [[1, 2] * 50]), ([[1], [2]], [[1], [2]])],
)
def test_a_prompt_may_be_one_or_many(given: Any, prompts: Any) -> None:
    """Token ids of one prompt were taken for many prompts, or more than 32 of them for too many."""
    assert CompletionBody.model_validate({"model": "tiny", "prompt": given}).prompt == prompts


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": []},
        {"prompt": [True]},
        {"prompt": ["x"] * 33},
        {"echo": True},
        {"best_of": 2},
        {"n": 2, "best_of": 4},
    ],
)
def test_completions_refuse_what_they_cannot_do(fields: dict[str, Any]) -> None:
    """`echo` or `best_of` was accepted and did nothing."""
    with pytest.raises(ValidationError):
        CompletionBody.model_validate({"model": "tiny", "prompt": "a"} | fields)


TOKEN_IDS = "check_embedding_ctx_length=False"


@pytest.mark.parametrize(
    ("given", "reason"),
    [([5, 6], TOKEN_IDS), ([[5, 6], [7]], TOKEN_IDS), ([], ""), ([""], ""), ("", ""), (["x"] * 2049, ""), (5, "")],
)
def test_embeddings_take_texts_only(given: Any, reason: str) -> None:
    """LangChain's client sends another tokenizer's ids by default: "a valid string" told nobody how to stop it."""
    with pytest.raises(ValidationError) as refused:
        EmbeddingBody.model_validate({"model": "tiny", "input": given})
    error = validation_error(refused.value.errors())
    assert error.status == 400 and (error.param or "").startswith("input") and reason in error.message

"""OpenAI request fields as sampling parameters, and token usage as OpenAI reports it; for services and batch jobs.

Maps plain values to plain values. The caller decides which fields a body may have.

    >>> sampling_arguments({"temperature": 0.5, "stop": "\\n", "max_completion_tokens": 64})
    {'temperature': 0.5, 'stop': ('\\n',), 'max_tokens': 64}
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ragspec.core import GenerationStats, SamplingParams, SourceKind
from ragspec.errors import InputError

_OTHER_FORM = frozenset({"logprobs", "json_schema", "prefix_bias"})
"""Parameters that request bodies give in another form, or not at all."""
SAMPLING_FIELDS = {each.name: each.name for each in fields(SamplingParams) if each.name not in _OTHER_FORM} | {
    "max_completion_tokens": "max_tokens",
    "response_format": "json_schema",
}
"""Fields of a request body, with their names in `ragspec.core.SamplingParams`."""

IGNORED_FIELDS = frozenset(
    "metadata parallel_tool_calls prompt_cache_key prompt_cache_retention safety_identifier service_tier store user".split()
)
"""Fields that many clients send and that change no answer of ours."""

UNSUPPORTED_FIELDS = {
    "tools": "tools cannot be called: the answer is text",
    "tool_choice": "tools cannot be called: the answer is text",
    "functions": "functions cannot be called: the answer is text",
    "function_call": "functions cannot be called: the answer is text",
    "audio": "there is no audio: the answer is text",
    "web_search_options": "there is no search of the web; see retrieval",
    "suffix": "text cannot be written between a prompt and a suffix",
    "reasoning_effort": "the model writes its answer at once, without an amount of reasoning to choose",
    "previous_response_id": "answers are not stored; send the whole input, or name a conversation",
    "background": "an answer is sent on the connection that asked for it",
    "verbosity": "the length of an answer cannot be chosen in words; see max_tokens",
}
"""Fields that ask for an output that cannot be written, with the reason."""
_DEFAULTS = {
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "reasoning_effort": ("none", "medium"),
    "verbosity": ("medium",),
}
"""Values of such fields that ask for no more than an absent field does."""

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content parts, each with the key of its text."""
_REASONING_PARTS = ("thinking", "reasoning")
"""Parts of other servers' answers that are no part of the answer's text."""

_WHOLE_NUMBERS = frozenset(each.name for each in fields(SamplingParams) if each.metadata.get("kind") is int)
_MAX_EXACT_FLOAT = 2.0**53


def refused_field(body: Mapping[str, Any]) -> str:
    """The first of `UNSUPPORTED_FIELDS` in a body whose value asks for something; empty if there is none."""
    asked = (name for name in UNSUPPORTED_FIELDS if body.get(name) and body[name] not in _DEFAULTS.get(name, ()))
    return next(asked, "")


def sampling_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments for `SamplingParams` in a body. Raises: InputError for two different output limits."""
    given = {name: body[name] for name in SAMPLING_FIELDS if body.get(name) is not None}
    limits = {given[name] for name in ("max_tokens", "max_completion_tokens") if isinstance(given.get(name), int)}
    if len(limits) > 1:
        raise InputError("max_tokens and max_completion_tokens are two names of one limit, and differ")
    return {SAMPLING_FIELDS[name]: normalize_parameter(SAMPLING_FIELDS[name], value) for name, value in given.items()}


def normalize_parameter(name: str, value: Any) -> Any:
    """A value as `SamplingParams` takes it, from JSON or a table: list to tuple, text to token id, 64.0 to 64.

    As in vLLM, `seed` -1 is no seed, and `top_k` -1 is no limit.
    """
    if value == -1 and name in ("seed", "top_k"):
        return None if name == "seed" else 0
    if name == "stop":
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
    if name in ("logit_bias", "first_token_bias") and isinstance(value, dict):
        return {_token_id(token): bias for token, bias in value.items() if bias is not None}
    if name == "json_schema" and isinstance(value, dict):
        return _schema_text(value)
    if name in _WHOLE_NUMBERS and isinstance(value, float) and value.is_integer() and abs(value) <= _MAX_EXACT_FLOAT:
        return int(value)
    return value


def _schema_text(response_format: Mapping[str, Any]) -> str:
    """The schema that OpenAI's `response_format` asks for; a mapping without its types is a schema itself."""
    kind, given = response_format.get("type"), response_format.get("json_schema")
    if kind == "text":
        return ""
    if kind == "json_object":
        return '{"type": "object"}'
    schema: Any = response_format
    if kind == "json_schema":
        schema = given.get("schema") if isinstance(given, dict) else None
    if not isinstance(schema, dict):
        raise InputError("response_format of the type json_schema needs a json_schema with a schema")
    return json.dumps(schema)


def content_text(content: Any) -> str:
    """The text of a message's content: a string, or text parts, which a newline joins as in vLLM. Raises: InputError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InputError(f"content must be a string or a list of text parts, not {type(content).__name__}")
    return "\n".join(_part_text(part) for part in content if not _is_reasoning(part))


def usage(choices: Sequence[GenerationStats]) -> dict[str, Any]:
    """Token usage of all choices of one request, the doubt before them included; their prompt counts once.

    `rejected_prediction_tokens` counts drafted tokens of the prediction that were rejected; they are not in the completion.
    """
    doubt = next((stats.doubt for stats in choices if stats.doubt), GenerationStats())
    num_prompt = max((stats.num_prompt_tokens for stats in choices), default=0) + doubt.num_prompt_tokens
    num_output = sum(stats.num_output_tokens for stats in choices) + doubt.num_output_tokens
    num_cached = min((stats.num_cached_tokens for stats in choices), default=0) + doubt.num_cached_tokens
    predicted = SourceKind.PREDICTION.name.lower()
    num_accepted = sum(stats.accepted_by_source.get(predicted, 0) for stats in choices)
    num_drafted = sum(stats.drafted_by_source.get(predicted, 0) for stats in choices)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": min(num_cached, num_prompt)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": num_accepted,
            "rejected_prediction_tokens": num_drafted - num_accepted,
        },
    }


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise InputError(f"only parts of type text can be read, not {kind!r}")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise InputError(f"a part of type {kind} must have a string as its {_TEXT_PARTS[kind]}")
    return text


def _is_reasoning(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in _REASONING_PARTS


def _token_id(token: Any) -> Any:
    try:
        return int(token)
    except ValueError:
        return token

"""What the fields of an OpenAI body mean here, and what its answers say of an output: shared by services and batch jobs.

Plain values in, plain values out; whether a body may have a field at all is its reader's business.

    >>> sampling_arguments({"temperature": 0.5, "stop": "\\n", "max_completion_tokens": 64})
    {'temperature': 0.5, 'stop': ('\\n',), 'max_tokens': 64}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ragspec.core import GenerationStats, SourceKind
from ragspec.errors import InputError

SAMPLING_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "stop": "stop",
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "n": "n",
    "seed": "seed",
    # as in vLLM
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "min_tokens": "min_tokens",
    "ignore_eos": "ignore_eos",
}
"""Fields of a body, and what they are called in `ragspec.core.SamplingParams`."""

IGNORED_FIELDS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Fields that many clients send and that change nothing here: no answer would be another for them."""

_WHOLE_NUMBERS = frozenset({"top_k", "max_tokens", "min_tokens", "n", "seed"})
_MAX_EXACT_FLOAT = 2.0**53


def sampling_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `SamplingParams` that a body gives. Raises: InputError for two limits of the output."""
    given = {name: body[name] for name in SAMPLING_FIELDS if body.get(name) is not None}
    limits = {given[name] for name in ("max_tokens", "max_completion_tokens") if isinstance(given.get(name), int)}
    if len(limits) > 1:
        raise InputError("max_tokens and max_completion_tokens are two names of one limit, and differ")
    return {SAMPLING_FIELDS[name]: normalize_parameter(SAMPLING_FIELDS[name], value) for name, value in given.items()}


def normalize_parameter(name: str, value: Any) -> Any:
    """Forms that JSON and tables force on a value: lists for tuples, text for token ids, 64.0 for 64 (a table with gaps)."""
    if name == "stop":
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value
    if name == "logit_bias" and isinstance(value, dict):
        return {_token_id(token): bias for token, bias in value.items() if bias is not None}
    if name in _WHOLE_NUMBERS and isinstance(value, float) and value.is_integer() and abs(value) <= _MAX_EXACT_FLOAT:
        return int(value)
    return value


def content_text(content: Any) -> str:
    """A message's content: a string, or parts that are text. Raises: InputError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InputError(f"content must be a string or a list of text parts, not {type(content).__name__}")
    return "".join(map(_part_text, content))


def usage(choices: Sequence[GenerationStats]) -> dict[str, Any]:
    """What all choices of one request took together. Their prompt counts once.

    Of predicted text those tokens are counted that were drafted: rejected ones are no part of the output, and not counted in it.
    """
    num_prompt = max((stats.num_prompt_tokens for stats in choices), default=0)
    num_output = sum(stats.num_output_tokens for stats in choices)
    num_cached = min((stats.num_cached_tokens for stats in choices), default=0)
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
    if kind != "text":
        raise InputError(f"only parts of type text can be read, not {kind!r}")
    if not isinstance(part.get("text"), str):
        raise InputError("a part of type text must have a string as its text")
    return str(part["text"])


def _token_id(token: Any) -> Any:
    try:
        return int(token)
    except ValueError:
        return token

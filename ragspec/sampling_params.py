"""Sampling parameters: which they are, their ranges, and the checks when they are built.

Other modules import them from `ragspec.core`.

    >>> SamplingParams(logit_bias={7: 1.0}, prefix_bias={(3,): {7: 2.0}}).after((3,)).logit_bias
    {7: 3.0}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypedDict

from ragspec.errors import InputError

MAX_SEED = 2**64 - 1
LEAST_TEMPERATURE = 1e-6
"""Logits are divided by at least this number: a smaller one would overflow float32, and infinities tie."""


def _check_bias(name: str, biases: Any) -> None:
    if not isinstance(biases, Mapping):
        raise InputError(f"{name} must map token ids to numbers, not {biases!r}")
    for token, bias in biases.items():
        if isinstance(token, bool) or not isinstance(token, int):
            raise InputError(f"{name} must map token ids to numbers, and {token!r} is no token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100.0 <= bias <= 100.0:
            raise InputError(f"{name} of token {token} must be a number from -100 to 100, not {bias!r}")


def _in_range(default: Any, kind: type, low: float, high: float) -> Any:
    """A field with a number of this kind from `low` to `high`, or None if that is the default."""
    return field(default=default, metadata={"kind": kind, "low": low, "high": high})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a target's logits become tokens. Validated when built; wrong values raise InputError.

    `seed` None: the engine draws 64 random bits and returns them. Penalties follow vLLM: repetition counts prompt and output,
    presence and frequency count the output. `logprobs`: the number of alternatives returned beside each token's own
    log-probability, of the logits before any warp; None: no log-probabilities. Neither an end token nor a stop string ends an
    output of `min_tokens` tokens or fewer. `json_schema`: a JSON schema as text, which the output follows; empty: none. Where
    `max_tokens` ends such an output, it is the beginning of a valid one. `verbatim_quotes`: an answer from passages that begins
    with a quote begins with words of a passage, character by character; without effect on other outputs. `first_token_bias`:
    takes the place of `logit_bias` for its token ids at the first output token, and there alone. `prefix_bias`: of the token
    behind exactly these output tokens, added to the other biases.
    """

    temperature: float = _in_range(0.0, float, 0.0, 100.0)
    top_k: int = _in_range(0, int, 0, 2**31)
    top_p: float = _in_range(1.0, float, 1e-9, 1.0)
    min_p: float = _in_range(0.0, float, 0.0, 1.0)
    repetition_penalty: float = _in_range(1.0, float, 0.0, 100.0)
    presence_penalty: float = _in_range(0.0, float, -100.0, 100.0)
    frequency_penalty: float = _in_range(0.0, float, -100.0, 100.0)
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    first_token_bias: Mapping[int, float] = field(default_factory=dict)
    prefix_bias: Mapping[tuple[int, ...], Mapping[int, float]] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    max_tokens: int = _in_range(128, int, 1, 2**31)
    min_tokens: int = _in_range(0, int, 0, 2**31)
    ignore_eos: bool = False
    n: int = _in_range(1, int, 1, 64)
    logprobs: int | None = _in_range(None, int, 0, 20)
    seed: int | None = _in_range(None, int, 0, MAX_SEED)
    json_schema: str = ""
    verbatim_quotes: bool = True

    def __post_init__(self) -> None:
        for parameter in fields(self):
            value, limits = getattr(self, parameter.name), parameter.metadata
            if not limits or (value is None and parameter.default is None):
                continue
            kind, low, high = limits["kind"], limits["low"], limits["high"]
            if isinstance(value, bool) or not isinstance(value, (kind, int)) or not low <= value <= high:
                what = "an integer" if kind is int else "a number"
                raise InputError(f"{parameter.name} must be {what} from {low} to {high}, not {value!r}")
        if self.repetition_penalty == 0.0:
            raise InputError("repetition_penalty must be greater than 0")
        if not isinstance(self.stop, tuple | list) or not all(isinstance(s, str) and s for s in self.stop):
            raise InputError(f"stop must be a tuple of non-empty strings, not {self.stop!r}")
        for name in ("ignore_eos", "verbatim_quotes"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} must be true or false, not {getattr(self, name)!r}")
        for name in ("logit_bias", "first_token_bias"):
            _check_bias(name, getattr(self, name))
        for begin, biases in self.prefix_bias.items():
            if not isinstance(begin, tuple):
                raise InputError(f"prefix_bias must map tuples of token ids to biases, not {begin!r}")
            _check_bias("prefix_bias", biases)
        self._check_schema()
        if self.min_tokens > self.max_tokens:
            raise InputError(f"min_tokens ({self.min_tokens}) exceeds max_tokens ({self.max_tokens})")

    def _check_schema(self) -> None:
        if self.json_schema == "":
            return
        try:
            schema = json.loads(self.json_schema)
        except (TypeError, ValueError, RecursionError) as cause:
            raise InputError(f"json_schema must be a JSON schema as text: {cause}") from cause
        if not isinstance(schema, dict):
            raise InputError(f"json_schema must be a JSON object, not {self.json_schema[:40]!r}")
        if self.min_tokens or self.ignore_eos:
            raise InputError(
                "min_tokens and ignore_eos mean nothing beside json_schema: the output ends where its value does"
            )

    @property
    def biased_lengths(self) -> frozenset[int]:
        """The numbers of output tokens behind which `after` may differ from these parameters."""
        return frozenset([*map(len, self.prefix_bias), *([0] if self.first_token_bias else [])])

    def after(self, output: Sequence[int]) -> SamplingParams:
        """The parameters of the token behind these output tokens, all its biases in `logit_bias`."""
        of_prefix = self.prefix_bias.get(tuple(output), {})
        if output and not of_prefix:
            return self
        biases = {**self.logit_bias, **({} if output else self.first_token_bias)}
        for token, bias in of_prefix.items():
            biases[token] = biases.get(token, 0.0) + bias
        return replace(self, logit_bias=biases, first_token_bias={}, prefix_bias={})

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p leaves tokens out."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


class SamplingOptions(TypedDict, total=False):
    """Single sampling parameters, as keyword arguments; they replace those of `params` or of the configuration."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    first_token_bias: Mapping[int, float]
    prefix_bias: Mapping[tuple[int, ...], Mapping[int, float]]
    stop: tuple[str, ...]
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    verbatim_quotes: bool
    n: int
    logprobs: int | None
    seed: int | None
    json_schema: str

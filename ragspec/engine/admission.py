"""Admission: checks a request against the target before anything is computed, and builds its sequences.

>>> sequences = admission.sequences(request, listener, planner.prepare)
"""

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from numbers import Integral
from typing import Any, NamedTuple

from ragspec.core import WHOLE, Delta, Request
from ragspec.engine.sequence import OutputLimits, Sequence
from ragspec.engine.target import Target
from ragspec.engine.text import IncrementalDetokenizer
from ragspec.errors import InputError, PromptTooLong
from ragspec.numerics.attention import PAGE
from ragspec.numerics.noise import random_seed
from ragspec.speculation import AcceptanceRule
from ragspec.verification.rejection import RejectionSampler
from ragspec.verification.sampling import KeyedSampler, Sampler
from ragspec.verification.token_grammar import Grammars, GrammarSampler

SamplerFactory = Callable[[Request, int, int], Sampler]
"""(request, seed, choice) -> the sampler of that choice."""


class ModelLimits(NamedTuple):
    """The limits of a target. Checks requests without a tokenizer, so a router can check them too."""

    vocab_size: int
    max_context_tokens: int
    eos_ids: tuple[int, ...]

    def limits(self, request: Request) -> OutputLimits:
        """Check a request; returns where its output must end. Raises: InputError, PromptTooLong."""
        self._check_tokens(request)
        num_prompt, longest = len(request.prompt_ids), self.max_context_tokens
        if num_prompt >= longest:
            raise PromptTooLong(num_prompt, longest - 1)
        segment = request.segment
        most = min(request.params.max_tokens, longest - num_prompt)
        end = most if segment.end is None else min(most, segment.end)
        if len(segment.output_ids) >= end and segment != WHOLE:
            raise InputError(
                f"{len(segment.output_ids)} output tokens are given, of {end} at most: nothing is left to write"
            )
        if segment.output_ids and len(request.choices) > 1:
            raise InputError("a given output belongs to one choice: set n to 1 or name the choice in the segment")
        if not 0 <= request.choices[0] < request.params.n:
            raise InputError(f"there is no choice {segment.choice} of {request.params.n}")
        return OutputLimits(self.eos_ids, end, pauses=end < most)

    def _check_tokens(self, request: Request) -> None:
        if not request.prompt_ids:
            raise InputError("the prompt is empty")
        if not isinstance(request.salt, str):
            raise InputError("the salt must be a string")
        segment = request.segment
        given = {"prompt": request.prompt_ids, "output given": segment.output_ids, "draft": segment.draft_ids}
        for what, ids in given.items():
            if not all(issubclass(kind, Integral) for kind in set(map(type, ids))):
                raise InputError(f"the {what} holds a token id that is no whole number")
            if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
                raise InputError(f"the {what} holds a token id outside [0, {self.vocab_size})")
        params = request.params
        of_prefixes = itertools.chain.from_iterable(params.prefix_bias.values())
        biased = {
            "logit_bias": params.logit_bias,
            "first_token_bias": params.first_token_bias,
            "prefix_bias": of_prefixes,
        }
        for name, tokens in biased.items():
            if wrong := [token for token in tokens if not 0 <= token < self.vocab_size]:
                raise InputError(f"{name} names token {wrong[0]}, outside [0, {self.vocab_size})")


class Admission:
    """Checks requests and builds one sequence for each choice."""

    def __init__(
        self, target: Target, fingerprint: str, make_sampler: SamplerFactory | None = None, is_bitwise: bool = True
    ) -> None:
        """`is_bitwise`: no logit depends on the rest of its batch; otherwise texts are not reproducible."""
        self._target = target
        self._is_bitwise = is_bitwise
        self._make_sampler = make_sampler or self._by_rule
        self.fingerprint = fingerprint
        self.max_context_tokens = min(target.max_context_tokens, target.pool.num_slots - 2 * PAGE)
        self.grammars = Grammars(target.tokenizer, target.vocab_size, target.eos_ids)
        self.bounds = ModelLimits(target.vocab_size, self.max_context_tokens, target.eos_ids)

    def sequences(
        self, request: Request, listener: Callable[[Delta], None], prepare: Callable[[Request], Mapping[str, Any]]
    ) -> list[Sequence]:
        """One sequence a choice. `prepare` runs the drafters' preparation once a request.

        Raises: InputError, PromptTooLong; ModelError if the weights of a head cannot be read.
        """
        limits = self.bounds.limits(request)
        if (seed := request.params.seed) is None:
            seed = random_seed()
            request = replace(request, params=replace(request.params, seed=seed))
        if request.attention_heads and not self._target.has_heads(request.attention_heads):
            request = replace(request, attention_heads=())
        begin = time.perf_counter()
        sequences, prepared = [], prepare(request)
        prepare_s = (time.perf_counter() - begin) / len(request.choices)
        for choice in request.choices:
            text = self._text(request)
            sampler = self._make_sampler(request, seed, choice)
            sequence = Sequence(request, choice, sampler, text, limits, listener, prepared)
            sequence.stats.prompt_draft_s = prepare_s
            sequence.stats.exactness = request.speculation.exactness if self._is_bitwise else "none"
            sequence.stats.seed, sequence.stats.system_fingerprint = seed, self.fingerprint
            sequences.append(sequence)
        return sequences

    def _by_rule(self, request: Request, seed: int, choice: int) -> Sampler:
        arguments = request, seed, choice, self._target.eos_ids, list(request.segment.output_ids)
        if request.speculation.rule is not AcceptanceRule.KEYED:
            if request.params.json_schema or request.grammar:
                raise InputError(f"json_schema needs the acceptance rule keyed, not {request.speculation.rule.value}")
            return RejectionSampler(*arguments)
        if request.params.json_schema:
            return GrammarSampler(self.grammars.of_schema(request.params.json_schema), *arguments)
        if request.grammar and self.grammars.can_follow():
            return GrammarSampler(self.grammars.of_lark(request.grammar), *arguments)
        return KeyedSampler(*arguments)

    def _text(self, request: Request) -> IncrementalDetokenizer:
        """The text of the given output; its certain part counts as sent. Raises: InputError."""
        params, output_ids = request.params, request.segment.output_ids
        text = IncrementalDetokenizer(self._target.tokenizer, params.stop)
        for count, token in enumerate(output_ids, 1):
            ended = token in self._target.eos_ids and not params.ignore_eos
            if text.push(token, may_stop=count > params.min_tokens) or ended:
                raise InputError(f"the output given ends with its token {count}: nothing can follow")
        text.take()
        return text

"""From a request to its sequences: what is checked before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ragspec.core import Delta, Request
from ragspec.engine.sequence import Limits, Sequence
from ragspec.engine.target import Target
from ragspec.engine.text import OutputText
from ragspec.errors import InputError, PromptTooLong
from ragspec.numerics.attention import PAGE
from ragspec.numerics.noise import random_seed
from ragspec.verification.sampling import KeyedSampler, Sampler

SamplerFactory = Callable[[Request, int, int], Sampler]
"""(request, seed, choice) -> who decides its tokens."""


class Admission:
    """Checks a request against the target and builds one sequence a choice."""

    def __init__(self, target: Target, fingerprint: str, make_sampler: SamplerFactory | None = None) -> None:
        self._target = target
        self._make_sampler = make_sampler or self._keyed
        self.fingerprint = fingerprint
        self.max_context_tokens = min(target.max_context_tokens, target.pool.num_slots - 2 * PAGE)

    def sequences(
        self, request: Request, listener: Callable[[Delta], None], prepare: Callable[[Request], Mapping[str, Any]]
    ) -> list[Sequence]:
        """`prepare`: what drafters make of a request, once for all its choices. Raises: InputError, PromptTooLong."""
        limits = self._limits(request)
        seed = random_seed() if request.params.seed is None else request.params.seed
        request = replace(request, params=replace(request.params, seed=seed))
        sequences, prepared = [], prepare(request)
        for choice in range(request.params.n):
            text = OutputText(self._target.tokenizer, request.params.stop)
            sampler = self._make_sampler(request, seed, choice)
            sequence = Sequence(request, choice, sampler, text, limits, listener, prepared)
            sequence.stats.seed, sequence.stats.system_fingerprint = seed, self.fingerprint
            sequences.append(sequence)
        return sequences

    def _keyed(self, request: Request, seed: int, choice: int) -> Sampler:
        return KeyedSampler(request, seed, choice, self._target.eos_ids, [])

    def _limits(self, request: Request) -> Limits:
        num_prompt, vocab_size = len(request.prompt_ids), self._target.vocab_size
        if not num_prompt:
            raise InputError("the prompt is empty")
        if not all(0 <= token < vocab_size for token in (min(request.prompt_ids), max(request.prompt_ids))):
            raise InputError(f"the prompt holds a token id outside [0, {vocab_size})")
        wrong = [token for token in request.params.logit_bias if not 0 <= token < vocab_size]
        if wrong:
            raise InputError(f"logit_bias names token {wrong[0]}, outside [0, {vocab_size})")
        longest = self.max_context_tokens
        if num_prompt >= longest:
            raise PromptTooLong(num_prompt, longest - 1)
        return Limits(self._target.eos_ids, min(request.params.max_tokens, longest - num_prompt))

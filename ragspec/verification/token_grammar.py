"""Outputs that follow a JSON schema: before each sample, tokens that the schema does not allow next are removed.

Owns the masks, which llguidance computes from the schema and the tokenizer. A position's mask depends on the output before it
alone, and is applied before the keyed sample. So drafts change no token here either.

    >>> sampler = GrammarSampler(grammars.start('{"type": "object"}'), request, seed, choice, eos_ids, output_ids)
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragspec.errors import InputError
from ragspec.numerics.backend import KeyedDraw
from ragspec.tree import DraftTree
from ragspec.verification.sampling import KeyedSampler, Logits

_KEPT_SCHEMAS = 16
_LAYOUT: Any = {"whitespace_flexible": False}
"""Why: a model that may write blanks between any two items may write them until `max_tokens`."""


class Grammars:
    """Starts grammars for one tokenizer. Safe to call from several threads."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, list(eos_ids)
        self._loading = threading.Lock()
        self._matcher_of = functools.lru_cache(_KEPT_SCHEMAS)(self._compile)

    def start(self, schema: str) -> TokenGrammar:
        """The grammar of a JSON schema, before the first token. Raises: InputError for a schema that cannot be followed.

        A large schema takes a second to compile; the choices of a request share it.
        """
        return TokenGrammar(self._matcher_of(schema).deep_copy(), self._vocab_size, self._eos_ids)

    def _compile(self, schema: str) -> Any:
        from llguidance import LLMatcher  # Why here: most requests have no schema

        with self._loading:
            tokenizer = self._compiled
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, defaults=_LAYOUT)
        except ValueError as cause:
            raise InputError(f"the JSON schema cannot be followed: {cause}") from cause
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise InputError(f"the JSON schema cannot be followed: {matcher.get_error().splitlines()[0]}")
        return matcher

    @cached_property
    def _compiled(self) -> Any:
        from llguidance.hf import from_tokenizer

        try:
            return from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=self._eos_ids)
        except (AttributeError, ValueError) as cause:
            raise InputError(f"this target's tokenizer cannot follow a JSON schema: {cause}") from cause


class TokenGrammar:
    """Which tokens may follow the tokens so far. One object belongs to one choice."""

    def __init__(self, matcher: Any, vocab_size: int, eos_ids: list[int]) -> None:
        self._matcher, self._vocab_size, self._eos_ids = matcher, vocab_size, eos_ids

    def allowed(self) -> NDArray[np.bool_]:
        """Shape: bool [V]. At its end, and where llguidance gives up, the grammar allows the end tokens alone."""
        if not self._matcher.is_stopped() and not self._matcher.is_error():
            packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            bits = np.unpackbits(packed, bitorder="little")[: self._vocab_size].astype(np.bool_)
            if bits.any():
                return bits
        bits = np.zeros(self._vocab_size, np.bool_)
        bits[self._eos_ids] = True
        return bits

    def take(self, token: int) -> None:
        if not self._matcher.is_stopped() and not self._matcher.is_error():
            self._matcher.consume_token(token)


class GrammarSampler(KeyedSampler):
    """The keyed sample among the tokens that a grammar allows."""

    def __init__(self, grammar: TokenGrammar, *arguments: Any) -> None:
        """`arguments` are those of `KeyedSampler`; the given output is read first."""
        super().__init__(*arguments)
        self._grammar = grammar
        for token in arguments[4]:
            grammar.take(token)

    def warped(self, logits: Logits) -> Logits:
        return np.where(self._grammar.allowed(), super().warped(logits), np.float32(-np.inf))

    def take(self, token: int, near_tie: bool = False) -> int:
        self._grammar.take(token)
        return super().take(token, near_tie)

    def draws(self, tree: DraftTree) -> list[KeyedDraw]:
        """None: masks are made on the host, along the accepted path only."""
        return []

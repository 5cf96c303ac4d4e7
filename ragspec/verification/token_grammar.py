"""Outputs that follow a JSON schema or a grammar: before each sample, tokens that are not allowed next are removed.

Owns the masks, which llguidance computes from the grammar and the tokenizer. A position's mask depends on the output before it
alone, and is applied before the keyed sample. So drafts change no token here either.

    >>> sampler = GrammarSampler(grammars.of_schema('{"type": "object"}'), request, seed, choice, eos_ids, output_ids)
"""

from __future__ import annotations

import copy
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ragspec.errors import InputError
from ragspec.numerics.torch.sampling import KeyedDraw, PackedBits
from ragspec.tree import DraftTree
from ragspec.verification.sampling import KeyedSampler, Logits, sample

log = logging.getLogger(__name__)

_KEPT_GRAMMARS, _KEPT_CHARS = 16, 2**20
"""Clients choose schemas, and one may fill a whole request. The latest is kept whatever its size."""
_Kind = Literal["JSON schema", "grammar"]
_LARK_FUEL = 1_000_000_000
"""llguidance's limits are for grammars of strangers; 25,000 words of passages need ten times as much."""
_LAYOUT: Any = {"whitespace_flexible": False}
"""Why: a model that may write blanks between any two items may write them until `max_tokens`."""


class Grammars:
    """Starts grammars for one tokenizer. Safe to call from several threads.

    A large schema takes a second to compile; the choices of a request share it.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, list(eos_ids)
        self._loading = threading.Lock()
        self._kept_lock, self._kept = threading.Lock(), OrderedDict[tuple[_Kind, str], Any]()  # the latest used last

    def of_schema(self, schema: str) -> TokenGrammar:
        """A JSON schema, before the first token. Raises: InputError for a schema that cannot be followed."""
        return self._start("JSON schema", schema)

    def of_lark(self, grammar: str) -> TokenGrammar:
        """A grammar in llguidance's dialect of Lark, before the first token. Raises: InputError for a wrong grammar."""
        return self._start("grammar", grammar)

    def can_follow(self) -> bool:
        """Whether this tokenizer can be followed. The first call reads it, which takes a second."""
        with self._loading:
            return self._compiled is not None

    def _start(self, kind: _Kind, text: str) -> TokenGrammar:
        return TokenGrammar(self._matcher_of(kind, text).deep_copy(), self._vocab_size, self._eos_ids)

    def _matcher_of(self, kind: _Kind, text: str) -> Any:
        key = kind, text
        with self._kept_lock:
            matcher = self._kept.get(key)
        matcher = matcher or self._compile(kind, text)
        with self._kept_lock:
            self._kept[key] = matcher
            self._kept.move_to_end(key)
            while len(self._kept) > 1 and not self._fits():
                self._kept.popitem(last=False)
        return matcher

    def _fits(self) -> bool:
        return len(self._kept) <= _KEPT_GRAMMARS and sum(len(text) for _, text in self._kept) <= _KEPT_CHARS

    def _compile(self, kind: _Kind, text: str) -> Any:
        if not self.can_follow() or self._compiled is None:
            raise InputError(f"this target's tokenizer cannot follow a {kind}")
        from llguidance import LLMatcher, LLParserLimits  # Why here: many requests have no grammar

        fuel = None if kind == "JSON schema" else _LARK_FUEL
        try:
            grammar = LLMatcher.grammar_from_lark(text) if fuel else LLMatcher.grammar_from_json_schema(text, _LAYOUT)
        except ValueError as cause:
            raise InputError(f"the {kind} cannot be followed: {cause}") from cause
        limits = LLParserLimits(initial_lexer_fuel=fuel, step_lexer_fuel=fuel)
        matcher = LLMatcher(self._compiled, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise InputError(f"the {kind} cannot be followed: {matcher.get_error().splitlines()[0]}")
        return matcher

    @cached_property
    def _compiled(self) -> Any | None:
        try:
            from llguidance import LLTokenizer

            compiled = self._tokenizer.backend_tokenizer
            if compiled.padding or compiled.truncation:  # Why not always: the copy takes a third of the time
                compiled = copy.copy(compiled)
                compiled.no_padding()
                compiled.no_truncation()
            return LLTokenizer(compiled.to_str(), n_vocab=self._vocab_size, eos_token=self._eos_ids)
        except (AttributeError, ImportError, ValueError) as cause:
            log.warning("no grammar can be followed, and quotes are not held to their passages: %s", cause)
            return None


class TokenGrammar:
    """Which tokens may follow the tokens so far. One object belongs to one choice."""

    def __init__(self, matcher: Any, vocab_size: int, eos_ids: list[int]) -> None:
        self._matcher, self._vocab_size, self._eos_ids = matcher, vocab_size, eos_ids

    def packed(self) -> PackedBits:
        """The tokens allowed next. At its end, and where llguidance gives up, the grammar allows the end tokens alone."""
        if not self._matcher.is_stopped() and not self._matcher.is_error():
            packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[: -(-self._vocab_size // 8)]
            if packed.any():
                return packed
        bits = np.zeros(self._vocab_size, np.bool_)
        bits[self._eos_ids] = True
        return np.packbits(bits, bitorder="little")

    def allowed(self) -> NDArray[np.bool_]:
        """As `packed`. Shape: bool [V]."""
        return np.unpackbits(self.packed(), count=self._vocab_size, bitorder="little").astype(np.bool_)

    def packed_after(self, tree: DraftTree) -> list[PackedBits | None]:
        """The tokens allowed after each node of a draft; None after a node that is not allowed itself."""
        states: list[TokenGrammar | None] = [self]
        for token, parent in zip(tree.token_ids[1:], tree.parents[1:], strict=True):
            above = states[parent]
            states.append(above._after(token) if above is not None and above.allows(token) else None)
        return [None if state is None else state.packed() for state in states]

    def _after(self, token: int) -> TokenGrammar:
        after = TokenGrammar(self._matcher.deep_copy(), self._vocab_size, self._eos_ids)
        after.take(token)
        return after

    def allows(self, token: int) -> bool:
        """Whether the output may go on with the token; takes a tenth of the time of `allowed`.

        `allowed` is narrower where only one text can follow: it holds that text's own tokens, no other way to spell it.
        """
        if self._matcher.is_stopped() or self._matcher.is_error():
            return token in self._eos_ids
        return bool(self._matcher.validate_tokens([token]))

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
        self._needs_mask = self._params.truncates

    def __call__(self, logits: Logits) -> int:
        """The argmax of all tokens, if the grammar allows it: it needs no mask. Devices always mask (`draws`)."""
        if not self._needs_mask:
            token = sample(super().warped(logits), self._params, self._seed, self._choice, self._index)
            if self._grammar.allows(token):
                self.take((token,))
                return token
        return super().__call__(logits)

    def warped(self, logits: Logits) -> Logits:
        return np.where(self._grammar.allowed(), super().warped(logits), np.float32(-np.inf))

    def take(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._grammar.take(token)
        super().take(tokens)

    def draws(self, tree: DraftTree) -> list[KeyedDraw]:
        """With masks of all nodes that the grammar allows, so that one sampling decides the whole path."""
        allowed = self._grammar.packed_after(tree)
        return [draw._replace(allowed=own) for draw, own in zip(super().draws(tree), allowed, strict=True)]

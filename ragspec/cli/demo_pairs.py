"""The two answers to one question of the demo, and what they add up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ragspec.rag.answer import Answer


@dataclass(frozen=True, slots=True)
class Pair:
    """One question's two answers."""

    fast: Answer
    plain: Answer

    @property
    def fast_decode_s(self) -> float:
        return _decode_s([self])

    @property
    def identical(self) -> bool:
        return self.fast.token_ids == self.plain.token_ids


class Totals(NamedTuple):
    """Over all questions: decode seconds and tokens a second of both, tokens a step with speculation."""

    num_questions: int
    num_identical: int
    num_tokens: int
    fast_decode_s: float
    plain_decode_s: float
    acceptance_length: float

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> Totals:
        fast, plain = ([getattr(pair, name).stats.generation for pair in pairs] for name in ("fast", "plain"))
        num_tokens, num_steps = (sum(getattr(s, name) for s in fast) for name in ("num_output_tokens", "num_steps"))
        return cls(
            len(pairs),
            sum(pair.identical for pair in pairs),
            num_tokens,
            _decode_s(pairs),
            sum(s.decode_s for s in plain),
            num_tokens / num_steps if num_steps else 0.0,
        )

    @property
    def speedup(self) -> float:
        return self.plain_decode_s / self.fast_decode_s if self.fast_decode_s else 0.0

    def tokens_per_s(self, decode_s: float) -> float:
        """Tokens after the first a second."""
        return (self.num_tokens - self.num_questions) / decode_s if decode_s else 0.0


def _decode_s(pairs: Sequence[Pair]) -> float:
    """Seconds of decoding with speculation, and what drafts added to the prompts' steps: tokens accepted there come with the
    first one, at no time after it."""
    added_s = sum(p.fast.stats.generation.prefill_s - p.plain.stats.generation.prefill_s for p in pairs)
    return sum(p.fast.stats.generation.decode_s for p in pairs) + max(0.0, added_s)

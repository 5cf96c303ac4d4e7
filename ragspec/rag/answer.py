"""What a pipeline returns: the text, where it comes from, and what it took."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ragspec.core import Citation, FinishReason, GenerationStats, Passage, TokenLogprob


@dataclass(slots=True)
class IterativeStats:
    """Counters of an answer with many retrievals; seconds, wall clock.

    `wait_s`: nothing was written because the index had not answered. `num_lost_tokens` were written under a wrong guess or after
    one; `num_kept_tokens` of them stood, at their place, in what was written instead. `strides`: guesses of each verification.
    """

    num_rounds: int = 0
    num_retrievals: int = 0
    num_lookups: int = 0
    num_right: int = 0
    num_wrong: int = 0
    num_lost_tokens: int = 0
    num_kept_tokens: int = 0
    encode_s: float = 0.0
    wait_s: float = 0.0
    write_s: float = 0.0
    total_s: float = 0.0
    strides: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class AnswerStats:
    """Seconds of each stage, wall clock, and the engine's counters. `retrieve_s` is the batch's where questions came together.

    `iterative`: the counters of an answer with many retrievals; its `retrieve_s` is what it waited for them. `missing_segments`
    of the index could not be searched when passages were looked for; empty unless `RetrieverConfig.fail_closed` is off.
    """

    retrieve_s: float
    prompt_s: float
    index_generation: str
    generation: GenerationStats
    iterative: IterativeStats | None = None
    missing_segments: tuple[str, ...] = ()

    @property
    def acceptance_length(self) -> float:
        return self.generation.acceptance_length

    @property
    def exactness(self) -> str:
        return self.generation.exactness

    @property
    def num_near_ties(self) -> int:
        return self.generation.num_near_ties

    @property
    def tokens_per_s(self) -> float:
        """Output tokens after those that came with the prompt's step, a second of decoding; 0 if there were none."""
        decoded = self.generation.num_output_tokens - self.generation.num_first_tokens
        return decoded / self.generation.decode_s if decoded > 0 and self.generation.decode_s else 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice. `passages` are those in the prompt, in its order: a `[n]` in the text is `passages[n - 1]`. Of an answer with
    many retrievals they are all that were in a prompt, as they were met, and numbers mean nothing.

    `dropped_passages` were retrieved and did not fit the context. For every citation `c`,
    `text[c.start:c.end]` is the same string as the passage's `[c.passage_start:c.passage_end]`.
    """

    question: str
    text: str
    citations: tuple[Citation, ...]
    passages: tuple[Passage, ...]
    dropped_passages: tuple[Passage, ...]
    finish_reason: FinishReason
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    stats: AnswerStats

    @property
    def is_partial(self) -> bool:
        """Whether a part of the index could not be searched for it."""
        return bool(self.stats.missing_segments)

    @property
    def seed(self) -> int:
        return self.stats.generation.seed

    @property
    def system_fingerprint(self) -> str:
        return self.stats.generation.system_fingerprint

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"finish_reason": self.finish_reason.value}

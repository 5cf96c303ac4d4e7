"""The answer of a pipeline: text, citations, passages and statistics."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ragspec.config import PassageOrder
from ragspec.core import Citation, FinishReason, GenerationStats, Passage, TokenLogprob
from ragspec.rag.wording import abstains, found_words


@dataclass(frozen=True, slots=True)
class AnswerSentence:
    """A sentence of the answer, `text[start:end]`, and what the passages say of it.

    "quoted": without quotation marks, passage numbers and full stop it equals `passage.text[passage_start:passage_end]`.
    "supported": its words and numbers stand in the sentence `passage.text[passage_start:passage_end]`, which is no quote.
    "related": most of its words and all its numbers stand in `passage.text[passage_start:passage_end]` and the question; ragspec
    does not check whether the passage says the same. "unsupported": none of these, which does not make it wrong; `passage_id` is
    then empty.
    """

    start: int
    end: int
    label: Literal["quoted", "supported", "related", "unsupported"]
    passage_id: str = ""
    passage_start: int = 0
    passage_end: int = 0


@dataclass(slots=True)
class IterativeStats:
    """Counters of an iterative answer. Seconds, wall clock.

    `num_right`, `num_wrong`: guessed retrievals. `wait_s`: time spent waiting for the index. `num_lost_tokens`: tokens that were
    rolled back; `num_kept_tokens`: tokens of them that the regenerated text repeats at the same position. `strides`: guesses per
    verification.
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
    """Seconds of each stage, wall clock, and the engine's counters. `retrieve_s` is the time of the question's whole batch;
    `encode_s` and `search_s` are parts of it, 0 if it was answered from memory. The engine's stages are `generation.queue_s`,
    `prefill_s` and `decode_s`.

    `iterative`: counters of an iterative answer, whose `retrieve_s` is the time spent waiting. `missing_segments`: index segments
    that could not be searched; always empty if `RetrieverConfig.fail_closed` is on.
    """

    retrieve_s: float
    prompt_s: float
    index_generation: str
    generation: GenerationStats
    iterative: IterativeStats | None = None
    missing_segments: tuple[str, ...] = ()
    encode_s: float = 0.0
    search_s: float = 0.0

    @property
    def first_token_s(self) -> float:
        """From the question to its first token, without the time between the stages."""
        return self.retrieve_s + self.prompt_s + self.generation.queue_s + self.generation.prefill_s

    @property
    def acceptance_length(self) -> float:
        return self.generation.acceptance_length

    @property
    def tokens_per_s(self) -> float:
        """Output tokens after the prompt's step per second of decoding; 0 if there are none."""
        decoded = self.generation.num_output_tokens - self.generation.num_first_tokens
        return decoded / self.generation.decode_s if decoded > 0 and self.generation.decode_s else 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice. `passages`: the passages of the prompt, in its order; `[n]` in the text means `passages[n - 1]`. An iterative
    answer has the passages of all its prompts, in the order of first use, and numbers in its text have no meaning.

    `dropped_passages` were retrieved but did not fit the context. For every citation `c`, `text[c.start:c.end]` equals the
    passage's `text[c.passage_start:c.passage_end]`. `sentences`: every sentence with its label, except one that says that the
    passages hold no answer; empty without passages. `unknown_quotations`: [start, end) of text inside quotation marks that
    stands in no passage. `closeness`: the calibrated score of the best passage; None if there is none, or but in mode hybrid.
    `ranks`: of `passages` in the search, the best is 1; empty for an iterative answer.
    `passage_order` as in `GenerationConfig`.
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
    sentences: tuple[AnswerSentence, ...] = ()
    unknown_quotations: tuple[tuple[int, int], ...] = ()
    closeness: float | None = None
    ranks: tuple[int, ...] = ()
    passage_order: PassageOrder = "rank"

    @property
    def abstained(self) -> bool:
        """Whether it says that the documents hold no answer."""
        return abstains(self.text)

    @property
    def found(self) -> str:
        """What the quotes are to the question: the answer, by the calibrated score, or only the nearest words."""
        return found_words(self.closeness) if self.citations else ""

    @property
    def is_partial(self) -> bool:
        """Whether part of the index could not be searched."""
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


class AnswerStream:
    """Pieces of an answer's text as they are decided, then the whole answer; to be read once.

    >>> for piece in pipeline.stream("When did it rain?"): ...          # without an event loop, or beside one
    >>> async for piece in pipeline.stream("When did it rain?"): ...

    Leaving the loop early cancels the request.
    """

    def __init__(self, pieces: AsyncGenerator[str | Answer]) -> None:
        self._pieces = pieces

    def __aiter__(self) -> AsyncGenerator[str | Answer]:
        return self._pieces

    async def aclose(self) -> None:
        await self._pieces.aclose()

    def __iter__(self) -> Iterator[str | Answer]:
        """Why a thread: a notebook's thread already runs an event loop."""
        with ThreadPoolExecutor(1, "ragspec-stream") as thread:
            runner = asyncio.Runner()
            try:
                while (piece := thread.submit(runner.run, _next(self._pieces)).result()) is not None:
                    yield piece
            finally:
                thread.submit(runner.run, self._pieces.aclose()).result()
                thread.submit(runner.close).result()


async def _next(pieces: AsyncGenerator[str | Answer]) -> str | Answer | None:
    return await anext(pieces, None)

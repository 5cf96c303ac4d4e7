"""Retrieval policies: In-Context RALM, FLARE and Iter-RetGen decide when to retrieve again and with which query.

A policy is a pure function of the partial answer, so a rollback only has to restore an earlier partial answer.

    >>> InContextRalm().next(PartialAnswer("When did it rain?", question_ids, max_tokens=96), tokenizer.decode)
    Round(query='When did it rain?', output_ids=(), end=4, ...)
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from ragspec.core import Completion, FinishReason, TokenLogprob
from ragspec.errors import InputError
from ragspec.retrieval.chunking import sentences

Decode = Callable[[Sequence[int]], str]


class RetrievalRound(NamedTuple):
    """Retrieve with `query` (None: keep the passages), keep the tokens `output_ids`, generate until there are `end` tokens.

    `draft_ids`: a guess of the next tokens. `purpose`: a note of the policy to itself.
    """

    query: str | None
    output_ids: tuple[int, ...]
    end: int
    draft_ids: tuple[int, ...] = ()
    purpose: str = ""


@dataclass(frozen=True, slots=True)
class PartialAnswer:
    """A question and the output after some rounds. `question_ids`: the question's tokens as plain text. `ended`: the last round
    reached the end of the output."""

    question: str
    question_ids: tuple[int, ...]
    max_tokens: int
    num_rounds: int = 0
    last: RetrievalRound | None = None
    output_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason = FinishReason.LENGTH
    ended: bool = False

    def after(self, round: RetrievalRound, completion: Completion) -> PartialAnswer:
        kept = len(round.output_ids)
        output_ids = (*round.output_ids, *completion.token_ids)
        is_short = completion.finish_reason is FinishReason.STOP or len(output_ids) < round.end
        return replace(
            self,
            num_rounds=self.num_rounds + 1,
            last=round,
            output_ids=output_ids,
            logprobs=(*self.logprobs[:kept], *completion.logprobs),
            finish_reason=completion.finish_reason,
            ended=is_short or round.end >= self.max_tokens,
        )


class Policy(Protocol):
    """Decides the rounds of an answer. `num_passages`: passages in the prompt."""

    @property
    def num_passages(self) -> int: ...

    @property
    def needs_logprobs(self) -> bool: ...

    def next(self, answer: PartialAnswer, decode: Decode) -> RetrievalRound | None:
        """The next round; None: the answer is finished. Equal partial answers give equal rounds."""
        ...


@dataclass(frozen=True, slots=True)
class InContextRalm:
    """Retrieves every few tokens with the last tokens of question and answer; the new passages replace the old ones.

    Source: Ram et al. 2023, In-Context Retrieval-Augmented Language Models (arXiv 2302.00083).
    """

    retrieval_stride_tokens: int = 4
    query_tokens: int = 32
    num_passages: int = 1
    needs_logprobs: bool = False

    def __post_init__(self) -> None:
        _check_positive(self, "retrieval_stride_tokens", "query_tokens", "num_passages")

    def next(self, answer: PartialAnswer, decode: Decode) -> RetrievalRound | None:
        if answer.ended:
            return None
        ids = (*answer.question_ids, *answer.output_ids)
        short = not answer.output_ids and len(ids) <= self.query_tokens
        query = answer.question if short else decode(ids[-self.query_tokens :])
        end = min(len(answer.output_ids) + self.retrieval_stride_tokens, answer.max_tokens)
        return RetrievalRound(_clean_query(query, answer), answer.output_ids, end)


@dataclass(frozen=True, slots=True)
class Flare:
    """Generates a sentence ahead; if one of its tokens has a probability below `least_prob`, retrieves and rewrites it.

    The query is the sentence without tokens whose probability is below `mask_prob`.
    Source: Jiang et al. 2023, Active Retrieval Augmented Generation (arXiv 2305.06983), section 3.2.
    """

    least_prob: float = 0.6
    mask_prob: float = 0.4
    lookahead_tokens: int = 48
    num_passages: int = 2
    needs_logprobs: bool = True

    def __post_init__(self) -> None:
        _check_positive(self, "lookahead_tokens", "num_passages")

    def next(self, answer: PartialAnswer, decode: Decode) -> RetrievalRound | None:
        if answer.last is None:
            return self._round(answer, answer.question, (), (), "look ahead")
        kept = answer.last.output_ids
        written = answer.output_ids[len(kept) :]
        length = _sentence_length(written, decode)
        sentence, rest = written[:length], written[length:]
        done = answer.ended and not rest
        if answer.last.purpose == "look ahead":
            probs = [math.exp(each.logprob) for each in answer.logprobs[len(kept) : len(kept) + length]]
            if min(probs, default=1.0) < self.least_prob:
                sure = [token for token, prob in zip(sentence, probs, strict=True) if prob >= self.mask_prob]
                return self._round(answer, _clean_query(decode(sure), answer), kept, sentence, "rewrite")
        if done or len(kept) + length >= answer.max_tokens:
            return None
        return self._round(answer, None, (*kept, *sentence), rest, "look ahead")

    def _round(
        self, answer: PartialAnswer, query: str | None, kept: tuple[int, ...], draft: tuple[int, ...], purpose: str
    ) -> RetrievalRound:
        end = min(len(kept) + self.lookahead_tokens, answer.max_tokens)
        return RetrievalRound(query, kept, end, draft, purpose)


@dataclass(frozen=True, slots=True)
class IterRetGen:
    """Generates the whole answer, then again with passages retrieved by question and answer; each answer drafts the next.

    Source: Shao et al. 2023, Enhancing Retrieval-Augmented Large Language Models with Iterative Retrieval-Generation Synergy
    (arXiv 2305.15294).
    """

    num_iterations: int = 2
    num_passages: int = 3
    needs_logprobs: bool = False

    def __post_init__(self) -> None:
        _check_positive(self, "num_iterations", "num_passages")

    def next(self, answer: PartialAnswer, decode: Decode) -> RetrievalRound | None:
        if answer.num_rounds >= self.num_iterations:
            return None
        query = f"{answer.question} {decode(answer.output_ids)}".strip()
        return RetrievalRound(_clean_query(query, answer), (), answer.max_tokens, answer.output_ids)


def _check_positive(policy: object, *names: str) -> None:
    for name in names:
        if getattr(policy, name) < 1:
            raise InputError(f"{name} must be at least 1, not {getattr(policy, name)!r}")


def _clean_query(text: str, answer: PartialAnswer) -> str:
    """Generated text as a query: without NUL, which no index accepts; the question if the text is blank."""
    text = text.replace("\0", " ")
    return text if text.strip() else answer.question


def _sentence_length(token_ids: Sequence[int], decode: Decode) -> int:
    """Tokens of the first sentence; all of them if it does not end."""
    text = decode(token_ids)
    spans = sentences(text)
    if len(spans) < 2:
        return len(token_ids)
    end = spans[1][0]  # a sentence ends where the next begins
    counts = range(1, len(token_ids))
    return 1 + bisect_left(counts, end - 1, key=lambda count: len(decode(token_ids[:count]).rstrip("\ufffd")))


POLICIES: dict[str, Callable[..., Policy]] = {"ralm": InContextRalm, "flare": Flare, "retgen": IterRetGen}

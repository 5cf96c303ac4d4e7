"""Policies are functions of what was written: the same words ask the same question, and every answer ends."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from tiny_target import tiny_tokenizer

from ragspec.core import Completion, FinishReason, GenerationStats, TokenLogprob
from ragspec.rag.iterative.policies import Flare, InContextRalm, IterRetGen, PartialAnswer, Policy, RetrievalRound

TOKENIZER = tiny_tokenizer()
QUESTION = "When was the bridge built?"


def decode(token_ids: object) -> str:
    return str(TOKENIZER.decode(token_ids))


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER(text)["input_ids"])


def written(token_ids: tuple[int, ...], prob: float = 0.9, ends: bool = False) -> Completion:
    reason = FinishReason.STOP if ends else FinishReason.LENGTH
    logprobs = tuple(TokenLogprob(token, math.log(prob)) for token in token_ids)
    return Completion("r", 0, token_ids, decode(token_ids), reason, logprobs, GenerationStats())


def start(max_tokens: int = 40) -> PartialAnswer:
    return PartialAnswer(QUESTION, ids(QUESTION), max_tokens)


def play(
    policy: Policy, text: str, max_tokens: int, unsure: frozenset[int] = frozenset()
) -> tuple[PartialAnswer, list[RetrievalRound]]:
    """The rounds of an answer that would be `text`; tokens at the places `unsure` are improbable."""
    progress, rounds = start(max_tokens), []
    whole = ids(text)[:max_tokens]
    while (round := policy.next(progress, decode)) is not None:
        assert policy.next(progress, decode) == round
        assert len(rounds) < 200
        rounds.append(round)
        part = whole[len(round.output_ids) : round.end]
        probs = [0.1 if len(round.output_ids) + i in unsure else 0.9 for i in range(len(part))]
        logprobs = tuple(TokenLogprob(token, math.log(prob)) for token, prob in zip(part, probs, strict=True))
        progress = progress.after(round, replace(written(part, ends=round.end >= len(whole)), logprobs=logprobs))
    return progress, rounds


@pytest.mark.parametrize("policy", [InContextRalm(), Flare(), IterRetGen(), InContextRalm(1), InContextRalm(100)])
@pytest.mark.parametrize("max_tokens", [1, 7, 40])
def test_the_whole_answer_is_written(policy: Policy, max_tokens: int) -> None:
    """A round too few cut the answer, one too many repeated it."""
    text = "The bridge was built in 1874. The mill is older. It rained."
    progress, _ = play(policy, text, max_tokens)
    assert progress.output_ids == ids(text)[:max_tokens]
    assert len(progress.logprobs) == len(progress.output_ids)


def test_in_context_ralm_asks_with_the_last_words() -> None:
    """The query was the question for ever, or the whole text."""
    _, rounds = play(InContextRalm(4, query_tokens=6), "The bridge was built in 1874.", 40)
    assert [round.end - len(round.output_ids) for round in rounds] == [4] * len(rounds)
    everything = [*ids(QUESTION), *ids("The bridge was built in 1874.")]
    for round in rounds:
        assert round.query == decode(everything[: len(ids(QUESTION)) + len(round.output_ids)][-6:])


def test_a_short_question_is_asked_as_it_stands() -> None:
    """The first query lost words to a detour through tokens."""
    (first, *_) = play(InContextRalm(), "x", 4)[1]
    assert first.query == QUESTION


def test_flare_retrieves_only_for_what_it_is_not_sure_of() -> None:
    """Every sentence was retrieved for, or an unsure one kept without."""
    text = "The mill is old. The bridge was built in 1874. It rained."
    sure, rounds = play(Flare(), text, 80)
    assert sure.output_ids == ids(text)
    assert [round.query for round in rounds[1:] if round.query] == []
    year = len(ids("The mill is old. The bridge was built in 1"))
    _, rounds = play(Flare(), text, 80, frozenset({year}))
    (again,) = [round for round in rounds[1:] if round.query]
    assert "bridge was built" in str(again.query)
    assert "874" not in str(again.query)
    assert again.draft_ids
    assert decode(again.output_ids).strip() == "The mill is old."


def test_iter_retgen_asks_with_the_answer_and_drafts_it() -> None:
    """The second iteration asked the question alone, or went on behind the first answer."""
    first, second = play(IterRetGen(), "In 1874.", 40)[1]
    assert (first.query, first.draft_ids) == (QUESTION, ())
    assert second.query == f"{QUESTION} In 1874."
    assert second.output_ids == ()
    assert second.draft_ids == ids("In 1874.")


def test_blank_text_is_no_query() -> None:
    """An answer that begins with white space ended in an error about an empty question."""
    progress = start().after(RetrievalRound(None, (), 4), written(ids("    ")))
    assert InContextRalm(4, query_tokens=1).next(progress, decode) is not None
    assert InContextRalm(4, query_tokens=1).next(progress, decode).query == QUESTION  # type: ignore[union-attr]


@pytest.mark.parametrize("policy", [InContextRalm(), IterRetGen()])
def test_no_query_holds_a_nul(policy: Policy) -> None:
    """A target that wrote one ended its answer with an error about the question."""
    progress = start().after(RetrievalRound(None, (), 6), written(ids("a\0b c\0")[:6]))
    round = policy.next(progress, decode)
    assert round is not None
    assert "b c" in str(round.query) and "\0" not in str(round.query)

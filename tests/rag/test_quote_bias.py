"""The bias on quotes leads to the spans that hold the question's words, and to no others."""

from __future__ import annotations

import math

from ragspec.core import Passage, SamplingParams
from ragspec.engine.target import Target
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.quotable import quote_bias
from ragspec.rag.steps import Question, RetrievedQuestion, build_request
from ragspec.rag.wording import AnswerFit, TextRules

TEXT = "The mill was sold in 1901. The mill was built by Anna Weaver. Its wheel is of oak. Rain falls."
PASSAGES = (Passage("d", 0, TEXT, 0, len(TEXT)),)
QUESTION = "Who built the mill?"
SENTENCES = ("The mill was sold in 1901.", "The mill was built by Anna Weaver.", "Its wheel is of oak.", "Rain falls.")


def total(biases: dict[tuple[int, ...], dict[int, float]], ids: list[int]) -> float:
    """Of all tokens of a span, each behind those before it."""
    return sum(biases.get(tuple(ids[:at]), {}).get(token, 0.0) for at, token in enumerate(ids))


def test_a_span_loses_what_the_best_span_holds_more_of_the_question(target: Target) -> None:
    """A bias that grows with a span's tokens, that hits the best span, or that counts "who" and "the"."""
    prompts = PromptBuilder(target.tokenizer, 512)
    biases = quote_bias(QUESTION, PASSAGES, prompts.plain_ids, 20.0)
    ids = [list(each)[:12] for each in prompts.plain_ids([f'"{sentence}' for sentence in SENTENCES])]
    sold, built, wheel, rain = (total(biases, each) for each in ids)
    assert built == 0.0 > sold > wheel and math.isclose(wheel, rain)
    assert all(bias < 0.0 for branch in biases.values() for bias in branch.values())
    halved = quote_bias(QUESTION, PASSAGES, prompts.plain_ids, 10.0)
    assert math.isclose(total(halved, ids[0]), sold / 2)


def test_no_word_in_common_and_no_passage_make_no_bias(target: Target) -> None:
    """A division by the weight of no word."""
    prompts = PromptBuilder(target.tokenizer, 512)
    for question, passages in ((QUESTION, ()), ("What is it?", PASSAGES), ("Where do swans nest?", PASSAGES)):
        assert quote_bias(question, passages, prompts.plain_ids, 20.0) == {}


def test_only_held_quotes_are_biased_and_only_by_a_fit(target: Target) -> None:
    """A model without a fit, or an answer whose quote is free, that is led to the question's words."""
    params = SamplingParams()
    fitted, other = (
        PromptBuilder(target.tokenizer, 512, rules=TextRules(fit=fit))
        for fit in (AnswerFit(0.0, 0.0, 20.0), AnswerFit())
    )
    assert fitted.biased(params, QUESTION, PASSAGES, None).prefix_bias
    assert other.biased(params, QUESTION, PASSAGES, None) == params
    assert fitted.biased(params, QUESTION, PASSAGES, None, holds_quotes=False) == params
    for free in (SamplingParams(verbatim_quotes=False), SamplingParams(ignore_eos=True)):
        question = Question("q", QUESTION, free)
        retrieved = RetrievedQuestion(question, list(PASSAGES), "g", 0.0)
        assert build_request(retrieved, fitted).request.params == free


def test_a_prefix_bias_counts_behind_its_prefix_alone() -> None:
    """A bias that is added anywhere else, or that replaces the others."""
    params = SamplingParams(
        logit_bias={7: 1.0}, first_token_bias={7: 2.0}, prefix_bias={(): {8: 3.0}, (4, 5): {7: 4.0}}
    )
    found = [dict(params.after(output).logit_bias) for output in ((), (4,), (4, 5), (4, 5, 6))]
    assert found == [{7: 2.0, 8: 3.0}, {7: 1.0}, {7: 5.0}, {7: 1.0}]
    assert [each.longest_prefix for each in (params, SamplingParams(), SamplingParams(first_token_bias={1: 1.0}))] == [
        2,
        -1,
        0,
    ]

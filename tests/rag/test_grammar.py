"""Correcting texts; see conftest.py for the engine. Where a sentence must be corrected, the correction's tokens are forced."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from rewriting import TOKENIZER, rewriting
from small_parts import CONTEXT, Counting, Recording

from ragspec.core import FinishReason, Request, SamplingParams, SourceKind
from ragspec.engine.engine import Engine
from ragspec.engine.target import Target
from ragspec.errors import EngineError, InputError
from ragspec.rag.grammar.correction import Correction, CorrectionRequest, cleaned_reply
from ragspec.rag.grammar.grammar import Grammar
from ragspec.rag.prompt import PromptBuilder

TEXT = "The mill grind corn.  It are old.\n\n - Was it build in 1874?\n\t42 + 17\n"
SHORT = SamplingParams(max_tokens=24)
SAMPLED = SamplingParams(max_tokens=24, temperature=1.0, seed=5)


@pytest.fixture
def corrector(engine: Engine, target: Target) -> Grammar:
    return Grammar(engine, PromptBuilder(target.tokenizer, CONTEXT), max_in_flight=4)


def test_a_sentence_is_its_own_prompt_and_draft() -> None:
    """A whole page as one prompt, which no target was trained on; a draft that is another sentence."""
    corrector, engine = rewriting(str)
    corrector.correct(TEXT, SAMPLED, tenant="ann")
    assert [request.sources[0].text for request in engine.requests] == [
        "The mill grind corn.",
        "It are old.",
        "- Was it build in 1874?",
    ]
    builder = PromptBuilder(TOKENIZER, 1024)
    for request in engine.requests:
        (source,) = request.sources
        assert request.prompt_ids == builder.grammar_prompt(source.text).prompt_ids
        assert (source.kind, request.salt) == (SourceKind.INPUT, "ann")
    assert len({request.params.seed for request in engine.requests}) == len({r.id for r in engine.requests}) == 3
    seeds = [request.params.seed for request in engine.requests]
    corrector.correct(TEXT, SAMPLED)
    assert [request.params.seed for request in engine.requests[3:]] == seeds


def test_long_sentences_are_corrected_in_parts_that_fit() -> None:
    """A sentence without a full stop that ends in an error of the context, or loses its end."""
    corrector, engine = rewriting(str, max_context_tokens=128)
    text = f"{'one two three ' * 60}and {'z' * 400} end. Short."
    assert corrector.correct(text).corrected == text
    assert len(engine.requests) > 10
    for request in engine.requests:
        most = request.params.max_tokens
        assert len(request.prompt_ids) + most <= 128
        assert len(TOKENIZER(request.sources[0].text, add_special_tokens=False)["input_ids"]) <= 0.75 * most
    assert all(" " not in r.sources[0].text[:1] + r.sources[0].text[-1:] for r in engine.requests)
    halves = [request.sources[0].text for request in engine.requests if "one" in request.sources[0].text]
    assert all(set(half.split()) <= {"one", "two", "three", "and"} for half in halves), "a word was cut"


def test_a_forced_correction_comes_with_its_edits(corrector: Grammar, switch: Any) -> None:
    """Edits that count from their sentence's beginning instead of the text's."""
    switch.answer = "It is old."
    text = "  It are old.\n"
    correction = corrector.correct(text)
    assert correction.corrected == "  It is old.\n"
    (edit,) = correction.edits
    assert (edit.start, edit.end, edit.original, edit.replacement) == (5, 8, "are", "is")
    assert correction.finish_reason is FinishReason.STOP and correction.stats.num_output_tokens > 3
    assert correction.stats.system_fingerprint == "tiny"


@pytest.mark.parametrize(("params", "answer"), [(SAMPLED, ""), (SHORT, "It is old.")])
def test_every_way_to_correct_gives_the_same(
    corrector: Grammar, switch: Any, params: SamplingParams, answer: str
) -> None:
    """A service that corrects otherwise than a job; a text that depends on those beside it."""
    switch.answer = answer
    texts = [TEXT, "One more.", TEXT + TEXT]

    async def one_by_one() -> list[Correction]:
        requests = [CorrectionRequest(f"m{n}", text, params) for n, text in enumerate(texts)]
        return [await corrector.complete(corrector.prepare(request)) for request in requests]

    async def flowing() -> dict[str, Correction]:
        asked = [CorrectionRequest(f"f{n}", text, params) for n, text in enumerate(texts)]
        async with aclosing(corrector.stages().run(asked)) as batches:
            return {each.id: each.result() async for batch in batches for each in batch}

    together = corrector.correct_many(texts, params)
    alone = asyncio.run(one_by_one())
    flowed = asyncio.run(flowing())
    assert bool(together[0].edits) == bool(answer)
    for n, correction in enumerate(together):
        for other in (alone[n], flowed[f"f{n}"], corrector.correct(texts[n], params)):
            assert (other.text, other.corrected, other.edits) == (texts[n], correction.corrected, correction.edits)
            assert other.unfinished == correction.unfinished
            assert other.stats.num_output_tokens == correction.stats.num_output_tokens


def test_no_more_sentences_than_allowed_are_in_the_engine(engine: Engine, target: Target) -> None:
    """A book's ten thousand sentences at once in an engine that others use, too."""
    counting = Counting(engine)
    corrector = Grammar(counting, PromptBuilder(target.tokenizer, CONTEXT), max_in_flight=3)

    async def run() -> int:
        manuscripts = [CorrectionRequest(str(n), TEXT * 3, replace(SHORT, max_tokens=4)) for n in range(4)]
        async with aclosing(corrector.stages().run(manuscripts)) as batches:
            return sum([len(batch) async for batch in batches])

    assert asyncio.run(run()) == 4
    assert counting.most == 3


async def test_a_text_that_cannot_be_corrected_is_its_own_result(corrector: Grammar) -> None:
    """One bad text that ends the others, or comes back half corrected."""

    texts = ["wide \udfff", "nul \0", "half \ud800", "Good."]
    asked = [CorrectionRequest(str(n), text, SHORT) for n, text in enumerate(texts)]
    async with aclosing(corrector.stages().run(asked)) as batches:
        finished = {each.id: each async for batch in batches for each in batch}
    assert [type(finished[str(n)].error) for n in range(4)] == [InputError] * 3 + [type(None)]


def test_a_failed_sentence_fails_its_text_and_stops_the_rest(engine: Engine, target: Target) -> None:
    """A text with a sentence left out in silence; or the rest of it that goes on for nobody."""

    class Failing(Recording):
        async def stream(self, request: Request) -> Any:
            if request.id.endswith("/1"):
                raise EngineError("failed")
            async with aclosing(engine.stream(request)) as deltas:
                async for delta in deltas:
                    yield delta

    corrector = Grammar(Failing(engine), PromptBuilder(target.tokenizer, CONTEXT))
    endless = SamplingParams(max_tokens=400)
    with pytest.raises(EngineError, match="failed"):
        asyncio.run(corrector.complete(corrector.prepare(CorrectionRequest("m", TEXT, endless))))
    engine.between_steps(lambda: None)  # the engine's queue is in order: the cancels are done before
    assert engine.idle()


@pytest.mark.parametrize(
    "wrong", [{"n": 2}, {"stop": ("x",)}, {"ignore_eos": True}, {"min_tokens": 3}, {"logprobs": 1}]
)
def test_parameters_that_would_cut_a_text_are_refused(wrong: dict[str, Any]) -> None:
    """A stop string that takes the end of a sentence away."""
    with pytest.raises(InputError, match=next(iter(wrong))):
        CorrectionRequest("m", TEXT, replace(SHORT, **wrong))


@pytest.mark.parametrize(
    "reply",
    [
        "He goes to school.",
        "The corrected sentence is: He goes to school.",
        'The corrected sentence is "He goes to school."',
        "Sure! Here is the corrected sentence:\n\n**He goes to school.**\n\nI changed the verb.",
        "Corrected: He goes to school.",
        "Here’s the revised version: “He goes to school.”",
    ],
)
def test_what_a_chat_model_says_around_a_correction_is_no_part_of_it(reply: str) -> None:
    """Every correction of an ordinary chat model was withheld as a rewriting, and nobody was told."""
    assert cleaned_reply(reply, "He go to school.") == "He goes to school."


@pytest.mark.parametrize(
    "sentence",
    [
        "The corrected sentence is: He goes.",
        '"He goes," she said.',
        "Corrected proofs are due.",
        "The correct answer is no.",
    ],
)
def test_a_sentence_that_reads_like_a_reply_stays_whole(sentence: str) -> None:
    """A sentence about corrections lost its beginning."""
    assert cleaned_reply(sentence, sentence) == sentence


@pytest.mark.parametrize(
    ("sentence", "reply"),
    [
        ("Heres why we left early: the rain were cold.", "Here's why we left early: the rain was cold."),
        ("Here's why\nwe left early: the rain\nwere cold.", "Here's why we left early: the rain was cold."),
        ("The rain were cold, and\nwe left early.", "The rain was cold, and\nwe left early."),
    ],
)
def test_words_of_a_sentence_are_no_frame_of_its_correction(sentence: str, reply: str) -> None:
    """A mistake in the opening, or a line break, and the words before the colon or behind the break were deleted."""
    grammar, _ = rewriting(lambda _: reply)
    corrected = grammar.correct(sentence).corrected
    assert corrected.split() == reply.split() and corrected.count("\n") == sentence.count("\n")

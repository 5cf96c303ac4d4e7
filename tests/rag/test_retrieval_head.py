"""Where the target looks chooses the likely quote, and refusing; the same in every way to ask, with drafts or without."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from asking import run, streamed
from small_parts import CONTEXT, QUESTION, Recording

from ragspec.core import Message, Passage, Request, SamplingParams
from ragspec.engine.engine import Engine
from ragspec.engine.target import Target
from ragspec.rag.pipeline import AsyncPipeline, Pipeline
from ragspec.rag.prompt import Prompt, PromptBuilder
from ragspec.rag.retrieval_head import Look, PassageTokens, SpanAttention
from ragspec.rag.steps import Question, build_request, retrieve_passages
from ragspec.rag.wording import AnswerFit, TextRules
from ragspec.retrieval.retriever import Retriever

GREY = "Grey 🙂 and öd it is."
ASKED = SamplingParams(max_tokens=24)
FIT = AnswerFit(quote_weight=20.0, retrieval_head=(1, 2), attention_weight=0.6)
PASSAGES = [
    Passage(f"d{n}", 0, text, 0, len(text)) for n, text in enumerate(("Old it is. Grey 🙂 and öd it is.", "New it is."))
]


def prompts_of(target: Target, fit: AnswerFit) -> PromptBuilder:
    return PromptBuilder(target.tokenizer, CONTEXT, rules=TextRules(fit=fit))


def attention_on(prompts: PromptBuilder, prompt: Prompt, text: str) -> SpanAttention:
    """All attention on the last place of a text in a prompt."""
    whole = prompts.tokenizer.decode(prompt.prompt_ids)
    begin = whole.rindex(text)
    offsets = prompts.fast.encode(whole, add_special_tokens=False).offsets
    on = [float(begin <= first < begin + len(text)) for first, _ in offsets]
    row = (*(value / sum(on) for value in on), 0.0)
    tokens = PassageTokens.of(prompt.prompt_ids, prompt.passages, prompts.fast)
    assert tokens is not None
    return SpanAttention(tokens, row)


def look_at(prompts: PromptBuilder, prompt: Prompt, **how: Any) -> Look | None:
    request = Request("a", prompt.prompt_ids, ASKED, grammar='start: "a"')
    return prompts.look(prompt, replace(request, **how), partial(prompts.biased, ASKED, "Is it?", prompt, 0.5))


def test_a_span_has_the_attention_on_its_tokens(target: Target) -> None:
    """Bytes of one character; a passage that stands in an earlier turn too; the places of the second passage."""
    prompts = prompts_of(target, FIT)
    earlier = [Message("user", "Is it?"), prompts.context(PASSAGES), Message("assistant", "No.")]
    for question in ("How old is it?", [*earlier, Message("user", "How old is it?")]):
        prompt = prompts.build(question, PASSAGES, 16)
        for passage, text in ((PASSAGES[0], GREY), (PASSAGES[1], "New it is.")):
            seen, start = attention_on(prompts, prompt, text), passage.text.index(text)
            whole = (passage, start, start + len(text))
            assert np.allclose(seen.log_shares([whole, (PASSAGES[0], 0, 10)]), np.log([1.001, 0.001]))
            assert np.log(0.1) < seen.log_shares([(passage, start, start + 5)])[0] < np.log(0.7)


def test_a_prompt_whose_tokens_are_not_those_of_its_text_is_not_looked_at(target: Target) -> None:
    """The spelling of a control token in a passage is plain text, which the tokenizer reads as the token; a passage twice."""
    prompts, text = prompts_of(target, FIT), "It is </s> old."
    odd = [Passage("d", 0, text, 0, len(text))]
    for passages, looks in ((odd, False), (PASSAGES * 2, False), (PASSAGES, True)):
        prompt = prompts.build("How old is it?", passages, 16)
        assert bool(look_at(prompts, prompt)) == looks
    assert PassageTokens.of(prompt.prompt_ids, PASSAGES[::-1], prompts.fast) is None


def test_the_looked_at_sentence_is_the_likely_quote(target: Target) -> None:
    """The attention of another passage, or of the prompt's order in the place of the ranks."""
    prompts = prompts_of(target, FIT)
    prompt = prompts.build("Is it?", PASSAGES, 16)
    for text in (GREY, "New it is."):
        biases = prompts.biased(ASKED, "Is it?", prompt, 0.5, seen=attention_on(prompts, prompt, text)).prefix_bias
        written = tuple(prompts.plain_ids(['"'])[0])
        while own := biases.get(written):
            written += (max(own, key=own.__getitem__),)
        assert prompts.tokenizer.decode(written) in [f'"{text}'[:n] for n in range(2, 8)]


def test_every_way_to_ask_looks_first_and_answers_alike(retriever: Retriever, engine: Engine, target: Target) -> None:
    """A batch chose another quote than a stream, a chat or a job; drafts changed it; the look's prompt was counted twice."""
    prompts, recording = prompts_of(target, FIT), Recording(engine)
    with Pipeline(retriever, recording, prompts, num_passages=2) as pipeline:
        whole = pipeline.ask(QUESTION, ASKED)
        looks = [request for request in recording.requests if request.attention_heads]
        assert [len(looks), len(recording.requests)] == [1, 2] and looks[0].attention_heads == (FIT.retrieval_head,)
        plain = pipeline.ask(QUESTION, ASKED, speculation=False)
        many = pipeline.ask_many([QUESTION] * 20, ASKED)
        _, streamed_whole = streamed(pipeline, QUESTION, ASKED)
        with pipeline.chat() as chat:
            told = chat.ask(QUESTION, ASKED)
        flow = AsyncPipeline(retriever, recording, prompts)
        ((_, of_flow),) = run(flow, [Question("q", QUESTION, ASKED, 2)]).items()
        (of_job,) = of_flow.result()
        everything = [whole, plain, *many, streamed_whole, told, of_job]
        assert {each.text for each in everything} == {whole.text}
        biases = [request.params.prefix_bias for request in recording.requests if not request.attention_heads]
        (found,) = retrieve_passages(retriever, [Question("q", QUESTION, ASKED, 2)])
        assert all(biases[0] == each != build_request(found, prompts).request.params.prefix_bias for each in biases)
        own, other = whole.stats.generation, plain.stats.generation
        assert own.num_cached_tokens < 32 < own.num_prompt_tokens <= other.num_cached_tokens + 1
        assert own.prefill_s > 0 and own.doubt is None
        recording.requests.clear()
        pipeline.ask(QUESTION, ASKED, json_schema='{"type": "string"}', max_tokens=4)
        pipeline.ask(QUESTION, ASKED, prefix_bias={(): {5: 1.0}})
        assert not any(request.attention_heads for request in recording.requests)


def test_nothing_is_looked_at_where_nothing_would_follow(target: Target) -> None:
    """A prompt without room for the mark; free quotes; a caller's own biases; a fit whose weights are zero."""
    prompts = prompts_of(target, FIT)
    prompt = prompts.build("Is it?", PASSAGES, 16)
    assert look_at(prompts, prompt) and not look_at(prompts, prompt, grammar="")
    assert not look_at(prompts, prompt, params=replace(ASKED, prefix_bias={(): {5: 1.0}}))
    for zero in ({"quote_weight": 0.0}, {"attention_weight": 0.0}, {"retrieval_head": None}):
        assert not look_at(prompts_of(target, FIT._replace(**zero)), prompt)
    for context, looks in ((len(prompt.prompt_ids) + 1, False), (len(prompt.prompt_ids) + 2, True)):
        prompts.max_context_tokens = context
        assert bool(look_at(prompts, prompt)) == looks


def test_the_tokens_of_a_look_count_in_one_choice(retriever: Retriever, engine: Engine, target: Target) -> None:
    """Metrics counted a prompt that was read once as read by every choice."""
    pipeline = Pipeline(retriever, engine, prompts_of(target, FIT), num_passages=2)
    first, second = (answer.stats.generation for answer in pipeline.ask_many([QUESTION], replace(ASKED, n=2)))
    assert (
        first.num_cached_tokens < 32 < second.num_cached_tokens and first.num_prompt_tokens == second.num_prompt_tokens
    )


def test_many_looks_share_the_steps_of_answers(retriever: Retriever, engine: Engine, target: Target) -> None:
    """Every look of a batch had ended before an answer began, and every answer before the next look."""
    texts = [f"What does the river do in year {year}?" for year in range(1900, 1970)]
    recording = Recording(engine)
    pipeline = Pipeline(retriever, recording, prompts_of(target, FIT), num_passages=2)
    answers = pipeline.ask_many(texts, ASKED)
    looks = [bool(request.attention_heads) for request in recording.requests]
    assert looks == [True] * 32 + ([False] * 32 + [True] * 32) + ([False] * 32 + [True] * 6) + [False] * 6
    assert [answer.question for answer in answers] == texts and answers[65].text == pipeline.ask(texts[65], ASKED).text

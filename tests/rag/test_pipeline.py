"""Pipeline with real small parts; see conftest.py."""

from __future__ import annotations

import asyncio
from dataclasses import fields, replace
from typing import Any

import pytest
from small_parts import CONTEXT, DOCUMENTS, GREEDY, QUESTION, QUOTE, QUOTING, SAMPLED, Recording, Switch

from ragspec.config import PipelineConfig, PromptConfig, RetrieverConfig, TargetConfig
from ragspec.core import Delta, FinishReason, Request, SamplingOptions, SamplingParams
from ragspec.engine.engine import Engine
from ragspec.engine.target import Target
from ragspec.errors import Cancelled, InputError, PromptTooLong
from ragspec.rag.answer import Answer
from ragspec.rag.pipeline import AsyncPipeline, Pipeline
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.steps import Question, build_request, retrieve_passages
from ragspec.rag.wording import NOT_SUPPORTED, NOTHING_CLOSE
from ragspec.retrieval.retriever import Retriever


async def streamed(pipeline: Pipeline, question: str, params: SamplingParams, **options: Any) -> tuple[str, Answer]:
    pieces: list[str] = []
    async for piece in pipeline.stream(question, params, **options):
        if isinstance(piece, Answer):
            return "".join(pieces), piece
        pieces.append(piece)
    raise AssertionError("the stream ended without an answer")


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_ask_ask_many_and_stream_agree(pipeline: Pipeline, params: SamplingParams) -> None:
    """A second code path for streams or batches that builds another prompt or another key."""
    alone = pipeline.ask(QUESTION, params)
    beside = pipeline.ask_many(["Where does the river rise?", QUESTION, "What of the bridge?"], params)[1]
    text, last = asyncio.run(streamed(pipeline, QUESTION, params))
    assert alone.token_ids == beside.token_ids == last.token_ids
    assert alone.text == beside.text == last.text == text
    assert alone.passages == beside.passages == last.passages


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_speculation_changes_no_token(pipeline: Pipeline, params: SamplingParams) -> None:
    """A draft that leaks into the output; and `speculation=False` that still drafts."""
    fast, plain = (pipeline.ask(QUESTION, params, speculation=on) for on in (True, False))
    assert fast.token_ids == plain.token_ids
    assert plain.stats.generation.num_drafted == 0 and plain.stats.generation.num_steps == 24


def test_single_sampling_parameters_are_options(pipeline: Pipeline) -> None:
    """A caller who has to import a class to change the temperature; an option that is misspelt and ignored."""
    assert SamplingOptions.__optional_keys__ == {field.name for field in fields(SamplingParams)}
    told = pipeline.ask(QUESTION, temperature=1.0, seed=5, max_tokens=7)
    assert told.token_ids == pipeline.ask(QUESTION, SamplingParams(temperature=1.0, seed=5, max_tokens=7)).token_ids
    assert len(pipeline.ask(QUESTION, GREEDY, max_tokens=3).token_ids) == 3
    _, streamed_answer = asyncio.run(streamed(pipeline, QUESTION, GREEDY, max_tokens=3))
    assert len(streamed_answer.token_ids) == 3
    wrong: dict[str, Any] = {"temprature": 1.0}
    with pytest.raises(TypeError, match="no option 'temprature'; did you mean 'temperature'"):
        pipeline.ask(QUESTION, **wrong)


def test_a_single_text_is_not_a_list_of_questions(pipeline: Pipeline) -> None:
    """Every letter was asked as a question of its own."""
    with pytest.raises(InputError, match="ask_many takes a list of questions, not the single text 'Where"):
        pipeline.ask_many("Where does the river rise?")


def test_no_passages_are_an_error_not_the_default(pipeline: Pipeline) -> None:
    """0 was taken for "as configured", -1 found nothing and said nothing."""
    for number in (0, -1):
        with pytest.raises(InputError, match="num_passages"):
            pipeline.ask(QUESTION, GREEDY, num_passages=number)


def test_tokens_that_came_with_the_prompt_took_no_time_to_decode(pipeline: Pipeline) -> None:
    """An answer that was accepted as a whole in the first step was reported at a hundred thousand tokens a second."""
    stats = pipeline.ask(QUESTION, GREEDY).stats
    assert 1 <= stats.generation.num_first_tokens <= stats.generation.num_output_tokens
    decoded = stats.generation.num_output_tokens - stats.generation.num_first_tokens
    assert stats.tokens_per_s == pytest.approx(decoded / stats.generation.decode_s)
    at_once = replace(stats.generation, num_first_tokens=stats.generation.num_output_tokens, decode_s=1e-6)
    assert replace(stats, generation=at_once).tokens_per_s == 0.0


def test_the_seed_decides_the_text(pipeline: Pipeline) -> None:
    """A seed that is ignored, or a hidden second source of randomness."""
    texts = {pipeline.ask(QUESTION, replace(SAMPLED, seed=seed)).token_ids for seed in (1, 2, 1)}
    assert len(texts) == 2
    drawn = pipeline.ask(QUESTION, replace(SAMPLED, seed=None))
    again = pipeline.ask(QUESTION, replace(SAMPLED, seed=drawn.seed))
    assert drawn.token_ids == again.token_ids


def test_citations_are_string_identical_and_point_into_the_document(pipeline: Pipeline, switch: Switch) -> None:
    """Offsets that drift between answer, passage and document."""
    switch.answer = QUOTE
    answer = pipeline.ask(QUESTION, QUOTING)
    assert answer.text == QUOTE and answer.finish_reason is FinishReason.STOP
    (citation,) = answer.citations
    passage = next(p for p in answer.passages if p.id == citation.passage_id)
    document = next(d for d in DOCUMENTS if d.id == citation.document_id)
    quote = answer.text[citation.start : citation.end]
    assert quote == passage.text[citation.passage_start : citation.passage_end]
    assert quote == document.text[citation.document_start : citation.document_end]
    assert document.id == "mill" and quote in QUOTE and len(quote) > 50


def test_a_quote_is_drafted_from_its_passage(pipeline: Pipeline, switch: Switch) -> None:
    """Copy sources that never reach the drafter: every answer would cost a step a token."""
    switch.answer = QUOTE
    stats = pipeline.ask(QUESTION, QUOTING).stats
    assert stats.generation.accepted_by_drafter.get("copy", 0) > 10
    assert stats.acceptance_length > 1.5


def test_statistics_are_filled(pipeline: Pipeline, retriever: Retriever) -> None:
    """A field that nobody sets reads as zero for ever."""
    answer = pipeline.ask(QUESTION, SAMPLED)
    stats = answer.stats
    assert stats.retrieve_s > 0 and stats.prompt_s > 0 and stats.generation.decode_s > 0 and stats.tokens_per_s > 0
    assert stats.generation.num_prompt_tokens > 100 and stats.generation.num_output_tokens == 24
    assert stats.index_generation == retriever.generation
    assert answer.seed == 5 and answer.system_fingerprint == "tiny"
    assert answer.to_dict()["finish_reason"] == "length"


def test_n_choices_stand_in_order(pipeline: Pipeline) -> None:
    """Choices of one question that are handed to the next one."""
    answers = pipeline.ask_many([QUESTION, "Where does the river rise?"], replace(SAMPLED, n=3))
    assert [a.question == QUESTION for a in answers] == [True] * 3 + [False] * 3
    assert len({a.token_ids for a in answers[:3]}) == 3
    assert answers[0].token_ids == pipeline.ask(QUESTION, SAMPLED).token_ids


def test_each_question_may_have_its_own_parameters(pipeline: Pipeline) -> None:
    """One set of parameters applied to the whole batch."""
    short, long = pipeline.ask_many([QUESTION, QUESTION], [replace(GREEDY, max_tokens=3), GREEDY])
    assert (len(short.token_ids), len(long.token_ids)) == (3, 24)
    with pytest.raises(InputError):
        pipeline.ask_many([QUESTION, QUESTION], [GREEDY])


def test_the_salt_reaches_the_engine_every_way(retriever: Retriever, engine: Engine, target: Target) -> None:
    """A tenant whose requests share another's cache because one way forgot the salt."""
    recording = Recording(engine)
    pipeline = Pipeline(retriever, recording, PromptBuilder(target.tokenizer, CONTEXT))
    pipeline.ask(QUESTION, GREEDY, tenant="a")
    pipeline.ask_many([QUESTION], GREEDY, tenant="b")
    asyncio.run(streamed(pipeline, QUESTION, GREEDY, tenant="c"))
    assert [request.salt for request in recording.requests] == ["a", "b", "c"]


def test_tenants_share_no_cached_prefix(pipeline: Pipeline) -> None:
    """A prefix found under another tenant's salt tells how long ago that tenant asked the same."""
    pipeline.ask(QUESTION, GREEDY, tenant="first tenant")
    assert pipeline.ask(QUESTION, GREEDY, tenant="first tenant").stats.generation.num_cached_tokens > 100
    assert pipeline.ask(QUESTION, GREEDY, tenant="second tenant").stats.generation.num_cached_tokens == 0


async def test_leaving_a_stream_early_frees_the_engine(pipeline: Pipeline, engine: Engine) -> None:
    """A closed browser tab that keeps its request running to the end."""
    endless = replace(GREEDY, max_tokens=600)

    stream = pipeline.stream(QUESTION, endless)
    async for _ in stream:
        break
    await stream.aclose()  # type: ignore[attr-defined]
    # meanwhile the loop closes the stream's inner streams
    await asyncio.to_thread(pipeline.ask, QUESTION, replace(GREEDY, max_tokens=1))
    assert engine.idle()


def test_passages_that_do_not_fit_are_reported(retriever: Retriever, engine: Engine, target: Target) -> None:
    """Passages that vanish silently; and the wrong ones dropped first."""
    whole = Pipeline(retriever, engine, PromptBuilder(target.tokenizer, CONTEXT), num_passages=3).ask(QUESTION, GREEDY)
    assert len(whole.passages) == 3 and not whole.dropped_passages
    room = whole.stats.generation.num_prompt_tokens + GREEDY.max_tokens - 1
    tight = Pipeline(retriever, engine, PromptBuilder(target.tokenizer, room), num_passages=3).ask(QUESTION, GREEDY)
    assert tight.passages + tight.dropped_passages == whole.passages and len(tight.dropped_passages) == 1


def test_a_question_too_long_says_both_numbers(retriever: Retriever, engine: Engine, target: Target) -> None:
    """An error from deep inside a model, or a question cut in silence."""
    pipeline = Pipeline(retriever, engine, PromptBuilder(target.tokenizer, 100))
    with pytest.raises(PromptTooLong, match=r"the prompt has \d+ tokens, but at most 76 fit the context"):
        pipeline.ask("why " * 200, GREEDY)


@pytest.mark.parametrize("bad", ["", "  \n", "nul \0", "half \ud800 a character", "x" * 1_000_000, 7])
def test_a_bad_question_is_one_clear_error_and_nothing_runs(retriever: Retriever, target: Target, bad: Any) -> None:
    """A bad question among good ones that ends the batch after some were generated."""

    class Refusing:
        def generate(self, requests: Any) -> Any:
            raise AssertionError("nothing may be generated")

        def stream(self, request: Request) -> Any:
            raise AssertionError("nothing may be generated")

        def close(self) -> None: ...

    pipeline = Pipeline(retriever, Refusing(), PromptBuilder(target.tokenizer, CONTEXT))
    with pytest.raises(InputError, match="the question"):
        pipeline.ask_many([QUESTION, bad], GREEDY)
    with pytest.raises(InputError, match="the question"):
        asyncio.run(streamed(pipeline, bad, GREEDY))


def test_no_questions_no_answers(pipeline: Pipeline) -> None:
    """An empty batch that waits for ever."""
    assert pipeline.ask_many([]) == []


def test_a_closed_engine_ends_a_stream_with_an_error(retriever: Retriever, target: Target, engine: Engine) -> None:
    """A shutdown that looks like the end of an answer. Runs on its own engine."""

    class Closing(Recording):
        async def stream(self, request: Request) -> Any:
            yield Delta(request.id, 0, (), "beg")
            yield Delta(request.id, 0, (), "", finish_reason=FinishReason.CANCELLED)

    pipeline = Pipeline(retriever, Closing(engine), PromptBuilder(target.tokenizer, CONTEXT))
    with pytest.raises(Cancelled):
        asyncio.run(streamed(pipeline, QUESTION, GREEDY))


FAR = "How do I renew a passport in Brazil?"


def test_a_question_that_nothing_is_close_to_is_not_given_to_the_target(
    retriever: Retriever, engine: Engine, target: Target
) -> None:
    """A confident answer from stock prices to a question about a deleted document."""
    config = RetrieverConfig(abstain_below=0.2)
    careful = Retriever(retriever.encoder, retriever._current().store, config)
    near, far = careful.retrieve([QUESTION, FAR], 2).closeness
    assert near > 0.9 and far < 0.1
    assert retriever.retrieve([QUESTION], 2).closeness == ()
    prompts, recording = PromptBuilder(target.tokenizer, CONTEXT), Recording(engine)
    pipeline = Pipeline(careful, recording, prompts, num_passages=2, abstain_below=0.2)
    answered, abstained = pipeline.ask_many([QUESTION, FAR], GREEDY)
    assert [request.params.max_tokens for request in recording.requests] == [24]
    plain = Pipeline(retriever, engine, prompts, num_passages=2).ask(QUESTION, GREEDY)
    assert answered.token_ids == plain.token_ids and answered.passages == plain.passages
    assert abstained.text == f"{NOTHING_CLOSE} The nearest: The bridge; The mill."
    assert (abstained.token_ids, abstained.sentences, abstained.finish_reason) == ((), (), FinishReason.STOP)
    text, last = asyncio.run(streamed(pipeline, FAR, GREEDY))
    assert text == last.text == abstained.text
    assert len(recording.requests) == 1
    structured = pipeline.ask(FAR, max_tokens=24, json_schema='{"type": "object"}')  # which that sentence is not
    assert len(recording.requests) == 2 and not structured.text.startswith(NOTHING_CLOSE)


async def test_questions_in_flight_abstain_too(retriever: Retriever, engine: Engine, target: Target) -> None:
    """A batch job that answers what a single question would not be answered."""
    careful = Retriever(retriever.encoder, retriever._current().store, RetrieverConfig(abstain_below=0.2))
    flow = AsyncPipeline(careful, engine, PromptBuilder(target.tokenizer, CONTEXT))
    questions = [Question(text, text, GREEDY, 2, abstain_below=0.2) for text in (QUESTION, FAR)]

    told = {result.id: result.result()[0].text async for result in flow.run(questions)}
    assert told[FAR].startswith(NOTHING_CLOSE) and not told[QUESTION].startswith(NOTHING_CLOSE)


@pytest.fixture
def careful(retriever: Retriever, engine: Engine, target: Target) -> Pipeline:
    """Answers in free words, and withholds what no passage supports."""
    words = PromptConfig(layout="short", require_support=True)
    return Pipeline(retriever, engine, PromptBuilder(target.tokenizer, CONTEXT, words), num_passages=2)


@pytest.mark.parametrize(
    "answer, label", [("The people of the valley built the mill in 1874.", "related"), ("Carp swim upstream.", "")]
)
def test_an_answer_without_support_is_withheld(careful: Pipeline, switch: Switch, answer: str, label: str) -> None:
    """A stream that shows what the whole answer then withholds; a supported answer that is withheld."""
    switch.answer = answer
    whole = careful.ask(QUESTION, QUOTING)
    text, last = asyncio.run(streamed(careful, QUESTION, QUOTING))
    assert text == last.text == whole.text == (answer if label else NOT_SUPPORTED)
    assert [each.label for each in whole.sentences] == ([label] if label else [])
    assert whole.abstained == (not label)
    structured = careful.ask(QUESTION, QUOTING, json_schema='{"type": "string"}', max_tokens=4)
    assert structured.text != NOT_SUPPORTED  # which is no JSON


def test_a_target_without_an_adapter_is_asked_for_a_short_answer(retriever: Retriever, target: Target) -> None:
    """A larger model that is asked in the words of the default's adapter and abstains from nearly everything."""
    (passages,) = retriever.retrieve([QUESTION], 2).passages
    for given, layout in (
        ({}, "quote"),
        ({"model": "other"}, "short"),
        ({"model": "other", "adapter": "folder"}, "quote"),
        ({"adapter": "none"}, "short"),
    ):
        words = PipelineConfig(target=TargetConfig(**given)).wording
        prompts = PromptBuilder(target.tokenizer, CONTEXT, words)
        shown = target.tokenizer.decode(prompts.build(QUESTION, passages, 16).prompt_ids)
        assert words.layout == layout
        assert ("Quote the sentence" in shown) == (layout == "quote") == ("one short sentence" not in shown)
        question = Question("q", QUESTION, QUOTING, 2)
        (retrieved,) = retrieve_passages(retriever, [question])
        assert bool(build_request(retrieved, prompts).request.grammar) == (layout == "quote")

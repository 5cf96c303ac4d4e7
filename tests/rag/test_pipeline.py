"""Pipeline with real small parts; see conftest.py."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import fields, replace
from typing import Any

import pytest
from asking import run, streamed
from small_parts import CONTEXT, DOCUMENTS, GREEDY, QUESTION, QUOTE, QUOTING, SAMPLED, Counting, Recording, Switch

from ragspec.config import PipelineConfig, PromptConfig, TargetConfig
from ragspec.core import Delta, FinishReason, Request, SamplingOptions, SamplingParams
from ragspec.engine.engine import Engine
from ragspec.engine.target import Target
from ragspec.errors import Cancelled, ConfigError, InputError, PromptTooLong, RetrievalError
from ragspec.rag.pipeline import AsyncPipeline, Pipeline, PipelineLimits
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.steps import EngineLike, Question, RetrieverLike, build_request, retrieve_passages
from ragspec.rag.wording import ABSTENTION, NOT_SUPPORTED, NOTHING_CLOSE, AnswerFit, TextRules
from ragspec.retrieval.retriever import RetrievalResult, Retriever
from ragspec.retrieval.search.filters import ComparisonFilter
from ragspec.retrieval.search.segment_search import Query, SearchResult, SearchScope


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_ask_ask_many_and_stream_agree(pipeline: Pipeline, params: SamplingParams) -> None:
    """A second code path for streams or batches that builds another prompt or another key."""
    alone = pipeline.ask(QUESTION, params)
    beside = pipeline.ask_many(["Where does the river rise?", QUESTION, "What of the bridge?"], params)[1]
    text, last = streamed(pipeline, QUESTION, params)
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
    _, streamed_answer = streamed(pipeline, QUESTION, GREEDY, max_tokens=3)
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
    own = stats.generation
    assert 1 <= own.num_first_tokens <= own.num_output_tokens
    assert stats.tokens_per_s == pytest.approx((own.num_output_tokens - own.num_first_tokens) / own.decode_s)
    at_once = replace(own, num_first_tokens=own.num_output_tokens, decode_s=1e-6)
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
    """A field that nobody sets reads as zero for ever; a part took longer than the whole."""
    begin = time.perf_counter()
    answer = pipeline.ask(QUESTION, SAMPLED)
    whole_s, stats, own = time.perf_counter() - begin, answer.stats, answer.stats.generation
    assert own.queue_s >= 0 and stats.first_token_s + own.decode_s <= whole_s
    assert stats.encode_s > 0 < stats.search_s and stats.encode_s + stats.search_s <= stats.retrieve_s
    assert stats.first_token_s == stats.retrieve_s + stats.prompt_s + own.queue_s + own.prefill_s > stats.retrieve_s
    assert stats.prompt_s > 0 and own.decode_s > 0 and stats.tokens_per_s > 0
    assert own.num_prompt_tokens > 100 and own.num_output_tokens == 24
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
    streamed(pipeline, QUESTION, GREEDY, tenant="c")
    assert [request.salt for request in recording.requests] == ["a", "b", "c"]


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


@pytest.mark.parametrize("bad", ["", "  \n", "nul \0", "half \ud800 a character", "x" * 1_000_000, 7])
def test_a_bad_question_is_one_clear_error_and_nothing_runs(
    retriever: Retriever, engine: Engine, target: Target, bad: Any
) -> None:
    """A bad question among good ones that ends the batch after some were generated."""
    recording = Recording(engine)
    pipeline = Pipeline(retriever, recording, PromptBuilder(target.tokenizer, CONTEXT))
    with pytest.raises(InputError, match="the question"):
        pipeline.ask_many([QUESTION, bad], GREEDY)
    with pytest.raises(InputError, match="the question"):
        streamed(pipeline, bad, GREEDY)
    assert not recording.requests


def test_a_closed_engine_ends_a_stream_with_an_error(retriever: Retriever, target: Target, engine: Engine) -> None:
    """A shutdown that looks like the end of an answer. Runs on its own engine."""

    class Closing(Recording):
        async def stream(self, request: Request) -> Any:
            yield Delta(request.id, 0, (), "beg")
            yield Delta(request.id, 0, (), "", finish_reason=FinishReason.CANCELLED)

    pipeline = Pipeline(retriever, Closing(engine), PromptBuilder(target.tokenizer, CONTEXT))
    with pytest.raises(Cancelled):
        streamed(pipeline, QUESTION, GREEDY)


FAR = "How do I renew a passport in Brazil?"


def test_a_question_that_nothing_is_close_to_is_not_given_to_the_target(
    retriever: Retriever, abstaining_retriever: Retriever, engine: Engine, target: Target
) -> None:
    """A confident answer from stock prices to a question about a deleted document; or in a batch job alone."""
    near, far = abstaining_retriever.retrieve([QUESTION, FAR], 2).closeness
    assert near > 0.9 and far < 0.1
    assert retriever.retrieve([QUESTION], 2).closeness == (near,)
    prompts, recording = PromptBuilder(target.tokenizer, CONTEXT), Recording(engine)
    pipeline = Pipeline(abstaining_retriever, recording, prompts, num_passages=2, abstain_below=0.2)
    answered, abstained = pipeline.ask_many([QUESTION, FAR], GREEDY)
    assert [request.params.max_tokens for request in recording.requests] == [24]
    plain = Pipeline(retriever, engine, prompts, num_passages=2).ask(QUESTION, GREEDY)
    assert answered.token_ids == plain.token_ids and answered.passages == plain.passages
    assert abstained.text == f"{NOTHING_CLOSE} The nearest: The bridge; The mill."
    assert (abstained.token_ids, abstained.sentences, abstained.finish_reason) == ((), (), FinishReason.STOP)
    text, last = streamed(pipeline, FAR, GREEDY)
    assert text == last.text == abstained.text
    assert len(recording.requests) == 1
    structured = pipeline.ask(FAR, max_tokens=24, json_schema='{"type": "object"}')  # which that sentence is not
    assert len(recording.requests) == 2 and not structured.text.startswith(NOTHING_CLOSE)
    asked = [Question(each, each, GREEDY, 2, abstain_below=0.2) for each in (QUESTION, FAR)]
    of_job = run(AsyncPipeline(abstaining_retriever, engine, prompts), asked)
    assert [of_job[each].result()[0].text for each in (QUESTION, FAR)] == [answered.text, abstained.text]


def test_a_question_in_a_language_that_the_target_does_not_know_is_named_so(
    retriever: Retriever, engine: Engine, target: Target
) -> None:
    """A question in German was answered with an English quote that had nothing to do with it."""
    recording = Recording(engine)
    prompts = PromptBuilder(target.tokenizer, CONTEXT, rules=TextRules(languages=("en",)))
    asked = "Wann wurde die alte Mühle gebaut, und wer hat sie gebaut?"
    answer = Pipeline(retriever, recording, prompts).ask(asked)
    assert "German" in answer.text and answer.abstained and not recording.requests
    for pipeline, question in (
        (Pipeline(retriever, recording, prompts), "When was the Mühle in Los Angeles built?"),
        (Pipeline(retriever, recording, prompts), "I am getting a blank page."),
        (Pipeline(retriever, recording, PromptBuilder(target.tokenizer, CONTEXT)), asked),
    ):
        assert "seems to be" not in pipeline.ask(question, max_tokens=2).text
    assert len(recording.requests) == 3


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
    text, last = streamed(careful, QUESTION, QUOTING)
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
        ({"model": "other"}, "free"),
        ({"model": "other", "adapter": "folder"}, "quote"),
        ({"adapter": "none"}, "free"),
    ):
        words = PipelineConfig(target=TargetConfig(**given)).wording
        prompts = PromptBuilder(target.tokenizer, CONTEXT, words)
        shown = target.tokenizer.decode(prompts.build(QUESTION, passages, 16).prompt_ids)
        assert words.layout == layout
        assert ("Quote the sentence" in shown) == (layout == "quote") == ("two short sentences" not in shown)
        question = Question("q", QUESTION, QUOTING, 2)
        (retrieved,) = retrieve_passages(retriever, [question])
        assert bool(build_request(retrieved, prompts).request.grammar) == (layout == "quote")


@pytest.mark.parametrize("bias", [100.0, -100.0, 0.0])
def test_a_target_says_first_whether_the_passages_answer(
    retriever: Retriever, engine: Engine, target: Target, bias: float
) -> None:
    """A question was refused in a batch and answered in a stream, a chat or a job; or asked about JSON, or without a fit."""
    rules = TextRules(fit=AnswerFit(intercept=bias, doubts="contained" if bias else ""), layout="free")
    prompts, recording = PromptBuilder(target.tokenizer, CONTEXT, PromptConfig(layout="free"), rules), Recording(engine)
    with Pipeline(retriever, recording, prompts, num_passages=2) as pipeline:
        whole = pipeline.ask(QUESTION, GREEDY)
        _, streamed_whole = streamed(pipeline, QUESTION, GREEDY)
        with pipeline.chat() as chat:
            told = [chat.ask(QUESTION, GREEDY), chat.ask(QUESTION, GREEDY)]
            _, streamed_told = streamed(chat, QUESTION, GREEDY)
        flow = AsyncPipeline(retriever, recording, prompts)
        ((_, of_flow),) = run(flow, [Question("q", QUESTION, GREEDY, 2)]).items()
        (of_job,) = of_flow.result()
        assert {each.text == ABSTENTION for each in (whole, streamed_whole, *told, streamed_told, of_job)} == {bias > 0}
        assert whole.text == streamed_whole.text == of_job.text
        for each in (whole, streamed_whole, *told, streamed_told, of_job):
            asked = each.stats.generation.doubt
            assert (asked.num_output_tokens if asked else 0) == bool(bias), "its tokens count in the answer's usage"
        doubts = [request for request in recording.requests if request.grammar]
        assert len(doubts) == (6 if bias else 0) and all(request.affinity for request in doubts)
        assert pipeline.ask(QUESTION, QUOTING, json_schema='{"type": "string"}', max_tokens=4).text != ABSTENTION


TEXTS = (*(f"What does the river do in year {year}?" for year in range(1900, 1905)), QUESTION)


class Lost:
    """An index that no question of one tenant can reach."""

    def __init__(self, retriever: Retriever) -> None:
        self._retriever = retriever

    def retrieve(self, queries: Sequence[str], k: int, scope: SearchScope) -> RetrievalResult:
        if scope.tenant == "lost":
            raise RetrievalError("the index is lost")
        return self._retriever.retrieve(queries, k, scope)


def questions(params: SamplingParams, texts: Sequence[str] = TEXTS, **options: Any) -> list[Question]:
    options = {"num_passages": 2, **options}
    return [Question(f"q{n}", text, params, **options) for n, text in enumerate(texts)]


Flow = Callable[..., AsyncPipeline]


@pytest.fixture
def flow(retriever: Retriever, engine: Engine, target: Target) -> Flow:
    """Over the real parts, unless a test names others."""

    def made(index: RetrieverLike = retriever, backend: EngineLike = engine, **limits: int) -> AsyncPipeline:
        limits = {"max_batch": 4, "max_in_flight": 5, "max_waiting": 3, **limits}
        return AsyncPipeline(index, backend, PromptBuilder(target.tokenizer, CONTEXT), PipelineLimits(**limits))

    return made


@pytest.mark.parametrize(
    "params", [replace(GREEDY, seed=3), replace(SAMPLED, n=2)], ids=["greedy", "two sampled choices"]
)
def test_a_flow_answers_as_the_pipeline_does(flow: Flow, pipeline: Pipeline, params: SamplingParams) -> None:
    """A second way to prepare or cite: another prompt, key or order of passages."""
    expected = iter(pipeline.ask_many(TEXTS, params))
    got = run(flow(), questions(params))
    assert len(got) == len(TEXTS)
    for n, text in enumerate(TEXTS):
        for answer in got[f"q{n}"].result():
            like = next(expected)
            assert answer.question == like.question == text
            assert (answer.token_ids, answer.text, answer.seed) == (like.token_ids, like.text, like.seed)
            assert (answer.passages, answer.citations) == (like.passages, like.citations)
            assert answer.stats.index_generation == like.stats.index_generation
            assert answer.stats.retrieve_s > 0 and answer.stats.prompt_s > 0


def test_filters_that_are_equal_in_python_alone_are_not_looked_up_together(
    flow: Flow, retriever: Retriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 == True: rows of a batch were answered from what another row's filter found, by chance of timing."""
    filters = [ComparisonFilter(type="eq", key="public", value=value) for value in (True, 1, False, 0)]
    looked, look_up = list[str](), retriever.search

    def watched(queries: Sequence[Query], k: int, scope: SearchScope, **options: Any) -> SearchResult:
        looked.extend(f"{query.text}: {scope.filter!r}" for query in queries)
        return look_up(queries, k, scope, **options)

    monkeypatch.setattr(retriever, "search", watched)
    asked = [replace(each, scope=SearchScope("", filters[n % 4])) for n, each in enumerate(questions(GREEDY))]
    run(flow(max_batch=8), asked)
    assert sorted(looked) == sorted(f"{each.text}: {each.scope.filter!r}" for each in asked)


def test_a_bad_question_is_its_own_result(flow: Flow) -> None:
    """One question of ten thousand that ends the others, or is answered as its neighbour."""
    texts = [
        "",
        QUESTION,
        "nul \0",
        "why " * 2000,
        "half \ud800",
        "x" * 1_000_000,
        QUESTION,
        "Where does the river rise?",
    ]
    got = run(flow(), questions(GREEDY, texts))
    assert {n for n in range(8) if got[f"q{n}"].error is None} == {1, 6, 7}
    assert isinstance(got["q3"].error, PromptTooLong)
    assert all(isinstance(got[f"q{n}"].error, InputError) for n in (0, 2, 4, 5))
    assert got["q1"].result()[0].token_ids == got["q6"].result()[0].token_ids


async def test_an_id_that_runs_already_is_refused_for_the_second(flow: Flow) -> None:
    """Two questions of one id whose tokens mix."""
    long = replace(GREEDY, max_tokens=600, ignore_eos=True)  # the first still runs when the second is submitted
    twice = [replace(question, id="same") for question in questions(long, TEXTS[:2])]

    results = [each.error for each in [finished async for finished in flow().run(twice)]]
    assert {type(error) for error in results} == {InputError, type(None)} and "already" in str(results)


def test_a_lost_index_is_the_error_of_those_who_needed_it(flow: Flow, retriever: Retriever) -> None:
    """The whole flow ends because one tenant's shard is gone; or its questions are answered without passages."""
    asked = questions(GREEDY, TEXTS[:4])
    asked[1::2] = [replace(each, scope=SearchScope("lost")) for each in asked[1::2]]
    got = run(flow(Lost(retriever)), asked)
    assert [type(got[f"q{n}"].error) for n in range(4)] == [type(None), RetrievalError] * 2


def test_requests_carry_id_tenant_and_what_they_share(flow: Flow, engine: Engine) -> None:
    """A job that is run again under new ids; a tenant's request in everybody's cache; documents that no replica remembers."""
    recording = Recording(engine)
    made = flow(backend=recording)
    got = run(made, questions(GREEDY, TEXTS[:3], scope=SearchScope("ann"), num_passages=3))
    assert sorted(request.id for request in recording.requests) == ["q0", "q1", "q2"]
    assert {request.salt for request in recording.requests} == {"ann"}
    assert {request.affinity for request in recording.requests} == {
        each.result()[0].passages[0].id for each in got.values()
    }


def test_no_more_requests_than_allowed_are_in_the_engine(flow: Flow, engine: Engine) -> None:
    """A thousand prompts wait inside the engine, where nobody else gets a turn."""
    counting = Counting(engine)
    made = flow(backend=counting, max_in_flight=3)
    run(made, questions(GREEDY))
    assert counting.most == 3
    assert [each.name for each in made.stages.metrics] == ["retrieve", "prompt", "generate", "cite"]
    assert [each.num_items for each in made.stages.metrics] == [len(TEXTS)] * 4
    assert all(each.max_depth <= 3 and each.depth == 0 and each.busy_s > 0 for each in made.stages.metrics)
    retrieve, _, generate, _ = made.stages.metrics
    assert retrieve.num_batches < len(TEXTS) == generate.num_batches


async def test_leaving_a_flow_early_frees_the_engine(flow: Flow, pipeline: Pipeline, engine: Engine) -> None:
    """A job that was stopped keeps the engine busy to the end of every answer."""

    short, *endless = questions(replace(GREEDY, max_tokens=600))
    made = flow()
    async with aclosing(made.run([replace(short, params=GREEDY), *endless])) as results:
        await anext(results)
    pipeline.ask(QUESTION, replace(GREEDY, max_tokens=1))  # the engine's queue is in order: the cancels are done before
    assert engine.idle()


def test_limits_that_cannot_be_meant_are_refused() -> None:
    """A flow of no requests at once, which waits for ever."""
    for name in ("max_batch", "max_lookups", "max_in_flight", "max_waiting"):
        with pytest.raises(ConfigError, match=name):
            PipelineLimits(**{name: 0})

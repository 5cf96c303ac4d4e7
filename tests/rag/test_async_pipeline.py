"""A flow answers as the pipeline does, whatever goes on beside; see conftest.py for its parts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from small_parts import CONTEXT, GREEDY, QUESTION, QUOTE, QUOTING, SAMPLED, Counting, Recording, Switch

from ragspec.core import SamplingParams
from ragspec.engine.engine import Engine
from ragspec.engine.target import Target
from ragspec.errors import ConfigError, InputError, PromptTooLong, RetrievalError
from ragspec.rag.answer import Answer
from ragspec.rag.pipeline import AsyncPipeline, Pipeline, PipelineLimits
from ragspec.rag.pipeline_stages import ItemResult
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.steps import EngineLike, Question, RetrieverLike
from ragspec.retrieval.retriever import RetrievalResult, Retriever
from ragspec.retrieval.search.filters import ComparisonFilter
from ragspec.retrieval.search.index_types import Query, SearchResult
from ragspec.retrieval.search.segment_search import SearchScope

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


def flow_of(retriever: RetrieverLike, engine: EngineLike, target: Target, **limits: int) -> AsyncPipeline:
    limits = {"max_batch": 4, "max_in_flight": 5, "max_waiting": 3, **limits}
    return AsyncPipeline(retriever, engine, PromptBuilder(target.tokenizer, CONTEXT), PipelineLimits(**limits))


def run(flow: AsyncPipeline, asked: Sequence[Question]) -> dict[str, ItemResult[tuple[Answer, ...]]]:
    async def collect() -> list[ItemResult[tuple[Answer, ...]]]:
        return [finished async for finished in flow.run(asked)]

    finished = asyncio.run(asyncio.wait_for(collect(), 120))
    assert len({each.id for each in finished}) == len(finished)
    return {each.id: each for each in finished}


@pytest.mark.parametrize(
    "params", [replace(GREEDY, seed=3), replace(SAMPLED, n=2)], ids=["greedy", "two sampled choices"]
)
def test_a_flow_answers_as_the_pipeline_does(
    retriever: Retriever, pipeline: Pipeline, engine: Engine, target: Target, params: SamplingParams
) -> None:
    """A second way to prepare or cite: another prompt, key or order of passages."""
    expected = iter(pipeline.ask_many(TEXTS, params))
    got = run(flow_of(retriever, engine, target), questions(params))
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
    retriever: Retriever, engine: Engine, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 == True: rows of a batch were answered from what another row's filter found, by chance of timing."""
    filters = [ComparisonFilter(type="eq", key="public", value=value) for value in (True, 1, False, 0)]
    looked, look_up = list[str](), retriever.search

    def watched(queries: Sequence[Query], k: int, scope: SearchScope, **options: Any) -> SearchResult:
        looked.extend(f"{query.text}: {scope.filter!r}" for query in queries)
        return look_up(queries, k, scope, **options)

    monkeypatch.setattr(retriever, "search", watched)
    asked = [replace(each, scope=SearchScope("", filters[n % 4])) for n, each in enumerate(questions(GREEDY))]
    run(flow_of(retriever, engine, target, max_batch=8), asked)
    assert sorted(looked) == sorted(f"{each.text}: {each.scope.filter!r}" for each in asked)


def test_a_quote_is_cited(retriever: Retriever, engine: Engine, target: Target, switch: Switch) -> None:
    """Answers of a flow without their citations."""
    switch.answer = QUOTE
    ((answer,),) = [
        each.result() for each in run(flow_of(retriever, engine, target), questions(QUOTING, [QUESTION])).values()
    ]
    (citation,) = answer.citations
    assert answer.text[citation.start : citation.end] in QUOTE and citation.document_id == "mill"


def test_a_bad_question_is_its_own_result(retriever: Retriever, engine: Engine, target: Target) -> None:
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
    got = run(flow_of(retriever, engine, target), questions(GREEDY, texts))
    assert {n for n in range(8) if got[f"q{n}"].error is None} == {1, 6, 7}
    assert isinstance(got["q3"].error, PromptTooLong)
    assert all(isinstance(got[f"q{n}"].error, InputError) for n in (0, 2, 4, 5))
    assert got["q1"].result()[0].token_ids == got["q6"].result()[0].token_ids


async def test_an_id_that_runs_already_is_refused_for_the_second(
    retriever: Retriever, engine: Engine, target: Target
) -> None:
    """Two questions of one id whose tokens mix."""
    twice = [replace(question, id="same") for question in questions(GREEDY, TEXTS[:2])]

    results = [each.error for each in [finished async for finished in flow_of(retriever, engine, target).run(twice)]]
    assert {type(error) for error in results} == {InputError, type(None)} and "already" in str(results)


def test_a_lost_index_is_the_error_of_those_who_needed_it(retriever: Retriever, engine: Engine, target: Target) -> None:
    """The whole flow ends because one tenant's shard is gone; or its questions are answered without passages."""
    asked = questions(GREEDY, TEXTS[:4])
    asked[1::2] = [replace(each, scope=SearchScope("lost")) for each in asked[1::2]]
    got = run(flow_of(Lost(retriever), engine, target), asked)
    assert [type(got[f"q{n}"].error) for n in range(4)] == [type(None), RetrievalError] * 2


def test_requests_carry_id_tenant_and_what_they_share(retriever: Retriever, engine: Engine, target: Target) -> None:
    """A job that is run again under new ids; a tenant's request in everybody's cache; documents that no replica remembers."""
    recording = Recording(engine)
    flow = flow_of(retriever, recording, target)
    run(flow, questions(GREEDY, TEXTS[:3], scope=SearchScope("ann"), num_passages=3))
    assert sorted(request.id for request in recording.requests) == ["q0", "q1", "q2"]
    assert {request.salt for request in recording.requests} == {"ann"}
    assert {request.affinity for request in recording.requests} == {"bridge\nmill\nriver"}


def test_no_more_requests_than_allowed_are_in_the_engine(retriever: Retriever, engine: Engine, target: Target) -> None:
    """A thousand prompts wait inside the engine, where nobody else gets a turn."""
    counting = Counting(engine)
    flow = flow_of(retriever, counting, target, max_in_flight=3)
    run(flow, questions(GREEDY))
    assert counting.most == 3
    assert [each.name for each in flow.stages.metrics] == ["retrieve", "prompt", "generate", "cite"]
    assert [each.num_items for each in flow.stages.metrics] == [len(TEXTS)] * 4
    assert all(each.max_depth <= 3 and each.depth == 0 and each.busy_s > 0 for each in flow.stages.metrics)
    retrieve, _, generate, _ = flow.stages.metrics
    assert retrieve.num_batches < len(TEXTS) == generate.num_batches


async def test_leaving_a_flow_early_frees_the_engine(
    retriever: Retriever, pipeline: Pipeline, engine: Engine, target: Target
) -> None:
    """A job that was stopped keeps the engine busy to the end of every answer."""

    short, *endless = questions(replace(GREEDY, max_tokens=600))
    flow = flow_of(retriever, engine, target)
    async with aclosing(flow.run([replace(short, params=GREEDY), *endless])) as results:
        await anext(results)
    pipeline.ask(QUESTION, replace(GREEDY, max_tokens=1))  # the engine's queue is in order: the cancels are done before
    assert engine.idle()


def test_limits_that_cannot_be_meant_are_refused() -> None:
    """A flow of no requests at once, which waits for ever."""
    for name in ("max_batch", "max_lookups", "max_in_flight", "max_waiting"):
        with pytest.raises(ConfigError, match=name):
            PipelineLimits(**{name: 0})

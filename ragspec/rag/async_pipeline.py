"""Many questions at once, as a flow: encode, retrieve, prompt, generate and cite go on side by side.

    >>> flow = AsyncPipeline(retriever, engine, prompts, PipelineLimits(max_in_flight=64))
    >>> async for finished in flow.run(Question(str(n), text, params) for n, text in enumerate(texts)):
    ...     print(finished.id, finished.error or finished.value[0].text)

The steps are the pipeline's, and so is every answer. While the engine writes, the next questions are already being looked up;
questions that wait for encoder or index share a call. Nothing piles up: a flow holds a bounded number of questions, and takes
another from its source when one has left.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from ragspec.core import Completion
from ragspec.errors import ConfigError
from ragspec.rag.answer import Answer
from ragspec.rag.pipeline_stages import ItemResult, PipelineStage, StagedPipeline
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.steps import (
    EngineLike,
    PreparedQuestion,
    Question,
    RetrievedQuestion,
    RetrieverLike,
    attach_passages,
    build_answer,
    build_request,
    collect_completions,
    retrieve_passages,
)
from ragspec.retrieval.search.index_types import Query, SearchResult
from ragspec.retrieval.search.segment_search import SearchScope

Questions = Iterable[Question] | AsyncIterable[Question]


@runtime_checkable
class EncodingRetriever(Protocol):
    """A retriever whose encoding and searching can be asked for one after the other, as `Retriever` and `IndexLike` are."""

    def encode(self, texts: Sequence[str]) -> list[Query]: ...

    def search(self, queries: Sequence[Query], k: int, scope: SearchScope) -> SearchResult: ...


@dataclass(frozen=True, slots=True)
class PipelineLimits:
    """How much goes on at once: questions in one call of encoder or index, such calls, requests that the engine has, questions
    that wait before each stage. `max_in_flight` keeps an engine full from its `max_running` on.

    Raises: ConfigError.
    """

    max_batch: int = 16
    max_lookups: int = 1
    max_in_flight: int = 64
    max_waiting: int = 32

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_lookups", "max_in_flight", "max_waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of a flow must be at least 1, not {getattr(self, name)}")


class AsyncPipeline:
    """Questions in, cited answers out as they finish; a question's error is its result and ends nothing else."""

    def __init__(
        self,
        retriever: RetrieverLike,
        engine: EngineLike,
        prompts: PromptBuilder,
        limits: PipelineLimits | None = None,
    ) -> None:
        """Any retriever and engine that a `Pipeline` takes; neither is closed."""
        self._retriever, self._engine, self._prompts = retriever, engine, prompts
        self._limits = limits or PipelineLimits()
        self.stages = StagedPipeline(self._make_stages(), max_waiting=self._limits.max_waiting)
        """What `run` runs, with the metrics of every stage over all runs; its own `run` gives all that has finished together."""

    async def run(self, questions: Questions) -> AsyncGenerator[ItemResult[tuple[Answer, ...]]]:
        """Each question's answers, one a choice, or its error, in the order in which they finish.

        Leaving the loop early cancels what runs. Ids name requests: two questions under way must not share one.
        Raises: only what reading `questions` raises.
        """
        async with aclosing(self.stages.run(questions)) as batches:
            async for batch in batches:
                for finished in batch:
                    yield finished

    def _make_stages(self) -> tuple[PipelineStage, ...]:
        limits = self._limits
        return (
            *self._finding(),
            PipelineStage("prompt", self._prompt, limits.max_batch),
            PipelineStage("generate", self._generate, num_workers=limits.max_in_flight),
            PipelineStage("cite", _build_answers, limits.max_batch),
        )

    def _finding(self) -> tuple[PipelineStage, ...]:
        """Why one stage where there are not two steps: what a retriever does within one call cannot be told apart."""
        together = self._limits.max_batch, self._limits.max_lookups
        retriever = self._retriever
        if not isinstance(retriever, EncodingRetriever):
            return (
                PipelineStage(
                    "retrieve", lambda questions: retrieve_passages(retriever, questions), *together, _search_key
                ),
            )
        return (
            PipelineStage("encode", lambda questions: _encode(retriever, questions), *together),
            PipelineStage(
                "retrieve", lambda queries: _search(retriever, queries), *together, lambda q: _search_key(q.question)
            ),
        )

    def _prompt(self, found: Sequence[RetrievedQuestion]) -> list[PreparedQuestion]:
        return [build_request(each, self._prompts) for each in found]

    async def _generate(self, ready: Sequence[PreparedQuestion]) -> list[_GeneratedChoices]:
        return [_GeneratedChoices(each, await collect_completions(self._engine, each.request)) for each in ready]


Flow = AsyncPipeline
"""The name in earlier versions."""


class _EncodedQuestion(NamedTuple):
    question: Question
    query: Query
    encode_s: float


class _GeneratedChoices(NamedTuple):
    ready: PreparedQuestion
    choices: Sequence[Completion]


def _search_key(question: Question) -> tuple[int, tuple[str, str]]:
    """What questions of one lookup have in common."""
    return question.num_passages, question.scope.key


def _encode(index: EncodingRetriever, questions: Sequence[Question]) -> list[_EncodedQuestion]:
    begin = time.perf_counter()
    queries = index.encode([question.text for question in questions])
    encode_s = time.perf_counter() - begin
    return [_EncodedQuestion(question, query, encode_s) for question, query in zip(questions, queries, strict=True)]


def _search(index: EncodingRetriever, encoded: Sequence[_EncodedQuestion]) -> list[RetrievedQuestion]:
    begin, questions = time.perf_counter(), [each.question for each in encoded]
    first = questions[0]
    lookup = index.search([each.query for each in encoded], first.num_passages, first.scope)
    return attach_passages(questions, lookup, time.perf_counter() - begin + max(each.encode_s for each in encoded))


def _build_answers(written: Sequence[_GeneratedChoices]) -> list[tuple[Answer, ...]]:
    return [tuple(build_answer(ready, choice) for choice in choices) for ready, choices in written]

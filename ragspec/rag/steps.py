"""The steps from a question to its answer: find passages, prepare the request, cite.

Owns what every way to ask shares, one question or a flow of them; waits for nothing and starts nothing.

    >>> (found,) = retrieved(retriever, [Question("q1", "When did it rain?", params, num_passages=3)])
    >>> ready = prepared(found, prompts)
    >>> answered(ready, engine.generate([ready.request])[0])
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, cast

from ragspec.config import GenerationConfig
from ragspec.core import Completion, Delta, Passage, Request, SamplingParams
from ragspec.engine.collect import join
from ragspec.errors import InputError
from ragspec.rag.answer import Answer, AnswerStats
from ragspec.rag.citations import find_citations
from ragspec.rag.prompt import Prompt, PromptBuilder
from ragspec.rag.sources import copy_sources
from ragspec.retrieval.retriever import PUBLIC_SCOPE, RetrievalResult
from ragspec.retrieval.search.filters import parse_filter
from ragspec.retrieval.search.index_types import SearchResult
from ragspec.retrieval.search.segment_search import SearchScope
from ragspec.speculation import ON, Speculation


class RetrieverLike(Protocol):
    """Finds passages."""

    def retrieve(self, queries: Sequence[str], k: int, scope: SearchScope) -> RetrievalResult: ...


class EngineLike(Protocol):
    """Runs requests."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]: ...

    def stream(self, request: Request) -> AsyncIterator[Delta]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, of which passages, and how the answer is written. `id` names the request: the asker's own, or a random one.

    Raises: InputError for fewer than one passage.
    """

    id: str
    text: str
    params: SamplingParams
    num_passages: int = 3
    scope: SearchScope = PUBLIC_SCOPE
    speculation: Speculation = ON

    def __post_init__(self) -> None:
        if self.num_passages < 1:
            raise InputError(f"num_passages must be at least 1, not {self.num_passages}")


@dataclass(frozen=True, slots=True)
class Found:
    """A question with its passages, best first; the index's generation that gave them, without the segments `missing`."""

    question: Question
    passages: Sequence[Passage]
    generation: str
    retrieve_s: float
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A question as the engine is asked for its answer."""

    found: Found
    prompt: Prompt
    request: Request
    prompt_s: float


def retrieved(retriever: RetrieverLike, questions: Sequence[Question]) -> list[Found]:
    """The passages of questions that share `num_passages` and scope, from one generation. Raises: as the retriever."""
    if not questions:
        return []
    begin = time.perf_counter()
    texts = [question.text for question in questions]
    found = retriever.retrieve(texts, questions[0].num_passages, questions[0].scope)
    return found_of(questions, found, time.perf_counter() - begin)


def found_of(questions: Sequence[Question], found: RetrievalResult | SearchResult, retrieve_s: float) -> list[Found]:
    """Each question with its own part of what the index said about all of them."""
    return [
        Found(question, passages, found.generation, retrieve_s, found.missing)
        for question, passages in zip(questions, found.passages, strict=True)
    ]


def prepared(found: Found, prompts: PromptBuilder) -> Prepared:
    """The request of a question: its prompt, what may be copied, and with whom it shares documents. Raises: as `build`."""
    begin, question = time.perf_counter(), found.question
    prompt = prompts.build(question.text, found.passages, question.params.max_tokens)
    request = Request(
        question.id,
        prompt.prompt_ids,
        question.params,
        copy_sources(question.text, prompt.passages),
        question.scope.tenant,
        question.speculation,
        affinity=_affinity(prompt.passages),
    )
    return Prepared(found, prompt, request, time.perf_counter() - begin)


async def completions(engine: EngineLike, request: Request) -> list[Completion]:
    """Every choice of a request, in order; giving up the wait cancels it. Raises: EngineError, Cancelled, InputError."""
    deltas: dict[int, list[Delta]] = {choice: [] for choice in request.choices}
    # Why the cast: a stream that is left early is closed at once, and every asynchronous generator can be
    async with aclosing(cast(Any, engine.stream(request))) as stream:
        async for delta in stream:
            deltas[delta.choice].append(delta)
    return [join(each) for each in deltas.values()]


def answered(ready: Prepared, completion: Completion) -> Answer:
    """One choice with its citations."""
    found, passages = ready.found, ready.prompt.passages
    return Answer(
        found.question.text,
        completion.text,
        tuple(find_citations(completion.text, passages)),
        passages,
        ready.prompt.dropped,
        completion.finish_reason,
        completion.token_ids,
        completion.logprobs,
        AnswerStats(
            found.retrieve_s, ready.prompt_s, found.generation, completion.stats, missing_segments=found.missing
        ),
    )


def _affinity(passages: Sequence[Passage]) -> str:
    """Equal for requests whose prompts hold the same documents."""
    return "\n".join(sorted({passage.document_id for passage in passages}))


def scope_of(tenant: str, filter: Mapping[str, Any] | None) -> SearchScope:
    """Raises: InputError for a filter that cannot be meant."""
    return SearchScope(tenant, None if filter is None else parse_filter(filter))


def params_of(config: GenerationConfig) -> SamplingParams:
    return SamplingParams(
        max_tokens=config.max_tokens, temperature=config.temperature, top_p=config.top_p, seed=config.seed
    )

"""One-shot retrieval-augmented generation: retrieve, build the prompt, generate, cite.

    >>> with Pipeline.from_config(load_config("ragspec.yaml")) as pipeline:
    ...     print(pipeline.ask("What does json.dumps do?").text)

A pipeline takes any retriever and engine that keep these protocols: local objects and actor handles alike.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

from ragspec.config import GenerationConfig, PipelineConfig
from ragspec.core import Completion, Delta, Request, SamplingParams
from ragspec.engine.collect import join
from ragspec.engine.loading import load_engine
from ragspec.errors import InputError
from ragspec.rag.answer import Answer, AnswerStats
from ragspec.rag.citations import find_citations
from ragspec.rag.prompt import Prompt, PromptBuilder
from ragspec.rag.sources import copy_sources
from ragspec.retrieval.filters import parse_filter
from ragspec.retrieval.retriever import Retrieval, Retriever
from ragspec.retrieval.search import Scope
from ragspec.speculation import Speculation, SpeculationGiven


class RetrieverLike(Protocol):
    """Finds passages."""

    def retrieve(self, queries: Sequence[str], k: int, scope: Scope) -> Retrieval: ...


class EngineLike(Protocol):
    """Runs requests."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]: ...

    def stream(self, request: Request) -> AsyncIterator[Delta]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Prepared:
    question: str
    prompt: Prompt
    request: Request
    generation: str
    retrieve_s: float
    prompt_s: float


class Pipeline:
    """Questions in, cited answers out.

    `tenant` says who asks: only documents and caches of that tenant, and those of nobody in particular, are used. `filter` says
    which documents may answer, as JSON (`ragspec.retrieval.filters`).
    """

    def __init__(
        self,
        retriever: RetrieverLike,
        engine: EngineLike,
        prompts: PromptBuilder,
        *,
        num_passages: int = 3,
        generation: GenerationConfig | None = None,
    ) -> None:
        self._retriever = retriever
        self._engine = engine
        self._prompts = prompts
        self._num_passages = num_passages
        self._defaults = params_of(generation or GenerationConfig())

    @classmethod
    def from_config(cls, config: PipelineConfig | None = None) -> Self:
        """Open the index, load encoder and target, test the numerics, measure the costs.

        Raises: ConfigError, StoreError, ModelError.
        """
        config = config or PipelineConfig()
        retriever = Retriever.from_config(config.retriever, config.encoder)
        engine = load_engine(config.target, config.engine, config.drafting)
        prompts = PromptBuilder(engine.target.tokenizer, engine.max_context_tokens)
        return cls(retriever, engine, prompts, num_passages=config.retriever.num_passages, generation=config.generation)

    @property
    def engine(self) -> EngineLike:
        return self._engine

    def ask(self, question: str, params: SamplingParams | None = None, **options: Any) -> Answer:
        """One question, one answer. Options as in `ask_many`. Raises: InputError, PromptTooLong."""
        return self.ask_many([question], params, **options)[0]

    def ask_many(
        self,
        questions: Sequence[str],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        num_passages: int | None = None,
        speculation: SpeculationGiven = True,
        tenant: str = "",
        filter: Mapping[str, Any] | None = None,
    ) -> list[Answer]:
        """Answer all at once, batched through retrieval and engine; with `n` choices, n answers a question, in order.

        Raises: InputError or PromptTooLong for the first question that cannot be asked; then none is generated.
        """
        scope = scope_of(tenant, filter)
        prepared = self._prepare(questions, params, num_passages, speculation, scope)
        completions = iter(self._engine.generate([p.request for p in prepared]))
        return [self._answer(p, next(completions)) for p in prepared for _ in range(p.request.params.n)]

    async def stream(
        self,
        question: str,
        params: SamplingParams | None = None,
        *,
        num_passages: int | None = None,
        speculation: SpeculationGiven = True,
        tenant: str = "",
        filter: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[str | Answer]:
        """Pieces of text as they are decided, then the whole answer. One choice only.

        Leaving the loop early cancels the request. Raises: InputError, PromptTooLong, EngineError.
        """
        params = replace(params or self._defaults, n=1)
        # Why a thread: encoder and tokenizer take milliseconds in which other streams go on
        scope = scope_of(tenant, filter)
        (prepared,) = await asyncio.to_thread(self._prepare, [question], params, num_passages, speculation, scope)
        deltas: list[Delta] = []
        async for delta in self._engine.stream(prepared.request):
            deltas.append(delta)
            if delta.text:
                yield delta.text
        yield self._answer(prepared, join(deltas))

    def close(self) -> None:
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(
        self,
        questions: Sequence[str],
        params: SamplingParams | Sequence[SamplingParams] | None,
        num_passages: int | None,
        speculation: SpeculationGiven,
        scope: Scope,
    ) -> list[_Prepared]:
        k = self._num_passages if num_passages is None else num_passages
        if k < 1:
            raise InputError(f"num_passages must be at least 1, not {k}")
        if isinstance(params, Sequence) and len(params) != len(questions):
            raise InputError(f"{len(questions)} questions came with {len(params)} sets of sampling parameters")
        each = [params or self._defaults] * len(questions) if not isinstance(params, Sequence) else params
        begin = time.perf_counter()
        found, generation = self._retriever.retrieve(questions, k, scope)
        retrieve_s = time.perf_counter() - begin
        prepared = []
        for question, passages, own in zip(questions, found, each, strict=True):
            begin = time.perf_counter()
            prompt = self._prompts.build(question, passages, own.max_tokens)
            request = Request(
                uuid.uuid4().hex,
                prompt.prompt_ids,
                own,
                copy_sources(question, prompt.passages),
                scope.tenant,
                Speculation.of(speculation),
            )
            prepared.append(_Prepared(question, prompt, request, generation, retrieve_s, time.perf_counter() - begin))
        return prepared

    def _answer(self, prepared: _Prepared, completion: Completion) -> Answer:
        passages = prepared.prompt.passages
        stats = AnswerStats(prepared.retrieve_s, prepared.prompt_s, prepared.generation, completion.stats)
        return Answer(
            prepared.question,
            completion.text,
            tuple(find_citations(completion.text, passages)),
            passages,
            prepared.prompt.dropped,
            completion.finish_reason,
            completion.token_ids,
            completion.logprobs,
            stats,
        )


def scope_of(tenant: str, filter: Mapping[str, Any] | None) -> Scope:
    return Scope(tenant, None if filter is None else parse_filter(filter))


def params_of(config: GenerationConfig) -> SamplingParams:
    return SamplingParams(
        max_tokens=config.max_tokens, temperature=config.temperature, top_p=config.top_p, seed=config.seed
    )

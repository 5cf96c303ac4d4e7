"""One-shot retrieval-augmented generation: retrieve, build the prompt, generate, cite.

    >>> with Pipeline.from_config(load_config("ragspec.yaml")) as pipeline:
    ...     print(pipeline.ask("What does json.dumps do?").text)

A pipeline takes any retriever and engine that keep the protocols: local objects and actor handles alike. Its questions come
together or one by one; `ragspec.rag.async_pipeline` answers a stream of them by the same steps.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from ragspec.config import GenerationConfig, PipelineConfig
from ragspec.core import Delta, SamplingParams
from ragspec.engine.client import completion_of
from ragspec.engine.loading import load_engine
from ragspec.errors import InputError
from ragspec.rag.answer import Answer
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.steps import (
    EngineLike,
    PreparedQuestion,
    Question,
    RetrieverLike,
    build_answer,
    build_request,
    default_params,
    parse_scope,
    retrieve_passages,
)
from ragspec.retrieval.retriever import Retriever
from ragspec.retrieval.search.segment_search import SearchScope
from ragspec.speculation import Speculation, SpeculationGiven


class Pipeline:
    """Questions in, cited answers out.

    `tenant` says who asks: only documents and caches of that tenant, and those of nobody in particular, are used. `filter` says
    which documents may answer, as JSON (`ragspec.retrieval.search.filters`).
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
        self._defaults = default_params(generation or GenerationConfig())

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
        scope = parse_scope(tenant, filter)
        ready = self._prepare(questions, params, num_passages, speculation, scope)
        collect_completions = iter(self._engine.generate([each.request for each in ready]))
        return [build_answer(each, next(collect_completions)) for each in ready for _ in range(each.request.params.n)]

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
        scope = parse_scope(tenant, filter)
        (ready,) = await asyncio.to_thread(self._prepare, [question], params, num_passages, speculation, scope)
        deltas: list[Delta] = []
        async for delta in self._engine.stream(ready.request):
            deltas.append(delta)
            if delta.text:
                yield delta.text
        yield build_answer(ready, completion_of(deltas))

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
        scope: SearchScope,
    ) -> list[PreparedQuestion]:
        if isinstance(params, Sequence) and len(params) != len(questions):
            raise InputError(f"{len(questions)} questions came with {len(params)} sets of sampling parameters")
        each = params if isinstance(params, Sequence) else [params or self._defaults] * len(questions)
        k = self._num_passages if num_passages is None else num_passages
        drafting = Speculation.of(speculation)
        asked = [
            Question(uuid.uuid4().hex, text, own, k, scope, drafting) for text, own in zip(questions, each, strict=True)
        ]
        return [build_request(found, self._prompts) for found in retrieve_passages(self._retriever, asked)]

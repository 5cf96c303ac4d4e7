"""One-shot retrieval-augmented generation: retrieve, build the prompt, generate, cite.

    >>> with Pipeline.from_config(load_config("ragspec.yaml")) as pipeline:
    ...     print(pipeline.ask("What does json.dumps do?").text)

Retriever and engine may be local objects or handles to remote ones. `ragspec.rag.async_pipeline` runs the same steps for a
stream of questions.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, TypedDict, Unpack

from ragspec.config import GenerationConfig, PipelineConfig
from ragspec.core import Delta, SamplingParams
from ragspec.engine.client import completion_of
from ragspec.engine.loading import load_engine
from ragspec.rag.answer import Answer
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.steps import (
    Closeable,
    EngineLike,
    PreparedQuestion,
    Question,
    RetrieverLike,
    build_answer,
    build_request,
    default_params,
    params_of_each,
    parse_scope,
    retrieve_passages,
)
from ragspec.retrieval.retriever import Retriever
from ragspec.speculation import Speculation, SpeculationGiven


class QuestionOptions(TypedDict, total=False):
    """`tenant` asks: only the tenant's and public documents and caches are used. `filter` restricts the documents; JSON form
    (`ragspec.retrieval.search.filters`)."""

    num_passages: int | None
    speculation: SpeculationGiven
    tenant: str
    filter: Mapping[str, Any] | None


class Pipeline(Closeable):
    """Questions in, cited answers out."""

    def __init__(
        self,
        retriever: RetrieverLike,
        engine: EngineLike,
        prompts: PromptBuilder,
        *,
        num_passages: int = 3,
        generation: GenerationConfig | None = None,
    ) -> None:
        self.engine = engine
        self._retriever, self._prompts, self._num_passages = retriever, prompts, num_passages
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

    def ask(self, question: str, params: SamplingParams | None = None, **options: Unpack[QuestionOptions]) -> Answer:
        """One question, one answer. Options as in `ask_many`. Raises: InputError, PromptTooLong."""
        return self.ask_many([question], params, **options)[0]

    def ask_many(
        self,
        questions: Sequence[str],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[QuestionOptions],
    ) -> list[Answer]:
        """Answer all questions in one batch of retriever and engine; with `n` choices, n answers per question, in order.

        Raises: InputError or PromptTooLong for the first question that cannot be asked, before any is generated.
        """
        prepared = self._prepare(questions, params, **options)
        completions = iter(self.engine.generate([each.request for each in prepared]))
        return [build_answer(each, next(completions)) for each in prepared for _ in each.request.choices]

    async def stream(
        self, question: str, params: SamplingParams | None = None, **options: Unpack[QuestionOptions]
    ) -> AsyncIterator[str | Answer]:
        """Pieces of text as they are decided, then the whole answer; one choice. Options as in `ask_many`.

        Leaving the loop early cancels the request. Raises: InputError, PromptTooLong, EngineError.
        """
        params = replace(params or self._defaults, n=1)
        # Why a thread: encoder and tokenizer would stop other streams for milliseconds
        (prepared,) = await asyncio.to_thread(self._prepare, [question], params, **options)
        deltas: list[Delta] = []
        async for delta in self.engine.stream(prepared.request):
            deltas.append(delta)
            if delta.text:
                yield delta.text
        yield build_answer(prepared, completion_of(deltas))

    def close(self) -> None:
        self.engine.close()

    def _prepare(
        self,
        questions: Sequence[str],
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        num_passages: int | None = None,
        speculation: SpeculationGiven = True,
        tenant: str = "",
        filter: Mapping[str, Any] | None = None,
    ) -> list[PreparedQuestion]:
        k = self._num_passages if num_passages is None else num_passages
        shared = k, parse_scope(tenant, filter), Speculation.of(speculation)
        each = zip(questions, params_of_each(questions, params, self._defaults), strict=True)
        asked = [Question(uuid.uuid4().hex, text, own_params, *shared) for text, own_params in each]
        return [build_request(retrieved, self._prompts) for retrieved in retrieve_passages(self._retriever, asked)]

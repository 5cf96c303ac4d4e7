"""Answers in whose course passages are retrieved many times: In-Context RALM, FLARE and Iter-RetGen, with guessed retrievals.

    >>> with IterativePipeline.from_config(load_config("ragspec.yaml")) as pipeline:
    ...     answer = pipeline.ask("What does json.dumps do?")
    ...     print(answer.text, answer.stats.iterative.num_right)

The text is that of retrieving each time and waiting for it (`guessing=False`), for any index, policy and stride.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Self

from ragspec.config import GenerationConfig, PipelineConfig, SpeculationConfig
from ragspec.core import GenerationStats, Passage, SamplingParams
from ragspec.engine.loading import load_engine
from ragspec.engine.text import IncrementalDetokenizer, detokenize
from ragspec.errors import InputError
from ragspec.numerics.noise import random_seed
from ragspec.rag.answer import Answer, AnswerStats
from ragspec.rag.citations import find_citations
from ragspec.rag.iterative.policies import InContextRalm, PartialAnswer, Policy
from ragspec.rag.iterative.ralmspec import RalmSpec
from ragspec.rag.iterative.types import IterativeRequest, PipelineComponents, SpeculationStep
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.steps import EngineLike, default_params, parse_scope
from ragspec.retrieval.retriever import Retriever
from ragspec.retrieval.search.index_types import IndexLike, PassageKey
from ragspec.retrieval.speculative.speculation_cache import SearchBatcher, passage_keys
from ragspec.retrieval.speculative.stride import StrideScheduler
from ragspec.speculation import Speculation, SpeculationGiven


class IterativePipeline:
    """Questions in, cited answers out; every answer sees the one generation of the index that was current when it began."""

    def __init__(
        self,
        index: IndexLike,
        engine: EngineLike,
        prompts: PromptBuilder,
        *,
        policy: Policy | None = None,
        speculation: SpeculationConfig | None = None,
        generation: GenerationConfig | None = None,
        scheduler: StrideScheduler | None = None,
        max_in_flight: int = 32,
    ) -> None:
        """`scheduler`: one of your own, or one that has learned the costs of this index; then `speculation` has no say in it."""
        config = speculation or SpeculationConfig()
        self._pinned = index.pinned()
        self._index = index
        self._engine = engine
        self._guessing = config.enabled
        asynchronous = config.asynchronous and index.is_elsewhere
        self._scheduler = scheduler or StrideScheduler(config.stride, asynchronous=asynchronous)
        self._lookups = SearchBatcher(config.max_batch_queries)
        self._tools = PipelineComponents(
            engine, prompts, self._lookups, self._scheduler, policy or InContextRalm(), config
        )
        self._defaults = default_params(generation or GenerationConfig())
        self._max_in_flight = max_in_flight

    @classmethod
    def from_config(cls, config: PipelineConfig | None = None, policy: Policy | None = None) -> Self:
        """As `Pipeline.from_config`, but that the policy says how many passages are retrieved.

        Raises: ConfigError, StoreError, ModelError.
        """
        config = config or PipelineConfig()
        index = Retriever.from_config(config.retriever, config.encoder)
        engine = load_engine(config.target, config.engine, config.drafting)
        prompts = PromptBuilder(engine.target.tokenizer, engine.max_context_tokens)
        return cls(index, engine, prompts, policy=policy, speculation=config.speculation, generation=config.generation)

    @property
    def scheduler(self) -> StrideScheduler:
        """What is known of the costs of this index, and the plan that follows."""
        return self._scheduler

    def ask(self, question: str, params: SamplingParams | None = None, **options: Any) -> Answer:
        """One question, one answer. Options as in `ask_many`."""
        return self.ask_many([question], params, **options)[0]

    def ask_many(
        self,
        questions: Sequence[str],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        guessing: bool = True,
        speculation: SpeculationGiven = True,
        tenant: str = "",
        filter: Mapping[str, Any] | None = None,
    ) -> list[Answer]:
        """Answer all at once; their lookups and decode steps are shared. In an event loop, which this blocks, use `answer`.

        `guessing`: whether retrievals are guessed; `speculation`: how tokens are drafted, if at all. Neither changes the text,
        unless `speculation` names another acceptance rule.
        Raises: InputError or PromptTooLong for a question that cannot be asked, RetrievalError if the index does not answer,
        EngineError; then all are given up.
        """
        options = {"guessing": guessing, "speculation": speculation, "tenant": tenant, "filter": filter}
        each = params if isinstance(params, Sequence) else [params] * len(questions)
        if len(each) != len(questions):
            raise InputError(f"{len(questions)} questions came with {len(each)} sets of sampling parameters")
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self._answer_all(questions, each, options))
        with ThreadPoolExecutor(1) as thread:  # Why: a notebook's thread has an event loop already
            return thread.submit(lambda: asyncio.run(self._answer_all(questions, each, options))).result()

    async def _answer_all(
        self, questions: Sequence[str], params: Sequence[SamplingParams | None], options: dict[str, Any]
    ) -> list[Answer]:
        orders = [await self._order(*each, **options) for each in zip(questions, params, strict=True)]
        room = asyncio.Semaphore(self._max_in_flight)

        async def answer(order: IterativeRequest) -> Answer:
            async with room:
                return await self._answered(order)

        tasks = [asyncio.ensure_future(answer(order)) for order in orders]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def answer(self, question: str, params: SamplingParams | None = None, **options: Any) -> Answer:
        """One answer, for use in an event loop. Options and errors as in `ask_many`."""
        return await self._answered(await self._order(question, params, **options))

    async def stream(
        self, question: str, params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[str | Answer]:
        """Pieces of text as soon as their passages are verified and no round will change them, then the whole answer.

        Leaving the loop early gives the answer up. Options and errors as in `ask_many`.
        """
        order = await self._order(question, params, **options)
        told: asyncio.Queue[tuple[int, ...] | None] = asyncio.Queue()
        answering = asyncio.ensure_future(self._answered(order, told.put_nowait))
        answering.add_done_callback(lambda _: told.put_nowait(None))
        text, count, sent = IncrementalDetokenizer(self._tools.prompts.tokenizer, order.params.stop), 0, 0
        try:
            while (output_ids := await told.get()) is not None:
                for count, token in enumerate(output_ids[count:], count + 1):  # noqa: B020
                    text.push(token, may_stop=count > order.params.min_tokens)
                if piece := text.take():
                    sent += len(piece)
                    yield piece
            answer = await answering
            if piece := answer.text[sent:]:
                yield piece
            yield answer
        finally:
            answering.cancel()

    def close(self) -> None:
        """Ends the engine, too."""
        self._lookups.close()
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _order(
        self,
        question: str,
        params: SamplingParams | None,
        *,
        guessing: bool = True,
        speculation: SpeculationGiven = True,
        tenant: str = "",
        filter: Mapping[str, Any] | None = None,
    ) -> IterativeRequest:
        """Raises: InputError."""
        self._tools.prompts.check(question)
        settled, scope = self._settled(params or self._defaults), parse_scope(tenant, filter)
        index = await asyncio.to_thread(self._current)
        return IterativeRequest(
            question, settled, index, scope, guessing and self._guessing, Speculation.of(speculation)
        )

    async def _answered(
        self, order: IterativeRequest, told: Callable[[tuple[int, ...]], None] = lambda _: None
    ) -> Answer:
        run = RalmSpec(self._tools, order, told)
        progress, steps = await run.run()
        return self._answer(order, run, progress, steps)

    def _settled(self, params: SamplingParams) -> SamplingParams:
        """With the seed that all segments share. Raises: InputError."""
        if params.n != 1:
            raise InputError("an iterative answer has one choice: n must be 1")
        return replace(params, seed=random_seed() if params.seed is None else params.seed)

    def _current(self) -> IndexLike:
        """The current generation; one object as long as it is the same, so that answers share their lookups."""
        pinned = self._index.pinned()
        if pinned.generation != self._pinned.generation:
            self._pinned = pinned
        return self._pinned

    def _answer(
        self, order: IterativeRequest, run: RalmSpec, progress: PartialAnswer, steps: Sequence[SpeculationStep]
    ) -> Answer:
        text = detokenize(self._tools.prompts.tokenizer, progress.output_ids, order.params)
        fitted = {key for step in steps for key in passage_keys(run.segments.prompt(step.passages).passages)}
        met = _distinct(passage for step in steps for passage in step.passages)
        passages = tuple(passage for key, passage in met.items() if key in fitted)
        generation = _generation_stats(steps, order, len(progress.output_ids))
        return Answer(
            order.question,
            text,
            tuple(find_citations(text, passages, numbered=False)),
            passages,
            tuple(passage for key, passage in met.items() if key not in fitted),
            progress.finish_reason,
            progress.output_ids,
            progress.logprobs if order.params.logprobs is not None else (),
            AnswerStats(run.stats.wait_s, 0.0, order.index.generation, generation, run.stats, run.missing),
        )


def _distinct(passages: Iterable[Passage]) -> dict[PassageKey, Passage]:
    """Each once, as it was met first."""
    met: dict[PassageKey, Passage] = {}
    for passage in passages:
        met.setdefault(passage_keys([passage])[0], passage)
    return met


def _generation_stats(steps: Sequence[SpeculationStep], order: IterativeRequest, num_tokens: int) -> GenerationStats:
    """The counters of all segments that stand, added up; of one that stands twice, once. `num_tokens` are in the answer."""
    total = GenerationStats(seed=order.params.seed or 0)
    for given in {id(step.written): step.written.stats for step in steps if step.written is not None}.values():
        total.add(given)
    total.num_output_tokens = num_tokens
    return total

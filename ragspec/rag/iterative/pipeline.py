"""Answers with many retrievals: In-Context RALM, FLARE and Iter-RetGen, with speculated retrievals.

    >>> with IterativePipeline.from_config(load_config("ragspec.yaml")) as pipeline:
    ...     answer = pipeline.ask("What does json.dumps do?")
    ...     print(answer.text, answer.stats.iterative.num_right)

The text equals that of waiting for every retrieval (`guessing=False`), for any index, policy and stride.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, Unpack

from ragspec.config import GenerationConfig, PipelineConfig, SpeculationConfig, settings_of
from ragspec.core import GenerationStats, Passage, SamplingOptions, SamplingParams, Say, log_progress
from ragspec.engine.loading import load_engine
from ragspec.engine.text import IncrementalDetokenizer, detokenize
from ragspec.errors import ConfigError, InputError
from ragspec.numerics.noise import random_seed
from ragspec.rag.answer import Answer, AnswerStats, AnswerStream
from ragspec.rag.iterative.policies import InContextRalm, Policy
from ragspec.rag.iterative.ralmspec import IterativeRequest, OnFinal, PipelineComponents, RalmSpec, SpeculationStep
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.steps import Closeable, EngineLike, default_params, params_of_each, parse_scope
from ragspec.rag.support import find_support
from ragspec.retrieval.batching_retriever import SearchBatcher
from ragspec.retrieval.encoder import TextEncoder
from ragspec.retrieval.expansion import WidePassage, is_part, joined
from ragspec.retrieval.retriever import Retriever
from ragspec.retrieval.speculative.stride import StrideScheduler
from ragspec.speculation import Speculation, SpeculationGiven

_MAX_BATCH_QUERIES = 16
"""Of one lookup, over all requests."""


class IterativeOptions(SamplingOptions, total=False):
    """`guessing`: whether retrievals are speculated; `speculation`: how tokens are drafted. `filter`: JSON form."""

    guessing: bool
    speculation: SpeculationGiven
    tenant: str
    filter: Mapping[str, Any] | None


class IterativePipeline(Closeable):
    """Questions in, cited answers out. Each answer uses the one index generation that was current when it began."""

    def __init__(
        self,
        index: Retriever,
        engine: EngineLike,
        prompts: PromptBuilder,
        *,
        policy: Policy | None = None,
        speculation: SpeculationConfig | None = None,
        generation: GenerationConfig | None = None,
        scheduler: StrideScheduler | None = None,
        asynchronous: bool = True,
        max_in_flight: int = 32,
    ) -> None:
        """`scheduler` replaces the one that `speculation.stride` describes, for example by one that has learned the costs.
        `asynchronous`: decoding continues during verification if the index is in another process."""
        config = speculation or SpeculationConfig()
        self._index, self._pinned = index, index.pinned()
        self._guessing = config.enabled
        scheduler = scheduler or StrideScheduler(config.stride, asynchronous=asynchronous and index.is_elsewhere)
        batcher = SearchBatcher(_MAX_BATCH_QUERIES)
        self._components = PipelineComponents(engine, prompts, batcher, scheduler, policy or InContextRalm(), config)
        self._defaults = default_params(generation or GenerationConfig())
        self._max_in_flight = max_in_flight

    @classmethod
    def from_config(
        cls,
        config: PipelineConfig | str | Path | None = None,
        policy: Policy | None = None,
        *,
        encoder: TextEncoder | None = None,
        say: Say = log_progress,
    ) -> Self:
        """As `Pipeline.from_config`, except that the policy sets the number of passages.

        Raises: ConfigError, StoreError, ModelError.
        """
        config = settings_of(config)
        if config.prompts.require_support:
            raise ConfigError(
                "prompts.require_support withholds one-shot and chat answers; iterative ones are not withheld"
            )
        index = Retriever.from_config(config.retriever, encoder or config.encoder)
        engine = load_engine(config.target, config.engine, config.drafting, say=say)
        prompts = PromptBuilder(engine.target.tokenizer, engine.max_context_tokens, config.wording)
        return cls(index, engine, prompts, policy=policy, speculation=config.speculation, generation=config.generation)

    @property
    def scheduler(self) -> StrideScheduler:
        """The measured costs of this index and the plan chosen from them."""
        return self._components.scheduler

    def ask(self, question: str, params: SamplingParams | None = None, **options: Unpack[IterativeOptions]) -> Answer:
        """One question, one answer. Options and errors as in `ask_many`."""
        return self.ask_many([question], params, **options)[0]

    def ask_many(
        self,
        questions: Sequence[str],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[IterativeOptions],
    ) -> list[Answer]:
        """Answer all questions at once; they share searches and decode steps. Blocks: in an event loop use `answer`.

        No option changes the text, unless `speculation` names another acceptance rule.
        Raises: InputError or PromptTooLong for a question that cannot be asked, RetrievalError if the index does not answer,
        EngineError; the first error cancels all questions.
        """
        answering = self._answer_all(questions, params_of_each(questions, params, self._defaults), options)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(answering)
        with ThreadPoolExecutor(1) as thread:  # Why a thread: a notebook's thread already runs an event loop
            return thread.submit(asyncio.run, answering).result()

    async def _answer_all(
        self, questions: Sequence[str], params: Sequence[SamplingParams], options: IterativeOptions
    ) -> list[Answer]:
        requests = [await self._request(*each, **options) for each in zip(questions, params, strict=True)]
        semaphore = asyncio.Semaphore(self._max_in_flight)

        async def answer(request: IterativeRequest) -> Answer:
            async with semaphore:
                return await self._answer(request)

        tasks = [asyncio.ensure_future(answer(request)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def answer(
        self, question: str, params: SamplingParams | None = None, **options: Unpack[IterativeOptions]
    ) -> Answer:
        """One answer, for use in an event loop. Options and errors as in `ask_many`."""
        return await self._answer(await self._request(question, params, **options))

    def stream(
        self, question: str, params: SamplingParams | None = None, **options: Unpack[IterativeOptions]
    ) -> AnswerStream:
        """Pieces of text once they are verified and no later round can change them, then the whole answer.

        Options and errors as in `ask_many`.
        """
        return AnswerStream(self._pieces(question, params, options))

    async def _pieces(
        self, question: str, params: SamplingParams | None, options: IterativeOptions
    ) -> AsyncGenerator[str | Answer]:
        request = await self._request(question, params, **options)
        outputs: asyncio.Queue[tuple[int, ...] | None] = asyncio.Queue()
        answering = asyncio.ensure_future(self._answer(request, outputs.put_nowait))
        answering.add_done_callback(lambda _: outputs.put_nowait(None))
        text = IncrementalDetokenizer(self._components.prompts.tokenizer, request.params.stop)
        num_tokens = num_chars = 0
        try:
            while (output_ids := await outputs.get()) is not None:
                for token in output_ids[num_tokens:]:
                    num_tokens += 1
                    text.push(token, may_stop=num_tokens > request.params.min_tokens)
                if piece := text.take():
                    num_chars += len(piece)
                    yield piece
            answer = await answering
            if piece := answer.text[num_chars:]:
                yield piece
            yield answer
        finally:
            answering.cancel()

    def close(self) -> None:
        """Close the engine, too."""
        self._components.search_batcher.close()
        self._components.engine.close()

    async def _request(
        self,
        question: str,
        params: SamplingParams | None,
        *,
        guessing: bool = True,
        speculation: SpeculationGiven = True,
        tenant: str = "",
        filter: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> IterativeRequest:
        """Raises: InputError."""
        self._components.prompts.check(question)
        (params,) = params_of_each([question], params, self._defaults, sampling)
        if params.n != 1:
            raise InputError("an iterative answer has one choice: n must be 1")
        if params.seed is None:
            params = replace(params, seed=random_seed())  # all segments share it
        scope, index = parse_scope(tenant, filter), await asyncio.to_thread(self._current_index)
        guessing = guessing and self._guessing
        return IterativeRequest(question, params, index, scope, guessing, Speculation.of(speculation))

    def _current_index(self) -> Retriever:
        """The index's current generation. Why the same object as long as it is current: its answers share searches."""
        pinned = self._index.pinned()
        if pinned.generation != self._pinned.generation:
            self._pinned = pinned
        return self._pinned

    async def _answer(self, request: IterativeRequest, on_final: OnFinal = lambda _: None) -> Answer:
        run = RalmSpec(self._components, request, on_final)
        final, steps = await run.run()
        text = detokenize(self._components.prompts.tokenizer, final.output_ids, request.params)
        prompts = [run.writer.prompt(step.passages) for step in steps]
        found = [passage for step in steps for passage in step.passages]
        shown = [passage for prompt in prompts for passage in prompt.passages]
        if any(isinstance(passage, WidePassage) for passage in found):
            shown = joined(shown)  # Why: a passage may have had other neighbours in another step
        # a prompt may be that of an earlier guess
        score_of = {passage.id: passage.score for passage in reversed(found)}
        passages = [replace(passage, score=score_of[passage.id]) for passage in _distinct(shown)]
        dropped = _distinct(replace(p, score=score_of[p.id]) for prompt in prompts for p in prompt.dropped)
        generation = _generation_stats(steps, request, len(final.output_ids))
        missing = tuple(sorted(run.missing))
        asked = None if self._components.prompts.quotes_first else request.question
        support = find_support(text, passages, asked, numbered=False)
        return Answer(
            request.question,
            text,
            support.citations,
            tuple(passages),
            tuple(passage for passage in dropped if not is_part(passage, passages)),
            final.finish_reason,
            final.output_ids,
            final.logprobs if request.params.logprobs is not None else (),
            AnswerStats(run.stats.wait_s, 0.0, request.index.generation, generation, run.stats, missing),
            support.sentences,
            support.unknown_quotations,
        )


def _distinct(passages: Iterable[Passage]) -> list[Passage]:
    """The first of each name."""
    found: dict[str, Passage] = {}
    for passage in passages:
        found.setdefault(passage.id, passage)
    return list(found.values())


def _generation_stats(steps: Sequence[SpeculationStep], request: IterativeRequest, num_tokens: int) -> GenerationStats:
    """The sum over all segments of the answer; a segment used twice counts once. `num_tokens`: tokens of the answer."""
    total = GenerationStats(seed=request.params.seed or 0)
    completions = {id(step.completion): step.completion for step in steps if step.completion is not None}
    for completion in completions.values():
        total.add(completion.stats)
    total.num_output_tokens = num_tokens
    return total

"""RaLMSpec: one answer with many retrievals, speculated from a cache and verified in batches.

The steps of the paper's algorithm, in order:

    speculate   the request's speculation cache guesses the passages of a query; an empty cache asks the index and waits
    generate    the target writes one segment under the guessed passages
    verify      after `stride` guesses, one batched search gives the true passages; the cache keeps what the search returns
    roll back   at the first wrong guess, discard its step and all later ones; their text is the draft of the new text

With asynchronous verification, up to `overlap` segments are generated while the search runs. Stride 1 without overlap is
plain retrieval: search, wait, generate. So the scheduler can turn speculation off by its plan alone. The answer contains only
text generated under passages that the index returned for its query, in the generation that was current at the start.

A segment depends only on its passages, the output before it, and its end. So a segment that is the same after a rollback is not
generated again.

Source: Zhang et al. 2024, Accelerating Retrieval-Augmented Language Model Serving with Speculation (arXiv 2401.14021).
"""

import asyncio
import itertools
import operator
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from ragspec.config import SpeculationConfig
from ragspec.core import Completion, Passage, Request, SamplingParams, Segment
from ragspec.engine.client import completion_of
from ragspec.errors import RetrievalError
from ragspec.rag.answer import IterativeStats
from ragspec.rag.iterative.policies import PartialAnswer, Policy, RetrievalRound
from ragspec.rag.prompt import Prompt, PromptBuilder
from ragspec.rag.steps import EngineLike, copy_sources
from ragspec.retrieval.batching_retriever import SearchBatcher
from ragspec.retrieval.retriever import Retriever
from ragspec.retrieval.search.segment_search import Lookup, PassageKey, Query, SearchResult, SearchScope
from ragspec.retrieval.speculative.speculation_cache import SpeculationCache, passage_keys
from ragspec.retrieval.speculative.stride import StrideScheduler
from ragspec.speculation import Speculation


@dataclass(frozen=True, slots=True)
class PipelineComponents:
    """What all answers of a pipeline share."""

    engine: EngineLike
    prompts: PromptBuilder
    search_batcher: SearchBatcher
    scheduler: StrideScheduler
    policy: Policy
    config: SpeculationConfig


@dataclass(frozen=True, slots=True)
class IterativeRequest:
    """`index` is pinned to one generation; `params.seed` is set. `guessing`: whether retrievals are speculated."""

    question: str
    params: SamplingParams
    index: Retriever
    scope: SearchScope
    guessing: bool
    drafting: Speculation


@dataclass(slots=True, eq=False)
class SpeculationStep:
    """One retrieval round: its query, its passages (speculated or verified), and the segment generated with them.

    `answer`: the partial answer before the round. `seconds`: the time for encoding and guessing.
    """

    answer: PartialAnswer
    round: RetrievalRound
    query: Query | None
    passages: list[Passage]
    verified: bool
    completion: Completion | None = None
    token_ids: list[int] = field(default_factory=list)  # generated so far
    seconds: float = 0.0

    @property
    def result(self) -> PartialAnswer:
        """The partial answer after the round."""
        assert self.completion is not None
        return self.answer.after(self.round, self.completion)


PassageKeys = tuple[PassageKey, ...]


class SegmentWriter:
    """Owns the prompts and every completion of one answer, including completions that were rolled back."""

    def __init__(self, components: PipelineComponents, request: IterativeRequest, stats: IterativeStats) -> None:
        self._components, self._request, self._stats = components, request, stats
        self._prompts: dict[PassageKeys, Prompt] = {}
        self._completions: dict[tuple[PassageKeys, tuple[int, ...], int], Completion] = {}
        self._rolled_back: tuple[int, ...] = ()  # the output that was rolled back last

    def prompt(self, passages: Sequence[Passage]) -> Prompt:
        """Raises: InputError, PromptTooLong."""
        keys = passage_keys(passages)
        if keys not in self._prompts:
            question, max_tokens = self._request.question, self._request.params.max_tokens
            self._prompts[keys] = self._components.prompts.build(question, passages, max_tokens, question_first=True)
        return self._prompts[keys]

    def roll_back(self, steps: Sequence[SpeculationStep]) -> None:
        """Discard these consecutive steps and keep their text as a draft."""
        lost = [step for step in steps if step.token_ids]
        if lost:
            self._stats.num_lost_tokens += sum(len(step.token_ids) for step in lost)
            self._rolled_back = (*lost[-1].round.output_ids, *lost[-1].token_ids)

    async def write(self, step: SpeculationStep, overlapped: bool) -> None:
        """Generate the step's segment, or reuse an equal one. `overlapped`: a verification runs meanwhile."""
        round, key = step.round, (passage_keys(step.passages), step.round.output_ids, step.round.end)
        kept = len(round.output_ids)  # the rolled-back tokens after this output are its draft, if they continue it
        draft = self._rolled_back[kept:] if self._rolled_back[:kept] == round.output_ids else ()
        step.completion = self._completions.get(key)
        if step.completion is None:
            segment = Segment(round.output_ids, round.end, draft or round.draft_ids)
            step.completion = await self._generate_timed(step, segment, overlapped)
            if self._request.guessing:
                self._completions[key] = step.completion
        step.token_ids = list(step.completion.token_ids)
        self._stats.num_kept_tokens += sum(itertools.takewhile(bool, map(operator.eq, draft, step.token_ids)))

    async def _generate_timed(self, step: SpeculationStep, segment: Segment, overlapped: bool) -> Completion:
        """Generate, and tell the scheduler the time and the load."""
        scheduler, begin = self._components.scheduler, time.perf_counter()
        num_writing = scheduler.count("writing", 1)
        try:
            completion = await self._generate(step, segment)
        finally:
            num_writing += scheduler.count("writing", -1) + 1
            self._stats.write_s += (write_s := time.perf_counter() - begin)
        num_in_flight = scheduler.count("in_flight", 0)
        scheduler.note_step(
            step.seconds + write_s, overlapped, num_writing=num_writing / 2, num_in_flight=num_in_flight
        )
        return completion

    async def _generate(self, step: SpeculationStep, segment: Segment) -> Completion:
        request, prompt = self._request, self.prompt(step.passages)
        params = request.params
        if params.logprobs is None and self._components.policy.needs_logprobs:
            params = replace(params, logprobs=0)
        sources = copy_sources(request.question, prompt.passages)
        engine_request = Request(
            uuid.uuid4().hex, prompt.prompt_ids, params, sources, request.scope.tenant, request.drafting, segment
        )
        deltas = []
        async for delta in self._components.engine.stream(engine_request):
            step.token_ids += delta.token_ids
            deltas.append(delta)
        return completion_of(deltas)


SEARCH_TIMEOUT_S = 60.0

T = TypeVar("T")
OnFinal = Callable[[tuple[int, ...]], None]
"""Takes all output tokens that can no longer change, each time there are more of them."""


class _PendingSearch(NamedTuple):
    """A search in flight. `steps`: the speculated steps that it verifies; `took_s`: its duration, once it has ended."""

    steps: list[SpeculationStep]
    queries: list[Query]
    future: asyncio.Future[SearchResult]
    took_s: list[float]


class RalmSpec:
    """Generates one answer; used once. Owns the speculation cache and the steps that may be rolled back."""

    def __init__(self, components: PipelineComponents, request: IterativeRequest, on_final: OnFinal) -> None:
        self._components, self._request, self._on_final = components, request, on_final
        self._num_final = 0
        self._queries: dict[str, Query] = {}
        self._verified: dict[Query, list[Passage]] = {}
        self._cache = SpeculationCache(request.index.mode, request.index.relevance)
        self._steps: list[SpeculationStep] = []
        self._verification: _PendingSearch | None = None
        self._num_overlapped = 0  # segments generated since the verification started
        self.missing: set[str] = set()  # segments of the index that some search could not read
        self._plan = components.scheduler.choose()
        self.stats = IterativeStats()
        self.writer = SegmentWriter(components, request, self.stats)

    async def run(self) -> tuple[PartialAnswer, list[SpeculationStep]]:
        """The finished answer and its verified steps, in order. Raises: RetrievalError, InputError, EngineError."""
        begin, scheduler = time.perf_counter(), self._components.scheduler
        scheduler.count("in_flight", 1)
        try:
            answer = await self._run()
        finally:
            scheduler.count("in_flight", -1)
            if self._verification is not None:
                self._verification.future.cancel()
        self.stats.num_rounds = answer.num_rounds
        self.stats.total_s = time.perf_counter() - begin
        return answer, self._steps

    async def _run(self) -> PartialAnswer:
        question = self._request.question
        (question_ids,) = self._components.prompts.plain_ids([question])
        start = PartialAnswer(question, tuple(question_ids), self._request.params.max_tokens)
        while True:
            answer = self._steps[-1].result if self._steps else start
            round = self._components.policy.next(answer, self._decode)
            if round is None:
                if await self._verify(all_steps=True):
                    return answer
                continue
            self._steps.append(await self._speculate(answer, round))
            self._report_final()
            if await self._verify():
                await self._generate(self._steps[-1])

    def _report_final(self) -> None:
        """Output before the first unverified round is final, as is output that the policy of the last round keeps."""
        first = next((step for step in self._steps if not step.verified), self._steps[-1])
        if len(first.round.output_ids) > self._num_final:
            self._num_final = len(first.round.output_ids)
            self._on_final(first.round.output_ids)

    async def _speculate(self, answer: PartialAnswer, round: RetrievalRound) -> SpeculationStep:
        """A step with passages: the previous ones, verified ones of an equal query, guessed ones, or the index's."""
        if round.query is None:
            return SpeculationStep(answer, round, None, self._steps[-1].passages if self._steps else [], verified=True)
        begin = time.perf_counter()
        query = await self._encode(round.query)
        self.stats.encode_s += (encode_s := time.perf_counter() - begin)
        step = SpeculationStep(answer, round, query, [], verified=True, seconds=encode_s)
        if self._request.guessing and query in self._verified:
            step.passages = self._verified[query]
        elif self._is_speculating and self._cache.can_guess:
            step.passages = self._cache.guess(query, self._components.policy.num_passages)
            step.verified, step.seconds = False, time.perf_counter() - begin
        else:
            step.passages = (await self._finish_search(self._start_search([], [query]))).passages[0]
            if self._verification is None:
                self._plan = self._components.scheduler.choose()
        return step

    async def _encode(self, text: str) -> Query:
        if text not in self._queries:
            encoding = asyncio.wrap_future(self._components.search_batcher.encode(self._request.index, [text]))
            (self._queries[text],) = await self._wait_for(encoding)
        return self._queries[text]

    async def _generate(self, step: SpeculationStep) -> None:
        """Generate the step's segment; stop as soon as the verification in flight finds a wrong guess."""
        writing = asyncio.ensure_future(self.writer.write(step, overlapped=self._verification is not None))
        # Why: asyncio logs exceptions that nobody retrieves
        writing.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            while not writing.done() and self._verification is not None:
                both: list[asyncio.Future[Any]] = [writing, self._verification.future]
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if not writing.done() and not await self._finish_verification():
                    return
            await writing
        finally:
            writing.cancel()

    async def _verify(self, all_steps: bool = False) -> bool:
        """Verify `stride` steps when there are as many, or all steps. False: the last step was rolled back.

        Returns while a search is in flight as long as the plan allows more segments beside it.
        """
        while self._verification is not None or len(self._unverified()) >= (1 if all_steps else self._plan.stride):
            if self._verification is None:
                steps = self._unverified()
                self._num_overlapped = 0
                self._verification = self._start_search(steps, [step.query for step in steps if step.query])
            if not (all_steps or self._verification.future.done()) and self._num_overlapped < self._plan.overlap:
                self._num_overlapped += 1
                return True
            if not await self._finish_verification():
                return False
        return True

    def _unverified(self) -> list[SpeculationStep]:
        return [step for step in self._steps if not step.verified]

    async def _finish_verification(self) -> bool:
        """Compare guessed with true passages. False: a guess was wrong and its step was rolled back."""
        assert self._verification is not None
        steps = self._verification.steps
        result = await self._finish_search(self._verification)
        self._verification, self._num_overlapped = None, 0
        num_right = 0
        for step, passages in zip(steps, result.passages, strict=True):
            if passage_keys(step.passages) != passage_keys(passages):
                break
            step.verified, step.passages, num_right = True, passages, num_right + 1
        is_wrong = num_right < len(steps)
        self.stats.num_right += num_right
        self.stats.num_wrong += is_wrong
        self.stats.strides.append(len(steps))
        self._components.scheduler.note_guesses(num_right, int(is_wrong))
        self._plan = self._components.scheduler.choose()
        if is_wrong:
            first = self._steps.index(steps[num_right])  # later steps depend on it, even if their own guess is right
            self.writer.roll_back(self._steps[first:])
            del self._steps[first:]
        return not is_wrong

    @property
    def _is_speculating(self) -> bool:
        return self._request.guessing and (self._plan.learns or self._verification is not None)

    def _start_search(self, steps: list[SpeculationStep], queries: list[Query]) -> _PendingSearch:
        """Why prefetch before the first guess, too: with a poorer cache the measured hit rate would be too low."""
        request, is_speculating = self._request, self._is_speculating
        prefetch_k = self._components.config.prefetch_k if is_speculating else 0
        known = self._cache.known if is_speculating else frozenset()
        lookup = Lookup(queries, self._components.policy.num_passages, request.scope, prefetch_k, known)
        self.stats.num_lookups += 1
        self.stats.num_retrievals += len(queries)
        begin, took_s = time.perf_counter(), list[float]()
        future = self._components.search_batcher.search(request.index, lookup)
        future.add_done_callback(lambda _: took_s.append(time.perf_counter() - begin))
        return _PendingSearch(steps, queries, asyncio.wrap_future(future), took_s)

    async def _finish_search(self, search: _PendingSearch) -> SearchResult:
        """Wait for a search. Why an incomplete result is not kept: the next search may find the missing segments."""
        begin = time.perf_counter()
        result = await self._wait_for(search.future)
        self.stats.wait_s += time.perf_counter() - begin
        self._components.scheduler.note_verification(len(search.queries), search.took_s[0], self._num_overlapped > 0)
        self.missing |= set(result.missing)
        if not result.missing:
            self._verified |= dict(zip(search.queries, result.passages, strict=True))
            if self._request.guessing:
                self._cache.insert(result)
        return result

    async def _wait_for(self, future: asyncio.Future[T]) -> T:
        try:
            return await asyncio.wait_for(future, SEARCH_TIMEOUT_S)
        except TimeoutError as cause:
            raise RetrievalError(f"the index did not answer within {SEARCH_TIMEOUT_S:g} s") from cause

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._components.prompts.tokenizer.decode(list(token_ids), skip_special_tokens=True))

"""The request, components and speculation steps of an iterative answer, and the generation of its segments.

A segment depends only on its passages, the output before it, and its end. So a segment that is the same after a rollback is
not generated again, and text that was rolled back is the draft of the text that replaces it.

    >>> await SegmentWriter(components, request, IterativeStats()).write(step, overlapped=False)
"""

from __future__ import annotations

import itertools
import operator
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ragspec.config import SpeculationConfig
from ragspec.core import Completion, Passage, Request, SamplingParams, Segment
from ragspec.engine.client import completion_of
from ragspec.rag.answer import IterativeStats
from ragspec.rag.iterative.policies import PartialAnswer, Policy, RetrievalRound
from ragspec.rag.prompt import Prompt, PromptBuilder
from ragspec.rag.steps import EngineLike, copy_sources
from ragspec.retrieval.batching_retriever import SearchBatcher
from ragspec.retrieval.search.index_types import IndexLike, PassageKey, Query
from ragspec.retrieval.search.segment_search import SearchScope
from ragspec.retrieval.speculative.speculation_cache import passage_keys
from ragspec.retrieval.speculative.stride import StrideScheduler
from ragspec.speculation import Speculation


class LoadCounter:
    """Counts of a pipeline: answers in flight, and answers that decode at the moment. Safe to call from several threads."""

    def __init__(self) -> None:
        self._counts, self._lock = Counter[str](), threading.Lock()

    def add(self, name: str, change: int) -> int:
        """The count after the change."""
        with self._lock:
            self._counts[name] += change
            return self._counts[name]


@dataclass(frozen=True, slots=True)
class PipelineComponents:
    """What all answers of a pipeline share."""

    engine: EngineLike
    prompts: PromptBuilder
    search_batcher: SearchBatcher
    scheduler: StrideScheduler
    policy: Policy
    config: SpeculationConfig
    load: LoadCounter = field(default_factory=LoadCounter)


@dataclass(frozen=True, slots=True)
class IterativeRequest:
    """`index` is pinned to one generation; `params.seed` is set. `guessing`: whether retrievals are speculated."""

    question: str
    params: SamplingParams
    index: IndexLike
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
        load, begin = self._components.load, time.perf_counter()
        num_writing = load.add("writing", 1)
        try:
            completion = await self._generate(step, segment)
        finally:
            num_writing += load.add("writing", -1) + 1
            self._stats.write_s += (write_s := time.perf_counter() - begin)
        self._components.scheduler.note_step(
            step.seconds + write_s, overlapped, num_writing=num_writing / 2, num_in_flight=load.add("in_flight", 0)
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

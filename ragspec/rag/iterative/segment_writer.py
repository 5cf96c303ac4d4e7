"""The writing of one iterative answer, segment by segment: prompts, drafts, and what was written before.

A segment is a function of its passages, of what stands before it and of its end. So one that comes out of a rollback as it was is
not written again, and what was taken back is the draft of what is written in its place.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import replace

from ragspec.core import Completion, Passage, Request, Segment
from ragspec.engine.client import completion_of
from ragspec.rag.answer import IterativeStats
from ragspec.rag.iterative.types import IterativeRequest, PipelineComponents, SpeculationStep
from ragspec.rag.prompt import Prompt
from ragspec.rag.steps import copy_sources
from ragspec.retrieval.search.index_types import PassageKey
from ragspec.retrieval.speculative.speculation_cache import passage_keys

Keys = tuple[PassageKey, ...]


class SegmentWriter:
    """Owns everything written for one answer, standing or taken back."""

    def __init__(self, tools: PipelineComponents, order: IterativeRequest, stats: IterativeStats) -> None:
        self._tools = tools
        self._order = order
        self._stats = stats
        self._prompts: dict[Keys, Prompt] = {}
        self._written: dict[tuple[Keys, tuple[int, ...], int], Completion] = {}
        self._discarded: tuple[int, ...] = ()  # the output that was taken back last

    def prompt(self, passages: Sequence[Passage]) -> Prompt:
        """Raises: InputError, PromptTooLong."""
        keys = passage_keys(passages)
        if keys not in self._prompts:
            question, max_tokens = self._order.question, self._order.params.max_tokens
            self._prompts[keys] = self._tools.prompts.build(question, passages, max_tokens, question_first=True)
        return self._prompts[keys]

    def take_back(self, steps: Sequence[SpeculationStep]) -> None:
        """These steps, in order, do not stand."""
        lost = [step for step in steps if step.token_ids]
        if lost:
            self._stats.num_lost_tokens += sum(len(step.token_ids) for step in lost)
            self._discarded = (*lost[-1].round.output_ids, *lost[-1].token_ids)

    async def write(self, step: SpeculationStep, beside: bool) -> None:
        """Under the step's passages: as was written before under the same, or by the engine. `beside` a verification."""
        round, known = step.round, (passage_keys(step.passages), step.round.output_ids, step.round.end)
        behind = self._discarded_behind(round.output_ids)
        step.written = self._written.get(known)
        if step.written is None:
            segment = Segment(round.output_ids, round.end, behind or round.draft_ids)
            step.written = await self._timed(step, segment, beside)
            if self._order.guessing:
                self._written[known] = step.written
        step.token_ids = list(step.written.token_ids)
        self._stats.num_kept_tokens += _num_matching(behind, step.token_ids)

    def _discarded_behind(self, output_ids: tuple[int, ...]) -> tuple[int, ...]:
        """What was taken back, where it goes on from here."""
        kept = len(output_ids)
        return self._discarded[kept:] if self._discarded[:kept] == output_ids else ()

    async def _timed(self, step: SpeculationStep, segment: Segment, beside: bool) -> Completion:
        """Written by the engine; the scheduler learns what that took, and in which company."""
        traffic, begin = self._tools.traffic, time.perf_counter()
        num_writing = traffic.writing(1)
        try:
            written = await self._generate(step, segment)
        finally:
            num_writing += traffic.writing(-1) + 1
            self._stats.write_s += (write_s := time.perf_counter() - begin)
        seconds, in_flight = step.seconds + write_s, traffic.in_flight(0)
        self._tools.scheduler.note_step(seconds, beside, num_writing=num_writing / 2, num_in_flight=in_flight)
        return written

    async def _generate(self, step: SpeculationStep, segment: Segment) -> Completion:
        order = self._order
        prompt = self.prompt(step.passages)
        sources = copy_sources(order.question, prompt.passages)
        params = order.params
        if params.logprobs is None and self._tools.policy.needs_logprobs:
            params = replace(params, logprobs=0)
        request = Request(
            uuid.uuid4().hex, prompt.prompt_ids, params, sources, order.scope.tenant, order.drafting, segment
        )
        deltas = []
        async for delta in self._tools.engine.stream(request):
            step.token_ids += delta.token_ids
            deltas.append(delta)
        return completion_of(deltas)


def _num_matching(draft_ids: Sequence[int], token_ids: Sequence[int]) -> int:
    """How many tokens stand at the place they were drafted for."""
    pairs = zip(draft_ids, token_ids, strict=False)
    return next(
        (i for i, (drafted, token) in enumerate(pairs) if drafted != token), min(len(draft_ids), len(token_ids))
    )

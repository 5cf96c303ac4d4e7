"""One answer written with many retrievals, each guessed first and verified in batches.

    round   the policy says with which words to retrieve and how far to write
    guess   what the request's cache would answer; without one, ask and wait
    send    `stride` guesses together, when the last of them is made and before it is written under
    write   under the guess; while a verification runs, as many rounds as the plan allows, else none
    settle  all right: go on. One wrong: go back to it, with the right passages; nothing written since is lost, it is the
            draft of what is written now, and rounds that come out as they were are not written again

With stride 1 and nothing beside, that is: ask, wait, write. So no speculation is a plan like any other. An answer holds only what
was written under passages that the index named for its query, in the generation the answer began with.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from ragspec.core import Passage
from ragspec.errors import RetrievalError
from ragspec.rag.answer import IterativeStats
from ragspec.rag.iterative.policies import PartialAnswer, RetrievalRound
from ragspec.rag.iterative.segment_writer import SegmentWriter
from ragspec.rag.iterative.types import IterativeRequest, PipelineComponents, SpeculationStep
from ragspec.retrieval.search.index_types import Query, SearchResult
from ragspec.retrieval.speculative.speculation_cache import PendingQuery, SearchParams, SpeculationCache, passage_keys

T = TypeVar("T")


class _PendingLookup(NamedTuple):
    """A lookup under way. `took_s` is filled when it ends, whenever somebody looks."""

    future: asyncio.Future[SearchResult]
    num_queries: int
    took_s: list[float]


class _PendingVerification(NamedTuple):
    """A verification under way."""

    steps: list[SpeculationStep]
    asking: _PendingLookup


class RalmSpec:
    """Writes one answer; used once. Owns the cache and everything that may have to be taken back."""

    def __init__(
        self, tools: PipelineComponents, order: IterativeRequest, told: Callable[[tuple[int, ...]], None]
    ) -> None:
        """`told` hears output tokens that are certain: verified, and kept by the policy. Each time all of them."""
        self._tools = tools
        self._order = order
        self._told = told
        self._num_told = 0
        self._queries: dict[str, Query] = {}
        self._answers: dict[Query, list[Passage]] = {}  # verified
        self._cache = SpeculationCache(order.index.mode)
        self._steps: list[SpeculationStep] = []
        self._sent: _PendingVerification | None = None
        self._num_beside = 0
        self._missing: set[str] = set()
        self._plan = tools.scheduler.choose()
        self.stats = IterativeStats()
        self.segments = SegmentWriter(tools, order, self.stats)

    async def run(self) -> tuple[PartialAnswer, list[SpeculationStep]]:
        """The finished output and the rounds that led to it, in order. Raises: RetrievalError, InputError, EngineError."""
        begin, traffic = time.perf_counter(), self._tools.traffic
        traffic.in_flight(1)
        try:
            head = await self._run()
        finally:
            traffic.in_flight(-1)
            if self._sent is not None:
                self._sent.asking.future.cancel()
        self.stats.num_rounds = head.num_rounds
        self.stats.total_s = time.perf_counter() - begin
        return head, self._steps

    async def _run(self) -> PartialAnswer:
        (question_ids,) = self._tools.prompts.plain_ids([self._order.question])
        start = PartialAnswer.start(self._order.question, question_ids, self._order.params.max_tokens)
        while True:
            head = self._head(start)
            round = self._tools.policy.next(head, self._decode)
            if round is None:
                if await self._settled():
                    return head
                continue
            self._steps.append(await self._begin(head, round))
            self._tell()
            if await self._verified_as_planned():
                await self._write_beside(self._steps[-1])

    @property
    def missing(self) -> tuple[str, ...]:
        """Segments of the index that could not be searched for some lookup."""
        return tuple(sorted(self._missing))

    @property
    def _guesses(self) -> bool:
        return self._order.guessing and (self._plan.learns or self._sent is not None)

    def _tell(self) -> None:
        """What the first round that is not verified, or else the last, builds on."""
        builds_on = next((step for step in self._steps if not step.verified), self._steps[-1]).round.output_ids
        if len(builds_on) > self._num_told:
            self._num_told = len(builds_on)
            self._told(builds_on)

    def _head(self, start: PartialAnswer) -> PartialAnswer:
        if not self._steps:
            return start
        last = self._steps[-1]
        assert last.written is not None
        return last.progress.after(last.round, last.written)

    async def _begin(self, head: PartialAnswer, round: RetrievalRound) -> SpeculationStep:
        """The round with its passages: those of the round before, an answer known already, a guess, or what the index says."""
        if round.query is None:
            return SpeculationStep(head, round, None, self._steps[-1].passages if self._steps else [], verified=True)
        begin = time.perf_counter()
        index, k = self._order.index, self._tools.policy.num_passages
        if round.query not in self._queries:
            encoding = asyncio.wrap_future(self._tools.lookups.encode(index, [round.query]))
            (self._queries[round.query],) = await self._wait_for(encoding)
        query = self._queries[round.query]
        self.stats.encode_s += (encode_s := time.perf_counter() - begin)
        if self._order.guessing and query in self._answers:
            return SpeculationStep(head, round, query, self._answers[query], verified=True, seconds=encode_s)
        if self._guesses and self._cache.can_guess:
            passages = self._cache.guess(query, k)
            seconds = time.perf_counter() - begin
            return SpeculationStep(head, round, query, passages, verified=False, seconds=seconds)
        lookup = await self._looked_up(self._look_up([query]))
        self._remember([query], lookup)
        if self._sent is None:
            self._plan = self._tools.scheduler.choose()
        return SpeculationStep(head, round, query, lookup.passages[0], verified=True, seconds=encode_s)

    async def _verified_as_planned(self) -> bool:
        """Send what is due, and settle what must be settled before anything more is written. False: the last round was taken
        back."""
        while True:
            unsent = self._unsent()
            if self._sent is None:
                if not unsent or len(unsent) < self._plan.stride:
                    return True
                self._send(unsent)
            assert self._sent is not None
            if not self._sent.asking.future.done() and self._num_beside < self._plan.overlap:
                self._num_beside += 1
                return True
            if not await self._settle():
                return False

    async def _settled(self) -> bool:
        """Everything is verified. False: something was taken back."""
        while self._sent is not None or self._unsent():
            if self._sent is None:
                self._send(self._unsent())
            if not await self._settle():
                return False
        return True

    def _unsent(self) -> list[SpeculationStep]:
        sent = self._sent.steps if self._sent else []
        return [step for step in self._steps if not step.verified and step not in sent]

    def _send(self, steps: list[SpeculationStep]) -> None:
        self._num_beside = 0
        self._sent = _PendingVerification(steps, self._look_up([step.query for step in steps if step.query]))

    async def _settle(self) -> bool:
        """Wait for the verification and follow it. False: it found a wrong guess."""
        assert self._sent is not None
        steps, asking = self._sent
        lookup = await self._looked_up(asking)
        self._sent, self._num_beside = None, 0
        self._remember([step.query for step in steps if step.query], lookup)
        right = [
            passage_keys(s.passages) == passage_keys(truth) for s, truth in zip(steps, lookup.passages, strict=True)
        ]
        num_right = right.index(False) if False in right else len(right)
        for step, passages in zip(steps[:num_right], lookup.passages, strict=False):
            step.verified, step.passages = True, passages
        self._note(len(steps), num_right)
        if num_right == len(steps):
            return True
        first_wrong = self._steps.index(steps[num_right])  # later rounds hang on it, whatever was guessed for them
        self.segments.take_back(self._steps[first_wrong:])
        del self._steps[first_wrong:]
        return False

    def _note(self, num_guesses: int, num_right: int) -> None:
        wrong = int(num_right < num_guesses)
        self.stats.num_right += num_right
        self.stats.num_wrong += wrong
        self.stats.strides.append(num_guesses)
        self._tools.scheduler.note_guesses(num_right, wrong)
        self._plan = self._tools.scheduler.choose()

    def _look_up(self, queries: Sequence[Query]) -> _PendingLookup:
        """Why prefetched while nothing is guessed yet, too: from a poorer cache, guesses would look worse than they will be."""
        order, guessing = self._order, self._guesses
        prefetch_k = self._tools.config.prefetch_k if guessing else 0
        asked = SearchParams(order.index, self._tools.policy.num_passages, order.scope, prefetch_k)
        known = self._cache.known if guessing else frozenset()
        self.stats.num_lookups += 1
        self.stats.num_retrievals += len(queries)
        begin, took_s = time.perf_counter(), list[float]()
        future = self._tools.lookups.search(asked, [PendingQuery(query, known) for query in queries])
        future.add_done_callback(lambda _: took_s.append(time.perf_counter() - begin))
        return _PendingLookup(asyncio.wrap_future(future), len(queries), took_s)

    async def _looked_up(self, asking: _PendingLookup) -> SearchResult:
        begin = time.perf_counter()
        lookup = await self._wait_for(asking.future)
        self.stats.wait_s += time.perf_counter() - begin
        self._tools.scheduler.note_verification(asking.num_queries, asking.took_s[0], self._num_beside > 0)
        if self._order.guessing and not lookup.missing:
            self._cache.insert(lookup)
        return lookup

    def _remember(self, queries: Sequence[Query], lookup: SearchResult) -> None:
        """Why not what a part of the index is missing from: the next lookup may find all of it."""
        self._missing |= set(lookup.missing)
        if not lookup.missing:
            self._answers |= dict(zip(queries, lookup.passages, strict=True))

    async def _wait_for(self, future: asyncio.Future[T]) -> T:
        timeout_s = self._tools.config.timeout_s
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError as cause:
            raise RetrievalError(f"the index did not answer within {timeout_s:g} s") from cause

    async def _write_beside(self, step: SpeculationStep) -> None:
        """Write while a verification runs, if one does; give up as soon as it finds a wrong guess."""
        writing = asyncio.ensure_future(self.segments.write(step, beside=self._sent is not None))
        writing.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # else asyncio logs what nobody awaits
        try:
            while not writing.done() and self._sent is not None:
                both: list[asyncio.Future[Any]] = [writing, self._sent.asking.future]
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if not writing.done() and not await self._settle():
                    return
            await writing
        finally:
            writing.cancel()

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tools.prompts.tokenizer.decode(list(token_ids), skip_special_tokens=True))

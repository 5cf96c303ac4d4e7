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
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from ragspec.config import SpeculationConfig
from ragspec.core import Completion, Delta, Passage, Request, SamplingParams, Segment
from ragspec.engine.collect import join
from ragspec.errors import RetrievalError
from ragspec.rag.answer import RunStats
from ragspec.rag.policies import Policy, Progress, Round
from ragspec.rag.prompt import Prompt, PromptBuilder
from ragspec.rag.sources import copy_sources
from ragspec.retrieval.lookup import IndexLike, Lookup, PassageKey, Query
from ragspec.retrieval.search import Scope
from ragspec.retrieval.speculation import Asked, Check, Lookups, SpeculationCache, keys_of
from ragspec.retrieval.stride import StrideScheduler

T = TypeVar("T")
Keys = tuple[PassageKey, ...]


class SegmentWriter(Protocol):
    """An engine as this module needs it."""

    def stream(self, request: Request) -> AsyncIterator[Delta]: ...


@dataclass(slots=True, eq=False)
class Step:
    """A round under way. `progress`: what was there before it."""

    progress: Progress
    round: Round
    query: Query | None
    passages: list[Passage]
    verified: bool
    written: Completion | None = None
    token_ids: list[int] = field(default_factory=list)  # written so far
    seconds: float = 0.0


class _Asking(NamedTuple):
    """A lookup under way. `took_s` is filled when it ends, whenever somebody looks."""

    future: asyncio.Future[Lookup]
    num_queries: int
    took_s: list[float]


class _Sent(NamedTuple):
    """A verification under way."""

    steps: list[Step]
    asking: _Asking


@dataclass(frozen=True, slots=True)
class Tools:
    """What all answers of a pipeline share."""

    engine: SegmentWriter
    prompts: PromptBuilder
    lookups: Lookups
    scheduler: StrideScheduler
    policy: Policy
    config: SpeculationConfig


@dataclass(frozen=True, slots=True)
class Order:
    """What one answer is asked for. `index` is pinned to one generation; `params.seed` is given."""

    question: str
    params: SamplingParams
    index: IndexLike
    scope: Scope
    guessing: bool
    drafting: bool


class SpeculativeRun:
    """Writes one answer; used once. Owns the cache and everything that may have to be taken back."""

    def __init__(self, tools: Tools, order: Order, told: Callable[[tuple[int, ...]], None]) -> None:
        """`told` hears output tokens that are certain: verified, and kept by the policy. Each time all of them."""
        self._tools = tools
        self._order = order
        self._told = told
        self._num_told = 0
        self._prompts: dict[Keys, Prompt] = {}
        self._written: dict[tuple[Keys, tuple[int, ...], int], Completion] = {}
        self._queries: dict[str, Query] = {}
        self._answers: dict[Query, list[Passage]] = {}  # verified
        self._cache = SpeculationCache(order.index.mode)
        self._steps: list[Step] = []
        self._sent: _Sent | None = None
        self._num_beside = 0
        self._discarded: tuple[int, ...] = ()  # the output that was taken back last
        self._plan = tools.scheduler.choose()
        self.stats = RunStats()

    async def run(self) -> tuple[Progress, list[Step]]:
        """The finished output and the rounds that led to it, in order. Raises: RetrievalError, InputError, EngineError."""
        begin = time.perf_counter()
        try:
            head = await self._run()
        finally:
            if self._sent is not None:
                self._sent.asking.future.cancel()
        self.stats.num_rounds = head.num_rounds
        self.stats.total_s = time.perf_counter() - begin
        return head, self._steps

    async def _run(self) -> Progress:
        tokenizer = self._tools.prompts.tokenizer
        start = Progress.start(self._order.question, tokenizer, self._order.params.max_tokens)
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
    def _guesses(self) -> bool:
        return self._order.guessing and (self._plan.learns or self._sent is not None)

    def _tell(self) -> None:
        """What the first round that is not verified, or else the last, builds on."""
        builds_on = next((step for step in self._steps if not step.verified), self._steps[-1]).round.output_ids
        if len(builds_on) > self._num_told:
            self._num_told = len(builds_on)
            self._told(builds_on)

    def _head(self, start: Progress) -> Progress:
        if not self._steps:
            return start
        last = self._steps[-1]
        assert last.written is not None
        return last.progress.after(last.round, last.written)

    async def _begin(self, head: Progress, round: Round) -> Step:
        """The round with its passages: those of the round before, an answer known already, a guess, or what the index says."""
        if round.query is None:
            return Step(head, round, None, self._steps[-1].passages if self._steps else [], verified=True)
        begin = time.perf_counter()
        index, k = self._order.index, self._tools.policy.num_passages
        if round.query not in self._queries:
            encoding = asyncio.wrap_future(self._tools.lookups.encode(index, [round.query]))
            (self._queries[round.query],) = await self._wait_for(encoding)
        query = self._queries[round.query]
        self.stats.encode_s += (encode_s := time.perf_counter() - begin)
        if self._guesses:
            if query in self._answers:
                return Step(head, round, query, self._answers[query], verified=True, seconds=encode_s)
            if self._cache.can_guess:
                passages = self._cache.guess(query, k)
                seconds = time.perf_counter() - begin
                return Step(head, round, query, passages, verified=False, seconds=seconds)
        lookup = await self._looked_up(self._look_up([query]))
        self._answers[query] = lookup.passages[0]
        if self._sent is None:
            self._plan = self._tools.scheduler.choose()
        return Step(head, round, query, lookup.passages[0], verified=True, seconds=encode_s)

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

    def _unsent(self) -> list[Step]:
        sent = self._sent.steps if self._sent else []
        return [step for step in self._steps if not step.verified and step not in sent]

    def _send(self, steps: list[Step]) -> None:
        self._num_beside = 0
        self._sent = _Sent(steps, self._look_up([step.query for step in steps if step.query]))

    async def _settle(self) -> bool:
        """Wait for the verification and follow it. False: it found a wrong guess."""
        assert self._sent is not None
        steps, asking = self._sent
        lookup = await self._looked_up(asking)
        self._sent = None
        for step, passages in zip(steps, lookup.passages, strict=True):
            assert step.query is not None
            self._answers[step.query] = passages
        right = [keys_of(s.passages) == keys_of(truth) for s, truth in zip(steps, lookup.passages, strict=True)]
        num_right = right.index(False) if False in right else len(right)
        for step, passages in zip(steps[:num_right], lookup.passages, strict=False):
            step.verified, step.passages = True, passages
        self._note(num_right, num_right < len(steps))
        if num_right == len(steps):
            return True
        self._take_back(self._steps.index(steps[num_right]))
        return False

    def _note(self, num_right: int, wrong: bool) -> None:
        self.stats.num_right += num_right
        self.stats.num_wrong += wrong
        self._tools.scheduler.note_guesses(num_right, int(wrong))
        self.stats.strides.append(self._plan.stride)
        self._plan = self._tools.scheduler.choose()

    def _take_back(self, number: int) -> None:
        """Everything from this round on; later rounds hang on it, whatever was guessed for them."""
        lost = [step for step in self._steps[number:] if step.token_ids]
        self._steps = self._steps[:number]
        if lost:
            self.stats.num_lost_tokens += sum(len(step.token_ids) for step in lost)
            self._discarded = (*lost[-1].round.output_ids, *lost[-1].token_ids)

    def _look_up(self, queries: Sequence[Query]) -> _Asking:
        order, guessing = self._order, self._guesses
        prefetch_k = 0 if not guessing else self._tools.config.prefetch_k if self._plan.speculates else 1
        asked = Asked(order.index, self._tools.policy.num_passages, order.scope, prefetch_k)
        known = self._cache.known if guessing else frozenset()
        self.stats.num_lookups += 1
        self.stats.num_retrievals += len(queries)
        begin, took_s = time.perf_counter(), list[float]()
        future = self._tools.lookups.look_up(asked, [Check(query, known) for query in queries])
        future.add_done_callback(lambda _: took_s.append(time.perf_counter() - begin))
        return _Asking(asyncio.wrap_future(future), len(queries), took_s)

    async def _looked_up(self, asking: _Asking) -> Lookup:
        begin = time.perf_counter()
        lookup = await self._wait_for(asking.future)
        self.stats.wait_s += time.perf_counter() - begin
        self._tools.scheduler.note_verification(asking.num_queries, asking.took_s[0], self._num_beside > 0)
        if self._guesses:
            self._cache.insert(lookup)
        return lookup

    async def _wait_for(self, future: asyncio.Future[T]) -> T:
        timeout_s = self._tools.config.timeout_s
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError as cause:
            raise RetrievalError(f"the index did not answer within {timeout_s:g} s") from cause

    async def _write_beside(self, step: Step) -> None:
        """Write while a verification runs, if one does; give up as soon as it finds a wrong guess."""
        writing = asyncio.ensure_future(self._write(step))
        try:
            while not writing.done() and self._sent is not None:
                both: list[asyncio.Future[Any]] = [writing, self._sent.asking.future]
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                if not writing.done() and not await self._settle():
                    return
            await writing
        finally:
            writing.cancel()

    async def _write(self, step: Step) -> None:
        """Under the step's passages: as was written before under the same, or by the engine."""
        round, keys = step.round, keys_of(step.passages)
        draft_ids = round.draft_ids or self._draft_behind(round.output_ids)
        known = (keys, round.output_ids, round.end)
        step.written = self._written.get(known)
        if step.written is None:
            beside = self._sent is not None
            begin = time.perf_counter()
            step.written = await self._generate(step, Segment(round.output_ids, round.end, draft_ids))
            self.stats.write_s += (write_s := time.perf_counter() - begin)
            self._tools.scheduler.note_step(step.seconds + write_s, beside)
            if self._guesses:
                self._written[known] = step.written
        step.token_ids = list(step.written.token_ids)
        if draft_ids and draft_ids is not round.draft_ids:
            self.stats.num_kept_tokens += _agreement(draft_ids, step.written.token_ids)

    def _draft_behind(self, output_ids: tuple[int, ...]) -> tuple[int, ...]:
        """What was taken back, where it goes on from here."""
        kept = len(output_ids)
        return self._discarded[kept:] if self._discarded[:kept] == output_ids else ()

    async def _generate(self, step: Step, segment: Segment) -> Completion:
        order = self._order
        prompt = self.prompt(step.passages)
        sources = copy_sources(order.question, prompt.passages)
        request = Request(
            uuid.uuid4().hex, prompt.prompt_ids, order.params, sources, order.scope.tenant, order.drafting, segment
        )
        deltas = []
        async for delta in self._tools.engine.stream(request):
            step.token_ids += delta.token_ids
            deltas.append(delta)
        return join(deltas)

    def prompt(self, passages: Sequence[Passage]) -> Prompt:
        keys = keys_of(passages)
        if keys not in self._prompts:
            order = self._order
            self._prompts[keys] = self._tools.prompts.build(
                order.question, passages, order.params.max_tokens, question_first=True
            )
        return self._prompts[keys]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tools.prompts.tokenizer.decode(list(token_ids), skip_special_tokens=True))


def _agreement(draft_ids: Sequence[int], token_ids: Sequence[int]) -> int:
    """How many tokens stand at the place they were drafted for."""
    pairs = zip(draft_ids, token_ids, strict=False)
    return next(
        (i for i, (drafted, token) in enumerate(pairs) if drafted != token), min(len(draft_ids), len(token_ids))
    )

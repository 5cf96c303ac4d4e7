"""Requests in the engine, as one coroutine sees them: handed over, heard, and given up when nobody waits any more.

    >>> async with Run(engine, [request], mail, metrics) as run:
    ...     while run.is_open:
    ...         for key, deltas in (await run.news()).items(): ...
    ...     completions = run.completions()

The engine's thread never waits for a client: it leaves its messages in the `Mail`, and what has come since the last look is taken
together. Leaving the block cancels what still runs, within one step, however it is left.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Self

from ragspec.core import Completion, Delta, FinishReason, Request
from ragspec.engine.collect import join
from services.backend import ServedEngine
from services.metrics import Metrics
from services.replies import ClientTooSlow

Key = tuple[str, int]
News = dict[Key, list[Delta]]

MOST_WAITING_TOKENS = 16_384
"""A stream whose client is so far behind is given up. Less is held for no longer than the client may take for one piece."""

_AT_ONCE_CHARS = 4096
"""Drafters read the sources of a request as it is submitted: more of them are read in a thread, as that takes milliseconds."""

_FAILED = (FinishReason.ERROR, FinishReason.LOST, FinishReason.CANCELLED)


class Mail:
    """From the engine's thread to an event loop, for all runs of a service: a step's messages wake the loop once.

    Why not a call into the loop for each: every wake-up is a chance for another thread to take the interpreter from the engine,
    and a step has as many messages as there are sequences.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Run, Delta]] = deque()
        self._called: asyncio.AbstractEventLoop | None = None

    def post(self, loop: asyncio.AbstractEventLoop, run: Run, delta: Delta) -> None:
        """From any thread."""
        self._waiting.append((run, delta))
        if self._called is not loop and not loop.is_closed():
            self._called = loop
            loop.call_soon_threadsafe(self._deliver, loop)

    def _deliver(self, loop: asyncio.AbstractEventLoop) -> None:
        """Why each by a call of its own: what one run cannot take in must not keep the others' from them."""
        self._called = None  # before it is looked through: what comes meanwhile calls again
        while self._waiting:
            run, delta = self._waiting.popleft()
            loop.call_soon(run.take_in, delta)


class Run:
    """States: entered (the engine has all requests) -> every choice ended, or left early. Lives in one event loop."""

    def __init__(
        self,
        engine: ServedEngine,
        requests: Sequence[Request],
        mail: Mail,
        metrics: Metrics,
        *,
        most_waiting_tokens: int | None = None,
    ) -> None:
        """`most_waiting_tokens` None: nobody reads along."""
        self._engine, self._requests, self._mail = engine, requests, mail
        self._metrics, self._most_waiting = metrics, most_waiting_tokens
        self._told: dict[Key, list[Delta]] = {(r.id, choice): [] for r in requests for choice in r.choices}
        self._open = set(self._told)
        self._waiting: list[Delta] = []
        self._num_waiting = 0
        self._arrived: asyncio.Future[None] | None = None
        self._left = False
        self._heard_s: dict[Key, float] = {}
        self.first_s = 0.0  # when the first token came; of time.perf_counter
        self.num_tokens = 0

    @property
    def keys(self) -> list[Key]:
        """Of all choices, in their order."""
        return list(self._told)

    @property
    def is_open(self) -> bool:
        """Whether there is more to hear."""
        return bool(self._open or self._waiting)

    async def __aenter__(self) -> Self:
        """Raises: InputError, PromptTooLong, Overloaded, EngineClosed."""
        self._loop = asyncio.get_running_loop()
        try:
            if sum(len(source.text) for request in self._requests for source in request.sources) <= _AT_ONCE_CHARS:
                self._submit()
            else:
                await self._submit_apart()
        except Exception:
            self._give_up()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._give_up()

    async def news(self, wait_s: float | None = None) -> News:
        """What has come since the last look, at least one delta; empty after `wait_s` without any.

        Raises: EngineError, ReplicaLost or Cancelled for a choice that cannot be written, ClientTooSlow.
        """
        if not self._waiting:
            self._arrived = self._loop.create_future()
            timer = self._loop.call_later(wait_s, self._wake) if wait_s is not None else None
            try:
                await self._arrived
            finally:
                self._arrived = None
                if timer is not None:
                    timer.cancel()
        return self.take()

    def take(self) -> News:
        """As `news`, without waiting."""
        if self._most_waiting is not None and self._num_waiting > self._most_waiting:
            raise ClientTooSlow
        news: News = {}
        for delta in self._waiting:
            if delta.finish_reason in _FAILED:
                join([delta])
            news.setdefault((delta.request_id, delta.choice), []).append(delta)
        self._waiting, self._num_waiting = [], 0
        return news

    def completion(self, key: Key) -> Completion:
        """The output of a choice that has ended."""
        return join(self._told[key])

    def steps(self, key: Key) -> Sequence[Delta]:
        """What was heard of a choice, step by step."""
        return self._told[key]

    async def finished(self) -> list[Completion]:
        """Every choice, in order. Raises: as `news`."""
        while self.is_open:
            await self.news()
        return [self.completion(key) for key in self._told]

    async def _submit_apart(self) -> None:
        submitted = self._loop.run_in_executor(None, self._submit)
        try:
            await asyncio.shield(submitted)
        except asyncio.CancelledError:
            submitted.add_done_callback(self._give_up)
            raise

    def _submit(self) -> None:
        for request in self._requests:
            self._engine.submit(request, self._hear)

    def _hear(self, delta: Delta) -> None:
        """In the engine's thread."""
        self._mail.post(self._loop, self, delta)

    def take_in(self, delta: Delta) -> None:
        """In the event loop."""
        key = (delta.request_id, delta.choice)
        if delta.finish_reason is not None:
            self._open.discard(key)
        if self._left:
            if delta.stats is not None:
                self._metrics.worked(delta.stats)
            return
        self._note(key, len(delta.token_ids))
        self._told[key].append(delta)
        self._waiting.append(delta)
        self._num_waiting += len(delta.token_ids)
        self._wake()

    def _note(self, key: Key, num_tokens: int) -> None:
        now = time.perf_counter()
        self.first_s = self.first_s or now
        self.num_tokens += num_tokens
        if num_tokens and key in self._heard_s:
            self._metrics.gap(now - self._heard_s[key], num_tokens)
        self._heard_s[key] = now

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def _give_up(self, submitted: asyncio.Future[None] | None = None) -> None:
        """What still runs is cancelled: of a thread that was still submitting, once it has."""
        self._left = True
        if submitted is not None and not submitted.cancelled():
            submitted.exception()  # nobody waits for it any more
        for request_id in {request_id for request_id, _ in self._open}:
            self._engine.cancel(request_id)

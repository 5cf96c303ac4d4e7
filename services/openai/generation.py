"""From a request body to deltas of the engine: the caller's checks and limits, and the stream that one coroutine reads.

`RequestContext` owns the checks that chat and text completions share, and reserves the key's tokens. `EngineStream` submits the
requests and cancels them when nobody reads them any more. Never formats an answer.

    >>> context = RequestContext.of(backend, mailbox, body, request)
    >>> async with context.generate(requests) as stream:
    ...     while stream.is_open:
    ...         for key, deltas in (await stream.next_deltas()).items(): ...

The engine's thread never waits for a client: it posts deltas to the `DeltaMailbox`, and the coroutine takes all new deltas
together. Leaving the block cancels unfinished requests within one step.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Generic, Self, TypeVar

from fastapi import Request as HttpRequest

from ragspec.core import Completion, Delta, FinishReason, GenerationStats, Request, SamplingParams
from ragspec.engine.client import completion_of
from ragspec.rag.steps import PreparedQuestion
from ragspec.speculation import ON, Speculation
from ragspec.tenants import cache_salt_of
from services.backend import ServedEngine, ServedModel, ServiceBackend
from services.errors import ApiError, ClientTooSlow
from services.keys import Caller
from services.metrics import Metrics
from services.openai.types import SamplingBody

ChoiceKey = tuple[str, int]
"""A request's id and the number of a choice."""
MAX_WAITING_TOKENS = 16_384
"""A stream with more unsent tokens is given up."""
_INLINE_CHARS = 1024
"""Drafters read a request's sources during `submit`. Longer sources are submitted in a thread, as that takes milliseconds."""
_FAILED = (FinishReason.ERROR, FinishReason.LOST, FinishReason.CANCELLED)


AnyBody = TypeVar("AnyBody", bound=SamplingBody)


@dataclass(frozen=True)
class RequestContext(Generic[AnyBody]):
    """`begin_s`: when the request came, of time.perf_counter. `created`: the same as Unix time. `base_url`: of the service."""

    backend: ServiceBackend
    model: ServedModel
    mailbox: DeltaMailbox
    body: AnyBody
    caller: Caller
    begin_s: float
    id: str
    created: int
    params: SamplingParams
    base_url: str

    @classmethod
    def of(
        cls, backend: ServiceBackend, mailbox: DeltaMailbox, body: AnyBody, request: HttpRequest
    ) -> RequestContext[AnyBody]:
        """Raises: ApiError for an unknown model, too long an output or a stream that strict privacy forbids; InputError."""
        model = served_model(backend, body.model)
        params = body.params(backend.default_params)
        name, given = body.output_limit
        if given >= (context_tokens := model.engine.max_context_tokens):
            reason = f"{name} is {given}, but the context has {context_tokens} tokens, the prompt included"
            raise ApiError(400, reason, param=name, code="context_length_exceeded")
        caller, begin_s = request.state.caller, request.state.begin
        name, base_url = secrets.token_hex(16), address_of(request)
        context = cls(backend, model, mailbox, body, caller, begin_s, name, int(time.time()), params, base_url)
        if context.is_strict and body.stream and params.logprobs is not None:
            reason = "a stream with log-probabilities shows each token, which strict privacy forbids"
            raise ApiError(400, reason, param="logprobs")
        return context

    @property
    def drafting(self) -> Speculation:
        return ON if self.body.speculation is None else Speculation.of(self.body.speculation)

    @property
    def salt(self) -> str:
        return cache_salt_of(self.caller.tenant, self.body.cache_salt or "")

    @property
    def is_strict(self) -> bool:
        """A request may ask for more privacy than the service's setting, never for less."""
        return "strict" in (self.backend.config.service.privacy, self.body.privacy)

    @asynccontextmanager
    async def generate(
        self, requests: Sequence[Request], prepared: PreparedQuestion | None = None
    ) -> AsyncIterator[EngineStream]:
        """Runs the requests in the engine within the key's limits; returns unused tokens to the key at the end.

        `prepared`: the question of the only request. Its first request runs before, and may make the answer known; then no engine
        writes it. The tokens of a look are the answer's.

        Raises: as `RateLimiter.choices` and `reserve`, and as `EngineStream`.
        """
        metrics, limiter = self.model.metrics, self.backend.rate_limiter
        doubt = prepared.doubt if prepared else None
        reserved = [*requests, doubt] if doubt else requests
        num_prompt = sum(len(request.prompt_ids) for request in reserved)
        max_tokens = sum(request.params.max_tokens * request.params.n for request in reserved)
        max_waiting = MAX_WAITING_TOKENS if self.body.stream else None
        with limiter.choices(self.caller, sum(len(request.choices) for request in requests)):
            reservation = limiter.reserve(self.caller, num_prompt, max_tokens)
            metrics.handed_over(time.perf_counter() - self.begin_s - (prepared.retrieve_s if prepared else 0.0))
            streams: list[EngineStream] = []
            try:
                if prepared and prepared.first:
                    streams.append(EngineStream(self.model.engine, [prepared.first], self.mailbox, metrics))
                    async with streams[0] as first:
                        (completion,) = await first.completions()
                    if doubt:
                        metrics.worked(completion.stats)
                    prepared = await asyncio.to_thread(prepared.after, completion)
                    requests, streams = [prepared.request], streams if doubt else []
                engine = KnownAnswer(prepared.said) if prepared and prepared.said else self.model.engine
                streams.append(EngineStream(engine, requests, self.mailbox, metrics, max_waiting, prepared))
                async with streams[-1] as stream:
                    yield stream
            finally:
                reservation.used(sum(stream.num_used for stream in streams))


def address_of(request: HttpRequest) -> str:
    """The service's address as its client sees it: a proxy with TLS says so in `X-Forwarded-Proto`."""
    scheme = request.headers.get("x-forwarded-proto", "").partition(",")[0].strip().lower()
    url = request.base_url.replace(scheme=scheme) if scheme in ("http", "https") else request.base_url
    return str(url).rstrip("/")


def served_model(backend: ServiceBackend, name: str) -> ServedModel:
    """The model that a request names. Raises: ApiError 404."""
    if (model := backend.models.get(name)) is None:
        reason = f"there is no model {name!r}; this is {' and '.join(map(repr, backend.models))}"
        raise ApiError(404, reason, param="model", code="model_not_found")
    return model


class KnownAnswer:
    """Stands for the engine where the answer is known before decoding."""

    def __init__(self, text: str) -> None:
        self.text = text

    def submit(self, request: Request, listener: Callable[[Delta], None]) -> None:
        stats = GenerationStats(seed=request.params.seed or 0)
        for choice in request.choices:
            listener(Delta(request.id, choice, (), self.text, (), FinishReason.STOP, stats))

    def cancel(self, request_id: str) -> None:
        """There is nothing to cancel."""


class DeltaMailbox:
    """Carries deltas of all streams from the engine's thread to an event loop.

    Why not one call into the loop for each delta: a step has one for every sequence, and each wake-up may take the interpreter
    lock from the engine. The mailbox wakes the loop once a step.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[EngineStream, Delta]] = deque()
        self._called: asyncio.AbstractEventLoop | None = None

    def post(self, loop: asyncio.AbstractEventLoop, stream: EngineStream, delta: Delta) -> None:
        """Callable from any thread."""
        self._waiting.append((stream, delta))
        if self._called is not loop and not loop.is_closed():
            self._called = loop
            loop.call_soon_threadsafe(self._deliver, loop)

    def _deliver(self, loop: asyncio.AbstractEventLoop) -> None:
        """Why one callback for each delta: an error in one stream must not keep the others' deltas from them."""
        self._called = None  # cleared first, so that a delta posted meanwhile calls again
        while self._waiting:
            stream, delta = self._waiting.popleft()
            loop.call_soon(stream.receive, delta)


class EngineStream:
    """States: entered (the engine has all requests) -> every choice ended, or left early. Lives in one event loop."""

    def __init__(
        self,
        engine: ServedEngine | KnownAnswer,
        requests: Sequence[Request],
        mailbox: DeltaMailbox,
        metrics: Metrics,
        max_waiting_tokens: int | None = None,
        prepared: PreparedQuestion | None = None,
    ) -> None:
        """`max_waiting_tokens` None: no limit, for an answer that is sent whole. `prepared`: the question of the only request."""
        self._prepared = prepared
        self._engine, self._requests, self._mailbox = engine, requests, mailbox
        self._metrics, self._max_waiting = metrics, max_waiting_tokens
        self._deltas: dict[ChoiceKey, list[Delta]] = {(r.id, choice): [] for r in requests for choice in r.choices}
        self._open = set(self._deltas)
        self._waiting: list[Delta] = []
        self._num_waiting = 0
        self._arrived: asyncio.Future[None] | None = None
        self._left = self._is_whole = False
        self._last_s: dict[ChoiceKey, float] = {}
        self.first_token_s = 0.0  # of time.perf_counter
        self.num_tokens = 0

    @property
    def keys(self) -> list[ChoiceKey]:
        """All choices, in order."""
        return list(self._deltas)

    @property
    def said(self) -> str:
        """The answer, if it was known before decoding."""
        return self._engine.text if isinstance(self._engine, KnownAnswer) else ""

    @property
    def num_used(self) -> int:
        """Tokens of prompts and outputs; 0 for an answer that was known before decoding."""
        return 0 if self.said else self.num_tokens + sum(len(request.prompt_ids) for request in self._requests)

    @property
    def is_open(self) -> bool:
        """Whether more deltas may come."""
        return bool(self._open or self._waiting)

    async def __aenter__(self) -> Self:
        """Raises: InputError, PromptTooLong, Overloaded, EngineClosed."""
        self._loop = asyncio.get_running_loop()
        try:
            if self._is_quick:
                self._submit()
            else:
                await self._submit_in_thread()
        except Exception:
            self._cancel()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._cancel()

    async def next_deltas(self, timeout_s: float | None = None) -> dict[ChoiceKey, list[Delta]]:
        """Waits for new deltas and takes them; empty after `timeout_s` without any.

        Raises: EngineError, ReplicaLost or Cancelled for a choice that failed, ClientTooSlow.
        """
        if not self._waiting:
            self._arrived = self._loop.create_future()
            timer = self._loop.call_later(timeout_s, self._wake) if timeout_s is not None else None
            try:
                await self._arrived
            finally:
                self._arrived = None
                if timer is not None:
                    timer.cancel()
        return self.take_deltas()

    def take_deltas(self) -> dict[ChoiceKey, list[Delta]]:
        """As `next_deltas`, without waiting."""
        if self._max_waiting is not None and self._num_waiting > self._max_waiting:
            raise ClientTooSlow
        by_choice: dict[ChoiceKey, list[Delta]] = {}
        for delta in self._waiting:
            if delta.finish_reason in _FAILED:
                completion_of([delta])  # raises the choice's error
            by_choice.setdefault((delta.request_id, delta.choice), []).append(delta)
        self._waiting, self._num_waiting = [], 0
        return by_choice

    def completion(self, key: ChoiceKey) -> Completion:
        """The output of a choice that has ended."""
        completion = completion_of(self._deltas[key])
        return replace(completion, stats=self._prepared.counted(completion)) if self._prepared else completion

    def deltas(self, key: ChoiceKey) -> Sequence[Delta]:
        """All deltas of a choice so far."""
        return self._deltas[key]

    async def completions(self) -> list[Completion]:
        """Waits for every choice; wakes once for each that ends, not once a step. Raises: as `next_deltas`."""
        self._is_whole = True
        while self.is_open:
            await self.next_deltas()
        return [self.completion(key) for key in self._deltas]

    @property
    def _is_quick(self) -> bool:
        """Whether preparing the requests takes less time than a thread: tokenising sources and compiling schemas do not."""
        num_chars = sum(len(source.text) for request in self._requests for source in request.sources)
        has_grammar = any(request.params.json_schema or request.grammar for request in self._requests)
        return num_chars <= _INLINE_CHARS and not has_grammar

    async def _submit_in_thread(self) -> None:
        submitted = self._loop.run_in_executor(None, self._submit)
        try:
            await asyncio.shield(submitted)
        except asyncio.CancelledError:
            submitted.add_done_callback(self._cancel)  # the thread goes on submitting until it is done
            raise

    def _submit(self) -> None:
        for request in self._requests:
            self._engine.submit(request, lambda delta: self._mailbox.post(self._loop, self, delta))

    def receive(self, delta: Delta) -> None:
        """Runs in the event loop."""
        key, num_tokens = (delta.request_id, delta.choice), len(delta.token_ids)
        if delta.finish_reason is not None:
            self._open.discard(key)
        if self._left:
            if delta.stats is not None:
                self._metrics.worked(delta.stats)
            return
        self._record(key, num_tokens)
        self._deltas[key].append(delta)
        self._waiting.append(delta)
        self._num_waiting += num_tokens
        if delta.finish_reason is not None or not self._is_whole:
            self._wake()

    def _record(self, key: ChoiceKey, num_tokens: int) -> None:
        now = time.perf_counter()
        self.first_token_s = self.first_token_s or now
        self.num_tokens += num_tokens
        if num_tokens and key in self._last_s:
            self._metrics.gap(now - self._last_s[key], num_tokens)
        self._last_s[key] = now

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def _cancel(self, submitted: asyncio.Future[None] | None = None) -> None:
        """Cancels unfinished requests. `submitted`: a submission that was left and has now ended."""
        self._left = True
        if submitted is not None and not submitted.cancelled():
            submitted.exception()  # retrieved, so that asyncio does not log it
        for request_id in {request_id for request_id, _ in self._open}:
            self._engine.cancel(request_id)

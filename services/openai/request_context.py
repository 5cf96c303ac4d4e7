"""The context of one request for text: caller, model, sampling parameters, and its place in the engine.

Owns the checks that chat and text completions share, and reserves the key's tokens. Never formats an answer.

    >>> context = RequestContext.of(backend, mailbox, body, request)
    >>> async with context.generate(requests) as stream: ...
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import Request as HttpRequest

from ragspec.core import Request, SamplingParams
from services.backend import ServiceBackend
from services.errors import ApiError
from services.keys import Caller
from services.openai.engine_stream import MAX_WAITING_TOKENS, DeltaMailbox, EngineStream, KnownAnswer
from services.openai.types import SamplingBody


@dataclass(frozen=True)
class RequestContext:
    """`begin_s`: when the request came, of time.perf_counter. `created`: the same as Unix time."""

    backend: ServiceBackend
    mailbox: DeltaMailbox
    body: SamplingBody
    caller: Caller
    begin_s: float
    id: str
    created: int
    params: SamplingParams

    @classmethod
    def of(
        cls, backend: ServiceBackend, mailbox: DeltaMailbox, body: SamplingBody, request: HttpRequest
    ) -> RequestContext:
        """Raises: ApiError for an unknown model, too long an output or a stream that strict privacy forbids; InputError."""
        check_model(backend, body.model)
        params = body.params(backend.default_params)
        name, given = body.output_limit
        if given >= (context_tokens := backend.engine.max_context_tokens):
            reason = f"{name} is {given}, but the context has {context_tokens} tokens, the prompt included"
            raise ApiError(400, reason, param=name, code="context_length_exceeded")
        caller, begin_s = request.state.caller, request.state.begin
        context = cls(backend, mailbox, body, caller, begin_s, secrets.token_hex(16), int(time.time()), params)
        if context.is_strict and body.stream and params.logprobs is not None:
            reason = "a stream with log-probabilities shows each token, which strict privacy forbids"
            raise ApiError(400, reason, param="logprobs")
        return context

    @property
    def is_strict(self) -> bool:
        """A request may ask for more privacy than the service's setting, never for less."""
        return "strict" in (self.backend.config.service.privacy, self.body.privacy)

    @asynccontextmanager
    async def generate(
        self, requests: Sequence[Request], retrieve_s: float = 0.0, *, said: str = ""
    ) -> AsyncIterator[EngineStream]:
        """Runs the requests in the engine within the key's limits; returns unused tokens to the key at the end.

        `said`: the answer, if it is known already; then no engine runs.

        Raises: as `RateLimiter.choices` and `reserve`, and as `EngineStream`.
        """
        metrics, limiter = self.backend.metrics, self.backend.rate_limiter
        num_prompt = sum(len(request.prompt_ids) for request in requests)
        max_tokens = sum(request.params.max_tokens * request.params.n for request in requests)
        max_waiting = MAX_WAITING_TOKENS if self.body.stream else None
        with limiter.choices(self.caller, sum(len(request.choices) for request in requests)):
            reservation = limiter.reserve(self.caller, num_prompt, max_tokens)
            metrics.handed_over(time.perf_counter() - self.begin_s - retrieve_s)
            engine = KnownAnswer(said) if said else self.backend.engine
            stream = EngineStream(engine, requests, self.mailbox, metrics, max_waiting_tokens=max_waiting)
            try:
                async with stream:
                    yield stream
            finally:
                reservation.used(num_prompt + stream.num_tokens)


def check_model(backend: ServiceBackend, name: str) -> None:
    """Raises: ApiError 404."""
    if name != backend.model:
        raise ApiError(
            404, f"there is no model {name!r}; this is {backend.model!r}", param="model", code="model_not_found"
        )

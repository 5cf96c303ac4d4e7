"""What every way to ask for text shares: who asks, of which model, and what is counted."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import Request as HttpRequest

from ragspec.core import GenerationStats, Request, SamplingParams
from ragspec.rag.openai_fields import usage
from ragspec.rag.steps import default_params
from services.backend import Backend
from services.errors import ApiError
from services.keys import Caller
from services.openai.engine_stream import MOST_WAITING_TOKENS, Key, Mail, Run
from services.openai.events import PAD_BYTES, Chunks
from services.openai.request_metrics import progress, request_metrics
from services.openai.sending import Sender
from services.openai.streaming import STRICT_PAD_BYTES, Account, Chunk, at_once, paced, tell
from services.openai.types import Sampled


@dataclass(frozen=True)
class Asked:
    """One request for text, as it came."""

    backend: Backend
    mail: Mail
    body: Sampled
    caller: Caller
    begin_s: float  # of time.perf_counter
    id: str
    created: int
    params: SamplingParams

    @classmethod
    def of(cls, backend: Backend, mail: Mail, body: Sampled, request: HttpRequest) -> Asked:
        """Raises: ApiError for another model or what privacy forbids, InputError for parameters that cannot be meant."""
        check_model(backend, body.model)
        params = body.params(default_params(backend.config.generation))
        caller, begin_s = request.state.caller, request.state.begin
        asked = cls(backend, mail, body, caller, begin_s, secrets.token_hex(16), int(time.time()), params)
        if asked.is_strict and body.stream and params.logprobs is not None:
            told = "a stream with log-probabilities shows each token: not where privacy is strict"
            raise ApiError(400, told, param="logprobs")
        return asked

    @property
    def is_strict(self) -> bool:
        """A request may ask for more privacy than the service gives, not for less."""
        return "strict" in (self.backend.config.service.privacy, self.body.privacy)

    @property
    def may_see_metrics(self) -> bool:
        """To others the field is simply not there: a page asks for it whoever uses it."""
        return bool(self.body.metrics) and self.caller.trusted

    def head(self, kind: str, prefix: str, fingerprint: str) -> dict[str, Any]:
        """What every answer and every chunk begins with."""
        return {
            "id": f"{prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.backend.model,
            "system_fingerprint": fingerprint,
        }

    @asynccontextmanager
    async def running(self, requests: Sequence[Request], retrieve_s: float = 0.0) -> AsyncIterator[Run]:
        """The requests in the engine, within the key's limits; counted when they end. Raises: as the gate and `Run`."""
        metrics, stream = self.backend.metrics, bool(self.body.stream)
        num_prompt = sum(len(request.prompt_ids) for request in requests)
        most_tokens = sum(request.params.max_tokens * request.params.n for request in requests)
        most_waiting = MOST_WAITING_TOKENS if stream else None
        async with self.backend.gate.enter(self.caller, num_prompt, most_tokens) as tokens:
            metrics.handed_over(time.perf_counter() - self.begin_s - retrieve_s)
            run = Run(self.backend.engine, requests, self.mail, metrics, most_waiting_tokens=most_waiting)
            try:
                async with run:
                    yield run
            finally:
                tokens.used(num_prompt + run.num_tokens)

    def count(self, run: Run) -> None:
        """Every choice has ended."""
        if run.first_s:
            self.backend.metrics.first_token(run.first_s - self.begin_s)
        for key in run.keys:
            completion = run.completion(key)
            seconds = time.perf_counter() - self.begin_s
            self.backend.metrics.ended(completion.stats, completion.finish_reason, seconds)

    async def tell(self, sender: Sender, run: Run, head: dict[str, Any], account: Account) -> None:
        """The answer as a stream."""
        options = self.body.options
        pad_bytes = STRICT_PAD_BYTES if self.is_strict else PAD_BYTES * options.include_obfuscation
        chunks = Chunks(head, pad_bytes, with_usage=options.include_usage)
        pieces = paced(run) if self.is_strict else at_once(run)
        await tell(sender, chunks, pieces, account, silent=not self.is_strict)

    def last_chunk(self, run: Run) -> Sequence[Chunk]:
        """Of a stream: usage and metrics, if they were asked for."""
        more = {"usage": usage_of(run)} if self.body.options.include_usage else {}
        more |= self.metrics(run)
        return [([], more)] if more else []

    def metrics(self, run: Run) -> dict[str, Any]:
        """The field, for those who may see it; null for several choices, as in vLLM."""
        if not self.may_see_metrics:
            return {}
        keys = run.keys
        return {
            "metrics": request_metrics(run.completion(keys[0]).stats, run.steps(keys[0])) if len(keys) == 1 else None
        }

    def progress(self, run: Run, key: Key) -> dict[str, Any]:
        """The field of a chunk, for those who may see it."""
        return {"metrics": progress(run.steps(key))} if self.may_see_metrics else {}


def check_model(backend: Backend, name: str) -> None:
    """Raises: ApiError 404."""
    if name != backend.model:
        raise ApiError(
            404, f"there is no model {name!r}; this is {backend.model!r}", param="model", code="model_not_found"
        )


def usage_of(run: Run) -> dict[str, Any]:
    """Of all choices of all requests."""
    by_request: dict[str, list[GenerationStats]] = {}
    for key in run.keys:
        by_request.setdefault(key[0], []).append(run.completion(key).stats)
    return summed([usage(choices) for choices in by_request.values()])


def summed(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Usage of several prompts together."""
    total = usages[0]
    for each in usages[1:]:
        total = {
            name: summed([value, each[name]]) if isinstance(value, dict) else value + each[name]
            for name, value in total.items()
        }
    return total


def index_of(run: Run) -> dict[Key, int]:
    """The number that a choice has in the answer."""
    return {key: index for index, key in enumerate(run.keys)}

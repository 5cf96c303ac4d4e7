"""Corrects one text for one caller, within the caller's limits and time, with the caller's dictionaries.

Owns the path from a `CorrectionTask` to a `Corrected`. Knows no HTTP format.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ragspec.core import SamplingParams
from ragspec.rag.cache_salts import cache_salt_of
from ragspec.rag.grammar.correction import DEFAULT_PARAMS, Correction, CorrectionRequest
from ragspec.rag.grammar.edit_filters import DEFAULT_FILTER, EditFilter
from ragspec.rag.grammar.grammar import Grammar
from ragspec.rag.grammar.markup import MarkedText, TextPart
from ragspec.speculation import ON, Speculation
from services.backend import Backend
from services.errors import ApiError
from services.keys import Caller


@dataclass(frozen=True, slots=True)
class CorrectionTask:
    """A text and its settings. `parts` None: the markup is found in the text."""

    text: str
    parts: tuple[TextPart, ...] | None = None
    params: SamplingParams = DEFAULT_PARAMS
    edit_filter: EditFilter = DEFAULT_FILTER
    speculation: Speculation = ON
    cache_salt: str = ""
    dictionaries: Sequence[str] = ()


class Corrected(NamedTuple):
    """`marked`: the text with the spans of its markup."""

    correction: Correction
    marked: MarkedText
    seconds: float


class Corrector:
    """Serves all callers."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self._settings = backend, backend.config.service.grammar
        self._grammar = Grammar(backend.engine, backend.prompts, max_in_flight=backend.config.engine.max_running)

    async def correct(self, caller: Caller, task: CorrectionTask) -> Corrected:
        """Raises: ApiError 413 if the text is too long, 429, 500 if nothing was corrected in time; InputError, EngineError."""
        begin_s, max_chars = time.perf_counter(), self._settings.max_text_chars
        length = max(len(task.text), sum(len(part.plain) for part in task.parts or ()))
        if length > max_chars:
            raise ApiError(
                413,
                f"Your text exceeds the limit of {max_chars} characters (it's {length} characters). "
                "Please submit a shorter text.",
                param="text",
            )
        words = await asyncio.to_thread(self._backend.dictionaries.words, caller.tenant, task.dictionaries)
        edit_filter = replace(task.edit_filter, dictionary=task.edit_filter.dictionary | frozenset(words))
        request = CorrectionRequest(
            secrets.token_hex(16),
            task.text,
            task.params,
            cache_salt_of(caller.tenant, task.cache_salt),
            task.speculation,
            edit_filter,
            task.parts,
        )
        ready = await asyncio.to_thread(self._grammar.prepare, request)
        num_prompt = sum(len(request.prompt_ids) for request in ready.requests)
        reservation = self._backend.rate_limiter.reserve(
            caller, num_prompt, num_prompt
        )  # output about as long as input
        left_s = max(0.0, self._settings.timeout_s - (time.perf_counter() - begin_s))
        num_written = 0
        try:
            correction = await self._grammar.complete(ready, left_s)
            num_written = correction.stats.num_output_tokens
        finally:
            reservation.used(num_prompt + num_written)
        self._backend.metrics.worked(correction.stats)
        if ready.requests and not correction.stats.num_output_tokens:
            raise ApiError(
                500,
                f"Checking took longer than {self._settings.timeout_s:g} seconds, which is this server's limit. "
                "Please make sure you have set the proper language or consider submitting a shorter text.",
                code="timeout",
            )
        return Corrected(correction, ready.marked, time.perf_counter() - begin_s)

"""One text corrected for one caller: within the caller's limits, with the caller's dictionary, in the time there is."""

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
class Task:
    """What is to be corrected, and how. `parts` None: the markup is found in the text."""

    text: str
    parts: tuple[TextPart, ...] | None = None
    params: SamplingParams = DEFAULT_PARAMS
    edit_filter: EditFilter = DEFAULT_FILTER
    speculation: Speculation = ON
    cache_salt: str = ""
    dictionaries: Sequence[str] = ()


class Corrected(NamedTuple):
    """`marked`: the text with its markup told apart."""

    correction: Correction
    marked: MarkedText
    seconds: float


class Correcting:
    """One for all callers."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self._settings = backend, backend.config.service.grammar
        self._grammar = Grammar(backend.engine, backend.prompts, max_in_flight=backend.config.engine.max_running)

    async def correct(self, caller: Caller, task: Task) -> Corrected:
        """Raises: ApiError 413 for a text that is too long, 429, 500 where nothing was done in time; InputError, EngineError."""
        begin = time.perf_counter()
        most, length = self._settings.max_text_chars, max(len(task.text), _num_read(task))
        if length > most:
            raise ApiError(
                413,
                f"Your text exceeds the limit of {most} characters (it's {length} characters). "
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
        async with self._backend.gate.enter(caller, num_prompt, num_prompt) as tokens:  # about as long as its prompt
            left_s = max(0.0, self._settings.timeout_s - (time.perf_counter() - begin))
            num_written = 0
            try:
                correction = await self._grammar.complete(ready, left_s)
                num_written = correction.stats.num_output_tokens
            finally:
                tokens.used(num_prompt + num_written)
        self._backend.metrics.worked(correction.stats)
        if ready.requests and not correction.stats.num_output_tokens:
            raise ApiError(
                500,
                f"Checking took longer than {self._settings.timeout_s:g} seconds, which is this server's limit. "
                "Please make sure you have set the proper language or consider submitting a shorter text.",
                code="timeout",
            )
        return Corrected(correction, ready.marked, time.perf_counter() - begin)


def _num_read(task: Task) -> int:
    """Characters that are read, what stands for markup among them."""
    return sum(len(part.plain) for part in task.parts or ())

"""The corrected languages, and the correction of one text for one caller.

`detect_language` lets a request with "auto" get an error for other languages than English instead of random corrections.
`Corrector` owns the limits of one correction, the caller's dictionaries, and the test that warns of a model that leaves mistakes.
Knows no HTTP format.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ragspec.errors import RagspecError
from ragspec.rag.grammar.correction import Correction, CorrectionRequest
from ragspec.rag.grammar.grammar import Grammar
from ragspec.rag.grammar.markup import MarkedText
from ragspec.rag.languages import ENGLISH, GuessedLanguage, guess_language
from services.backend import ServedModel, ServiceBackend
from services.errors import ApiError
from services.keys import Caller

log = logging.getLogger(__name__)
LANGUAGES = {
    "en": "English",
    "en-US": "English (US)",
    "en-GB": "English (GB)",
    "en-AU": "English (Australian)",
    "en-CA": "English (Canada)",
    "en-NZ": "English (New Zealand)",
    "en-ZA": "English (South African)",
}
DEFAULT = "en-US"
AUTO = "auto"


class Corrected(NamedTuple):
    """`marked`: the text with the spans of its markup. `is_unproven`: the target leaves known mistakes as they are."""

    correction: Correction
    marked: MarkedText
    seconds: float
    is_unproven: bool = False


class Corrector:
    """One model, for all callers."""

    def __init__(self, backend: ServiceBackend, model: ServedModel) -> None:
        self._backend, self._settings, self.model = backend, backend.config.service.grammar, model
        self._grammar = Grammar(model.engine, model.prompts, max_in_flight=backend.config.engine.max_num_seqs)
        self._proof: asyncio.Task[bool] | None = None

    async def correct(self, caller: Caller, request: CorrectionRequest, dictionaries: Sequence[str] = ()) -> Corrected:
        """With the caller's `dictionaries`, by name; none named: all of them.

        Raises: ApiError 413 if the text is too long, 429, 500 if nothing was corrected in time; InputError, EngineError.
        """
        begin_s, max_chars = time.perf_counter(), self._settings.max_text_chars
        length = max(len(request.text), sum(len(part.plain) for part in request.parts or ()))
        if length > max_chars:
            limit = f"the limit of {max_chars} characters (it's {length} characters)"
            raise ApiError(413, f"Your text exceeds {limit}. Please submit a shorter text.", param="text")
        words = await asyncio.to_thread(self._backend.dictionaries.words, caller.tenant, dictionaries)
        edit_filter = request.edit_filter
        edit_filter = replace(edit_filter, dictionary=edit_filter.dictionary | frozenset(words))
        ready = await asyncio.to_thread(self._grammar.prepare, replace(request, edit_filter=edit_filter))
        num_prompt = sum(len(each.prompt_ids) for each in ready.requests)
        # an output is about as long as its prompt
        reservation = self._backend.rate_limiter.reserve(caller, num_prompt, num_prompt)
        num_written = 0

        def left_s() -> float:
            return max(0.0, self._settings.timeout_s - (time.perf_counter() - begin_s))

        try:
            if ready.requests and self._proof is None:
                self._proof = asyncio.create_task(self._prove())
            correction = await self._grammar.complete(ready, left_s())
            num_written = correction.stats.num_output_tokens
        finally:
            reservation.used(num_prompt + num_written)
        self.model.metrics.worked(correction.stats)
        if ready.requests and not correction.stats.num_output_tokens:
            raise ApiError(
                500,
                f"Checking took longer than {self._settings.timeout_s:g} seconds, which is this server's limit. "
                "Please make sure you have set the proper language or consider submitting a shorter text.",
                code="timeout",
            )
        is_unproven = False
        if ready.requests and (proof := self._proof):
            await asyncio.wait([proof], timeout=left_s())
            is_unproven = proof.done() and not proof.result()
        return Corrected(correction, ready.marked, time.perf_counter() - begin_s, is_unproven)

    async def _prove(self) -> bool:
        """True also where the test fails, which fails no text. After an engine's failure the next text makes the test again."""
        try:
            return await self._grammar.corrects()
        except RagspecError:
            self._proof = None
        except Exception:
            log.exception("the test of the target failed: no client is warned that sentences may be wrong")
        return True


def detect_language(text: str, variant: str = DEFAULT) -> GuessedLanguage:
    """`code`: of `LANGUAGES`, of a language that is not corrected, or "unknown". `variant` for English, and for texts too short
    to tell."""
    found = guess_language(text)
    return found._replace(code=variant, name=LANGUAGES[variant]) if found.code == ENGLISH else found

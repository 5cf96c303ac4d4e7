"""The corrected languages, and the correction of one text for one caller.

`detect_language` compares a text's script and its most common words, so that a request with "auto" gets an error for other
languages than English instead of random corrections. `Corrector` owns the limits of one correction, the caller's dictionaries,
and the test that warns of a model that leaves mistakes. Knows no HTTP format.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ragspec.errors import RagspecError
from ragspec.rag.grammar.correction import Correction, CorrectionRequest
from ragspec.rag.grammar.grammar import Grammar
from ragspec.rag.grammar.markup import MarkedText
from ragspec.retrieval.search.analysis import COMMON_WORDS
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
_CODES = dict(zip(COMMON_WORDS, "en de fr es it pt nl sv da no fi hu ro tr".split(), strict=True))
_SCRIPTS = {
    "CYRILLIC": ("ru", "Russian"),
    "GREEK": ("el", "Greek"),
    "ARABIC": ("ar", "Arabic"),
    "CJK": ("zh", "Chinese"),
    "HIRAGANA": ("ja", "Japanese"),
    "KATAKANA": ("ja", "Japanese"),
    "HANGUL": ("ko", "Korean"),
}
_WORDS = {language: frozenset(words.split()) for language, words in COMMON_WORDS.items()}
_WORD = re.compile(r"[^\W\d_]+")
_MAX_CHARS = 20_000
_MIN_WORDS = 4


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
            raise ApiError(
                413,
                f"Your text exceeds the limit of {max_chars} characters (it's {length} characters). "
                "Please submit a shorter text.",
                param="text",
            )
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


class DetectedLanguage(NamedTuple):
    """`code`: of `LANGUAGES`, of a language that is not corrected, or "unknown". `confidence` is in [0, 1]."""

    code: str
    name: str
    confidence: float

    @property
    def is_corrected(self) -> bool:
        return self.code in LANGUAGES


def detect_language(text: str, variant: str = DEFAULT) -> DetectedLanguage:
    """`variant` for English, and for texts too short to tell."""
    text = text[:_MAX_CHARS]
    if (script := _script(text)) != "LATIN":
        return DetectedLanguage(*_SCRIPTS.get(script, ("unknown", "another language")), 0.9)
    words = [word.casefold() for word in _WORD.findall(text)]
    counts = Counter({language: sum(word in common for word in words) for language, common in _WORDS.items()})
    (best, most), english = counts.most_common(1)[0], counts["english"]
    if best == "english" or most < 2 * english + _MIN_WORDS // 2 or len(words) < _MIN_WORDS:
        share = english / max(1, counts.total())
        return DetectedLanguage(variant, LANGUAGES[variant], round(0.5 + share / 2, 3))
    return DetectedLanguage(_CODES[best], best.capitalize(), round(most / counts.total(), 3))


def _script(text: str) -> str:
    """The script of most letters; LATIN if there is none."""
    letters = [char for char in text if char.isalpha()][:400]
    scripts = Counter(unicodedata.name(char, "?").split()[0] for char in letters)
    script, count = scripts.most_common(1)[0] if scripts else ("LATIN", 0)
    if 2 * count <= len(letters):
        return "LATIN"
    return "HIRAGANA" if script == "CJK" and scripts["HIRAGANA"] + scripts["KATAKANA"] else script

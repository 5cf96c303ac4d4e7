"""Body and response of /v1/grammar: the corrected text, its edits with kinds and reasons, and statistics."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from ragspec.core import SamplingParams
from ragspec.errors import InputError
from ragspec.numerics.noise import portable_seed
from ragspec.rag.citations import Utf16Offsets
from ragspec.rag.grammar.correction import DEFAULT_PARAMS, Correction, CorrectionRequest
from ragspec.rag.grammar.edit_filters import DEFAULT_FILTER, EditFilter
from ragspec.rag.grammar.edit_kinds import edit_message
from ragspec.rag.grammar.edits import Edit, EditKind
from ragspec.speculation import Speculation
from ragspec.tenants import cache_salt_of
from services.languagetool.check import annotated
from services.languagetool.corrector import Corrected, DetectedLanguage
from services.limits import at_most

_MAX_WORDS = 10_000
_MAX_PARTS = 20_000


class GrammarRequest(BaseModel):
    """Either `text` or `annotation`. `max_tokens` limits one sentence's correction. `ignore`: words and phrases that stay."""

    model_config = ConfigDict(extra="forbid")

    text: str | None = None
    annotation: Annotated[list[dict[str, Any]], at_most(_MAX_PARTS)] | None = None
    model: str | None = None
    language: Literal["auto", "en", "en-US", "en-GB", "en-AU", "en-CA", "en-NZ", "en-ZA"] = "en"
    seed: int | None = Field(None, strict=True)
    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = Field(DEFAULT_PARAMS.max_tokens, strict=True)
    speculation: StrictBool | dict[str, Any] = True
    max_edit_ratio: float | None = Field(None, ge=0.0, le=1.0)
    ignore: Annotated[list[str], at_most(_MAX_WORDS)] = Field([], max_length=_MAX_WORDS)
    disabled_kinds: Annotated[list[EditKind], at_most(len(EditKind))] = []
    keep_numbers: StrictBool = True
    keep_names: StrictBool = True
    cache_salt: str = Field("", max_length=256)

    def correction_request(self, tenant: str) -> CorrectionRequest:
        """Raises: InputError, ApiError 400."""
        if (self.text is None) == (self.annotation is None):
            raise InputError("give either text or annotation")
        parts = None if self.annotation is None else annotated(self.annotation)
        seed = portable_seed() if self.seed is None else self.seed
        params = SamplingParams(temperature=self.temperature, top_p=self.top_p, max_tokens=self.max_tokens, seed=seed)
        edit_filter = EditFilter(
            DEFAULT_FILTER.max_edit_ratio if self.max_edit_ratio is None else self.max_edit_ratio,
            frozenset(self.ignore),
            kinds=frozenset(EditKind) - set(self.disabled_kinds) if self.disabled_kinds else None,
            numbers=self.keep_numbers,
            names=self.keep_names,
        )
        text = "".join(part.text for part in parts) if parts is not None else self.text or ""
        salt, speculation = cache_salt_of(tenant, self.cache_salt), Speculation.of(self.speculation)
        return CorrectionRequest(secrets.token_hex(16), text, params, salt, speculation, edit_filter, parts)


def grammar_reply(model: str, found: DetectedLanguage, corrected: Corrected, *, trusted: bool) -> dict[str, Any]:
    """Offsets are given in characters and in UTF-16 code units. Only trusted callers get statistics of drafting."""
    correction = corrected.correction
    offsets = Utf16Offsets(correction.text)
    return {
        "id": f"grammar-{correction.id}",
        "object": "grammar.correction",
        "model": model,
        "text": correction.text,
        "corrected": correction.corrected,
        "edits": [_edit(edit, offsets) for edit in correction.edits],
        "withheld": [_edit(each.edit, offsets) | {"withheld": each.reason} for each in correction.withheld],
        "unfinished": [list(span) for span in correction.unfinished],
        "language": {"code": found.code, "name": found.name, "confidence": found.confidence},
        "statistics": _statistics(correction, corrected.seconds, trusted=trusted),
        "seed": correction.stats.seed,
        "system_fingerprint": correction.stats.system_fingerprint,
    }


def _edit(edit: Edit, offsets: Utf16Offsets) -> dict[str, Any]:
    return {
        "start": edit.start,
        "end": edit.end,
        "start_utf16": offsets.units(edit.start),
        "end_utf16": offsets.units(edit.end),
        "original": edit.original,
        "replacement": edit.replacement,
        "kind": edit.kind,
        "reason": edit_message(edit),
    }


def _statistics(correction: Correction, seconds: float, *, trusted: bool) -> dict[str, Any]:
    stats = correction.stats
    plain = {
        "num_sentences": len(correction.sentences),
        "num_edits": len(correction.edits),
        "num_withheld": len(correction.withheld),
        "num_prompt_tokens": stats.num_prompt_tokens,
        "num_output_tokens": stats.num_output_tokens,
        "seconds": round(seconds, 4),
    }
    drafting = {
        "num_steps": stats.num_steps,
        "acceptance_length": round(stats.acceptance_length, 3),
        "num_drafted": stats.num_drafted,
        "num_accepted": stats.num_accepted,
        "accepted_by_drafter": stats.accepted_by_drafter,
        "decode_s": round(stats.decode_s, 4),
        "draft_s": round(stats.draft_s, 4),
    }
    return plain | drafting if trusted else plain

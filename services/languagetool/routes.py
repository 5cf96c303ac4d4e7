"""LanguageTool's routes under /v2, and /v1/grammar.

Owns the reading of forms and query strings, and the fields of /v1/grammar: the corrected text, its edits with kinds and reasons,
and statistics. The fields of /v2/check are `check`'s. Errors under /v2 are plain text: the middleware writes them.
"""

import asyncio
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from fastapi import Request as HttpRequest
from pydantic import Field, StrictBool
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ragspec.core import SamplingParams
from ragspec.errors import InputError
from ragspec.numerics.noise import portable_seed
from ragspec.rag.citations import Utf16Offsets
from ragspec.rag.grammar.correction import DEFAULT_PARAMS, Correction, CorrectionRequest
from ragspec.rag.grammar.edit_filters import DEFAULT_FILTER, EditFilter
from ragspec.rag.grammar.edits import Edit, EditKind, edit_message
from ragspec.rag.languages import GuessedLanguage
from ragspec.speculation import Speculation
from ragspec.tenants import cache_salt_of
from services.backend import ServiceBackend
from services.errors import ApiError
from services.languagetool.check import (
    CheckRequest,
    annotated,
    check_reply,
    config_reply,
    languages_reply,
    software_reply,
)
from services.languagetool.corrector import AUTO, DEFAULT, LANGUAGES, Corrected, Corrector, detect_language
from services.limits import RequestBody, at_most, form_fields, read_form
from services.stores.schemas import Tenant

_MAX_WORDS_LISTED = 500
_MAX_WORDS_IGNORED = 10_000
_MAX_PARTS = 20_000


class GrammarRequest(RequestBody):
    """Either `text` or `annotation`. `max_tokens` limits one sentence's correction. `ignore`: words and phrases that stay. The
    `seed` -1 stands for no seed.
    """

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
    ignore: Annotated[list[str], at_most(_MAX_WORDS_IGNORED)] = Field(default=[])
    disabled_kinds: Annotated[list[EditKind], at_most(len(EditKind))] = Field(default=[])
    keep_numbers: StrictBool = True
    keep_names: StrictBool = True
    cache_salt: str = Field("", max_length=256)

    def correction_request(self, tenant: str) -> CorrectionRequest:
        """Raises: InputError, ApiError 400."""
        if (self.text is None) == (self.annotation is None):
            raise InputError("give either text or annotation")
        parts = None if self.annotation is None else annotated(self.annotation)
        seed = portable_seed() if self.seed in (None, -1) else self.seed
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


def grammar_reply(model: str, found: GuessedLanguage, corrected: Corrected, *, trusted: bool) -> dict[str, Any]:
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
    named = {name: getattr(edit, name) for name in ("start", "end", "original", "replacement", "kind")}
    units = {"start_utf16": offsets.units(edit.start), "end_utf16": offsets.units(edit.end)}
    return named | units | {"reason": edit_message(edit)}


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


async def _fields(request: HttpRequest) -> dict[str, str]:
    """Fields of the query string and the form. The form wins; of repeated fields the last counts. Raises: ApiError 400."""
    fields = {name: values[-1] for name, values in form_fields(request.scope["query_string"]).items()}
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() == "multipart/form-data":
        form = await request.form()
        return fields | {name: value for name, value in form.items() if isinstance(value, str)}
    body = await request.body() if request.method == "POST" else b""
    return fields | {name: values[-1] for name, values in (await read_form(body)).items()}


Fields = Annotated[dict[str, str], Depends(_fields)]


def routes(backend: ServiceBackend) -> APIRouter:
    router, correctors = APIRouter(), {name: Corrector(backend, model) for name, model in backend.models.items()}
    _add_check(router, correctors[backend.corrector.name])
    _add_server_facts(router, backend)
    _add_dictionaries(router, backend)
    _add_grammar(router, correctors, backend.corrector.name)
    return router


def _add_check(router: APIRouter, corrector: Corrector) -> None:
    @router.get("/v2/check")
    @router.post("/v2/check")
    async def check(request: HttpRequest, fields: Fields) -> Response:
        checked = await asyncio.to_thread(CheckRequest.of, fields)
        variant = checked.variant if checked.language == AUTO else DEFAULT
        found = await asyncio.to_thread(detect_language, checked.text, variant)
        if checked.language == AUTO and found.code not in LANGUAGES:
            return JSONResponse(check_reply(checked.language, found, None))
        caller, edit_filter = request.state.caller, EditFilter(kinds=checked.kinds)
        correction = CorrectionRequest(
            secrets.token_hex(16), checked.text, tenant=caller.tenant, edit_filter=edit_filter, parts=checked.parts
        )
        if checked.kinds == frozenset():  # all rules are disabled
            correction = CorrectionRequest(correction.id, "")
        corrected = await corrector.correct(caller, correction, checked.dictionaries)
        return JSONResponse(await asyncio.to_thread(check_reply, checked.language, found, corrected))


def _add_server_facts(router: APIRouter, backend: ServiceBackend) -> None:
    max_chars = backend.config.service.grammar.max_text_chars

    @router.get("/v2/languages")
    async def languages() -> Response:
        return JSONResponse(languages_reply())

    @router.get("/v2/maxtextlength")
    async def max_text_length() -> Response:
        return PlainTextResponse(str(max_chars))

    @router.get("/v2/configinfo")
    async def configuration(request: HttpRequest) -> Response:
        if "language" not in request.query_params:
            raise ApiError(400, "'language' parameter missing")
        return JSONResponse(config_reply(max_chars))

    @router.get("/v2/info")
    async def software() -> Response:
        return JSONResponse(software_reply())

    @router.get("/v2/healthcheck")
    async def health() -> Response:
        """Clients call this before they send a text."""
        limiter = backend.rate_limiter
        if limiter.draining or limiter.running >= backend.config.service.limits.max_in_flight:
            raise ApiError(503, "There are currently too many requests; come back later", retry_after_s=5.0)
        return PlainTextResponse("OK")


def _add_dictionaries(router: APIRouter, backend: ServiceBackend) -> None:
    dictionaries = backend.dictionaries

    @router.get("/v2/words")
    def words(tenant: Tenant, fields: Fields) -> Response:
        names = tuple(name for name in fields.get("dicts", "").split(",") if name)
        first, count = _number(fields, "offset", 0), min(_MAX_WORDS_LISTED, _number(fields, "limit", 10))
        return JSONResponse({"words": dictionaries.words(tenant, names)[first : first + count]})

    @router.post("/v2/words/add")
    def add(tenant: Tenant, fields: Fields) -> Response:
        return JSONResponse({"added": dictionaries.add(tenant, *_word(fields))})

    @router.post("/v2/words/delete")
    def delete(tenant: Tenant, fields: Fields) -> Response:
        return JSONResponse({"deleted": dictionaries.delete(tenant, *_word(fields))})


def _add_grammar(router: APIRouter, correctors: Mapping[str, Corrector], default: str) -> None:
    @router.post("/v1/grammar")
    async def grammar(body: GrammarRequest, request: HttpRequest) -> Response:
        corrector = correctors.get(body.model or default)
        if corrector is None:
            raise ApiError(404, f"the model {body.model!r} is not served here", param="model", code="model_not_found")
        caller = request.state.caller
        correction = await asyncio.to_thread(body.correction_request, caller.tenant)
        found = await asyncio.to_thread(detect_language, correction.text)
        if body.language == AUTO and found.code not in LANGUAGES:
            raise ApiError(400, f"the text seems to be {found.name}, and only English is corrected", param="language")
        corrected = await corrector.correct(caller, correction)
        reply = await asyncio.to_thread(grammar_reply, corrector.model.name, found, corrected, trusted=caller.trusted)
        return JSONResponse(reply)


def _number(fields: dict[str, str], name: str, default: int) -> int:
    given = fields.get(name, str(default))
    if not (given.isascii() and given.isdigit() and len(given) < 10):
        raise ApiError(400, f"'{name}' must be a whole number, not '{given[:20]}'")
    return int(given)


def _word(fields: Mapping[str, str]) -> tuple[str, str]:
    """Word and dictionary. Raises: ApiError 400."""
    if not fields.get("word"):
        raise ApiError(400, "Missing 'word' parameter")
    return fields["word"], fields.get("dict", "")

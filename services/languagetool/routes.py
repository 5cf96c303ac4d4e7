"""LanguageTool's routes under /v2, and /v1/grammar.

Owns the reading of forms and query strings. Errors under /v2 are plain text: the middleware writes them.
"""

from __future__ import annotations

import asyncio
import secrets

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ragspec.rag.grammar.correction import CorrectionRequest
from ragspec.rag.grammar.edit_filters import EditFilter
from services.backend import ServiceBackend
from services.errors import ApiError
from services.languagetool.check import CheckRequest, check_reply, config_reply, languages_reply, software_reply
from services.languagetool.corrector import AUTO, DEFAULT, Corrector, detect_language
from services.languagetool.grammar import GrammarRequest, grammar_reply
from services.limits import form_fields, read_form

_MAX_WORDS = 500


def routes(backend: ServiceBackend) -> APIRouter:
    router, corrector = APIRouter(), Corrector(backend)
    _add_check(router, backend, corrector)
    _add_server_facts(router, backend)
    _add_dictionaries(router, backend)
    _add_grammar(router, backend, corrector)
    return router


def _add_check(router: APIRouter, backend: ServiceBackend, corrector: Corrector) -> None:
    @router.get("/v2/check")
    @router.post("/v2/check")
    async def check(request: HttpRequest) -> Response:
        checked = await asyncio.to_thread(CheckRequest.of, await _fields(request))
        variant = checked.variant if checked.language == AUTO else DEFAULT
        found = await asyncio.to_thread(detect_language, checked.text, variant)
        if checked.language == AUTO and not found.is_corrected:
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
    async def words(request: HttpRequest) -> Response:
        fields, tenant = await _fields(request), request.state.caller.tenant
        names = tuple(name for name in fields.get("dicts", "").split(",") if name)
        first, count = _number(fields, "offset", 0), min(_MAX_WORDS, _number(fields, "limit", 10))
        found = await asyncio.to_thread(dictionaries.words, tenant, names)
        return JSONResponse({"words": found[first : first + count]})

    @router.post("/v2/words/add")
    async def add(request: HttpRequest) -> Response:
        tenant, word, name = await _word(request)
        return JSONResponse({"added": await asyncio.to_thread(dictionaries.add, tenant, word, name)})

    @router.post("/v2/words/delete")
    async def delete(request: HttpRequest) -> Response:
        tenant, word, name = await _word(request)
        return JSONResponse({"deleted": await asyncio.to_thread(dictionaries.delete, tenant, word, name)})


def _add_grammar(router: APIRouter, backend: ServiceBackend, corrector: Corrector) -> None:
    @router.post("/v1/grammar")
    async def grammar(body: GrammarRequest, request: HttpRequest) -> Response:
        if body.model not in (None, backend.model):
            raise ApiError(404, f"the model {body.model!r} is not served here", param="model", code="model_not_found")
        caller = request.state.caller
        correction = await asyncio.to_thread(body.correction_request, caller.tenant)
        found = await asyncio.to_thread(detect_language, correction.text)
        if body.language == AUTO and not found.is_corrected:
            raise ApiError(400, f"the text seems to be {found.name}, and only English is corrected", param="language")
        corrected = await corrector.correct(caller, correction)
        reply = await asyncio.to_thread(grammar_reply, backend.model, found, corrected, trusted=caller.trusted)
        return JSONResponse(reply)


async def _fields(request: HttpRequest) -> dict[str, str]:
    """Fields of the query string and the form. The form wins; of repeated fields the last counts. Raises: ApiError 400."""
    fields = {name: values[-1] for name, values in form_fields(request.scope["query_string"]).items()}
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() == "multipart/form-data":
        form = await request.form()
        return fields | {name: value for name, value in form.items() if isinstance(value, str)}
    body = await request.body() if request.method == "POST" else b""
    return fields | {name: values[-1] for name, values in (await read_form(body)).items()}


def _number(fields: dict[str, str], name: str, default: int) -> int:
    given = fields.get(name, str(default))
    if not (given.isascii() and given.isdigit() and len(given) < 10):
        raise ApiError(400, f"'{name}' must be a whole number, not '{given[:20]}'")
    return int(given)


async def _word(request: HttpRequest) -> tuple[str, str, str]:
    """Tenant, word and dictionary. Raises: ApiError 400."""
    fields = await _fields(request)
    if not fields.get("word"):
        raise ApiError(400, "Missing 'word' parameter")
    return request.state.caller.tenant, fields["word"], fields.get("dict", "")

"""LanguageTool's routes under /v2, and /v1/grammar.

Errors under /v2 are plain text: whatever a route raises, the guard in front of it writes so.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.datastructures import FormData
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ragspec.rag.grammar.edit_filters import EditFilter
from services.backend import Backend
from services.errors import ApiError
from services.languagetool.asking import Check, fields_of
from services.languagetool.correcting import Correcting, Task
from services.languagetool.corrections import GrammarRequest, grammar_reply
from services.languagetool.languages import AUTO, DEFAULT, detected
from services.languagetool.replies import check_reply, config_reply, info_reply, languages_reply

_MOST_LISTED = 500


def routes(backend: Backend) -> APIRouter:
    router, correcting = APIRouter(), Correcting(backend)
    _checking(router, backend, correcting)
    _about(router, backend)
    _words(router, backend)
    _grammar(router, backend, correcting)
    return router


def _checking(router: APIRouter, backend: Backend, correcting: Correcting) -> None:
    ratio = backend.config.service.grammar.max_edit_ratio

    @router.get("/v2/check")
    @router.post("/v2/check")
    async def check(request: HttpRequest) -> Response:
        asked = await asyncio.to_thread(Check.of, await _fields(request))
        found = await asyncio.to_thread(detected, asked.text, asked.variant if asked.language == AUTO else DEFAULT)
        if asked.language == AUTO and not found.is_corrected:
            return JSONResponse(check_reply(asked.language, found, None))
        edit_filter = EditFilter(ratio, kinds=asked.kinds)
        task = Task(asked.text, asked.parts, edit_filter=edit_filter, dictionaries=asked.dictionaries)
        if asked.kinds == frozenset():  # nothing is wanted, so nothing is looked for
            task = Task("")
        corrected = await correcting.correct(request.state.caller, task)
        return JSONResponse(await asyncio.to_thread(check_reply, asked.language, found, corrected))


def _about(router: APIRouter, backend: Backend) -> None:
    most = backend.config.service.grammar.max_text_chars

    @router.get("/v2/languages")
    async def languages() -> Response:
        return JSONResponse(languages_reply())

    @router.get("/v2/maxtextlength")
    async def max_text_length() -> Response:
        return PlainTextResponse(str(most))

    @router.get("/v2/configinfo")
    async def config_info(request: HttpRequest) -> Response:
        if "language" not in request.query_params:
            raise ApiError(400, "'language' parameter missing")
        return JSONResponse(config_reply(most))

    @router.get("/v2/info")
    async def info() -> Response:
        return JSONResponse(info_reply())

    @router.get("/v2/healthcheck")
    async def health() -> Response:
        """Asked before a client sends its text: whether there is room for it."""
        if backend.gate.draining or backend.gate.running >= backend.config.service.limits.max_in_flight:
            raise ApiError(503, "There are currently too many requests; come back later", retry_after_s=5.0)
        return PlainTextResponse("OK")


def _words(router: APIRouter, backend: Backend) -> None:
    words = backend.dictionaries

    @router.get("/v2/words")
    async def listed(request: HttpRequest) -> Response:
        fields, tenant = await _fields(request), request.state.caller.tenant
        names = tuple(name for name in fields.get("dicts", "").split(",") if name)
        first, count = _number(fields, "offset", 0), min(_MOST_LISTED, _number(fields, "limit", 10))
        found = await asyncio.to_thread(words.words, tenant, names)
        return JSONResponse({"words": found[first : first + count]})

    @router.post("/v2/words/add")
    async def add(request: HttpRequest) -> Response:
        fields = await _fields(request)
        word, name = _word(fields), fields.get("dict", "")
        return JSONResponse({"added": await asyncio.to_thread(words.add, request.state.caller.tenant, word, name)})

    @router.post("/v2/words/delete")
    async def delete(request: HttpRequest) -> Response:
        fields = await _fields(request)
        word, name = _word(fields), fields.get("dict", "")
        return JSONResponse({"deleted": await asyncio.to_thread(words.delete, request.state.caller.tenant, word, name)})


def _grammar(router: APIRouter, backend: Backend, correcting: Correcting) -> None:
    ratio = backend.config.service.grammar.max_edit_ratio

    @router.post("/v1/grammar")
    async def grammar(body: GrammarRequest, request: HttpRequest) -> Response:
        if body.model not in (None, backend.model):
            raise ApiError(404, f"the model {body.model!r} is not served here", param="model", code="model_not_found")
        task, caller = body.task(ratio), request.state.caller
        found = await asyncio.to_thread(detected, task.text)
        if body.language == AUTO and not found.is_corrected:
            raise ApiError(400, f"the text seems to be {found.name}, and only English is corrected", param="language")
        corrected = await correcting.correct(caller, task)
        reply = await asyncio.to_thread(grammar_reply, backend.model, found, corrected, trusted=caller.trusted)
        return JSONResponse(reply)


async def _fields(request: HttpRequest) -> dict[str, str]:
    """Of the address and of the form; the form's count more."""
    asked = fields_of(request.scope["query_string"])
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        form: FormData = await request.form()
        return asked | {name: value for name, value in form.items() if isinstance(value, str)}
    return asked | (fields_of(await request.body()) if request.method == "POST" else {})


def _number(fields: dict[str, str], name: str, default: int) -> int:
    given = fields.get(name, str(default))
    if not (given.isascii() and given.isdigit() and len(given) < 10):
        raise ApiError(400, f"'{name}' must be a whole number, not '{given[:20]}'")
    return int(given)


def _word(fields: dict[str, str]) -> str:
    if not fields.get("word"):
        raise ApiError(400, "Missing 'word' parameter")
    return fields["word"]

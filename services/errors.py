"""Every error as a client sees it: OpenAI's JSON body, one line of plain text under /v2, as LanguageTool writes it, or
JSON-RPC's at /mcp.

    {"error": {"message": "...", "type": "invalid_request_error", "param": "messages", "code": "context_length_exceeded"}}

Owns the mapping from the library's errors to statuses (`api_error`). Never shows a message of an error that the client did not
cause: it may hold paths, addresses or texts of others.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from starlette.responses import PlainTextResponse, Response

from ragspec import errors as library

INVALID = "invalid_request_error"
SERVER = "server_error"
MCP = "/mcp"
"""The address of the tools for agents."""
_MCP_CODE = -32000
_RETRY_AFTER_S = 5.0
_MAX_PARAM_CHARS = 256
_FIELD = re.compile(r"([a-z]+(?:_[a-z]+)*) must be ")
_BODY_NAMES = {"json_schema": "response_format"}
_TYPES = {401: INVALID, 403: INVALID, 429: "requests", 500: SERVER, 503: SERVER}
_CODES = {
    400: None,
    401: "invalid_api_key",
    408: "timeout",
    413: "request_too_large",
    429: "rate_limit_exceeded",
    431: "headers_too_large",
    500: "internal_error",
    503: "unavailable",
    504: "timeout",
}
"""Codes of statuses whose own name is not the code."""


class ClientGone(Exception):
    """The client left before it had sent its whole request."""


class ClientTooSlow(Exception):
    """The client did not read its answer in time."""


class ApiError(Exception):
    """An error response. `type` and `code` default to the status's."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message)
        self.status, self.message, self.param, self.headers = status, message, param, headers or {}
        self.type = type or _TYPES.get(status, INVALID if status < 500 else SERVER)
        self.code = code or (_CODES[status] if status in _CODES else HTTPStatus(status).name.lower())
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self, path: str) -> Response:
        """In the format of `path`'s API."""
        headers = dict(self.headers)
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if is_languagetool(path):
            return PlainTextResponse(f"Error: {self.message}".encode("utf-8", "replace"), self.status, headers)
        of_mcp = {"jsonrpc": "2.0", "id": None, "error": {"code": _MCP_CODE, "message": self.message}}
        return Response(json.dumps(of_mcp if path == MCP else self.body()), self.status, headers, "application/json")


def is_languagetool(path: str) -> bool:
    """Whether `path` belongs to LanguageTool's API."""
    return path == "/v2" or path.startswith("/v2/")


def api_error(cause: Exception) -> ApiError:
    """The response to any error. Unexpected errors and errors of the server keep their message to the log."""
    match cause:
        case ApiError():
            return cause
        case library.PromptTooLong():
            return ApiError(400, str(cause), param="messages", code="context_length_exceeded")
        case library.NotFound():
            return ApiError(404, str(cause))
        case library.InputError():
            field = _FIELD.match(str(cause))
            return ApiError(400, str(cause), param=_BODY_NAMES.get(field[1], field[1]) if field else None)
        case library.Overloaded():
            return ApiError(429, str(cause), code="server_overloaded", retry_after_s=_RETRY_AFTER_S)
        case library.EngineClosed() | library.ReplicaLost() | library.RankLost() | library.Cancelled():
            return _unavailable("the model is not available at the moment")
        case library.RetrievalError() | library.StoreError():
            return _unavailable("the index cannot be searched at the moment")
        case library.IndexBusy():
            return _unavailable("another process is writing the index; nothing was changed")
        case library.NoRoom():
            return ApiError(507, str(cause))
        case library.SaveError():
            return ApiError(507, "the request's data could not be saved; earlier data is unchanged")
        case library.EngineError():
            return ApiError(500, "the answer could not be written", code="generation_failed")
    return ApiError(500, "an unexpected error; the request id names it in the log")


def _unavailable(message: str) -> ApiError:
    return ApiError(503, message, retry_after_s=_RETRY_AFTER_S)


def is_expected(cause: Exception) -> bool:
    """Whether the response says all there is to know, so that the log needs no traceback."""
    is_library_error = isinstance(cause, library.RagspecError) and type(cause) is not library.EngineError
    return isinstance(cause, ApiError) or is_library_error


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first of pydantic's errors, with the parameter that has it, as OpenAI reports it."""
    first: Mapping[str, Any] = errors[0] if errors else {"loc": (), "msg": "the request is not valid"}
    if first.get("type") == "json_invalid":
        return ApiError(400, "the body is not JSON")
    is_placed = tuple(first["loc"][:1]) in (("body",), ("query",), ("path",), ("header",))  # as FastAPI names it
    param = ".".join(map(str, first["loc"][is_placed:]))
    param = param[:_MAX_PARAM_CHARS]  # an unknown key is as long as its client likes
    return ApiError(400, f"{param}: {first['msg']}" if param else first["msg"], param=param or None)

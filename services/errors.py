"""Every error as a client sees it: OpenAI's body, or one line of plain text where LanguageTool is spoken.

    {"error": {"message": "...", "type": "invalid_request_error", "param": "messages", "code": "context_length_exceeded"}}

`api_error` is the one place where errors of the library get a status.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ragspec.errors import (
    Cancelled,
    EngineClosed,
    EngineError,
    IndexBusy,
    InputError,
    NoRoom,
    NotFound,
    Overloaded,
    PromptTooLong,
    RagspecError,
    RankLost,
    ReplicaLost,
    RetrievalError,
    SaveError,
    StoreError,
)

INVALID = "invalid_request_error"
SERVER = "server_error"
LANGUAGETOOL = "/v2"
_COME_BACK_S = 5.0
_TYPES = {401: INVALID, 403: INVALID, 429: "requests", 500: SERVER, 503: SERVER}
_CODES = {
    400: None,
    401: "invalid_api_key",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    411: "length_required",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "rate_limit_exceeded",
    431: "headers_too_large",
    500: "internal_error",
    503: "unavailable",
    504: "timeout",
    507: "insufficient_storage",
}


class ApiError(Exception):
    """An answer other than the one asked for. `type` and `code` follow from the status unless they are given."""

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
        self.code = code or _CODES.get(status)
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def reply(self, path: str) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """Headers and body, in the language spoken at `path`."""
        if path == LANGUAGETOOL or path.startswith(LANGUAGETOOL + "/"):
            kind, content = b"text/plain; charset=utf-8", f"Error: {self.message}".encode("utf-8", "replace")
        else:
            kind, content = b"application/json", json.dumps(self.body()).encode()
        headers = [(b"content-type", kind), (b"content-length", str(len(content)).encode())]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(max(1, math.ceil(self.retry_after_s))).encode()))
        headers += [(name.lower().encode(), value.encode("latin-1")) for name, value in self.headers.items()]
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers, content


def api_error(cause: Exception) -> ApiError:
    """What a client is told of an error. One that no client could have caused or understood says nothing of itself."""
    if isinstance(cause, ApiError):
        return cause
    if isinstance(cause, PromptTooLong):
        return ApiError(400, str(cause), param="messages", code="context_length_exceeded")
    if isinstance(cause, NotFound):
        return ApiError(404, str(cause))
    if isinstance(cause, InputError):
        return ApiError(400, str(cause))
    if isinstance(cause, Overloaded):
        return ApiError(429, str(cause), code="server_overloaded", retry_after_s=_COME_BACK_S)
    if isinstance(cause, EngineClosed | ReplicaLost | RankLost | Cancelled):
        return ApiError(503, "the model is not available at the moment", retry_after_s=_COME_BACK_S)
    if isinstance(cause, RetrievalError | StoreError):
        return ApiError(503, "the index cannot be searched at the moment", retry_after_s=_COME_BACK_S)
    if isinstance(cause, IndexBusy):
        return ApiError(503, "the index is being written by another; nothing was changed", retry_after_s=_COME_BACK_S)
    if isinstance(cause, NoRoom):
        return ApiError(507, str(cause))
    if isinstance(cause, SaveError):
        return ApiError(507, "what was sent could not be saved; what was there before still is")
    if isinstance(cause, EngineError):
        return ApiError(500, "the answer could not be written", code="generation_failed")
    return ApiError(500, "an unexpected error; the request id names it in the log")


def is_known(cause: Exception) -> bool:
    """Whether `api_error` tells a client all that there is to say."""
    return isinstance(cause, ApiError) or (isinstance(cause, RagspecError) and type(cause) is not EngineError)


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """What pydantic says of a body, as OpenAI says it: the first fault, and the parameter that has it."""
    first = errors[0] if errors else {"loc": (), "msg": "the request is not valid"}
    place = [str(part) for part in first["loc"] if part not in ("body", "query", "path", "header")]
    if first.get("type") == "json_invalid":
        return ApiError(400, "the body is not JSON")
    param = ".".join(place) or None
    what = f"{param}: " if param else ""
    return ApiError(400, f"{what}{first['msg']}", param=param)

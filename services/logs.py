"""Logs: one JSON object a line, with its request's id and without any user's text.

Owns the format of a line. Messages are constants; all values go into `extra`, so that a reviewer sees which values are logged.

    >>> log.info("keys reread", extra={"keys": 3})
    {"time": "2026-01-01T00:00:00.000Z", "level": "info", "logger": "services.keys", "message": "keys reread", "keys": 3}
"""

import contextvars
import json
import logging
import traceback
from datetime import UTC, datetime
from typing import Any

current_request: contextvars.ContextVar[str] = contextvars.ContextVar("ragspec_request", default="")
"""The request id of the running task."""

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_OWN_LOGGERS = ("services", "ragspec")


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        created = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": created.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := current_request.get():
            line["request_id"] = request_id
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}
        if record.exc_info and record.exc_info[0] is not None:
            line["error"] = record.exc_info[0].__name__
            # Why not the whole traceback: the error's message may quote a user's text
            frames = traceback.extract_tb(record.exc_info[2])
            line["frames"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
        return json.dumps(line, default=str)


def start_logging(level: int = logging.INFO) -> None:
    """Makes this process log JSON: the service and the library from `level` on, other libraries from warnings on."""
    handler = logging.StreamHandler()  # to stderr
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in _OWN_LOGGERS:
        logging.getLogger(name).setLevel(level)

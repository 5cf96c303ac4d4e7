"""Logs: one JSON object a line, with the request it belongs to and without a word of any user.

    >>> log = log_of(__name__)
    >>> log.info("keys reread", extra={"keys": 3})
    {"time": "2026-01-01T00:00:00.000Z", "level": "info", "logger": "services.keys", "message": "keys reread", "keys": 3}

The rule that keeps text of users out: messages are constant, and what varies goes into `extra`, where it can be seen.
"""

from __future__ import annotations

import contextvars
import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TextIO

current_request: contextvars.ContextVar[str] = contextvars.ContextVar("ragspec_request", default="")
"""The id of the request that the running task works on."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_OURS = ("services", "ragspec")


def log_of(name: str) -> logging.Logger:
    return logging.getLogger(name)


class JsonLines(logging.Formatter):
    """A record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := current_request.get():
            line["request_id"] = request_id
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info and record.exc_info[0] is not None:
            line["error"], line["frames"] = record.exc_info[0].__name__, frames_of(record.exc_info[2])
        return json.dumps(line, default=str)


def frames_of(trace: TracebackType | None) -> list[str]:
    """Where an error went through. Why not the traceback: an error's message may quote what a user wrote."""
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(trace)]


def start_logging(level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """From now on this process logs so: the service and the library; of other libraries, warnings and what is worse."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in _OURS:
        logging.getLogger(name).setLevel(level)

"""Rows of a .jsonl file: objects with `text` and maybe `id`, `title`, `source`, `owner`, `metadata`; other keys are metadata."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ragspec.core import Document
from ragspec.errors import InputError

_FIELDS = ("title", "source", "owner")
_KEYS = frozenset({"id", "text", "metadata", *_FIELDS})
_MARK = b"\xef\xbb\xbf"


def read(path: Path, name: str) -> Iterator[Document]:
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.removeprefix(_MARK).strip():
                yield _document(line.removeprefix(_MARK), f"{path}, line {number}", f"{name}:{number}")


def _document(line: bytes, place: str, default_id: str) -> Document:
    row = _row(line, place)
    given_id = row.get("id", default_id)
    is_number = isinstance(given_id, int) and not isinstance(given_id, bool)
    fields: dict[str, Any] = {"id": str(given_id) if is_number else given_id}
    fields |= {key: row.get(key) or "" for key in _FIELDS}
    for key, value in fields.items():
        if not isinstance(value, str) or (key == "id" and not value):
            raise InputError(f"{place}: `{key}` must be a {'non-empty ' if key == 'id' else ''}string")
    metadata = row.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise InputError(f"{place}: `metadata` must be an object")
    others = {key: value for key, value in row.items() if key not in _KEYS}
    return Document(text=row["text"], metadata={**others, **metadata}, **fields)


def _row(line: bytes, place: str) -> dict[str, Any]:
    try:
        row: Any = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as cause:
        raise InputError(f"{place}: not UTF-8 text (byte {cause.start} of the line)") from cause
    except ValueError as cause:
        raise InputError(f"{place}: not JSON: {cause}") from cause
    except RecursionError as cause:
        raise InputError(f"{place}: nested too deeply") from cause
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise InputError(f"{place}: not an object with a string `text`")
    return row

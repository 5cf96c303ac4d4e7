"""Rows of a .csv or .tsv file with a header.

The columns `id`, `title`, `source` and `owner` are used as such, the others kept as metadata. A column `text` is the text; where
there is none, every cell that is not empty becomes a line "name: value". Rows without text are left out.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path

from ragspec.core import Document
from ragspec.errors import InputError
from ragspec.retrieval.reading.parsed_file import encoding_name, encoding_of

_KEYS = frozenset({"id", "text", "title", "source", "owner"})
_DELIMITERS = ",;\t"


def read(path: Path, name: str) -> Iterator[Document]:
    csv.field_size_limit(sys.maxsize)  # Why: the limit belongs to the process; it is only ever raised
    line = 1  # where the row begins
    with open(path, encoding=encoding_of(path), newline="") as lines:
        try:
            rows = csv.reader(lines, delimiter=_delimiter(lines.readline()), strict=True)
            lines.seek(0)
            header: list[str] = []
            for cells in rows:
                if not header:
                    header = _header(cells, f"{path}, line {line}")
                elif row := _row(header, cells, f"{path}, line {line}"):
                    yield from _document(row, f"{name}:{line}", "text" in header)
                line = rows.line_num + 1
        except csv.Error as cause:
            raise InputError(f"{path}, line {line}: {cause}") from cause
        except UnicodeDecodeError as cause:
            raise InputError(f"{path}, line {line} or after it: not {encoding_name(cause)} text") from cause


def _delimiter(header: str) -> str:
    """What separates most names; names in quotation marks may hold any of them."""
    outside = "".join(header.split('"')[::2])
    return max(_DELIMITERS, key=outside.count)


def _header(cells: list[str], place: str) -> list[str]:
    """Names of columns; those that have a meaning in lower case. An empty line before it is passed over."""
    names = [name.strip() for name in cells]
    names = [name.lower() if name.lower() in _KEYS else name for name in names]
    named = [name for name in names if name]
    if len(set(named)) < len(named):
        raise InputError(f"{place}: two columns have the same name")
    return names


def _row(header: list[str], cells: list[str], place: str) -> dict[str, str]:
    if any(cell.strip() for cell in cells[len(header) :]):
        raise InputError(f"{place}: {len(cells)} cells below {len(header)} columns")
    pairs = enumerate(zip(header, cells, strict=False), 1)
    return {name or f"column {number}": cell.strip() for number, (name, cell) in pairs if cell.strip()}


def _document(row: dict[str, str], default_id: str, has_text: bool) -> Iterator[Document]:
    text = row.get("text", "") if has_text else "\n".join(f"{name}: {value}" for name, value in row.items())
    if text:
        yield Document(
            id=row.get("id", default_id),
            text=text,
            title=row.get("title", ""),
            source=row.get("source", ""),
            metadata={name: value for name, value in row.items() if name not in _KEYS},
            owner=row.get("owner", ""),
        )

"""Tables of documents: each row of a .jsonl, .csv or .tsv file is one document.

JSON Lines: objects with `text` and optionally `id`, `title`, `source`, `owner` and `metadata`; other keys are metadata.
CSV and TSV: the columns `id`, `title`, `source` and `owner` are used as such, other columns are metadata. The text is the column
`text`; without that column, every non-empty cell becomes a line "name: value", and the file's name stands before ids: two tables
number their rows alike. Columns without a name are named by their number. Rows without text are left out, and named are rows
that cannot be read or that have the id of an earlier row.

    >>> list(read_csv(Path("faq.csv"), "faq.csv", []))
"""

import csv
import itertools
import json
import re
import sys
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from ragspec.core import Block, BlockKind, Document, check_characters
from ragspec.errors import InputError
from ragspec.retrieval.reading.parsed_file import Unread, encoding_name, encoding_of

_FIELDS = ("title", "source", "owner")
_COLUMNS = frozenset({"id", "text", *_FIELDS})
_KEYS = _COLUMNS | {"metadata"}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_DELIMITERS = ",;\t"
_VALUE = re.compile(
    r"(?P<date>\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}(?:[ T][\d:.]+(?:Z|[+-]\d\d:?\d\d)?)?)|(?P<number>[+-]?[\d.,]*\d)"
    r"|(?P<address>[^\s@]+@[^\s@]+|https?://\S+)"
)
_MAX_VALUE_CHARS, _MAX_UNREAD = 100, 10_000
_DELIMITER_SETTING = re.compile(r'"?sep=([,;|\t])"?\r?\n?')


def read_jsonl(path: Path, name: str, unread: list[Unread]) -> Iterator[Document]:
    """A line that cannot be read, or has the id of an earlier one, is left out.

    Raises: InputError if these are most lines: the file is no JSON Lines, or its ids name no rows.
    """
    ids, num_bad = set[str](), 0
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            content = line.removeprefix(_BYTE_ORDER_MARK)
            if not content.strip():
                continue
            try:
                document = _json_document(_parsed(content), f"{name}:{number}")
                bad = _doubled(number, document.id) if document.id in ids else None
            except InputError as cause:
                bad = Unread(f"line {number}", str(cause))
            if bad is None:
                ids.add(document.id)
                yield document
                continue
            num_bad += 1
            if num_bad <= _MAX_UNREAD:
                unread.append(bad)
    if num_bad > len(ids):
        raise InputError(f"{path}, {unread[0]}")
    if num_bad > _MAX_UNREAD:
        unread.append(Unread(f"{num_bad - _MAX_UNREAD} more lines", "left out too"))


def _doubled(line: int, document_id: str) -> Unread:
    return Unread(f"line {line}", f"an earlier row has its id, {document_id!r}", is_doubled=True)


def _json_document(row: dict[str, Any], default_id: str) -> Document:
    given_id = row.get("id", default_id)
    is_number = isinstance(given_id, int) and not isinstance(given_id, bool)
    fields: dict[str, Any] = {"id": str(given_id) if is_number else given_id}
    fields |= {key: row.get(key) or "" for key in _FIELDS}
    for key, value in fields.items():
        if not isinstance(value, str) or (key == "id" and not value):
            raise InputError(f"`{key}` must be a {'non-empty ' if key == 'id' else ''}string")
    metadata = row.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise InputError("`metadata` must be an object")
    others = {key: value for key, value in row.items() if key not in _KEYS}
    for value in (fields["id"], row["text"]):
        check_characters(value, "it")
    return Document(text=row["text"], metadata={**others, **metadata}, **fields)


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        row: Any = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as cause:
        raise InputError(f"not UTF-8 text (byte {cause.start} of the line)") from cause
    except ValueError as cause:
        raise InputError(f"not JSON: {cause}") from cause
    except RecursionError as cause:
        raise InputError("nested too deeply") from cause
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise InputError("not an object with a string `text`")
    return row


def read_csv(path: Path, name: str, unread: list[Unread]) -> Iterator[Document]:
    """A row that cannot be read, or has the id of an earlier one, is left out. Excel's first line `sep=;` sets the delimiter.

    Raises: InputError if the header or all rows cannot be read, or most rows have the id of another.
    """
    csv.field_size_limit(sys.maxsize)  # the limit belongs to the process and is only ever raised
    header: list[str] = []
    num_doubled, ids = 0, set[str]()
    try:
        with open(path, encoding=encoding_of(path), newline="") as lines:
            first = lines.readline()
            setting = _DELIMITER_SETTING.fullmatch(first)
            if not setting:
                lines.seek(0)
            delimiter = setting[1] if setting else _delimiter(first)
            rows = _csv_rows(lines, delimiter, 2 if setting else 1, unread)
            first_rows = [*itertools.islice(rows, 2)]
            if len(first_rows) == 2 and _holds_values(first_rows[0][1], first_rows[1][1]):
                header = [""] * len(first_rows[0][1])
                unread.append(Unread("", "its first line holds values, so its columns are named by number"))
            for line, cells in itertools.chain(first_rows, rows):
                if not header and len(cells) > 1 and sum(map(bool, map(str.strip, cells))) < 2:
                    unread.append(Unread("", f"line {line} stands above the names of the columns"))
                elif not header:
                    header = _header(cells, f"{path}, line {line}")
                elif any(cell.strip() for cell in cells[len(header) :]):
                    unread.append(Unread(f"line {line}", f"{len(cells)} cells below {len(header)} columns"))
                elif row := _named_cells(header, cells):
                    given, has_text = row.get("id", ""), "text" in header
                    if has_text and "text" not in row:
                        continue
                    own_id = given if given and has_text else f"{name}:{given or line}"
                    if own_id in ids and has_text:
                        num_doubled += 1
                        if num_doubled <= _MAX_UNREAD:
                            unread.append(_doubled(line, own_id))
                        continue
                    own_id = _unique_id(own_id, line, ids, unread)
                    ids.add(own_id)
                    yield from _csv_document(row, own_id, has_text)
    except UnicodeDecodeError as cause:
        raise InputError(f"{path}: not {encoding_name(cause)} text") from cause
    if num_doubled > _MAX_UNREAD:
        unread.append(Unread(f"{num_doubled - _MAX_UNREAD} more lines", "left out too"))
    if (num_doubled > len(ids) or not ids) and (places := [each for each in unread if each.place]):
        raise InputError(f"{path}, {places[0]}")


def _unique_id(own_id: str, line: int, ids: Collection[str], unread: list[Unread]) -> str:
    """An id made of the file's name, with the line behind it where an earlier row has the same."""
    unique = own_id
    while unique in ids:
        unique += f":{line}"
    if unique != own_id and len(unread) < _MAX_UNREAD:
        unread.append(Unread("", f"an earlier row has the id or line of line {line}, which is named {unique}"))
    return unique


def _csv_rows(lines: TextIO, delimiter: str, line: int, unread: list[Unread]) -> Iterator[tuple[int, list[str]]]:
    """Each row with the number of its first line, from `line` on. A row with a badly quoted cell ends with its first line."""
    taken: list[str] = []  # lines since the last row
    returned: deque[str] = deque()  # to be read again

    def source() -> Iterator[str]:
        while each := returned.popleft() if returned else next(lines, ""):
            taken.append(each)
            yield each

    rows = csv.reader(source(), delimiter=delimiter, strict=True)
    while True:
        try:
            cells = next(rows)
        except StopIteration:
            return
        except csv.Error as cause:
            unread.append(Unread(f"line {line}", str(cause)))
            returned.extendleft(reversed(taken[1:]))
            del taken[1:]
            rows = csv.reader(source(), delimiter=delimiter, strict=True)
            cells = []
        if cells:
            yield line, cells
        line += len(taken)
        taken.clear()


def _delimiter(header: str) -> str:
    """The most frequent delimiter outside quotation marks; `|` where there is no other."""
    outside = "".join(header.split('"')[::2])
    is_other = "|" in outside and not any(each in outside for each in _DELIMITERS)
    return "|" if is_other else max(_DELIMITERS, key=outside.count)


def _holds_values(first: Sequence[str], second: Sequence[str]) -> bool:
    """Whether a table's first line holds dates or addresses, each above another or an empty cell, and so is no header.

    Why not numbers: years, quantiles and postal codes are names of columns.
    """
    pairs = [(_kind(cell), below.strip()) for cell, below in zip(first, second, strict=False)]
    alike = [not below or _kind(below) == kind for kind, below in pairs if kind in ("date", "address")]
    return bool(alike) and all(alike)


def _kind(cell: str) -> str | None:
    found = _VALUE.fullmatch(cell.strip()[:_MAX_VALUE_CHARS])
    return found and found.lastgroup


def _header(cells: list[str], place: str) -> list[str]:
    """Names of the columns; known names in lower case. Empty for an empty line before the header."""
    names = [name.strip() for name in cells]
    names = [name.lower() if name.lower() in _COLUMNS else name for name in names]
    named = [name for name in names if name]
    if len(set(named)) < len(named):
        raise InputError(f"{place}: two columns have the same name")
    return names


def _named_cells(header: list[str], cells: list[str]) -> dict[str, str]:
    pairs = enumerate(zip(header, cells, strict=False), 1)
    return {name or f"column {number}": cell.strip() for number, (name, cell) in pairs if cell.strip()}


def _csv_document(row: dict[str, str], document_id: str, has_text: bool) -> Iterator[Document]:
    text = row.get("text", "") if has_text else "\n".join(f"{name}: {value}" for name, value in row.items())
    if text:
        metadata = {name: value for name, value in row.items() if name not in _COLUMNS}
        fields: dict[str, Any] = {key: row.get(key, "") for key in _FIELDS}
        # Why no paragraph: each short line would be a term before the next, and none could be quoted
        blocks = () if has_text else (Block(0, len(text), BlockKind.LIST_ITEM),)
        yield Document(id=document_id, text=text, metadata=metadata, blocks=blocks, **fields)

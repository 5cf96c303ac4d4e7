"""The input of a batch job: files of rows, checked once from end to end, then read again in small pieces while they are answered.

The first pass keeps ids and places, never texts, so that the job knows from the start how much there is to do, which rows are
wrong and which came twice.

    >>> for found in check_rows(find_inputs(Path("questions.jsonl")), Checks(QUESTIONS, defaults, seed, {})): ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.batch.rows import Form, Row, id_of, parse_line, parse_row
from ragspec.core import SamplingParams
from ragspec.errors import InputError

ROWS_PER_SPAN = 8
_MAX_SPAN = 2**20
"""Bytes (or rows of a group) from a span's first row to its last: what was answered before may lie between them."""
_SUFFIXES = (".jsonl", ".parquet")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Place(NamedTuple):
    """Where a row stands: its file and its number in it, from 1 (for JSONL the line)."""

    path: str
    number: int


class BadRow(NamedTuple):
    """`record` is what could be read of it."""

    place: Place
    code: str
    reason: str
    record: Any = None


class RawRow(NamedTuple):
    """`group` is the row group of a Parquet file, -1 for JSONL; [start, stop) are bytes of the file, or rows of the group."""

    place: Place
    group: int
    start: int
    stop: int
    read: Callable[[], Any]


@dataclass
class Span:
    """Neighbouring rows that are read together. [start, stop) as in `RawRow`; `wanted` are the numbers to answer."""

    path: str
    group: int
    start: int
    stop: int
    first: int
    wanted: list[int] = field(default_factory=list)


@dataclass
class Checks:
    """What a row is checked against, and what was seen so far. `done` maps answered ids to the digest of what was asked."""

    form: Form
    defaults: SamplingParams
    job_seed: int
    done: Mapping[str, str]
    seen: set[str] = field(default_factory=set)
    ignored: set[str] = field(default_factory=set)
    num_skipped: int = 0

    def wanted(self, record: Any) -> bool:
        """Whether the row is still to be answered. Raises: RowError, InputError."""
        row = parse_row(record, self.form)
        if row.id in self.seen:
            raise DuplicateId(f"the id {row.id!r} came before")
        self.seen.add(row.id)
        self.form.check(row, row.params(self.defaults, self.job_seed))
        self.ignored.update(row.ignored)
        if row.id not in self.done:
            return True
        if self.done[row.id] != row.digest:
            raise RowChanged(f"the row {row.id!r} was answered before it was changed; answer it into an empty folder")
        self.num_skipped += 1
        return False


class DuplicateId(InputError):
    """An earlier row has the same id."""


class RowChanged(InputError):
    """The id was answered already, for another question or other parameters."""


def find_inputs(path: Path) -> list[Path]:
    """A file, or every JSONL and Parquet file below a folder, by name. Raises: InputError."""
    if path.is_file():
        if path.suffix not in _SUFFIXES:
            raise InputError(f"{path} is neither .jsonl nor .parquet")
        return [path]
    if not path.is_dir():
        raise InputError(f"there is no input {path}")
    files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
    if not files:
        raise InputError(f"the folder {path} holds no .jsonl or .parquet file")
    return files


def check_rows(files: list[Path], checks: Checks) -> Iterator[Span | BadRow]:
    """Every wrong row, and spans that hold every row still to be answered."""
    for path in files:
        span: Span | None = None
        for found in _rows_or_error(path):
            if isinstance(found, BadRow):
                yield found
                continue
            bad = _check(found, checks)
            if isinstance(bad, BadRow):
                yield bad
            elif bad:
                if span is not None and _full(span, found):
                    yield span
                    span = None
                span = _extended(span, found)
        if span is not None:
            yield span


def read_span(span: Span, form: Form) -> list[tuple[Place, Row]]:
    """The wanted rows. Raises: InputError if the file is no longer what was checked."""
    try:
        records = _span_of_parquet(span) if span.group >= 0 else _span_of_lines(span)
        return [(Place(span.path, number), parse_row(records(number - span.first), form)) for number in span.wanted]
    except (InputError, IndexError, OSError, pa.ArrowException) as cause:
        raise InputError(f"{span.path} was changed while the job ran: {cause}") from cause


def _rows_or_error(path: Path) -> Iterator[RawRow | BadRow]:
    try:
        yield from _parquet_rows(path) if path.suffix == ".parquet" else _lines(path)
    except (OSError, pa.ArrowException) as cause:
        yield BadRow(Place(str(path), 0), "unreadable_file", f"cannot read {path}: {cause}")


def _check(found: RawRow, checks: Checks) -> bool | BadRow:
    record = None
    try:
        record = found.read()
        return checks.wanted(record)
    except DuplicateId as error:
        return BadRow(found.place, "duplicate_id", str(error), record)
    except RowChanged as error:
        return BadRow(found.place, "changed_row", str(error), record)
    except InputError as error:
        if (row_id := id_of(record)) is not None:
            checks.seen.add(row_id)
        return BadRow(found.place, "invalid_row", str(error), record)


def _full(span: Span, found: RawRow) -> bool:
    long = found.stop - span.start > _MAX_SPAN
    return long or span.group != found.group or len(span.wanted) == ROWS_PER_SPAN


def _extended(span: Span | None, found: RawRow) -> Span:
    if span is None:
        span = Span(found.place.path, found.group, found.start, found.stop, found.place.number)
    span.stop = found.stop
    span.wanted.append(found.place.number)
    return span


def _lines(path: Path) -> Iterator[RawRow]:
    """Blank lines count and hold nothing."""
    start = 0
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            stop = start + len(raw)
            if _stripped(raw):
                read = functools.partial(parse_line, _stripped(raw))
                yield RawRow(Place(str(path), number), -1, start, stop, read)
            start = stop


def _stripped(raw: bytes) -> bytes:
    return raw.removeprefix(_BYTE_ORDER_MARK).strip()


def _parquet_rows(path: Path) -> Iterator[RawRow]:
    number = 0
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            in_group = 0
            for batch in file.iter_batches(row_groups=[group]):
                for i in range(batch.num_rows):
                    number, in_group = number + 1, in_group + 1
                    read = functools.partial(_record, batch, i)
                    yield RawRow(Place(str(path), number), group, in_group - 1, in_group, read)


def _record(table: pa.RecordBatch | pa.Table, i: int) -> Any:
    """Raises: InputError for a cell that is not what its column says, such as text that is no UTF-8."""
    try:
        return table.slice(i, 1).to_pylist()[0]
    except (ValueError, pa.ArrowException) as cause:
        raise InputError(f"the row cannot be read: {cause}") from cause


def _span_of_lines(span: Span) -> Callable[[int], Any]:
    with open(span.path, "rb") as file:
        file.seek(span.start)
        lines = file.read(span.stop - span.start).split(b"\n")
    return lambda i: parse_line(_stripped(lines[i]))


def _span_of_parquet(span: Span) -> Callable[[int], Any]:
    table, error = _row_group(span.path, span.group)
    if error is not None and span.stop > table.num_rows:
        raise error
    part = table.slice(span.start, span.stop - span.start)
    return lambda i: _record(part, i)


@functools.lru_cache(maxsize=2)
def _row_group(path: str, group: int) -> tuple[pa.Table, Exception | None]:
    """Its rows, up to where it is damaged, and how. Why kept: spans of one group follow each other, and each read unpacks all."""
    batches: list[pa.RecordBatch] = []
    error: Exception | None = None
    with pq.ParquetFile(path) as file:
        try:
            batches.extend(file.iter_batches(row_groups=[group]))
        except (OSError, pa.ArrowException) as cause:
            error = cause
        return pa.Table.from_batches(batches, file.schema_arrow), error

"""The input of a batch job: JSONL and Parquet files of rows, read twice.

The first pass checks every row, so that the job knows from the start how many rows there are and which of them are wrong. The
second pass yields the rows to answer, as the engines take them. Neither pass keeps texts, only ids.

    >>> rows = JobInput(find_inputs(Path("questions.jsonl")), QUESTIONS, defaults, seed, answered={})
    >>> for bad in rows.check(): ...
    >>> for location, row, params in rows.pending(): ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.batch.rows import Row, RowSchema, id_of, parse_line, parse_row
from ragspec.core import SamplingParams
from ragspec.errors import InputError

_SUFFIXES = (".jsonl", ".parquet")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class RowLocation(NamedTuple):
    """A row's file and its number in the file, from 1 (for JSONL the line); 0 means the file as a whole."""

    path: str
    number: int


class BadRow(NamedTuple):
    """A row that cannot be answered; `record` is its value, None if it has none that can be read."""

    location: RowLocation
    code: str
    reason: str
    record: Any = None


class CheckedRow(NamedTuple):
    """A row that can be answered, with its sampling parameters."""

    location: RowLocation
    row: Row
    params: SamplingParams


class JobInput:
    """The rows of a job. After `check`, `num_pending` rows are to be answered, and `num_skipped` rows were answered before."""

    def __init__(
        self,
        files: Sequence[Path],
        schema: RowSchema,
        defaults: SamplingParams,
        job_seed: int,
        answered: Mapping[str, str],
    ) -> None:
        """`answered` maps the ids of answered rows to the digests of those rows."""
        self.num_pending = self.num_skipped = 0
        self.ignored_columns: set[str] = set()
        self._files, self._schema, self._answered = files, schema, answered
        self._defaults, self._job_seed = defaults, job_seed
        self._bad: set[RowLocation] = set()

    def check(self) -> Iterator[BadRow]:
        """The first pass: yields the wrong rows and counts the others."""
        for found in self._rows():
            if isinstance(found, BadRow):
                self._bad.add(found.location)
                yield found
                continue
            self.ignored_columns.update(found.row.ignored)
            if found.row.id in self._answered:
                self.num_skipped += 1
            else:
                self.num_pending += 1

    def pending(self) -> Iterator[CheckedRow]:
        """The second pass: yields the rows to answer. Raises: InputError if a file was changed since the first pass."""
        left = self.num_pending
        for found in self._rows() if left else ():
            if isinstance(found, BadRow):
                if found.location not in self._bad:
                    raise InputError(f"{found.location.path} was changed while the job ran: {found.reason}")
            elif found.row.id not in self._answered:
                yield found
                left -= 1
                if not left:
                    return
        if left:
            raise InputError(f"the input was changed while the job ran: {left} of its rows are gone")

    def _rows(self) -> Iterator[CheckedRow | BadRow]:
        seen: set[str] = set()
        for path in self._files:
            try:
                for number, read in _parquet_rows(path) if path.suffix == ".parquet" else _lines(path):
                    yield self._checked(RowLocation(str(path), number), read, seen)
            except (OSError, pa.ArrowException) as cause:
                yield BadRow(RowLocation(str(path), 0), "unreadable_file", f"cannot read {path}: {cause}")

    def _checked(self, location: RowLocation, read: Callable[[], Any], seen: set[str]) -> CheckedRow | BadRow:
        record = None
        try:
            record = read()
            row = parse_row(record, self._schema)
            if row.id in seen:
                return BadRow(location, "duplicate_id", f"the id {row.id!r} came before", record)
            seen.add(row.id)
            params = row.params(self._defaults, self._job_seed)
            self._schema.check(row, params)
        except InputError as error:
            if (row_id := id_of(record)) is not None:
                seen.add(row_id)
            return BadRow(location, "invalid_row", str(error), record)
        if self._answered.get(row.id, row.digest) != row.digest:
            reason = f"the row {row.id!r} was answered before it was changed; answer it into an empty folder"
            return BadRow(location, "changed_row", reason, record)
        return CheckedRow(location, row, params)


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


def _lines(path: Path) -> Iterator[tuple[int, Callable[[], Any]]]:
    """Blank lines have a number, but are no rows."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if text := line.removeprefix(_BYTE_ORDER_MARK).strip():
                yield number, partial(parse_line, text)


def _parquet_rows(path: Path) -> Iterator[tuple[int, Callable[[], Any]]]:
    """Why one row group at a time: a damaged group costs no rows of the groups before it."""
    number = 0
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(row_groups=[group]):
                for i in range(batch.num_rows):
                    number += 1
                    yield number, partial(_record, batch, i)


def _record(batch: pa.RecordBatch, i: int) -> Any:
    """Raises: InputError for a cell that is not of its column's type, such as text that is no UTF-8."""
    try:
        return batch.slice(i, 1).to_pylist()[0]
    except (ValueError, pa.ArrowException) as cause:
        raise InputError(f"the row cannot be read: {cause}") from cause

"""The files of a segment: what their rows are, and how rows are appended to them.

See `ragspec.retrieval.index.manifest` for the whole layout.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ragspec.core import Passage
from ragspec.errors import StoreCorrupt

DOCUMENT_SCHEMA = pa.schema(
    [
        ("id", pa.large_string()),
        ("title", pa.large_string()),
        ("source", pa.large_string()),
        ("owner", pa.large_string()),
        ("metadata", pa.large_string()),  # JSON
        ("headings", pa.large_string()),  # JSON: [[start, level, text], ...]
        ("key", pa.binary(32)),  # of the whole document, see `ragspec.retrieval.index.content_key`
        ("text_key", pa.binary(32)),  # of owner, metadata and text
        ("origin", pa.large_string()),  # the file it was read from
        ("text", pa.large_binary()),
    ]
)
PASSAGE_SCHEMA = pa.schema(
    [
        ("document", pa.int64()),  # row of documents.arrow
        ("ordinal", pa.int64()),
        ("start", pa.int64()),  # characters
        ("end", pa.int64()),
        ("start_byte", pa.int64()),  # the same span in the document's UTF-8 text
        ("end_byte", pa.int64()),
        ("heading", pa.large_string()),
    ]
)
_ROWS_PER_BATCH = 65_536
_BYTES_PER_BATCH = 64 * 2**20


class ArrowFile:
    """Rows appended one by one, written as record batches of bounded size."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._schema = schema
        self._rows: list[tuple[Any, ...]] = []
        self._num_bytes = 0
        self._file = open(path, "wb")  # noqa: SIM115 - closed by close()
        self._writer = pa.ipc.new_file(self._file, schema)

    def append(self, row: tuple[Any, ...], num_bytes: int) -> None:
        """`num_bytes` is about what the row takes."""
        self._rows.append(row)
        self._num_bytes += num_bytes
        if len(self._rows) >= _ROWS_PER_BATCH or self._num_bytes >= _BYTES_PER_BATCH:
            self._flush()

    def append_table(self, rows: pa.Table) -> None:
        """Rows of another file of the same schema."""
        self._flush()
        for batch in rows.to_batches(max_chunksize=_ROWS_PER_BATCH):
            self._writer.write_batch(batch)

    def __enter__(self) -> ArrowFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._file.closed:
            return
        try:
            self._flush()
            self._writer.close()
        finally:
            self._file.close()

    def _flush(self) -> None:
        if not self._rows:
            return
        columns = [
            pa.array(values, kind)
            for values, kind in zip(zip(*self._rows, strict=True), self._schema.types, strict=True)
        ]
        self._rows, self._num_bytes = [], 0
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))


def npy_header(num_rows: int, dimension: int) -> bytes:
    """The header of a float32 .npy file; numpy leaves room in it, so its length does not depend on `num_rows`."""
    buffer = io.BytesIO()
    description = {"descr": "<f4", "fortran_order": False, "shape": (num_rows, dimension)}
    np.lib.format.write_array_header_1_0(buffer, description)
    return buffer.getvalue()


def mapped_array(path: Path) -> NDArray[Any]:
    """A whole .npy file, mapped. Raises: StoreCorrupt."""
    try:
        return np.lib.format.open_memmap(path, mode="r")  # Why not np.load: it would also open archives and pickles
    except (OSError, ValueError, EOFError, SyntaxError) as cause:
        raise StoreCorrupt(f"{path} cannot be read: {cause}") from cause


def mapped_table(path: Path) -> pa.Table:
    """A whole Arrow file, mapped. Raises: StoreCorrupt."""
    try:
        return pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    except (OSError, ValueError, pa.ArrowException) as cause:
        raise StoreCorrupt(f"{path} cannot be read: {cause}") from cause


def npy_bytes(array: NDArray[Any]) -> bytes:
    """A whole .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def byte_spans(text: str, passages: Sequence[Passage]) -> Iterator[tuple[int, int]]:
    """The passages' spans in the UTF-8 form of `text`, in one walk over it."""
    offsets = {0: 0}
    previous = 0
    for position in sorted({p.start for p in passages} | {p.end for p in passages}):
        offsets[position] = offsets[previous] + len(text[previous:position].encode("utf-8"))
        previous = position
    return ((offsets[passage.start], offsets[passage.end]) for passage in passages)

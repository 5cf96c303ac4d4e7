"""The file formats of a segment: the schemas of its Arrow tables, and .npy files, mapped or written.

See `ragspec.retrieval.index.manifest` for the whole layout.

    >>> mapped_array(folder / VECTORS).shape
"""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ragspec.errors import StoreCorrupt

DOCUMENT_SCHEMA = pa.schema(
    [
        ("id", pa.large_string()),
        ("title", pa.large_string()),
        ("source", pa.large_string()),
        ("owner", pa.large_string()),
        ("metadata", pa.large_string()),  # JSON
        ("headings", pa.large_string()),  # JSON: [[start, level, text, anchor], ...]
        ("key", pa.binary(32)),  # of the whole document, see `ragspec.retrieval.index.content_key`
        ("text_key", pa.binary(32)),  # of owner, metadata and text
        ("origin", pa.large_string()),  # the file it was read from
        ("text", pa.large_binary()),
        ("blocks", pa.large_string()),  # JSON: [[start, end, kind, page], ...]
        ("digest", pa.large_string()),  # of that file
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
        ("headings", pa.large_string()),  # JSON: [text, ...]
        ("anchor", pa.large_string()),
        # JSON, as the document's blocks, which it repeats: those that reach into the passage
        ("blocks", pa.large_string()),
    ]
)
_FORMER_WIDTHS = {DOCUMENT_SCHEMA: 10, PASSAGE_SCHEMA: 7}
"""How many of the columns a segment of schema 2 has."""


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


def mapped_table(path: Path, schema: pa.Schema) -> pa.Table:
    """A whole Arrow file of the schema, mapped, except the offsets of texts. Raises: StoreCorrupt.

    Columns that the former schema lacks hold empty texts, which are no JSON.

    Why not the offsets: Arrow follows them without a check, and who overwrites them in the open file would crash this process.
    """
    try:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        columns = [pa.chunked_array(map(_with_own_offsets, column.chunks), column.type) for column in table.columns]
        if table.schema not in (schema, pa.schema(list(schema)[: _FORMER_WIDTHS[schema]])):
            raise ValueError("it holds a table of another kind")
        for _ in range(len(columns), len(schema)):  # Why not once: a scalar imports pandas
            columns.append(pa.chunked_array([pa.repeat(pa.scalar("", pa.large_string()), len(table))]))
        return pa.table(columns, schema=schema)
    except (OSError, ValueError, pa.ArrowException) as cause:
        raise StoreCorrupt(f"{path} cannot be read: {cause}") from cause


@contextlib.contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    """Raises: StoreCorrupt where the block finds no text or no place: the file was overwritten after it was opened."""
    try:
        yield
    except (ValueError, TypeError, IndexError) as cause:
        raise StoreCorrupt(f"{folder}: its files were changed while they were in use") from cause


def _with_own_offsets(chunk: pa.Array) -> pa.Array:
    """Raises: ValueError if an offset lies outside the data."""
    if chunk.type not in (pa.large_string(), pa.large_binary()):
        return chunk
    _, offsets, data = chunk.buffers()
    own = np.frombuffer(offsets, np.int64)[chunk.offset : chunk.offset + len(chunk) + 1].copy()
    if len(own) and (own[0] < 0 or own[-1] > (data.size if data else 0) or np.any(own[:-1] > own[1:])):
        raise ValueError("a text lies outside its column")
    if chunk.null_count:
        raise ValueError("a text is missing")
    return pa.Array.from_buffers(chunk.type, len(chunk), [None, pa.py_buffer(own), data])


def npy_bytes(array: NDArray[Any]) -> bytes:
    """A whole .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()

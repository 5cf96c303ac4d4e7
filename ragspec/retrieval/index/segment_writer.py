"""Writes the files of a new segment, from documents or from the live documents of other segments.

A merge encodes and analyses nothing again: vectors and postings are copied, so scores stay the same, bit for bit.

    >>> writer = IndexSegmentWriter(folder, dimension=384)
    >>> writer.add(document, passages, vectors, terms)
    >>> writer.finish()
"""

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ragspec.core import Document, Passage, blocks_reaching
from ragspec.retrieval.encoder import FloatArray
from ragspec.retrieval.index.content_key import document_key, headings_json, metadata_json, text_key
from ragspec.retrieval.index.manifest import DOCUMENTS, PASSAGES, VECTORS
from ragspec.retrieval.index.segment_files import DOCUMENT_SCHEMA, PASSAGE_SCHEMA, npy_header
from ragspec.retrieval.index.store import LiveSegment
from ragspec.retrieval.search.bm25 import PostingsBuilder

_ROWS_PER_BATCH = 65_536
_BYTES_PER_BATCH = 64 * 2**20
_VECTORS_PER_BLOCK = 65_536


class ArrowFile:
    """Rows appended one by one, written as record batches of bounded size."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._schema = schema
        self._rows: list[tuple[Any, ...]] = []
        self._num_bytes = 0
        self._file = open(path, "wb")  # noqa: SIM115 - closed by close()
        self._writer = pa.ipc.new_file(self._file, schema)

    def append(self, row: tuple[Any, ...], num_bytes: int) -> None:
        """`num_bytes`: about the size of the row in memory."""
        self._rows.append(row)
        self._num_bytes += num_bytes
        if len(self._rows) >= _ROWS_PER_BATCH or self._num_bytes >= _BYTES_PER_BATCH:
            self._flush()

    def append_table(self, rows: pa.Table) -> None:
        """Rows of another file of the same schema."""
        self._flush()
        self._writer.write_table(rows, max_chunksize=_ROWS_PER_BATCH)

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
        fields = zip(zip(*self._rows, strict=True), self._schema.types, strict=True)
        columns = [pa.array(values, kind) for values, kind in fields]
        self._rows, self._num_bytes = [], 0
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))


class IndexSegmentWriter:
    """Fills an empty folder with a segment's files. States: open -> finished; `close` is allowed in both."""

    def __init__(self, folder: Path, dimension: int) -> None:
        """Raises: OSError."""
        self.folder = folder
        self.num_documents = 0
        self.num_passages = 0
        self._dimension = dimension
        self._postings = PostingsBuilder()
        with contextlib.ExitStack() as opened:
            self._vectors = opened.enter_context(open(folder / VECTORS, "wb"))
            self._vectors.write(npy_header(0, dimension))
            self._passages = opened.enter_context(contextlib.closing(ArrowFile(folder / PASSAGES, PASSAGE_SCHEMA)))
            self._documents = opened.enter_context(contextlib.closing(ArrowFile(folder / DOCUMENTS, DOCUMENT_SCHEMA)))
            self._files = opened.pop_all()

    def close(self) -> None:
        """Close the open files. The files of an unfinished segment are useless."""
        with contextlib.suppress(OSError, pa.ArrowException):
            self._files.close()

    def add(
        self, document: Document, passages: Sequence[Passage], vectors: FloatArray, terms: Iterable[Sequence[str]]
    ) -> None:
        """Append one document; row i of `vectors` [len(passages), E] and of `terms` belongs to passage i."""
        assert vectors.shape == (len(passages), self._dimension) and vectors.dtype == np.float32
        self._vectors.write(np.ascontiguousarray(vectors).data)
        for passage, (start_byte, end_byte) in zip(passages, byte_spans(document.text, passages), strict=True):
            span = (self.num_documents, passage.ordinal, passage.start, passage.end, start_byte, end_byte)
            blocks = json.dumps(blocks_reaching(document.blocks, passage.start, passage.end))
            place = (passage.heading, json.dumps(passage.headings), passage.anchor, blocks)
            self._passages.append((*span, *place), num_bytes=56 + sum(map(len, place)))
        for words in terms:
            self._postings.add(words)
        raw = document.text.encode("utf-8")
        names = (document.id, document.title, document.source, document.owner, metadata_json(document))
        keys = (document_key(document), text_key(document))
        blocks = json.dumps(document.blocks)
        row = (*names, headings_json(document), *keys, document.origin, raw, blocks, document.digest)
        self._documents.append(row, num_bytes=len(raw) + len(blocks))
        self.num_documents += 1
        self.num_passages += len(passages)

    def append(self, live: LiveSegment) -> None:
        """Append the live documents of another segment."""
        segment, rows = live.segment, np.flatnonzero(live.live_rows())
        new_numbers = np.cumsum(live.is_live) - 1 + self.num_documents  # by a document's number in its old segment
        passages = segment.passages.filter(pa.array(live.live_rows()))
        renumbered = pa.array(new_numbers[passages["document"].to_numpy()], pa.int64())
        self._documents.append_table(segment.documents.filter(pa.array(live.is_live)))
        self._passages.append_table(passages.set_column(0, "document", renumbered))
        for start in range(0, len(rows), _VECTORS_PER_BLOCK):
            block = segment.vectors[rows[start : start + _VECTORS_PER_BLOCK]]
            self._vectors.write(np.ascontiguousarray(block).data)
        self._postings.add_postings(segment.postings, rows)
        self.num_documents += int(live.is_live.sum())
        self.num_passages += len(rows)

    def finish(self) -> None:
        """Complete the files."""
        self._vectors.seek(0)
        self._vectors.write(npy_header(self.num_passages, self._dimension))
        self._files.close()
        self._postings.write(self.folder)


def byte_spans(text: str, passages: Sequence[Passage]) -> Iterator[tuple[int, int]]:
    """The passages' spans in the UTF-8 form of `text`. Encodes every character once."""
    offsets = {0: 0}
    previous = 0
    for position in sorted({p.start for p in passages} | {p.end for p in passages}):
        offsets[position] = offsets[previous] + len(text[previous:position].encode("utf-8"))
        previous = position
    return ((offsets[passage.start], offsets[passage.end]) for passage in passages)

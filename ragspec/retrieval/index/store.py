"""An index opened for reading: mapped files, whose hashes are compared with the manifest before any byte is used.

A store is one generation and never changes. `refreshed` opens the current generation and shares the segments of both.

    >>> store = Store.open(Path("index"), encoder.identity)
    >>> [document.id for document in store.documents()]
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ragspec.config import DenseConfig
from ragspec.core import Block, Document, Heading, Passage, blocks_in, blocks_of
from ragspec.errors import EncoderMismatch, StoreCorrupt
from ragspec.retrieval.chunking import embedded_text
from ragspec.retrieval.encoder import EncoderIdentity, FloatArray
from ragspec.retrieval.expansion import WidePassage, fields_of
from ragspec.retrieval.index.content_key import document_key, text_key
from ragspec.retrieval.index.manifest import (
    DENSE,
    DOCUMENTS,
    PASSAGES,
    VECTORS,
    FileChecksum,
    Manifest,
    SegmentRecord,
    read_generation,
    verify_checksums,
)
from ragspec.retrieval.index.pointer import read_pointer
from ragspec.retrieval.index.segment_files import DOCUMENT_SCHEMA, PASSAGE_SCHEMA, mapped_array, mapped_table, unchanged
from ragspec.retrieval.search.bm25 import POSTING_FILES, Postings
from ragspec.retrieval.search.dense import DenseIndex, ExactIndex
from ragspec.retrieval.search.faiss_index import ApproximateIndex, GpuIndex
from ragspec.retrieval.search.filters import DocumentColumns

FILES = frozenset({VECTORS, PASSAGES, DOCUMENTS, *POSTING_FILES})
_ROWS_PER_CHECK = 65_536
_MAX_NORM_ERROR = 1e-3
_SPANS = ("document", "ordinal", "start", "end", "start_byte", "end_byte")


def _numbers(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """Why not Arrow's own `to_numpy`: it imports pandas, a fifth of a second of a start."""
    return np.concatenate([np.from_dlpack(chunk) for chunk in column.chunks] or [np.empty(0, np.int64)])


class IndexSegment:
    """An opened segment. Rows are numbered as in `vectors` [K, E] (float32, L2-normalised, mapped)."""

    def __init__(self, folder: Path, record: SegmentRecord, dimension: int, dense: DenseConfig) -> None:
        """Map the files. Their hashes must have been compared. Raises: StoreCorrupt if they do not fit together."""
        if set(record.files) - {DENSE} != FILES:
            raise StoreCorrupt(f"{folder}: the manifest lists {sorted(record.files)}, not {sorted(FILES)}")
        self.folder, self.record, self.name = folder, record, record.name
        self._dense = dense
        self._nearest: dict[bool, DenseIndex] = {}
        self.vectors: FloatArray = mapped_array(folder / VECTORS)
        self.passages = mapped_table(folder / PASSAGES, PASSAGE_SCHEMA)
        self.documents = mapped_table(folder / DOCUMENTS, DOCUMENT_SCHEMA)
        self.postings = Postings(folder)
        found = (self.vectors.shape, len(self.passages), len(self.documents), self.postings.num_rows)
        if found != ((record.num_passages, dimension), record.num_passages, record.num_documents, record.num_passages):
            raise StoreCorrupt(f"{folder} does not hold what its manifest says: {found}")
        self.spans: NDArray[np.int64] = np.column_stack([_numbers(self.passages[name]) for name in _SPANS])  # [K, 6]
        self.document_of = self.spans[:, 0]  # of each row, ascending: [K]

    def nearest(self, on_gpu: bool = False) -> DenseIndex:
        """The index that searches the vectors. HNSW stays on the CPU, since FAISS has it only there. Raises: StoreCorrupt."""
        if on_gpu not in self._nearest:
            self._nearest[on_gpu] = self._opened(on_gpu)
        return self._nearest[on_gpu]

    def _opened(self, on_gpu: bool) -> DenseIndex:
        if DENSE not in self.record.files:
            return GpuIndex.flat(self.vectors) if on_gpu else ExactIndex(self.vectors)
        if on_gpu and self._dense.kind == "hnsw":
            return self.nearest()
        index = ApproximateIndex.open(self.folder, self.vectors, self._dense)
        return index.on_gpu() if on_gpu else index

    @cached_property
    def ids(self) -> list[str]:
        """Document ids by number."""
        with unchanged(self.folder):
            return self.documents["id"].to_pylist()  # type: ignore[no-any-return]

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """A number for each row that sorts rows by document id and ordinal. Shapes: [K]."""
        # by UTF-8 bytes, which is the order of the characters
        by_id = np.from_dlpack(pc.sort_indices(self.documents["id"]))
        ranks = np.empty(len(by_id), np.int64)
        ranks[by_id] = np.arange(len(by_id))
        return ranks[self.document_of] * self.record.num_passages + self.spans[:, 1]

    @cached_property
    def columns(self) -> DocumentColumns:
        """The columns that filters read."""
        return DocumentColumns(self.documents)

    @cached_property
    def owners(self) -> tuple[NDArray[np.int64], list[str]]:
        """Each document's owner as an index into the list of all owners."""
        encoded = self.documents["owner"].combine_chunks().dictionary_encode()
        codes: NDArray[np.int64] = np.from_dlpack(encoded.indices).astype(np.int64)
        with unchanged(self.folder):
            return codes, encoded.dictionary.to_pylist()

    def readable(self, tenant: str) -> NDArray[np.bool_]:
        """Which documents the tenant may read: its own, and documents without an owner. Shapes: [number of documents]."""
        codes, owners = self.owners
        return np.array([owner in ("", tenant) for owner in owners], dtype=bool)[codes]

    def rows_of(self, document: int) -> range:
        """The rows of one document's passages."""
        first, end = np.searchsorted(self.document_of, (document, document + 1))
        return range(int(first), int(end))

    def vectors_of(self, document: int) -> dict[str, FloatArray]:
        """The vectors of one document's passages, by embedded text."""
        return {embedded_text(self.passage(row)): self.vectors[row] for row in self.rows_of(document)}

    def passage(self, row: int, score: float = 0.0, num_neighbours: int = 0) -> Passage:
        """A `WidePassage` if it shall have neighbours. Raises: StoreCorrupt if the files were changed."""
        number, ordinal, start, end, start_byte, end_byte = self.spans[row].tolist()
        with unchanged(self.folder):
            passage = Passage(
                document_id=self.ids[number],
                ordinal=ordinal,
                text=self._slice(number, start_byte, end_byte),
                start=start,
                end=end,
                title=self.documents["title"][number].as_py(),
                source=self.documents["source"][number].as_py(),
                score=score,
                heading=self.passages["heading"][row].as_py(),
                headings=tuple(json.loads(self.passages["headings"][row].as_py() or "[]")),
                anchor=self.passages["anchor"][row].as_py(),
                blocks=blocks_in(_blocks(self.passages["blocks"][row].as_py()), start, end),
            )
            return self._widened(passage, row, num_neighbours) if num_neighbours else passage

    def _widened(self, passage: Passage, row: int, num_neighbours: int) -> WidePassage:
        number, reach = int(self.document_of[row]), num_neighbours + 1
        own = self.rows_of(number)
        rows = range(max(own.start, row - reach), min(own.stop, row + reach + 1))
        around = self.spans[rows]
        text = self._slice(number, int(around[0, 4]), int(around[:, 5].max()))
        spans = tuple((start, end) for start, end in around[:, 2:4].tolist())
        blocks = {each for near in rows for each in _blocks(self.passages["blocks"][near].as_py())}
        return WidePassage(
            **fields_of(passage),
            around=text,
            around_start=spans[0][0],
            spans=spans,
            num_neighbours=num_neighbours,
            around_blocks=tuple(sorted(blocks)),
        )

    def _slice(self, number: int, start_byte: int, end_byte: int) -> str:
        return str(memoryview(self.documents["text"][number].as_buffer())[start_byte:end_byte], "utf-8")

    def text(self, number: int) -> str:
        """A document's text alone."""
        with unchanged(self.folder):
            return str(memoryview(self.documents["text"][number].as_buffer()), "utf-8")

    def document(self, number: int) -> Document:
        with unchanged(self.folder):
            row = {name: column[0] for name, column in self.documents.slice(number, 1).to_pydict().items()}
            names = {name: row[name] for name in ("id", "title", "source", "owner", "origin", "digest")}
            headings = tuple(Heading(*each) for each in json.loads(row["headings"]))
            text, blocks = row["text"].decode(), _blocks(row["blocks"])
            return Document(text=text, metadata=json.loads(row["metadata"]), headings=headings, blocks=blocks, **names)

    def is_former(self, number: int) -> bool:
        """Whether the document is of the former schema, without blocks."""
        return not self.documents["blocks"][number].as_py()


def _blocks(text: str) -> tuple[Block, ...]:
    return blocks_of(json.loads(text or "[]"))


def check_segment(segment: IndexSegment) -> None:
    """Check that vectors are unit vectors, documents match their keys, and passages are slices of their documents.

    Hashes cannot tell this. Raises: StoreCorrupt with the first fault.
    """
    _check_vectors(segment)
    rows_seen = 0
    for number in range(segment.record.num_documents):
        document = segment.document(number)
        recorded = (segment.documents["key"][number].as_py(), segment.documents["text_key"][number].as_py())
        if recorded != (document_key(document), text_key(document)):
            raise StoreCorrupt(f"{segment.folder}: document {document.id!r} is not the one that was indexed")
        rows = segment.rows_of(number)
        rows_seen += len(rows)
        for row in rows:
            passage = segment.passage(row)
            if passage.text != document.text[passage.start : passage.end]:
                raise StoreCorrupt(f"{segment.folder}: passage {passage.id} is no part of its document")
    if rows_seen != segment.record.num_passages:
        num_lost = segment.record.num_passages - rows_seen
        raise StoreCorrupt(f"{segment.folder}: {num_lost} passages belong to no document")


def _check_vectors(segment: IndexSegment) -> None:
    for first in range(0, segment.record.num_passages, _ROWS_PER_CHECK):
        norms = np.linalg.norm(segment.vectors[first : first + _ROWS_PER_CHECK], axis=1)
        is_unit = np.abs(norms - 1.0) < _MAX_NORM_ERROR
        if not is_unit.all():
            row = first + int(np.argmin(is_unit))
            raise StoreCorrupt(f"{segment.folder}: the vector of passage {segment.passage(row).id} has not length 1")


class LiveSegment:
    """A segment without the documents that one generation has deleted."""

    def __init__(self, segment: IndexSegment, deleted: NDArray[np.int64] | None = None) -> None:
        """`deleted`: numbers of the deleted documents."""
        self.segment = segment
        self.is_live = np.ones(segment.record.num_documents, dtype=bool)  # of each document
        if deleted is not None:
            self.is_live[deleted] = False

    def live_rows(self) -> NDArray[np.bool_]:
        """Which rows belong to live documents. Shapes: [K]."""
        return self.is_live[self.segment.document_of]

    @property
    def num_live_passages(self) -> int:
        return int(self.live_rows().sum())

    def live_documents(self) -> Sequence[int]:
        """Numbers of the live documents."""
        return np.flatnonzero(self.is_live).tolist()

    def fields(self, *names: str) -> Iterator[tuple[str, ...]]:
        """The values of these columns, for each live document."""
        columns = [self.segment.documents[name].to_pylist() for name in names]
        return (tuple(column[number] for column in columns) for number in self.live_documents())


@dataclass(eq=False)
class Store:
    """One generation of an index; `only`: with these segments alone."""

    index_dir: Path
    pointer: str
    manifest: Manifest
    segments: tuple[LiveSegment, ...]
    only: frozenset[str] | None = None

    @classmethod
    def open(
        cls,
        index_dir: str | Path,
        encoder: EncoderIdentity | None = None,
        *,
        pointer: str = "",
        only: frozenset[str] | None = None,
        sharing: Iterable[Store] = (),
    ) -> Store:
        """Open the current generation, or the generation that `pointer` (of another store) names.

        `encoder` must be the encoder of the vectors. `only`: the names of the segments to open; an empty set opens the manifest
        alone. Segments that are open in a store of `sharing` are shared.

        Raises: StoreMissing, StoreCorrupt or EncoderMismatch, each with the exact reason; then nothing is loaded.
        """
        index_dir = Path(index_dir)
        known = {live.segment.name: live.segment for store in sharing for live in store.segments}
        while True:
            current = pointer or read_pointer(index_dir)
            try:
                folder, manifest = read_generation(index_dir, current)
                if encoder is not None:
                    check_encoder(manifest, encoder)
                records = [record for record in manifest.segments if only is None or record.name in only]
                shared = {
                    r.name: known[r.name] for r in records if r.name in known and known[r.name].record.files == r.files
                }
                verify_checksums(_files_to_check(index_dir, folder, records, shared))
                form = manifest.encoder.dimension, manifest.config.dense
                opened = (shared.get(r.name) or IndexSegment(index_dir / r.name, r, *form) for r in records)
                live = (_live_segment(each, record, folder) for each, record in zip(opened, records, strict=True))
                return cls(index_dir, current, manifest, tuple(live), only)
            except StoreCorrupt:
                if pointer or read_pointer(index_dir) == current:
                    raise  # otherwise a writer replaced the generation, and removed an older one, meanwhile

    def refreshed(self) -> Store:
        """The current generation, which shares open segments; this store if its generation is current. Raises: as `open`."""
        if read_pointer(self.index_dir) == self.pointer:
            return self
        return Store.open(self.index_dir, only=self.only, sharing=[self])

    @property
    def generation(self) -> str:
        return self.manifest.generation_id

    def _live(self) -> Iterator[tuple[IndexSegment, int]]:
        """Every document's segment, and its number there."""
        return ((live.segment, number) for live in self.segments for number in live.live_documents())

    def vectors_of(self, document_ids: Container[str]) -> dict[str, FloatArray]:
        """The vectors of these documents' passages, by embedded text."""
        found: dict[str, FloatArray] = {}
        for segment, number in self._live():
            if segment.ids[number] in document_ids:
                found |= segment.vectors_of(number)
        return found

    def former_documents(self) -> list[str]:
        """The ids of the documents of the former schema, without blocks."""
        return [segment.ids[number] for segment, number in self._live() if segment.is_former(number)]

    def readable(self, tenant: str) -> Iterator[tuple[IndexSegment, list[int]]]:
        """By segment, the numbers of the documents that a tenant may read: its own, and documents without an owner."""
        for live in self.segments:
            is_readable = live.segment.readable(tenant)
            yield live.segment, [number for number in live.live_documents() if is_readable[number]]

    def documents(self) -> Iterator[Document]:
        """All documents, by segment."""
        return (segment.document(number) for segment, number in self._live())


def _files_to_check(
    index_dir: Path, folder: Path, records: Iterable[SegmentRecord], shared: Container[str]
) -> Iterator[tuple[Path, FileChecksum]]:
    for record in records:
        if record.deleted is not None:
            yield folder / record.deleted_name, record.deleted
        if record.name not in shared:
            for name, checksum in record.files.items():
                if Path(name).name != name:
                    raise StoreCorrupt(f"the manifest names a file outside its segment: {name!r}")
                yield index_dir / record.name / name, checksum


def _live_segment(segment: IndexSegment, record: SegmentRecord, folder: Path) -> LiveSegment:
    """The segment without the documents that the generation in `folder` lists as deleted. Raises: StoreCorrupt."""
    live = LiveSegment(segment, _deleted(folder / record.deleted_name, record) if record.deleted else None)
    if live.num_live_passages != record.num_live_passages:
        raise StoreCorrupt(f"{folder} deletes other documents of {record.name} than its manifest says")
    return live


def _deleted(path: Path, record: SegmentRecord) -> NDArray[np.int64]:
    deleted = mapped_array(path)
    fits = deleted.dtype == np.int64 and deleted.ndim == 1 and len(deleted) == record.num_deleted
    if not fits or (len(deleted) and not 0 <= deleted.min() <= deleted.max() < record.num_documents):
        raise StoreCorrupt(f"{path} is no list of {record.num_deleted} documents of {record.name}")
    return deleted


def check_encoder(manifest: Manifest, encoder: EncoderIdentity) -> None:
    """Raises: EncoderMismatch if the vectors of `encoder` do not belong to the vector space of the index."""
    built = manifest.encoder
    if (built.fingerprint, built.dimension) != (encoder.fingerprint, encoder.dimension):
        raise EncoderMismatch(
            f"the index was built by {built.id} (fingerprint {built.fingerprint[:12]}, {built.dimension} dimensions); "
            f"the encoder in use is {encoder.id} (fingerprint {encoder.fingerprint[:12]}, {encoder.dimension} dimensions)"
        )

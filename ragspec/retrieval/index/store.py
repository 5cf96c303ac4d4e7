"""An index opened for reading: mapped files, whose hashes are compared with the manifest before any byte is used.

A store is one generation and never changes. `refreshed` opens the current generation and shares the segments of both.

    >>> store = Store.open(Path("index"), encoder.identity)
    >>> [document.id for document in store.documents()]
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ragspec.core import Document
from ragspec.errors import EncoderMismatch, StoreCorrupt
from ragspec.retrieval.encoder import EncoderIdentity, FloatArray
from ragspec.retrieval.index.manifest import FileChecksum, Manifest, SegmentRecord, read_generation, verify_checksums
from ragspec.retrieval.index.pointer import read_pointer
from ragspec.retrieval.index.segment import IndexSegment
from ragspec.retrieval.index.segment_files import mapped_array


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
                return cls._opened(index_dir, current, encoder, known, only)
            except StoreCorrupt:
                if pointer or read_pointer(index_dir) == current:
                    raise  # otherwise a writer replaced the generation, and removed an older one, meanwhile

    @classmethod
    def _opened(
        cls,
        index_dir: Path,
        pointer: str,
        encoder: EncoderIdentity | None,
        known: Mapping[str, IndexSegment],
        only: frozenset[str] | None,
    ) -> Store:
        folder, manifest = read_generation(index_dir, pointer)
        if encoder is not None:
            check_encoder(manifest, encoder)
        records = [record for record in manifest.segments if only is None or record.name in only]
        shared = {r.name: known[r.name] for r in records if r.name in known and known[r.name].record.files == r.files}
        verify_checksums(_files_to_check(index_dir, folder, records, shared))
        dimension, dense = manifest.encoder.dimension, manifest.config.dense
        segments = tuple(
            _live_segment(
                shared.get(record.name) or IndexSegment(index_dir / record.name, record, dimension, dense),
                record,
                folder,
            )
            for record in records
        )
        return cls(index_dir, pointer, manifest, segments, only)

    def refreshed(self) -> Store:
        """The current generation, which shares open segments; this store if its generation is current. Raises: as `open`."""
        if read_pointer(self.index_dir) == self.pointer:
            return self
        return Store.open(self.index_dir, only=self.only, sharing=[self])

    @property
    def generation(self) -> str:
        return self.manifest.generation_id

    def vectors_of(self, document_ids: Container[str]) -> dict[str, FloatArray]:
        """The vectors of these documents' passages, by embedded text."""
        found: dict[str, FloatArray] = {}
        for segment, numbers in ((live.segment, live.live_documents()) for live in self.segments):
            for number in (number for number in numbers if segment.ids[number] in document_ids):
                found |= segment.vectors_of(number)
        return found

    def documents(self) -> Iterator[Document]:
        """All documents, by segment."""
        for live in self.segments:
            for number in live.live_documents():
                yield live.segment.document(number)


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

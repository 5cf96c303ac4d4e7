"""An index opened for reading: mapped files, checked against their manifest before a byte of them is used.

A store is one generation and never changes; `refreshed` gives the current one and shares the segments that both have.

    >>> store = Store.open(Path("index"), encoder.identity)
    >>> [document.id for document in store.documents()]
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ragspec.core import Document
from ragspec.errors import EncoderMismatch, StoreCorrupt
from ragspec.retrieval.encoder import EncoderIdentity
from ragspec.retrieval.index.manifest import (
    FileChecksum,
    Manifest,
    SegmentRecord,
    read_generation,
    read_pointer,
    verify_checksums,
)
from ragspec.retrieval.index.segment import IndexSegment


class LiveSegment:
    """A segment as one generation sees it."""

    def __init__(self, segment: IndexSegment, deleted: NDArray[np.int64] | None = None) -> None:
        """`deleted`: numbers of documents that are gone."""
        self.segment = segment
        self.is_live = np.ones(segment.record.num_documents, dtype=bool)  # of each document
        if deleted is not None:
            self.is_live[deleted] = False

    def live_rows(self) -> NDArray[np.bool_]:
        """Which rows are there. Shapes: [K]."""
        return self.is_live[self.segment.document_of]

    @property
    def num_live_passages(self) -> int:
        return int(self.live_rows().sum())

    def live_documents(self) -> Sequence[int]:
        """Numbers of the documents that are there."""
        return np.flatnonzero(self.is_live).tolist()


class Store:
    """One generation of an index."""

    def __init__(
        self,
        index_dir: Path,
        pointer: str,
        manifest: Manifest,
        segments: Sequence[LiveSegment],
        only: frozenset[str] | None = None,
    ) -> None:
        self.index_dir = index_dir
        self.pointer = pointer
        self.manifest = manifest
        self.segments = tuple(segments)
        self._only = only

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
        """Open the current generation, or the one that `pointer` (of another store) names.

        With `encoder`, only if it is the one the vectors came from; with `only`, no other segments than these (none: the manifest
        alone is read). Segments that a store of `sharing` has are not opened anew.

        Raises: StoreMissing, StoreCorrupt or EncoderMismatch, each with the exact reason; then nothing was loaded.
        """
        known = {live.segment.name: live.segment for store in sharing for live in store.segments}
        if pointer:
            return _open_generation(Path(index_dir), pointer, encoder, known, only)
        return _open_current(Path(index_dir), encoder, known, only)

    def refreshed(self) -> Store:
        """The current generation; this very store if it still is that. Segments that are open stay so. Raises: as `open`."""
        if read_pointer(self.index_dir) == self.pointer:
            return self
        return Store.open(self.index_dir, only=self._only, sharing=[self])

    @property
    def generation(self) -> str:
        return self.manifest.generation_id

    def documents(self) -> Iterator[Document]:
        """All documents, by segment."""
        for live in self.segments:
            for number in live.live_documents():
                yield live.segment.document(number)


def _open_current(
    index_dir: Path, encoder: EncoderIdentity | None, known: Mapping[str, IndexSegment], only: frozenset[str] | None
) -> Store:
    """Opens again when a writer replaced the generation, and removed an older one, between two looks."""
    while True:
        pointer = read_pointer(index_dir)
        try:
            return _open_generation(index_dir, pointer, encoder, known, only)
        except StoreCorrupt:
            if read_pointer(index_dir) == pointer:
                raise


def _open_generation(
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
    verify_checksums(_to_check(index_dir, folder, records, known))
    segments = [_live(index_dir, folder, manifest, record, known) for record in records]
    return Store(index_dir, pointer, manifest, segments, only)


def _to_check(
    index_dir: Path, folder: Path, records: Iterable[SegmentRecord], known: Mapping[str, IndexSegment]
) -> Iterator[tuple[Path, FileChecksum]]:
    for record in records:
        if record.deleted is not None:
            yield folder / record.deleted_name, record.deleted
        if not _is_open(record, known):
            yield from ((index_dir / record.name / _plain(name), each) for name, each in record.files.items())


def _live(
    index_dir: Path, folder: Path, manifest: Manifest, record: SegmentRecord, known: Mapping[str, IndexSegment]
) -> LiveSegment:
    if _is_open(record, known):
        segment = known[record.name]
    else:
        segment = IndexSegment(index_dir / record.name, record, manifest.encoder.dimension, manifest.config.dense)
    live = LiveSegment(segment, _deleted(folder / record.deleted_name, record) if record.deleted else None)
    if live.num_live_passages != record.num_live_passages:
        raise StoreCorrupt(f"{folder} deletes other documents of {record.name} than its manifest says")
    return live


def _is_open(record: SegmentRecord, known: Mapping[str, IndexSegment]) -> bool:
    return record.name in known and known[record.name].record.files == record.files


def _plain(name: str) -> str:
    if Path(name).name != name:
        raise StoreCorrupt(f"the manifest names a file outside its segment: {name!r}")
    return name


def _deleted(path: Path, record: SegmentRecord) -> NDArray[np.int64]:
    try:
        deleted = np.load(io.BytesIO(path.read_bytes()), allow_pickle=False)
    except (OSError, ValueError) as cause:
        raise StoreCorrupt(f"{path} cannot be read: {cause}") from cause
    fits = deleted.dtype == np.int64 and deleted.ndim == 1 and len(deleted) == record.num_deleted
    if not fits or (len(deleted) and not 0 <= deleted.min() <= deleted.max() < record.num_documents):
        raise StoreCorrupt(f"{path} is no list of {record.num_deleted} documents of {record.name}")
    return deleted  # type: ignore[no-any-return]


def check_encoder(manifest: Manifest, encoder: EncoderIdentity) -> None:
    """Raises: EncoderMismatch if `encoder` would place its vectors in another space than the index's."""
    built = manifest.encoder
    if (built.fingerprint, built.dimension) != (encoder.fingerprint, encoder.dimension):
        raise EncoderMismatch(
            f"the index was built by {built.id} (fingerprint {built.fingerprint[:12]}, {built.dimension} dimensions); "
            f"the encoder in use is {encoder.id} (fingerprint {encoder.fingerprint[:12]}, {encoder.dimension} dimensions)"
        )

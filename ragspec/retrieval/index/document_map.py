"""Maps document ids to segments while a writer changes an index.

Sealed segments come first, in order. Unsealed documents lie in the segment that is still being filled.

    >>> DocumentMap(store, with_texts=False).find("faq.jsonl:3")
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow.compute as pc

from ragspec.core import Document
from ragspec.retrieval.index.content_key import ContentSum, IdsByKey, document_key, text_key
from ragspec.retrieval.index.manifest import FileChecksum, SegmentRecord
from ragspec.retrieval.index.segment_files import npy_bytes
from ragspec.retrieval.index.store import IndexSegment, LiveSegment, Store


class DocumentLocation(NamedTuple):
    """The index of a document's segment in `DocumentMap.segments`, and the document's number in the segment."""

    segment: int
    document: int


class _Unsealed(NamedTuple):
    key: bytes
    text_key: bytes
    owner: str
    origin: str


class DocumentMap:
    """Owns the deletion marks of every segment. `content` is the sum of the keys of the live documents."""

    def __init__(self, store: Store | None, with_texts: bool) -> None:
        """`with_texts`: also map text keys to documents, for `with_text`."""
        self.segments: list[LiveSegment] = []
        self.content = ContentSum(store.manifest.content_sum if store is not None else "")
        self._places: dict[str, DocumentLocation] = {}
        self._texts = IdsByKey() if with_texts else None
        self._unsealed: list[_Unsealed] = []
        self._unsealed_deleted: list[int] = []
        for live in store.segments if store is not None else ():
            self._append(LiveSegment(live.segment, np.flatnonzero(~live.is_live)))

    def __len__(self) -> int:
        return len(self._places)

    def ids(self) -> Iterable[str]:
        return self._places.keys()

    def find(self, document_id: str) -> DocumentLocation | None:
        return self._places.get(document_id)

    def segment(self, place: DocumentLocation) -> IndexSegment | None:
        """The sealed segment of a document; None for an unsealed document."""
        return self.segments[place.segment].segment if place.segment < len(self.segments) else None

    def column(self, name: Literal["key", "text_key", "owner", "origin"], place: DocumentLocation) -> Any:
        """The field of a document in that column of its segment."""
        if place.segment == len(self.segments):
            return getattr(self._unsealed[place.document], name)
        return self.segments[place.segment].segment.documents[name][place.document].as_py()

    def is_former(self, place: DocumentLocation) -> bool:
        """Whether the document is of the former schema, without blocks."""
        segment = self.segment(place)
        return segment is not None and segment.is_former(place.document)

    def with_text(self, key: bytes) -> Iterable[str]:
        """The ids of documents with that text key. Needs `with_texts`."""
        assert self._texts is not None
        return self._texts.ids(key)

    def origins(self) -> Iterator[tuple[str, str, str]]:
        """Id, owner and origin of the live sealed documents."""
        for live in self.segments:
            owners, origins = (live.segment.documents[name].to_pylist() for name in ("owner", "origin"))
            yield from ((live.segment.ids[n], owners[n], origins[n]) for n in live.live_documents())

    def digests(self) -> set[str]:
        """Of the files of the live sealed documents."""
        digests = [(live, live.segment.documents["digest"].to_pylist()) for live in self.segments]
        return {own[number] for live, own in digests for number in live.live_documents()}

    def ids_of_source(self, source: str) -> list[str]:
        """Ids of the sealed documents that came from `source`."""
        found: list[str] = []
        if source != source.encode("utf-8", "replace").decode():
            return found  # a file name that is not valid Unicode: no document has it
        for live in self.segments:
            same = pc.equal(live.segment.documents["source"], source).to_numpy()
            found += [live.segment.ids[number] for number in np.flatnonzero(same & live.is_live).tolist()]
        return found

    def add(self, document: Document) -> None:
        """Add an unsealed document. An older document of its id must have been deleted."""
        assert document.id not in self._places
        unsealed = _Unsealed(document_key(document), text_key(document), document.owner, document.origin)
        self._places[document.id] = DocumentLocation(len(self.segments), len(self._unsealed))
        self._unsealed.append(unsealed)
        if self._texts is not None:
            self._texts.add(unsealed.text_key, document.id)
        self.content.add(unsealed.key)

    def delete(self, document_id: str) -> None:
        place = self._places.pop(document_id)
        self.content.remove(self.column("key", place))
        if self._texts is not None:
            self._texts.remove(self.column("text_key", place), document_id)
        if place.segment == len(self.segments):
            self._unsealed_deleted.append(place.document)
        else:
            self.segments[place.segment].is_live[place.document] = False

    def seal(self, segment: IndexSegment) -> None:
        """Turn the unsealed documents into those of the complete `segment`."""
        assert segment.record.num_documents == len(self._unsealed)
        self.segments.append(LiveSegment(segment, np.array(self._unsealed_deleted, np.int64)))
        self._unsealed, self._unsealed_deleted = [], []

    def replace(self, merged: Sequence[int], by: Sequence[IndexSegment]) -> None:
        """Replace the segments `merged` by the segments `by`, which hold their live documents. No document may be unsealed."""
        assert not self._unsealed
        kept = [live for number, live in enumerate(self.segments) if number not in set(merged)]
        self.segments, self._places = [], {}
        self._texts = None if self._texts is None else IdsByKey()
        for live in [*kept, *(LiveSegment(segment) for segment in by)]:
            self._append(live)

    def records(self) -> tuple[tuple[SegmentRecord, ...], dict[str, bytes]]:
        """The records of the next generation, and by name the files that list deleted documents.

        Segments without live documents are left out.
        """
        found = [_record(live) for live in self.segments if live.is_live.any()]
        return tuple(record for record, _ in found), {record.deleted_name: raw for record, raw in found if raw}

    def _append(self, live: LiveSegment) -> None:
        position, ids = len(self.segments), live.segment.ids
        numbers = live.live_documents()
        self._places.update((ids[number], DocumentLocation(position, number)) for number in numbers)
        if self._texts is not None:
            keys = live.segment.documents["text_key"].to_pylist()
            for number in numbers:
                self._texts.add(keys[number], ids[number])
        self.segments.append(live)


def _record(live: LiveSegment) -> tuple[SegmentRecord, bytes]:
    """The record of a segment, and the file that lists its deleted documents; empty without deleted documents."""
    deleted = np.flatnonzero(~live.is_live).astype(np.int64)
    raw = npy_bytes(deleted) if len(deleted) else b""
    file = FileChecksum(size_bytes=len(raw), sha256=hashlib.sha256(raw).hexdigest()) if raw else None
    update = {"num_deleted": len(deleted), "num_live_passages": live.num_live_passages, "deleted": file}
    return live.segment.record.model_copy(update=update), raw

"""Builds the next generation of an index: fills, merges and publishes segments.

Owns which documents the next generation holds, and where: sealed segments come first, in order; unsealed documents lie in the
segment that is still being filled. Every method that writes files raises OSError where the disk refuses.

    >>> builder.write(embedded_document)
    >>> builder.seal()
    >>> builder.publish().generation
"""

import contextlib
import hashlib
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow.compute as pc

from ragspec.config import IndexConfig
from ragspec.core import Document
from ragspec.errors import ConfigError, StoreError, StoreMissing
from ragspec.retrieval.encoder import EncoderIdentity, TextEncoder
from ragspec.retrieval.index.content_key import ContentSum, IdsByKey, document_key, text_key
from ragspec.retrieval.index.embedding import EmbeddedDocument
from ragspec.retrieval.index.index_directory import IndexDirectory
from ragspec.retrieval.index.manifest import FileChecksum, Manifest, SegmentRecord, read_current
from ragspec.retrieval.index.segment_files import npy_bytes
from ragspec.retrieval.index.segment_writer import IndexSegmentWriter
from ragspec.retrieval.index.store import IndexSegment, LiveSegment, Store, check_encoder
from ragspec.retrieval.search.analysis import RULES, Analyzer, rules_of
from ragspec.retrieval.search.faiss_index import build_faiss_index

MAX_SEGMENT_PASSAGES = 1_000_000
MAX_SEGMENTS = 16
"""A search looks into every segment, so a commit merges the smaller half of the segments that are at most half full if there are
more than this. Fuller segments are left alone, or every commit would write a million passages anew."""

_EARLIER_LANGUAGE = "english"
"""The default before languages were detected. An index built with it keeps it where the settings name no other."""


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


class GenerationBuilder:
    """States: open -> closed. At most one segment is being filled."""

    def __init__(
        self,
        directory: IndexDirectory,
        encoder: TextEncoder | None,
        config: IndexConfig | None,
        *,
        replace: bool,
        with_texts: bool,
    ) -> None:
        """Build on the index in the directory. `with_texts`: as for `DocumentMap`; the other arguments: as for `IndexWriter`.

        Raises: StoreMissing without index and encoder; unless `replace`, also StoreCorrupt, EncoderMismatch and ConfigError.
        """
        store, self._encoder, self.config = _base_index(directory.path, encoder, config, replace)
        self.documents = DocumentMap(store, with_texts)
        self._manifest = store.manifest if store is not None else None
        self._directory = directory
        self._analyzer = Analyzer(self.config.words, rules_of(store.manifest.analyzer) if store is not None else RULES)
        self._filling: IndexSegmentWriter | None = None

    def close(self) -> None:
        if self._filling is not None:
            self._filling.close()

    def write(self, embedded: EmbeddedDocument) -> None:
        """Add a document to the segment that is being filled."""
        size = self._filling.num_passages if self._filling else 0
        if size and size + len(embedded.passages) > MAX_SEGMENT_PASSAGES:
            self.seal()
        if self._filling is None:
            self._filling = IndexSegmentWriter(self._directory.stage(), self._encoder.dimension)
        terms = (self._analyzer.terms(text) for text in embedded.texts)
        self._filling.add(embedded.document, embedded.passages, embedded.vectors, terms)
        self.documents.add(embedded.document)

    def seal(self) -> None:
        """Complete the segment that is being filled, if there is one."""
        if self._filling is not None:
            self._filling.finish()
            self.documents.seal(self._place(self._filling))
            self._filling = None

    def is_compact(self) -> bool:
        """Whether no segment holds deleted documents and none can be merged with its neighbour."""
        segments = self.documents.segments
        return all(live.is_live.all() for live in segments) and len(_merge_groups(segments)) == len(segments)

    def merge_small(self) -> None:
        """Merge the smaller half of the small segments if there are too many of them. See `MAX_SEGMENTS`."""
        sizes = {number: live.num_live_passages for number, live in enumerate(self.documents.segments)}
        small = sorted((n for n, size in sizes.items() if size <= MAX_SEGMENT_PASSAGES // 2), key=sizes.__getitem__)
        if len(small) > MAX_SEGMENTS:
            self.merge(sorted(small[: len(small) // 2]))

    def merge(self, numbers: Sequence[int]) -> None:
        """Write the live documents of these segments as new segments."""
        sources = [self.documents.segments[number] for number in numbers]
        merged = []
        for group in _merge_groups(sources):
            writer = IndexSegmentWriter(self._directory.stage(), self._encoder.dimension)
            with contextlib.closing(writer):
                for live in group:
                    writer.append(live)
                writer.finish()
            if writer.num_documents:
                merged.append(self._place(writer))
        self.documents.replace(numbers, merged)

    def publish(self) -> Manifest:
        """Make the sealed segments the current generation. Without changes, returns the current manifest."""
        records, deleted = self.documents.records()
        if self._manifest is None or (self._manifest.segments, self._manifest.config) != (records, self.config):
            manifest = Manifest(
                generation=self._directory.free_number("generation"),
                content_key=self.documents.content.key(self._encoder, self.config, self._analyzer.id),
                content_sum=str(self.documents.content),
                created_by=_created_by(),
                encoder=self._encoder,
                analyzer=self._analyzer.id,
                config=self.config,
                segments=records,
            )
            self._directory.publish(manifest, deleted)
            self._manifest = manifest
        return self._manifest

    def _place(self, writer: IndexSegmentWriter) -> IndexSegment:
        """Build the FAISS index of a finished segment, move it to its final name, and open it."""
        build_faiss_index(writer.folder, self.config.dense)
        number = self._directory.free_number("segment")
        name = f"segment-{number:06d}"
        record = SegmentRecord(
            number=number,
            num_documents=writer.num_documents,
            num_passages=writer.num_passages,
            num_live_passages=writer.num_passages,
            files=self._directory.place(writer.folder, name),
        )
        return IndexSegment(self._directory.path / name, record, self._encoder.dimension, self.config.dense)


def _merge_groups(sources: Sequence[LiveSegment]) -> list[list[LiveSegment]]:
    """Neighbouring segments that fit into one segment, in order."""
    groups: list[list[LiveSegment]] = []
    room = 0
    for live in sources:
        if live.num_live_passages > room or not groups:
            groups.append([])
            room = MAX_SEGMENT_PASSAGES
        groups[-1].append(live)
        room -= live.num_live_passages
    return groups


def _base_index(
    index_dir: Path, encoder: TextEncoder | None, config: IndexConfig | None, replace: bool
) -> tuple[Store | None, EncoderIdentity, IndexConfig]:
    """The index to build on, if there is a fitting one, with the encoder and settings of the next generation."""
    store, built = None, None
    try:
        built = read_current(index_dir)[1].config
        if config is not None and not replace and config.words.language == "auto":
            earlier = config.words.model_copy(update={"language": _EARLIER_LANGUAGE})
            config = config.model_copy(update={"words": earlier}) if built.words == earlier else config
        store = _fitting_store(index_dir, encoder, config or built, renew=replace)
    except StoreMissing:
        pass
    except (StoreError, ConfigError):
        if not replace:
            raise
    if encoder is not None:
        return store, encoder.identity, config or built or IndexConfig()
    if store is None:
        raise StoreMissing(f"there is no index at {index_dir}")
    return store, store.manifest.encoder, config or store.manifest.config


def _fitting_store(index_dir: Path, encoder: TextEncoder | None, config: IndexConfig, *, renew: bool) -> Store:
    """`renew`: an index with earlier rules for words does not fit."""
    store = Store.open(index_dir)
    rules = RULES if renew else rules_of(store.manifest.analyzer)
    if encoder is not None:
        check_encoder(store.manifest, encoder.identity)
    built = store.manifest.config
    if built != config or store.manifest.analyzer != Analyzer(built.words, rules).id:
        raise ConfigError(
            f"the index at {index_dir} was built in another way ({built!r}): "
            "add to it with its own settings, or build another one"
        )
    return store


def _created_by() -> str:
    """The version of ragspec that writes a manifest. A source tree on the import path has none."""
    try:
        return f"ragspec {version('ragspec')}"
    except PackageNotFoundError:
        return "ragspec (not installed)"

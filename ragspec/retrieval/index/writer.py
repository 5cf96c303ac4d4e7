"""Changes an index: documents in, replaced, out; each commit is a whole new generation, or nothing.

New documents fill a segment; deleted ones are listed beside it; a commit writes the list of both as a generation and then names
it in CURRENT. A crash at any moment leaves the last committed generation, and what it left behind is removed by the next writer.
One writer at a time.

    with IndexWriter(index_dir, encoder) as writer:
        writer.upsert(document)
        writer.delete("faq.jsonl:3")
        writer.commit()
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from ragspec.config import DenseConfig, IndexConfig
from ragspec.core import Document
from ragspec.disk import saving
from ragspec.errors import InputError, SaveError
from ragspec.retrieval.chunking import embedded_text
from ragspec.retrieval.encoder import FloatArray, TextEncoder
from ragspec.retrieval.index.base import open_base_index
from ragspec.retrieval.index.changes import ChangeCounts, UpsertOutcome
from ragspec.retrieval.index.compaction import bins, merge_segments
from ragspec.retrieval.index.content_key import check_document, document_key, text_key
from ragspec.retrieval.index.document_map import DocumentLocation, DocumentMap
from ragspec.retrieval.index.embedding_queue import EmbeddedDocument, EmbeddingQueue
from ragspec.retrieval.index.index_directory import IndexDirectory, own_version
from ragspec.retrieval.index.manifest import EncoderRecord, Manifest, SegmentRecord, read_pointer
from ragspec.retrieval.index.segment import IndexSegment, SegmentWriter
from ragspec.retrieval.index.store import LiveSegment
from ragspec.retrieval.search.analysis import Analyzer
from ragspec.retrieval.search.approximate import build_faiss_index

PASSAGES_PER_ENCODE = 1024
"""Enough texts at once that many have the same token length and share a forward."""

MAX_SEGMENT_PASSAGES = 1_000_000
MAX_SEGMENTS = 16
"""A commit that would leave more that are not half full merges the smaller half of them: a search looks into each. Fuller ones
are left alone, or every commit would write a million passages anew."""


class IndexWriter:
    """One session of changes. States: open (entered) -> closed; what was not committed by then never was."""

    _live: DocumentMap
    _config: IndexConfig

    def __init__(
        self,
        index_dir: str | Path,
        encoder: TextEncoder | None = None,
        config: IndexConfig | None = None,
        *,
        replace: bool = False,
        keep_duplicates: bool = True,
        passages_per_encode: int = PASSAGES_PER_ENCODE,
    ) -> None:
        """Without `encoder` there must be an index, and nothing can be put in. `config` None: that of the index there, or the
        default. `replace`: an index built in another way, or damaged, is built anew, and every document is `unseen` at first.
        Without `keep_duplicates`, a document whose owner and text are another's is left out.
        """
        self.changes = ChangeCounts()
        self.unseen: set[str] = set()
        """Ids that `delete_unseen` will delete: filled by whoever wants that; an upsert or a delete takes its id out."""
        self._index_dir = Path(index_dir)
        self._encoder = encoder
        self._wanted = config
        self._replace = replace
        self._keep_duplicates = keep_duplicates
        self._passages_per_encode = passages_per_encode
        self._folder = IndexDirectory(self._index_dir)
        self._filling: SegmentWriter | None = None
        self._closed = ""

    def __enter__(self) -> IndexWriter:
        """Raises: IndexBusy if another writer is at work, SaveError, StoreMissing, StoreCorrupt, EncoderMismatch, ConfigError."""
        if self._encoder is None:
            read_pointer(self._index_dir)  # Why first: a mistyped folder is not made
        with saving(self._index_dir):
            self._folder.__enter__()
        try:
            self._open()
        except BaseException:
            self._folder.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = "the session has ended"
        if self._filling is not None:
            self._filling.close()
        self._folder.__exit__(kind, error, trace)

    @property
    def num_documents(self) -> int:
        return len(self._live) + len(self._group)

    def origins(self) -> Iterator[tuple[str, str, str]]:
        """Id, owner and origin of every document of the last commit that is still there."""
        return self._live.origins()

    def owner_and_origin(self, document_id: str) -> tuple[str, str] | None:
        """Those of the document of that id, if there is one."""
        if document_id in self._group:
            waiting = self._group.get(document_id)
            return waiting.owner, waiting.origin
        place = self._live.find(document_id)
        return None if place is None else self._live.owner_and_origin(place)

    def duplicate_of(self, document: Document) -> str | None:
        """The id of another document that stays and has this one's owner, metadata and text. Needs `keep_duplicates` False."""
        key = text_key(document)
        with_it = itertools.chain(self._live.with_text(key), self._group.with_text(key))
        return next((each for each in with_it if each != document.id and each not in self.unseen), None)

    def is_empty(self) -> bool:
        """Whether nothing could be found: no document that would stay holds any text."""
        self._seal()
        return not any(self._holds_text(live) for live in self._live.segments)

    def upsert(self, document: Document) -> UpsertOutcome:
        """Put a document in, in place of the one with its id; passages whose text was there keep their vectors.

        Raises: InputError if an index cannot hold it, or its id is that of another owner's document; SaveError.
        """
        self._check_open()
        if self._encoder is None:
            raise InputError("documents can only be put in with an encoder")
        key = document_key(check_document(document))
        self._check_owner(document)
        place = self._live.find(document.id)
        is_same = place is not None and self._live.key(place) == key
        may_leave = not is_same or document.id in self.unseen  # of two that were kept, a rebuild keeps the first
        if may_leave and not self._keep_duplicates and self.duplicate_of(document) is not None:
            self._remove(document.id)
            outcome = UpsertOutcome.DUPLICATE
        elif is_same:
            outcome = UpsertOutcome.UNCHANGED
        else:
            waiting = self._group.chunked(document, self._vectors_at(place) if place is not None else {})
            outcome = UpsertOutcome.UPDATED if self._remove(document.id) else UpsertOutcome.ADDED
            self._group.add(waiting)
            if max(self._group.num_missing, len(self._group)) >= self._passages_per_encode:
                self.flush()
        self.unseen.discard(document.id)
        setattr(self.changes, outcome, getattr(self.changes, outcome) + 1)
        return outcome

    def delete(self, document_id: str) -> bool:
        """Take a document out; False if there is none of that id."""
        self._check_open()
        found = self._remove(document_id)
        self.unseen.discard(document_id)
        self.changes.deleted += found
        return found

    def delete_source(self, source: str) -> int:
        """Take out every document of that source; returns their number. Raises: SaveError."""
        self._seal()
        return sum(self.delete(document_id) for document_id in self._live.ids_of_source(source))

    def delete_unseen(self) -> int:
        """Take out what is in `unseen`; returns their number."""
        return sum(self.delete(document_id) for document_id in list(self.unseen))

    def commit(self) -> Manifest:
        """Make the changes the index's current generation; readers of the old one keep it. Without changes, the old manifest.

        Raises: SaveError; then the index is as it was or, if only the very last flush to the disk failed, as it should be.
        """
        self._seal()
        segments = self._live.segments
        small = [n for n, live in enumerate(segments) if live.num_live_passages <= MAX_SEGMENT_PASSAGES // 2]
        if len(small) > MAX_SEGMENTS:
            self._merge(self._live.smaller_half(small))
        return self._publish()

    def compact(self, dense: DenseConfig | None = None) -> Manifest:
        """Commit, with all documents in as few segments as hold them and nothing of deleted ones.

        `dense` changes how they find their nearest vectors. Earlier generations stay on the disk for a while, for their readers.
        Raises: SaveError, ConfigError.
        """
        manifest = self.commit()
        segments = self._live.segments
        if dense not in (None, self._config.dense):
            self._config = self._config.model_copy(update={"dense": dense})
        elif all(live.is_live.all() for live in segments) and len(bins(segments, MAX_SEGMENT_PASSAGES)) == len(
            segments
        ):
            return manifest
        self._merge(range(len(segments)))
        return self._publish()

    def scrub(self) -> bool:
        """Commit, with one segment that holds deleted documents written anew; whether nothing is left for another call.

        Why one: it may be large, and others want to write. Where search is approximate nothing is done, since answers would
        change: what was deleted stays in its segments. Raises: SaveError.
        """
        self._seal()
        dead = [number for number, live in enumerate(self._live.segments) if not live.is_live.all()]
        if dead and self._config.dense.kind == "exact":
            self._merge(dead[:1])
            dead = dead[1:]
        else:
            dead = []
        self._publish()
        return not dead

    def purge(self) -> int:
        """Remove earlier generations from the disk now; how many stay, since readers have them on lease.

        Where none do, deleted text is gone then, after `compact`.
        """
        self.commit()
        with self._writing():
            self._folder.clean(keep_previous=False)
        return self._folder.num_earlier()

    def _open(self) -> None:
        store, self._identity, self._config = open_base_index(
            self._index_dir, self._encoder, self._wanted, self._replace
        )
        self._manifest = store.manifest if store is not None else None
        self._live = DocumentMap(store, with_texts=not self._keep_duplicates)
        if self._replace:
            self.unseen.update(self._live.ids())
        self._group = EmbeddingQueue(self._encoder, self._config.chunking)
        self._analyzer = Analyzer(self._config.words)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Inside, files are written. Once that failed they may be incomplete, and nothing of this session can be committed."""
        self._check_open()
        try:
            with saving(self._index_dir):
                yield
        except BaseException:
            self._closed = "an earlier change failed"
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise SaveError(f"cannot write {self._index_dir}: {self._closed}; begin again")

    def _check_owner(self, document: Document) -> None:
        found = self.owner_and_origin(document.id)
        if found is not None and found[0] != document.owner and document.id not in self.unseen:
            raise InputError(f"the id {document.id!r} is that of a document of another owner; delete that one first")

    def _holds_text(self, live: LiveSegment) -> bool:
        numbers = np.unique(live.segment.document_of[live.live_rows()]).tolist()
        return any(live.segment.ids[number] not in self.unseen for number in numbers)

    def _remove(self, document_id: str) -> bool:
        if document_id in self._group:
            self._group.drop(document_id)
            return True
        if self._live.find(document_id) is None:
            return False
        self._live.delete(document_id)
        return True

    def _vectors_at(self, place: DocumentLocation) -> dict[str, FloatArray]:
        """The vectors of a document's passages by their texts."""
        segment = self._live.segment(place)
        if segment is None:
            return {}
        return {embedded_text(segment.passage(row)): segment.vectors[row] for row in segment.rows_of(place.document)}

    def flush(self) -> None:
        """Encode the documents that wait for it, and write them; every change and commit may.

        Raises: SaveError; ModelError for a vector that is not finite; RetrievalError if the encoder is away: try again.
        """
        self._check_open()
        waiting = self._group.encode()  # Why outside: no file was touched if that fails, and the disk is not to blame
        with self._writing():
            for embedded in waiting:
                self._write(embedded)

    def _write(self, embedded: EmbeddedDocument) -> None:
        self.changes.encoded += len(embedded.missing)
        self.changes.reused += len(embedded.texts) - len(embedded.missing)
        size = self._filling.num_passages if self._filling else 0
        if size and size + len(embedded.passages) > MAX_SEGMENT_PASSAGES:
            self._close_segment()
        if self._filling is None:
            self._filling = SegmentWriter(self._folder.stage(), self._identity.dimension)
        terms = (self._analyzer.terms(text) for text in embedded.texts)
        self._filling.add(embedded.document, embedded.passages, embedded.vectors, terms)
        self._live.add(embedded.document)

    def _seal(self) -> None:
        """Write everything that waits, and complete the segment that is being filled."""
        self.flush()
        with self._writing():
            self._close_segment()

    def _close_segment(self) -> None:
        if self._filling is not None:
            self._filling.finish()
            segment = self._place(self._filling)
            self._filling = None
            self._live.seal(segment)

    def _merge(self, numbers: Sequence[int]) -> None:
        """Write the live documents of these segments as new segments."""
        sources = [self._live.segments[number] for number in numbers]
        merged = []
        with self._writing():
            for some in bins(sources, MAX_SEGMENT_PASSAGES):
                writer = SegmentWriter(self._folder.stage(), self._identity.dimension)
                with contextlib.closing(writer):
                    merge_segments([sources[number] for number in some], writer)
                if writer.num_documents:
                    merged.append(self._place(writer))
        self._live.replace(numbers, merged)

    def _place(self, writer: SegmentWriter) -> IndexSegment:
        """A finished segment gets the index of its vectors, its name, and its readers."""
        build_faiss_index(writer.folder, self._config.dense)
        record = self._folder.place_segment(writer)
        return IndexSegment(self._index_dir / record.name, record, self._identity.dimension, self._config.dense)

    def _publish(self) -> Manifest:
        records, deleted = self._live.records()
        if self._manifest is not None and (self._manifest.segments, self._manifest.config) == (records, self._config):
            return self._manifest
        with self._writing():
            manifest = self._new_manifest(records)
            self._folder.publish(manifest, deleted)
        self._manifest = manifest
        return manifest

    def _new_manifest(self, records: tuple[SegmentRecord, ...]) -> Manifest:
        return Manifest(
            generation=self._folder.free_number("generation"),
            content_key=self._live.content.key(self._identity, self._config),
            content_sum=str(self._live.content),
            created_by=f"ragspec {own_version()}",
            encoder=EncoderRecord(**dataclasses.asdict(self._identity)),
            analyzer=self._analyzer.id,
            config=self._config,
            segments=records,
        )

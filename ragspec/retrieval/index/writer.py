"""Changes an index: adds, replaces and deletes documents. Each commit writes a whole new generation, or nothing.

New documents fill a segment; deleted documents are listed beside their segment; a commit writes both lists as a generation and
then names it in CURRENT. A crash at any moment leaves the last committed generation, and the next writer removes the unfinished
files. One writer at a time.

    with IndexWriter(index_dir, encoder) as writer:
        writer.upsert(document)
        writer.delete("faq.jsonl:3")
        writer.commit()
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import numpy as np

from ragspec.config import DenseConfig, IndexConfig
from ragspec.core import Document
from ragspec.disk import saving
from ragspec.errors import InputError, SaveError
from ragspec.retrieval.encoder import TextEncoder
from ragspec.retrieval.index.content_key import check_document, document_key, text_key
from ragspec.retrieval.index.embedding import Chunker, EmbeddedDocument, encode_missing
from ragspec.retrieval.index.generation_builder import DocumentLocation, GenerationBuilder
from ragspec.retrieval.index.index_directory import locked_directory
from ragspec.retrieval.index.manifest import Manifest
from ragspec.retrieval.index.pointer import read_pointer

PASSAGES_PER_ENCODE = 1024
"""Enough texts at once that many have the same token length and share a forward."""


class UpsertOutcome(StrEnum):
    """What an upsert did."""

    ADDED = "added"
    UPDATED = "updated"
    UNCHANGED = "unchanged"
    DUPLICATE = "duplicate"


@dataclasses.dataclass(slots=True)
class ChangeCounts:
    """Documents by outcome. `encoded` passages went through the encoder; `reused` passages kept their stored vectors."""

    added: int = 0
    updated: int = 0
    unchanged: int = 0
    duplicate: int = 0
    deleted: int = 0
    encoded: int = 0
    reused: int = 0


class IndexWriter:
    """One session of changes. States: open (entered) -> closed. Closing drops changes that were not committed."""

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
        """Without `encoder` the index must exist, and no document can be added. `config` None: the settings of the index,
        or the defaults.

        `replace`: an index with another encoder or other settings, or a damaged one, is built anew, and every document starts out
        `unseen`. Without `keep_duplicates`, a document with the owner and text of another one is left out.
        """
        self.changes = ChangeCounts()
        self.unseen: set[str] = set()
        """Ids that `delete_unseen` deletes. Callers may add ids; an upsert or a delete removes its id."""
        self._index_dir = Path(index_dir)
        self._encoder = encoder
        self._config = config
        self._replace = replace
        self._keep_duplicates = keep_duplicates
        self._passages_per_encode = passages_per_encode
        self._closed = ""

    def __enter__(self) -> IndexWriter:
        """Raises: IndexBusy if another writer is at work, SaveError, StoreMissing, StoreCorrupt, EncoderMismatch, ConfigError."""
        if self._encoder is None:
            read_pointer(self._index_dir)  # Why first: a mistyped folder must not be made
        with contextlib.ExitStack() as stack:
            with saving(self._index_dir):
                self._directory = stack.enter_context(locked_directory(self._index_dir))
            options = {"replace": self._replace, "with_texts": not self._keep_duplicates}
            self._builder = GenerationBuilder(self._directory, self._encoder, self._config, **options)
            stack.callback(self._builder.close)
            self._documents = self._builder.documents
            self._chunker = Chunker(self._encoder, self._builder.config.chunking) if self._encoder else None
            self._waiting: dict[str, EmbeddedDocument] = {}  # to be encoded, by id
            self._num_missing = 0  # passages of those without a vector
            if self._replace:
                self.unseen.update(self._documents.ids())
            self._session = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = "the session has ended"
        self._session.close()

    @property
    def num_documents(self) -> int:
        return len(self._documents) + len(self._waiting)

    def origins(self) -> Iterator[tuple[str, str, str]]:
        """Id, owner and origin of every document of the last commit that was not deleted since."""
        for live in self._documents.segments:
            yield from live.fields("id", "owner", "origin")  # type: ignore[misc]

    def owner_and_origin(self, document_id: str) -> tuple[str, str] | None:
        if waiting := self._waiting.get(document_id):
            return waiting.document.owner, waiting.document.origin
        location = self._documents.find(document_id)
        if location is None:
            return None
        return self._documents.column("owner", location), self._documents.column("origin", location)

    def duplicate_of(self, document: Document) -> str | None:
        """The id of another document that stays and has the same owner, metadata and text. Needs `keep_duplicates` False."""
        key = text_key(document)
        waiting = (name for name, each in self._waiting.items() if each.text_key == key)
        same_text = itertools.chain(self._documents.with_text(key), waiting)
        return next((each for each in same_text if each != document.id and each not in self.unseen), None)

    def is_empty(self) -> bool:
        """Whether no document that stays holds any text."""
        self._seal()
        for live in self._documents.segments:
            numbers = np.unique(live.segment.document_of[live.live_rows()]).tolist()
            if any(live.segment.ids[number] not in self.unseen for number in numbers):
                return False
        return True

    def upsert(self, document: Document, chunked: EmbeddedDocument | None = None) -> UpsertOutcome:
        """Add a document, in place of the document with its id. Passages whose text is unchanged keep their vectors.

        The same document is written anew if it is of the former schema, or if a rebuild cuts it otherwise.

        `chunked`: the document's passages, of any other session with this encoder; not chunked again if the settings agree.
        Raises: InputError if an index cannot hold the document, or its id is that of another owner's document; SaveError.
        """
        self._check_open()
        if self._chunker is None:
            raise InputError("documents can only be put in with an encoder")
        key = document_key(check_document(document))
        self._check_owner(document)
        location = self._documents.find(document.id)
        is_same = location is not None and self._documents.column("key", location) == key
        may_leave = not is_same or document.id in self.unseen  # of two that were kept, a rebuild keeps the first
        if may_leave and not self._keep_duplicates and self.duplicate_of(document) is not None:
            self._remove(document.id)
            outcome = UpsertOutcome.DUPLICATE
        elif is_same and location is not None and not self._must_renew(document, location):
            outcome = UpsertOutcome.UNCHANGED
        else:
            fits = chunked is not None and chunked.chunking == self._builder.config.chunking
            waiting = chunked if chunked is not None and fits else self._chunker.chunked(document)
            if location is not None and (segment := self._documents.segment(location)) is not None:
                waiting.reuse(segment.vectors_of(location.document))
            outcome = UpsertOutcome.UPDATED if self._remove(document.id) else UpsertOutcome.ADDED
            self._waiting[document.id] = waiting
            self._num_missing += len(waiting.missing)
            if max(self._num_missing, len(self._waiting)) >= self._passages_per_encode:
                self.flush()
        self.unseen.discard(document.id)
        setattr(self.changes, outcome, getattr(self.changes, outcome) + 1)
        return outcome

    def keep_original(self, path: Path, digest: str) -> None:
        """Keep a file whose SHA-256 is `digest`, as long as a document has that digest. Raises: SaveError."""
        with self._writing():
            self._directory.keep_original(path, digest)

    def delete(self, document_id: str) -> bool:
        """Delete a document. Returns False if there is none of that id."""
        self._check_open()
        found = self._remove(document_id)
        self.unseen.discard(document_id)
        self.changes.deleted += found
        return found

    def delete_source(self, source: str) -> int:
        """Delete every document of that source. Returns their number. Raises: SaveError."""
        self._seal()
        return sum(self.delete(document_id) for document_id in self._documents.ids_of_source(source))

    def delete_unseen(self) -> int:
        """Delete the documents in `unseen`. Returns their number."""
        return sum(self.delete(document_id) for document_id in list(self.unseen))

    def flush(self) -> None:
        """Encode and write the waiting documents. Every change and commit may call this.

        Raises: SaveError; ModelError for a vector that is not finite; RetrievalError if the encoder does not answer: try again.
        """
        self._check_open()
        embedded, num_missing = list(self._waiting.values()), self._num_missing
        if self._encoder is not None and embedded:
            encode_missing(self._encoder, embedded)  # Why outside: a failing encoder leaves the files untouched
        self._waiting, self._num_missing = {}, 0
        self.changes.encoded += num_missing
        self.changes.reused += sum(len(document.texts) for document in embedded) - num_missing
        with self._writing():
            for document in embedded:
                self._builder.write(document)

    def commit(self) -> Manifest:
        """Publish the changes as the current generation; readers keep the old one. Without changes, returns the old manifest.

        Raises: SaveError. The index is then unchanged or, if only the last flush to the disk failed, fully changed.
        """
        self._seal()
        with self._writing():
            self._builder.merge_small()
            return self._builder.publish()

    def compact(self, dense: DenseConfig | None = None) -> Manifest:
        """Commit with all documents in as few segments as possible, and without deleted documents and their originals.

        `dense` changes the index of the vectors. Earlier generations stay on the disk for a while, for their readers.
        Raises: SaveError, ConfigError.
        """
        manifest = self.commit()
        with self._writing():
            self._keep_originals()
        if dense not in (None, self._builder.config.dense):
            self._builder.config = self._builder.config.model_copy(update={"dense": dense})
        elif self._builder.is_compact():
            return manifest
        with self._writing():
            self._builder.merge(range(len(self._documents.segments)))
            return self._builder.publish()

    def scrub(self) -> bool:
        """Commit, remove originals of deleted documents, and rewrite one segment that holds deleted documents.

        Returns whether no such segment is left.

        Why one: a segment may be large, and other writers wait. An approximate index is never rewritten, since its answers would
        change: deleted documents stay in its segments. Raises: SaveError.
        """
        self._seal()
        is_exact = self._builder.config.dense.kind == "exact"
        segments = self._documents.segments if is_exact else ()
        stale = [number for number, live in enumerate(segments) if not live.is_live.all()]
        with self._writing():
            if stale:
                self._builder.merge(stale[:1])
            self._builder.publish()
            self._keep_originals()
        return len(stale) < 2

    def purge(self) -> int:
        """Remove earlier generations from the disk now. Returns how many stay because readers hold locks on them.

        After `compact`, a return value of 0 means that deleted text is gone from the disk.
        """
        self.commit()
        with self._writing():
            self._directory.clean(keep_previous=False)
            self._keep_originals()
        return self._directory.num_earlier()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Inside, files are written. After a failure the files may be incomplete, so the session accepts no further change."""
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

    def _remove(self, document_id: str) -> bool:
        if waiting := self._waiting.pop(document_id, None):
            self._num_missing -= len(waiting.missing)
            return True
        if self._documents.find(document_id) is None:
            return False
        self._documents.delete(document_id)
        return True

    def _must_renew(self, document: Document, location: DocumentLocation) -> bool:
        """Whether the document is of the former schema, or a rebuild cuts it into other passages than it has."""
        segment = self._documents.segment(location) if self._replace else None
        if segment is None or self._chunker is None or self._documents.is_former(location):
            return self._documents.is_former(location)
        stored = (segment.passage(row) for row in segment.rows_of(location.document))
        cut = self._chunker.chunked(document).passages
        return [(each.start, each.end, each.heading) for each in stored] != [
            (each.start, each.end, each.heading) for each in cut
        ]

    def _keep_originals(self) -> None:
        """Of the files of the sealed documents, and no others."""
        kept = {digest for live in self._documents.segments for (digest,) in live.fields("digest")}
        self._directory.keep_originals(kept)

    def _seal(self) -> None:
        """Write the waiting documents, and complete the segment that is being filled."""
        self.flush()
        with self._writing():
            self._builder.seal()

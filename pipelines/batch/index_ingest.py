"""Files into a writer, one by one: whole or not at all, each document under its own identity.

A document remembers the file it came from (`origin`, its real path), so a later run knows which documents a file still has to
answer for. Nothing here prints; the job says what was found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ragspec.core import Document
from ragspec.errors import InputError
from ragspec.retrieval.encoder import EncoderWrapper, FloatArray, TextKind
from ragspec.retrieval.index.changes import UpsertOutcome
from ragspec.retrieval.index.content_key import check_document
from ragspec.retrieval.index.writer import IndexWriter
from ragspec.retrieval.reading import read_file

_READ_AT_ONCE_BYTES = 64 * 2**20


@dataclass
class Found:
    """What the files turned out to hold. `duplicates` by id, with the file they are in; `skipped` with the reason."""

    num_files: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    duplicates: dict[str, tuple[Path, str]] = field(default_factory=dict)


class Ingest:
    """One run over some files for one owner ("": whoever the documents say)."""

    def __init__(self, writer: IndexWriter, owner: str, passages_per_commit: int | None) -> None:
        """`passages_per_commit` None: nothing is committed on the way."""
        self.found = Found()
        self._writer = writer
        self._owner = owner
        self._passages_per_commit = passages_per_commit
        self._committed_passages = 0
        self._origin_of: dict[str, str] = {}
        self._read: set[str] = set()
        self._owners = {owner}

    def add_file(self, path: Path, name: str) -> None:
        """A file that cannot be read is left out as a whole; what it held before stays."""
        self.found.num_files += 1
        try:
            for document in self._whole(path, name):
                self._add(document, path, name)
            self._read.add(str(path.resolve()))
        except InputError as error:
            self.found.skipped[name] = str(error)

    def delete_missing(self, roots: Sequence[Path]) -> None:
        """Delete documents of files below `roots` that are gone, or were read now and hold them no more."""
        for document_id, owner, origin in list(self._writer.origins()):
            if document_id in self._origin_of or owner not in self._owners or not _is_below(origin, roots):
                continue
            if origin in self._read or not Path(origin).exists():
                self._writer.delete(document_id)

    def reconsider_duplicates(self) -> None:
        """Put in what was left out for the sake of a document that has changed, or is gone, since then."""
        waiting = {
            file: [i for i, f in self.found.duplicates.items() if f == file] for file in self.found.duplicates.values()
        }
        for (path, name), ids in waiting.items():
            try:
                for document in self._documents(path, name):
                    if document.id in ids and self._writer.duplicate_of(document) is None:
                        self._writer.upsert(document)
                        self._writer.changes.duplicate -= 1
                        del self.found.duplicates[document.id]
            except InputError as error:  # the file is gone since it was read
                self.found.skipped[name] = str(error)

    def _whole(self, path: Path, name: str) -> Iterable[Document]:
        """All documents of a file or, for half of a file is worse than none, an InputError before the first of them."""
        before = _state(path)
        ids: set[str] = set()
        documents = self._new_documents(path, name, ids)
        found: Iterable[Document] = list(documents) if before[0] <= _READ_AT_ONCE_BYTES else deque(documents, maxlen=0)
        if _state(path) != before:
            raise InputError(f"{path} was changed while it was read")
        self._origin_of.update(dict.fromkeys(ids, str(path.resolve())))
        return found if before[0] <= _READ_AT_ONCE_BYTES else self._documents(path, name)

    def _new_documents(self, path: Path, name: str, ids: set[str]) -> Iterator[Document]:
        """The documents, of which no id was there before, in this run or from a file that still is."""
        for document in self._documents(path, name):
            if document.id in ids:
                raise InputError(f"{path} holds two documents of the id {document.id!r}")
            ids.add(document.id)
            is_leaving = document.id in self._writer.unseen  # a rebuild drops it unless a file holds it
            known = None if is_leaving else self._writer.owner_and_origin(document.id)
            other = self._origin_of.get(document.id) or (known[1] if known else "")
            if other not in ("", document.origin) and Path(other).exists():
                raise InputError(f"{path}: the id {document.id!r} is that of a document in {other}")
            if known and known[0] != document.owner:
                raise InputError(f"{path}: the id {document.id!r} is that of a document of another owner")
            yield check_document(document)

    def _documents(self, path: Path, name: str) -> Iterator[Document]:
        """Why an owner's name leads the ids: two tenants may have files of one name."""
        lead, origin = f"{self._owner}/" if self._owner else "", str(path.resolve())
        for document in read_file(path, name):
            owner = self._owner or document.owner
            yield replace(document, id=lead + document.id, owner=owner, source=document.source or name, origin=origin)

    def _add(self, document: Document, path: Path, name: str) -> None:
        self._owners.add(document.owner)
        if self._writer.upsert(document) is UpsertOutcome.DUPLICATE:
            self.found.duplicates[document.id] = path, name
        encoded = self._writer.changes.encoded
        if self._passages_per_commit and encoded - self._committed_passages >= self._passages_per_commit:
            self._writer.commit()
            self._committed_passages = encoded


class Unencoded(EncoderWrapper):
    """An encoder for what is not to be kept: it counts and cuts as the real one, and its vectors are zero."""

    def encode(self, texts: Sequence[str], kind: TextKind = "document") -> FloatArray:
        return np.zeros((len(texts), self.identity.dimension), np.float32)


def _state(path: Path) -> tuple[int, int]:
    """Size and time of change. Raises: InputError."""
    try:
        found = path.stat()
    except OSError as cause:
        raise InputError(f"{path} cannot be read: {cause.strerror}") from cause
    return found.st_size, found.st_mtime_ns


def _is_below(origin: str, roots: Sequence[Path]) -> bool:
    path = Path(origin)
    return bool(origin) and any(path.is_relative_to(root) for root in roots)

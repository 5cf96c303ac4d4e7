"""Puts files into an index, one by one: each file as a whole or not at all.

A document records the real path of its file (`origin`), so a later run can find documents whose file is gone or has changed.
Never prints: the job shows the report.

    >>> ingest = FileIngest(writer, owner="", passages_per_commit=None)
    >>> ingest.add_file(Path("manual/index.md"), "manual/index.md")
    >>> ingest.report.skipped
    {}
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
from ragspec.retrieval.index.content_key import check_document
from ragspec.retrieval.index.writer import IndexWriter, UpsertOutcome
from ragspec.retrieval.reading import read_file

_READ_AT_ONCE_BYTES = 64 * 2**20


@dataclass
class IngestReport:
    """`skipped`: file names with the reason. `duplicates`: ids of documents left out, with their file's path and name."""

    num_files: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    duplicates: dict[str, tuple[Path, str]] = field(default_factory=dict)


class FileIngest:
    """One run over files. `owner`: the tenant of all documents; empty if the documents name their own."""

    def __init__(self, writer: IndexWriter, owner: str, passages_per_commit: int | None) -> None:
        """`passages_per_commit` None: the caller commits, at the end."""
        self.report = IngestReport()
        self._writer = writer
        self._owner = owner
        self._passages_per_commit = passages_per_commit
        self._committed_passages = 0
        self._origin_of: dict[str, str] = {}
        self._read: set[str] = set()
        self._owners = {owner}

    def add_file(self, path: Path, name: str) -> None:
        """A file that cannot be read is left out as a whole; the documents that the index has of it stay."""
        self.report.num_files += 1
        try:
            for document in self._valid_documents(path, name):
                self._add(document, path, name)
            self._read.add(str(path.resolve()))
        except InputError as error:
            self.report.skipped[name] = str(error)

    def delete_missing(self, roots: Sequence[Path]) -> None:
        """Delete documents below `roots` whose file is gone, or was read in this run without them."""
        for document_id, owner, origin in list(self._writer.origins()):
            if document_id in self._origin_of or owner not in self._owners or not _is_below(origin, roots):
                continue
            if origin in self._read or not Path(origin).exists():
                self._writer.delete(document_id)

    def retry_duplicates(self) -> None:
        """Index the duplicates of documents that this run has changed or deleted since."""
        for path, name in dict.fromkeys(self.report.duplicates.values()):
            try:
                for document in self._documents(path, name):
                    was_left_out = self.report.duplicates.get(document.id) == (path, name)
                    if was_left_out and self._writer.duplicate_of(document) is None:
                        self._writer.upsert(document)
                        self._writer.changes.duplicate -= 1
                        del self.report.duplicates[document.id]
            except InputError as error:  # the file is gone since it was read
                self.report.skipped[name] = str(error)

    def _valid_documents(self, path: Path, name: str) -> Iterable[Document]:
        """All documents of a file. Raises: InputError before the first document, so that no file is indexed in part."""
        before = _size_and_mtime(path)
        ids: set[str] = set()
        documents = self._new_documents(path, name, ids)
        is_small = before[0] <= _READ_AT_ONCE_BYTES
        valid: Iterable[Document] = list(documents) if is_small else deque(documents, maxlen=0)
        if _size_and_mtime(path) != before:
            raise InputError(f"{path} was changed while it was read")
        self._origin_of.update(dict.fromkeys(ids, str(path.resolve())))
        return valid if is_small else self._documents(path, name)

    def _new_documents(self, path: Path, name: str, ids: set[str]) -> Iterator[Document]:
        """Raises: InputError for an id that this run or another existing file has already."""
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
        """Why the owner is part of the ids: two tenants may have files of the same name."""
        prefix, origin = f"{self._owner}/" if self._owner else "", str(path.resolve())
        for document in read_file(path, name):
            owner = self._owner or document.owner
            yield replace(document, id=prefix + document.id, owner=owner, source=document.source or name, origin=origin)

    def _add(self, document: Document, path: Path, name: str) -> None:
        self._owners.add(document.owner)
        if self._writer.upsert(document) is UpsertOutcome.DUPLICATE:
            self.report.duplicates[document.id] = path, name
        encoded = self._writer.changes.encoded
        if self._passages_per_commit and encoded - self._committed_passages >= self._passages_per_commit:
            self._writer.commit()
            self._committed_passages = encoded


class ZeroEncoder(EncoderWrapper):
    """An encoder for dry runs: it counts and cuts tokens like the real encoder, and its vectors are zero."""

    def encode(self, texts: Sequence[str], kind: TextKind = "document") -> FloatArray:
        return np.zeros((len(texts), self.identity.dimension), np.float32)


def _size_and_mtime(path: Path) -> tuple[int, int]:
    """Bytes and nanoseconds. Raises: InputError."""
    try:
        stat = path.stat()
    except OSError as cause:
        raise InputError(f"{path} cannot be read: {cause.strerror}") from cause
    return stat.st_size, stat.st_mtime_ns


def _is_below(origin: str, roots: Sequence[Path]) -> bool:
    path = Path(origin)
    return bool(origin) and any(path.is_relative_to(root) for root in roots)

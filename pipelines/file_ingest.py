"""Reads the files of a run into an index: each as a whole or not at all, duplicates once, gone documents out.

Owns which documents a run adds, leaves out and deletes, and its report. Prints nothing; the caller commits the end of the run.

    >>> ingest = FileIngest(writer, reader, "", NearDuplicates(names))
    >>> ingest.add_file(path, name)
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ragspec.core import Document
from ragspec.errors import InputError
from ragspec.retrieval.index.content_key import check_document
from ragspec.retrieval.index.manifest import file_checksum
from ragspec.retrieval.index.writer import IndexWriter, UpsertOutcome
from ragspec.retrieval.reading import Unread, find_files, has_rows
from ragspec.retrieval.reading.bounded_reader import BoundedReader
from ragspec.retrieval.reading.formats import ReaderInput, format_of

_READ_AT_ONCE_BYTES, _SHOWN_IDS = 64 * 2**20, 20


_LEAST_SHARED = 0.7
"""Of 351 pages of three manuals and their reStructuredText, 323 share so much; most others are lists of links."""

_WORD = re.compile(r"\w+")
_NUMBER = re.compile(r"(?<![\w.])\d[\d.,]*\d(?!\w)")
_MARKUP = re.compile(r"<[^<>\n]*>|\w+://\S+|^[ \t]*(?:\.\. .*|:[\w-]+:.*)", re.MULTILINE)
"""Targets of links and the settings of directives, whose numbers a reader does not see."""


class _Content(NamedTuple):
    id: str
    suffix: str
    runs: frozenset[tuple[str, str, str]]
    numbers: frozenset[str]


class NearDuplicates:
    """The documents of one run that may have near-duplicates. Of two of them, the first stays.

    Compares files of one name, apart from the endings; `index.html` also has the name of its folder. A document is left out only
    if the other document has most of its runs of three words and each of its numbers, so that no year and no price is lost.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._suffixes: dict[str, set[str]] = {}
        self._known: dict[str, list[_Content]] = {}
        for name in names:
            for key in _keys(name):
                self._suffixes.setdefault(key, set()).add(_suffix(name))

    def compares(self, name: str) -> bool:
        """Whether there is a file of that name in another format."""
        return not has_rows(name) and any(len(self._suffixes[key]) > 1 for key in _keys(name))

    def original(self, document: Document, name: str) -> str:
        """The id of an earlier document in another format that says what this one says; empty: there is none.

        Remembers the document. `name`: of its file.
        """
        if not self.compares(name):
            return ""
        keys = _keys(name)
        words = _WORD.findall(document.text.casefold())
        runs = frozenset(zip(words, words[1:], words[2:], strict=False))
        content = _Content(document.id, _suffix(name), runs, frozenset(_NUMBER.findall(document.text)))
        own_numbers = frozenset(_NUMBER.findall(_MARKUP.sub("", document.text)))
        for other in (other for key in keys for other in self._known.get(key, ())):
            shares = len(runs & other.runs) >= max(1, _LEAST_SHARED * len(runs))
            if shares and other.suffix != content.suffix and own_numbers <= other.numbers:
                return other.id
        for key in keys:
            self._known.setdefault(key, []).append(content)
        return ""


class FileList(NamedTuple):
    """The files of the inputs at one moment, sources of pages last. `excluded`: real paths. `stamps`: size and time by name."""

    files: tuple[tuple[Path, str], ...]
    excluded: frozenset[str]
    stamps: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, inputs: Sequence[str], exclude: Sequence[str], allow_none: bool) -> FileList:
        """Raises: InputError."""
        found = sorted(find_files(inputs, allow_none), key=lambda each: is_source(each[1]))
        files = tuple(each for each in found if not _is_excluded(each[1], exclude))
        if found and not files and not allow_none:
            raise InputError("--exclude leaves no file to index")
        excluded = frozenset(str(path.resolve()) for path, name in found if _is_excluded(name, exclude))
        stamps = {name: size_and_mtime(path) for path, name in files if path.exists()}
        return cls(files, excluded, stamps)

    def differs(self, name: str, before: FileList) -> bool:
        return self.stamps.get(name) != before.stamps.get(name)


@dataclass
class IngestReport:
    """`skipped`: file names with the reason. `unread`: parts of indexed files. `changed`: ids by outcome. `duplicates`: ids of
    documents left out, with their file's path and name. `near_duplicates`: the same, with the id of the document that stays.
    `private`: the number of rows with an owner of their own, by file."""

    num_files: int = 0
    changed: dict[str, list[str]] = field(default_factory=lambda: {"added": [], "updated": [], "deleted": []})
    near_duplicates: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    unread: dict[str, list[Unread]] = field(default_factory=dict)
    duplicates: dict[str, tuple[Path, str]] = field(default_factory=dict)
    private: Counter[str] = field(default_factory=Counter)


class FileIngest:
    """One run over files. `owner`: the tenant of all documents; empty if the documents name their own."""

    def __init__(
        self,
        writer: IndexWriter,
        reader: BoundedReader,
        owner: str,
        near_duplicates: NearDuplicates | None,
        keep_originals: bool = False,
        passages_per_commit: int | None = None,
    ) -> None:
        """`near_duplicates` None: they are indexed. `passages_per_commit` None: the caller commits, at the end."""
        self._keep_originals = keep_originals
        self.report = IngestReport()
        self._writer, self._reader, self._near_duplicates = writer, reader, near_duplicates
        self._owner = owner
        self._prefix = f"{owner}/" if owner else ""  # Why in ids: two tenants may have files of the same name
        self._passages_per_commit = passages_per_commit
        self._committed_passages = 0
        self._origin_of: dict[str, str] = {}
        self._read: dict[str, str] = {}  # the names in ids, by origin, of files that were read as a whole
        self._same_text: dict[str, str] = {}  # ids of the index, with the origin of a duplicate
        self._owners = {owner}

    def add_file(self, path: Path, name: str) -> None:
        """A file that cannot be read is left out as a whole; the documents that the index has of it stay."""
        self.report.num_files += 1
        is_empty = True
        try:
            for document in self._valid_documents(path, name):
                self._add(document, path, name)
                is_empty = False
            self._read[str(path.resolve())] = self._prefix + name
            if is_empty:
                self.report.skipped[name] = f"{path} holds no text"
        except InputError as error:
            self.report.skipped[name] = str(error)

    def must_repeat(self, name: str) -> bool:
        """Whether a later run must read the file again, although the file has not changed."""
        names = (name for _, name in self.report.duplicates.values())
        is_compared = self._near_duplicates is not None and self._near_duplicates.compares(name)
        return is_compared or name in self.report.skipped or name in names

    def delete_missing(self, roots: Sequence[Path], excluded: Collection[str]) -> None:
        """Delete documents below `roots` whose file is gone or `excluded`, or was read in this run without them.

        Where a file lacks no more documents than it has rows that cannot be read, these may be the same: the documents stay. Rows
        with the id of an earlier one are none of them.
        """
        missing = defaultdict[str, list[str]](list)
        for document_id, owner, origin in list(self._writer.origins()):
            if document_id not in self._origin_of and self._is_gone(document_id, owner, origin, roots, excluded):
                missing[origin].append(document_id)
        for origin, ids in missing.items():
            name = self._read.get(origin, "").removeprefix(self._prefix)
            unread = self.report.unread.get(name, [])
            if has_rows(origin) and len(ids) <= sum(bool(part.place and not part.is_doubled) for part in unread):
                told = ", ".join(ids[:_SHOWN_IDS])
                unread.insert(
                    0, Unread("", f"documents that may stand there stay; `index delete` removes them: {told}")
                )
            else:
                for document_id in ids:
                    self._delete(document_id)

    def delete_moved(self) -> None:
        """Delete documents of files that this run has indexed, under the names that a run over another folder gave them."""
        with_documents = set(self._origin_of.values())
        for document_id, owner, origin in list(self._writer.origins()):
            is_left = document_id not in self._origin_of and self._same_text.get(document_id) != origin
            if is_left and owner == self._owner and origin in self._read and origin in with_documents:
                now = self._read[origin]
                file = PurePosixPath(now).name
                before, is_row, _ = document_id.partition(f"{file}:")
                name = before + file if is_row else document_id
                if name != now and PurePosixPath(name).name == PurePosixPath(now).name:
                    self._delete(document_id)

    def keep_others(self, documents: Iterable[Document], roots: Sequence[Path], excluded: Collection[str]) -> None:
        """Index the documents of an earlier index that this run has not read and that are not gone."""
        for document in documents:
            where = document.id, document.owner, document.origin
            if document.id not in self._origin_of and not self._is_gone(*where, roots, excluded):
                self._writer.upsert(document)

    def _is_gone(
        self, document_id: str, owner: str, origin: str, roots: Sequence[Path], excluded: Collection[str]
    ) -> bool:
        is_row = not self._owner and origin in self._read and not document_id.startswith(f"{owner}/")
        is_answered_for = (owner in self._owners or is_row) and _is_below(origin, roots)
        return is_answered_for and (origin in self._read or origin in excluded or not Path(origin).exists())

    def delete_unseen(self) -> None:
        """Delete the documents that a rebuild has not met."""
        self.report.changed["deleted"] += sorted(self._writer.unseen)
        self._writer.delete_unseen()

    def retry_duplicates(self) -> None:
        """Index the duplicates of documents that this run has changed or deleted since."""
        for path, name in dict.fromkeys(self.report.duplicates.values()):
            try:
                for document in self._documents(path, name, []):
                    was_left_out = self.report.duplicates.get(document.id) == (path, name)
                    if was_left_out and self._writer.duplicate_of(document) is None:
                        self._note(document.id, self._writer.upsert(document))
                        self._writer.changes.duplicate -= 1
                        del self.report.duplicates[document.id]
            except InputError as error:  # the file is gone since it was read
                self.report.skipped[name] = str(error)

    def _valid_documents(self, path: Path, name: str) -> Iterable[Document]:
        """All documents of a file. Raises: InputError before the first document, so that no file is indexed in part."""
        before = size_and_mtime(path)
        ids: set[str] = set()
        unread: list[Unread] = []
        documents = self._new_documents(path, name, ids, unread)
        is_small = before[0] <= _READ_AT_ONCE_BYTES
        valid: Iterable[Document] = list(documents) if is_small else deque(documents, maxlen=0)
        if size_and_mtime(path) != before:
            raise InputError(f"{path} was changed while it was read")
        self._origin_of.update(dict.fromkeys(ids, str(path.resolve())))
        if unread:
            self.report.unread[name] = unread
        return valid if is_small else self._documents(path, name, [])

    def _new_documents(self, path: Path, name: str, ids: set[str], unread: list[Unread]) -> Iterator[Document]:
        """Raises: InputError for an id that this run or another existing file has already."""
        for document in self._documents(path, name, unread):
            ids.add(document.id)
            is_leaving = document.id in self._writer.unseen  # a rebuild drops it unless a file holds it
            known = None if is_leaving else self._writer.owner_and_origin(document.id)
            other = self._origin_of.get(document.id) or (known[1] if known else "")
            if other not in ("", document.origin) and Path(other).exists():
                told = "; ids must differ between files, or be left out" if has_rows(name) else ""
                raise InputError(f"{path}: the id {document.id!r} is that of a document in {other}{told}")
            if known and known[0] != document.owner and not (has_rows(name) and known[1] == document.origin):
                raise InputError(
                    f"{path}: the id {document.id!r} is that of a document of another owner; `sync --renew` replaces it"
                )
            yield check_document(document)

    def _documents(self, path: Path, name: str, unread: list[Unread]) -> Iterator[Document]:
        origin = str(path.resolve())
        # Why not of rows: a change of one would change the documents of all others
        digest = "" if has_rows(name) or not path.is_file() else file_checksum(path).sha256
        for document in self._reader.documents(path, name, unread):
            owner = self._owner or document.owner
            source = document.source or name
            document_id = self._prefix + document.id
            yield replace(document, id=document_id, owner=owner, source=source, origin=origin, digest=digest)

    def _add(self, document: Document, path: Path, name: str) -> None:
        self._owners.add(document.owner)
        self._delete_former(document, name)
        self.report.private[name] += bool(document.owner and not self._owner)
        if self._near_duplicates and (original := self._near_duplicates.original(document, name)):
            self.report.near_duplicates[document.id] = original
            self._delete(document.id)
            return
        if self._keep_originals and document.digest:
            self._writer.keep_original(path, document.digest)
        outcome = self._writer.upsert(document)
        self._note(document.id, outcome)
        if outcome is UpsertOutcome.DUPLICATE:
            self.report.duplicates[document.id] = path, name
            self._same_text[self._writer.duplicate_of(document) or ""] = document.origin
        encoded = self._writer.changes.encoded
        if self._passages_per_commit and encoded - self._committed_passages >= self._passages_per_commit:
            self._writer.commit()
            self._committed_passages = encoded

    def _delete_former(self, document: Document, name: str) -> None:
        """Delete the same row of the same file under another owner, or under its own id alone, as earlier versions named it."""
        alone = document.id.removeprefix(f"{self._prefix}{name}:")
        says_id = f"\nid: {alone}\n" in f"\n{document.text}\n"
        for former in (self._prefix + alone, document.id) if has_rows(name) else ():
            owner, origin = self._writer.owner_and_origin(former) or ("", "")
            is_renamed = former != document.id and former not in self._origin_of and says_id
            if origin == document.origin and (is_renamed or owner != document.owner):
                self._delete(former)

    def _delete(self, document_id: str) -> None:
        if self._writer.delete(document_id):
            self.report.changed["deleted"].append(document_id)

    def _note(self, document_id: str, outcome: UpsertOutcome) -> None:
        if outcome in (UpsertOutcome.ADDED, UpsertOutcome.UPDATED):
            self.report.changed[outcome].append(document_id)


def size_and_mtime(path: Path) -> tuple[int, int]:
    """Bytes and nanoseconds. Raises: InputError."""
    try:
        stat = path.stat()
    except OSError as cause:
        raise InputError(f"{path} cannot be read: {cause.strerror}") from cause
    return stat.st_size, stat.st_mtime_ns


def _is_excluded(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches a part of the path below the input: `*.log`, `node_modules`, `drafts/2019`."""
    parts = name.split("/")[1:] or [name]
    spans = itertools.combinations(range(len(parts) + 1), 2)
    paths = ["/".join(parts[start:end]) for start, end in spans]
    return any(fnmatch.fnmatchcase(path, pattern.strip("/")) for path in paths for pattern in patterns)


def _is_below(origin: str, roots: Sequence[Path]) -> bool:
    path = Path(origin)
    return bool(origin) and any(path.is_relative_to(root) for root in roots)


def is_source(name: str) -> bool:
    """Whether the file may be the source of a page: of two near-duplicates, the page as it is read is kept."""
    return format_of(name).reader_input is ReaderInput.TEXT


def _keys(name: str) -> set[str]:
    path = PurePosixPath(name.casefold())
    stem = path.name.partition(".")[0]
    return {stem, path.parent.name} if stem == "index" else {stem}


def _suffix(name: str) -> str:
    return PurePosixPath(name.casefold()).suffix

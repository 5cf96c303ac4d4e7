"""Files on their way into the index, and the threads that read them beside the one that commits.

Owns the order in which files are read and committed: tenants take turns. One file of a tenant is read at a time, so that slow
files of one tenant leave a thread to the others. Files other than plain text are parsed in a process of their own, so that a
hostile file reaches no other tenant's. Whose documents they are is never read from the file. Changes no index.
"""

import itertools
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

from ragspec.core import Document
from ragspec.errors import InputError
from ragspec.retrieval.index.embedding import EmbeddedDocument
from ragspec.retrieval.reading import SUFFIXES, Unread, format_of, has_rows
from ragspec.retrieval.reading.bounded_reader import BoundedReader, ReadLimits, document_of, write_documents
from ragspec.tenants import FairQueue
from services.stores.records import FileRecord, StoreMember

log = logging.getLogger(__name__)

STORE, FILE = "vector_store_id", "file_id"
"""Keys of a document's metadata that the service sets; users cannot."""

_MAX_REASON_CHARS = 300
_PART_DOCUMENTS = 1000
"""Most documents of one commit, after which the next tenant has its turn."""
_PART_BYTES = 2**20
"""A commit takes no further document of a file above this size. A document is never divided."""
_NUM_READERS = 2
_MAX_AHEAD = 16
"""Files of one tenant that are read before they are committed, fewer if they have `_PART_BYTES`."""
_LARGE_BYTES = 2**23
"""A parsed text of more bytes is large."""
_MAX_LARGE = 4
"""Large texts whose passages are in memory at once, over all tenants: each may have `ReadLimits.max_text_bytes`."""
_STOP_S = 10.0
_NICENESS = 5
"""Why not more: a query waits for the forward that the encoder has begun."""


class UnsupportedFile(InputError):
    """A type of file that cannot be parsed."""


def parsed(path: Path, filename: str, limits: ReadLimits) -> tuple[TextIO, list[Unread]]:
    """An open file without a name, one JSON object a line: the documents, of nobody yet. And the parts that were not read.

    Raises: InputError with a reason that names the file as its owner does; UnsupportedFile.
    """
    if Path(filename).suffix.lower() not in SUFFIXES:
        raise UnsupportedFile(f"files of this type cannot be read; these can: {', '.join(sorted(SUFFIXES))}")
    unread: list[Unread] = []
    with tempfile.TemporaryDirectory(prefix="ragspec-parse-") as folder:
        output = Path(folder) / "documents.jsonl"
        try:
            if format_of(filename).is_safe:
                write_documents(path, filename, output, limits, unread)
            else:
                with BoundedReader(limits) as reader:
                    unread = reader.write(path, filename, output)
        except InputError as cause:
            raise InputError(str(cause).replace(str(path), filename)[:_MAX_REASON_CHARS]) from cause
        return open(output, encoding="utf-8"), unread


def documents(lines: TextIO, file: FileRecord, member: StoreMember) -> Iterator[Document]:
    """The documents of a parsed file in a vector store."""
    numbered = has_rows(file.filename)
    for number, line in enumerate(lines, 1):
        yield _document(line, file, member, f":{number}" if numbered else "")


def _document(line: str, file: FileRecord, member: StoreMember, row: str) -> Document:
    found = document_of(line)
    title = Path(file.filename).stem if not row and found.title in ("", Path(file.id).stem) else found.title
    return replace(
        found,
        id=f"{member.store}:{member.file}{row}",
        title=title,
        source=(found.source if row else "") or file.filename,
        metadata={**found.metadata, **member.attributes, STORE: member.store, FILE: member.file},
        owner=member.tenant,
        origin=origin_of(member),
    )


def origin_of(member: StoreMember) -> str:
    """The `origin` in the index of a member's documents."""
    return f"{member.store}:{member.file}"


@dataclass(slots=True, eq=False)
class Upload:
    """A file on its way into the index, in parts. States of each part: unread -> ready -> committed.

    `part`: the documents to commit next; `passages`: the same, cut. `committed`: the ids of those before. `may_be_known`: the
    index may hold documents of the file already. `is_dropped`: the member ended, is deleted, or was attached again. `unread`:
    the parts of the file that were not read, in words. `lines`: of the parsed file.
    """

    member: StoreMember
    part: list[Document] = field(default_factory=list)
    passages: list[EmbeddedDocument] = field(default_factory=list)
    committed: set[str] = field(default_factory=set)
    num_bytes: int = 0
    is_whole: bool = False
    is_large: bool = False
    may_be_known: bool = True
    is_dropped: bool = False
    error: Exception | None = None
    unread: str = ""
    lines: TextIO | None = None
    _rest: Iterator[Document] = field(default_factory=lambda: iter(()))

    @property
    def tenant(self) -> str:
        return self.member.tenant

    @property
    def num_chars(self) -> int:
        """Characters of the part."""
        return sum(len(document.text) for document in self.part)

    @property
    def num_missing_chars(self) -> int:
        """Characters of the part's passages that must be encoded."""
        return sum(each.num_missing_chars for each in self.passages)

    def parse(self, path: Path, file: FileRecord, limits: ReadLimits) -> None:
        """Raises: InputError."""
        self.lines, unread = parsed(path, file.filename, limits)
        self.unread = "; ".join(str(part) for part in unread if part.place)[:_MAX_REASON_CHARS]
        is_long = os.fstat(self.lines.fileno()).st_size > _LARGE_BYTES
        self.is_large = is_long and not has_rows(file.filename)  # Why: a part of a file of rows is small
        self._rest = documents(self.lines, file, self.member)

    def read_part(self) -> None:
        """Fills an empty `part` of a parsed file; `is_whole` is set with the last one."""
        if self.part:
            return
        num_chars = 0
        for document in itertools.islice(self._rest, _PART_DOCUMENTS):
            self.part.append(document)
            num_chars += len(document.text)
            if num_chars >= _PART_BYTES:
                return
        self.is_whole = len(self.part) < _PART_DOCUMENTS
        if self.is_whole:
            self.close()

    def part_done(self) -> None:
        """The part is in the index."""
        self.committed.update(document.id for document in self.part)
        self.num_bytes += sum(len(document.text.encode()) for document in self.part)
        self.part, self.passages = [], []

    def close(self) -> None:
        """Removes what parsing left on the disk."""
        if self.lines is not None:
            self.lines.close()


def yield_to_answers() -> None:
    """Leaves most of the processors to answers, also in threads and processes that this thread starts.

    Only Linux has priorities of threads.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS))


class UploadQueue:
    """Safe to call from several threads. States: started -> stopped -> joined.

    `ready`: uploads to commit or to give up. `large`: those with a large part in memory.
    """

    def __init__(self, read: Callable[[Upload], bool], wake: threading.Condition) -> None:
        """`read` reads the next piece of a file, and returns whether the upload is ready. `wake` is notified of each change."""
        self._read, self._wake = read, wake
        self._unread, self.ready = (FairQueue[Upload](lambda upload: upload.tenant) for _ in range(2))
        self._reading: set[str] = set()  # tenants
        self.large: set[Upload] = set()
        self._taken: list[Upload] = []
        self._stopping = False
        names = [f"ragspec-reader-{number}" for number in range(_NUM_READERS)]
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for name in names]

    def __len__(self) -> int:
        with self._wake:
            return len(self._unread) + len(self.ready)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def append(self, upload: Upload) -> None:
        with self._wake:
            self._unread.append(upload)
            self._wake.notify_all()

    def take_ready(self, max_chars: int) -> list[Upload]:
        """Uploads of tenants in turn, with at most so many characters to encode; or a larger one alone."""
        taken: list[Upload] = []
        with self._wake:
            while self.ready and len(taken) < _MAX_AHEAD:
                upload = self.ready.heads()[0]
                max_chars -= upload.num_missing_chars
                if taken and max_chars < 0:
                    break
                self.ready.take(upload)
                taken.append(upload)
            self._taken = list(taken)
        return taken

    def put_back_taken(self) -> None:
        """After an error: all that were taken last and neither put back nor closed."""
        self.put_back(self._taken)

    def put_back(self, uploads: Sequence[Upload]) -> None:
        """In front of their tenants' others. Those without passages are read on."""
        with self._wake:
            self._taken = [upload for upload in self._taken if upload not in uploads]
            for upload in reversed(uploads):
                upload.error = None
                (self.ready if upload.passages else self._unread).appendleft(upload)
                if not upload.part:
                    self.large.discard(upload)
            self._wake.notify_all()

    def close(self, upload: Upload) -> None:
        """Ends an upload that was taken."""
        upload.close()
        with self._wake:
            self._taken = [each for each in self._taken if each is not upload]
            self.large.discard(upload)
            self._wake.notify_all()

    def stop(self) -> None:
        """Begins no other file."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()

    def join(self) -> None:
        """Returns after the files that are being read, or soon: a parse may take minutes, and the next process begins it anew."""
        for thread in self._threads:
            if thread.is_alive():
                thread.join(_STOP_S)
        with self._wake:
            for upload in (*self._unread, *self.ready):
                upload.close()

    def _run(self) -> None:
        yield_to_answers()
        while not self._stopping:
            try:
                self._read_next()
            except Exception:  # as when memory ran out
                log.exception("a file was not read; others go on")

    def _read_next(self) -> None:
        with self._wake:
            self._wake.wait_for(lambda: self._stopping or self._next() is not None)
            if self._stopping or (upload := self._next()) is None:
                return
            self._reading.add(upload.tenant)
            self._unread.take(upload)
            if upload.is_large:
                self.large.add(upload)
        is_ready = False
        try:
            is_ready = self._read(upload)
        finally:
            with self._wake:
                self._reading.discard(upload.tenant)
                (self.ready.append if is_ready else self._unread.appendleft)(upload)
                self._wake.notify_all()

    def _next(self) -> Upload | None:
        """The next file to read that need not wait for another one."""
        return next(filter(self._may_be_read, self._unread.heads()), None)

    def _may_be_read(self, upload: Upload) -> bool:
        ahead = self.ready.of(upload.tenant)
        if upload.tenant in self._reading or len(ahead) >= _MAX_AHEAD:
            return False
        if sum(each.num_chars for each in ahead) >= _PART_BYTES:
            return False
        return not upload.is_large or upload in self.large or len(self.large) < _MAX_LARGE

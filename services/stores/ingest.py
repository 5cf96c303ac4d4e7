"""One worker that changes the index: files in, files out. Queries see the generation before, or the one after.

Deletions come first. Files that wait are read one by one and committed together; what is wrong with one is that one's failure.
What an index of before held, and this one does not, is read again; text that was deleted leaves the disk some time later.
States: started -> stopped. What waits then is gone on with by the next process (`Records.unfinished`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from ragspec.core import Document
from ragspec.errors import IndexBusy, InputError, Overloaded, RagspecError, SaveError
from ragspec.retrieval.encoder import TextEncoder
from ragspec.retrieval.generation import GRACE_S
from ragspec.retrieval.writer import IndexWriter
from services.stores.parsing import ParseLimits, Unsupported, origin_of, parsed
from services.stores.records import FileRecord, Member, Records

log = logging.getLogger(__name__)

Forget = Callable[[str, Sequence[str]], None]
"""Called with a tenant and the ids of its documents that are gone."""

_BATCH = 16
_TRIES, _TRY_AGAIN_S = 20, 0.5
"""Another process may write the index at the moment."""
_OWED_S = 60.0
"""After so long a deletion is tried again that failed where nobody waits for it."""
_TIDY_S, _FIRST_TIDY_S = 600.0, 5.0
"""From a deletion until its text is taken out of the files, with all that is deleted meanwhile; and from the start until both are
compared."""


@dataclass(slots=True)
class _Deletion:
    members: Sequence[Member]
    done: Future[None] = field(default_factory=Future)


class Ingest:
    """Owns the thread and what waits for it. `forget` clears the caches of what was deleted or replaced."""

    def __init__(
        self,
        records: Records,
        index_dir: Path,
        encoder: TextEncoder,
        path_of: Callable[[FileRecord], Path],
        forget: Forget,
        *,
        max_waiting: int = 10_000,
        limits: ParseLimits | None = None,
    ) -> None:
        self._records, self._index_dir, self._encoder = records, index_dir, encoder
        self._path_of, self._forget = path_of, forget
        self._max_waiting, self._limits = max_waiting, limits or ParseLimits()
        self._wake = threading.Condition()
        self._members: deque[Member] = deque()
        self._deletions: deque[_Deletion] = deque()
        self._owed: list[Member] = []
        self._owed_s = 0.0  # when they are due; of time.monotonic
        self._tidy_s: float | None = None  # when the files are due; None: nothing is in them that was deleted
        self._is_known = False  # whether the index holds what the records say
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="ragspec-ingest", daemon=True)

    def start(self) -> None:
        """Go on with what an earlier process left."""
        for member in self._records.unfinished():
            if member.status == "deleting":
                self._owed.append(member)
            else:
                self._members.append(member)
        self._tidy_s = time.monotonic() + _FIRST_TIDY_S
        self._thread.start()

    def check_room(self) -> None:
        """Raises: Overloaded if too much waits already."""
        if len(self._members) >= self._max_waiting:
            raise Overloaded(f"{len(self._members)} files wait to be read already")

    def add(self, member: Member) -> None:
        with self._wake:
            self._members.append(member)
            self._wake.notify()

    def delete(self, members: Sequence[Member]) -> None:
        """Take their documents out of the index, and wait: the next query finds nothing of them.

        Raises: SaveError if that failed; then they are all still there.
        """
        if not members:
            return
        self._records.set_status(members, "deleting")
        deletion = _Deletion(members)
        with self._wake:
            if self._stopping:
                raise SaveError("the service is stopping; what was to be deleted will be when it starts again")
            self._deletions.append(deletion)
            self._wake.notify()
        deletion.done.result()

    def stop(self) -> None:
        """After the change that is being made."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()
        for deletion in self._deletions:
            deletion.done.set_exception(SaveError("the service is stopping"))

    def _run(self) -> None:
        while True:
            with self._wake:
                due_s = [self._owed_s] if self._owed else []
                due_s += [] if self._tidy_s is None else [self._tidy_s]
                wait_s = max(0.0, min(due_s) - time.monotonic()) if due_s else None
                self._wake.wait_for(lambda: self._stopping or self._deletions or self._members, wait_s)
                if self._stopping:
                    return
                deletions = [self._deletions.popleft() for _ in range(len(self._deletions))]
                waiting = 0 if deletions else min(_BATCH, len(self._members))
                members = [self._members.popleft() for _ in range(waiting)]
            try:
                self._pay()
                for deletion in deletions:
                    self._take_out(deletion)
                if members:
                    self._take_in(members)
                self._tidy()
            except Exception:
                log.exception("a change of the index failed; others go on")

    def _pay(self) -> None:
        """What an earlier process was asked to delete. Nobody waits for it: it is tried until it is done."""
        if not self._owed or time.monotonic() < self._owed_s:
            return
        try:
            self._drop(self._owed)
        except Exception as cause:
            log.warning("%d deletions are still owed: %s", len(self._owed), type(cause).__name__)
            self._owed_s = time.monotonic() + _OWED_S
        else:
            self._owed = []

    def _tidy(self) -> None:
        """Compare the index with the records, once; take deleted text out of its files, and then the files that still hold it."""
        if self._tidy_s is None or time.monotonic() < self._tidy_s:
            return
        self._tidy_s = None
        completed = [] if self._is_known else self._records.completed()
        try:
            with self._writer() as writer:
                there = {(owner, origin) for _, owner, origin in writer.origins()}
                before = writer.commit()
                changed = writer.scrub() != before
        except Exception as cause:
            log.warning("the index could not be tidied: %s", type(cause).__name__)
            if completed or self._is_known:  # else there is perhaps nothing that may be written
                self._tidy_s = time.monotonic() + _TIDY_S
            return
        if changed:  # its next writer removes what readers may be opening now
            self._tidy_s = time.monotonic() + GRACE_S + 1.0
        lost = [member for member in completed if (member.tenant, origin_of(member)) not in there]
        self._is_known = True
        if lost:
            log.warning("%d files are not in this index and are read again", len(lost))
            self._records.set_status(lost, "in_progress")
            with self._wake:
                self._members.extend(lost)

    def _drop(self, members: Sequence[Member]) -> None:
        self._change(members, [])
        self._records.drop_members(members)

    def _take_out(self, deletion: _Deletion) -> None:
        members = deletion.members
        try:
            self._drop(members)
        except Exception as cause:
            try:
                self._put_back(members)
            finally:
                deletion.done.set_exception(cause if isinstance(cause, RagspecError) else SaveError(str(cause)))
        else:
            deletion.done.set_result(None)

    def _put_back(self, members: Sequence[Member]) -> None:
        """They could not be deleted: they are what they were."""
        for member in members:
            self._records.set_status([member], member.status)
            if member.status == "in_progress":
                self.add(member)

    def _take_in(self, members: Sequence[Member]) -> None:
        read: list[tuple[Member, list[Document]]] = []
        for number, member in enumerate(members):
            if number and (self._stopping or self._deletions):  # reading one file may take minutes
                with self._wake:
                    self._members.extendleft(reversed(members[number:]))
                break
            if (documents := self._read(member)) is not None:
                read.append((member, documents))
        try:
            self._change([member for member, _ in read], [each for _, documents in read for each in documents])
        except IndexBusy:  # a large index is being built, say
            with self._wake:
                self._members.extendleft(member for member, _ in reversed(read))
        except InputError as cause:
            self._one_by_one(read, cause)
        except Exception as cause:
            log.warning("%d files could not be indexed: %s", len(read), type(cause).__name__)
            for member, _ in read:
                self._records.end(member, "failed", "server_error", "the index could not be written")
        else:
            for member, documents in read:
                self._end(member, documents)

    def _one_by_one(self, read: Sequence[tuple[Member, list[Document]]], cause: InputError) -> None:
        """One of several cannot be indexed: the others can."""
        if len(read) == 1:
            self._records.end(read[0][0], "failed", "invalid_file", str(cause))
            return
        for pair in read:
            try:
                self._change([pair[0]], pair[1])
            except InputError as own:
                self._records.end(pair[0], "failed", "invalid_file", str(own))
            else:
                self._end(*pair)

    def _read(self, member: Member) -> list[Document] | None:
        """None: it is not wanted any more, or cannot be read, which is noted."""
        if self._records.status(member.key) != "in_progress":
            return None
        try:
            file = self._records.file(member.tenant, member.file)
            documents = list(parsed(self._path_of(file), file, member, self._limits))
            if not documents:
                raise InputError("it holds no text")
        except Unsupported as cause:
            self._records.end(member, "failed", "unsupported_file", str(cause))
        except InputError as cause:
            self._records.end(member, "failed", "invalid_file", str(cause))
        except Exception as cause:
            log.warning("a file could not be read: %s", type(cause).__name__)
            self._records.end(member, "failed", "server_error", "the file could not be read")
        else:
            return documents
        return None

    def _end(self, member: Member, documents: Sequence[Document]) -> None:
        self._records.end(member, "completed", num_bytes=sum(len(each.text.encode()) for each in documents))

    def _change(self, members: Sequence[Member], documents: Sequence[Document]) -> None:
        """What the index has of these members is replaced by these documents, in one commit. Raises: SaveError, InputError."""
        origins = {(member.tenant, origin_of(member)) for member in members}
        with self._writer() as writer:
            old = [name for name, owner, origin in writer.origins() if (owner, origin) in origins]
            new = {document.id for document in documents}
            for document in documents:
                writer.upsert(document)
            for name in old:
                if name not in new:
                    writer.delete(name)
            writer.commit()
        if old and self._tidy_s is None:
            self._tidy_s = time.monotonic() + _TIDY_S
        gone: dict[str, list[str]] = {}
        owners = {origin_of(member): member.tenant for member in members}
        for name in old:
            gone.setdefault(owners[":".join(name.split(":")[:2])], []).append(name)
        for tenant, names in gone.items():
            self._forget(tenant, names)

    @contextlib.contextmanager
    def _writer(self) -> Iterator[IndexWriter]:
        """Waits a while for another process that writes. Raises: IndexBusy, SaveError."""
        with contextlib.ExitStack() as stack:
            for attempt in range(_TRIES):
                try:
                    writer = stack.enter_context(IndexWriter(self._index_dir, self._encoder))
                    break
                except IndexBusy:
                    if attempt == _TRIES - 1 or self._stopping:
                        raise
                    time.sleep(_TRY_AGAIN_S)
            yield writer

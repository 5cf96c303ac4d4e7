"""One worker that changes the index: files in, files out. Queries see the generation before, or the one after.

Deletions come first. Files that wait are read one by one and committed together; what is wrong with one is that one's failure.
An index built anew has none of those that were read: they are read again.
States: started -> stopped. What waits then is gone on with by the next process (`Records.unfinished`).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from ragspec.core import Document
from ragspec.errors import IndexBusy, InputError, Overloaded, RagspecError, RetrievalError, SaveError
from ragspec.retrieval.encoder import TextEncoder
from services.stores.members_index import Forget, MembersIndex
from services.stores.parsing import ParseLimits, Unsupported, parsed
from services.stores.records import FileRecord, Member, Records
from services.stores.tidying import Tidying

log = logging.getLogger(__name__)

_BATCH = 16
_OWED_S = 60.0
"""After so long a deletion is tried again that failed where nobody waits for it."""
_DELETED_S = 60.0
"""So long somebody waits for a deletion; it keeps its place all the same."""
_STOPPING = "the service is stopping: ask again when it is back"
_BUSY_S = 30.0
"""After so long files are read once more that came while another process was writing the index."""


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
        self._records, self._path_of = records, path_of
        self._index = MembersIndex(index_dir, encoder, forget)
        self._max_waiting, self._limits = max_waiting, limits or ParseLimits()
        self._wake = threading.Condition()
        self._members: deque[Member] = deque()
        self._deletions: deque[_Deletion] = deque()
        self._owed: list[Member] = []
        self._owed_s = 0.0  # when they are due; of time.monotonic
        self._members_s = 0.0  # likewise
        self._tidying = Tidying(index_dir, self._index.opened)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="ragspec-ingest", daemon=True)

    def start(self) -> None:
        """Go on with what an earlier process left. Raises: StoreError if the index is damaged."""
        self._records.begin_again(self._lost())
        for member in self._records.unfinished():
            if member.status == "deleting":
                self._owed.append(member)
            else:
                self._members.append(member)
        self._tidying.note()
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

        Raises: SaveError if that failed; then they are still there, but for those that somebody else wants deleted as well.
        Overloaded if it takes long, or the service stops: then they are taken out later.
        """
        if not members:
            return
        self._records.set_status(members, "deleting")
        deletion = _Deletion(members)
        with self._wake:
            if self._stopping:
                raise Overloaded(_STOPPING)
            self._deletions.append(deletion)
            self._wake.notify()
        try:
            deletion.done.result(_DELETED_S)
        except TimeoutError:
            raise Overloaded(
                "a large change of the index is under way, and the deletion waits for it: ask again"
            ) from None

    def stop(self) -> None:
        """After the change that is being made."""
        with self._wake:
            self._stopping = True
            self._index.hurry()
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()
        for deletion in self._deletions:
            deletion.done.set_exception(Overloaded(_STOPPING))

    def _run(self) -> None:
        while True:
            with self._wake:
                wait_s = max(0.0, due - time.monotonic()) if (due := self._due_s()) < math.inf else None
                self._wake.wait_for(
                    lambda: self._stopping or self._deletions or self._due_s() <= time.monotonic(), wait_s
                )
                if self._stopping:
                    return
                deletions = [self._deletions.popleft() for _ in range(len(self._deletions))]
                is_time = not deletions and self._members_s <= time.monotonic()
                members = [self._members.popleft() for _ in range(min(_BATCH, len(self._members)) if is_time else 0)]
            try:
                self._pay()
                for deletion in deletions:
                    self._take_out(deletion)
                if members:
                    self._take_in(members)
                self._tidying.run()
            except Exception:
                log.exception("a change of the index failed; others go on")

    def _due_s(self) -> float:
        """When there is something to do next, of time.monotonic."""
        times = [self._owed_s] if self._owed else []
        times += [self._members_s] if self._members else []
        times += [] if self._tidying.due_s is None else [self._tidying.due_s]
        return min(times, default=math.inf)

    def _lost(self) -> list[Member]:
        """All that was completed, if the index knows none of it: it was built anew. Of some, those taken out by hand stay out."""
        completed = self._records.completed()
        return completed if completed and not self._index.knows_any(completed) else []

    def _pay(self) -> None:
        """What an earlier process was asked to delete, or another is deleting: it is tried until it is done."""
        if not self._owed or time.monotonic() < self._owed_s:
            return
        self._owed = self._records.still_deleting(self._owed)
        if not self._owed:
            return
        try:
            self._drop(self._owed)
        except Exception as cause:
            log.warning("%d deletions are still owed: %s", len(self._owed), type(cause).__name__)
            self._owed_s = time.monotonic() + _OWED_S
        else:
            self._owed = []

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
        """They could not be deleted: they are what they were. Those that were to be deleted before that still are."""
        for member in members:
            self._records.set_status([member], member.status)
            if member.status == "in_progress":
                self.add(member)
            elif member.status == "deleting":
                self._owed.append(member)
                self._owed_s = time.monotonic() + _OWED_S

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
        except (IndexBusy, RetrievalError) as cause:
            self._wait_with([member for member, _ in reversed(read)], cause)
        except Exception as cause:
            self._one_by_one(read, cause)
        else:
            for member, documents in read:
                self._end(member, documents)

    def _one_by_one(self, read: Sequence[tuple[Member, list[Document]]], cause: Exception) -> None:
        """One of several cannot be indexed: the others perhaps can."""
        if len(read) == 1:
            self._fail(read[0][0], cause)
            return
        for member, documents in read:
            try:
                self._change([member], documents)
            except (IndexBusy, RetrievalError) as own:
                self._wait_with([member], own)
            except Exception as own:
                self._fail(member, own)
            else:
                self._end(member, documents)

    def _fail(self, member: Member, cause: Exception) -> None:
        if isinstance(cause, InputError):
            self._records.end(member, "failed", "invalid_file", str(cause))
        else:
            log.warning("a file could not be indexed: %s", type(cause).__name__)
            self._records.end(member, "failed", "server_error", "the index could not be written")

    def _wait_with(self, members: Iterable[Member], cause: Exception) -> None:
        """Another process writes, a large index perhaps, or the encoders are away: they come first when some time has passed."""
        log.warning("files wait: %s", type(cause).__name__)
        with self._wake:
            self._members.extendleft(members)
            self._members_s = time.monotonic() + _BUSY_S

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
        """As `MembersIndex.replace`, and what is no longer found leaves the disk later."""
        if self._index.replace(members, documents):
            self._tidying.note()

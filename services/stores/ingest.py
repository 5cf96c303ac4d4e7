"""The worker thread that changes the index: adds attached files and deletes detached ones.

Owns the thread and its queues; `IndexUpdater` commits. Deletions come first. Waiting files are parsed one by one and committed
together; an error of one file fails that file only. If the index was rebuilt without the files, they are added again.

States: started -> stopped. The next process goes on with unfinished members (`Records.unfinished`).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from ragspec.core import Document
from ragspec.errors import IndexBusy, InputError, Overloaded, RagspecError, RetrievalError, SaveError
from ragspec.retrieval.encoder import TextEncoder
from services.stores.index_updater import Forget, IndexUpdater
from services.stores.parsing import ParseLimits, UnsupportedFile, parsed
from services.stores.records import FileRecord, Records, StoreMember

log = logging.getLogger(__name__)

_BATCH_FILES = 16
_RETRY_DELETIONS_S = 60.0
_DELETE_TIMEOUT_S = 60.0
"""A caller waits this long for its deletion, which stays in the queue afterwards."""
_RETRY_FILES_S = 30.0
"""Pause after another process was writing the index, or the encoders were away."""
_STOPPING = "the service is stopping: ask again when it is back"


@dataclass(slots=True)
class _Deletion:
    members: Sequence[StoreMember]
    done: Future[None] = field(default_factory=Future)


class IngestWorker:
    """Safe to call from several threads. `forget` clears caches of deleted and replaced documents."""

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
        self._index = IndexUpdater(index_dir, encoder, forget)
        self._max_waiting, self._limits = max_waiting, limits or ParseLimits()
        self._wake = threading.Condition()
        self._members: deque[StoreMember] = deque()
        self._members_due_s = 0.0  # of time.monotonic
        self._deletions: deque[_Deletion] = deque()
        self._unfinished_deletions: list[StoreMember] = []
        self._deletions_due_s = 0.0  # of time.monotonic
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="ragspec-ingest", daemon=True)

    def start(self) -> None:
        """Goes on with an earlier process's unfinished members. Raises: StoreError if the index is damaged."""
        completed = self._records.completed()
        if completed and not self._index.has_any(completed):  # an index that has some of them was not rebuilt
            self._records.restart(completed)
        for member in self._records.unfinished():
            (self._unfinished_deletions if member.status == "deleting" else self._members).append(member)
        self._index.schedule_scrub()
        self._thread.start()

    def check_room(self) -> None:
        """Raises: Overloaded if the queue is full."""
        if len(self._members) >= self._max_waiting:
            raise Overloaded(f"{len(self._members)} files wait to be read already")

    def add(self, member: StoreMember) -> None:
        with self._wake:
            self._members.append(member)
            self._wake.notify()

    def delete(self, members: Sequence[StoreMember]) -> None:
        """Deletes the members' documents and waits: the next query finds none of them.

        Raises: SaveError if the deletion failed; members that no other caller deletes are restored. Overloaded after a timeout
        or when the service stops; the deletion then happens later.
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
            deletion.done.result(_DELETE_TIMEOUT_S)
        except TimeoutError:
            raise Overloaded(
                "a large change of the index is under way, and the deletion waits for it: ask again"
            ) from None

    def stop(self) -> None:
        """Returns after the current change."""
        with self._wake:
            self._stopping = True
            self._index.stop_waiting()
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
                is_due = not deletions and self._members_due_s <= time.monotonic()
                num_members = min(_BATCH_FILES, len(self._members)) if is_due else 0
                members = [self._members.popleft() for _ in range(num_members)]
            try:
                self._retry_deletions()
                for deletion in deletions:
                    self._delete(deletion)
                if members:
                    self._add(members)
                self._index.scrub_if_due()
            except Exception:
                log.exception("a change of the index failed; others go on")

    def _due_s(self) -> float:
        """Time of the next task, of time.monotonic."""
        times = [self._deletions_due_s] if self._unfinished_deletions else []
        times += [self._members_due_s] if self._members else []
        times += [] if self._index.scrub_due_s is None else [self._index.scrub_due_s]
        return min(times, default=math.inf)

    def _retry_deletions(self) -> None:
        """Retries deletions that an earlier process left or that failed, until they succeed."""
        if not self._unfinished_deletions or time.monotonic() < self._deletions_due_s:
            return
        self._unfinished_deletions = self._records.still_deleting(self._unfinished_deletions)
        try:
            self._drop(self._unfinished_deletions)
        except Exception as cause:
            log.warning("%d deletions still fail: %s", len(self._unfinished_deletions), type(cause).__name__)
            self._deletions_due_s = time.monotonic() + _RETRY_DELETIONS_S
        else:
            self._unfinished_deletions = []

    def _drop(self, members: Sequence[StoreMember]) -> None:
        if members:
            self._index.replace(members, [])
            self._records.drop_members(members)

    def _delete(self, deletion: _Deletion) -> None:
        try:
            self._drop(deletion.members)
        except Exception as cause:
            try:
                self._restore(deletion.members)
            finally:
                deletion.done.set_exception(cause if isinstance(cause, RagspecError) else SaveError(str(cause)))
        else:
            deletion.done.set_result(None)

    def _restore(self, members: Sequence[StoreMember]) -> None:
        """Gives members their status from before a failed deletion."""
        for member in members:
            self._records.set_status([member], member.status)
            if member.status == "in_progress":
                self.add(member)
            elif member.status == "deleting":  # by another caller, whose deletion also failed
                self._unfinished_deletions.append(member)
                self._deletions_due_s = time.monotonic() + _RETRY_DELETIONS_S

    def _add(self, members: Sequence[StoreMember]) -> None:
        read: list[tuple[StoreMember, list[Document]]] = []
        for number, member in enumerate(members):
            if number and (self._stopping or self._deletions):  # parsing one file may take minutes
                with self._wake:
                    self._members.extendleft(reversed(members[number:]))
                break
            if (documents := self._read(member)) is not None:
                read.append((member, documents))
        self._index_files(read)

    def _index_files(self, read: Sequence[tuple[StoreMember, list[Document]]]) -> None:
        """Commits files together; after an error, one by one, so that one file cannot fail the others."""
        try:
            if read:
                self._index.replace([member for member, _ in read], [each for _, texts in read for each in texts])
        except (IndexBusy, RetrievalError) as cause:  # another process writes, or the encoders are away
            log.warning("files wait: %s", type(cause).__name__)
            with self._wake:
                self._members.extendleft(member for member, _ in reversed(read))
                self._members_due_s = time.monotonic() + _RETRY_FILES_S
        except Exception as cause:
            if len(read) == 1:
                self._fail(read[0][0], cause, "the index could not be written")
                return
            for each in read:
                self._index_files([each])
        else:
            for member, documents in read:
                self._records.end(member, "completed", num_bytes=sum(len(each.text.encode()) for each in documents))

    def _read(self, member: StoreMember) -> list[Document] | None:
        """None if the member was deleted meanwhile or cannot be parsed."""
        if self._records.status(member.key) != "in_progress":
            return None
        try:
            file = self._records.file(member.tenant, member.file)
            documents = list(parsed(self._path_of(file), file, member, self._limits))
            if not documents:
                raise InputError("it holds no text")
        except Exception as cause:
            self._fail(member, cause, "the file could not be read")
            return None
        return documents

    def _fail(self, member: StoreMember, cause: Exception, message: str) -> None:
        """`message` is shown for errors that the file did not cause."""
        if isinstance(cause, InputError):
            code = "unsupported_file" if isinstance(cause, UnsupportedFile) else "invalid_file"
            self._records.end(member, "failed", code, str(cause))
        else:
            log.warning("%s: %s", message, type(cause).__name__)
            self._records.end(member, "failed", "server_error", message)

"""The worker thread that changes the index: adds attached files and deletes detached ones.

Owns the thread and its queues; `UploadQueue` reads files beside it, and `IndexUpdater` commits. Tenants take turns, and deletions
come first. Small files are committed together, large ones in parts. A part is encoded in slices, between which others have their
turn. An error of one file fails that file only. If the index was rebuilt without the files, they are added again.

States: started -> stopped. The next process goes on with unfinished members (`Records.unfinished`).
"""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from ragspec.errors import IndexBusy, InputError, Overloaded, RagspecError, RetrievalError, SaveError
from ragspec.numerics.threads import compute_threads, num_processors
from ragspec.retrieval.encoder import TextEncoder
from ragspec.retrieval.index.embedding import encode_missing
from ragspec.retrieval.reading.bounded_reader import ReadLimits
from ragspec.tenants import FairQueue
from services.stores.index_updater import Forget, IndexUpdater, PartsMissing
from services.stores.records import FileRecord, Records, StoreMember
from services.stores.uploads import UnsupportedFile, Upload, UploadQueue, yield_to_answers

log = logging.getLogger(__name__)

MAX_WAITING = 10_000
"""Files of all tenants that may wait."""
READ_LIMITS = ReadLimits()
_TURN_CHARS = 2**15
"""Encoded before the next tenant or a deletion has its turn: about fifty passages, a few seconds."""
_MAX_DELETIONS = 64
"""Deletions of one tenant that may wait."""
_RETRY_DELETIONS_S = 60.0
_DELETE_TIMEOUT_S = 60.0
"""A caller waits so long for its deletion, which stays in the queue afterwards."""
_RETRY_FILES_S = 30.0
_PASSING = (IndexBusy, RetrievalError)
"""Another process writes, or the encoders are away: files wait."""
_STOPPING = "the service is stopping: ask again when it is back"


@dataclass(slots=True)
class _Deletion:
    members: Sequence[StoreMember]
    done: Future[None] = field(default_factory=Future)


class IngestWorker:
    """Safe to call from several threads. `forget` clears caches of deleted and replaced documents.

    `wake` guards `deletions`, which wait, and is notified of each change. `unfinished_deletions` are tried again at
    `deletions_due_s`, and files are committed from `members_due_s` on; both times are of time.monotonic.
    """

    def __init__(
        self,
        records: Records,
        index_dir: Path,
        encoder: TextEncoder,
        path_of: Callable[[FileRecord], Path],
        forget: Forget,
    ) -> None:
        self._records, self._encoder, self._path_of = records, encoder, path_of
        self._index = IndexUpdater(index_dir, encoder, forget)
        self.wake = threading.Condition()
        self.uploads = UploadQueue(self._read, self.wake)
        self.members_due_s = 0.0
        self.deletions = FairQueue[_Deletion](lambda deletion: deletion.members[0].tenant)
        self.unfinished_deletions: list[StoreMember] = []
        self.deletions_due_s = 0.0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="ragspec-ingest", daemon=True)

    def start(self) -> None:
        """Goes on with an earlier process's unfinished members. Raises: StoreError if the index is damaged."""
        completed = self._records.completed()
        if completed and not self._index.has_any(completed):  # an index that has some of them was not rebuilt
            self._records.restart(completed)
        for member in self._records.unfinished():
            if member.status == "deleting":
                self.unfinished_deletions.append(member)
            else:
                self.uploads.append(Upload(member))
        self._index.schedule_scrub()
        self.uploads.start()
        self._thread.start()

    def check_room(self, num_files: int) -> None:
        """Raises: Overloaded if the queue has no room for so many files."""
        if len(self.uploads) + num_files > MAX_WAITING:
            raise Overloaded(f"{len(self.uploads)} files wait to be read already")

    def add(self, member: StoreMember) -> None:
        self.uploads.append(Upload(member))

    async def delete(self, members: Sequence[StoreMember]) -> None:
        """Deletes the members' documents and waits, without a thread: the next query finds none of them.

        Raises: SaveError if the deletion failed; members that no other caller deletes are restored. Overloaded after a timeout
        or when the service stops, and the deletion then happens later; or if too many of the tenant's deletions wait.
        """
        if not members:
            return
        deletion = _Deletion(members)
        await asyncio.to_thread(self._begin, deletion)
        done = asyncio.wrap_future(deletion.done)
        await asyncio.wait({done}, timeout=_DELETE_TIMEOUT_S)  # Why not wait_for: it would cancel the deletion
        if not done.done():
            # Why: an exception that is retrieved is not logged by asyncio
            done.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            raise Overloaded("a large change of the index is under way, and the deletion waits for it: ask again")
        done.result()

    def _begin(self, deletion: _Deletion) -> None:
        """Queues a deletion. Raises: Overloaded, SaveError."""
        with self.wake:
            if len(self.deletions.of(deletion.members[0].tenant)) >= _MAX_DELETIONS:
                raise Overloaded(f"{_MAX_DELETIONS} deletions wait already")
        self._records.set_status(deletion.members, "deleting")
        with self.wake:
            if self._stopping:
                raise Overloaded(_STOPPING)
            self.deletions.append(deletion)
            self.wake.notify_all()

    def stop(self) -> None:
        """Returns after the current change."""
        with self.wake:
            self._stopping = True
            self._index.stop_waiting()
            self.uploads.stop()
            self.wake.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        for deletion in self.deletions:
            deletion.done.set_exception(Overloaded(_STOPPING))
        self.uploads.join()

    def _run(self) -> None:
        yield_to_answers()
        compute_threads(num_processors())  # begins them before memory may run out
        while True:
            with self.wake:
                while not (self._stopping or self.deletions or (wait_s := self._due_s() - time.monotonic()) <= 0):
                    self.wake.wait(wait_s if wait_s < math.inf else None)
                if self._stopping:
                    return
                deletions = self.deletions.heads()
                for deletion in deletions:
                    self.deletions.take(deletion)
            try:
                for deletion in deletions:
                    self._delete(deletion)
                self._retry_deletions()
                if not deletions and self.members_due_s <= time.monotonic():
                    self._add()
                self._index.scrub_if_due()
            except Exception:
                log.exception("a change of the index failed; others go on")
                self.uploads.put_back_taken()
                self.members_due_s = time.monotonic() + _RETRY_FILES_S

    def _due_s(self) -> float:
        """Time of the next task, of time.monotonic."""
        times = [self.deletions_due_s] if self.unfinished_deletions else []
        times += [self.members_due_s] if self.uploads.ready else []
        times += [] if self._index.scrub_due_s is None else [self._index.scrub_due_s]
        return min(times, default=math.inf)

    def _retry_deletions(self) -> None:
        """Retries deletions that an earlier process left or that failed, until they succeed."""
        if not self.unfinished_deletions or time.monotonic() < self.deletions_due_s:
            return
        try:
            self.unfinished_deletions = self._records.still_deleting(self.unfinished_deletions)
            self._drop(self.unfinished_deletions)
        except Exception as cause:
            log.warning("%d deletions still fail: %s", len(self.unfinished_deletions), type(cause).__name__)
            self.deletions_due_s = time.monotonic() + _RETRY_DELETIONS_S
        else:
            self.unfinished_deletions = []

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
            except RagspecError:  # disk full: retry the delete later
                self._owe(deletion.members)
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
                self._owe([member])

    def _owe(self, members: Sequence[StoreMember]) -> None:
        self.unfinished_deletions += members
        self.deletions_due_s = time.monotonic() + _RETRY_DELETIONS_S

    def _read(self, upload: Upload) -> bool:
        """Parses a file, or reads the next part of a parsed one. Returns whether there is something to commit or to give up."""
        member = upload.member
        try:
            if not self._records.is_in_progress(member):
                upload.is_dropped = True
                return True
            if upload.lines is None:
                file = self._records.file(member.tenant, member.file)
                upload.parse(self._path_of(file), file, READ_LIMITS)
                return False
            upload.read_part()
            if not upload.part and not upload.committed:
                raise InputError("it holds no text")
            is_searched = upload.may_be_known and upload.num_chars > _TURN_CHARS
            upload.passages = self._index.chunked(upload.part, may_be_known=is_searched)
            if is_searched:
                upload.may_be_known = any(len(each.missing) < len(each.texts) for each in upload.passages)
        except Exception as cause:
            upload.error = cause
        return True

    def _add(self) -> None:
        """Commits some files of tenants in turn: of the small ones all, of a large one a part, or only encodes some of that."""
        read: list[Upload] = []
        for upload in self.uploads.take_ready(_TURN_CHARS):
            if upload.is_dropped or not self._records.is_in_progress(upload.member):
                self.uploads.close(upload)
            elif isinstance(upload.error, _PASSING):
                self._wait([upload], upload.error)
            elif upload.error is not None:
                self._fail(upload, upload.error, "the file could not be read")
            else:
                read.append(upload)
        self._index_files(read)

    def _index_files(self, read: Sequence[Upload]) -> None:
        """Commits files together; after an error, one by one, so that one file cannot fail the others.

        A large part is encoded first, in slices, and put back after each, so that deletions and other tenants have their turn.
        """
        passages = [document for upload in read for document in upload.passages]
        try:
            if sum(upload.num_missing_chars for upload in read) > _TURN_CHARS:
                encode_missing(self._encoder, passages, _TURN_CHARS)
                self.uploads.put_back(read)
                return
            if read:
                whole = [upload for upload in read if upload.is_whole]
                kept = {name for upload in whole for name in upload.committed}
                self._index.replace([upload.member for upload in whole], passages, kept)
        except _PASSING as cause:
            self._wait(read, cause)
        except PartsMissing:
            for upload in read:
                self.uploads.close(upload)
                self.add(upload.member)
        except Exception as cause:
            if len(read) == 1:
                self._fail(read[0], cause, "the index could not be written")
                return
            for upload in read:
                self._index_files([upload])
        else:
            for upload in read:
                upload.part_done()
                if upload.is_whole:
                    self.uploads.close(upload)
                    code, message = ("invalid_file", f"read in part: {upload.unread}") if upload.unread else ("", "")
                    self._end(upload.member, "completed", code, message, upload.num_bytes)
            self.uploads.put_back([upload for upload in read if not upload.is_whole])

    def _wait(self, uploads: Sequence[Upload], cause: Exception) -> None:
        log.warning("files wait: %s", type(cause).__name__)
        self.uploads.put_back(uploads)
        self.members_due_s = time.monotonic() + _RETRY_FILES_S

    def _fail(self, upload: Upload, cause: Exception, message: str) -> None:
        """Takes the committed parts out again. `message` is shown for errors that the file did not cause."""
        member = upload.member
        self.uploads.close(upload)
        if upload.committed:
            try:
                self._index.replace([member], [])
            except Exception:
                log.exception("parts of a file that failed are still in the index")
        if isinstance(cause, InputError):
            code = "unsupported_file" if isinstance(cause, UnsupportedFile) else "invalid_file"
            self._end(member, "failed", code, str(cause))
        else:
            log.warning("%s: %s", message, type(cause).__name__)
            self._end(member, "failed", "server_error", message)

    def _end(self, member: StoreMember, status: str, code: str = "", message: str = "", num_bytes: int = 0) -> None:
        """Records the outcome. On a disk too full for that, the file is read again later."""
        try:
            self._records.end(member, status, code, message, num_bytes=num_bytes)
        except RagspecError as cause:
            self._wait([Upload(member)], cause)

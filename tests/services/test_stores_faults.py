"""The library when things go wrong: processes that are killed, full disks, files that hang, writers in the way."""

import asyncio
import io
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from letter_encoder import LetterEncoder
from library_files import attached, attached_by, commits_paused, ended, failing, indexed, status_of
from stand_ins import until

from ragspec.config import RetrieverConfig
from ragspec.core import Document
from ragspec.errors import NoRoom, NotFound, Overloaded, RetrievalError, SaveError
from ragspec.retrieval.index import index_directory as generation
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.index.writer import IndexWriter
from ragspec.retrieval.reading import Unread
from ragspec.retrieval.reading.bounded_reader import ReadLimits
from ragspec.retrieval.retriever import Retriever, build_index
from ragspec.retrieval.search.segment_search import SearchScope
from services.settings import ServiceConfig
from services.stores import index_updater, ingest, records, uploads
from services.stores.index_updater import IndexUpdater
from services.stores.library import Library, library_folder, open_library
from services.stores.records import RECORD_BYTES, Records

OLD = Document("old", "The old mill grinds corn.")


@pytest.fixture
def index(tmp_path: Path) -> Path:
    build_index([OLD], tmp_path / "index", LetterEncoder())
    return tmp_path / "index"


Opened = Callable[[], Library]


@pytest.fixture(autouse=True)
def soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed changes are tried again soon."""
    monkeypatch.setattr(ingest, "_RETRY_DELETIONS_S", 0.3)
    monkeypatch.setattr(ingest, "_RETRY_FILES_S", 0.05)


@pytest.fixture
def opened(tmp_path: Path, index: Path) -> Iterator[Opened]:
    libraries: list[Library] = []

    def open_one() -> Library:
        libraries.append(Library(tmp_path / "data", index, LetterEncoder()))
        return libraries[-1]

    yield open_one
    for library in libraries:
        library.close()


def with_a_file(opened: Opened) -> tuple[Library, str, str]:
    """A service that has read one file, its store, and the file."""
    library = opened()
    return library, *indexed(library)


def found(index: Path, query: str = "zebra stripes corn") -> set[str]:
    encoder = LetterEncoder()
    retriever = Retriever(encoder, Store.open(index, encoder.identity), RetrieverConfig(mode="sparse"))
    return {passage.text for passage in retriever.retrieve([query], 100, SearchScope("ann")).passages[0]}


@contextmanager
def small_files(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond this: a disk that is full."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limit[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)


def test_bytes_that_no_file_names_are_gone_after_a_restart(opened: Opened) -> None:
    """A kill between the bytes and their record: what was never acknowledged, or was deleted, stayed for good."""
    library = opened()
    _, file = attached(library)
    acknowledged = library.blobs.path(library.records.file("ann", file))
    orphan, young = (acknowledged.with_name(f"file-{name}.txt") for name in ("orphan", "young"))
    for path in (orphan, young):
        path.write_text("A zebra.")
    for path in (orphan, acknowledged):
        os.utime(path, (0, 0))
    library.close()
    opened()
    assert acknowledged.exists() and young.exists() and not orphan.exists()


def test_a_deletion_that_is_owed_is_tried_until_it_is_done(
    index: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash it was found still; or one that failed after the restart was forgotten, and its file said to be completed."""
    library, store, file = with_a_file(opened)
    library.records.set_status([library.records.member("ann", store, file)], "deleting")
    library.close()
    monkeypatch.setattr(index_updater, "TRIES", 1)
    with IndexWriter(index, LetterEncoder()):
        again = opened()
        with pytest.raises(NotFound):
            again.records.member("ann", store, file)
        until(lambda: again.ingest.deletions_due_s > 0)  # it has tried
        assert status_of(again, "ann", store, file) == "deleting"
    until(lambda: not status_of(again, "ann", store, file))
    assert found(index) == {OLD.text}


def test_a_full_disk_fails_what_is_new_and_nothing_else(index: Path, opened: Opened) -> None:
    """The index was half written, the worker dead, or a deletion said to be done that was not."""
    library, store, file = with_a_file(opened)
    before = found(index)
    other = library.upload("ann", "other.txt", "assistants", io.BytesIO(b"Another zebra.")).id
    with small_files(0):
        with pytest.raises(SaveError):
            library.upload("ann", "late.txt", "assistants", io.BytesIO(b"Too late."))
        with pytest.raises(SaveError):
            library.attach("ann", store, other, {})
        with pytest.raises(SaveError):
            asyncio.run(library.detach("ann", store, file))
    assert found(index) == before and library.records.member("ann", store, file).status == "completed"
    assert {each.filename for each in library.records.files("ann")} == {"zebra.txt", "other.txt"}
    library.attach("ann", store, other, {})
    assert ended(library, store, other) == ("completed", "")
    assert found(index) == {*before, "Another zebra."}


def test_a_full_disk_forbids_no_deletion(index: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deletion writes a record and a commit: what would make room was refused because there was none."""
    library, _, file = with_a_file(opened)
    give_up, reserve = library.disk_reserve.give_up, library.disk_reserve.path
    assert reserve.stat().st_size >= 2**20
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)

    def freed() -> bool:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)  # with the reserve's room, files may grow again
        return give_up()

    monkeypatch.setattr(library.disk_reserve, "give_up", freed)
    with small_files(0):
        asyncio.run(library.delete_file("ann", file))
    assert found(index) == {OLD.text} and library.records.files("ann") == []
    assert reserve.stat().st_size >= 2**20


def test_an_index_that_cannot_be_written_fails_the_file_and_keeps_what_it_had(
    index: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that failed left files at in_progress, and a deletion without its documents or its error."""
    library, store, file = with_a_file(opened)
    before = found(index)

    failing(monkeypatch, IndexWriter, "commit", [SaveError("no space left on device")] * 2)
    failed = library.upload("ann", "other.txt", "assistants", io.BytesIO(b"Another zebra.")).id
    library.attach("ann", store, failed, {})
    assert ended(library, store, failed) == ("failed", "server_error")
    with pytest.raises(SaveError):
        asyncio.run(library.ingest.delete([library.records.member("ann", store, file)]))
    assert library.records.member("ann", store, file).status == "completed" and found(index) == before
    asyncio.run(library.detach("ann", store, file))
    assert found(index) == {OLD.text}


@pytest.mark.parametrize("is_written", [True, False])
def test_a_file_whose_end_cannot_be_recorded_is_read_again(
    index: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    """On a full disk neither the index nor "failed" is written: the file stood at in_progress until the next start."""
    errors = [SaveError("the disk is full")] * 2
    failing(monkeypatch, Records, "end", errors)
    if not is_written:
        failing(monkeypatch, IndexWriter, "commit", errors)
    with_a_file(opened)
    assert not errors and found(index) == {OLD.text, "A zebra has stripes."}


def test_a_deletion_that_can_neither_be_done_nor_taken_back_is_owed(
    index: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills while a file is deleted, and the file stood at "deleting" until the next start."""
    library, store, file = with_a_file(opened)
    undone = [SaveError("the disk is full")]
    failing(monkeypatch, IndexWriter, "commit", [SaveError("the disk is full")])
    failing(monkeypatch, Records, "set_status", undone, when=lambda _, members, status: status != "deleting")
    with pytest.raises(SaveError):
        asyncio.run(library.ingest.delete([library.records.member("ann", store, file)]))
    assert not undone
    until(lambda: not status_of(library, "ann", store, file))
    assert found(index) == {OLD.text}


def test_the_room_of_a_tenant_is_bounded(opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tenant filled the disk of all."""
    monkeypatch.setattr(records, "MAX_BYTES_PER_TENANT", 100_000)
    library = opened()
    library.upload("ann", "a.txt", "assistants", io.BytesIO(b"a" * 60_000))
    room = 100_000 - 60_000 - 2 * RECORD_BYTES
    with pytest.raises(NoRoom, match=f"room for {room} bytes more"):
        library.upload("ann", "b.txt", "assistants", io.BytesIO(b"b" * 60_000))
    library.upload("bob", "b.txt", "assistants", io.BytesIO(b"b" * 60_000))
    library.upload("ann", "c.txt", "assistants", io.BytesIO(b"c" * room))
    sizes = sorted(path.stat().st_size for path in (tmp_path / "data" / "files").rglob("*.txt"))
    assert sizes == [room, 60_000, 60_000]
    assert not list((tmp_path / "data" / "files").rglob(".building-*"))


def test_what_has_no_bytes_takes_room_too(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty files, empty stores and their metadata cost nothing: one tenant fills the database of all."""
    monkeypatch.setattr(records, "MAX_BYTES_PER_TENANT", 20 * RECORD_BYTES)
    library = opened()
    metadata = {f"key {number}": "x" * 500 for number in range(16)}
    adding: list[Callable[[], object]] = [
        lambda: library.upload("ann", "a.txt", "assistants", io.BytesIO(b"")),
        lambda: library.create_store("ann"),
        lambda: library.create_store("ann", metadata=metadata),
    ]
    for add in adding:
        with pytest.raises(NoRoom):
            for _ in range(24):
                add()
        for store in library.records.stores("ann"):
            asyncio.run(library.delete_store("ann", store.id))
        for file in library.records.files("ann"):
            asyncio.run(library.delete_file("ann", file.id))
    assert library.records.used_bytes("ann") == 0
    store = library.create_store("ann").id
    with pytest.raises(NoRoom):
        for _ in range(24):
            file = library.upload("ann", "a.txt", "assistants", io.BytesIO(b"A zebra.")).id
            library.attach("ann", store, file, dict(metadata))
    assert library.create_store("bob", metadata=metadata)


class Slow(io.BytesIO):
    """A file whose bytes come when they may."""

    def __init__(self, content: bytes, may_come: threading.Event) -> None:
        super().__init__(content)
        self._may_come = may_come

    def read(self, size: int | None = -1) -> bytes:
        assert self._may_come.wait(30.0)
        return super().read(size)


def test_files_at_once_do_not_share_one_room(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of forty uploads finds room before any is written, and forty times the room is used."""
    monkeypatch.setattr(records, "MAX_BYTES_PER_TENANT", 100_000)
    library, may_come = opened(), threading.Event()
    with ThreadPoolExecutor(4) as pool:
        uploads = [
            pool.submit(library.upload, "ann", f"{n}.txt", "assistants", Slow(b"a" * 60_000, may_come))
            for n in range(4)
        ]
        until(lambda: sum(upload.done() for upload in uploads) == 3)
        may_come.set()
    assert sum(isinstance(upload.exception(), NoRoom) for upload in uploads) == 3
    assert len(library.records.files("ann")) == 1


@pytest.mark.parametrize(
    ("limits", "name", "text", "message"),
    [
        (ReadLimits(timeout_s=0.01), "zebra.html", "A zebra.", "longer than"),
        (ReadLimits(max_text_bytes=100), "zebra.txt", "A zebra has stripes. " * 100, "bytes of text"),
        (ReadLimits(max_text_bytes=100), "zebra.html", "A zebra has stripes. " * 100, "bytes of text"),
        (ReadLimits(max_documents=2), "rows.csv", "text\na\nb\nc\n", "more than 2 rows"),
    ],
)
def test_a_file_beyond_the_limits_of_parsing_fails_alone(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, limits: ReadLimits, name: str, text: str, message: str
) -> None:
    """A parser that never ends stopped all others; a small file was unpacked into more text or rows than the memory holds."""
    monkeypatch.setattr(ingest, "READ_LIMITS", limits)
    library = opened()
    store, file = attached(library, name, text)
    assert ended(library, store, file) == ("failed", "invalid_file")
    assert message in library.records.member("ann", store, file).message
    indexed(library, "rows.txt", "A zebra.")


def test_too_many_waiting_files_are_refused_at_once(
    index: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue without an end takes all memory, and promises what it cannot keep."""
    monkeypatch.setattr(ingest, "MAX_WAITING", 2)
    library = opened()
    with IndexWriter(index, LetterEncoder()):  # another writer: nothing moves on meanwhile
        store, file = attached(library)
        with pytest.raises(Overloaded):
            for _ in range(64):
                library.attach("ann", store, file, {})
    assert ended(library, store, file) == ("completed", "")


def on_disk(index: Path, text: str) -> bool:
    try:
        return any(text.encode() in path.read_bytes() for path in index.rglob("*") if path.is_file())
    except FileNotFoundError:  # the service is removing files at this moment
        return True


def test_deleted_text_leaves_the_disk(index: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was deleted could be read in the index's files for as long as nobody compacted it by hand."""
    monkeypatch.setattr(index_updater, "SCRUB_WAIT_S", 0.1)
    monkeypatch.setattr(index_updater, "GRACE_S", 0.2)
    monkeypatch.setattr(generation, "GRACE_S", 0.2)
    library, store, file = with_a_file(opened)
    indexed(library, "mill.txt", "A mill has sails.")
    asyncio.run(library.detach("ann", store, file))
    until(lambda: not on_disk(index, "zebra"))
    assert found(index, "mill sails corn") == {OLD.text, "A mill has sails."}


def test_files_that_are_not_in_the_index_are_read_again(tmp_path: Path, opened: Opened) -> None:
    """Another index, or one that was built anew: what had been uploaded was completed, and not found by anybody."""
    library = opened()
    pairs = [indexed(library, f"{number}.txt", f"Zebra number {number}.") for number in range(3)]
    library.close()
    shutil.rmtree(tmp_path / "index")
    build_index([OLD], tmp_path / "index", LetterEncoder())
    again = opened()
    until(lambda: len(found(tmp_path / "index", "zebra number")) == 3)
    assert {ended(again, *pair) for pair in pairs} == {("completed", "")}


def test_what_was_taken_out_of_the_index_by_hand_stays_out(index: Path, opened: Opened) -> None:
    """A restart brought back what an administrator had deleted with `ragspec index delete`."""
    library = opened()
    gone, _ = (indexed(library, f"{name}.txt", f"Zebra of {name}.") for name in ("ann", "bob"))
    library.close()
    with IndexWriter(index) as writer:
        (name,) = [name for name, _, origin in writer.origins() if origin.endswith(gone[1])]
        writer.delete(name)
        writer.commit()
    assert ended(opened(), *gone) == ("completed", "")
    time.sleep(0.3)
    assert found(index, "zebra") == {"Zebra of bob."}


def test_a_deletion_that_two_ask_for_is_not_forgotten(
    index: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both failed while another process wrote, and the file stood at "deleting" until the next start, still to be found."""
    monkeypatch.setattr(index_updater, "TRIES", 1)
    library, store, file = with_a_file(opened)
    deleting = replace(library.records.member("ann", store, file), status="deleting")
    library.records.set_status([deleting], "deleting")
    with IndexWriter(index, LetterEncoder()), pytest.raises(SaveError):
        asyncio.run(library.ingest.delete([deleting]))
    until(lambda: not status_of(library, "ann", store, file))
    assert found(index) == {OLD.text}


def test_a_long_build_of_the_index_fails_no_upload(
    index: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uploads failed for good, ten seconds after `ragspec index add` had begun with a large folder."""
    monkeypatch.setattr(index_updater, "TRIES", 1)
    library = opened()
    with IndexWriter(index, LetterEncoder()) as writer:
        store, file = attached(library)
        until(lambda: library.ingest.members_due_s > 0)  # it has tried
        assert library.records.member("ann", store, file).status == "in_progress"
        writer.upsert(Document("new", "New corn."))
        writer.commit()
    assert ended(library, store, file) == ("completed", "")
    assert found(index) == {OLD.text, "New corn.", "A zebra has stripes."}


def test_what_waits_for_a_service_that_stops_is_told(opened: Opened, index: Path) -> None:
    """A request to delete hung while the service was shutting down."""
    library, store, file = with_a_file(opened)
    with ThreadPoolExecutor(1) as thread, IndexWriter(index, LetterEncoder()):
        detached = thread.submit(lambda: asyncio.run(library.detach("ann", store, file)))
        time.sleep(0.2)
        library.ingest.stop()
        assert isinstance(detached.exception(), SaveError | Overloaded)
    assert status_of(library, "ann", store, file) in ("completed", "deleting")


@contextmanager
def held_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, list[str]]]:
    """Files named "slow" are read only after the block. Yields an event that the first read sets, and what was read."""
    begun, go_on, read = threading.Event(), threading.Event(), list[str]()
    write_documents = uploads.write_documents

    def held(path: Path, name: str, output: Path, limits: ReadLimits, unread: list[Unread]) -> None:
        if "slow" in name:
            begun.set()
            go_on.wait(90.0)
        write_documents(path, name, output, limits, unread)
        read.append(name)

    monkeypatch.setattr(uploads, "write_documents", held)
    try:
        yield begun, read
    finally:
        go_on.set()


def test_nothing_waits_for_a_slow_parse_of_another_tenant(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that commits also parsed: 34 bytes, and a deletion, waited for two minutes behind each file of others."""
    library, gone, _ = with_a_file(opened)
    (file,) = library.records.files("ann")
    with held_reads(monkeypatch) as (begun, read):
        slow = [attached_by("bob", library, f"slow {number}.txt", "A quagga.") for number in range(3)]
        assert begun.wait(90.0)
        indexed(library, "small.txt")
        asyncio.run(library.delete_file("ann", file.id))
        assert read == ["small.txt"] and library.records.members("ann", gone) == []
    assert [ended(library, *each, tenant="bob") for each in slow] == [("completed", "")] * 3


def test_what_was_put_in_anew_is_not_deleted_by_an_older_wish(
    index: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that started during a deletion carried it out a second time, on the file that its owner had attached again."""
    monkeypatch.setattr(index_updater, "TRIES", 1)
    first, store, file = with_a_file(opened)
    first.records.set_status([first.records.member("ann", store, file)], "deleting")
    with IndexWriter(index, LetterEncoder()):
        second = opened()
        until(lambda: second.ingest.deletions_due_s > 0)  # it has tried
    first.records.drop_members(second.ingest.unfinished_deletions)
    first.attach("ann", store, file, {})
    assert ended(first, store, file) == ("completed", "")
    until(lambda: not second.ingest.unfinished_deletions)
    assert ended(first, store, file) == ("completed", "") and "A zebra has stripes." in found(index)


def test_encoders_that_are_away_are_waited_for_and_one_bad_file_fails_alone(
    index: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of everybody that were read together failed for good with one of them, or while the encoders were away."""
    errors: list[Exception] = [RetrievalError("no encoder"), RuntimeError("together"), RuntimeError("alone")]
    library = opened()
    failing(monkeypatch, IndexUpdater, "replace", errors, when=lambda _, members, documents, *kept: bool(documents))
    with commits_paused(library):
        pairs = [attached(library, f"{number}.txt", f"Zebra number {number}.") for number in range(2)]
        until(lambda: len(library.ingest.uploads.ready) == 2)
    ends = [ended(library, *pair) for pair in pairs]
    assert not errors and sorted(ends) == [("completed", ""), ("failed", "server_error")]


def test_a_deletion_that_takes_long_is_answered_and_keeps_its_place(
    index: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every client that asked again left a thread behind that waited."""
    monkeypatch.setattr(ingest, "_DELETE_TIMEOUT_S", 0.1)
    library, store, file = with_a_file(opened)
    with IndexWriter(index, LetterEncoder()), pytest.raises(Overloaded, match="ask again"):
        asyncio.run(library.detach("ann", store, file))
    until(lambda: not status_of(library, "ann", store, file))
    assert found(index) == {OLD.text}


def test_each_index_has_files_of_its_own(index: Path, tmp_path: Path) -> None:
    """A file deleted while another index was served stayed in the first, could be listed no more, and was quoted."""
    other = tmp_path / "other" / "index"
    build_index([OLD], other, LetterEncoder())
    given = {"retriever": {"index_dir": str(index)}, "service": {"data_dir": str(tmp_path / "data")}}
    first = ServiceConfig.model_validate(given)
    given["retriever"]["index_dir"] = str(other)
    second = ServiceConfig.model_validate(given)
    with closing(open_library(first, LetterEncoder(), lambda *_: None)) as library:
        indexed(library)
    with closing(open_library(second, LetterEncoder(), lambda *_: None)) as library:
        assert library.records.files("ann") == [] and found(other) == {OLD.text}
    with closing(open_library(first, LetterEncoder(), lambda *_: None)) as library:
        (file,) = library.records.files("ann")
        asyncio.run(library.delete_file("ann", file.id))
    assert found(index) == {OLD.text}
    beside = first.service.model_copy(update={"data_dir": ""})
    assert library_folder(beside, index) == tmp_path / "index.library"
    assert library_folder(beside.model_copy(update={"library_dir": "there"}), index) == Path("there")


def rows(count: int, word: str = "zebra") -> str:
    return "text\n" + "".join(f"{word} {number}\n" for number in range(count))


def test_a_small_file_waits_for_a_part_of_another_tenant_s_large_one(
    index: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One queue and one commit a file: 34 bytes waited for minutes behind half a million rows, and behind as many files."""
    monkeypatch.setattr(uploads, "_PART_DOCUMENTS", 50)
    commits: list[set[str]] = []
    replace_ = IndexUpdater.replace

    def noting(self: IndexUpdater, members: Any, documents: Any, *kept: Any) -> None:
        replace_(self, members, documents, *kept)
        commits.append({each.document.owner for each in documents})

    monkeypatch.setattr(IndexUpdater, "replace", noting)
    library = opened()
    with commits_paused(library):
        large = attached_by("bob", library, "large.csv", rows(220))
        for number in range(20):
            attached_by("bob", library, f"{number}.txt", "A quagga.")
        small = attached_by("ann", library, "small.txt", "An okapi.")
        until(lambda: len(library.ingest.uploads.ready.heads()) == 2)
    assert ended(library, *small) == ("completed", "")
    assert sum("bob" in owners for owners in commits) <= 2
    assert ended(library, *large, tenant="bob") == ("completed", "")
    assert sum("bob" in owners for owners in commits) >= 5
    member = library.records.member("bob", *large)
    assert member.num_bytes == sum(len(f"zebra {number}") for number in range(220))
    fields = [each for live in Store.open(index).segments for each in live.fields("owner", "origin")]
    origins = [origin for owner, origin in fields if owner == "bob"]
    assert origins.count(f"{large[0]}:{large[1]}") == 220


def test_a_large_file_that_is_attached_anew_keeps_no_old_rows(
    index: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Committed in parts, each part deletes the rows of the one before, or the rows that the file has no more stay."""
    monkeypatch.setattr(uploads, "_PART_DOCUMENTS", 10)
    library = opened()
    store, file = indexed(library, "rows.csv", rows(25))
    library.blobs.path(library.records.file("ann", file)).write_text(rows(13, "gnu"))
    library.attach("ann", store, file, {"year": 1874})
    assert ended(library, store, file) == ("completed", "")
    texts = found(index, " ".join(f"{word} {number}" for word in ("gnu", "zebra") for number in range(25)))
    assert {text for text in texts if "corn" not in text} == {f"gnu {number}" for number in range(13)}


def test_a_file_that_fails_in_a_later_part_leaves_nothing_behind(
    index: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a file that is said to have failed is found by everybody who searches."""
    monkeypatch.setattr(uploads, "_PART_DOCUMENTS", 10)
    library = opened()
    failing(monkeypatch, IndexUpdater, "replace", [None, None, SaveError("no space left on device")])
    assert ended(library, *attached(library, "rows.csv", rows(25))) == ("failed", "server_error")
    until(lambda: found(index, " ".join(f"zebra {number}" for number in range(25))) <= {OLD.text})


async def test_deletions_that_wait_hold_no_thread_and_are_bounded(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """45 deletions behind a large file held all threads: the others could not even list their files."""
    monkeypatch.setattr(ingest, "_MAX_DELETIONS", 4)
    library, go_on = opened(), threading.Event()
    pairs = [attached(library, f"{number}.txt", f"Zebra {number}.") for number in range(16)]
    assert {ended(library, *pair) for pair in pairs} == {("completed", "")}
    others = indexed(library, "bob.txt", "A quagga.", "bob")
    replace_ = IndexUpdater.replace

    def late(self: IndexUpdater, *arguments: Any) -> None:
        assert go_on.wait(300.0)
        replace_(self, *arguments)

    monkeypatch.setattr(IndexUpdater, "replace", late)
    pool = ThreadPoolExecutor(2)
    asyncio.get_running_loop().set_default_executor(pool)
    deletions = [asyncio.create_task(library.detach("ann", *pair)) for pair in pairs]
    await asyncio.wait(deletions, return_when=asyncio.FIRST_COMPLETED)
    bob = asyncio.create_task(library.detach("bob", *others))
    while status_of(library, "bob", *others) != "deleting":
        await asyncio.sleep(0.01)
    assert await asyncio.to_thread(library.records.files, "bob"), "a thread is free"
    go_on.set()
    await bob
    ends = await asyncio.gather(*deletions, return_exceptions=True)
    refused = [end for end in ends if end is not None]
    assert 7 <= len(refused) <= 12, "some are taken from the queue before they are counted"
    assert all(isinstance(end, Overloaded) and "wait already" in str(end) for end in refused)

"""Large texts in the library: they are encoded in slices, between which others have their turn, and committed whole."""

import asyncio
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from letter_encoder import LetterEncoder
from library_files import attached, attached_by, commits_paused, ended, failing, indexed
from stand_ins import until

from ragspec.core import Document
from ragspec.errors import NotFound, SaveError, StoreCorrupt
from ragspec.retrieval.encoder import FloatArray, TextKind
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.index.writer import IndexWriter
from ragspec.retrieval.retriever import build_index
from services.stores import ingest, uploads
from services.stores.index_updater import IndexUpdater
from services.stores.library import Library
from services.stores.records import Records
from services.stores.uploads import UploadQueue

LARGE = " ".join(f"Quagga number {number} is gone." for number in range(4000))
"""More than three slices."""


ROOT = Path(__file__).parents[2]


class HeldEncoder(LetterEncoder):
    """The first slice of a text about quaggas waits for `go_on`, every later one for `finish`."""

    def __init__(self) -> None:
        self.begun, self.go_on, self.finish = threading.Event(), threading.Event(), threading.Event()
        self.num_chars: list[int] = []  # of each slice

    def encode(self, texts: Sequence[str], kind: TextKind = "document") -> FloatArray:
        if any("Quagga" in text for text in texts):
            self.num_chars.append(sum(map(len, texts)))
            self.begun.set()
            (self.finish if len(self.num_chars) > 1 else self.go_on).wait(90.0)
        return super().encode(texts, kind)


@pytest.fixture
def encoder() -> HeldEncoder:
    return HeldEncoder()


@pytest.fixture
def library(tmp_path: Path, encoder: HeldEncoder) -> Iterator[Library]:
    build_index([Document("old", "The old mill grinds corn.")], tmp_path / "index", LetterEncoder())
    with closing(Library(tmp_path / "data", tmp_path / "index", encoder)) as library:
        yield library
        encoder.go_on.set()
        encoder.finish.set()


def documents(tmp_path: Path, tenant: str) -> list[Document]:
    return [document for document in Store.open(tmp_path / "index").documents() if document.owner == tenant]


def test_others_have_their_turn_while_a_large_text_is_encoded(library: Library, encoder: HeldEncoder) -> None:
    """Ten megabytes are encoded for eight minutes: meanwhile no file of others was added, and deletions ended with an error."""
    gone = indexed(library, "gone.txt")
    large = attached_by("bob", library, "large.txt", LARGE)
    assert encoder.begun.wait(90.0)
    small = attached(library, "small.txt")
    until(lambda: library.ingest.uploads.ready)
    deletion = threading.Thread(target=lambda: asyncio.run(library.detach("ann", *gone)))
    deletion.start()
    until(lambda: library.ingest.deletions)
    encoder.go_on.set()
    deletion.join()
    assert ended(library, *small) == ("completed", "")
    with pytest.raises(NotFound):
        library.records.member("ann", *gone)
    assert library.records.member("bob", *large).status == "in_progress"
    encoder.finish.set()
    assert ended(library, *large, tenant="bob") == ("completed", "")


def test_a_large_text_that_is_deleted_is_not_encoded_to_its_end(
    tmp_path: Path, library: Library, encoder: HeldEncoder
) -> None:
    """Its own deletion, too, waited for minutes, and half a document may not stay behind."""
    large = attached_by("bob", library, "large.txt", LARGE)
    assert encoder.begun.wait(90.0)
    deletion = threading.Thread(target=lambda: asyncio.run(library.detach("bob", *large)))
    deletion.start()
    until(lambda: library.ingest.deletions)
    encoder.go_on.set()
    deletion.join()
    indexed(library)
    assert len(encoder.num_chars) == 1 and encoder.num_chars[0] < len(LARGE) / 2
    assert documents(tmp_path, "bob") == []
    with pytest.raises(NotFound):
        library.records.member("bob", *large)


def test_a_text_encoded_in_slices_is_indexed_as_one_encoded_at_once(
    tmp_path: Path, library: Library, encoder: HeldEncoder
) -> None:
    """Vectors of slices must belong to their passages; and a text that is known is not encoded again."""
    encoder.go_on.set()
    encoder.finish.set()
    store, file = indexed(library, "large.txt", LARGE, "bob")
    assert len(encoder.num_chars) >= 3
    (document,) = documents(tmp_path, "bob")
    assert document.text.strip() == LARGE
    build_index([document], tmp_path / "whole", LetterEncoder())
    (whole,) = Store.open(tmp_path / "whole").segments
    sliced = next(live for live in Store.open(tmp_path / "index").segments if document.id in live.segment.ids)
    assert np.array_equal(whole.segment.vectors, sliced.segment.vectors)
    assert np.array_equal(whole.segment.spans, sliced.segment.spans)
    encoder.num_chars.clear()
    library.attach("bob", store, file, {"year": 1883})
    assert ended(library, store, file, "bob") == ("completed", "")
    assert encoder.num_chars == [] and documents(tmp_path, "bob")[0].metadata["year"] == 1883


_KILLED = """
import io, os, signal, sys, threading
from pathlib import Path
from letter_encoder import LetterEncoder
from services.stores.library import Library

acknowledged = threading.Event()

class DeadlyEncoder(LetterEncoder):
    num_slices = 0

    def encode(self, texts, kind="document"):
        self.num_slices += 1
        if self.num_slices == 3:
            acknowledged.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(texts, kind)

folder = Path(sys.argv[1])
library = Library(folder / "data", folder / "index", DeadlyEncoder())
store = library.create_store("bob").id
for text in sys.stdin.buffer.read().split(b"|"):
    file = library.upload("bob", "text.txt", "assistants", io.BytesIO(text)).id
    library.attach("bob", store, file, {})
    print(store, file, flush=True)
acknowledged.set()
threading.Event().wait()
"""


@pytest.mark.slow
def test_a_process_killed_between_slices_leaves_no_half_text_and_loses_none(tmp_path: Path) -> None:
    """Half of a text was found after a kill; files that waited stood at in_progress for ever."""
    texts = [LARGE, *(f"Zebra number {number}." for number in range(4))]
    build_index([Document("old", "The old mill grinds corn.")], tmp_path / "index", LetterEncoder())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, "-c", _KILLED, str(tmp_path)]
    killed = subprocess.run(
        command, input="|".join(texts), stdout=subprocess.PIPE, text=True, env=environment, check=False
    )
    assert killed.returncode < 0
    assert not any("Quagga" in document.text for document in documents(tmp_path, "bob"))
    with closing(Library(tmp_path / "data", tmp_path / "index", LetterEncoder())) as library:
        for acknowledged in killed.stdout.splitlines():
            store, file = acknowledged.split()
            assert ended(library, store, file, "bob") == ("completed", "")
    assert sorted(document.text.strip() for document in documents(tmp_path, "bob")) == sorted(texts)


def test_a_commit_holds_a_bounded_amount_of_text(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a commit were counted, not their bytes: sixteen texts of ten megabytes became one commit."""
    commits: list[int] = []
    commit = IndexWriter.commit

    def noting(writer: IndexWriter) -> Any:
        before = writer.changes.added
        commits.append(before)
        return commit(writer)

    monkeypatch.setattr(IndexWriter, "commit", noting)
    text = " ".join(f"Zebra number {number} has stripes." for number in range(600))  # two are more than a slice
    with commits_paused(library):
        pairs = [attached(library, f"{number}.txt", text) for number in range(3)]
        pairs += [attached(library, f"small {number}.txt") for number in range(3)]
        until(lambda: len(library.ingest.uploads.ready) == 6)
    assert {ended(library, *pair) for pair in pairs} == {("completed", "")}
    assert ingest._TURN_CHARS / 2 < len(text) < ingest._TURN_CHARS and commits[:2] == [1, 1] and sum(commits) == 6


def test_parts_of_few_large_files_are_in_memory_at_once(
    tmp_path: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large texts of a hundred tenants, each encoded by slices in turn, would lie in the memory together for hours."""
    monkeypatch.setattr(uploads, "_LARGE_BYTES", 1000)
    monkeypatch.setattr(uploads, "_MAX_LARGE", 2)
    num_large: list[int] = []
    replace = IndexUpdater.replace

    def noting(self: IndexUpdater, *arguments: Any) -> None:
        num_large.append(len(library.ingest.uploads.large))
        replace(self, *arguments)

    monkeypatch.setattr(IndexUpdater, "replace", noting)
    texts = {f"tenant {number}": f"Zebra of {number}. " * 200 for number in range(6)}
    with commits_paused(library):
        pairs = {tenant: attached_by(tenant, library, "zebra.txt", text) for tenant, text in texts.items()}
        until(lambda: len(library.ingest.uploads.ready) == 2)
    for tenant, pair in pairs.items():
        assert ended(library, *pair, tenant=tenant) == ("completed", "")
        assert [document.text.strip() for document in documents(tmp_path, tenant)] == [texts[tenant].strip()]
    assert max(num_large) <= 2


def test_rows_do_not_wait_for_large_texts(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that are encoded for hours kept every file of more than a megabyte from being read."""
    monkeypatch.setattr(uploads, "_LARGE_BYTES", 1000)
    monkeypatch.setattr(uploads, "_MAX_LARGE", 1)
    with commits_paused(library):
        attached_by("bob", library, "large.txt", "Zebra. " * 500)
        until(lambda: len(library.ingest.uploads.ready) == 1)
        attached_by("cleo", library, "rows.csv", "text\n" + "A zebra.\n" * 500)
        until(lambda: len(library.ingest.uploads.ready) == 2)


def in_thread(prefix: str) -> bool:
    return threading.current_thread().name.startswith(prefix)


@pytest.mark.parametrize("name", ["is_in_progress", "end"])
def test_a_fault_of_the_records_keeps_no_file_from_the_index(
    library: Library, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """All files that were taken for the next commit were forgotten, and large ones kept their place for ever."""
    monkeypatch.setattr(ingest, "_RETRY_FILES_S", 0.01)
    faults = [StoreCorrupt("a bad page"), *([MemoryError()] if name == "is_in_progress" else [])]
    failing(monkeypatch, Records, name, faults, when=lambda *_, **__: in_thread("ragspec-ingest"))
    with commits_paused(library):
        pairs = [attached_by(tenant, library, "zebra.txt", "A zebra.") for tenant in ("ann", "bob")]
        until(lambda: len(library.ingest.uploads.ready) == 2)
    found = [ended(library, *pair, tenant=tenant) for tenant, pair in zip(("ann", "bob"), pairs, strict=True)]
    assert found == [("completed", "")] * 2 and not faults


def test_a_reader_outlives_an_error(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """After memory had run out in both readers, no file was read until the next start."""
    faults = [MemoryError()] * 6
    failing(monkeypatch, UploadQueue, "_next", faults, when=lambda *_: in_thread("ragspec-reader"))
    indexed(library)
    assert not faults


def test_a_file_of_which_committed_parts_are_gone_is_read_anew(
    tmp_path: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its deletion had failed after the index was changed: it was completed without its first rows."""
    monkeypatch.setattr(uploads, "_PART_DOCUMENTS", 10)
    failing(monkeypatch, Records, "drop_members", [SaveError("the database is locked")] * 2)  # it is tried twice
    rows, replace, num_parts = [f"Zebra {number}." for number in range(35)], IndexUpdater.replace, 0

    def pausing(self: IndexUpdater, *arguments: Any) -> None:
        nonlocal num_parts
        replace(self, *arguments)
        num_parts += 1
        if num_parts == 3:
            library.ingest.members_due_s = math.inf

    monkeypatch.setattr(IndexUpdater, "replace", pausing)
    pair = attached_by("bob", library, "rows.csv", "\n".join(["text", *rows]))
    until(lambda: num_parts == 3 and library.ingest.uploads.ready)
    with commits_paused(library), pytest.raises(SaveError):
        asyncio.run(library.detach("bob", *pair))
    assert ended(library, *pair, tenant="bob") == ("completed", "")
    assert sorted(document.text for document in documents(tmp_path, "bob")) == sorted(rows)

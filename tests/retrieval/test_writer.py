"""Documents in, replaced and out; only what is new is encoded."""

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from letter_encoder import LetterEncoder

from ragspec.config import ChunkingConfig, DenseConfig, IndexConfig
from ragspec.core import Document, Heading
from ragspec.errors import (
    ConfigError,
    EncoderMismatch,
    InputError,
    ModelError,
    RetrievalError,
    SaveError,
    StoreCorrupt,
    StoreMissing,
)
from ragspec.retrieval.encoder import FloatArray, TextKind
from ragspec.retrieval.index import generation_builder
from ragspec.retrieval.index import index_directory as generation
from ragspec.retrieval.index.index_directory import locked_generations, reader_lock
from ragspec.retrieval.index.manifest import Manifest, file_checksum
from ragspec.retrieval.index.segment_writer import ArrowFile
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.index.writer import IndexWriter, UpsertOutcome
from ragspec.retrieval.retriever import Retriever, build_index
from ragspec.retrieval_config import AnalyzerConfig

CONFIG = IndexConfig(chunking=ChunkingConfig(max_chars=40))
UMASK = os.umask(0)
os.umask(UMASK)


class Counting(LetterEncoder):
    """Remembers what it was asked to encode."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode(self, texts: Sequence[str], kind: TextKind = "document") -> FloatArray:
        self.texts += texts
        return super().encode(texts, kind)


@pytest.fixture
def counting() -> Counting:
    return Counting()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, documents: list[Document]) -> Path:
    folder = tmp_path_factory.mktemp("writer") / "index"
    build_index(documents, folder, LetterEncoder(), CONFIG)
    return folder


def ids(index_dir: Path) -> list[str]:
    return sorted(document.id for document in Store.open(index_dir).documents())


def test_of_a_changed_document_only_the_new_passages_are_encoded(
    index_dir: Path, counting: Counting, documents: list[Document]
) -> None:
    """One word changed in a book, and the whole book is encoded again; or its old passages stay."""
    changed = replace(documents[4], text="Über fact number 4. It is told in a new sentence.")
    moved = replace(documents[5], source="elsewhere.txt", metadata={"n": 50})
    with IndexWriter(index_dir, counting) as writer:
        assert [writer.upsert(changed), writer.upsert(moved)] == [UpsertOutcome.UPDATED] * 2
        writer.commit()
        assert (writer.changes.encoded, writer.changes.reused, writer.changes.updated) == (1, 3, 2)
    assert counting.texts == ["Title 4\nIt is told in a new sentence."]
    found = {document.id: document for document in Store.open(index_dir).documents()}
    assert found["d4"] == changed and found["d5"] == moved and len(found) == 20
    last = Store.open(index_dir).segments[-1].segment
    texts = [f"{last.passage(row).title}\n{last.passage(row).text}" for row in range(len(last.vectors))]
    assert np.array_equal(last.vectors, LetterEncoder().encode(texts))


def test_deletions_are_effective_at_the_next_query(index_dir: Path, counting: Counting) -> None:
    """A service that has to be started again before it forgets a document."""
    retriever = Retriever(counting, Store.open(index_dir))
    query = "Title 7\nÜber fact number 7."
    first = retriever.retrieve([query], 1)
    assert first.passages[0][0].document_id == "d7"
    with IndexWriter(index_dir) as writer:
        writer.delete("d7")
        assert retriever.retrieve([query], 1) == first  # not yet committed
        writer.commit()
    after = retriever.retrieve([query], 40)
    assert "d7" not in {passage.document_id for passage in after.passages[0]} and len(after.passages[0]) == 38
    assert after.generation != first.generation
    frozen = Retriever(counting, Store.open(index_dir), follow=False)
    with IndexWriter(index_dir) as writer:
        writer.delete("d8")
        writer.commit()
    assert frozen.retrieve([query], 40).generation == after.generation


def test_what_was_not_committed_never_was(index_dir: Path, counting: Counting) -> None:
    """Half of a session that failed in the middle."""
    before = {path: path.stat().st_mtime_ns for path in index_dir.rglob("*") if path.is_file() and path.name != ".lock"}
    with IndexWriter(index_dir, counting, passages_per_encode=1) as writer:
        writer.upsert(Document("new", "New."))
        writer.delete_source("7.txt")
    with pytest.raises(ZeroDivisionError), IndexWriter(index_dir, counting) as writer:
        writer.upsert(Document("new", "New."))
        raise ZeroDivisionError
    after = {path: path.stat().st_mtime_ns for path in index_dir.rglob("*") if path.is_file() and path.name != ".lock"}
    assert after == before


def test_after_a_failed_write_nothing_of_the_session_is_committed(
    index_dir: Path, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A document of which half was written when the disk was full, committed with the next one."""
    before = (index_dir / "CURRENT").read_text()
    with IndexWriter(index_dir, counting, passages_per_encode=1) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(ArrowFile, "append", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left")))
            with pytest.raises(SaveError, match="No space left"):
                writer.upsert(Document("new", "New."))
        with pytest.raises(SaveError, match="begin again"):
            writer.upsert(Document("other", "Other."))
        with pytest.raises(SaveError, match="begin again"):
            writer.commit()
    assert (index_dir / "CURRENT").read_text() == before


def test_duplicates_are_found_within_one_owner(tmp_path: Path, counting: Counting) -> None:
    """The same page under two names takes two of three places in every answer; the copy of another tenant is no duplicate."""
    with IndexWriter(tmp_path / "index", counting, keep_duplicates=False) as writer:
        assert writer.upsert(Document("a", "Same.")) is UpsertOutcome.ADDED
        assert writer.upsert(Document("b", "Same.")) is UpsertOutcome.DUPLICATE
        assert writer.upsert(Document("a", "Same.", title="New title")) is UpsertOutcome.UPDATED
        on_sunday = Document("m", "Same.", metadata={"day": "sun"})  # filters tell them apart
        assert writer.upsert(on_sunday) is UpsertOutcome.ADDED
        assert writer.upsert(Document("c", "Same.", owner="carol")) is UpsertOutcome.ADDED
        writer.commit()
        assert writer.upsert(Document("b", "Same.")) is UpsertOutcome.DUPLICATE
        assert writer.duplicate_of(Document("b", "Same.")) == "a"
        writer.delete("a")
        assert writer.upsert(Document("b", "Same.")) is UpsertOutcome.ADDED
        assert writer.upsert(Document("d", "Other.")) is UpsertOutcome.ADDED
        assert writer.upsert(Document("d", "Same.")) is UpsertOutcome.DUPLICATE  # and the older text of d is gone
        writer.commit()
    assert ids(tmp_path / "index") == ["b", "c", "m"]
    with IndexWriter(tmp_path / "index", counting, keep_duplicates=False) as writer:
        assert writer.upsert(Document("e", "Same.")) is UpsertOutcome.DUPLICATE
    with IndexWriter(tmp_path / "index", counting) as writer:
        assert writer.upsert(Document("e", "Same.")) is UpsertOutcome.ADDED


def test_compaction_drops_what_was_deleted_and_changes_no_answer(
    index_dir: Path, counting: Counting, documents: list[Document]
) -> None:
    """Scores that move when an index is tidied up."""
    with IndexWriter(index_dir, counting) as writer:
        for number in range(5):
            writer.upsert(Document(f"new{number}", f"Über new fact {number}. It is told."))
            writer.delete(f"d{number}")
            writer.commit()
    retriever = Retriever(counting, Store.open(index_dir))
    queries = ["fact number 12", "new fact", "told in two sentences"]
    before = retriever.retrieve(queries, 45)
    key = Store.open(index_dir).manifest.content_key
    counting.texts.clear()
    with IndexWriter(index_dir) as writer:
        manifest = writer.compact()
        assert writer.compact() == manifest
    assert [(s.num_deleted, s.num_documents) for s in manifest.segments] == [(0, 20)]
    after = retriever.retrieve(queries, 45)
    assert after.passages == before.passages and after.generation == manifest.generation_id
    assert manifest.content_key == key and counting.texts == queries


def one_by_one(writer: IndexWriter, count: int) -> Iterator[Manifest]:
    """A commit for each of so many documents."""
    for number in range(count):
        writer.upsert(Document(str(number), f"Text {number}."))
        yield writer.commit()


def test_segments_stay_few_and_none_grows_without_bound(
    tmp_path: Path, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search that looks into a thousand segments, one for each document that was ever added."""
    monkeypatch.setattr(generation_builder, "MAX_SEGMENTS", 4)
    monkeypatch.setattr(generation_builder, "MAX_SEGMENT_PASSAGES", 12)
    with IndexWriter(tmp_path / "index", counting, passages_per_encode=1) as writer:
        for number, manifest in enumerate(one_by_one(writer, 16)):
            assert len(manifest.segments) <= 5 and max(s.num_passages for s in manifest.segments) <= 12
            assert manifest.num_documents == number + 1
    assert ids(tmp_path / "index") == sorted(map(str, range(16)))
    manifest = build_index((Document(str(n), f"Text {n}.") for n in range(30)), tmp_path / "big", counting)
    with IndexWriter(tmp_path / "big") as writer:
        assert [s.num_passages for s in writer.compact().segments] == [12, 12, 6]


def test_an_index_keeps_the_settings_it_was_built_with(index_dir: Path, counting: Counting) -> None:
    """Passages of two lengths, words of two languages or vectors of two models in one index."""
    for config in (IndexConfig(), CONFIG.model_copy(update={"words": AnalyzerConfig(language="german")})):
        with pytest.raises(ConfigError, match="built in another way"), IndexWriter(index_dir, counting, config):
            pass
    other = LetterEncoder()
    other.identity = replace(LetterEncoder.identity, fingerprint="0" * 64)
    with pytest.raises(EncoderMismatch), IndexWriter(index_dir, other):
        pass
    with IndexWriter(index_dir, counting) as writer:
        writer.upsert(Document("new", "One sentence is here. Another sentence is here."))
        writer.commit()
    assert Store.open(index_dir).manifest.config == CONFIG
    build_index([Document("only", "Text.")], index_dir, counting, IndexConfig())
    assert Store.open(index_dir).manifest.config == IndexConfig() and ids(index_dir) == ["only"]


def test_without_an_encoder_no_document_is_added(index_dir: Path) -> None:
    """Deleting a document must not load a model; adding one must not go without."""
    with pytest.raises(InputError, match="encoder"), IndexWriter(index_dir) as writer:
        writer.upsert(Document("new", "Text."))


def test_an_id_belongs_to_its_owner(index_dir: Path, counting: Counting, documents: list[Document]) -> None:
    """One tenant's upload that silently replaces another's document of the same name."""
    with IndexWriter(index_dir, counting) as writer:
        with pytest.raises(InputError, match="another owner"):
            writer.upsert(replace(documents[1], owner="bob"))
        writer.upsert(Document("mine", "Text.", owner="ann"))
        with pytest.raises(InputError, match="another owner"):
            writer.upsert(Document("mine", "Text.", owner="bob"))
        assert writer.owner_and_origin("mine") == ("ann", "") and writer.owner_and_origin("none") is None
        writer.delete("mine")
        assert writer.upsert(Document("mine", "Text.", owner="bob")) is UpsertOutcome.ADDED
        writer.commit()
    build_index([replace(document, owner="bob") for document in documents], index_dir, counting, CONFIG)
    assert {document.owner for document in Store.open(index_dir).documents()} == {"bob"}


def test_a_failed_upsert_leaves_the_older_version(
    index_dir: Path, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old text removed, the new one refused."""
    monkeypatch.setattr(Counting, "count_tokens", lambda *_: (_ for _ in ()).throw(ValueError("no tokens")))
    with IndexWriter(index_dir, counting) as writer:
        with pytest.raises(ValueError, match="no tokens"):
            writer.upsert(Document("d1", "word " * 400))
        writer.commit()
    assert "d1" in ids(index_dir)


def test_a_session_that_has_ended_changes_nothing(index_dir: Path, counting: Counting) -> None:
    """Changes without the lock."""
    with IndexWriter(index_dir, counting) as writer:
        pass
    for late in (writer.commit, lambda: writer.delete("d1"), lambda: writer.upsert(Document("x", "X."))):
        with pytest.raises(SaveError, match="has ended"):
            late()


def test_deleted_text_leaves_the_disk(index_dir: Path, counting: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deleted secret that anybody finds with grep: until the next change but one, or for ever."""

    def on_disk() -> bool:
        return any(b"secret" in path.read_bytes() for path in index_dir.rglob("documents.arrow"))

    def forget(**options: bool) -> None:
        with IndexWriter(index_dir, counting) as writer:
            writer.upsert(Document("s", "A secret."))
            writer.commit()
        with IndexWriter(index_dir) as writer:
            writer.delete("s")
            writer.commit()
            assert on_disk()
            if options:
                writer.purge()

    forget(purge=True)
    assert not on_disk()
    forget()
    assert on_disk()  # for readers that have just read CURRENT
    monkeypatch.setattr(generation, "GRACE_S", 0.0)
    with pytest.raises(StoreMissing), IndexWriter(index_dir.with_name("other")):
        pass
    with IndexWriter(index_dir):
        pass
    assert not on_disk()


def test_a_generation_on_lease_stays(index_dir: Path, counting: Counting) -> None:
    """A job of hours whose index is gone after the second change of others; or a dead job that keeps it for ever."""
    with reader_lock(index_dir) as pointer:
        for number in range(4):
            with IndexWriter(index_dir, counting) as writer:
                writer.upsert(Document("d1", f"Version {number}."))
                writer.compact()
                writer.purge()
        store = Store.open(index_dir, pointer=pointer)
        assert {document.id: document.text for document in store.documents()}["d1"].startswith("Über fact number 1.")
        retriever = Retriever(counting, store, follow=False)
        assert retriever.retrieve(["fact"], 3).generation == store.generation
    assert not list(index_dir.glob(".lease-*"))
    (index_dir / ".lease-dead").write_text(pointer)
    with IndexWriter(index_dir) as writer:
        writer.purge()
    assert not (index_dir / ".lease-dead").exists()
    with pytest.raises(StoreCorrupt):
        Store.open(index_dir, pointer=pointer)


def test_a_lease_is_held_though_a_clean_up_comes_between(index_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer's clean-up removed the lock file while it was being made, and the job went on without a lock."""
    rename, lost = Path.rename, list[Path]()

    def losing(path: Path, target: Path) -> Path:
        if not lost:
            lost.append(path)
            path.unlink()
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", losing)
    with reader_lock(index_dir) as pointer:
        assert lost and list(locked_generations(index_dir)) == [pointer]
    assert not list(index_dir.glob(".lease-*"))


@pytest.mark.parametrize("kind", ["exact", "hnsw"])
def test_scrubbing_takes_one_segment_at_a_time_and_changes_no_answer(
    index_dir: Path, counting: Counting, kind: Any
) -> None:
    """One deletion held up everybody until a whole index was written anew; approximate search answered otherwise after it."""
    with IndexWriter(index_dir, counting) as writer:
        for number in range(3):
            for each in range(4):
                writer.upsert(Document(f"new{number}{each}", f"Über new fact {number} {each}."))
            writer.commit()
        writer.compact(DenseConfig(kind=kind)) if kind != "exact" else None
        for number in range(0, 3, 2):
            writer.delete(f"new{number}1")
        writer.commit()
    retriever = Retriever(counting, Store.open(index_dir))
    before = retriever.retrieve(["new fact 2 1"], 30).passages
    rounds, dead = 0, []
    while True:
        with IndexWriter(index_dir) as writer:
            is_clean = writer.scrub()
        rounds += 1
        dead.append(sum(s.num_deleted for s in Store.open(index_dir).manifest.segments))
        if is_clean:
            break
    assert (rounds, dead) == ((2, [1, 0]) if kind == "exact" else (1, [2]))
    assert retriever.retrieve(["new fact 2 1"], 30).passages == before


def test_originals_of_a_killed_session_leave_with_the_next_compaction(index_dir: Path, counting: Counting) -> None:
    """Copies that no document names stayed on the disk for ever."""
    file = index_dir.with_name("a.txt")
    file.write_text("Text.")
    digest = file_checksum(file).sha256
    if (child := os.fork()) == 0:
        with IndexWriter(index_dir, counting) as writer:
            writer.keep_original(file, digest)
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert [path.name for path in (index_dir / generation.ORIGINALS).iterdir()] == [digest]
    with IndexWriter(index_dir) as writer:
        writer.compact()
    assert not list((index_dir / generation.ORIGINALS).iterdir())


def test_a_folder_that_is_no_index_keeps_its_files(tmp_path: Path, counting: Counting) -> None:
    """A mistyped folder, or an index whose CURRENT was not copied yet, emptied by the clean-up."""
    (tmp_path / "segment-000001").mkdir()
    (tmp_path / "segment-000001" / "thesis.txt").write_text("mine")
    for encoder in (None, counting):
        with (
            pytest.raises(StoreMissing) if encoder is None else contextlib.nullcontext(),
            IndexWriter(tmp_path, encoder),
        ):
            pass
    assert (tmp_path / "segment-000001" / "thesis.txt").read_text() == "mine"
    with pytest.raises(StoreMissing), IndexWriter(tmp_path / "typo"):
        pass
    assert not (tmp_path / "typo").exists()


def test_others_may_read_what_the_umask_lets_them(index_dir: Path) -> None:
    """An index that only the user can open who wrote it."""
    modes = {path.stat().st_mode & 0o777 for path in index_dir.iterdir() if path.is_dir()}
    assert modes == {0o777 & ~UMASK}


def test_one_writer_at_a_time_and_the_next_after_it(index_dir: Path, counting: Counting) -> None:
    """A lock that a failed session keeps."""
    with (
        IndexWriter(index_dir, counting),
        pytest.raises(SaveError, match="right now"),
        IndexWriter(index_dir, counting),
    ):
        pass
    with pytest.raises(ConfigError), IndexWriter(index_dir, counting, IndexConfig()):
        pass
    with IndexWriter(index_dir, counting) as writer:
        assert writer.commit().generation == 1


def test_a_factory_string_faiss_does_not_know_is_a_config_error(
    tmp_path: Path, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A C++ exception, and a half-written segment."""
    pytest.importorskip("faiss")
    monkeypatch.setattr("ragspec.retrieval.search.faiss_index.MIN_ROWS", 1)
    config = IndexConfig(dense=DenseConfig(kind="hnsw", factory="NoSuchIndex"))
    with pytest.raises(ConfigError, match="NoSuchIndex"):
        build_index([Document("a", "Text.")], tmp_path / "index", counting, config)
    config = IndexConfig(dense=DenseConfig(kind="ivf", factory="HNSW4"))
    with pytest.raises(ConfigError, match="no index of the kind 'ivf'"):
        build_index([Document(str(n), f"Text {n}.") for n in range(50)], tmp_path / "index", counting, config)
    assert not list((tmp_path / "index").glob("[sg.]*-*"))


class Faulty(LetterEncoder):
    """Fails as it is told to."""

    fault: Exception | None = None

    def encode(self, texts: Sequence[str], kind: TextKind = "document") -> FloatArray:
        if self.fault is not None:
            raise self.fault
        vectors = super().encode(texts, kind)
        vectors[[("ill" in text) for text in texts]] = np.nan
        return vectors


def test_a_vector_that_is_no_number_is_not_indexed(tmp_path: Path) -> None:
    """One bad vector, committed without a word, and no query of anybody could be ranked any more."""
    with IndexWriter(tmp_path / "index", Faulty()) as writer:
        writer.upsert(Document("sound", "A text."))
        writer.commit()
        writer.upsert(Document("sick", "An ill text."))
        with pytest.raises(ModelError, match="'sick' is not finite"):
            writer.commit()
    assert ids(tmp_path / "index") == ["sound"]


def test_an_encoder_that_is_away_is_not_a_full_disk(tmp_path: Path) -> None:
    """It said "cannot write ...: connection refused", and the session was over for good."""
    encoder = Faulty()
    with IndexWriter(tmp_path / "index", encoder) as writer:
        writer.upsert(Document("a", "A text."))
        encoder.fault = ConnectionRefusedError("the encoder's server")
        with pytest.raises(RetrievalError, match="the encoder cannot be asked"):
            writer.commit()
        encoder.fault = None
        writer.commit()
    assert ids(tmp_path / "index") == ["a"]


def test_a_rebuild_by_another_encoder_keeps_the_settings(index_dir: Path, counting: Counting) -> None:
    """Passages of another length, and exact search again, because only the encoder was to change."""
    other = LetterEncoder()
    other.identity = replace(LetterEncoder.identity, fingerprint="0" * 64)
    with IndexWriter(index_dir, other, replace=True) as writer:
        writer.upsert(Document("new", "Text."))
        writer.delete_unseen()
        writer.commit()
    assert Store.open(index_dir).manifest.config == CONFIG and ids(index_dir) == ["new"]


def test_a_rebuild_keeps_one_of_two_copies(tmp_path: Path, counting: Counting) -> None:
    """An index that was once built with its duplicates kept them for ever; or of three copies the third was forgotten."""
    with IndexWriter(tmp_path / "index", counting) as writer:
        for name in "abc":
            writer.upsert(Document(name, "Same."))
        writer.commit()
    with IndexWriter(tmp_path / "index", counting, keep_duplicates=False) as writer:
        writer.delete("a")
        assert writer.upsert(Document("d", "Same.")) is UpsertOutcome.DUPLICATE
        assert writer.duplicate_of(Document("b", "Same.")) == "c"
        writer.commit()
    with IndexWriter(tmp_path / "index", counting, replace=True, keep_duplicates=False) as writer:
        assert [writer.upsert(Document(name, "Same.")) for name in "bc"] == [
            UpsertOutcome.UNCHANGED,
            UpsertOutcome.DUPLICATE,
        ]
        writer.delete_unseen()
        writer.commit()
    assert ids(tmp_path / "index") == ["b"]


def test_headings_and_sources_that_are_no_text_are_refused_or_unknown(index_dir: Path, counting: Counting) -> None:
    """A traceback of the codec, half-way through a document."""
    with IndexWriter(index_dir, counting) as writer:
        for text in ("\ud800", "a\0b"):
            with pytest.raises(InputError, match="a heading holds"):
                writer.upsert(Document("a", "Hi.\n\nThere.", headings=(Heading(0, 1, text),)))
        assert writer.delete_source("caf\udce9.txt") == 0


def test_large_segments_are_not_written_anew_by_every_commit(
    tmp_path: Path, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond sixteen nearly full segments each commit copied half of the index, one by one, and made nothing fewer."""
    monkeypatch.setattr(generation_builder, "MAX_SEGMENTS", 2)
    monkeypatch.setattr(generation_builder, "MAX_SEGMENT_PASSAGES", 4)
    with IndexWriter(tmp_path / "index", counting, passages_per_encode=1) as writer:
        *_, manifest = one_by_one(writer, 16)
        assert writer.commit() == manifest
    full = [segment for segment in manifest.segments if segment.num_passages > 2]
    assert len(manifest.segments) - len(full) <= 2 and len(full) > 2 and manifest.num_documents == 16

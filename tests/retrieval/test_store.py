"""An index on disk: whole or not at all, checked before use, never changed under a reader."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from letter_encoder import LetterEncoder
from office_files import write_pdf

from ragspec import disk
from ragspec.config import ChunkingConfig, IndexConfig
from ragspec.core import Document
from ragspec.errors import EncoderMismatch, InputError, SaveError, StoreCorrupt, StoreError, StoreMissing
from ragspec.retrieval.chunking import chunk
from ragspec.retrieval.index import store
from ragspec.retrieval.index.content_key import content_key
from ragspec.retrieval.index.manifest import VECTORS, read_current
from ragspec.retrieval.index.store import FILES, Store
from ragspec.retrieval.index.writer import IndexWriter
from ragspec.retrieval.reading import read_documents
from ragspec.retrieval.retriever import build_index
from ragspec.retrieval_config import AnalyzerConfig

CHUNKING = ChunkingConfig(max_chars=40)
CONFIG = IndexConfig(chunking=CHUNKING)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, documents: list[Document]) -> Path:
    """Two segments, one of them with a deleted document."""
    folder, letters = tmp_path_factory.mktemp("store") / "index", LetterEncoder()
    build_index(documents[:15], folder, letters, CONFIG)
    with IndexWriter(folder, letters) as writer:
        writer.delete("d3")
        for document in documents[15:]:
            writer.upsert(document)
        writer.commit()
    return folder


@pytest.mark.parametrize(("name", "linux"), [("blocks.html", "linux"), ("blocks.md", "on-linux")])
def test_passages_keep_headings_anchors_and_kinds_of_their_blocks(tmp_path: Path, name: str, linux: str) -> None:
    """A quote that cannot be opened at its place, or a heading that is quoted as a sentence."""
    documents = list(read_documents([Path(__file__).with_name("files") / name]))
    build_index(documents, tmp_path / "index", LetterEncoder())
    store = Store.open(tmp_path / "index")
    assert list(store.documents()) == documents and store.former_documents() == []
    passages = [store.segments[0].segment.passage(row) for row in range(3)]
    assert passages == chunk(documents[0], IndexConfig().chunking)
    titles = [passage.headings for passage in passages]
    assert titles == [
        ("Install",),
        ("Install", "On *Linux*!" if name == "blocks.md" else "On Linux"),
        ("Install", "On Windows"),
    ]
    assert [passage.anchor for passage in passages] == ["install", linux, "windows"]
    kinds = [[block.kind for block in passage.blocks] for passage in passages]
    assert kinds == [["heading", "paragraph"], ["heading", "list_item", "code"], ["heading", "table"]]
    assert passages[1].blocks[1].start == passages[1].text.index("1. Run")


def test_a_passage_names_the_page_on_which_it_begins(tmp_path: Path) -> None:
    """A citation of a PDF that opens another page."""
    write_pdf(tmp_path / "a.pdf", ["The mill was built in 1874."], ["The bridge was built in 1921."])
    build_index(read_documents([tmp_path / "a.pdf"]), tmp_path / "index", LetterEncoder(), CONFIG)
    segment = Store.open(tmp_path / "index").segments[0].segment
    assert [(segment.passage(row).text[:8], segment.passage(row).page) for row in range(2)] == [
        ("The mill", 1),
        ("The brid", 2),
    ]


def visible(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def test_what_was_written_is_what_is_read(index_dir: Path, letters: LetterEncoder, documents: list[Document]) -> None:
    """Byte offsets taken for character offsets cut non-ASCII passages in the wrong place; or every process copied the vectors."""
    opened = Store.open(index_dir, letters.identity)
    live = [document for document in documents if document.id != "d3"]
    assert list(opened.documents()) == live
    assert opened.manifest.num_passages == sum(len(chunk(document, CHUNKING)) for document in live)
    first = opened.segments[0].segment
    expected = [passage for document in documents[:15] for passage in chunk(document, CHUNKING)]
    assert [first.passage(row) for row in range(len(expected))] == expected
    assert first.passage(3, score=0.5) == replace(expected[3], score=0.5)
    assert [list(first.rows_of(number)) for number in (0, 2)] == [[0, 1], [4, 5]]
    assert isinstance(first.vectors, np.memmap)
    assert np.array_equal(first.vectors, letters.encode([f"{p.title}\n{p.text}" for p in expected]))


def test_manifest_says_what_the_index_is(index_dir: Path, documents: list[Document], letters: LetterEncoder) -> None:
    """An index whose origin is unknown cannot be checked, cached or repeated."""
    manifest = Store.open(index_dir).manifest
    assert manifest.generation == 2 and manifest.num_documents == 19 and manifest.num_passages == 38
    assert asdict(manifest.encoder) == {"id": "letters", "fingerprint": "f" * 64, "dimension": 16}
    assert manifest.config == CONFIG and manifest.normalisation == "l2" and manifest.analyzer.startswith("auto")
    assert [set(record.files) for record in manifest.segments] == [FILES, FILES]
    assert [record.num_deleted for record in manifest.segments] == [1, 0]
    live = [document for document in documents if document.id != "d3"]
    assert manifest.content_key == content_key(live[::-1], letters.identity, CONFIG)


def test_the_content_key_depends_on_all_that_answers_depend_on(
    documents: list[Document], letters: LetterEncoder
) -> None:
    """A cache that reuses an index of older documents, or of another encoder, answers from it."""
    same = letters.identity
    keys = [
        content_key(documents, same, CONFIG),
        content_key(documents[1:], same, CONFIG),
        content_key([replace(documents[0], text="new"), *documents[1:]], same, CONFIG),
        content_key([replace(documents[0], owner="bob"), *documents[1:]], same, CONFIG),
        content_key(documents, replace(same, fingerprint="0" * 64), CONFIG),
        content_key(documents, same, IndexConfig()),
        content_key(documents, same, CONFIG.model_copy(update={"words": AnalyzerConfig(language="english")})),
        content_key([*documents, documents[0]], same, CONFIG),
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("name", [*sorted(FILES), "manifest.json", "deleted-000001.npy"])
def test_a_damaged_file_is_named_and_nothing_is_loaded(
    index_dir: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading first and checking later hands unchecked bytes to a parser."""
    path = max(index_dir.rglob(name))
    raw = path.read_bytes()
    monkeypatch.setattr(store, "IndexSegment", lambda *_: pytest.fail("read before it was checked"))
    monkeypatch.setattr(store, "_deleted", lambda *_: pytest.fail("read before it was checked"))
    for damaged in (raw[:-5] + bytes([raw[-5] ^ 1]) + raw[-4:], raw[:-1], None):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        with pytest.raises(StoreCorrupt, match=name):
            Store.open(index_dir)


@pytest.mark.parametrize(
    ("make", "error", "reason"),
    [
        (lambda path: None, StoreMissing, "does not exist"),
        (lambda path: path.mkdir(), StoreMissing, "no file CURRENT"),
        (lambda path: path.write_text("x"), StoreMissing, "is a file"),
        (lambda path: (path.mkdir(), (path / "index.faiss").write_bytes(b"IxFI")), StoreMissing, "no ragspec index"),
        (lambda path: (path.mkdir(), (path / "CURRENT").write_text("../../etc " + "0" * 64)), StoreCorrupt, "name"),
        (lambda path: (path.mkdir(), (path / "CURRENT").write_bytes(b"\xff\xfe")), StoreCorrupt, "name"),
        (lambda path: (path.mkdir(), (path / "CURRENT").mkdir()), StoreMissing, "cannot be read"),
    ],
)
def test_a_missing_or_foreign_index_gives_the_exact_reason(
    tmp_path: Path, make: Callable[[Path], object], error: type[StoreError], reason: str
) -> None:
    """ "KeyError: 'vectors'" tells nobody that the path is wrong."""
    make(tmp_path / "index")
    with pytest.raises(error, match=reason):
        Store.open(tmp_path / "index")


def rewritten(index_dir: Path, change: Callable[[dict[str, object]], object]) -> None:
    """The manifest with a change, and a CURRENT that vouches for it."""
    folder, _ = read_current(index_dir)
    fields = json.loads((folder / "manifest.json").read_bytes())
    change(fields)
    raw = json.dumps(fields).encode()
    (folder / "manifest.json").write_bytes(raw)
    (index_dir / "CURRENT").write_text(f"{folder.name} {hashlib.sha256(raw).hexdigest()}\n")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.update(schema_version=1), "schema 1.*build it again"),
        (lambda m: m.update(schema_version=4), "of a newer ragspec"),
        (lambda m: m.update(unknown=1), "not a manifest"),
        (lambda m: m["segments"][0].update(num_passages=5), "does not hold"),
        (lambda m: m["segments"][0].update(num_live_passages=5), "deletes other documents"),
        (lambda m: m["segments"][0].update(num_deleted=2), "no list of 2 documents"),
        (lambda m: m["segments"][0]["files"].pop("vectors.npy"), "lists"),
        (lambda m: m["segments"][0]["files"].update({"../x": m["segments"][0]["files"].pop("terms.npy")}), "outside"),
    ],
)
def test_a_manifest_of_another_kind_is_refused(index_dir: Path, change: Callable[..., object], reason: str) -> None:
    """An index of another version, read by guess, gives wrong passages without an error."""
    rewritten(index_dir, change)
    with pytest.raises(StoreCorrupt, match=reason):
        Store.open(index_dir)


def test_another_encoder_is_refused_before_anything_is_hashed(
    index_dir: Path, letters: LetterEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vectors of another model have the same shape, and their neighbours are noise."""
    monkeypatch.setattr(store, "verify_checksums", lambda *_: pytest.fail("hashed first"))
    with pytest.raises(EncoderMismatch, match=r"letters.*other"):
        Store.open(index_dir, replace(letters.identity, id="other", fingerprint="0" * 64))


def test_a_rebuild_replaces_the_index_and_its_readers_keep_theirs(
    index_dir: Path, letters: LetterEncoder, documents: list[Document]
) -> None:
    """Rewriting files in place changes passages under a running question."""
    before = Store.open(index_dir)
    seen = list(before.documents())
    for number in range(3):
        build_index([*documents[:2], Document("new", f"Text {number}.")], index_dir, letters, CONFIG)
        with IndexWriter(index_dir) as writer:
            writer.compact()
    after = Store.open(index_dir)
    assert after.manifest.num_documents == 3 and before.generation != after.generation
    assert list(before.documents()) == seen
    assert float(np.abs(before.segments[0].segment.vectors).sum()) > 0
    kept = sorted(path.name for path in index_dir.glob("generation-*"))
    assert kept == [f"generation-{after.manifest.generation - n:06d}" for n in (1, 0)]
    assert len(list(index_dir.glob("segment-*"))) <= 3


def test_refreshing_shares_what_both_generations_have(index_dir: Path, letters: LetterEncoder) -> None:
    """A reader that reads a gigabyte again because one document was deleted."""
    before = Store.open(index_dir)
    assert before.refreshed() is before
    with IndexWriter(index_dir, letters) as writer:
        writer.delete("d16")
        writer.commit()
    after = before.refreshed()
    assert after.generation != before.generation and after.manifest.num_passages == before.manifest.num_passages - 2
    assert [live.segment for live in after.segments] == [live.segment for live in before.segments]
    assert "d16" in {document.id for document in before.documents()}
    assert "d16" not in {document.id for document in after.documents()}


class Full:
    """os.fsync, os.rename and os.replace fail as on a full disk from the given call on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, survive: int) -> None:
        self.calls, self.survive = 0, survive
        for name in ("fsync", "rename", "replace"):
            monkeypatch.setattr(os, name, self.failing(getattr(os, name)))

    def failing(self, real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            self.calls += 1
            if self.calls > self.survive:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args)

        return call


def change(index_dir: Path, letters: LetterEncoder) -> None:
    with IndexWriter(index_dir, letters) as writer:
        writer.upsert(Document("new", "Something new."))
        writer.delete("d5")
        writer.commit()
        writer.compact()


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_failure_at_any_step_leaves_a_whole_generation(
    index_dir: Path, tmp_path: Path, letters: LetterEncoder, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """A half-written generation that CURRENT already names is no index at all."""
    shutil.copytree(index_dir, tmp_path / "copy")
    with monkeypatch.context() as patch:
        full = Full(patch, survive=10**9)
        change(tmp_path / "copy", letters)
    assert full.calls > 20
    states = set()
    for survive in range(full.calls - 1, -1, -every):
        shutil.rmtree(tmp_path / "copy")
        shutil.copytree(index_dir, tmp_path / "copy")
        with monkeypatch.context() as patch:
            Full(patch, survive)
            with pytest.raises(SaveError, match="No space left on device"):
                change(tmp_path / "copy", letters)
        assert not list((tmp_path / "copy").glob(".building-*"))
        opened = Store.open(tmp_path / "copy")
        states.add(len(opened.segments))
        names = {path.name for path in (tmp_path / "copy").iterdir() if path.name.startswith("segment")}
        assert {live.segment.name for live in opened.segments} <= names
        assert {d.id for d in opened.documents()} in (ids_before(), ids_before() - {"d5"} | {"new"})
    assert states == {1, 2, 3}  # before the first commit, before the compaction, and when only the last flush failed


def ids_before() -> set[str]:
    return {f"d{n}" for n in range(20) if n != 3}


def test_a_place_that_cannot_be_written_is_a_save_error(
    tmp_path: Path, letters: LetterEncoder, documents: list[Document]
) -> None:
    """A file where the folder should be gave FileExistsError."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SaveError, match="cannot write"):
        build_index(documents, tmp_path / "file", letters, CONFIG)
    assert (tmp_path / "file").read_text() == "mine"


def test_two_writers_do_not_mix_and_a_killed_one_leaves_nothing(
    index_dir: Path, letters: LetterEncoder, documents: list[Document]
) -> None:
    """Two builds into one folder interleaved their files."""
    for left in (".building-dead", "segment-000077", "generation-000078"):
        (index_dir / left).mkdir()
        (index_dir / left / VECTORS).write_bytes(b"half")
    with disk.writer_lock(index_dir), pytest.raises(SaveError, match="right now"):
        build_index(documents, index_dir, letters, CONFIG)
    build_index(documents, index_dir, letters, CONFIG)
    assert not list(index_dir.glob(".building-*")) and not (index_dir / "segment-000077").exists()
    assert not (index_dir / "generation-000078").exists()


@pytest.mark.parametrize("bad", ["a\ud800b", "a\0b"])
def test_a_document_no_file_can_hold_is_refused_and_nothing_is_written(
    bad: str, index_dir: Path, letters: LetterEncoder, documents: list[Document]
) -> None:
    """A lone surrogate ended a build of an hour with a UnicodeEncodeError."""
    before = visible(index_dir)
    wrong = (Document("x", bad), Document("x", "fine", title=bad), Document(bad, "fine"), Document("x", "y", owner=bad))
    for document in wrong:
        with pytest.raises(InputError, match="document"):
            build_index([*documents, document], index_dir, letters, CONFIG)
    for metadata in ({"when": object()}, {"x": float("nan")}):
        with pytest.raises(InputError, match="metadata"):
            build_index([Document("x", "fine", metadata=metadata)], index_dir, letters, CONFIG)
    assert visible(index_dir) == before


def test_a_parser_that_fails_on_checked_bytes_is_a_corrupt_index(
    index_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a library raises over a file, the user hears which index is broken."""

    def broken(*_: object, **__: object) -> None:
        raise ValueError("bad magic")

    monkeypatch.setattr(np.lib.format, "open_memmap", broken)
    with pytest.raises(StoreCorrupt, match="bad magic"):
        Store.open(index_dir)

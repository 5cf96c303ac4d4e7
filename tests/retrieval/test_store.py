"""An index on disk: whole or not at all, checked before use, never changed under a reader."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from letter_encoder import LetterEncoder

from ragspec.config import ChunkingConfig
from ragspec.core import Document
from ragspec.errors import EncoderMismatch, InputError, SaveError, StoreCorrupt, StoreError, StoreMissing
from ragspec.retrieval import disk, store, writer
from ragspec.retrieval.chunking import chunk
from ragspec.retrieval.manifest import DOCUMENTS, FILES, PASSAGES, VECTORS, read_current
from ragspec.retrieval.retriever import build_index
from ragspec.retrieval.store import Store, index_matches

CHUNKING = ChunkingConfig(max_chars=40)


@pytest.fixture
def index_dir(tmp_path: Path, letters: LetterEncoder, documents: list[Document]) -> Path:
    build_index(documents, tmp_path / "index", letters, CHUNKING)
    return tmp_path / "index"


def generation_folder(index_dir: Path) -> Path:
    return read_current(index_dir)[0]


def visible(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def test_what_was_written_is_what_is_read(index_dir: Path, letters: LetterEncoder, documents: list[Document]) -> None:
    """Byte offsets taken for character offsets cut non-ASCII passages in the wrong place."""
    opened = Store.open(index_dir, letters.identity)
    expected = [passage for document in documents for passage in chunk(document, CHUNKING)]
    assert [opened.passage(row) for row in range(len(opened))] == expected
    assert [opened.document(row) for row in range(len(documents))] == documents
    assert opened.vectors.dtype == np.float32
    assert np.array_equal(opened.vectors, letters.encode([f"{p.title}\n{p.text}" for p in expected]))
    assert opened.passage(3, score=0.5) == replace(expected[3], score=0.5)
    assert opened.passage_key(3) == (expected[3].document_id, expected[3].ordinal)


def test_manifest_says_what_the_index_is(index_dir: Path, letters: LetterEncoder) -> None:
    """An index whose origin is unknown cannot be checked, cached or repeated."""
    manifest = Store.open(index_dir).manifest
    assert manifest.generation == 1 and manifest.num_documents == 20 and manifest.num_passages > 20
    assert manifest.encoder.model_dump() == {"id": "letters", "fingerprint": "f" * 64, "dimension": 16}
    assert manifest.chunking == CHUNKING and manifest.normalisation == "l2"
    assert set(manifest.files) == set(FILES)


def test_vectors_are_mapped_not_read(index_dir: Path) -> None:
    """A copy of every vector in every process does not fit beside a model."""
    assert isinstance(Store.open(index_dir).vectors, np.memmap)


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_file_is_named_and_nothing_is_loaded(
    index_dir: Path, name: str, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading first and checking later hands unchecked bytes to a parser."""
    path = generation_folder(index_dir) / name
    raw = path.read_bytes()
    if damage == "flip":
        path.write_bytes(raw[:-5] + bytes([raw[-5] ^ 1]) + raw[-4:])
    elif damage == "cut":
        path.write_bytes(raw[:-1])
    else:
        path.unlink()
    monkeypatch.setattr(store.np, "load", lambda *_, **__: pytest.fail("read before it was checked"))
    monkeypatch.setattr(store, "_mapped", lambda _: pytest.fail("read before it was checked"))
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


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema_version": 2}, "schema 2"),
        ({"unknown": 1}, "not a manifest"),
        ({"num_passages": 5}, "holds"),
        ({"files": {}}, "lists"),
    ],
)
def test_a_manifest_of_another_kind_is_refused(index_dir: Path, change: dict[str, object], reason: str) -> None:
    """An index of a later version, read by guess, gives wrong passages without an error."""
    folder = generation_folder(index_dir)
    raw = json.dumps(json.loads((folder / "manifest.json").read_bytes()) | change).encode()
    (folder / "manifest.json").write_bytes(raw)
    (index_dir / "CURRENT").write_text(f"{folder.name} {writer.hashlib.sha256(raw).hexdigest()}\n")
    with pytest.raises(StoreCorrupt, match=reason):
        Store.open(index_dir)


def test_another_encoder_is_refused_before_anything_is_hashed(
    index_dir: Path, letters: LetterEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vectors of another model have the same shape, and their neighbours are noise."""
    monkeypatch.setattr(store, "check_files", lambda *_: pytest.fail("hashed first"))
    with pytest.raises(EncoderMismatch, match=r"letters.*other"):
        Store.open(index_dir, replace(letters.identity, id="other", fingerprint="0" * 64))


def test_a_rebuild_replaces_the_index_and_its_readers_keep_theirs(
    index_dir: Path, letters: LetterEncoder, documents: list[Document]
) -> None:
    """Rewriting files in place changes passages under a running question."""
    before = Store.open(index_dir)
    texts = [before.passage(row).text for row in range(len(before))]
    for _ in range(3):
        build_index(documents[:2], index_dir, letters, CHUNKING)
    after = Store.open(index_dir)
    assert after.manifest.generation == 4 and after.manifest.num_documents == 2
    assert before.generation != after.generation
    assert [before.passage(row).text for row in range(len(before))] == texts
    assert float(np.abs(before.vectors).sum()) > 0
    assert sorted(p.name for p in index_dir.glob("generation-*")) == ["generation-000003", "generation-000004"]


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


@pytest.mark.parametrize("survive", range(9))
def test_a_failure_at_any_step_leaves_the_index_as_it_was(
    survive: int, index_dir: Path, letters: LetterEncoder, documents: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half-written generation that CURRENT already names is no index at all."""
    before = visible(index_dir)
    with monkeypatch.context() as patch:
        Full(patch, survive)
        with pytest.raises(SaveError, match="No space left on device"):
            build_index(documents[:3], index_dir, letters, CHUNKING)
    assert visible(index_dir) == before
    assert not list(index_dir.glob(".building-*"))
    Store.open(index_dir)


def test_no_step_is_left_untested(
    index_dir: Path, letters: LetterEncoder, documents: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The range of the test above must reach the last step that may fail: the replacing of CURRENT."""
    with monkeypatch.context() as patch:
        full = Full(patch, survive=9)
        build_index(documents[:3], index_dir, letters, CHUNKING)
    assert full.calls == 10 and Store.open(index_dir).manifest.num_documents == 3


FULL_DISK = """
import resource, signal, sys
sys.path[:0] = {path!r}
from letter_encoder import LetterEncoder
from ragspec.config import ChunkingConfig
from ragspec.core import Document
from ragspec.errors import SaveError
from ragspec.retrieval.retriever import build_index
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for limit in (64, 20_000, 400_000, 900_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        documents = (Document(str(n), "Some text. " * 400) for n in range(300))
        build_index(documents, {out!r}, LetterEncoder(), ChunkingConfig())
    except SaveError as error:
        print(error)
"""


def test_a_file_that_cannot_grow_is_a_save_error(index_dir: Path) -> None:
    """The kernel's own refusal, at the header, in the vectors and in the texts, must arrive as one error."""
    before = visible(index_dir)
    script = FULL_DISK.format(path=[str(Path(__file__).parent), *sys.path], out=str(index_dir))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout.splitlines() == [f"cannot write {index_dir}: File too large"] * 4
    assert visible(index_dir) == before and not list(index_dir.glob(".building-*"))


def test_a_place_that_cannot_be_written_is_a_save_error(
    tmp_path: Path, letters: LetterEncoder, documents: list[Document]
) -> None:
    """A file where the folder should be gave FileExistsError."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SaveError, match="cannot write"):
        build_index(documents, tmp_path / "file", letters, CHUNKING)
    assert (tmp_path / "file").read_text() == "mine"


def test_two_writers_do_not_mix_and_a_killed_one_leaves_nothing(
    index_dir: Path, letters: LetterEncoder, documents: list[Document]
) -> None:
    """Two builds into one folder interleaved their files."""
    (index_dir / ".building-dead").mkdir()
    (index_dir / ".building-dead" / VECTORS).write_bytes(b"half")
    with disk.exclusive(index_dir), pytest.raises(SaveError, match="right now"):
        build_index(documents, index_dir, letters, CHUNKING)
    build_index(documents, index_dir, letters, CHUNKING)
    assert not list(index_dir.glob(".building-*"))


@pytest.mark.parametrize("bad", ["a\ud800b", "a\0b"])
def test_a_document_no_file_can_hold_is_refused_and_nothing_is_written(
    bad: str, index_dir: Path, letters: LetterEncoder, documents: list[Document]
) -> None:
    """A lone surrogate ended a build of an hour with a UnicodeEncodeError."""
    before = visible(index_dir)
    for document in (Document("x", bad), Document("x", "fine", title=bad), Document(bad, "fine")):
        with pytest.raises(InputError, match="document"):
            build_index([*documents, document], index_dir, letters, CHUNKING)
    with pytest.raises(InputError, match="metadata"):
        build_index([Document("x", "fine", metadata={"when": object()})], index_dir, letters, CHUNKING)
    assert visible(index_dir) == before


def test_an_index_matches_only_its_own_documents_encoder_and_chunking(
    index_dir: Path, letters: LetterEncoder, documents: list[Document], tmp_path: Path
) -> None:
    """A demo that reuses an index of older documents answers from them."""
    same = letters.identity
    assert index_matches(index_dir, documents, same, CHUNKING)
    assert not index_matches(index_dir, documents[1:], same, CHUNKING)
    assert not index_matches(index_dir, [replace(documents[0], text="new"), *documents[1:]], same, CHUNKING)
    assert not index_matches(index_dir, documents, replace(same, fingerprint="0" * 64), CHUNKING)
    assert not index_matches(index_dir, documents, same, ChunkingConfig(max_chars=50))
    assert not index_matches(tmp_path / "none", documents, same, CHUNKING)


def test_names_of_the_files_are_fixed() -> None:
    """Renaming a file of the format needs a new schema version."""
    assert FILES == (VECTORS, PASSAGES, DOCUMENTS) == ("vectors.npy", "passages.arrow", "documents.arrow")

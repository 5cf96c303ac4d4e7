"""Whatever happened to its files, an index is refused with a reason: no crash, no wrong passage."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from letter_encoder import LetterEncoder

from ragspec.config import DenseConfig, IndexConfig
from ragspec.core import Document
from ragspec.errors import StoreCorrupt, StoreError
from ragspec.retrieval.index.manifest import file_checksum, verify_checksums
from ragspec.retrieval.index.pointer import CURRENT
from ragspec.retrieval.index.store import IndexSegment, Store
from ragspec.retrieval.index.writer import IndexWriter
from ragspec.retrieval.retriever import build_index

FOREIGN = (
    b"",
    b"\0" * 4096,
    b"%PDF-1.7\n",
    b"PK\x03\x04" + b"x" * 99,
    b"IxF2" + b"\xff" * 200,
    b"ARROW1\0\0",
    b"\x93NUMPY\1\0",
)


@pytest.fixture
def index_dir(tmp_path: Path, letters: LetterEncoder, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every kind of file: vectors, texts, postings, FAISS, deletions."""
    pytest.importorskip("faiss")
    monkeypatch.setattr("ragspec.retrieval.search.faiss_index.MIN_ROWS", 40)
    config = IndexConfig(dense=DenseConfig(kind="hnsw"))
    build_index((Document(str(n), f"Text {n}. More — 雨.") for n in range(50)), tmp_path / "index", letters, config)
    with IndexWriter(tmp_path / "index", letters) as writer:
        writer.upsert(Document("new", "New."))
        writer.delete("3")
        writer.commit()
    return tmp_path / "index"


def cut(raw: bytes, chance: random.Random) -> bytes:
    return raw[: chance.randrange(len(raw))]


def flip(raw: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(raw))
    return raw[:place] + bytes([raw[place] ^ (1 << chance.randrange(8))]) + raw[place + 1 :]


def grow(raw: bytes, chance: random.Random) -> bytes:
    return raw + chance.randbytes(chance.randint(1, 64))


def swap(raw: bytes, chance: random.Random) -> bytes:
    return chance.choice(FOREIGN)


def used_files(index_dir: Path) -> list[Path]:
    """What the current generation needs."""
    store = Store.open(index_dir)
    folder = index_dir / (index_dir / CURRENT).read_text().split()[0]
    segments = (live.segment for live in store.segments)
    files = [segment.folder / name for segment in segments for name in segment.record.files]
    return [*files, *folder.iterdir(), index_dir / CURRENT]


def damage_often(index_dir: Path, times: int, seed: int) -> None:
    chance = random.Random(seed)
    files = used_files(index_dir)
    assert len(files) >= 20 and any(path.name == "dense.faiss" for path in files)
    kinds: list[Callable[[bytes, random.Random], bytes]] = [cut, flip, grow, swap]
    for _ in range(times):
        path, kind = chance.choice(files), chance.choice(kinds)
        raw = path.read_bytes()
        damaged = kind(raw, chance)
        if damaged == raw or (path.name == CURRENT and damaged.rstrip(b"\n") == raw.rstrip(b"\n")):
            continue
        path.write_bytes(damaged)
        with pytest.raises(StoreError) as refused:
            Store.open(index_dir)
        assert len(str(refused.value)) > 20
        path.write_bytes(raw)
    assert Store.open(index_dir).manifest.num_documents == 50


@pytest.mark.parametrize(("times", "seed"), [(100, 1), pytest.param(2_000, 2, marks=pytest.mark.slow)])
def test_damaged_files_are_refused_with_a_reason(index_dir: Path, times: int, seed: int) -> None:
    """A flipped bit that becomes a wrong passage; a crash inside a parser of C++."""
    damage_often(index_dir, times, seed)


def test_foreign_files_with_the_right_hashes_are_refused_too(index_dir: Path, tmp_path: Path) -> None:
    """A segment somebody else wrote, or a bug of ours, whose manifest vouches for it."""
    (record, *_) = Store.open(index_dir).manifest.segments
    for name in sorted(record.files):
        for number, foreign in enumerate((*FOREIGN[1:], None)):
            folder = tmp_path / f"{name}-{number}"
            shutil.copytree(index_dir / record.name, folder)
            (folder / name).write_bytes(
                cut((folder / name).read_bytes(), random.Random(3)) if foreign is None else foreign
            )
            files = {path.name: file_checksum(path) for path in folder.iterdir()}
            verify_checksums((folder / each, file) for each, file in files.items())
            with pytest.raises(StoreCorrupt):
                opened = IndexSegment(folder, record.model_copy(update={"files": files}), 16, DenseConfig(kind="hnsw"))
                opened.nearest.search(LetterEncoder().encode(["x"]), 3)

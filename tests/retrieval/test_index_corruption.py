"""Whatever happened to its files, an index is refused with a reason: no crash, no wrong passage."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from letter_encoder import LetterEncoder

from ragspec.config import DenseConfig, IndexConfig
from ragspec.core import Document
from ragspec.errors import StoreCorrupt, StoreError
from ragspec.retrieval.index.manifest import file_checksum, verify_checksums
from ragspec.retrieval.index.pointer import CURRENT
from ragspec.retrieval.index.store import IndexSegment, Store, check_segment
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


@pytest.mark.parametrize(("times", "seed"), [(100, 1), pytest.param(600, 2, marks=pytest.mark.slow)])
def test_damaged_files_are_refused_with_a_reason(index_dir: Path, times: int, seed: int) -> None:
    """A flipped bit that becomes a wrong passage; a crash inside a parser of C++."""
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
                opened.nearest().search(LetterEncoder().encode(["x"]), 3)


WORKER = """
import sys
sys.path[:0] = {path!r}
from letter_encoder import LetterEncoder
from ragspec.core import Document
from ragspec.retrieval.index.writer import IndexWriter
import ragspec.retrieval.index.generation_builder as builder_module
builder_module.MAX_SEGMENTS = 4
print("ready", flush=True)
for number in range(int(sys.argv[1]), 10**9):
    with IndexWriter({out!r}, LetterEncoder(), passages_per_encode=3) as writer:
        for part in range(4):
            writer.upsert(Document(f"{{number}}-{{part}}", f"Text {{number}} of part {{part}}. And more."))
        if number:
            writer.delete(f"{{number - 1}}-0")
        writer.commit()
        print(number, flush=True)
        if number % 3 == 2:
            writer.compact()
"""


def killed_at_random(folder: Path, start: int, delay_s: float) -> int:
    """Run a worker from round `start`, kill it `delay_s` after its first commit; the last round it acknowledged."""
    script = WORKER.format(path=[str(Path(__file__).parent.parent), *sys.path], out=str(folder))
    worker = subprocess.Popen([sys.executable, "-c", script, str(start)], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
    time.sleep(delay_s)
    os.kill(worker.pid, signal.SIGKILL)
    acknowledged = [int(line) for line in worker.stdout.read().splitlines() if line]
    worker.wait()
    worker.stdout.close()
    return acknowledged[-1] if acknowledged else start - 1


def check(folder: Path, acknowledged: int) -> int:
    """All acknowledged rounds are there, whole, and at most the next one; the number of rounds that are there."""
    store = Store.open(folder)
    for live in store.segments:
        check_segment(live.segment)
    present = {document.id for document in store.documents()}
    rounds = max(int(name.split("-")[0]) for name in present) + 1
    assert rounds in (acknowledged + 1, acknowledged + 2)
    expected = {f"{n}-{part}" for n in range(rounds) for part in range(4) if part or n == rounds - 1}
    assert present == expected
    return rounds


@pytest.mark.slow
def test_killed_at_random_moments_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    """Half a segment that CURRENT names; a commit that was reported and is gone; folders nobody removes."""
    folder, chance, rounds = tmp_path / "index", random.Random(2), 0
    for _ in range(15):
        acknowledged = killed_at_random(folder, rounds, chance.uniform(0.0, 0.5))
        if rounds == 0 and not (folder / "CURRENT").exists():
            assert acknowledged == -1
            continue
        rounds = check(folder, acknowledged)
    with IndexWriter(folder, LetterEncoder()) as writer:
        writer.compact()
    names = {path.name.split("-")[0] for path in folder.iterdir()}
    assert names <= {".lock", "CURRENT", "generation", "segment"} and len(list(folder.iterdir())) <= 24

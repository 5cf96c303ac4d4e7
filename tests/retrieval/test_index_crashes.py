"""kill -9 at any moment of ingest and compaction: what was acknowledged is there, and the index opens."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from letter_encoder import LetterEncoder

from ragspec.retrieval.index.store import Store, check_segment
from ragspec.retrieval.index.writer import IndexWriter

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


def survive(folder: Path, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    rounds = 0
    for _ in range(kills):
        acknowledged = killed_at_random(folder, rounds, chance.uniform(0.0, 0.5))
        if rounds == 0 and not (folder / "CURRENT").exists():
            assert acknowledged == -1
            continue
        rounds = check(folder, acknowledged)
    with IndexWriter(folder, LetterEncoder()) as writer:
        writer.compact()
    names = {path.name.split("-")[0] for path in folder.iterdir()}
    assert names <= {".lock", "CURRENT", "generation", "segment"} and len(list(folder.iterdir())) <= 24


@pytest.mark.slow
def test_killed_at_random_moments_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    """Half a segment that CURRENT names; a commit that was reported and is gone; folders nobody removes."""
    survive(tmp_path / "index", kills=40, seed=2)

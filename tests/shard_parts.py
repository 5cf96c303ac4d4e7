"""What tests of shards in actors share: an index of many segments, directories that show a part of the truth, and faults.

>>> directory = Shown(actors, 2)
>>> die(directory.table().members[0])
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from letter_encoder import LetterEncoder

from ragspec.cluster.directory import Directory, Member, Table
from ragspec.core import Document
from ragspec.retrieval.index.writer import IndexWriter
from ragspec.retrieval.search.filters import parse_filter
from ragspec.retrieval.search.segment_search import SearchScope

QUERIES = ["fact 3", "told here", "Text of group 2"]
SCOPES = (SearchScope(), SearchScope("ann"), SearchScope("ann", parse_filter({"type": "gte", "key": "n", "value": 7})))
BOUND_S = 120.0


def write_index(folder: Path) -> Path:
    """Sixty documents in six segments, one of them deleted, some of them Ann's."""
    with IndexWriter(folder, LetterEncoder()) as writer:
        for number in range(60):
            text = f"Fact {number} is told here. Text of group {number % 5}."
            writer.upsert(Document(f"d{number}", text, metadata={"n": number}, owner="ann" if number % 7 == 0 else ""))
            if number % 13 == 0:
                writer.commit()
        writer.delete("d11")
        writer.commit()
    return folder


def delete(index_dir: Path, document_id: str) -> None:
    with IndexWriter(index_dir) as writer:
        assert writer.delete(document_id)
        writer.commit()


class Shown:
    """The first `count` members of another directory. `replaces` False: nobody comes after those who are reported."""

    def __init__(self, directory: Directory, count: int, *, replaces: bool = True) -> None:
        self._directory, self._count, self._replaces = directory, count, replaces
        self.reported: dict[str, str] = {}
        self._names = [member.name for member in directory.table().members[:count]]

    def table(self, after: int = -1, timeout_s: float = 0.0) -> Table:
        table = self._directory.table(after, timeout_s)
        return Table(table.version, tuple(member for member in table.members if member.name in self._names))

    def report(self, name: str, epoch: int, why: str) -> None:
        self.reported[name] = why
        if self._replaces:
            self._directory.report(name, epoch, why)


def live(directory: Directory, count: int) -> list[Member]:
    """Waits for so many."""
    wait_for(lambda: len([m for m in directory.table().members if m.state == "live"]) >= count)
    return [member for member in directory.table().members if member.state == "live"]


def die(member: Member, number: int = signal.SIGKILL) -> None:
    """Returns when the process is gone, or stopped."""
    os.kill(member.facts.pid, number)
    status = Path(f"/proc/{member.facts.pid}/stat")
    wait_for(lambda: not status.exists() or (number == signal.SIGSTOP and status.read_text().split()[2] == "T"))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)

"""What tests of shards in actors share: an index of many segments, and faults.

>>> die(pool.replicas[0])
"""

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import ray
from letter_encoder import LetterEncoder
from ray.exceptions import RayError
from stand_ins import until

from ragspec.cluster.actors import Replica
from ragspec.config import RetrieverConfig
from ragspec.core import Document
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.index.writer import IndexWriter
from ragspec.retrieval.retriever import Retriever
from ragspec.retrieval.search.filters import parse_filter
from ragspec.retrieval.search.segment_search import SearchScope

QUERIES = ["fact 3", "told here", "Text of group 2"]
SCOPES = (SearchScope(), SearchScope("ann"), SearchScope("ann", parse_filter({"type": "gte", "key": "n", "value": 7})))
BOUND_S = 600.0


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


def local(index_dir: Path, **settings: Any) -> Retriever:
    """An index in this process."""
    return Retriever(LetterEncoder(), Store.open(index_dir), RetrieverConfig(**settings))


def delete(index_dir: Path, document_id: str) -> None:
    with IndexWriter(index_dir) as writer:
        assert writer.delete(document_id)
        writer.commit()


def pid_of(replica: Replica) -> int:
    """Waits for a replica that Ray restarts."""

    def ask() -> tuple[int, ...]:
        with contextlib.suppress(RayError):
            return tuple(ray.get(replica.actor.status.remote(), timeout=BOUND_S).pids)
        return ()

    return int(until(ask)[0])


def die(replica: Replica, number: int = signal.SIGKILL) -> int:
    """Returns when the process is gone, or stopped. Gives its id."""
    pid = pid_of(replica)
    os.kill(pid, number)
    status = Path(f"/proc/{pid}/stat")
    until(lambda: not status.exists() or (number == signal.SIGSTOP and status.read_text().split()[2] == "T"))
    return pid

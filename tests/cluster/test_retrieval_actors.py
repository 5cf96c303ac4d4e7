"""Encoders and shards in actors: the same vectors, hits and scores as in one process, also after an actor died."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from letter_encoder import LetterEncoder
from ray import cloudpickle

from pipelines.batch_session import ray_session
from ragspec.cluster import encoding
from ragspec.cluster.encoding import EncoderPool
from ragspec.cluster.shards import OpenGenerations, Placement, RayShards, _ShardActor
from ragspec.config import EncoderConfig, RetrieverConfig
from ragspec.core import Document
from ragspec.errors import StoreCorrupt
from ragspec.retrieval.encoder import Encoder
from ragspec.retrieval.filters import parse_filter
from ragspec.retrieval.manifest import read_pointer
from ragspec.retrieval.retriever import Retriever
from ragspec.retrieval.search import Scope
from ragspec.retrieval.store import Store
from ragspec.retrieval.writer import IndexWriter

pytestmark = pytest.mark.ray

cloudpickle.register_pickle_by_value(sys.modules[__name__])

QUERIES = ["fact 3", "told here", "Text of group 2"]


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    with ray_session(None):
        yield


@pytest.fixture
def index_dir(tmp_path: Path) -> Path:
    with IndexWriter(tmp_path / "index", LetterEncoder()) as writer:
        for number in range(60):
            text = f"Fact {number} is told here. Text of group {number % 5}."
            writer.upsert(Document(f"d{number}", text, metadata={"n": number}, owner="ann" if number % 7 == 0 else ""))
            if number % 13 == 0:
                writer.commit()
        writer.delete("d11")
        writer.commit()
    return tmp_path / "index"


def answers(index_dir: Path, **options: Any) -> list[Any]:
    found = []
    for mode in ("dense", "sparse", "hybrid"):
        retriever = Retriever(LetterEncoder(), Store.open(index_dir), RetrieverConfig(mode=mode), **options)  # type: ignore[arg-type]
        for scope in (Scope(), Scope("ann", parse_filter({"type": "gte", "key": "n", "value": 7}))):
            found.append(retriever.retrieve(QUERIES, 9, scope))
    return found


def test_shards_in_actors_answer_as_one_process_does(session: None, index_dir: Path) -> None:
    """Scores that depend on where a segment lies; a shard that forgets its segments when it is restarted."""
    expected = answers(index_dir)
    assert len(Store.open(index_dir).segments) == 6
    shards = RayShards(2)
    assert answers(index_dir, shard=shards.opened) == expected
    retriever = Retriever(LetterEncoder(), Store.open(index_dir), shard=shards.opened)
    for actor in shards._actors:
        ray.kill(actor, no_restart=False)
    assert retriever.retrieve(QUERIES, 9) == expected[4]
    with IndexWriter(index_dir) as writer:
        writer.delete("d3")
        writer.commit()
    assert "d3" not in {p.document_id for some in retriever.retrieve(QUERIES, 60).passages for p in some}
    assert retriever.retrieve(QUERIES, 9) == answers(index_dir)[4]


def test_an_actor_keeps_two_generations_and_opens_no_segment_twice(index_dir: Path) -> None:
    """A gigabyte hashed and packed again for every deleted document; generations that are kept until the memory is full."""
    actor, seen = _ShardActor(), []
    for number in range(3):
        store = Store.open(index_dir)
        names = tuple(live.segment.name for live in store.segments)
        assert "d0#0" in {
            p.id for p in Retriever(LetterEncoder(), store).retrieve(["fact"], 64, Scope("ann")).passages[0]
        }
        placement = Placement(str(index_dir), store.pointer, names)
        actor.call(placement, "load")
        seen.append([live.segment for live in actor.opened.stores[-1].segments])
        with IndexWriter(index_dir) as writer:
            writer.delete(f"d{number + 20}")
            writer.commit()
    assert seen[0] == seen[1] == seen[2] and len(actor.opened.stores) == 2


def test_a_generation_in_use_stays_open_while_others_come_and_go(index_dir: Path) -> None:
    """A reader that loses its generation, of which the files are gone, to one that another reader asked for before it."""
    opened, pointers = OpenGenerations(lambda store: store.generation), []
    first = Store.open(index_dir).generation
    for number in range(4):
        pointers.append(read_pointer(index_dir))
        assert opened.get(str(index_dir), pointers[-1]) == Store.open(index_dir).generation
        assert opened.get(str(index_dir), pointers[0]) == first
        with IndexWriter(index_dir) as writer:
            writer.delete(f"d{number + 20}")
            writer.commit()
    assert [store.pointer for store in opened.stores] == [pointers[3], pointers[0]]
    with pytest.raises(StoreCorrupt):
        opened.get(str(index_dir), pointers[1])
    assert len(opened.stores) == 2


def test_a_damaged_shard_says_so(session: None, index_dir: Path) -> None:
    """A remote error of twenty lines in place of the one that names the file."""
    store = Store.open(index_dir)
    path = max(index_dir.rglob("vectors.npy"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreCorrupt, match=r"vectors.npy"):
        RayShards(2).opened(store)


def test_a_pool_of_encoders_encodes_as_one_does(session: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors that come back in the order in which actors finish."""
    monkeypatch.setattr(encoding, "_TEXTS_PER_CALL", 5)
    pool, one = EncoderPool(EncoderConfig(), num_workers=2), Encoder.load(EncoderConfig())
    texts = [f"{'word ' * (number % 9)}number {number}." for number in range(37)]
    assert np.array_equal(pool.encode(texts), one.encode(texts)) and pool.encode([]).shape == (0, 384)
    assert (pool.identity, pool.max_tokens, pool.count_tokens(texts)) == (one.identity, 256, one.count_tokens(texts))
    assert ray.is_initialized()

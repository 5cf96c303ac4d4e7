"""Bitwise identity of search results: in any batch and shard layout, after compaction and after a rebuild.

The reference is an index built in one go and queried one query at a time.

    >>> IdentityCheck(encoder, documents, queries).measure(folder, tick).share
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ragspec.config import RetrieverConfig
from ragspec.core import Document, Passage
from ragspec.evaluation.suites.retrieval.quality import MODES, Mode
from ragspec.evaluation.timing import Tick
from ragspec.retrieval.encoder import TextEncoder
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.index.writer import IndexWriter
from ragspec.retrieval.retriever import Retriever, build_index
from ragspec.retrieval.search.segment_search import Shard, ShardLike

Answer = tuple[tuple[str, int, str, str], ...]
"""Document id, ordinal, text and exact score of each passage found."""

Expected = dict[Mode, list[Answer]]
OpenShard = Callable[[Store], ShardLike]

NUM_PASSAGES = 10
NUM_COMMITS = 5
_BATCHES = (7, 64)


@dataclass(frozen=True, slots=True)
class IndexLayout:
    """One index, batch size and shard layout. `shard` None: one shard with all segments."""

    name: str
    store: Store
    batch_size: int
    shard: OpenShard | None = None


@dataclass(slots=True)
class IdentityCounts:
    """Counts of queries with the reference's results, by mode and layout."""

    num_queries: int
    same: dict[str, Counter[str]] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """The share of equal results; 1.0 if all are equal."""
        found = [count for ways in self.same.values() for count in ways.values()]
        return sum(found) / (self.num_queries * len(found))

    def counts(self) -> dict[str, dict[str, str]]:
        return {
            mode: {name: f"{count}/{self.num_queries}" for name, count in ways.items()}
            for mode, ways in self.same.items()
        }


class IdentityCheck:
    """Builds the same index in several ways, and sends all of them the same queries."""

    def __init__(self, encoder: TextEncoder, documents: Sequence[Document], queries: Sequence[str]) -> None:
        """One document in eleven is added and deleted again."""
        self._encoder = encoder
        self._kept = [document for number, document in enumerate(documents) if number % 11]
        self._deleted = documents[::11]
        self._queries = queries

    def measure(self, folder: Path, tick: Tick) -> IdentityCounts:
        """Build in `folder`, ask, compare. Raises: SaveError."""
        once, grown, again = folder / "once", folder / "grown", folder / "again"
        tick("identity: indexes", 0, 3)
        build_index(self._kept, once, self._encoder)
        tick("identity: indexes", 1, 3)
        first = Store.open(once)
        identical = IdentityCounts(len(self._queries), {mode: Counter() for mode in MODES})
        truth = {mode: self.answers(IndexLayout("alone", first, 1), mode, tick) for mode in MODES}
        self.compare((IndexLayout(f"batches of {size}", first, size) for size in _BATCHES), truth, identical, tick)
        self._grow(grown)
        tick("identity: indexes", 2, 3)
        self.compare(layouts(Store.open(grown)), truth, identical, tick)
        with IndexWriter(grown) as writer:
            writer.compact()
        build_index(reversed(self._kept), again, self._encoder)
        tick("identity: indexes", 3, 3)
        rebuilt = (
            IndexLayout("after compaction", Store.open(grown), 64),
            IndexLayout("rebuilt in another order", Store.open(again), 64),
        )
        self.compare(rebuilt, truth, identical, tick)
        return identical

    def compare(self, ways: Iterable[IndexLayout], truth: Expected, identical: IdentityCounts, tick: Tick) -> None:
        """Count the queries with the expected results."""
        for way in ways:
            for mode, expected in truth.items():
                found = self.answers(way, mode, tick)
                identical.same[mode][way.name] = sum(a == b for a, b in zip(found, expected, strict=True))

    def answers(self, way: IndexLayout, mode: Mode, tick: Tick) -> list[Answer]:
        retriever = Retriever(self._encoder, way.store, RetrieverConfig(mode=mode), shard=way.shard, follow=False)
        found = answers_of(retriever, self._queries, way.batch_size)
        tick(f"identity: {way.name}", len(found), len(self._queries))
        return found

    def _grow(self, index_dir: Path) -> None:
        """The same documents after several commits, some replaced and others deleted on the way."""
        for number in range(NUM_COMMITS):
            with IndexWriter(index_dir, self._encoder) as writer:
                for document in self._kept[number::NUM_COMMITS]:
                    writer.upsert(document)
                for document in self._kept[number + 1 :: 3 * NUM_COMMITS]:  # until the next commit, with another text
                    if number + 1 < NUM_COMMITS:
                        writer.upsert(replace(document, text=f"Not yet. {document.text}"))
                for document in self._deleted[number::NUM_COMMITS]:
                    writer.upsert(document)
                writer.commit()
        with IndexWriter(index_dir) as writer:
            for document in self._deleted:
                writer.delete(document.id)
            writer.commit()


def layouts(store: Store) -> Iterator[IndexLayout]:
    """The segments in one shard, in a shard each, and in three shards."""
    num_segments = len(store.segments)
    assert num_segments >= NUM_COMMITS, "fewer segments would make every layout the same"
    yield IndexLayout("grown, one shard", store, 64)
    yield IndexLayout("a shard for each segment", store, 64, lambda opened: split_store(opened, num_segments))
    yield IndexLayout("three shards", store, 64, lambda opened: split_store(opened, 3))


def split_store(store: Store, num_shards: int) -> ShardLike:
    """Segments in independent shards, as on several machines."""
    return Shard([Shard.open(store.segments[number::num_shards]) for number in range(num_shards)])


def answers_of(retriever: Retriever, queries: Sequence[str], batch_size: int) -> list[Answer]:
    found: list[Answer] = []
    for start in range(0, len(queries), batch_size):
        found += map(answer, retriever.retrieve(queries[start : start + batch_size], NUM_PASSAGES).passages)
    return found


def answer(passages: Sequence[Passage]) -> Answer:
    """The exact fields of passages that must be equal."""
    return tuple((p.document_id, p.ordinal, p.text, float(p.score).hex()) for p in passages)

"""The index segments that a shard has open: of each generation searched lately, the segments it was asked for.

>>> cache = SegmentCache()
>>> cache.get(segments).shard(segments.names).dense(queries, k=10, scope=SearchScope())
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from ragspec.config import RetrieverConfig
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.rerank import PairScoring
from ragspec.retrieval.search.index_searcher import IndexSearcher
from ragspec.retrieval.search.segment_search import Shard, ShardLike

_GENERATIONS_KEPT = 3
"""The one being opened, the one before it, and one that a reader still uses."""


class SegmentSet(NamedTuple):
    """Segments of one generation. Every call names them, and the shard opens those it has not open."""

    index_dir: str
    pointer: str
    names: tuple[str, ...]
    device: Literal["auto", "cpu", "gpu"] = "cpu"
    gpu_memory_bytes: int | None = None


class OpenGeneration:
    """One generation, whose segments are opened on demand. Safe to call from several threads."""

    def __init__(self, segments: SegmentSet, others: Callable[[], list[Store]]) -> None:
        """`others`: stores whose segments are shared instead of opened again. Raises: StoreError."""
        self._segment_set, self._others = segments, others
        self._manifest = Store.open(segments.index_dir, pointer=segments.pointer, only=frozenset())
        self._segments: dict[str, ShardLike] = {}
        self._views: dict[tuple[RetrieverConfig, tuple[str, ...]], IndexSearcher] = {}
        self._lock = threading.Lock()
        self.stores: list[Store] = []

    def shard(self, names: Sequence[str]) -> Shard:
        """Raises: StoreError, ConfigError."""
        with self._lock:
            if missing := frozenset(names) - self._segments.keys():
                self._open(missing)
            return Shard([self._segments[name] for name in names])

    def view(self, names: tuple[str, ...], config: RetrieverConfig, scoring: PairScoring | None) -> IndexSearcher:
        """Raises: StoreError, ConfigError."""
        shard = self.shard(names)
        with self._lock:
            if (config, names) not in self._views:
                view = IndexSearcher(self._manifest, config, scoring=scoring, shard=lambda _: shard)
                self._views = {(config, names): view}  # Why one: clients hardly ever differ
            return self._views[config, names]

    def _open(self, names: frozenset[str]) -> None:
        index_dir, pointer, _, device, gpu_memory_bytes = self._segment_set
        store = Store.open(index_dir, pointer=pointer, only=names, sharing=self._others())
        self._segments |= Shard.open(store.segments, device, gpu_memory_bytes).part_of
        self.stores.append(store)


class SegmentCache:
    """The generations used last; a segment that two of them share is opened once. Safe to call from several threads."""

    def __init__(self) -> None:
        self.generations: dict[tuple[str, str, str], OpenGeneration] = {}
        """By folder, pointer and device, the least recently used first."""
        self._lock = threading.Lock()

    @property
    def stores(self) -> list[Store]:
        return [store for generation in list(self.generations.values()) for store in generation.stores]

    def get(self, segments: SegmentSet) -> OpenGeneration:
        """The generation of these segments, with all of them open. Raises: StoreError, ConfigError."""
        key = segments.index_dir, segments.pointer, segments.device
        with self._lock:
            generation = self.generations.pop(key, None) or OpenGeneration(
                segments, lambda: [store for store in self.stores if str(store.index_dir) == segments.index_dir]
            )
            self.generations[key] = generation  # Why again: a generation in use becomes the most recent one
            for old in list(self.generations)[:-_GENERATIONS_KEPT]:
                del self.generations[old]
        generation.shard(segments.names)
        return generation

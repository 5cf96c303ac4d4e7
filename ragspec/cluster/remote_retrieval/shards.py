"""Index shards in actors: which shard holds a segment, and the actor that searches the segments each call names.

The index's folder must be readable on every node. Which shards hold a segment follows from names alone (rendezvous hashing), so
every client computes the same placement, and a lost or added shard moves only its own segments. Shards know no clients.

>>> place_segments({"segment-000001": 400}, ["shard-0", "shard-1"], num_replicas=1)
{'segment-000001': ('shard-1', 'shard-0')}
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ragspec.cluster.actors import ORDERED, WorkerActor, ended_if_lost, in_group
from ragspec.cluster.routing.policy import rendezvous_order
from ragspec.config import RetrieverConfig
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.rerank import PairScoring, PairsToScore, Reranker
from ragspec.retrieval.search.index_searcher import IndexSearcher
from ragspec.retrieval.search.segment_search import Device, Lookup, SearchResult, SegmentSearcher, Shard

_GENERATIONS_KEPT = 3
"""The generation being opened, the one before it, and one that a reader still uses."""


def place_segments(sizes: Mapping[str, int], names: Sequence[str], num_replicas: int) -> dict[str, tuple[str, ...]]:
    """For each segment all shards: first the `num_replicas` that hold it, then those to fall back on.

    The first holders of all segments share the passages evenly, and so do the second ones: queries may alternate between them.
    `sizes`: passages of each segment.
    """
    ranked = {segment: rendezvous_order(segment.encode(), names) for segment in sizes}
    holders: dict[str, list[str]] = {segment: [] for segment in sizes}
    share = sum(sizes.values()) / max(1, len(names))
    for _ in range(min(num_replicas, len(names))):
        loads = dict.fromkeys(names, 0)
        for segment in sorted(sizes, key=lambda segment: (-sizes[segment], segment)):
            free = [name for name in ranked[segment] if name not in holders[segment]]
            fitting = [name for name in free if loads[name] + sizes[segment] <= share]
            chosen = fitting[0] if fitting else min(free, key=loads.__getitem__)
            holders[segment].append(chosen)
            loads[chosen] += sizes[segment]
    return {name: (*held, *(each for each in ranked[name] if each not in held)) for name, held in holders.items()}


def rotated(order: Sequence[str], num_replicas: int, turn: int) -> tuple[str, ...]:
    """The same shards, beginning with another holder of the segment."""
    num_replicas = max(1, min(num_replicas, len(order)))
    turn %= num_replicas
    return (*order[turn:num_replicas], *order[:turn], *order[num_replicas:])


class SegmentSet(NamedTuple):
    """Segments of one generation. Every call names them, and the shard opens those it has not open."""

    index_dir: str
    pointer: str
    names: tuple[str, ...]
    device: Device = "cpu"
    gpu_memory_bytes: int | None = None


class OpenGeneration:
    """One generation, whose segments are opened on demand. Safe to call from several threads."""

    def __init__(self, segments: SegmentSet, others: Callable[[], list[Store]]) -> None:
        """`others`: stores whose segments are shared instead of opened again. Raises: StoreError."""
        self._segment_set, self._others = segments, others
        self._manifest = Store.open(segments.index_dir, pointer=segments.pointer, only=frozenset())
        self._parts: dict[str, SegmentSearcher] = {}
        self._searchers: dict[tuple[RetrieverConfig, tuple[str, ...]], IndexSearcher] = {}
        self._lock = threading.Lock()
        self.stores: list[Store] = []

    def parts(self, names: Sequence[str]) -> list[SegmentSearcher]:
        """These segments, opened if they are not open yet. Raises: StoreError, ConfigError."""
        with self._lock:
            if missing := frozenset(names) - self._parts.keys():
                index_dir, pointer, _, device, gpu_memory_bytes = self._segment_set
                store = Store.open(index_dir, pointer=pointer, only=missing, sharing=self._others())
                self._parts |= Shard.open(store.segments, device, gpu_memory_bytes).part_of
                self.stores.append(store)
            return [self._parts[name] for name in names]

    def searcher(self, names: tuple[str, ...], config: RetrieverConfig, scoring: PairScoring | None) -> IndexSearcher:
        """Raises: StoreError, ConfigError."""
        shard = Shard(self.parts(names))
        with self._lock:
            if (config, names) not in self._searchers:
                searcher = IndexSearcher(self._manifest, config, scoring=scoring, shard=shard)
                self._searchers = {(config, names): searcher}  # Why only one: clients hardly ever differ
            return self._searchers[config, names]


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
        generation.parts(segments.names)
        return generation


class ShardActor(WorkerActor):
    """Searches the segments that each call names. Every answer is a list, so that `HedgedCall` can tell its items apart."""

    def __init__(self) -> None:
        self._cache = SegmentCache()
        self._scorings: dict[str, PairScoring] = {}
        self._loading = threading.Lock()

    @in_group(ORDERED)
    def open(self, segments: SegmentSet, reranker: str = "") -> list[None]:
        """Raises: StoreError, ConfigError, ModelError."""
        self._cache.get(segments)
        if reranker:
            self._scoring(reranker)
        return [None] * len(segments.names)

    def search(self, segments: SegmentSet, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """For each segment the answer of this method of its searcher to its own arguments. Raises: StoreError, ConfigError."""
        parts = self._cache.get(segments).parts(segments.names)
        return [getattr(part, method)(*map(_writable, own)) for part, own in zip(parts, arguments, strict=True)]

    def look_up(self, segments: SegmentSet, config: RetrieverConfig, lookup: Lookup) -> list[SearchResult]:
        """The answer of an `IndexSearcher` of these segments, in one call.

        Raises: StoreError, ConfigError, ModelError, InputError.
        """
        scoring = self._scoring(config.reranker) if config.reranker else None
        searcher = self._cache.get(segments).searcher(segments.names, config, scoring)
        return [searcher.search(lookup)]

    def scores(self, reranker: str, asked: PairsToScore) -> list[Any]:
        """Raises: ModelError, ConfigError."""
        return self._scoring(reranker)([asked])

    def _scoring(self, reranker: str) -> PairScoring:
        with self._loading:
            if reranker not in self._scorings:
                loaded = Reranker.load(reranker)

                def scoring(asked: Sequence[PairsToScore]) -> list[Any]:
                    with ended_if_lost(loaded):
                        return [loaded.scores(*each) for each in asked]

                self._scorings = {reranker: scoring}
            return self._scorings[reranker]


def _writable(argument: Any) -> Any:
    """Arrays that Ray delivers are read-only."""
    return np.array(argument) if isinstance(argument, np.ndarray) else argument

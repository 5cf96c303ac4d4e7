"""What a shard has open: of each generation asked for lately, the segments asked for.

>>> opened = OpenGenerations()
>>> opened.get(placement).shard(placement.segments).dense(queries, k=10, scope=Scope())
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from ragspec.config import RetrieverConfig
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.rerank import PairScoring
from ragspec.retrieval.search.index_searcher import IndexSearcher
from ragspec.retrieval.search.segment_search import SegmentSearcher, Shard

_GENERATIONS_KEPT = 3
"""One that is being opened, the one before it, and one that somebody still reads."""


class Placement(NamedTuple):
    """Segments of one generation to be searched. Sent with every call: whoever gets it opens what it has not."""

    index_dir: str
    pointer: str
    segments: tuple[str, ...]
    device: Literal["auto", "cpu", "gpu"] = "cpu"


class OpenGeneration:
    """One generation, of which segments are opened as they are asked for. Safe to call from several threads."""

    def __init__(self, placement: Placement, others: Callable[[], list[Store]]) -> None:
        """`others`: stores whose segments need not be opened anew. Raises: StoreError."""
        self._where, self._others = placement, others
        self._manifest = Store.open(placement.index_dir, pointer=placement.pointer, only=frozenset())
        self._segments: dict[str, SegmentSearcher] = {}
        self._views: dict[tuple[RetrieverConfig, tuple[str, ...]], IndexSearcher] = {}
        self._lock = threading.Lock()
        self.stores: list[Store] = []

    def shard(self, names: Sequence[str]) -> Shard:
        """Raises: StoreError, ConfigError."""
        with self._lock:
            if wanted := frozenset(names) - self._segments.keys():
                self._open(wanted)
            return Shard.of({name: self._segments[name] for name in names})

    def view(self, names: tuple[str, ...], config: RetrieverConfig, scoring: PairScoring | None) -> IndexSearcher:
        """Raises: StoreError, ConfigError."""
        shard = self.shard(names)
        with self._lock:
            if (config, names) not in self._views:
                view = IndexSearcher(self._manifest, config, scoring=scoring, shard=lambda _: shard)
                self._views = {(config, names): view}  # Why one: those who ask hardly ever differ
            return self._views[config, names]

    def _open(self, names: frozenset[str]) -> None:
        index_dir, pointer, _, device = self._where
        store = Store.open(index_dir, pointer=pointer, only=names, sharing=self._others())
        shard = Shard(store.segments, device)
        shard.load()
        self._segments |= shard.segments
        self.stores.append(store)


class OpenGenerations:
    """The generations asked for last; no segment that two of them have is opened twice. Safe to call from several threads."""

    def __init__(self) -> None:
        self._opened: dict[tuple[str, str, str], OpenGeneration] = {}
        self._lock = threading.Lock()

    @property
    def pointers(self) -> list[str]:
        return [pointer for _, pointer, _ in self._opened]

    @property
    def stores(self) -> list[Store]:
        return [store for generation in list(self._opened.values()) for store in generation.stores]

    def get(self, placement: Placement) -> OpenGeneration:
        """The generation that the placement names, its segments open. Raises: StoreError, ConfigError."""
        asked = placement.index_dir, placement.pointer, placement.device
        with self._lock:
            found = self._opened.pop(asked, None) or OpenGeneration(
                placement, lambda: [store for store in self.stores if str(store.index_dir) == placement.index_dir]
            )
            self._opened[asked] = found  # Why again: to be the last, so that a reader's generation stays while it asks
            for old in list(self._opened)[:-_GENERATIONS_KEPT]:
                del self._opened[old]
        found.shard(placement.segments)
        return found

"""An index searched by several actors, each holding some of its segments: the same hits and scores as in one process.

>>> shards = RayShards(num_actors=4)  # on a cluster, the index's folder must be readable on every node
>>> Retriever(encoder, Store.open("index"), shard=shards.opened)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import ray

from ragspec.cluster.calls import MAX_RETRIES, results
from ragspec.cluster.pool import cpus_per_worker
from ragspec.core import Passage
from ragspec.retrieval.encoder import FloatArray
from ragspec.retrieval.search import Hit, Scope, Shard, ShardLike, gathered, merged, total
from ragspec.retrieval.sparse import SparseQuery, TermStatistics
from ragspec.retrieval.store import Store

S = TypeVar("S")

_GENERATIONS_KEPT = 2
_WHAT = "a shard of the index"


class Placement(NamedTuple):
    """The segments of one generation that one actor searches. Sent with every call: a restarted actor opens them again."""

    index_dir: str
    pointer: str
    segments: tuple[str, ...]


class RayShards:
    """The actors. They outlive generations: a new one is spread over them when its first query comes."""

    def __init__(self, num_actors: int) -> None:
        """Needs Ray to be initialised."""
        options = {"num_cpus": cpus_per_worker(num_actors), "max_restarts": -1, "max_task_retries": MAX_RETRIES}
        actor: Any = ray.remote(_ShardActor)
        self._actors = [actor.options(**options).remote() for _ in range(num_actors)]

    def opened(self, store: Store) -> ShardLike:
        """The generation of `store`, its largest segments spread first, each to the actor with the fewest passages."""
        placed: list[list[str]] = [[] for _ in self._actors]
        sizes = [0] * len(self._actors)
        for record in sorted(store.manifest.segments, key=lambda r: (-r.num_live_passages, r.number)):
            least = sizes.index(min(sizes))
            placed[least].append(record.name)
            sizes[least] += record.num_live_passages
        parts = [
            (actor, Placement(str(store.index_dir.resolve()), store.pointer, tuple(names)))
            for actor, names in zip(self._actors, placed, strict=True)
            if names
        ]
        view = _SpreadShard(parts)
        view.ask_all("load")
        return view


class _SpreadShard:
    def __init__(self, parts: Sequence[tuple[Any, Placement]]) -> None:
        self._parts = parts

    @property
    def segment_names(self) -> frozenset[str]:
        return frozenset(name for _, placement in self._parts for name in placement.segments)

    def dense(self, queries: FloatArray, k: int, scope: Scope) -> list[list[Hit]]:
        return merged(self.ask_all("dense", queries, k, scope), len(queries), k)

    def statistics(self, terms: Sequence[str], tenant: str) -> TermStatistics:
        return total(self.ask_all("statistics", terms, tenant))

    def sparse(self, queries: Sequence[SparseQuery], k: int, scope: Scope) -> list[list[Hit]]:
        return merged(self.ask_all("sparse", queries, k, scope), len(queries), k)

    def passages(self, hits: Sequence[Hit]) -> list[Passage]:
        return self._ask_owners("passages", hits)

    def vectors(self, hits: Sequence[Hit]) -> list[FloatArray]:
        return self._ask_owners("vectors", hits)

    def ask_all(self, method: str, *arguments: Any) -> list[Any]:
        """The answers of all actors, which work at the same time."""
        return results([actor.call.remote(placement, method, *arguments) for actor, placement in self._parts], _WHAT)

    def _ask_owners(self, method: str, hits: Sequence[Hit]) -> list[Any]:
        asked = [
            (actor, placement, own)
            for actor, placement in self._parts
            if (own := [hit for hit in hits if hit.segment in placement.segments])
        ]
        answers = results([actor.call.remote(placement, method, own) for actor, placement, own in asked], _WHAT)
        return gathered(hits, [own for _, _, own in asked], answers)


class _ShardActor:
    def __init__(self) -> None:
        self.opened = OpenGenerations(_loaded)

    def call(self, placement: Placement, method: str, *arguments: Any) -> Any:
        index_dir, pointer, segments = placement
        shard = self.opened.get(index_dir, pointer, frozenset(segments))
        return None if method == "load" else getattr(shard, method)(*arguments)


def _loaded(store: Store) -> Shard:
    shard = Shard(store.segments)
    shard.load()
    return shard


class OpenGenerations(Generic[S]):
    """The two generations asked for last, each with what searches it; no segment that both have is opened twice."""

    def __init__(self, searching: Callable[[Store], S]) -> None:
        self._searching = searching
        self._opened: dict[tuple[str, str, frozenset[str] | None], tuple[Store, S]] = {}

    @property
    def stores(self) -> list[Store]:
        return [store for store, _ in self._opened.values()]

    def get(self, index_dir: str, pointer: str, only: frozenset[str] | None = None) -> S:
        """What searches all segments of the generation that `pointer` names, or those of `only`. Raises: StoreError."""
        asked = index_dir, pointer, only
        found = self._opened.get(asked) or self._open(*asked)
        self._opened.pop(asked, None)  # Why: to be the last again, so that a reader's generation stays while it asks
        for old in list(self._opened)[: 1 - _GENERATIONS_KEPT]:
            del self._opened[old]
        self._opened[asked] = found
        return found[1]

    def _open(self, index_dir: str, pointer: str, only: frozenset[str] | None) -> tuple[Store, S]:
        sharing = [store for store in self.stores if str(store.index_dir) == index_dir]
        store = Store.open(index_dir, pointer=pointer, only=only, sharing=sharing)
        return store, self._searching(store)

"""An index searched by several actors, each holding some of its segments: the same hits and scores as in one process.

>>> shards = RayShards(num_actors=4)  # on a cluster, the index's folder must be readable on every node
>>> Retriever(encoder, Store.open("index"), shard=shards.opened)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from ragspec.cluster.pool import cpus_per_worker
from ragspec.core import Passage
from ragspec.errors import EngineError, RagspecError
from ragspec.retrieval.encoder import FloatArray
from ragspec.retrieval.search import Hit, Scope, Shard, ShardLike, merged, total
from ragspec.retrieval.sparse import SparseQuery, TermStatistics
from ragspec.retrieval.store import Store

_GENERATIONS_KEPT = 2
_MAX_RETRIES = 3


class Placement(NamedTuple):
    """The segments of one generation that one actor searches. Sent with every call: a restarted actor opens them again."""

    index_dir: str
    pointer: str
    segments: tuple[str, ...]


class RayShards:
    """The actors. They outlive generations: a new one is spread over them when its first query comes."""

    def __init__(self, num_actors: int) -> None:
        """Needs Ray to be initialised."""
        options = {"num_cpus": cpus_per_worker(num_actors), "max_restarts": -1, "max_task_retries": _MAX_RETRIES}
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
        own = [[hit for hit in hits if hit.segment in placement.segments] for _, placement in self._parts]
        calls = [
            actor.call.remote(placement, "passages", some)
            for (actor, placement), some in zip(self._parts, own, strict=True)
            if some
        ]
        found = dict(
            zip((hit for some in own for hit in some), (p for part in _results(calls) for p in part), strict=True)
        )
        return [found[hit] for hit in hits]

    def ask_all(self, method: str, *arguments: Any) -> list[Any]:
        """The answers of all actors, which work at the same time."""
        return _results([actor.call.remote(placement, method, *arguments) for actor, placement in self._parts])


class _ShardActor:
    def __init__(self) -> None:
        self._opened: dict[Placement, tuple[Store, Shard]] = {}

    def call(self, placement: Placement, method: str, *arguments: Any) -> Any:
        shard = self._shard(placement)
        return None if method == "load" else getattr(shard, method)(*arguments)

    def _shard(self, placement: Placement) -> Shard:
        if placement not in self._opened:
            stores = [store for store, _ in self._opened.values() if str(store.index_dir) == placement.index_dir]
            only = frozenset(placement.segments)
            store = Store.open(placement.index_dir, pointer=placement.pointer, only=only, sharing=stores)
            shard = Shard(store.segments)
            shard.load()
            for old in list(self._opened)[: 1 - _GENERATIONS_KEPT]:
                del self._opened[old]
            self._opened[placement] = store, shard
        return self._opened[placement][1]


def _results(calls: Sequence[Any]) -> list[Any]:
    """Raises: what the actor's code raised, or EngineError if an actor is lost for good."""
    try:
        found: list[Any] = ray.get(list(calls))
    except RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, RagspecError):
            raise cause from None
        raise EngineError(f"a shard of the index is lost: {str(error).strip().splitlines()[-1]}") from error
    return found

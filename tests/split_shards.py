"""Several shards as one, in one process: how a cluster searches them.

>>> one_each(store).dense(queries, k=10, scope=SearchScope())
"""

from collections.abc import Sequence
from typing import Any

from ragspec.retrieval.index.store import Store
from ragspec.retrieval.search.segment_search import SearchHit, Shard, SplitShard


class Shards(SplitShard):
    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = shards

    def ask_all(self, method: str, *arguments: Any) -> list[Any]:
        return [getattr(shard, method)(*arguments) for shard in self.shards]

    def read_hits(self, method: str, hits: Sequence[SearchHit], *arguments: Any) -> list[Any]:
        shard_of = {name: shard for shard in self.shards for name in shard.part_of}
        return [found for hit in hits for found in getattr(shard_of[hit.segment], method)([hit], *arguments)]


def one_each(store: Store) -> Shards:
    """A shard for each segment."""
    return Shards([Shard.open([live]) for live in store.segments])

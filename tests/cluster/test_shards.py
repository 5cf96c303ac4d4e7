"""Where segments lie: evenly, and where they lay before as far as that can be; and a shard that opens no segment twice."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shard_parts import QUERIES, delete, local

from pipelines.benchmarks import iterative
from pipelines.benchmarks.iterative import SlowShardActor
from ragspec.cluster.remote_retrieval import shards
from ragspec.cluster.remote_retrieval.shards import SegmentCache, SegmentSet, ShardActor, place_segments, rotated
from ragspec.config import RetrieverConfig
from ragspec.errors import StoreCorrupt
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.search.segment_search import Lookup

NAMES = [f"shard-{number}" for number in range(5)]
SIZES = st.dictionaries(st.integers(0, 99).map("segment-{:06d}".format), st.integers(1, 10_000), max_size=24)


@given(SIZES, st.integers(1, 5), st.integers(1, 6))
def test_every_segment_has_its_holders_and_everybody_after_them(
    sizes: dict[str, int], num_members: int, num_replicas: int
) -> None:
    """A replica beside its original in one process; a replica that is never turned to."""
    for order in place_segments(sizes, NAMES[:num_members], num_replicas).values():
        assert sorted(order) == NAMES[:num_members]


@pytest.mark.parametrize("turn", [0, 1])
def test_equal_segments_are_shared_evenly(turn: int) -> None:
    """A search that takes as long as the replica to which chance gave most."""
    sizes = {f"segment-{number:06d}": 100 for number in range(20)}
    orders = place_segments(sizes, NAMES, 2)
    loads = Counter(rotated(order, 2, turn)[0] for order in orders.values())
    assert max(loads.values()) <= (4 if turn == 0 else 5)  # the second holder must be another than the first


@given(SIZES)
def test_no_member_holds_much_more_than_its_share(sizes: dict[str, int]) -> None:
    """One segment more than a share at most."""
    loads = Counter[str]()
    for segment, order in place_segments(sizes, NAMES, 1).items():
        loads[order[0]] += sizes[segment]
    assert max(loads.values(), default=0) <= sum(sizes.values()) / 5 + max(sizes.values(), default=0)


def test_what_is_lost_moves_only_what_it_held() -> None:
    """An index opened anew everywhere because one process died."""
    sizes = {f"segment-{number:06d}": 100 for number in range(20)}
    orders = place_segments(sizes, NAMES, 2)
    after = {segment: next(name for name in order if name != "shard-2") for segment, order in orders.items()}
    moved = [segment for segment, order in orders.items() if order[0] != after[segment]]
    assert moved and all(orders[segment][0] == "shard-2" for segment in moved)
    assert len({after[segment] for segment in moved}) > 1  # and not all to one neighbour


def test_a_new_segment_leaves_the_others_where_they_are() -> None:
    """Gigabytes opened elsewhere for every commit."""
    sizes = {f"segment-{number:06d}": 1000 - number for number in range(20)}
    before, after = place_segments(sizes, NAMES, 2), place_segments(sizes | {"segment-000020": 3}, NAMES, 2)
    kept = [segment for segment in sizes if before[segment][0] == after[segment][0]]
    assert len(kept) >= 18


def test_turns_go_round_the_holders_only() -> None:
    """Queries that open segments where nobody placed them."""
    assert [rotated("abcd", 2, turn) for turn in range(3)] == [tuple("abcd"), tuple("bacd"), tuple("abcd")]
    assert rotated((), 2, 1) == () and rotated("a", 3, 2) == ("a",)


def segments_of(store: Store) -> SegmentSet:
    return SegmentSet(str(store.index_dir), store.pointer, tuple(live.segment.name for live in store.segments))


def test_a_shard_keeps_three_generations_and_opens_no_segment_twice(index_dir: Path) -> None:
    """A gigabyte hashed and packed again for every deleted document; generations that are kept until the memory is full."""
    opened, seen = SegmentCache(), []
    for number in range(5):
        store = Store.open(index_dir)
        opened.get(segments_of(store))
        seen.append({live.segment.name: live.segment for live in opened.stores[-1].segments})
        delete(index_dir, f"d{number + 20}")
    assert all(each == seen[0] for each in seen) and len(opened.generations) == 3


def test_segments_are_opened_as_they_are_asked_for(index_dir: Path) -> None:
    """Every shard holds the whole index in memory, or opens all of it again for one more segment."""
    opened, (pointer, names) = SegmentCache(), segments_of(Store.open(index_dir))[1:3]
    parts = [SegmentSet(str(index_dir), pointer, some) for some in (names[:2], names[1:3], names[:1])]
    for part, expected in zip(parts, (2, 3, 3), strict=True):
        assert len(opened.get(part).parts(part.names)) == len(part.names)
        assert sum(len(store.segments) for store in opened.stores) == expected
    with ThreadPoolExecutor(8) as threads:  # whole, at once
        shards = list(threads.map(lambda _: opened.get(parts[0]._replace(names=names)), range(8)))
    assert all(each is shards[0] for each in shards)
    assert sum(len(store.segments) for store in opened.stores) == len(names)


def test_a_generation_in_use_stays_open_while_others_come_and_go(index_dir: Path) -> None:
    """A reader that loses its generation, of which the files are gone, to one that another reader asked for before it."""
    opened, first = SegmentCache(), segments_of(Store.open(index_dir))
    latest = []
    for number in range(5):
        latest.append(segments_of(Store.open(index_dir)))
        opened.get(latest[-1])
        assert len(opened.get(first).parts(first.names)) == len(first.names)
        delete(index_dir, f"d{number + 20}")
    assert [pointer for _, pointer, _ in opened.generations] == [latest[3].pointer, latest[4].pointer, first.pointer]
    with pytest.raises(StoreCorrupt):
        opened.get(latest[1])
    assert len(opened.generations) == 3


def test_the_service_time_is_that_of_a_call(index_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service time for every query of a batch, under which batching a verification could not pay."""
    slept: list[float] = []
    monkeypatch.setattr(iterative.time, "sleep", slept.append)
    actor, config = SlowShardActor(), RetrieverConfig()
    actor.slow_down(0.25)
    queries = local(index_dir).encode(QUERIES)
    for some in (queries, queries[:1]):
        (found,) = actor.look_up(segments_of(Store.open(index_dir)), config, Lookup(some, 2))
        assert len(found.passages) == len(some)
    assert slept == [0.25, 0.25]


def test_a_reranker_is_loaded_once(index_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of loading for every generation, or passages that are not reranked where the index is elsewhere."""
    loaded: list[str] = []

    class Backwards:
        def scores(self, query: str, texts: list[str]) -> Any:
            return np.arange(len(texts), dtype=np.float64)

    monkeypatch.setattr(shards.Reranker, "load", lambda path: loaded.append(path) or Backwards())
    actor, config = ShardActor(), RetrieverConfig(reranker="some/model")
    queries, plain = local(index_dir).encode(QUERIES), local(index_dir)
    for number in (20, 21):
        (found,) = actor.look_up(segments_of(Store.open(index_dir)), config, Lookup(queries, 3))
        expected = [[p.id for p in some[::-1][:3]] for some in plain.search(queries, 32).passages]
        assert [[p.id for p in some] for some in found.passages] == expected
        delete(index_dir, f"d{number}")
    assert loaded == ["some/model"]

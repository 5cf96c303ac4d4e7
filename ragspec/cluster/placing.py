"""Which members of a deployment hold which segments of an index: the same answer for everybody who asks.

A segment's members are ranked by a hash of both names (rendezvous hashing), so what is lost or added moves only what it holds;
a member that has its share already is passed over. No state: equal sizes and names give equal places.

>>> places({"segment-000001": 900, "segment-000002": 100}, ["shard-0", "shard-1", "shard-2"], num_replicas=2)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence


def places(sizes: Mapping[str, int], names: Sequence[str], num_replicas: int) -> dict[str, tuple[str, ...]]:
    """For each segment all members: first the `num_replicas` that hold it, then those to turn to when these are gone.

    The first members of all segments share the passages evenly, and so do the second ones: queries may take turns.
    `sizes`: passages of each segment.
    """
    ranked = {segment: sorted(names, key=lambda name: _rank(segment, name)) for segment in sizes}
    holders: dict[str, list[str]] = {segment: [] for segment in sizes}
    for _ in range(min(num_replicas, len(names))):
        _place_once(sizes, ranked, holders)
    return {
        segment: (*held, *(name for name in ranked[segment] if name not in held)) for segment, held in holders.items()
    }


def in_turn(order: Sequence[str], num_replicas: int, turn: int) -> tuple[str, ...]:
    """The same members, beginning with another one of those that hold the segment."""
    num_replicas = max(1, min(num_replicas, len(order)))
    turn %= num_replicas
    return (*order[turn:num_replicas], *order[:turn], *order[num_replicas:])


def _place_once(
    sizes: Mapping[str, int], ranked: Mapping[str, Sequence[str]], holders: Mapping[str, list[str]]
) -> None:
    """One more member for every segment: the first in its ranking that has room, else the one with the fewest passages."""
    loads = dict.fromkeys(next(iter(ranked.values()), ()), 0)
    share = sum(sizes.values()) / max(1, len(loads))
    for segment in sorted(sizes, key=lambda segment: (-sizes[segment], segment)):
        free = [name for name in ranked[segment] if name not in holders[segment]]
        fitting = [name for name in free if loads[name] + sizes[segment] <= share]
        chosen = fitting[0] if fitting else min(free, key=loads.__getitem__)
        holders[segment].append(chosen)
        loads[chosen] += sizes[segment]


def _rank(segment: str, name: str) -> bytes:
    return hashlib.blake2b(f"{segment}\n{name}".encode(), digest_size=16).digest()

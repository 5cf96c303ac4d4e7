"""Like requests go to one replica, tenants apart; replicas that come and go move only their share."""

import random
from collections import Counter

import pytest

from infra.simulate_scaling import Costs, Load, policies, shards_for, simulate
from ragspec.cluster.routing.policy import affinity_key, choose_replica, rendezvous_order
from ragspec.core import Request

NAMES = [f"engine-{i}" for i in range(5)]
KEYS = [affinity_key(Request("r", (1,), affinity=f"document {i}")) or b"" for i in range(2000)]


def ask(affinity: str = "", salt: str = "") -> Request:
    return Request("r", (1, 2, 3), salt=salt, affinity=affinity)


def test_tenants_never_share_a_key() -> None:
    """Two tenants met on one replica by what they ask about, which one could measure; or one key was made of two parts."""
    requests = [
        ask(affinity, salt)
        for affinity, salt in [("doc", "a"), ("doc", "b"), ("doc", ""), ("adoc", ""), ("oc", "ad"), ("do", "ca")]
    ]
    assert len({affinity_key(request) for request in requests}) == len(requests)
    assert affinity_key(ask(salt="a")) is None


def test_keys_are_spread_evenly_and_always_alike() -> None:
    """A hash that depends on the process, or that favours a replica."""
    firsts = Counter(rendezvous_order(key, NAMES)[0] for key in KEYS)
    assert min(firsts.values()) > 0.8 * len(KEYS) / len(NAMES)
    assert rendezvous_order(KEYS[0], NAMES) == rendezvous_order(KEYS[0], reversed(NAMES))
    assert [NAMES.index(rendezvous_order(key, NAMES)[0]) for key in KEYS[:5]] == [4, 4, 3, 0, 2]


def test_a_replica_more_or_less_moves_only_its_share() -> None:
    """Every key moved when one replica died: all caches were cold at once."""
    before = {key: rendezvous_order(key, NAMES)[0] for key in KEYS}
    after = {key: rendezvous_order(key, NAMES[:-1])[0] for key in KEYS}
    moved = [key for key in KEYS if before[key] != after[key]]
    assert {before[key] for key in moved} == {NAMES[-1]}
    assert len(moved) == sum(first == NAMES[-1] for first in before.values())
    assert len({after[key] for key in moved}) == len(NAMES) - 1, "the lost replica's keys all went to one other"


@pytest.mark.parametrize("load_factor", [1.0, 1.25, 2.0])
def test_no_replica_gets_more_than_its_share_of_one_hot_key(load_factor: float) -> None:
    """All requests about one document waited at one replica while the others were idle."""
    loads = dict.fromkeys(NAMES, 0)
    for number in range(1, 201):
        name = choose_replica(KEYS[0], loads, load_factor=load_factor)
        assert name is not None
        loads[name] += 1
        assert max(loads.values()) <= load_factor * number / len(NAMES) + 1
    favourite = rendezvous_order(KEYS[0], NAMES)
    assert [loads[name] for name in favourite] == sorted(loads.values(), reverse=True)


def test_without_a_key_the_least_loaded_is_taken() -> None:
    """Requests that belong nowhere all went to the first replica."""
    assert choose_replica(None, {"a": 2, "b": 1, "c": 3}, load_factor=1.25) == "b"
    assert choose_replica(None, {"b": 1, "a": 1}, load_factor=1.25) == "a"


def test_a_full_replica_takes_nothing_more() -> None:
    """The bound of running requests was passed for a favourite key."""
    favourite, second = rendezvous_order(KEYS[0], ["a", "b"])
    loads = {favourite: 4, second: 9}
    assert choose_replica(KEYS[0], loads, load_factor=9.0, max_load=5) == favourite
    assert choose_replica(KEYS[0], loads, load_factor=9.0, max_load=4) is None
    assert choose_replica(KEYS[0], {favourite: 4, second: 1}, load_factor=9.0, max_load=4) == second
    assert choose_replica(None, {}, load_factor=1.0) is None


def test_affine_routing_keeps_caches_warm_where_others_do_not() -> None:
    """A simulation that loses requests, or in which the rule that the router follows is no better than chance."""
    load = Load(num_documents_a_replica=60, cached_documents=12, requests_a_replica=80)
    found = {name: simulate(12, choose, Costs(), load) for name, choose in policies(random.Random(1)).items()}
    assert found["affine"]["hits"] > 1.3 * max(found["random"]["hits"], found["least loaded"]["hits"])
    assert found["affine"]["requests_per_s"] > found["random"]["requests_per_s"]
    assert found["least loaded"]["first_p99_s"] < found["random"]["first_p99_s"]
    one = [simulate(1, choose, Costs(), load) for choose in policies(random.Random(1)).values()]
    assert one[0] == one[1] == one[2], "with one replica there is nothing to choose"
    assert shards_for(1, 1.0, Costs()) == 1 and shards_for(10**9, 0.1, Costs()) == 831

"""Caches are emptied for whoever they belong to; one tenant's many names, items or rows cost no other its own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.tenants import FairQueue, TenantCaches, cache_salt_of, fair_shares, tenant_of


def test_a_tenant_with_many_names_empties_its_own_caches_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant that sends a new name with every request emptied everybody's caches, and could tell by the time."""
    monkeypatch.setattr("ragspec.tenants._MAX_SALTS", 8)
    purged: list[str] = []
    salts = TenantCaches(purged.append)
    for salt in ("", "x"):
        salts.note(cache_salt_of("ann", salt))
    for number in range(20):
        salts.note(cache_salt_of("bob", str(number)))
    assert purged == [cache_salt_of("bob", str(number)) for number in range(14)]
    salts.note(cache_salt_of("bob", "14"))  # known, and used last now
    salts.note(cache_salt_of("bob", "new"))
    assert purged[14:] == [cache_salt_of("bob", "15")]


def test_a_tenants_caches_are_emptied_and_no_others() -> None:
    """A deleted document stayed in a cache, or a deletion emptied everybody's."""
    purged: list[str] = []
    salts = TenantCaches(purged.append)
    for tenant, salt in (("ann", ""), ("ann", "x"), ("bob", "x"), ("ann", "x")):
        salts.note(cache_salt_of(tenant, salt))
    salts.purge("ann")
    assert sorted(purged) == sorted(["ann", cache_salt_of("ann", "x")])
    purged.clear()
    salts.purge("")
    assert set(purged) == {"", "ann", cache_salt_of("ann", "x"), cache_salt_of("bob", "x")}


def test_who_asked_longest_ago_is_forgotten_among_equals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant that came back was forgotten at once, and its caches outlived what was deleted."""
    monkeypatch.setattr("ragspec.tenants._MAX_SALTS", 3)
    purged: list[str] = []
    salts = TenantCaches(purged.append)
    for tenant in ("a", "b", "c", "d", "a", "e"):
        salts.note(tenant)
    assert purged == ["a", "b", "c"]


def test_a_tenants_own_cache_is_not_emptied_for_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had asked once without a name, and thousands of named caches went with that one."""
    monkeypatch.setattr("ragspec.tenants._MAX_SALTS", 3)
    purged: list[str] = []
    salts = TenantCaches(purged.append)
    salts.note("acme")
    for name in "xyz":
        salts.note(cache_salt_of("acme", name))
    assert purged == [cache_salt_of("acme", "x")]


def served(queue: FairQueue[str]) -> list[str]:
    order = []
    while queue:
        order.append(queue.heads()[0])
        queue.take(order[-1])
    return order


def test_tenants_take_turns() -> None:
    """One queue for all: whoever fills it first is served first, however much it is."""
    queue = FairQueue[str](lambda item: item[0])
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        queue.append(item)
    assert (len(queue), list(queue), queue.of("a")[1]) == (6, ["a1", "a2", "a3", "b1", "b2", "c1"], "a2")
    assert served(queue) == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert (len(queue), bool(queue), len(queue.of("a"))) == (0, False, 0)


def test_an_item_that_comes_back_is_the_first_of_its_tenant() -> None:
    """A preempted request waits behind its tenant's new ones, or its tenant loses its turn because a client left."""
    queue = FairQueue[str](lambda item: item[0])
    for item in ("a1", "a2", "b1"):
        queue.append(item)
    queue.take("a1")
    queue.appendleft("a1")
    queue.remove("a2")
    assert served(queue) == ["b1", "a1"]
    with pytest.raises(ValueError):
        queue.remove("a1")


def test_the_tenant_of_a_part_is_the_tenant() -> None:
    """A new name with every request makes a tenant many."""
    assert tenant_of(cache_salt_of("ann", "x")) == tenant_of(cache_salt_of("ann", "")) == "ann"


@given(st.dictionaries(st.text(max_size=2), st.integers(0, 50), max_size=8), st.integers(0, 200))
def test_shares_are_fair(demands: dict[str, int], total: int) -> None:
    """Rows are left over, given twice, or given to one tenant while another that asked for them has fewer."""
    shares = fair_shares(demands, total)
    assert sum(shares.values()) == min(total, sum(demands.values()))
    assert all(0 <= shares[tenant] <= demands[tenant] for tenant in demands)
    most = max(shares.values(), default=0)
    assert all(shares[tenant] >= most - 1 for tenant in demands if shares[tenant] < demands[tenant])

"""Caches are emptied for whoever they belong to, and one tenant's many names cost no other its own."""

from __future__ import annotations

import pytest

from ragspec.rag.cache_salts import TenantCaches, cache_salt_of


def test_a_tenant_with_many_names_empties_its_own_caches_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant that sends a new name with every request emptied everybody's caches, and could tell by the time."""
    monkeypatch.setattr("ragspec.rag.cache_salts._MAX_SALTS", 8)
    purged: list[str] = []
    salts = TenantCaches(purged.append)
    for salt in ("", "x"):
        salts.note("ann", cache_salt_of("ann", salt))
    for number in range(20):
        salts.note("bob", cache_salt_of("bob", str(number)))
    assert purged == [cache_salt_of("bob", str(number)) for number in range(14)]
    salts.note("bob", cache_salt_of("bob", "14"))  # known, and used last now
    salts.note("bob", cache_salt_of("bob", "new"))
    assert purged[14:] == [cache_salt_of("bob", "15")]


def test_a_tenants_caches_are_emptied_and_no_others() -> None:
    """A deleted document stayed in a cache, or a deletion emptied everybody's."""
    purged: list[str] = []
    salts = TenantCaches(purged.append)
    for tenant, salt in (("ann", ""), ("ann", "x"), ("bob", "x"), ("ann", "x")):
        salts.note(tenant, cache_salt_of(tenant, salt))
    salts.purge("ann")
    assert sorted(purged) == sorted(["ann", cache_salt_of("ann", "x")])
    purged.clear()
    salts.purge("")
    assert set(purged) == {"", "ann", cache_salt_of("ann", "x"), cache_salt_of("bob", "x")}


def test_who_asked_longest_ago_is_forgotten_among_equals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant that came back was forgotten at once, and its caches outlived what was deleted."""
    monkeypatch.setattr("ragspec.rag.cache_salts._MAX_SALTS", 3)
    purged: list[str] = []
    salts = TenantCaches(purged.append)
    for tenant in ("a", "b", "c", "d", "a", "e"):
        salts.note(tenant, tenant)
    assert purged == ["a", "b", "c"]


def test_a_tenants_own_cache_is_not_emptied_for_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had asked once without a name, and thousands of named caches went with that one."""
    monkeypatch.setattr("ragspec.rag.cache_salts._MAX_SALTS", 3)
    purged: list[str] = []
    salts = TenantCaches(purged.append)
    salts.note("acme", "acme")
    for name in "xyz":
        salts.note("acme", cache_salt_of("acme", name))
    assert purged == [cache_salt_of("acme", "x")]

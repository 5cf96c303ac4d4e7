"""What separates the caches of tenants, and which of them a tenant has."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

_MOST = 4096
"""Caches that are known by name at once; those of the one used longest ago are emptied then."""


def salt_of(tenant: str, cache_salt: str) -> str:
    """What separates a request's caches from others': its tenant's own, or a part of them."""
    return f"{tenant}\0{cache_salt}" if cache_salt else tenant


class Salts:
    """Remembers under which salts a tenant asked. `purge` empties the caches of one. Safe to call from several threads."""

    def __init__(self, purge: Callable[[str], None]) -> None:
        self._purge, self._lock = purge, threading.Lock()
        self._owners: OrderedDict[str, str] = OrderedDict()

    def note(self, tenant: str, salt: str) -> None:
        with self._lock:
            self._owners[salt] = tenant
            self._owners.move_to_end(salt)
            oldest = self._owners.popitem(last=False)[0] if len(self._owners) > _MOST else None
        if oldest is not None:
            self._purge(oldest)

    def purge(self, tenant: str) -> None:
        """Empty all caches of a tenant; those of every tenant if it is none, whose documents everybody may read."""
        with self._lock:
            salts = [salt for salt, owner in self._owners.items() if not tenant or owner == tenant]
        for salt in dict.fromkeys([tenant, *salts]):
            self._purge(salt)

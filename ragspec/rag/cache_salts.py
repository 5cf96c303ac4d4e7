"""Cache salts separate the caches of tenants, and the salts of a tenant are remembered so that its caches can be purged."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

_MAX_SALTS = 4096
"""Salts remembered over all tenants. Beyond it, the least recently used salt of the tenant with most salts is purged."""


def cache_salt_of(tenant: str, cache_salt: str) -> str:
    """The salt of a request's caches: the tenant's own, or a part of it named by the client."""
    return f"{tenant}\0{cache_salt}" if cache_salt else tenant


class TenantCaches:
    """Remembers the salts that each tenant used. `purge` empties the caches of one salt. Safe to call from several threads."""

    def __init__(self, purge: Callable[[str], None]) -> None:
        self._purge, self._lock = purge, threading.Lock()
        # salts by tenant; most recently used last, in both dicts
        self._salts: OrderedDict[str, OrderedDict[str, None]] = OrderedDict()
        self._num_known = 0

    def note(self, tenant: str, salt: str) -> None:
        with self._lock:
            own = self._salts.setdefault(tenant, OrderedDict())
            self._num_known += salt not in own
            own[salt] = None
            own.move_to_end(salt)
            self._salts.move_to_end(tenant)
            oldest = self._forget_oldest() if self._num_known > _MAX_SALTS else None
        if oldest is not None:
            self._purge(oldest)

    def _forget_oldest(self) -> str:
        """Why from the tenant with most salts: a tenant with many salts must not cost others their caches."""
        self._num_known -= 1
        tenant = max(self._salts, key=lambda each: len(self._salts[each]))
        own = self._salts[tenant]
        parts = (salt for salt in own if salt != tenant)  # Why: purging the tenant's own salt purges all its parts
        oldest = next(parts, tenant)
        del own[oldest]
        if not own:
            del self._salts[tenant]
        return oldest

    def purge(self, tenant: str) -> None:
        """Empty all caches of a tenant, including its parts in other processes (`ragspec.core.salt_belongs_to`).

        The empty tenant owns the public documents, so purging it empties the caches of every remembered tenant.
        """
        with self._lock:
            salts = [salt for owner, own in self._salts.items() if not tenant or owner == tenant for salt in own]
        for salt in dict.fromkeys([tenant, *salts]):
            self._purge(salt)

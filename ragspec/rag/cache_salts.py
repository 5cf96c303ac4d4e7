"""What separates the caches of tenants, and which of them a tenant has."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

_MAX_SALTS = 4096
"""Caches that are known by name at once. Of the tenant that has most, those used longest ago are emptied then."""


def cache_salt_of(tenant: str, cache_salt: str) -> str:
    """What separates a request's caches from others': its tenant's own, or a part of them."""
    return f"{tenant}\0{cache_salt}" if cache_salt else tenant


class TenantCaches:
    """Remembers under which salts a tenant asked. `purge` empties the caches of one. Safe to call from several threads."""

    def __init__(self, purge: Callable[[str], None]) -> None:
        self._purge, self._lock = purge, threading.Lock()
        # By tenant; in both orders, what was used last comes last.
        self._of: OrderedDict[str, OrderedDict[str, None]] = OrderedDict()
        self._num_known = 0

    def note(self, tenant: str, salt: str) -> None:
        with self._lock:
            own = self._of.setdefault(tenant, OrderedDict())
            self._num_known += salt not in own
            own[salt] = None
            own.move_to_end(salt)
            self._of.move_to_end(tenant)
            oldest = self._forgotten() if self._num_known > _MAX_SALTS else None
        if oldest is not None:
            self._purge(oldest)

    def _forgotten(self) -> str:
        """Of whoever has most, among equals of who asked longest ago: many names of one tenant cost no other its caches."""
        self._num_known -= 1
        tenant = max(self._of, key=lambda each: len(self._of[each]))
        own = self._of[tenant]
        parts = (salt for salt in own if salt != tenant)  # Why: with a tenant's own all parts of it would be emptied
        oldest = next(parts, tenant)
        del own[oldest]
        if not own:
            del self._of[tenant]
        return oldest

    def purge(self, tenant: str) -> None:
        """Empty all caches of a tenant, those too that it used elsewhere (`ragspec.core.salt_belongs_to`); those of every tenant
        known here if it is none, whose documents everybody may read."""
        with self._lock:
            salts = [salt for owner, own in self._of.items() if not tenant or owner == tenant for salt in own]
        for salt in dict.fromkeys([tenant, *salts]):
            self._purge(salt)

"""Tenants kept apart: salts of their caches, and queues in which one tenant's many items do not delay another's.

A tenant's caches have its name as their salt; a part of them, named by a client, has the tenant, NUL and that name.

    >>> queue = FairQueue[Request](lambda request: tenant_of(request.salt))
"""

import itertools
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from ragspec.core import salt_belongs_to

T = TypeVar("T")

_MAX_SALTS = 4096
"""Salts remembered over all tenants. Beyond it, the least recently used salt of the tenant with most salts is purged."""


def cache_salt_of(tenant: str, cache_salt: str) -> str:
    """The salt of a request's caches: the tenant's own, or a part of it named by the client."""
    return f"{tenant}\0{cache_salt}" if cache_salt else tenant


def tenant_of(salt: str) -> str:
    """The tenant of a salt that `cache_salt_of` made."""
    return salt.partition("\0")[0]


def fair_shares(demands: Mapping[str, int], total: int) -> dict[str, int]:
    """Divides `total` among tenants by max-min fairness: no tenant gets more than its demand.

    Of equal demands the first ones get what cannot be divided.
    """
    shares: dict[str, int] = {}
    for number, tenant in enumerate(sorted(demands, key=lambda each: demands[each])):
        shares[tenant] = min(demands[tenant], -(-total // (len(demands) - number)))
        total -= shares[tenant]
    return shares


class FairQueue(Generic[T]):
    """First come, first served within a tenant; tenants take turns. Not thread-safe."""

    def __init__(self, tenant: Callable[[T], str]) -> None:
        self._tenant = tenant
        self._items = OrderedDict[str, deque[T]]()  # no deque is empty; the tenant whose turn is next first

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    def __bool__(self) -> bool:
        return bool(self._items)

    def __iter__(self) -> Iterator[T]:
        """Tenant by tenant."""
        return itertools.chain.from_iterable(self._items.values())

    def of(self, tenant: str) -> Sequence[T]:
        """The tenant's items, first to last."""
        return self._items.get(tenant, ())

    def append(self, item: T) -> None:
        self._items.setdefault(self._tenant(item), deque()).append(item)

    def appendleft(self, item: T) -> None:
        """Puts an item in front of its tenant's others."""
        self._items.setdefault(self._tenant(item), deque()).appendleft(item)

    def heads(self) -> list[T]:
        """The first item of each tenant, in the order of turns."""
        return [items[0] for items in self._items.values()]

    def take(self, item: T) -> None:
        """Removes an item; its tenant's next turn comes after the others'."""
        self.remove(item)
        if (tenant := self._tenant(item)) in self._items:
            self._items.move_to_end(tenant)

    def remove(self, item: T) -> None:
        """Raises: ValueError if the item does not wait."""
        items = self._items.get(tenant := self._tenant(item), deque[T]())
        items.remove(item)
        if not items:
            del self._items[tenant]


class TenantStates(dict[str, T]):
    """A state for each salt, at most `most` states, in the order of their last use.

    Beyond that the tenant with the most states loses its oldest one, so a tenant that opens many costs no other tenant anything
    while there are fewer tenants than states.
    """

    def __init__(self, most: int, make: Callable[[], T]) -> None:
        super().__init__()
        self._most, self._make = most, make

    def used(self, salt: str) -> T:
        """The state of a salt, made if there is none."""
        state = self[salt] = self.pop(salt) if salt in self else self._make()
        self.forget_surplus()
        return state

    def forget_surplus(self) -> str | None:
        """The salt that was forgotten; None where there are few enough. Why parts first: a tenant's own salt stands for all."""
        if len(self) <= self._most:
            return None
        counts = Counter(map(tenant_of, self))
        surplus = max(self, key=lambda each: (counts[tenant_of(each)], each != tenant_of(each)))
        del self[surplus]
        return surplus

    def purge(self, salt: str) -> None:
        """Forget the states of a salt and of its parts."""
        for each in [each for each in self if salt_belongs_to(each, salt)]:
            del self[each]


class TenantCaches:
    """The salts that each tenant used. `purge` empties the caches of one salt. Safe to call from several threads."""

    def __init__(self, purge: Callable[[str], None]) -> None:
        self._purge, self._lock = purge, threading.Lock()
        self._salts = TenantStates[None](_MAX_SALTS, lambda: None)

    def note(self, salt: str) -> None:
        with self._lock:
            self._salts.pop(salt, None)
            self._salts[salt] = None
            oldest = self._salts.forget_surplus()
        if oldest is not None:
            self._purge(oldest)

    def purge(self, tenant: str) -> None:
        """Empty all caches of a tenant, including its parts in other processes (`ragspec.core.salt_belongs_to`).

        The empty tenant owns the public documents, so purging it empties the caches of every remembered tenant.
        """
        with self._lock:
            salts = [salt for salt in self._salts if not tenant or salt_belongs_to(salt, tenant)]
        for salt in dict.fromkeys([tenant, *salts]):
            self._purge(salt)

"""The table of members as the supervisor keeps it, with everybody who waits for its next version."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from ragspec.cluster.directory import Member, Table
from ragspec.errors import EngineError


class Members:
    """Safe to use from several threads. Shown in the order of `names`, once all are in it.

    Why: a supervisor that was started again would else tell its clients that nobody is there, and they would drop everybody.
    Versions begin with the time, so that it does not repeat those that clients have seen already.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)
        self._missing = set(self._names)
        self._changed = threading.Condition()
        self._version = time.time_ns()
        self._members: dict[str, Member] = {}

    def put(self, member: Member) -> None:
        """In place of the member of that name."""
        with self._changed:
            self._missing.discard(member.name)
            self._members[member.name] = member
            self._version += 1
            self._changed.notify_all()

    def table(self, after: int = -1, timeout_s: float = 0.0) -> Table:
        """As `Directory.table`. Raises: EngineError while it is not complete."""
        with self._changed:
            self._changed.wait_for(lambda: self._version > after and not self._missing, timeout_s)
            if self._missing:
                raise EngineError("the supervisor looks for its members")
            return Table(self._version, tuple(self._members[name] for name in self._names))

"""The table of members as the supervisor keeps it, with everybody who waits for its next version."""

from __future__ import annotations

import threading
import time

from ragspec.cluster.directory import Member, Table


class Members:
    """Safe to use from several threads.

    Why versions begin with the time: one that was started again must not repeat those that clients have seen already.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._version = time.time_ns()
        self._members: dict[str, Member] = {}

    def put(self, member: Member) -> None:
        """In place of the member of that name, or behind the others."""
        with self._changed:
            self._members[member.name] = member
            self._version += 1
            self._changed.notify_all()

    def table(self, after: int = -1, timeout_s: float = 0.0) -> Table:
        """As `Directory.table`."""
        with self._changed:
            self._changed.wait_for(lambda: self._version > after, timeout_s)
            return Table(self._version, tuple(self._members.values()))

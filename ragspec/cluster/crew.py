"""The members of one kind as one client sees them: who is there, who is lost, who is in doubt.

Owns no calls (`ragspec.cluster.calls` makes them) and no actors: it tells their directory who is dead or hangs.

>>> crew = Crew(directory, "shard", what="a shard of the index")
>>> crew.live(crew.watch.table)
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable

import ray
from ray.exceptions import RayError

from ragspec.cluster.directory import Directory, Kind, Member, Table
from ragspec.cluster.watching import Watch
from ragspec.errors import RetrievalError

PING_S = 3.0

_log = logging.getLogger(__name__)


class Crew:
    """The members of one kind. Safe to use from several threads."""

    def __init__(
        self, directory: Directory, kind: Kind, what: str, warm: Callable[[Member], None] | None = None
    ) -> None:
        """`what` names one of them in errors. `warm` prepares one that came to life: until it returns, others are preferred."""
        self.kind, self.what = kind, what
        self.watch = Watch(directory)
        self.is_closed = False
        self.turns = itertools.count()
        self._lost: set[tuple[str, int]] = set()
        self._doubted: set[tuple[str, int]] = set()
        self._known: set[tuple[str, int]] = set()
        self._warming: set[tuple[str, int]] = set()
        self._warm = warm
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """Of all members, those that are lost at the moment too: they come back under the same name."""
        return [member.name for member in self.watch.table.members if member.kind == self.kind]

    def close(self) -> None:
        """Calls that run end with a RetrievalError; the actors are others'."""
        self.is_closed = True
        self.watch.close()

    def live(self, table: Table) -> list[Member]:
        """Those that can be expected to answer."""
        gone = self._lost | self._doubted
        here = [member for member in table.of(self.kind) if (member.name, member.epoch) not in gone]
        self._welcome(here)
        return [member for member in here if (member.name, member.epoch) not in self._warming] or here

    def is_lost(self, member: Member) -> bool:
        return (member.name, member.epoch) in self._lost

    def lose(self, member: Member, why: str) -> None:
        """It is asked no more. Its directory is told once."""
        with self._lock:
            if self.is_lost(member):
                return
            self._lost.add((member.name, member.epoch))
        self.watch.report(member.name, member.epoch, why)

    def doubt(self, member: Member) -> None:
        """Ping one that is late; until it answers others are asked, and if it does not, it is lost."""
        with self._lock:
            if (member.name, member.epoch) in self._doubted | self._lost:
                return
            self._doubted.add((member.name, member.epoch))
        threading.Thread(target=self._resolve, args=(member,), name="ragspec-ping", daemon=True).start()

    def check_open(self) -> None:
        """Raises: RetrievalError."""
        if self.is_closed or not ray.is_initialized():
            raise RetrievalError(
                f"{self.what} was closed" if self.is_closed else f"{self.what} is lost: Ray was shut down"
            )

    def _welcome(self, members: list[Member]) -> None:
        with self._lock:
            new = [member for member in members if (member.name, member.epoch) not in self._known]
            keys = {(member.name, member.epoch) for member in new}
            self._known |= keys
            self._warming |= keys if self._warm else set()
        for member in new if self._warm else ():
            threading.Thread(target=self._warm_up, args=(member,), name="ragspec-warm", daemon=True).start()

    def _warm_up(self, member: Member) -> None:
        assert self._warm is not None
        try:
            self._warm(member)
        except (Exception, SystemExit) as error:  # the latter: what Ray raises while it is shut down
            _log.warning("%s could not be prepared: %s", member.name, error)
        with self._lock:
            self._warming.discard((member.name, member.epoch))

    def _resolve(self, member: Member) -> None:
        try:
            self.check_open()
            ray.get(member.actor.ping.remote(), timeout=PING_S)
        except RayError as error:
            self.lose(member, f"it did not answer a ping within {PING_S:g} s ({type(error).__name__})")
        except (Exception, SystemExit):  # Ray is being shut down
            self._lost.add((member.name, member.epoch))
        with self._lock:
            self._doubted.discard((member.name, member.epoch))

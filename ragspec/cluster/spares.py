"""Processes with everything imported, on every node, that take the place of a member that dies.

>>> spares = Spares("ragspec", Warmth(num_per_node=1, modules=("torch",)), keepers, is_calm)
>>> spare = spares.take(node)            # None: there is none, start anew
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import ray

from ragspec.cluster.answers import answers, whatever_happens
from ragspec.cluster.keepers import Keepers, Timing, detached
from ragspec.cluster.ledger import NAMESPACE, Entry, Ledger
from ragspec.cluster.shell import Place, shell_class
from ragspec.errors import EngineError

log = logging.getLogger(__name__)

_GLANCE_S = 1.0


class Warmth(NamedTuple):
    """How many spares a node has, what they import, and whose files they read."""

    num_per_node: int = 0
    modules: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()


class Spare(NamedTuple):
    """`name` is its actor's and its entry's in the ledger, which stays until `Spares.forget`."""

    name: str
    actor: Any
    place: Place


class Spares:
    """Filled up by a thread of its own, while `is_calm`: not at the time in which something else is started."""

    def __init__(
        self, deployment: str, warmth: Warmth, keepers: Keepers, timing: Timing, is_calm: Callable[[], bool]
    ) -> None:
        self._deployment, self._warmth, self._keepers, self._timing = deployment, warmth, keepers, timing
        self._is_calm = is_calm
        self._ledger = Ledger(deployment)
        self._lock = threading.Lock()
        self._warm: list[Spare] = []
        threading.Thread(target=self._run, daemon=True).start()

    def take(self, node: str) -> Spare | None:
        """One that answers; it is the caller's then."""
        while True:
            with self._lock:
                there = [spare for spare in self._warm if spare.place.node == node]
                if not there:
                    return None
                self._warm.remove(there[0])
            if self._answers(there[0], _GLANCE_S):
                return there[0]
            self._end(there[0])

    def forget(self, spare: Spare) -> None:
        """It is somebody else by now."""
        self._ledger.remove(_entry_of(spare.name))

    def _run(self) -> None:
        adopted = False
        while True:
            time.sleep(self._timing.heartbeat_s)
            try:
                if not adopted:
                    self._adopt_all()
                adopted = True
                self._round()
            except Exception as error:  # Why all: a spare is tried again, whatever it was
                log.warning("a spare process: %s", error)

    def _round(self) -> None:
        for spare in list(self._warm):
            if not self._answers(spare, self._timing.hang_s):
                with self._lock:
                    mine = spare in self._warm
                    if mine:
                        self._warm.remove(spare)
                if mine:
                    self._end(spare)
        for node in self._keepers.answering:
            num_there = sum(spare.place.node == node for spare in list(self._warm))
            if num_there < self._warmth.num_per_node and self._is_calm():
                spare = self._started(node)
                with self._lock:
                    self._warm.append(spare)

    def _started(self, node: str) -> Spare:
        """Raises: EngineError."""
        name = f"{self._deployment}/spare-{node[:12]}-{time.time_ns():x}"
        self._ledger.write(_entry_of(name), Entry(0, (name,)))
        actor = shell_class().options(num_cpus=0, **detached(name, node)).remote()
        try:
            (place,) = answers([actor.ping.remote()], self._timing.start_timeout_s, "a spare process")
            self._ledger.write(_entry_of(name), Entry(0, (name,), (place,), live=True))
            warming = actor.warm.remote(self._warmth.modules, self._warmth.folders)
            answers([warming], self._timing.start_timeout_s, "a spare process")
        except EngineError:
            self._ledger.remove(_entry_of(name))
            ray.kill(actor)
            raise
        return Spare(name, actor, place)

    def _adopt_all(self) -> None:
        there = {spare.name for spare in self._warm}
        for name, entry in self._ledger.entries().items():
            if name.startswith("spare-") and not there & set(entry.actors):
                self._adopt(entry)

    def _adopt(self, entry: Entry) -> None:
        """One of an earlier supervisor's; those that do not answer, or were being started when it died, are ended."""
        (name,) = entry.actors
        try:
            actor = ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:  # there is none
            self._ledger.remove(_entry_of(name))
            return
        if not entry.places:
            with whatever_happens():
                ray.kill(actor)
            self._ledger.remove(_entry_of(name))
        elif entry.live and self._answers(spare := Spare(name, actor, entry.places[0]), self._timing.hang_s):
            self._warm.append(spare)
        else:
            self._end(Spare(name, actor, entry.places[0]))

    def _answers(self, spare: Spare, timeout_s: float) -> bool:
        try:
            answers([spare.actor.ping.remote()], timeout_s, "a spare process")
        except EngineError:
            return False
        return True

    def _end(self, spare: Spare) -> None:
        self._keepers.kill([spare.place])
        with whatever_happens():
            ray.kill(spare.actor)
        self.forget(spare)


def _entry_of(name: str) -> str:
    return name.rpartition("/")[2]

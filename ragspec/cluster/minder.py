"""One member in the care of a thread: it is started, asked for signs of life, ended and started again, without end."""

from __future__ import annotations

import logging
import threading
import time
from typing import NamedTuple

from ray.exceptions import RayError

from ragspec.cluster.answers import answers
from ragspec.cluster.directory import Kind, Member, State
from ragspec.cluster.groups import Group
from ragspec.cluster.members import Members
from ragspec.cluster.shell import Handle
from ragspec.errors import EngineError, RagspecError

log = logging.getLogger(__name__)

_PAUSES_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
_LONG_LIFE_S = 60.0
"""A member that lived for so long is started again without a pause."""

_GLANCE_S = 1.0


class MemberStatus(NamedTuple):
    """`load` is the number of requests that an engine has at the moment, None for others; `error`: what was wrong last."""

    name: str
    kind: str
    state: State
    epoch: int
    node: str
    pids: tuple[int, ...]
    fingerprint: str
    load: int | None
    error: str


class Minder:
    """States: starting -> live -> lost -> starting, as the table shows them."""

    def __init__(self, group: Group, members: Members) -> None:
        self._group, self._members = group, members
        self._condemned = (0, "")  # epoch, why
        self._state: State = "starting"
        self.error: Exception | None = None

    @property
    def name(self) -> str:
        return self._group.wanted.name

    @property
    def kind(self) -> Kind:
        return self._group.wanted.kind

    @property
    def node(self) -> str:
        return self._group.node

    @property
    def state(self) -> State:
        return self._state

    def begin(self, heartbeat_s: float) -> None:
        threading.Thread(target=self._run, args=(heartbeat_s,), daemon=True).start()

    def condemn(self, epoch: int, why: str) -> None:
        """Look into it at the next heartbeat, if it still is of that epoch."""
        self._condemned = (epoch, why)

    def status(self) -> MemberStatus:
        group = self._group
        facts = group.facts
        if self._state == "live" and self.kind == "engine":
            try:
                (facts,) = answers([group.actors[0].facts.remote()], _GLANCE_S, self.name)
            except (RagspecError, RayError, IndexError):  # it dies just now
                pass
        return MemberStatus(
            self.name,
            self.kind,
            self._state,
            group.epoch,
            group.node,
            tuple(place.process.pid for place in group.places),
            str(getattr(facts, "fingerprint", "")),
            getattr(facts, "num_running", None),
            " ".join(str(self.error).split()) if self.error else "",
        )

    def _run(self, heartbeat_s: float) -> None:
        num_failed, is_first = 0, True
        while True:
            begin = time.monotonic()
            try:
                if not (is_first and self._group.adopt()):
                    self._publish("starting")
                    self._group.start()
                is_first, begin = False, time.monotonic()
                self._publish("live")
                self.error = EngineError(self._watch(heartbeat_s))
            except Exception as error:  # Why all: whatever it was, it is started again
                is_first, self.error = False, error
            log.warning("%s: %s", self.name, self.error)
            self._publish("lost")
            num_failed = 0 if time.monotonic() - begin > _LONG_LIFE_S else num_failed + 1
            self._end()
            time.sleep(_PAUSES_S[min(num_failed, len(_PAUSES_S)) - 1] if num_failed else 0.0)

    def _end(self) -> None:
        try:
            self._group.end()
        except Exception as error:  # Why all: the thread must live, and the next start ends what is left by name
            log.warning("%s could not be ended: %s", self.name, error)

    def _watch(self, heartbeat_s: float) -> str:
        """Returns when something is wrong: what. A report is looked into: who reports may be the one that is slow."""
        while True:
            (epoch, reported), self._condemned = self._condemned, (0, "")
            if epoch == self._group.epoch and (why := self._group.unfit()):
                return f"{why}; reported: {reported}"
            if why := self._group.unwell():
                return why
            time.sleep(heartbeat_s)

    def _publish(self, state: State) -> None:
        """Why the order: `status` and the spares look at the state, clients at the table."""
        group = self._group
        actor = Handle(group.actors[0]) if state == "live" else None
        epoch = group.epoch + (state == "starting")
        self._state = state
        self._members.put(Member(self.kind, self.name, epoch, state, group.facts, actor, group.node))

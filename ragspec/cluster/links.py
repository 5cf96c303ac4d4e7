"""One replica as a router sees it: a thread that holds the poll and a thread that sends, until either fails.

A link never comes back: what it was is lost then, and a new one may be made to the same replica.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Protocol

from ragspec.cluster.connection import Connect, Connection
from ragspec.cluster.directory import Member
from ragspec.cluster.facts import HostFacts
from ragspec.cluster.routing import RoutingConfig
from ragspec.cluster.streams import Identity
from ragspec.core import Delta, Request
from ragspec.errors import ReplicaLost

log = logging.getLogger(__name__)

P = ParamSpec("P")


Report = Callable[[str, int, str], None]
"""As `Directory.report`, without waiting."""


class Hears(Protocol):
    """Who hears of a link, in the link's threads. After `link_down` it says nothing more."""

    def link_up(self, link: Link) -> None: ...

    def link_said(self, link: Link, deltas: Sequence[Delta]) -> None: ...

    def link_refused(self, link: Link, request: Request, error: Exception) -> None: ...

    def link_down(self, link: Link, why: str, *, forgotten: bool) -> None: ...


class _Verb(enum.Enum):
    SUBMIT, CANCEL, PURGE, STOP = range(4)


_Command = tuple[_Verb, Any]

_LAST_WORDS_S = 1.0
"""So long the thread that sends waits for the one that polls to say what is to be cancelled."""


class _Forgotten(Exception):
    """The replica serves, but knows nothing more of what this client submitted."""


class Link:
    """States: connecting -> up -> down. What is sent while it connects is sent then."""

    def __init__(self, member: Member, report: Report, connect: Connect, config: RoutingConfig, hears: Hears) -> None:
        self.name, self.epoch = member.name, member.epoch
        self.facts: HostFacts = member.facts
        self.identity = Identity(self.facts.fingerprint, self.facts.max_context_tokens)
        self.member, self._report, self._connect = member, report, connect
        self._config, self._hears = config, hears
        self._outbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._down = False
        self._connection: Connection | None = None
        self._sender: threading.Thread | None = None
        self._poller = threading.Thread(target=self._run, daemon=True, name=f"poll-{self.name}")

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.epoch

    def start(self) -> None:
        self._poller.start()

    def send(self, request: Request) -> None:
        self._outbox.put((_Verb.SUBMIT, request))

    def cancel(self, request_id: str) -> None:
        self._outbox.put((_Verb.CANCEL, request_id))

    def purge(self, salt: str) -> None:
        self._outbox.put((_Verb.PURGE, salt))

    def close(self) -> None:
        """Say nothing more; what was sent and cancelled so far still reaches the replica."""
        with self._lock:
            self._down = True
        self._outbox.put((_Verb.STOP, None))

    def join(self, deadline_s: float) -> None:
        """Wait until what was to be sent is sent and no call waits for an answer any more; until then at most (monotonic)."""
        if self._sender is not None:
            self._sender.join(max(0.0, deadline_s - time.monotonic()))
        if self._connection is not None:
            self._connection.close()
        if self._poller is not threading.current_thread():
            self._poller.join(max(0.0, deadline_s - time.monotonic()))

    # -- the thread that polls ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            connection = self._connection = self._connect(self.member)
            session = connection.poll(0.0).session
            sender = threading.Thread(target=self._send_all, args=(connection,), daemon=True, name=f"send-{self.name}")
            sender.start()
            self._sender = sender
            self._say(self._hears.link_up, self)
            while not self._down:
                polled = connection.poll(self._config.poll_s)
                if polled.session != session:
                    raise _Forgotten(f"{self.name} had not heard of its client for too long")
                if polled.busy_s > self._config.step_timeout_s:
                    raise ReplicaLost(f"a step of {self.name} has been running for {polled.busy_s:.1f} s")
                if polled.deltas and not self._down:
                    self._say(self._hears.link_said, self, polled.deltas)
        except Exception as cause:
            self._fail(cause)

    # -- the thread that sends ---------------------------------------------------------------------------------------

    def _send_all(self, connection: Connection) -> None:
        """Why in groups: what has come up while the last call ran needs one call, not one each."""
        unsent: list[_Command] = []
        try:
            while True:
                unsent = self._taken()
                for verb, commands in itertools.groupby(list(unsent), key=lambda command: command[0]):
                    values = [value for _, value in commands]
                    if verb is _Verb.STOP:
                        return
                    self._do(connection, verb, values)
                    del unsent[: len(values)]
        except Exception as cause:
            self._fail(cause)
            self._send_cancels(connection, unsent)

    def _send_cancels(self, connection: Connection, unsent: list[_Command]) -> None:
        """Of what the lost replica was at. Another thread may still be finding that out."""
        connection.close()  # Why: nothing is waited for any more
        with contextlib.suppress(queue.Empty):
            while all(verb is not _Verb.STOP for verb, _ in unsent):
                unsent.append(self._outbox.get(timeout=_LAST_WORDS_S))
        with contextlib.suppress(Exception):
            connection.cancel([value for verb, value in unsent if verb is _Verb.CANCEL])

    def _taken(self) -> list[_Command]:
        """All that waits to be sent; at least one."""
        taken = [self._outbox.get()]
        while not self._outbox.empty():
            taken.append(self._outbox.get())
        return taken

    def _do(self, connection: Connection, verb: _Verb, values: list[Any]) -> None:
        try:
            if verb is _Verb.SUBMIT:
                self._submit(connection, values)
            elif verb is _Verb.CANCEL:
                connection.cancel(values)
            else:
                for salt in values:
                    connection.purge(salt)
        except ReplicaLost:
            raise
        except Exception:
            log.exception("%s could not be told to %s %s", self.name, verb.name.lower(), values)

    def _submit(self, connection: Connection, requests: Sequence[Request]) -> None:
        """One that is refused, or breaks what is to prepare it, must take neither the others nor the replica with it."""
        try:
            connection.submit(requests)
        except ReplicaLost:
            raise
        except Exception as error:
            if len(requests) == 1:
                self._say(self._hears.link_refused, self, requests[0], error)
                return
            for request in requests:
                self._submit(connection, [request])

    def _say(self, tell: Callable[P, None], *arguments: P.args, **options: P.kwargs) -> None:
        """What goes wrong where it is heard is no fault of the replica."""
        try:
            tell(*arguments, **options)
        except Exception:
            log.exception("what %s said was not understood", self.name)

    def _fail(self, cause: Exception) -> None:
        """Once: say that the link is down, and have a replica that is lost replaced."""
        with self._lock:
            if self._down:
                return
            self._down = True
        if self._connection is not None:
            self._connection.close()
        forgotten = isinstance(cause, _Forgotten)
        log.warning("%s (epoch %d) is lost: %s", self.name, self.epoch, cause, exc_info=not _is_expected(cause))
        self._say(self._hears.link_down, self, str(cause), forgotten=forgotten)
        self._outbox.put((_Verb.STOP, None))
        if not forgotten:
            self._report(self.name, self.epoch, str(cause))


def _is_expected(cause: Exception) -> bool:
    return isinstance(cause, ReplicaLost | _Forgotten)

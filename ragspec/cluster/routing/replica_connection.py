"""The connection of a router to one replica: a thread that polls and a thread that sends, until either fails.

A connection that failed never comes back: its attempts are lost, and the router makes a new connection to the replica.
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

from ragspec.cluster.actors import Replica
from ragspec.cluster.engine_host import EngineStatus
from ragspec.cluster.routing.policy import RoutingConfig
from ragspec.cluster.routing.replica_client import Connect, ReplicaClient
from ragspec.cluster.routing.request_state import OutputIdentity
from ragspec.core import Delta, Request
from ragspec.errors import ReplicaLost

log = logging.getLogger(__name__)

P = ParamSpec("P")


class ConnectionListener(Protocol):
    """Called in the connection's threads; nothing is called after `connection_down`."""

    def connection_up(self, connection: ReplicaConnection) -> None: ...

    def connection_received(self, connection: ReplicaConnection, deltas: Sequence[Delta]) -> None: ...

    def connection_refused(self, connection: ReplicaConnection, request: Request, error: Exception) -> None: ...

    def connection_down(self, connection: ReplicaConnection, cause: Exception) -> None: ...


class _Verb(enum.Enum):
    SUBMIT, CANCEL, PURGE, STOP = range(4)


_Command = tuple[_Verb, Any]

_LAST_CANCELS_S = 1.0
"""After a failure, the sender waits this long for the poller to name the attempts to cancel."""


class SessionLost(Exception):
    """The replica serves, but has forgotten this client's requests."""


class ReplicaConnection:
    """States: connecting -> up -> down. Commands given while it connects are sent once it is up.

    `status` and `identity` are set before `connection_up`.
    """

    status: EngineStatus
    identity: OutputIdentity

    def __init__(
        self, replica: Replica, connect: Connect, config: RoutingConfig, listener: ConnectionListener, delay_s: float
    ) -> None:
        """`delay_s`: wait so long before connecting."""
        self.replica, self.name = replica, replica.name
        self._connect, self._config, self._listener = connect, config, listener
        self._delay_s = delay_s
        self._outbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._down = threading.Event()
        self._client: ReplicaClient | None = None
        self._sender: threading.Thread | None = None
        self._poller = threading.Thread(target=self._run, daemon=True, name=f"poll-{self.name}")

    def start(self) -> None:
        self._poller.start()

    def send(self, request: Request) -> None:
        self._outbox.put((_Verb.SUBMIT, request))

    def cancel(self, request_id: str) -> None:
        self._outbox.put((_Verb.CANCEL, request_id))

    def purge(self, salt: str) -> None:
        self._outbox.put((_Verb.PURGE, salt))

    def close(self) -> None:
        """Call the listener no more; commands given so far still reach the replica."""
        with self._lock:
            self._down.set()
        self._outbox.put((_Verb.STOP, None))
        if self._sender is None and self._client is not None:  # it still connects
            self._client.close()

    def join(self, deadline_s: float) -> None:
        """Wait until all commands are sent and no call waits any more, until `deadline_s` (monotonic) at most."""
        if self._sender is not None:
            self._sender.join(max(0.0, deadline_s - time.monotonic()))
        if self._client is not None:
            self._client.close()
        if self._poller is not threading.current_thread():
            self._poller.join(max(0.0, deadline_s - time.monotonic()))

    # -- the polling thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._down.wait(self._delay_s):
                return
            client = self._client = self._connect(self.replica)
            if self._down.is_set():
                return
            self.status = client.wait_until_serving()
            self.identity = OutputIdentity(self.status.fingerprint, self.status.max_context_tokens)
            session = client.poll(0.0).session
            sender = threading.Thread(target=self._send_all, args=(client,), daemon=True, name=f"send-{self.name}")
            sender.start()
            self._sender = sender
            self._tell(self._listener.connection_up, self)
            while not self._down.is_set():
                polled = client.poll(self._config.poll_s)
                if polled.session != session:
                    raise SessionLost(f"{self.name} had not heard of its client for too long")
                if polled.busy_s > self._config.step_timeout_s:
                    raise ReplicaLost(f"a step of {self.name} has been running for {polled.busy_s:.1f} s")
                if polled.deltas and not self._down.is_set():
                    self._tell(self._listener.connection_received, self, polled.deltas)
        except Exception as cause:
            self._fail(cause)

    # -- the sending thread ------------------------------------------------------------------------------------------

    def _send_all(self, client: ReplicaClient) -> None:
        """Sends commands that queued up during the last call in one call, not one by one."""
        unsent: list[_Command] = []
        try:
            while True:
                unsent = self._queued()
                for verb, commands in itertools.groupby(list(unsent), key=lambda command: command[0]):
                    values = [value for _, value in commands]
                    if verb is _Verb.STOP:
                        return
                    self._execute(client, verb, values)
                    del unsent[: len(values)]
        except Exception as cause:
            self._fail(cause)
            self._send_cancels(client, unsent)

    def _send_cancels(self, client: ReplicaClient, unsent: list[_Command]) -> None:
        """Cancel the attempts of a lost replica; the polling thread may still be naming them."""
        client.close()  # Why: `cancel` then does not wait for an answer
        with contextlib.suppress(queue.Empty):
            while all(verb is not _Verb.STOP for verb, _ in unsent):
                unsent.append(self._outbox.get(timeout=_LAST_CANCELS_S))
        with contextlib.suppress(Exception):
            client.cancel([value for verb, value in unsent if verb is _Verb.CANCEL])

    def _queued(self) -> list[_Command]:
        """All queued commands; at least one."""
        commands = [self._outbox.get()]
        while not self._outbox.empty():
            commands.append(self._outbox.get())
        return commands

    def _execute(self, client: ReplicaClient, verb: _Verb, values: list[Any]) -> None:
        try:
            if verb is _Verb.SUBMIT:
                self._submit(client, values)
            elif verb is _Verb.CANCEL:
                client.cancel(values)
            else:
                for salt in values:
                    client.purge(salt)
        except ReplicaLost:
            raise
        except Exception:
            log.exception("%s failed to %s %s", self.name, verb.name.lower(), values)

    def _submit(self, client: ReplicaClient, requests: Sequence[Request]) -> None:
        """If the replica refuses several requests, submits them one by one: only the wrong one is refused."""
        try:
            client.submit(requests)
        except ReplicaLost:
            raise
        except Exception as error:
            if len(requests) == 1:
                self._tell(self._listener.connection_refused, self, requests[0], error)
                return
            for request in requests:
                self._submit(client, [request])

    def _tell(self, method: Callable[P, None], *arguments: P.args, **options: P.kwargs) -> None:
        """An error of the listener is not the replica's fault and does not end the connection."""
        try:
            method(*arguments, **options)
        except Exception:
            log.exception("the listener of %s failed", self.name)

    def _fail(self, cause: Exception) -> None:
        """Tell the listener once."""
        with self._lock:
            if self._down.is_set():
                return
            self._down.set()
        if self._client is not None:
            self._client.close()
        is_expected = isinstance(cause, ReplicaLost | SessionLost)
        log.warning("%s is lost: %s", self.name, cause, exc_info=not is_expected)
        self._tell(self._listener.connection_down, self, cause)
        self._outbox.put((_Verb.STOP, None))

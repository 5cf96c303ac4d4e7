"""Several engine replicas behind one engine client; streams survive the death of any replica.

Each choice's tokens are kept as they are delivered. When a replica is lost, its choices continue on another replica with the same
numerics and the same seed: same tokens, same text, delivered once.

    >>> with Router(deployment.replicas_of("engine"), ray_connect(config), config) as router:
    ...     router.generate([Request("a", prompt_ids, SamplingParams(max_tokens=20))])[0].text

Threads: two a replica (polling and sending), one for timeouts, one that calls the listeners. Listeners may therefore raise,
submit and cancel; a slow listener delays other listeners, but no replica. All threads share the `RequestTracker` under one
lock that nobody holds while waiting.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence

from ragspec.cluster.actors import Replica
from ragspec.cluster.routing.policy import RoutingConfig
from ragspec.cluster.routing.replica_client import Connect, ReplicaGone
from ragspec.cluster.routing.replica_connection import ReplicaConnection, SessionLost
from ragspec.cluster.routing.request_state import Listener, Subscriber, TrackedRequest
from ragspec.cluster.routing.request_tracker import RequestTracker
from ragspec.core import Delta, Request
from ragspec.engine.admission import ModelLimits
from ragspec.engine.client import EngineClient
from ragspec.errors import EngineClosed, ReplicaLost

log = logging.getLogger(__name__)

_TICK_S = 0.25
_ALL_UP_S = 2.0
"""How long a new router waits for its other replicas once one is up."""

_FLUSH_S = 2.0
_MAX_PURGED = 10_000

_Delivery = tuple[TrackedRequest, Subscriber, Delta]


class Router(EngineClient):
    """Use from any thread. A request is known by its id: if it is submitted again with the same content, while it runs or shortly
    after, its deltas are replayed and nothing runs twice. All tenants share the ids: callers that pass on their clients' ids put
    the tenant in front."""

    def __init__(self, replicas: Sequence[Replica], connect: Connect, config: RoutingConfig | None = None) -> None:
        """Waits for a replica to serve. Raises: ReplicaLost if none does for `start_timeout_s`."""
        self._connect = connect
        self._config = config or RoutingConfig()
        self._changed = threading.Condition()
        self._deliveries: queue.SimpleQueue[_Delivery | None] = queue.SimpleQueue()
        self._tracker = RequestTracker(self._config, lambda *delivery: self._deliveries.put(delivery))
        self._connections: dict[str, ReplicaConnection] = {}
        self._purged: deque[str] = deque(maxlen=_MAX_PURGED)
        self._closed = False
        self._latest: ReplicaConnection | None = None
        self._deliverer = threading.Thread(target=self._deliver_all, daemon=True, name="router-deliver")
        self._deliverer.start()
        with self._changed:
            for replica in replicas:
                self._open(replica)
        threading.Thread(target=self._expire, daemon=True, name="router-expire").start()
        atexit.register(self.close)
        with self._changed:
            self._changed.wait_for(lambda: self._latest is not None, self._config.start_timeout_s)
            self._changed.wait_for(lambda: len(self._tracker.connections) == len(replicas), _ALL_UP_S)
        if self._latest is None:
            self.close()
            raise ReplicaLost(f"no engine is live, and none became so within {self._config.start_timeout_s:g} s")

    # -- from any thread ---------------------------------------------------------------------------------------------

    @property
    def fingerprint(self) -> str:
        """The numerics ids of all live replicas; of the last live one while there is none."""
        with self._changed:
            return "+".join(sorted({connection.identity.fingerprint for connection in self._live()}))

    @property
    def max_context_tokens(self) -> int:
        """The smallest context of the live replicas."""
        with self._changed:
            return min(connection.identity.max_context_tokens for connection in self._live())

    def num_heard(self) -> int:
        """A counter that rises while any replica makes progress for this router."""
        with self._changed:
            return self._tracker.num_deltas

    def num_choices(self) -> int:
        """Choices that run on a replica or wait for one."""
        with self._changed:
            return self._tracker.num_choices

    def submit(self, request: Request, listener: Listener) -> None:
        """Queue a request; the listener gets every Delta of every choice once, in a thread of the router.

        Raises: InputError, PromptTooLong, Overloaded, EngineClosed.
        """
        self.submit_all([request], listener)

    def submit_all(self, requests: Sequence[Request], listener: Listener) -> None:
        with self._changed:
            bounds = self._bounds()
        for request in requests:
            bounds.limits(request)
        tracked = [TrackedRequest.of(request, listener, time.monotonic()) for request in requests]
        with self._changed:
            if self._closed:
                raise EngineClosed("the router is closed")
            self._tracker.admit(tracked)

    def cancel(self, request_id: str) -> None:
        with self._changed:
            self._tracker.cancel(request_id)
            self._changed.notify_all()

    def leave(self, request_id: str, listener: Listener) -> None:
        """Unsubscribe; the request goes on while others listen to it."""
        with self._changed:
            self._tracker.unsubscribe(request_id, listener)
            self._changed.notify_all()

    def purge(self, salt: str) -> None:
        """Forget every cached prefix, earlier answer and finished request of one tenant, here and in every replica."""
        with self._changed:
            self._purged.append(salt)
            self._tracker.purge(salt)
            for connection in self._connections.values():
                connection.purge(salt)

    def close(self, drain_s: float = 0.0) -> None:
        """Accept no more requests, wait `drain_s` seconds for running ones, then cancel them. The replicas stay."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._tracker.idle, drain_s)
            self._tracker.cancel_all()
            connections, self._connections = list(self._connections.values()), {}
        self._deliveries.put(None)
        for connection in connections:
            connection.close()
        deadline = time.monotonic() + _FLUSH_S
        for connection in connections:
            connection.join(deadline)
        if threading.current_thread() is not self._deliverer:
            self._deliverer.join(max(0.0, deadline - time.monotonic()))
        atexit.unregister(self.close)

    # -- in the connections' threads ---------------------------------------------------------------------------------

    def connection_up(self, connection: ReplicaConnection) -> None:
        with self._changed:
            if self._connections.get(connection.name) is connection:
                self._latest = connection
                self._tracker.connection_up(connection)
                self._changed.notify_all()

    def connection_received(self, connection: ReplicaConnection, deltas: Sequence[Delta]) -> None:
        with self._changed:
            if self._connections.get(connection.name) is connection:
                self._tracker.receive(connection, deltas)
                self._changed.notify_all()

    def connection_refused(self, connection: ReplicaConnection, request: Request, error: Exception) -> None:
        with self._changed:
            self._tracker.refuse(connection, request.id, error)

    def connection_down(self, connection: ReplicaConnection, cause: Exception) -> None:
        """Connects again, unless the replica is gone for good. Repeats the purges that the replica may have missed."""
        with self._changed:
            if self._connections.get(connection.name) is not connection:
                return
            del self._connections[connection.name]
            self._tracker.connection_down(connection)
            if not (self._closed or isinstance(cause, ReplicaGone)):
                again = self._open(connection.replica, 0.0 if isinstance(cause, SessionLost) else self._config.retry_s)
                for salt in self._purged:
                    again.purge(salt)
            self._changed.notify_all()

    # -- threads of its own ------------------------------------------------------------------------------------------

    def _expire(self) -> None:
        while not self._closed:
            with self._changed:
                self._tracker.expire()
                self._changed.notify_all()
            time.sleep(_TICK_S)

    def _deliver_all(self) -> None:
        """One thread calls all listeners, so each gets one delta at a time."""
        while (delivery := self._deliveries.get()) is not None:
            self._deliver(*delivery)

    def _deliver(self, tracked: TrackedRequest, subscriber: Subscriber, delta: Delta) -> None:
        """A listener that raises gets nothing more."""
        if subscriber.failed:
            return
        try:
            subscriber.listener(delta)
        except Exception:
            log.exception("a listener of request %r failed", tracked.request.id)
            with self._changed:
                self._tracker.drop_subscriber(tracked, subscriber)

    # -- under the lock ----------------------------------------------------------------------------------------------

    def _open(self, replica: Replica, delay_s: float = 0.0) -> ReplicaConnection:
        connection = ReplicaConnection(replica, self._connect, self._config, self, delay_s)
        self._connections[replica.name] = connection
        connection.start()
        return connection

    def _live(self) -> Sequence[ReplicaConnection]:
        assert self._latest is not None
        return self._tracker.connections or (self._latest,)

    def _bounds(self) -> ModelLimits:
        bounds = [connection.status.bounds for connection in self._live()]
        return min(bounds, key=lambda each: each.max_context_tokens)

"""Several engine replicas behind one engine client; streams survive the death of any replica.

Each choice of a request is a `Stream`. The router decides which replica a waiting stream goes to, and when a replica is lost its
streams wait again and continue on another replica with the same numerics and the same seed: same tokens, same text, delivered
once. Attempts have unique ids, so late messages of an earlier attempt are recognised and dropped.

    >>> connect = lambda replica: ReplicaClient(replica.actor, config)
    >>> with Router(deployment.replicas_of("engine"), connect, config) as router:
    ...     router.generate([Request("a", prompt_ids, SamplingParams(max_tokens=20))])[0].text

Threads: one a replica, which connects, polls and connects again; one that calls the listeners and ends streams that waited too
long. Listeners may therefore raise, submit and cancel; a slow listener delays other listeners, but no replica. All threads share
the streams under one lock that nobody holds while waiting.
"""

import atexit
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ragspec.cluster.actors import Replica
from ragspec.cluster.engine_host import EngineStatus, Polled
from ragspec.cluster.routing.policy import RoutingConfig, affinity_key, choose_replica
from ragspec.cluster.routing.replica_client import ReplicaClient, ReplicaGone
from ragspec.cluster.routing.stream import Listener, OutputIdentity, Stream
from ragspec.core import Delta, FinishReason, Request
from ragspec.engine.client import EngineClient
from ragspec.errors import EngineClosed, InputError, Overloaded, ReplicaLost
from ragspec.numerics.noise import random_seed
from ragspec.tenants import FairQueue, tenant_of

log = logging.getLogger(__name__)

Connect = Callable[[Replica], ReplicaClient]

_TICK_S = 0.25
_ALL_UP_S = 2.0
"""How long a new router waits for its other replicas once one is up."""

_FLUSH_S = 2.0
_MAX_PURGED = 10_000


@dataclass(eq=False)
class _Connection:
    """A replica that serves. `streams`: those that run on it, by the id of their attempt."""

    name: str
    client: ReplicaClient
    status: EngineStatus
    streams: dict[str, Stream] = field(default_factory=dict)

    @property
    def identity(self) -> OutputIdentity:
        return OutputIdentity(self.status.fingerprint, self.status.bounds.max_context_tokens)


class Router(EngineClient):
    """Use from any thread. All tenants share the ids of requests: callers that pass on their clients' ids put the tenant in
    front."""

    def __init__(self, replicas: Sequence[Replica], connect: Connect, config: RoutingConfig | None = None) -> None:
        """Waits for a replica to serve. Raises: ReplicaLost if none does for `start_timeout_s`."""
        self._connect = connect
        self._config = config or RoutingConfig()
        self._changed = threading.Condition()
        self._deliveries: queue.SimpleQueue[tuple[Stream, Delta] | None] = queue.SimpleQueue()
        self._requests: dict[str, list[Stream]] = {}  # the streams of each request that have not ended
        self._lost: list[Stream] = []  # wait for a replica, before everything new
        self._fresh = FairQueue[Stream](_tenant)
        self._clients: dict[str, ReplicaClient] = {}  # of every replica, also while it connects
        self._connections: dict[str, _Connection] = {}  # of every replica that serves
        self._latest: _Connection | None = None
        self._purged: deque[str] = deque(maxlen=_MAX_PURGED)
        self._num_attempts = self._num_deltas = 0
        self._is_closing = False
        self._closed = threading.Event()
        self._deliverer = threading.Thread(target=self._deliver_all, daemon=True, name="router-deliver")
        self._receivers = [
            threading.Thread(target=self._receive_from, args=(replica,), daemon=True, name=f"router-{replica.name}")
            for replica in replicas
        ]
        for thread in (self._deliverer, *self._receivers):
            thread.start()
        atexit.register(self.close)
        with self._changed:
            self._changed.wait_for(lambda: self._latest is not None, self._config.start_timeout_s)
            self._changed.wait_for(lambda: self.num_connected == len(replicas), _ALL_UP_S)
        if self._latest is None:
            self.close()
            raise ReplicaLost(f"no engine is live, and none became so within {self._config.start_timeout_s:g} s")

    # -- from any thread ---------------------------------------------------------------------------------------------

    @property
    def fingerprint(self) -> str:
        """The numerics ids of all live replicas; of the last live one while there is none."""
        with self._changed:
            return "+".join(sorted({connection.status.fingerprint for connection in self._live()}))

    @property
    def max_context_tokens(self) -> int:
        """The smallest context of the live replicas."""
        with self._changed:
            return min(connection.status.bounds.max_context_tokens for connection in self._live())

    @property
    def num_connected(self) -> int:
        """Replicas that serve."""
        with self._changed:
            return len(self._connections)

    def num_heard(self) -> int:
        """A counter that rises while any replica makes progress for this router."""
        with self._changed:
            return self._num_deltas

    def num_choices(self) -> int:
        """Choices that run on a replica or wait for one."""
        with self._changed:
            return sum(map(len, self._requests.values()))

    def submit_all(self, requests: Sequence[Request], listener: Listener) -> None:
        """Queue all requests or none; the listener gets every Delta of every choice once, in a thread of the router.

        Raises: InputError, PromptTooLong, Overloaded, EngineClosed.
        """
        with self._changed:
            bounds = min((connection.status.bounds for connection in self._live()), key=lambda b: b.max_context_tokens)
        for request in requests:
            bounds.limits(request)
            affinity_key(request)
        now = time.monotonic()
        streams = {request.id: _streams_of(request, listener, now) for request in requests}
        with self._changed:
            if self._is_closing:
                raise EngineClosed("the router is closed")
            if len(streams) < len(requests) or not streams.keys().isdisjoint(self._requests):
                raise InputError("requests that run at once need different ids; an id is in use already")
            self._check_room(sum(map(len, streams.values())))
            self._requests |= streams
            for waiting in streams.values():
                for stream in waiting:
                    self._fresh.append(stream)
            self._place()

    def cancel(self, request_id: str) -> None:
        with self._changed:
            for stream in list(self._requests.get(request_id, ())):
                self._end(stream, FinishReason.CANCELLED)
            self._place()
            self._changed.notify_all()

    def purge(self, salt: str) -> None:
        """Forget every cached prefix and earlier answer of one tenant in every replica, also in those that are away now."""
        with self._changed:
            self._purged.append(salt)
            for connection in self._connections.values():
                connection.client.purge([salt])

    def close(self, drain_s: float = 0.0) -> None:
        """Accept no more requests, wait `drain_s` seconds for running ones, then cancel them. The replicas stay."""
        with self._changed:
            self._is_closing = True
            self._changed.wait_for(lambda: not self._requests, drain_s)
            self._closed.set()
            self._lost, self._fresh = [], FairQueue[Stream](_tenant)
            for stream in [stream for streams in self._requests.values() for stream in streams]:
                self._end(stream, FinishReason.CANCELLED)
            clients, self._connections = list(self._clients.values()), {}
        self._deliveries.put(None)
        deadline = time.monotonic() + _FLUSH_S
        for client in clients:
            client.close(max(0.0, deadline - time.monotonic()))
        for thread in (self._deliverer, *self._receivers):
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        atexit.unregister(self.close)

    # -- the threads of the replicas ---------------------------------------------------------------------------------

    def _receive_from(self, replica: Replica) -> None:
        """Connect to a replica and receive its deltas until it is lost; again, unless it is gone for good."""
        is_gone = False
        while not is_gone:
            client = self._connect(replica)
            with self._changed:
                if self._closed.is_set():
                    return
                self._clients[replica.name] = client
            try:
                connection = _Connection(replica.name, client, client.wait_until_serving())
                self._add(connection)
                while True:
                    self._receive(connection, client.poll(self._config.poll_s))
            except Exception as cause:
                is_gone = isinstance(cause, ReplicaGone) or self._closed.is_set()
                if not self._closed.is_set():
                    is_expected = isinstance(cause, ReplicaLost)
                    log.warning("%s is lost: %s", replica.name, cause, exc_info=not is_expected)
            self._remove(replica.name)
            client.close()
            is_gone = self._closed.wait(0.0 if is_gone else self._config.retry_s) or is_gone

    def _add(self, connection: _Connection) -> None:
        with self._changed:
            if self._closed.is_set():
                return
            if self._purged:
                connection.client.purge(list(self._purged))
            self._latest = self._connections[connection.name] = connection
            self._place()
            self._changed.notify_all()

    def _receive(self, connection: _Connection, polled: Polled) -> None:
        """Drops deltas of attempts that were lost or cancelled. Raises: ReplicaLost if the replica hangs in a step."""
        if polled.busy_s > self._config.step_timeout_s:
            raise ReplicaLost(f"a step of {connection.name} has been running for {polled.busy_s:.1f} s")
        with self._changed:
            for delta in polled.deltas:
                if (stream := connection.streams.get(delta.request_id)) is not None:
                    self._receive_delta(connection, stream, delta)
            if polled.deltas:
                self._place()
                self._changed.notify_all()

    def _remove(self, name: str) -> None:
        """The replica is lost: its streams wait for another one, before everything new."""
        with self._changed:
            if (connection := self._connections.pop(name, None)) is not None:
                for stream in connection.streams.values():
                    self._lose(stream)
                self._place()
                self._changed.notify_all()

    # -- the delivering thread ---------------------------------------------------------------------------------------

    def _deliver_all(self) -> None:
        """One thread calls all listeners, so each gets one delta at a time."""
        expired_s = time.monotonic()
        while True:
            try:
                delivery = self._deliveries.get(timeout=_TICK_S)
            except queue.Empty:
                pass
            else:
                if delivery is None:
                    return
                self._deliver(*delivery)
            if time.monotonic() - expired_s >= _TICK_S:
                self._expire()
                expired_s = time.monotonic()

    def _deliver(self, stream: Stream, delta: Delta) -> None:
        """A listener that raises gets nothing more, and its request is cancelled."""
        if stream.listener is None:
            return
        try:
            stream.listener(delta)
        except Exception:
            log.exception("a listener of request %r failed", stream.submitted.id)
            with self._changed:
                for each in (stream, *self._requests.get(stream.submitted.id, ())):
                    each.listener = None
            self.cancel(stream.submitted.id)

    def _expire(self) -> None:
        """End streams that no replica could take for the whole `replay_timeout_s`."""
        now = time.monotonic()
        with self._changed:
            identities = {connection.identity for connection in self._connections.values()}
            for stream in (*self._lost, *self._fresh):
                if any(stream.fits(identity) for identity in identities):
                    stream.unplaced_since_s = None
                elif stream.unplaced_since_s is None:
                    stream.unplaced_since_s = now
                elif now - stream.unplaced_since_s >= self._config.replay_timeout_s:
                    self._end(stream, FinishReason.LOST, self._why_unplaced(stream))
            self._changed.notify_all()

    # -- under the lock ----------------------------------------------------------------------------------------------

    def _live(self) -> Sequence[_Connection]:
        assert self._latest is not None
        return list(self._connections.values()) or [self._latest]

    def _check_room(self, num_choices: int) -> None:
        """Raises: Overloaded."""
        room = sum(max(0, self._config.max_num_seqs - len(each.streams)) for each in self._connections.values())
        room += self._config.max_queued - len(self._fresh)
        if num_choices > room:
            raise Overloaded(f"{len(self._fresh)} choices wait already; {self._config.max_queued} may")

    def _place(self) -> None:
        """Start every waiting stream that a replica can take now; of new ones, tenants take turns."""
        self._lost = [stream for stream in self._lost if not self._start(stream)]
        while (started := next((head for head in self._fresh.heads() if self._start(head)), None)) is not None:
            self._fresh.take(started)

    def _start(self, stream: Stream) -> bool:
        """waiting -> running, if a fitting replica has room. A tenant of which nothing runs waits for nobody: the engines share
        their steps fairly."""
        connections = {name: each for name, each in self._connections.items() if stream.fits(each.identity)}
        loads = {name: len(connection.streams) for name, connection in connections.items()}
        running = (each for connection in self._connections.values() for each in connection.streams.values())
        is_first = _tenant(stream) not in map(_tenant, running)
        most = None if is_first else self._config.max_num_seqs
        key = affinity_key(stream.submitted)
        name = choose_replica(key, loads, load_factor=self._config.load_factor, max_load=most)
        if name is None:
            return False
        self._num_attempts += 1
        stream.start(f"{stream.submitted.id}~{self._num_attempts}", time.monotonic())
        try:
            connections[name].client.submit(stream.request())
        except Exception as cause:  # the request cannot be sent
            self._put(stream, stream.end(FinishReason.ERROR, f"{type(cause).__name__}: {cause}", time.monotonic()))
        else:
            connections[name].streams[stream.attempt_id] = stream
        return True

    def _receive_delta(self, connection: _Connection, stream: Stream, delta: Delta) -> None:
        """A cancellation that this router did not ask for is a loss. A delta that cannot be applied ends its stream alone."""
        if delta.finish_reason is not None:
            del connection.streams[delta.request_id]
        if delta.finish_reason in (FinishReason.CANCELLED, FinishReason.LOST):
            self._lose(stream)
            return
        self._num_deltas += 1
        try:
            received = stream.receive(delta, connection.identity, time.monotonic())
        except Exception as cause:
            log.exception("a delta of request %r could not be applied", stream.submitted.id)
            self._end(stream, FinishReason.ERROR, f"{type(cause).__name__}: {cause}")
            return
        self._put(stream, received)

    def _lose(self, stream: Stream) -> None:
        """running -> waiting, unless the stream seems to be what kills replicas."""
        stream.lose(time.monotonic())
        if stream.num_vain > self._config.max_vain_replays:
            why = f"its replicas were lost {stream.num_vain} times in a row before it had a token"
            self._end(stream, FinishReason.ERROR, why)
        else:
            self._lost.append(stream)

    def _end(self, stream: Stream, reason: FinishReason, error: str = "") -> None:
        """Waiting or running -> ended."""
        attempt_id = stream.attempt_id
        for connection in self._connections.values():
            if connection.streams.pop(attempt_id, None) is not None:
                connection.client.cancel(attempt_id)
        self._lost = [each for each in self._lost if each is not stream]
        if stream in self._fresh:
            self._fresh.remove(stream)
        self._put(stream, stream.end(reason, error, time.monotonic()))

    def _put(self, stream: Stream, delta: Delta) -> None:
        """Queue a delta for the stream's listener."""
        self._deliveries.put((stream, delta))
        if stream.is_ended:
            streams = self._requests[stream.submitted.id]
            streams.remove(stream)
            if not streams:
                del self._requests[stream.submitted.id]

    def _why_unplaced(self, stream: Stream) -> str:
        waited = f"for {self._config.replay_timeout_s:g} s there was no replica"
        if stream.identity is None or not self._connections:
            return waited
        others = ", ".join(sorted({str(tuple(each.identity)) for each in self._connections.values()}))
        return f"{waited} with the numerics that it was begun with: {tuple(stream.identity)}; there are: {others}"


def _streams_of(request: Request, listener: Listener, now: float) -> list[Stream]:
    """A stream for each choice. Draws a missing seed here, so that all attempts use the same."""
    if request.params.seed is None:
        request = replace(request, params=replace(request.params, seed=random_seed()))
    return [Stream(request, choice, listener, now) for choice in request.choices]


def _tenant(stream: Stream) -> str:
    return tenant_of(stream.submitted.salt)

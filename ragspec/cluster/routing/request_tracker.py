"""The decisions of a router, without its threads: which request runs where, which waits, and how lost attempts continue.

A request is sent as one attempt with all its choices. An attempt ends with its choices or is lost with its connection; then
every choice that has not ended gets an attempt of its own, behind the tokens already delivered. Attempts have unique ids, so late
messages of an earlier attempt are recognised and dropped. Lost attempts are placed before new requests. Of new requests, tenants
take turns, and a tenant of which nothing runs waits for nobody: the engines share their steps fairly.

Not thread-safe: a `Router` calls it under its lock. Never waits.

    >>> tracker = RequestTracker(RoutingConfig(), lambda tracked, subscriber, delta: subscriber.listener(delta))
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from ragspec.cluster.routing.policy import RoutingConfig, affinity_key, choose_replica
from ragspec.cluster.routing.replica_connection import ReplicaConnection
from ragspec.cluster.routing.request_state import (
    Attempt,
    ChoiceState,
    Listener,
    ResponseCache,
    Subscriber,
    TrackedRequest,
    without_choices,
)
from ragspec.core import Delta, FinishReason, salt_belongs_to
from ragspec.errors import InputError, Overloaded
from ragspec.tenants import FairQueue, tenant_of

log = logging.getLogger(__name__)

Deliver = Callable[[TrackedRequest, Subscriber, Delta], None]


class RequestTracker:
    """Owns every request that has not ended, and the cache of those that have."""

    def __init__(self, config: RoutingConfig, deliver: Deliver) -> None:
        self._config, self._deliver_to = config, deliver
        self._requests: dict[str, TrackedRequest] = {}
        self._cache = ResponseCache(config.remembered_s, config.remembered_tokens)
        self._attempts: dict[str, Attempt] = {}
        self._loads: dict[ReplicaConnection, int] = {}  # running choices of every connection that is up
        self._lost: list[Attempt] = []
        self._fresh = FairQueue[Attempt](_tenant)
        self._num_sent = 0
        self.num_deltas = 0
        """Deltas received from replicas; rises while any replica makes progress."""

    @property
    def idle(self) -> bool:
        return not self._requests

    @property
    def connections(self) -> tuple[ReplicaConnection, ...]:
        return tuple(self._loads)

    @property
    def num_choices(self) -> int:
        """Choices that run on a replica or wait for one."""
        waiting = sum(len(attempt.choices) for attempt in (*self._lost, *self._fresh))
        return sum(self._loads.values()) + waiting

    # -- requests ----------------------------------------------------------------------------------------------------

    def admit(self, requests: Sequence[TrackedRequest]) -> None:
        """Accept all or none. Subscribing to a request that is already known replays its deltas first.

        Raises: InputError, Overloaded.
        """
        if len({tracked.request.id for tracked in requests}) < len(requests):
            raise InputError("requests that run at once need different ids; an id comes twice")
        now = time.monotonic()
        known = {tracked: earlier for tracked in requests if (earlier := self._known(tracked, now))}
        fresh = [tracked for tracked in requests if tracked not in known]
        self._check_room(len(fresh))
        keys = {tracked: affinity_key(tracked.request, self._config.prefix_tokens) for tracked in fresh}
        for tracked, earlier in known.items():
            self._subscribe(earlier, tracked.subscribers[0])
        for tracked in fresh:
            self._requests[tracked.request.id] = tracked
            self._fresh.append(Attempt(tracked, list(tracked.choices.values()), keys[tracked]))
        self.place()

    def cancel(self, request_id: str) -> None:
        if tracked := self._requests.get(request_id):
            self._cancel(tracked)
            self.place()

    def cancel_all(self) -> None:
        self._lost, self._fresh = [], FairQueue[Attempt](_tenant)
        for tracked in list(self._requests.values()):
            self._cancel(tracked)

    def unsubscribe(self, request_id: str, listener: Listener) -> None:
        if tracked := self._requests.get(request_id):
            for subscriber in [each for each in tracked.subscribers if each.listener is listener]:
                self.drop_subscriber(tracked, subscriber)

    def drop_subscriber(self, tracked: TrackedRequest, subscriber: Subscriber) -> None:
        """Deliver nothing more to it; a request without subscribers is cancelled."""
        subscriber.failed = True
        is_running = self._requests.get(tracked.request.id) is tracked
        if is_running and all(each.failed for each in tracked.subscribers):
            self.cancel(tracked.request.id)

    def purge(self, salt: str) -> None:
        """Forget one tenant's finished requests, and do not cache those that run."""
        self._cache.purge(salt)
        for tracked in self._requests.values():
            tracked.may_be_cached = tracked.may_be_cached and not salt_belongs_to(tracked.request.salt, salt)

    # -- connections -------------------------------------------------------------------------------------------------

    def connection_up(self, connection: ReplicaConnection) -> None:
        self._loads[connection] = 0
        self.place()

    def connection_down(self, connection: ReplicaConnection) -> None:
        """Queue its attempts before everything new, and cancel them there in case the replica still lives."""
        self._loads.pop(connection, None)
        for attempt in [attempt for attempt in self._attempts.values() if attempt.connection is connection]:
            connection.cancel(attempt.id)
            self._lose(attempt, attempt.choices)
        self.place()

    def receive(self, connection: ReplicaConnection, deltas: Iterable[Delta]) -> None:
        """Drops deltas of earlier attempts and ended choices. A delta that cannot be applied ends its own request alone."""
        for delta in deltas:
            attempt = self._attempts.get(delta.request_id)
            choice = attempt.tracked.choices.get(delta.choice) if attempt else None
            if attempt is None or attempt.connection is not connection or choice not in attempt.choices:
                continue
            assert choice is not None
            try:
                self._receive(attempt, choice, delta, connection)
            except Exception as cause:
                log.exception("a delta of request %r could not be applied", attempt.tracked.request.id)
                self._end(attempt.tracked, attempt.choices, FinishReason.ERROR, f"{type(cause).__name__}: {cause}")
        self.place()

    def _receive(self, attempt: Attempt, choice: ChoiceState, delta: Delta, connection: ReplicaConnection) -> None:
        """A cancellation that this router did not ask for is a loss."""
        if delta.finish_reason in (FinishReason.CANCELLED, FinishReason.LOST):
            self._lose(attempt, [choice])
            return
        self.num_deltas += 1
        delivered = choice.receive(delta, connection.identity, time.monotonic())
        if choice.ended:
            self._remove(attempt, choice)
        self._deliver(attempt.tracked, delivered)

    def refuse(self, connection: ReplicaConnection, attempt_id: str, error: Exception) -> None:
        """End a request that a replica refuses: any other would refuse it too."""
        attempt = self._attempts.get(attempt_id)
        if attempt is not None and attempt.connection is connection:
            self._end(attempt.tracked, attempt.choices, FinishReason.ERROR, str(error) or type(error).__name__)
            self.place()

    # -- waiting attempts --------------------------------------------------------------------------------------------

    def place(self) -> None:
        """Send every attempt that a replica can take now."""
        self._lost = [attempt for attempt in self._lost if not self._send(attempt)]
        while (sent := next((head for head in self._fresh.heads() if self._send(head)), None)) is not None:
            self._fresh.take(sent)

    def expire(self) -> None:
        """End attempts that waited too long for a fitting replica, or allow them other numerics, as configured."""
        now = time.monotonic()
        self._cache.expire(now)
        unplaced = {attempt for attempt in (*self._lost, *self._fresh) if self._is_unplaced(attempt, now)}
        if self._loads and self._config.unequal_numerics == "flag":
            for attempt in unplaced:
                attempt.any_numerics = True
        else:
            self._lost = [attempt for attempt in self._lost if attempt not in unplaced]
            for attempt in unplaced & set(self._fresh):
                self._fresh.remove(attempt)
            for attempt in unplaced:
                self._end(attempt.tracked, attempt.choices, FinishReason.LOST, self._why_unplaced(attempt))
        self.place()

    def _is_unplaced(self, attempt: Attempt, now: float) -> bool:
        """Whether no fitting replica was up for the whole replay timeout."""
        if any(attempt.fits(connection.identity) for connection in self._loads):
            attempt.unplaced_since_s = None
            return False
        attempt.unplaced_since_s = now if attempt.unplaced_since_s is None else attempt.unplaced_since_s
        return now - attempt.unplaced_since_s >= self._config.replay_timeout_s

    def _known(self, tracked: TrackedRequest, now: float) -> TrackedRequest | None:
        """The running or cached request of this id. Raises: InputError when its content differs."""
        request_id = tracked.request.id
        earlier = self._requests.get(request_id) or self._cache.get(request_id, now)
        if earlier is not None and earlier.digest != tracked.digest:
            raise InputError(f"another request was submitted under the id {request_id!r}")
        return earlier

    def _subscribe(self, tracked: TrackedRequest, subscriber: Subscriber) -> None:
        for delta in tracked.delivered:
            self._deliver_to(tracked, subscriber, delta)
        if not tracked.ended:
            tracked.subscribers.append(subscriber)

    def _check_room(self, num_requests: int) -> None:
        room = sum(max(0, self._config.max_num_seqs - load) for load in self._loads.values())
        room += self._config.max_queued - len(self._fresh)
        if num_requests > room:
            raise Overloaded(f"{len(self._fresh)} requests wait already; {self._config.max_queued} may")

    def _send(self, attempt: Attempt) -> bool:
        """False: no replica can take it now."""
        fitting = {each.name: each for each in self._loads if attempt.fits(each.identity)}
        loads = {name: self._loads[connection] for name, connection in fitting.items()}
        config, size = self._config, len(attempt.choices)
        is_first = _tenant(attempt) not in map(_tenant, self._attempts.values())
        max_load = None if is_first else config.max_num_seqs
        name = choose_replica(attempt.key, loads, size=size, load_factor=config.load_factor, max_load=max_load)
        if name is None:
            return False
        self._num_sent += 1
        attempt.id, attempt.connection = f"{attempt.tracked.request.id}~{self._num_sent}", fitting[name]
        self._attempts[attempt.id] = attempt
        self._loads[attempt.connection] += size
        now = time.monotonic()
        for choice in attempt.choices:
            choice.start_attempt(now)
        attempt.connection.send(attempt.request)
        return True

    def _lose(self, attempt: Attempt, choices: Sequence[ChoiceState]) -> None:
        """Queue the choices again; all together if none has a token yet."""
        now, is_whole = time.monotonic(), len(choices) == len(attempt.tracked.choices)
        for choice in list(choices):
            choice.lose_attempt(now)
            self._remove(attempt, choice)
        hopeless = [choice for choice in choices if choice.num_vain > self._config.max_vain_replays]
        again = [choice for choice in choices if choice.num_vain <= self._config.max_vain_replays]
        is_whole = is_whole and not hopeless and not any(choice.output_ids for choice in again)
        for group in [again] if is_whole else [[choice] for choice in again]:
            self._lost.append(Attempt(attempt.tracked, group, attempt.key, any_numerics=attempt.any_numerics))
        if hopeless:
            why = f"its replicas were lost {hopeless[0].num_vain} times in a row before it had a token"
            self._end(attempt.tracked, hopeless, FinishReason.ERROR, why)

    def _why_unplaced(self, attempt: Attempt) -> str:
        waited = f"for {self._config.replay_timeout_s:g} s there was no replica"
        begun = attempt.choices[0].identity
        if begun is None or not self._loads:
            return waited
        others = ", ".join(sorted({str(tuple(connection.identity)) for connection in self._loads}))
        return f"{waited} with the numerics that it was begun with: {tuple(begun)}; there are: {others}"

    # -- ends --------------------------------------------------------------------------------------------------------

    def _cancel(self, tracked: TrackedRequest) -> None:
        running = [choice for choice in tracked.choices.values() if not choice.ended]
        self._end(tracked, running, FinishReason.CANCELLED)

    def _end(
        self, tracked: TrackedRequest, choices: Sequence[ChoiceState], reason: FinishReason, error: str = ""
    ) -> None:
        """End these choices, whether they run or wait."""
        ending, now = list(choices), time.monotonic()
        for attempt in [attempt for attempt in self._attempts.values() if attempt.tracked is tracked]:
            if attempt.connection is not None and all(choice in ending for choice in attempt.choices):
                attempt.connection.cancel(attempt.id)
            for choice in [choice for choice in attempt.choices if choice in ending]:
                self._remove(attempt, choice)
        self._lost = without_choices(self._lost, ending)
        fresh = [attempt for attempt in self._fresh if attempt.tracked is tracked]
        for attempt in set(fresh) - set(without_choices(fresh, ending)):
            self._fresh.remove(attempt)
        for choice in ending:
            self._deliver(tracked, choice.end(reason, error, now))

    def _remove(self, attempt: Attempt, choice: ChoiceState) -> None:
        attempt.choices = [other for other in attempt.choices if other is not choice]
        if attempt.connection in self._loads:
            self._loads[attempt.connection] -= 1
        if not attempt.choices:
            del self._attempts[attempt.id]

    def _deliver(self, tracked: TrackedRequest, delta: Delta) -> None:
        tracked.delivered.append(delta)
        for subscriber in tracked.subscribers:
            self._deliver_to(tracked, subscriber, delta)
        if tracked.ended:
            del self._requests[tracked.request.id]
            tracked.subscribers.clear()
            reasons = {delta.finish_reason for delta in tracked.delivered} - {None}
            if tracked.may_be_cached and reasons <= {FinishReason.STOP, FinishReason.LENGTH}:
                self._cache.add(tracked, time.monotonic())


def _tenant(attempt: Attempt) -> str:
    return tenant_of(attempt.tracked.request.salt)

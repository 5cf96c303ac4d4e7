"""An engine that serves several clients by long polls.

Owns which client a request belongs to and what was not told yet. No client gets a message a token: each holds one poll, which
returns everything that is new to it, so there is at most about one message a step, and a poll without an answer is a lost host.
Knows nothing of Ray; the actor that holds a host forwards its methods.

    >>> host = EngineHost(load_engine(TargetConfig(), EngineConfig(), DraftingConfig()))
    >>> host.submit("router-1", [Request("a", prompt_ids)])
    >>> host.poll("router-1", wait_s=1.0).deltas
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ragspec.cluster.facts import HostFacts
from ragspec.cluster.pulse import Pulse
from ragspec.core import Delta, FinishReason, Request
from ragspec.engine.engine import Engine
from ragspec.errors import EngineError, InputError, ReplicaLost

GATHER_S = 0.002
"""A poll waits this much longer for the other deltas of a step, so that they come in one message."""

_MOST_WAIT_S = 60.0


class Polled(NamedTuple):
    """`busy_s`: how long the step that runs now has lasted. `session` is another one when the host knows nothing of what this
    client submitted earlier: it polled too rarely, or the host is a new one."""

    deltas: tuple[Delta, ...]
    busy_s: float
    session: str


@dataclass
class _Client:
    news: threading.Condition
    session: str = field(default_factory=lambda: uuid.uuid4().hex)
    submitting: threading.Lock = field(default_factory=threading.Lock)
    running: dict[str, Request] = field(default_factory=dict)
    num_open: dict[str, int] = field(default_factory=dict)  # choices that have not ended
    cancelled: set[str] = field(default_factory=set)
    deltas: list[Delta] = field(default_factory=list)
    seen_s: float = field(default_factory=time.monotonic)
    num_polling: int = 0

    @property
    def complete(self) -> bool:
        """As many have said something and go on as there are choices that run."""
        return sum(delta.finish_reason is None for delta in self.deltas) >= sum(self.num_open.values())

    def runs(self, request: Request) -> bool:
        """Raises: InputError when another request runs under its id."""
        known = self.running.get(request.id)
        if known is not None and known != request:
            raise InputError(f"another request runs under the id {request.id!r}")
        return known is not None

    def begin(self, requests: Sequence[Request]) -> None:
        self.running.update({request.id: request for request in requests})
        self.num_open.update({request.id: len(request.choices) for request in requests})

    def end(self, request_id: str) -> None:
        """One choice of a request has ended."""
        self.num_open[request_id] -= 1
        if not self.num_open[request_id]:
            self.take_back([request_id])

    def take_back(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.running.pop(request_id, None)
            self.num_open.pop(request_id, None)
            self.cancelled.discard(request_id)


class EngineHost:
    """States: serving -> lost, when the engine is dead or closed; then everything raises ReplicaLost. Call from any thread.

    Requests of a client that has not polled for `client_timeout_s` are cancelled and what it was to be told is dropped.
    """

    def __init__(self, engine: Engine, node_id: str = "", *, client_timeout_s: float = 30.0) -> None:
        self._engine = engine
        self._node_id = node_id
        self._client_timeout_s = client_timeout_s
        self._lock = threading.Lock()
        self._clients: dict[str, _Client] = {}
        self._closed = ""
        self._pulse = Pulse(engine, self._forget_silent, self._end)

    def facts(self) -> HostFacts:
        engine = self._engine
        limits = engine.target.vocab_size, engine.max_context_tokens, engine.target.eos_ids
        with self._lock:
            num_running = sum(len(client.running) for client in self._clients.values())
        return HostFacts(engine.fingerprint, *limits, os.getpid(), self._node_id, num_running)

    def submit(self, client: str, requests: Sequence[Request]) -> None:
        """All of them, or none. One that runs already for this client is not run twice.

        Raises: InputError, PromptTooLong, ReplicaLost.
        """
        with self._lock:
            own = self._known(client)
        with own.submitting:
            fresh = [request for request in requests if not own.runs(request)]
            with self._lock:
                self._check_serving()
                own.begin(fresh)
            try:
                inner = [replace(request, id=_inner(client, request.id)) for request in fresh]
                self._engine.submit_all(inner, self._listener(client, own))
            except EngineError as cause:
                self._take_back(own, fresh)
                raise ReplicaLost(self._engine.lost or str(cause)) from cause
            except BaseException:
                self._take_back(own, fresh)
                raise
        with self._lock:
            forgotten = self._clients.get(client) is not own
        if forgotten:
            self._cancel(client, own)

    def cancel(self, client: str, request_ids: Sequence[str]) -> None:
        """Within one step; their deltas still end, as cancelled. Unknown and finished ones are ignored."""
        with self._lock:
            own = self._known(client)
        self._cancel(client, own, request_ids)

    def poll(self, client: str, wait_s: float) -> Polled:
        """What this client's requests have said since its last poll: at once if there is anything, else after `wait_s` at most.

        Raises: ReplicaLost.
        """
        with self._lock:
            own = self._known(client)
            own.num_polling += 1
            try:
                own.news.wait_for(lambda: bool(own.deltas or self._lost), min(wait_s, _MOST_WAIT_S))
                own.news.wait_for(lambda: bool(own.complete or self._lost or not own.deltas), GATHER_S)
                self._check_serving()
                deltas, own.deltas = tuple(own.deltas), []
            finally:
                own.num_polling -= 1
                own.seen_s = time.monotonic()
        return Polled(deltas, self._pulse.busy_s, own.session)

    def purge(self, salt: str) -> None:
        """Forget every cached prefix and earlier answer of one tenant."""
        with self._lock:
            self._check_serving()
        self._engine.purge(salt)

    def close(self) -> None:
        """Close the engine; clients are told that the replica is lost."""
        self._end("the replica was closed")
        self._pulse.stop()
        self._engine.close()

    # -- under the lock ----------------------------------------------------------------------------------------------

    @property
    def _lost(self) -> str:
        return self._closed or self._engine.lost

    def _check_serving(self) -> None:
        if self._lost:
            raise ReplicaLost(self._lost)

    def _known(self, client: str) -> _Client:
        self._check_serving()
        if client not in self._clients:
            self._clients[client] = _Client(threading.Condition(self._lock))
        return self._clients[client]

    # -- from any thread ---------------------------------------------------------------------------------------------

    def _listener(self, client: str, own: _Client) -> Callable[[Delta], None]:
        """For the engine's thread. What an engine says of its requests when it ends is not told: they can go on elsewhere."""
        prefix = len(_inner(client, ""))

        def listen(delta: Delta) -> None:
            request_id = delta.request_id[prefix:]
            with self._lock:
                if delta.finish_reason is FinishReason.CANCELLED and request_id not in own.cancelled:
                    self._closed = self._closed or "the engine was closed"
                if delta.finish_reason is not None:
                    own.end(request_id)
                if not self._lost:
                    own.deltas.append(replace(delta, request_id=request_id))
                own.news.notify_all()

        return listen

    def _take_back(self, own: _Client, requests: Sequence[Request]) -> None:
        with self._lock:
            own.take_back([request.id for request in requests])

    def _cancel(self, client: str, own: _Client, request_ids: Sequence[str] | None = None) -> None:
        """These of a client's requests; None: all."""
        with self._lock:
            wanted = list(own.running if request_ids is None else own.running.keys() & set(request_ids))
            own.cancelled.update(wanted)
        for request_id in wanted:
            self._engine.cancel(_inner(client, request_id))

    def _end(self, why: str) -> None:
        with self._lock:
            self._closed = self._closed or why
            for own in self._clients.values():
                own.news.notify_all()

    def _forget_silent(self) -> None:
        """Clients that no longer poll."""
        with self._lock:
            oldest = time.monotonic() - self._client_timeout_s
            silent = {c: own for c, own in self._clients.items() if not own.num_polling and own.seen_s < oldest}
            for client in silent:
                del self._clients[client]
        for client, own in silent.items():
            self._cancel(client, own)


def _inner(client: str, request_id: str) -> str:
    """Two clients may use the same ids."""
    return f"{client}/{request_id}"

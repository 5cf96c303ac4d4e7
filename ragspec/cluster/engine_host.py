"""An engine that serves several clients by long polls.

Owns which client a request belongs to, and the deltas that were not polled yet. Clients get no message a token: each holds one
poll, which returns everything new to it, so there is about one message a step, and an unanswered poll means a lost host.
Knows nothing of Ray; `EngineServer` is a host in an actor.

    >>> host = EngineHost(load_engine(TargetConfig(), EngineConfig(), DraftingConfig()))
    >>> host.submit("router-1", [Request("a", prompt_ids)])
    >>> host.poll("router-1", wait_s=1.0).deltas
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ragspec.core import Delta, FinishReason, Request
from ragspec.engine.admission import ModelLimits
from ragspec.engine.engine import Engine
from ragspec.errors import EngineClosed, EngineError, InputError, ReplicaLost

log = logging.getLogger(__name__)

GATHER_S = 0.002
"""A poll waits this much longer for the other deltas of a step, so that they come in one message."""

_MAX_WAIT_S = 60.0
_WATCHDOG_S = 0.25


class EngineStatus(NamedTuple):
    """`fingerprint`: the numerics id. `pids`: of all ranks, rank 0 first. `busy_s`: how long the current step has lasted.
    `started_s`: Unix time of the process's start."""

    fingerprint: str
    vocab_size: int
    max_context_tokens: int
    eos_ids: tuple[int, ...]
    pids: tuple[int, ...]
    node_id: str
    started_s: float
    num_running: int
    busy_s: float

    @property
    def bounds(self) -> ModelLimits:
        return ModelLimits(self.vocab_size, self.max_context_tokens, self.eos_ids)


class Polled(NamedTuple):
    """`busy_s`: how long the current step has lasted. `session` changes when the host has forgotten this client's requests: the
    client polled too rarely, or the host is a new one."""

    deltas: tuple[Delta, ...]
    busy_s: float
    session: str


class StepWatchdog:
    """Measures how long the engine's step has lasted: calls into the engine's thread again and again, and takes the time until
    the answer. `between` runs after each answer; `ended` is called once, when the engine is dead or closed."""

    def __init__(self, engine: Engine, between: Callable[[], None], ended: Callable[[str], None]) -> None:
        self._engine, self._between, self._ended = engine, between, ended
        self._called_s = 0.0
        self._stopped = threading.Event()
        threading.Thread(target=self._run, daemon=True, name="step-watchdog").start()

    @property
    def busy_s(self) -> float:
        called_s = self._called_s
        return time.monotonic() - called_s if called_s else 0.0

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(_WATCHDOG_S):
            self._called_s = time.monotonic()
            try:
                self._engine.between_steps(lambda: None)
            except EngineClosed as cause:
                self._ended(self._engine.lost or str(cause))
                return
            self._called_s = 0.0
            try:
                self._between()
            except Exception:
                log.exception("a host's housekeeping failed")


@dataclass
class _Client:
    """`num_open`: choices of each request that have not ended. `deltas`: those not polled yet."""

    changed: threading.Condition
    session: str = field(default_factory=lambda: uuid.uuid4().hex)
    submitting: threading.Lock = field(default_factory=threading.Lock)
    running: dict[str, Request] = field(default_factory=dict)
    num_open: dict[str, int] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    deltas: list[Delta] = field(default_factory=list)
    seen_s: float = field(default_factory=time.monotonic)
    num_polling: int = 0

    @property
    def has_whole_step(self) -> bool:
        """Whether every running choice has a delta waiting."""
        return sum(delta.finish_reason is None for delta in self.deltas) >= sum(self.num_open.values())

    def runs(self, request: Request) -> bool:
        """Raises: InputError when another request runs under its id."""
        known = self.running.get(request.id)
        if known is not None and known != request:
            raise InputError(f"another request runs under the id {request.id!r}")
        return known is not None

    def add(self, requests: Sequence[Request]) -> None:
        self.running.update({request.id: request for request in requests})
        self.num_open.update({request.id: len(request.choices) for request in requests})

    def end_choice(self, request_id: str) -> None:
        self.num_open[request_id] -= 1
        if not self.num_open[request_id]:
            self.remove([request_id])

    def remove(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.running.pop(request_id, None)
            self.num_open.pop(request_id, None)
            self.cancelled.discard(request_id)


class EngineHost:
    """States: serving -> lost, when the engine is dead or closed; then every method raises ReplicaLost. Call from any thread.

    A client that has not polled for `client_timeout_s` is forgotten: its requests are cancelled, its deltas dropped.
    """

    def __init__(self, engine: Engine, *, client_timeout_s: float = 30.0) -> None:
        self._engine = engine
        self._client_timeout_s = client_timeout_s
        self._started_s = time.time()
        self._lock = threading.Lock()
        self._clients: dict[str, _Client] = {}
        self._closed = ""
        self._watchdog = StepWatchdog(engine, self._forget_silent_clients, self._end)

    def status(self) -> EngineStatus:
        engine = self._engine
        limits = engine.target.vocab_size, engine.max_context_tokens, engine.target.eos_ids
        with self._lock:
            num_running = sum(len(client.running) for client in self._clients.values())
        place = (os.getpid(),), "", self._started_s
        return EngineStatus(engine.fingerprint, *limits, *place, num_running, self._watchdog.busy_s)

    def submit(self, client: str, requests: Sequence[Request]) -> None:
        """Accept all or none. A request that already runs for this client is not run twice.

        Raises: InputError, PromptTooLong, ReplicaLost.
        """
        with self._lock:
            state = self._client(client)
        with state.submitting:
            fresh = [request for request in requests if not state.runs(request)]
            with self._lock:
                self._check_serving()
                state.add(fresh)
            try:
                inner = [replace(request, id=_inner_id(client, request.id)) for request in fresh]
                self._engine.submit_all(inner, self._listener(client, state))
            except EngineError as cause:
                self._remove(state, fresh)
                raise ReplicaLost(self._engine.lost or str(cause)) from cause
            except BaseException:
                self._remove(state, fresh)
                raise
        with self._lock:
            forgotten = self._clients.get(client) is not state
        if forgotten:
            self._cancel(client, state)

    def cancel(self, client: str, request_ids: Sequence[str]) -> None:
        """Takes effect within one step; the requests end as cancelled. Unknown and finished ones are ignored."""
        with self._lock:
            state = self._client(client)
        self._cancel(client, state, request_ids)

    def poll(self, client: str, wait_s: float) -> Polled:
        """This client's deltas since its last poll: at once if there are any, else after `wait_s` at most.

        Raises: ReplicaLost.
        """
        with self._lock:
            state = self._client(client)
            state.num_polling += 1
            try:
                state.changed.wait_for(lambda: bool(state.deltas or self._lost), min(wait_s, _MAX_WAIT_S))
                state.changed.wait_for(lambda: bool(state.has_whole_step or self._lost or not state.deltas), GATHER_S)
                self._check_serving()
                deltas, state.deltas = tuple(state.deltas), []
            finally:
                state.num_polling -= 1
                state.seen_s = time.monotonic()
        return Polled(deltas, self._watchdog.busy_s, state.session)

    def purge(self, salt: str) -> None:
        """Forget every cached prefix and earlier answer of one tenant."""
        with self._lock:
            self._check_serving()
        self._engine.purge(salt)

    def close(self) -> None:
        """Close the engine; clients get ReplicaLost."""
        self._end("the replica was closed")
        self._watchdog.stop()
        self._engine.close()

    # -- under the lock ----------------------------------------------------------------------------------------------

    @property
    def _lost(self) -> str:
        return self._closed or self._engine.lost

    def _check_serving(self) -> None:
        if self._lost:
            raise ReplicaLost(self._lost)

    def _client(self, client: str) -> _Client:
        self._check_serving()
        if client not in self._clients:
            self._clients[client] = _Client(threading.Condition(self._lock))
        return self._clients[client]

    # -- from any thread ---------------------------------------------------------------------------------------------

    def _listener(self, client: str, state: _Client) -> Callable[[Delta], None]:
        """For the engine's thread. An engine that closes cancels its requests; clients do not get those deltas, because the
        requests can continue elsewhere."""
        prefix = len(_inner_id(client, ""))

        def listen(delta: Delta) -> None:
            request_id = delta.request_id[prefix:]
            with self._lock:
                if delta.finish_reason is FinishReason.CANCELLED and request_id not in state.cancelled:
                    self._closed = self._closed or "the engine was closed"
                if delta.finish_reason is not None:
                    state.end_choice(request_id)
                if not self._lost:
                    state.deltas.append(replace(delta, request_id=request_id))
                state.changed.notify_all()

        return listen

    def _remove(self, state: _Client, requests: Sequence[Request]) -> None:
        with self._lock:
            state.remove([request.id for request in requests])

    def _cancel(self, client: str, state: _Client, request_ids: Sequence[str] | None = None) -> None:
        """These of a client's requests; None: all."""
        with self._lock:
            ending = list(state.running if request_ids is None else state.running.keys() & set(request_ids))
            state.cancelled.update(ending)
        for request_id in ending:
            self._engine.cancel(_inner_id(client, request_id))

    def _end(self, why: str) -> None:
        with self._lock:
            self._closed = self._closed or why
            for state in self._clients.values():
                state.changed.notify_all()

    def _forget_silent_clients(self) -> None:
        with self._lock:
            oldest = time.monotonic() - self._client_timeout_s
            silent = {c: state for c, state in self._clients.items() if not state.num_polling and state.seen_s < oldest}
            for client in silent:
                del self._clients[client]
        for client, state in silent.items():
            self._cancel(client, state)


def _inner_id(client: str, request_id: str) -> str:
    """Two clients may use the same ids."""
    return f"{client}/{request_id}"

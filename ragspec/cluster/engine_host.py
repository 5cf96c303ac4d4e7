"""An engine that serves several clients by long polls.

Owns which client a request belongs to, and the deltas that were not polled yet. Clients get no message a token: each holds one
poll, which returns everything new to it, so there is about one message a step, and an unanswered poll means a lost host.
Starts no Ray; `EngineServer` is a host in an actor.

    >>> host = EngineHost(load_engine(TargetConfig(), EngineConfig(), DraftingConfig()))
    >>> host.join("router-1")
    >>> host.submit("router-1", Request("a", prompt_ids))
    >>> host.poll("router-1", wait_s=1.0).deltas
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ragspec.cluster.actors import ORDERED, in_group
from ragspec.core import Delta, FinishReason, Request
from ragspec.engine.admission import ModelLimits
from ragspec.engine.engine import Engine
from ragspec.errors import EngineClosed, EngineError, ReplicaLost

GATHER_S = 0.002
"""A poll waits this much longer for the other deltas of a step, so that they come in one message."""

_MAX_WAIT_S = 60.0
_WATCH_S = 0.25


class EngineStatus(NamedTuple):
    """`fingerprint`: the numerics id. `pids`: of all ranks, rank 0 first. `busy_s`: how long the current step has lasted.
    `started_s`: Unix time of the process's start."""

    fingerprint: str
    bounds: ModelLimits
    pids: tuple[int, ...]
    node_id: str
    started_s: float
    num_running: int
    busy_s: float


class Polled(NamedTuple):
    """`busy_s`: how long the current step has lasted."""

    deltas: tuple[Delta, ...]
    busy_s: float


@dataclass
class _Client:
    """`running`: ids of the requests that the client waits for. `deltas`: those not polled yet."""

    name: str
    changed: threading.Condition
    running: set[str] = field(default_factory=set)
    deltas: list[Delta] = field(default_factory=list)
    seen_s: float = field(default_factory=time.monotonic)
    num_polling: int = 0

    @property
    def has_whole_step(self) -> bool:
        """Whether every running request has a delta waiting."""
        return sum(delta.finish_reason is None for delta in self.deltas) >= len(self.running)

    def inner_id(self, request_id: str) -> str:
        """The id inside the engine: two clients may use the same ids."""
        return f"{self.name}/{request_id}"


class EngineHost:
    """States: serving -> lost, when the engine is dead or closed; then every method raises ReplicaLost. Call from any thread.

    A client that has not polled for `client_timeout_s` is forgotten: its requests are cancelled, its deltas dropped, and its next
    call raises ReplicaLost. Requests are for one choice each.
    """

    def __init__(self, engine: Engine, *, client_timeout_s: float = 30.0) -> None:
        self._engine = engine
        self._client_timeout_s = client_timeout_s
        self._started_s = time.time()
        self._lock = threading.Lock()
        self._clients: dict[str, _Client] = {}
        self._closed = ""
        self._step_called_s = 0.0
        threading.Thread(target=self._watch, daemon=True, name="engine-watch").start()

    def status(self) -> EngineStatus:
        engine = self._engine
        bounds = ModelLimits(engine.target.vocab_size, engine.max_context_tokens, engine.target.eos_ids)
        with self._lock:
            num_running = sum(len(client.running) for client in self._clients.values())
        return EngineStatus(
            engine.fingerprint, bounds, (os.getpid(),), "", self._started_s, num_running, self._busy_s()
        )

    @in_group(ORDERED)
    def join(self, client: str) -> None:
        """Comes before every other call of a client."""
        with self._lock:
            self._check_serving()
            self._clients[client] = _Client(client, threading.Condition(self._lock))

    @in_group(ORDERED)
    def leave(self, client: str) -> None:
        """Forget a client and cancel its requests; unknown clients are ignored."""
        with self._lock:
            state = self._clients.pop(client, None)
            cancelled = list(state.running) if state else []
            if state is not None:
                state.running.clear()
        for request_id in cancelled:
            self._engine.cancel(f"{client}/{request_id}")

    @in_group(ORDERED)
    def submit(self, client: str, request: Request) -> None:
        """Run a request. One that the engine refuses ends with an ERROR delta. Raises: ReplicaLost."""
        with self._lock:
            state = self._client(client)
            state.running.add(request.id)
        inner = replace(request, id=state.inner_id(request.id))
        try:
            self._engine.submit(inner, self._listener(state, request.id))
        except EngineError as cause:
            raise ReplicaLost(self._lost or str(cause)) from cause
        except Exception as error:
            message = str(error) or type(error).__name__
            refused = Delta(request.id, request.choices[0], (), "", (), FinishReason.ERROR, None, message)
            self._listener(state, request.id)(refused)
        with self._lock:
            is_forgotten = self._clients.get(client) is not state
        if is_forgotten:
            self._engine.cancel(inner.id)

    @in_group(ORDERED)
    def cancel(self, client: str, request_id: str) -> None:
        """Takes effect within one step; no more deltas come. Unknown and finished requests are ignored. Raises: ReplicaLost."""
        with self._lock:
            state = self._client(client)
            state.running.discard(request_id)
        self._engine.cancel(state.inner_id(request_id))

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
        return Polled(deltas, self._busy_s())

    @in_group(ORDERED)
    def purge(self, salts: Sequence[str]) -> None:
        """Forget every cached prefix and earlier answer of these tenants. Raises: ReplicaLost."""
        with self._lock:
            self._check_serving()
        for salt in salts:
            self._engine.purge(salt)

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
            raise ReplicaLost("the replica has not heard of this client for too long")
        return self._clients[client]

    # -- from any thread ---------------------------------------------------------------------------------------------

    def _listener(self, state: _Client, request_id: str) -> Callable[[Delta], None]:
        """For the engine's thread. An engine that closes cancels its requests; clients do not get those deltas, because the
        requests can continue elsewhere."""

        def listen(delta: Delta) -> None:
            with self._lock:
                if request_id not in state.running:
                    return
                if delta.finish_reason is FinishReason.CANCELLED:
                    self._closed = self._closed or "the engine was closed"
                if delta.finish_reason is not None:
                    state.running.discard(request_id)
                if not self._lost:
                    state.deltas.append(replace(delta, request_id=request_id))
                state.changed.notify_all()

        return listen

    def _end(self, why: str) -> None:
        with self._lock:
            self._closed = self._closed or why
            for state in self._clients.values():
                state.changed.notify_all()

    # -- the watching thread -----------------------------------------------------------------------------------------

    def _busy_s(self) -> float:
        """How long the current step has lasted: the time since the watching thread called into the engine's thread."""
        called_s = self._step_called_s
        return time.monotonic() - called_s if called_s else 0.0

    def _watch(self) -> None:
        while True:
            time.sleep(_WATCH_S)
            self._step_called_s = time.monotonic()
            try:
                self._engine.between_steps(lambda: None)
            except EngineClosed as cause:
                self._end(self._engine.lost or str(cause))
                return
            self._step_called_s = 0.0
            for client in self._silent_clients():
                self.leave(client)

    def _silent_clients(self) -> list[str]:
        oldest_s = time.monotonic() - self._client_timeout_s
        with self._lock:
            clients = list(self._clients.values())
            return [state.name for state in clients if not state.num_polling and state.seen_s < oldest_s]

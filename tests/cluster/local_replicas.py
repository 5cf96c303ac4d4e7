"""Replicas in this process: real engines and hosts, and connections that are lost when a test says so.

>>> with replicas(targets) as local:
...     router = Router(local.all, Losing(losses), SETTINGS)
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tiny_target import tiny_engine

from ragspec.cluster.actors import Replica
from ragspec.cluster.engine_host import EngineHost, EngineStatus, Polled
from ragspec.cluster.routing.policy import RoutingConfig
from ragspec.cluster.routing.replica_client import ReplicaGone
from ragspec.core import Delta, Request
from ragspec.drafting.copy import CopyDrafter
from ragspec.engine.engine import Engine
from ragspec.engine.target import Target
from ragspec.errors import ReplicaLost

SETTINGS = RoutingConfig(poll_s=0.2, retry_s=0.05, replay_timeout_s=20.0, start_timeout_s=20.0)
Targets = Callable[[int], Sequence[Target]]


class LocalReplica:
    """A replica in this process. While `is_lost`, no call is answered; `epoch` counts its restarts."""

    def __init__(self, host: EngineHost, engine: Engine, replicas: LocalReplicas, name: str) -> None:
        self.host, self.engine, self.replicas, self.name = host, engine, replicas, name
        self.is_lost, self.epoch = False, 0

    def wait_until_serving(self, is_closed: threading.Event) -> EngineStatus:
        """As a `ReplicaClient`; a host that hangs is noted as killed and stays lost."""
        while not is_closed.wait(0.01):
            if not self.is_lost:
                status = self.host.status()
                if status.busy_s <= self.replicas.step_timeout_s:
                    return status
                self.replicas.killed.append(self.name)
                self.is_lost = True
        raise ReplicaGone("the connection was closed")


class LocalReplicas:
    """Replicas by name. A router that connects to one again finds it serving, unless it does not `revive`."""

    def __init__(self, hosts: dict[str, EngineHost], engines: dict[str, Engine]) -> None:
        self.hosts, self.engines = hosts, engines
        self.step_timeout_s = SETTINGS.step_timeout_s
        self.connected: list[str] = []
        self.killed: list[str] = []
        self.revives = True
        self._slots = {name: LocalReplica(host, engines[name], self, name) for name, host in hosts.items()}

    @property
    def all(self) -> list[Replica]:
        return [Replica(name, slot) for name, slot in self._slots.items()]

    @property
    def num_running(self) -> list[int]:
        """Requests that clients wait for, of each replica."""
        return [host.status().num_running for host in self.hosts.values()]

    @property
    def is_idle(self) -> bool:
        """Whether no engine computes anything."""
        return all(engine.load().num_running + engine.load().num_waiting == 0 for engine in self.engines.values())

    @property
    def num_reconnects(self) -> int:
        return len(self.connected) - len(set(self.connected))

    def connecting(self, name: str) -> None:
        if name in self.connected and not self.revives:
            self._slots[name].is_lost = True
        self.connected.append(name)

    def lose(self, name: str) -> None:
        self._slots[name].is_lost = True

    def revive(self, name: str) -> None:
        self._slots[name].epoch += 1
        self._slots[name].is_lost = False


class LocalReplicaClient:
    """A `ReplicaClient` of a host in this process."""

    def __init__(self, replica: Replica) -> None:
        self._slot: LocalReplica = replica.actor
        self._slot.replicas.connecting(replica.name)
        self._epoch = self._slot.epoch
        self.id = uuid.uuid4().hex
        self._closed = threading.Event()

    def wait_until_serving(self) -> EngineStatus:
        status = self._slot.wait_until_serving(self._closed)
        self._epoch = self._slot.epoch
        self._slot.host.join(self.id)
        return status

    def submit(self, request: Request) -> None:
        if not self._is_lost:
            self._slot.host.submit(self.id, request)

    def cancel(self, request_id: str) -> None:
        if not self._is_lost:
            self._slot.host.cancel(self.id, request_id)

    def purge(self, salts: Sequence[str]) -> None:
        if not self._is_lost:
            self._slot.host.purge(salts)

    def poll(self, wait_s: float) -> Polled:
        self._check()
        polled = self._slot.host.poll(self.id, wait_s)
        self._check()
        return polled

    def close(self, wait_s: float = 0.0) -> None:
        self._closed.set()
        self._slot.host.leave(self.id)

    @property
    def _is_lost(self) -> bool:
        return self._slot.is_lost or self._slot.epoch != self._epoch

    def _check(self) -> None:
        if self._closed.is_set():
            raise ReplicaGone("the connection was closed")
        if self._is_lost:
            raise ReplicaLost("lost by the test")


@contextlib.contextmanager
def replicas(targets: Sequence[Target], **options: Any) -> Iterator[LocalReplicas]:
    """One engine a target, each with the copy drafter unless `drafters` says otherwise."""
    make = options.pop("drafters", lambda target: [CopyDrafter(target.tokenizer, target.eos_ids)])
    client_timeout_s = options.pop("client_timeout_s", 30.0)
    with contextlib.ExitStack() as stack:
        hosts: dict[str, EngineHost] = {}
        engines: dict[str, Engine] = {}
        for number, target in enumerate(targets):
            name = f"engine-{number}"
            engines[name] = tiny_engine(target, make(target), **options)
            hosts[name] = EngineHost(engines[name], client_timeout_s=client_timeout_s)
            stack.callback(engines[name].close)
        yield LocalReplicas(hosts, engines)


connect = LocalReplicaClient


class Losing:
    """Connections that carry so many more tokens and are lost then, one after the other; later ones hold.

    A message that would carry more is cut before the delta that brings too many. `silently`: the last message is lost as well.
    """

    def __init__(self, losses: Sequence[int], silently: bool = False) -> None:
        self._losses = list(losses)
        self._silently = silently
        self._lock = threading.Lock()
        self.num_lost = 0

    def __call__(self, replica: Replica) -> _Losing:
        return _Losing(replica, self)

    def take(self, delta: Delta) -> bool:
        """Whether it still comes through; False: the connection is lost."""
        with self._lock:
            if not self._losses:
                return True
            self._losses[0] -= len(delta.token_ids)
            if self._losses[0] >= 0 and not (self._silently and delta.finish_reason):
                return True
            self._losses.pop(0)
            self.num_lost += 1
            return False


class _Losing(LocalReplicaClient):
    def __init__(self, replica: Replica, losing: Losing) -> None:
        super().__init__(replica)
        self._losing = losing
        self._lost = False

    def poll(self, wait_s: float) -> Polled:
        if self._lost:
            raise ReplicaLost("lost by the test")
        polled = super().poll(wait_s)
        for number, delta in enumerate(polled.deltas):
            if not self._losing.take(delta):
                self._lost = True
                self.cancel(delta.request_id)
                return polled._replace(deltas=polled.deltas[:number])
        return polled


@contextlib.contextmanager
def standing(*engines: Engine, after: int = 3, for_s: float = 60.0) -> Iterator[Callable[[], None]]:
    """Engines that take so many more steps and then stand still for a while before each, until this ends or what it gives is
    called.

    So that what is to happen in the middle of an output does, however slow the machine is.
    """
    go = threading.Event()

    def braked(engine: Engine) -> Callable[..., Any]:
        forward, steps = engine.target.forward_tapped, iter(range(after))

        def step(*arguments: Any) -> Any:
            if next(steps, None) is None:
                go.wait(for_s)
            return forward(*arguments)

        return step

    for engine in engines:
        engine.target.forward_tapped = braked(engine)  # type: ignore[method-assign]
    try:
        yield go.set
    finally:
        go.set()
        for engine in engines:
            del engine.target.forward_tapped

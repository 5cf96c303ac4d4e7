"""Replicas in this process: real engines and hosts, a directory over them, and connections that are lost when a test says so.

>>> with replicas(targets) as directory:
...     router = Router(directory, Losing(directory, losses), SETTINGS)
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tiny_target import tiny_engine

from ragspec.cluster.connection import LocalConnection
from ragspec.cluster.directory import Member, Table
from ragspec.cluster.host import EngineHost, Polled
from ragspec.cluster.routing import RoutingConfig
from ragspec.core import Delta
from ragspec.drafting.copy import CopyDrafter
from ragspec.engine.engine import Engine
from ragspec.engine.target import Target
from ragspec.errors import ReplicaLost

SETTINGS = RoutingConfig(poll_s=0.2, retry_s=0.05, replay_timeout_s=20.0, start_timeout_s=20.0, remembered_tokens=0)


class LocalDirectory:
    """A `Directory` of hosts in this process. One that is reported is live again at once, in its next epoch; unless it does not
    `revive` it, or does not `obey` and goes on calling it live."""

    def __init__(self, hosts: dict[str, EngineHost]) -> None:
        self.hosts = hosts
        self.reports: list[tuple[str, int, str]] = []
        self.revives = self.obeys = True
        self._changed = threading.Condition()
        self._version = 0
        self._members = {name: self._member(name, 0) for name in hosts}

    def table(self, after: int = -1, timeout_s: float = 0.0) -> Table:
        with self._changed:
            self._changed.wait_for(lambda: self._version > after, timeout_s)
            return Table(self._version, tuple(self._members.values()))

    def report(self, name: str, epoch: int, why: str) -> None:
        with self._changed:
            self.reports.append((name, epoch, why))
            if self.obeys and self._members[name].epoch == epoch:
                self._set(self._member(name, epoch + 1) if self.revives else self._members[name]._replace(state="lost"))

    def lose(self, name: str) -> None:
        with self._changed:
            self._set(self._members[name]._replace(state="lost"))

    def revive(self, name: str, host: EngineHost | None = None) -> None:
        with self._changed:
            self.hosts[name] = host or self.hosts[name]
            self._set(self._member(name, self._members[name].epoch + 1))

    def _member(self, name: str, epoch: int) -> Member:
        host = self.hosts[name]
        return Member("engine", name, epoch, "live", host.facts(), host, "here")

    def _set(self, member: Member) -> None:
        self._members[member.name] = member
        self._version += 1
        self._changed.notify_all()


@contextlib.contextmanager
def replicas(targets: Sequence[Target], **options: Any) -> Iterator[LocalDirectory]:
    """One engine a target, each with the copy drafter unless `drafters` says otherwise."""
    make = options.pop("drafters", lambda target: [CopyDrafter(target.tokenizer, target.eos_ids)])
    client_timeout_s = options.pop("client_timeout_s", 30.0)
    with contextlib.ExitStack() as stack:
        hosts: dict[str, EngineHost] = {}
        for number, target in enumerate(targets):
            host = EngineHost(tiny_engine(target, make(target), **options), client_timeout_s=client_timeout_s)
            hosts[f"engine-{number}"] = host
            stack.callback(host.close)
        yield LocalDirectory(hosts)


def connect(member: Member) -> LocalConnection:
    return LocalConnection(member.actor)


class Losing:
    """Connections that carry so many more tokens and are lost then, one after the other; later ones hold.

    A message that would carry more is cut before the delta that brings too many. `silently`: the last message is lost as well.
    """

    def __init__(self, losses: Sequence[int], silently: bool = False) -> None:
        self._losses = list(losses)
        self._silently = silently
        self._lock = threading.Lock()
        self.num_lost = 0

    def __call__(self, member: Member) -> _Losing:
        return _Losing(member.actor, self)

    def take(self, delta: Delta) -> bool:
        """Whether it still comes through; False: the connection is lost."""
        with self._lock:
            if not self._losses:
                return True
            self._losses[0] -= len(delta.token_ids)
            if self._losses[0] >= 0 and delta.finish_reason is None:
                return True
            if self._losses[0] >= 0 and not self._silently:
                return True
            self._losses.pop(0)
            self.num_lost += 1
            return False


class _Losing(LocalConnection):
    def __init__(self, host: EngineHost, losing: Losing) -> None:
        super().__init__(host)
        self._losing = losing
        self._lost = False

    def poll(self, wait_s: float) -> Polled:
        if self._lost:
            raise ReplicaLost("lost by the test")
        polled = super().poll(wait_s)
        for number, delta in enumerate(polled.deltas):
            if not self._losing.take(delta):
                self._lost = True
                self.cancel([delta.request_id])
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


def until(true: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


class Heard:
    """A listener that keeps everything, and can be waited for."""

    def __init__(self, num_choices: int = 1, act: Callable[[Delta], None] = lambda delta: None) -> None:
        self.deltas: list[Delta] = []
        self._num_open = num_choices
        self._act = act
        self.began, self.ended = threading.Event(), threading.Event()

    def __call__(self, delta: Delta) -> None:
        self.deltas.append(delta)
        self.began.set()
        self._num_open -= delta.finish_reason is not None
        if not self._num_open:
            self.ended.set()
        self._act(delta)

    def wait(self, timeout_s: float = 30.0) -> list[Delta]:
        assert self.ended.wait(timeout_s), "no end came"
        return self.deltas

"""How a router reaches one replica: in this process, or as a Ray actor. One connection is one client of the replica's host.

>>> connection = RayConnection(member.actor, heartbeat_timeout_s=2.5)
>>> connection.submit([request])
>>> while polled := connection.poll(wait_s=1.0): ...
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import ray
from ray.exceptions import RayError, RayTaskError

from ragspec.cluster.answers import told
from ragspec.cluster.directory import Member
from ragspec.cluster.host import EngineHost, Polled
from ragspec.cluster.routing import RoutingConfig
from ragspec.core import Request
from ragspec.errors import ReplicaLost

_SLICE_S = 0.25


class Connection(Protocol):
    """Every method raises ReplicaLost when the replica is dead, hangs or cannot be reached; no other error means that."""

    def submit(self, requests: Sequence[Request]) -> None:
        """All of them, or none. Raises: InputError, PromptTooLong; whatever else a request breaks."""

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Within one step."""

    def poll(self, wait_s: float) -> Polled:
        """What is new, as soon as there is anything, after `wait_s` at most."""
        ...

    def purge(self, salt: str) -> None:
        """Forget one tenant's caches."""

    def close(self) -> None:
        """Nothing more is to be asked; calls that still wait end soon."""


Connect = Callable[[Member], Connection]


class LocalConnection:
    """A host in this process."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._client = uuid.uuid4().hex

    def submit(self, requests: Sequence[Request]) -> None:
        self._host.submit(self._client, requests)

    def cancel(self, request_ids: Sequence[str]) -> None:
        self._host.cancel(self._client, request_ids)

    def poll(self, wait_s: float) -> Polled:
        return self._host.poll(self._client, wait_s)

    def purge(self, salt: str) -> None:
        self._host.purge(salt)

    def close(self) -> None:
        """A poll ends by itself."""


class RayConnection:
    """A host inside an actor that forwards its methods. Raises: ReplicaLost also when Ray itself was shut down."""

    def __init__(self, actor: Any, *, heartbeat_timeout_s: float, call_timeout_s: float = 30.0) -> None:
        self._actor = actor
        self._heartbeat_timeout_s, self._call_timeout_s = heartbeat_timeout_s, call_timeout_s
        self._client = uuid.uuid4().hex
        self._closed = False

    def submit(self, requests: Sequence[Request]) -> None:
        self._ask(self._call_timeout_s, "submit", list(requests))

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Also after `close`, then without waiting: the replica may be slow, not dead, and others write these answers by now."""
        if self._closed and ray.is_initialized():
            self._actor.cancel.remote(self._client, list(request_ids))
        else:
            self._ask(self._call_timeout_s, "cancel", list(request_ids))

    def poll(self, wait_s: float) -> Polled:
        polled: Polled = self._ask(wait_s + self._heartbeat_timeout_s, "poll", wait_s)
        return polled

    def purge(self, salt: str) -> None:
        self._ask(self._call_timeout_s, "purge", salt, known_client=False)

    def close(self) -> None:
        self._closed = True

    def _ask(self, timeout_s: float, method: str, *arguments: Any, known_client: bool = True) -> Any:
        """Why the wait is sliced: where this process itself was stopped for a while, that counts as one slice of waiting, and a
        replica that answered meanwhile is not taken for hung."""
        self._check_open()
        arguments = (self._client, *arguments) if known_client else arguments
        call = getattr(self._actor, method).remote(*arguments)
        for _ in range(math.ceil(timeout_s / _SLICE_S)):
            if ray.wait([call], timeout=_SLICE_S)[0]:
                return _answer(call)
            self._check_open()
        raise ReplicaLost(f"the replica did not answer within {timeout_s:g} s")

    def _check_open(self) -> None:
        if self._closed or not ray.is_initialized():
            raise ReplicaLost("the connection was closed" if self._closed else "Ray was shut down")


def _answer(call: Any) -> Any:
    """Raises: what the replica's code raised, as one of ragspec's errors: it lives; ReplicaLost if it does not answer."""
    try:
        return ray.get(call)
    except RayError as error:
        cause = told(error, "the replica")
        raise cause if isinstance(error, RayTaskError) else ReplicaLost(str(cause)) from error


def ray_connect(config: RoutingConfig) -> Connect:
    """What a `Router` of a Ray deployment connects with."""
    return lambda member: RayConnection(
        member.actor, heartbeat_timeout_s=config.heartbeat_timeout_s, call_timeout_s=config.call_timeout_s
    )

"""How a router calls one engine replica. One client object is one client of the replica's `EngineHost`.

>>> client = RayReplicaClient(replica.actor, RoutingConfig())
>>> client.wait_until_serving()
>>> client.submit([request])
>>> while polled := client.poll(wait_s=1.0): ...
"""

from __future__ import annotations

import math
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayError, RayTaskError

from ragspec.cluster.actors import Replica
from ragspec.cluster.engine_host import EngineStatus, Polled
from ragspec.cluster.ray_calls import ragspec_error
from ragspec.cluster.routing.policy import RoutingConfig
from ragspec.core import Request
from ragspec.errors import ReplicaLost

_SLICE_S = 0.25


class ReplicaGone(ReplicaLost):
    """The replica does not come back: its deployment ended, Ray was shut down, or the client was closed."""


class ReplicaClient(Protocol):
    """Every method raises ReplicaLost when the replica is dead, hangs or cannot be reached; no other error means that."""

    def wait_until_serving(self) -> EngineStatus:
        """Wait for a replica that starts; restart a replica that hangs. Raises: ReplicaGone."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Accept all or none. Raises: InputError, PromptTooLong, or the error that preparing a request raises."""

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Takes effect within one step."""

    def poll(self, wait_s: float) -> Polled:
        """New deltas as soon as there are any, or nothing after `wait_s`."""
        ...

    def purge(self, salt: str) -> None:
        """Forget one tenant's caches."""

    def close(self) -> None:
        """Send nothing more; calls that still wait end soon."""


Connect = Callable[[Replica], ReplicaClient]


class RayReplicaClient:
    """Client of an `EngineServer` actor."""

    def __init__(self, actor: Any, config: RoutingConfig) -> None:
        self._actor, self._config = actor, config
        self._client = uuid.uuid4().hex
        self._closed = threading.Event()

    def wait_until_serving(self) -> EngineStatus:
        """Why the kill: Ray restarts an actor that dies, and a killed one even if SIGSTOP stopped it, but detects no hang."""
        while True:
            self._check_open()
            try:
                status: EngineStatus = self._call(self._config.hang_s, self._actor.status.remote())
                if status.busy_s <= self._config.step_timeout_s:
                    return status
                ray.kill(self._actor, no_restart=False)
            except TimeoutError:
                ray.kill(self._actor, no_restart=False)
            except ActorUnavailableError:
                pass  # Ray is restarting it
            except ActorDiedError as error:
                raise ReplicaGone(str(ragspec_error(error, "the replica"))) from error
            self._closed.wait(_SLICE_S)

    def submit(self, requests: Sequence[Request]) -> None:
        self._ask("submit", self._client, list(requests))

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Also after `close`, then without waiting: a replica given up may be slow, not dead, and another one continues."""
        if self._closed.is_set() and ray.is_initialized():
            self._actor.cancel.remote(self._client, list(request_ids))
        else:
            self._ask("cancel", self._client, list(request_ids))

    def poll(self, wait_s: float) -> Polled:
        timeout_s = wait_s + self._config.heartbeat_timeout_s
        polled: Polled = self._ask("poll", self._client, wait_s, timeout_s=timeout_s)
        return polled

    def purge(self, salt: str) -> None:
        self._ask("purge", salt)

    def close(self) -> None:
        self._closed.set()

    def _ask(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        self._check_open()
        timeout_s = timeout_s or self._config.call_timeout_s
        try:
            return self._call(timeout_s, getattr(self._actor, method).remote(*arguments))
        except TimeoutError as error:
            raise ReplicaLost(f"the replica did not answer within {timeout_s:g} s") from error
        except RayActorError as error:
            raise ReplicaLost(str(ragspec_error(error, "the replica"))) from error

    def _call(self, timeout_s: float, call: Any) -> Any:
        """Waits in slices: if this process itself is stopped for a while, that counts as one slice, and a replica that answered
        meanwhile is not taken for hung.

        Raises: TimeoutError, RayActorError, ReplicaGone; ragspec's errors of the replica's code.
        """
        for _ in range(math.ceil(timeout_s / _SLICE_S)):
            if ray.wait([call], timeout=_SLICE_S)[0]:
                break
            self._check_open()
        else:
            raise TimeoutError
        try:
            return ray.get(call)
        except RayActorError:
            raise
        except RayError as error:
            cause = ragspec_error(error, "the replica")
            raise cause if isinstance(error, RayTaskError) else ReplicaLost(str(cause)) from error

    def _check_open(self) -> None:
        if self._closed.is_set() or not ray.is_initialized():
            raise ReplicaGone("the connection was closed" if self._closed.is_set() else "Ray was shut down")


def ray_connect(config: RoutingConfig) -> Connect:
    """The `Connect` of a Ray deployment."""
    return lambda replica: RayReplicaClient(replica.actor, config)

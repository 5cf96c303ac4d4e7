"""How a router calls one engine replica. A client object is one client of the replica's `EngineHost`.

>>> client = ReplicaClient(replica.actor, RoutingConfig())
>>> client.wait_until_serving()
>>> client.submit(request)
>>> while polled := client.poll(wait_s=1.0): ...
"""

import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from ragspec.cluster.actors import ragspec_error, wait_for, wait_until_healthy
from ragspec.cluster.engine_host import EngineStatus, Polled
from ragspec.cluster.routing.policy import RoutingConfig
from ragspec.core import Request
from ragspec.errors import ReplicaLost


class ReplicaGone(ReplicaLost):
    """The replica does not come back: its deployment ended, Ray was shut down, or the client was closed."""


class ReplicaClient:
    """Client of an `EngineServer` actor.

    `submit`, `cancel` and `purge` do not wait and take effect in this order; if the replica does not accept them, the next `poll`
    raises. A client that raised is not used again, except to close it.
    """

    def __init__(self, actor: Any, config: RoutingConfig) -> None:
        self._actor, self._config = actor, config
        self._id = uuid.uuid4().hex
        self._closed = threading.Event()
        self._sent: deque[tuple[Any, float]] = deque()  # calls without an answer yet, and when each was sent

    def wait_until_serving(self) -> EngineStatus:
        """Wait for a replica that starts; restart a replica that hangs. Comes first. Raises: ReplicaLost, ReplicaGone."""
        config = self._config
        try:
            status: EngineStatus = wait_until_healthy(self._actor, config.hang_s, self._check_open)
            while status.busy_s > config.step_timeout_s:
                ray.kill(self._actor, no_restart=False)
                status = wait_until_healthy(self._actor, config.hang_s, self._check_open)
        except ActorDiedError as error:
            raise ReplicaGone(str(ragspec_error(error, "the replica"))) from error
        self._ask(self._actor.join.remote(self._id), config.call_timeout_s)
        return status

    def submit(self, request: Request) -> None:
        """A request of one choice."""
        self._send(self._actor.submit, self._id, request)

    def cancel(self, request_id: str) -> None:
        """No more deltas of this request come."""
        self._send(self._actor.cancel, self._id, request_id)

    def purge(self, salts: Sequence[str]) -> None:
        """Forget the caches of these tenants."""
        self._send(self._actor.purge, list(salts))

    def poll(self, wait_s: float) -> Polled:
        """New deltas as soon as there are any, or nothing after `wait_s`. Raises: ReplicaLost, ReplicaGone."""
        self._check_sent()
        timeout_s = wait_s + self._config.heartbeat_timeout_s
        polled: Polled = self._ask(self._actor.poll.remote(self._id, wait_s), timeout_s)
        return polled

    def close(self, wait_s: float = 0.0) -> None:
        """Cancel all requests, and wait at most `wait_s` until the replica has heard of that. Calls that wait end soon."""
        if not self._closed.is_set() and ray.is_initialized():
            self._closed.set()
            left = self._actor.leave.remote(self._id)
            ray.wait([left], timeout=wait_s)

    def _send(self, method: Any, *arguments: Any) -> None:
        if not self._closed.is_set() and ray.is_initialized():
            self._sent.append((method.remote(*arguments), time.monotonic()))

    def _check_sent(self) -> None:
        """Raises: ReplicaLost if the replica did not accept a call, or not in time."""
        while self._sent:
            call, sent_s = self._sent[0]
            if not ray.wait([call], timeout=0)[0]:
                if time.monotonic() - sent_s > self._config.call_timeout_s:
                    raise ReplicaLost(f"the replica did not answer within {self._config.call_timeout_s:g} s")
                return
            self._ask(call, self._config.call_timeout_s)
            self._sent.popleft()

    def _ask(self, call: Any, timeout_s: float) -> Any:
        try:
            return wait_for(call, timeout_s, self._check_open)
        except TimeoutError as error:
            raise ReplicaLost(f"the replica did not answer within {timeout_s:g} s") from error
        except RayError as error:
            raise ReplicaLost(str(ragspec_error(error, "the replica"))) from error

    def _check_open(self) -> None:
        if self._closed.is_set() or not ray.is_initialized():
            raise ReplicaGone("the connection was closed" if self._closed.is_set() else "Ray was shut down")

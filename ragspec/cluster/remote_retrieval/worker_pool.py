"""Interchangeable actors as one client sees them: which can be called, which are suspect, which Ray is restarting.

A worker whose call fails or is late is not called again until it answers a health check. A worker that answers none is killed,
and Ray restarts it. Makes no calls but health checks (`hedged_call` makes the others).

>>> pool = WorkerPool(deployment.replicas_of("shard"), what="a shard of the index")
>>> pool.available()
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError

from ragspec.cluster.actors import Replica
from ragspec.errors import RetrievalError

HANG_S = 8.0
_RETRY_S = 0.25
_CHECK_S = 1.0

_log = logging.getLogger(__name__)

_State = Literal["up", "suspect", "restarting", "warming"]


class Worker(NamedTuple):
    """A replica between two restarts; `generation` counts them."""

    name: str
    generation: int
    actor: Any


class WorkerPool:
    """Workers of one kind. Safe to use from several threads."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        what: str,
        warm: Callable[[Worker], None] | None = None,
        hang_s: float = HANG_S,
    ) -> None:
        """`what` names a worker in errors. `warm` prepares a restarted worker; until it returns, other workers are preferred.
        `hang_s`: a worker that answers no health check for so long is killed."""
        self.what = what
        self.is_closed = False
        self.turns = itertools.count()
        self._workers = {replica.name: Worker(replica.name, 0, replica.actor) for replica in replicas}
        self._states: dict[str, _State] = dict.fromkeys(self._workers, "up")
        self._warm, self._hang_s = warm, hang_s
        self._changed = threading.Condition()
        self.version = 0
        """Rises when a worker is lost or comes back."""

    @property
    def names(self) -> list[str]:
        """Of all workers, lost ones included: they come back under the same name."""
        return list(self._workers)

    def available(self) -> list[Worker]:
        """Workers to call; those that are still being prepared only if there is no other."""
        up = self._in("up")
        return up or self._in("warming")

    def alive(self) -> list[Worker]:
        """Workers that Ray is not restarting."""
        return self._in("up", "warming", "suspect")

    def is_lost(self, worker: Worker) -> bool:
        """Whether a call to it will not be answered any more."""
        return self._workers[worker.name] != worker or self._states[worker.name] == "restarting"

    def lose(self, worker: Worker, why: str) -> None:
        """A call was lost with the worker's process: wait for its restart."""
        self._leave(worker, "restarting", why)

    def suspect(self, worker: Worker) -> None:
        """The worker is late: check its health, and call others until it answers."""
        self._leave(worker, "suspect", "it is late")

    def wait(self, after: int, timeout_s: float) -> None:
        """Until `version` exceeds `after`, or the time has passed."""
        with self._changed:
            self._changed.wait_for(lambda: self.version > after, timeout_s)

    def close(self) -> None:
        """Calls that run end with a RetrievalError; the actors live on."""
        self.is_closed = True

    def check_open(self) -> None:
        """Raises: RetrievalError."""
        if self.is_closed or not ray.is_initialized():
            raise RetrievalError(
                f"{self.what} was closed" if self.is_closed else f"{self.what} is lost: Ray was shut down"
            )

    def _in(self, *states: _State) -> list[Worker]:
        return [worker for name, worker in self._workers.items() if self._states[name] in states]

    def _leave(self, worker: Worker, state: _State, why: str) -> None:
        """One thread at a time recovers a worker."""
        with self._changed:
            before = self._states[worker.name]
            if self._workers[worker.name] != worker or before == "restarting" or before == state:
                return
            self._set(worker.name, state)
        _log.warning("%s: %s", worker.name, why)
        if before != "suspect":
            name = "ragspec-recover"
            threading.Thread(target=self._recover, args=(worker,), name=name, daemon=True).start()

    def _recover(self, worker: Worker) -> None:
        """Wait until it answers a health check, prepare it if its process is another, then use it again."""
        name = worker.name
        try:
            self._await_answer(worker)
            with self._changed:
                if self._states[name] == "suspect":  # it was only slow
                    self._set(name, "up")
                    return
                worker = self._workers[name] = worker._replace(generation=worker.generation + 1)
                self._set(name, "warming")
            if self._warm is not None:
                self._warm(worker)
        except (Exception, SystemExit) as error:  # the latter: Ray raises it while it is shut down
            if self.is_closed or not ray.is_initialized() or isinstance(error, ActorDiedError):
                return
            _log.warning("%s could not be prepared: %s", name, error)
        with self._changed:
            if self._workers[name] == worker and self._states[name] == "warming":
                self._set(name, "up")

    def _await_answer(self, worker: Worker) -> None:
        """Raises: RetrievalError if the pool was closed, ActorDiedError if Ray does not restart it."""
        while True:
            self.check_open()
            ping = worker.actor.ping.remote()
            try:
                self._get(ping)
                return
            except GetTimeoutError:
                _log.warning("%s did not answer for %g s and is killed", worker.name, self._hang_s)
                ray.kill(worker.actor, no_restart=False)
            except ActorDiedError:
                raise
            except RayError:  # Ray is restarting it
                pass
            with self._changed:
                self._set(worker.name, "restarting")
            time.sleep(_RETRY_S)

    def _get(self, ping: Any) -> None:
        """Raises: GetTimeoutError after `hang_s`."""
        for _ in range(max(1, round(self._hang_s / _CHECK_S))):
            try:
                ray.get(ping, timeout=min(_CHECK_S, self._hang_s))
                return
            except GetTimeoutError:
                self.check_open()
        raise GetTimeoutError

    def _set(self, name: str, state: _State) -> None:
        self._states[name] = state
        self.version += 1
        self._changed.notify_all()

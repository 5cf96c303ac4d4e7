"""Calls to actors that end: with their answer, with the error of the actor's code, or with one that says what is lost.

>>> actor = SoleActor(Index, (config,), what="the index")
>>> actor.ask("look_up", queries, timeout_s=30.0)
>>> actor.close()
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from ragspec.cluster.pool import cpus_per_worker
from ragspec.errors import EngineError, RagspecError, RetrievalError

MAX_RETRIES = 3
_TIMES_ASKED = 2
_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Why: its threads share the cores with an engine's, and would spin while those compute (measured: a search of 2 ms took 9)."""


class SoleActor:
    """An actor of its own for one object that works on one call at a time; Ray starts it again when it dies.

    Its methods must be safe to run twice, and its constructor light: what that raises is only told as a loss. Safe to call from
    several threads.
    """

    def __init__(self, kind: type, arguments: tuple[Any, ...], *, what: str) -> None:
        """Needs Ray to be initialised. `what` names the object in errors."""
        options = {
            "num_cpus": cpus_per_worker(1),
            "max_restarts": -1,
            "max_task_retries": MAX_RETRIES,
            "runtime_env": {"env_vars": _ENVIRONMENT},
        }
        remote: Any = ray.remote(kind)
        self._actor = remote.options(**options).remote(*arguments)
        self._what = what
        self._closed = False

    def ask(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """The method's answer. A call that is lost, or that half of the time has passed for, is made once more.

        Why the first is not cancelled then: Ray holds back all that was asked after a cancelled call, for 30 seconds.
        Raises: what the actor's code raised; RetrievalError if `timeout_s` pass without an answer, or the actor is lost for good.
        """
        deadline = time.monotonic() + timeout_s
        waiting: list[Any] = []
        lost: RetrievalError | None = None
        for number in range(_TIMES_ASKED):
            self._check_open()
            waiting.append(getattr(self._actor, method).remote(*arguments))
            until = deadline - timeout_s * (_TIMES_ASKED - 1 - number) / _TIMES_ASKED
            while waiting and (left_s := until - time.monotonic()) > 0:
                answered, waiting = ray.wait(waiting, timeout=left_s)
                try:
                    for answer in results(answered, self._what, timeout_s):
                        return answer
                except RetrievalError as error:
                    lost = error
        if lost and not waiting:
            raise lost
        raise RetrievalError(f"{self._what} did not answer within {timeout_s:g} s") from lost

    def close(self) -> None:
        """End the actor and what it is at; nobody is answered any more."""
        self._closed = True
        if ray.is_initialized():
            ray.kill(self._actor)

    def _check_open(self) -> None:
        if self._closed or not ray.is_initialized():
            raise RetrievalError(
                f"{self._what} was closed" if self._closed else f"{self._what} is lost: Ray was shut down"
            )


def results(
    calls: Sequence[Any], what: str, timeout_s: float | None = None, error_kind: type[EngineError] = RetrievalError
) -> list[Any]:
    """Raises: what the actors' code raised if it is one of ragspec's errors, else `error_kind`: one is lost, or it failed."""
    try:
        found: list[Any] = ray.get(list(calls), timeout=timeout_s)
    except RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, RagspecError):
            raise cause from None
        verb = "failed" if isinstance(error, RayTaskError) else "is lost"
        raise error_kind(f"{what} {verb}: {str(error).strip().splitlines()[-1]}") from error
    return found

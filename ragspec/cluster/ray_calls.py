"""Ray calls with a deadline, and Ray's errors as ragspec's.

>>> wait_for_all([actor.status.remote()], timeout_s=5.0, name="engine-0")
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ObjectStoreFullError, OutOfDiskError, RayActorError, RayError, RayTaskError

from ragspec.errors import EngineError, RagspecError

_log = logging.getLogger(__name__)

_SLICE_S = 0.25


def wait_for_all(calls: Sequence[Any], timeout_s: float, name: str) -> list[Any]:
    """The results of all calls. `name`: of the actor, in errors.

    Raises: the actor's own error if it is one of ragspec's, else EngineError: lost, failed, or not in time.
    """
    _, waiting = ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)
    if waiting:
        raise EngineError(f"{name} did not answer within {timeout_s:g} s")
    try:
        results: list[Any] = ray.get(list(calls))
    except RayError as error:
        raise ragspec_error(error, name) from error
    return results


def wait_for(call: Any, timeout_s: float, check_open: Callable[[], None]) -> Any:
    """The result of a call. `check_open` raises when nobody waits for it any more.

    Waits in slices: if this process itself is stopped for a while, that counts as one slice, and an actor that answered meanwhile
    is not taken for hung. Raises: TimeoutError, RayError.
    """
    for _ in range(math.ceil(timeout_s / _SLICE_S)):
        check_open()
        if ray.wait([call], timeout=_SLICE_S)[0]:
            return ray.get(call)
    raise TimeoutError


def wait_until_healthy(actor: Any, hang_s: float, check_open: Callable[[], None]) -> Any:
    """The actor's status, once it answers. An actor that does not answer for `hang_s` is killed.

    Why the kill: Ray restarts an actor that dies, and a killed actor even if SIGSTOP stopped it, but detects no hang.
    Raises: ActorDiedError if Ray does not restart it; the errors of its `status` and of `check_open`.
    """
    while True:
        try:
            return wait_for(actor.status.remote(), hang_s, check_open)
        except TimeoutError:
            _log.warning("an actor did not answer for %g s and is killed", hang_s)
            ray.kill(actor, no_restart=False)
        except ActorDiedError:
            raise
        except RayActorError:  # Ray is restarting it
            time.sleep(_SLICE_S)


def ragspec_error(error: RayError, name: str) -> RagspecError:
    """The ragspec error that an actor's code raised, or an EngineError in one line."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, RagspecError):
        return cause
    lines = _lines(error)
    if isinstance(error, RayTaskError):
        return EngineError(f"{name} failed: {lines[-1]}")
    if isinstance(error, ObjectStoreFullError | OutOfDiskError):
        return EngineError(f"{name}: Ray's object store is full: {lines[0]}")
    return EngineError(f"{name} is lost: {lines[-1].partition('. ')[0]}")


def last_line(error: BaseException) -> str:
    """Ray puts the root cause into the last line of an error; the error's type if it has no text."""
    return _lines(error)[-1]


def _lines(error: BaseException) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]


@contextlib.contextmanager
def ignore_dead_actors() -> Iterator[None]:
    """For calls to actors that may have ended; Ray raises ValueError for an unknown name."""
    try:
        yield
    except (RagspecError, RayError, ValueError):
        pass

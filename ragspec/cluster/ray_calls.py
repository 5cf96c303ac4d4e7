"""Ray calls with a deadline, and Ray's errors as ragspec's.

>>> wait_for_all([actor.status.remote()], timeout_s=5.0, name="engine-0")
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayError, RayTaskError

from ragspec.errors import EngineError, RagspecError


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

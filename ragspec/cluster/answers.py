"""Calls with a deadline: their answers, or one error that says who did not answer, and why."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayError, RayTaskError

from ragspec.errors import EngineError, RagspecError


def answers(calls: Sequence[Any], timeout_s: float, what: str) -> list[Any]:
    """Raises: what the actors' code raised if it is one of ragspec's errors, else EngineError: lost, failed, or not in time."""
    _, waiting = ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)
    if waiting:
        raise EngineError(f"{what} did not answer within {timeout_s:g} s")
    try:
        found: list[Any] = ray.get(list(calls))
    except RayError as error:
        raise told(error, what) from error
    return found


def told(error: RayError, what: str) -> RagspecError:
    """The error of ragspec's that one of Ray's stands for: what an actor's code raised, or an EngineError in one line."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, RagspecError):
        return cause
    lines = _lines(error)
    if isinstance(error, RayTaskError):
        return EngineError(f"{what} failed: {lines[-1]}")
    if isinstance(error, ObjectStoreFullError | OutOfDiskError):
        return EngineError(f"{what}: Ray's object store is full: {lines[0]}")
    return EngineError(f"{what} is lost: {lines[-1].partition('. ')[0]}")


def one_line(error: BaseException) -> str:
    """Its last line, where Ray puts what really happened; its kind if it says nothing."""
    return _lines(error)[-1]


def _lines(error: BaseException) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]


@contextlib.contextmanager
def whatever_happens() -> Iterator[None]:
    """For what is tried on something that may be dead already."""
    try:
        yield
    except (RagspecError, RayError, ValueError):  # ValueError: no actor of that name
        pass

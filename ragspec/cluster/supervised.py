"""The directory of a deployment as its clients see it: a supervisor elsewhere, which may be away for some seconds."""

from __future__ import annotations

import time
from typing import Any

import ray

from ragspec.cluster.answers import answers
from ragspec.cluster.directory import Table
from ragspec.errors import EngineError

_GRACE_S = 3.0
_PAUSE_S = 0.25
_EMPTY = Table(-1, ())


class SupervisedDirectory:
    """While the supervisor is started again, the last table stands. Safe to use from several threads."""

    def __init__(self, supervisor: Any) -> None:
        self._supervisor = supervisor
        self._latest = _EMPTY

    def table(self, after: int = -1, timeout_s: float = 0.0) -> Table:
        """As `Directory.table`. Raises: EngineError when Ray was shut down, or there never was a table."""
        deadline = time.monotonic() + timeout_s
        while True:
            _check_ray()
            left_s = max(0.0, deadline - time.monotonic())
            try:
                call = self._supervisor.table.remote(after, left_s)
                (table,) = answers([call], left_s + _GRACE_S, "the deployment's supervisor")
            except EngineError:
                if time.monotonic() >= deadline:
                    if self._latest is _EMPTY:
                        raise
                    return self._latest
                time.sleep(_PAUSE_S)
            else:
                self._latest = max(self._latest, table, key=lambda known: known.version)
                return self._latest

    def report(self, name: str, epoch: int, why: str) -> None:
        """Not waited for: a supervisor that is away finds out by itself. Raises: EngineError when Ray was shut down."""
        _check_ray()
        self._supervisor.report.remote(name, epoch, why)


def _check_ray() -> None:
    if not ray.is_initialized():
        raise EngineError("Ray was shut down")

"""The service's process as faults need it: its disk is slow when a file says so.

Changes functions of this process for good, so it runs in a process of its own. Never decides when: `service_faults` does.
"""

from __future__ import annotations

import functools
import os
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ragspec.drafting.cost_model import CostTable
from ragspec.errors import RagspecError

_COSTS = CostTable.measure(lambda rows, context: 0.001 + 1e-5 * rows, [0, 1024], 512)
"""Why not measured: it would take half of a start, and no promise depends on it."""
_SLOW_S = 0.2
_DURABLE = ("COMMIT", "PRAGMA wal_checkpoint")
"""Statements with which SQLite writes to the disk."""


def serve(disk: Path, keys: Path, port: int, slow: Path) -> None:
    """The process. While the file `slow` exists, writing durably takes longer. Exits with 1 after an error that says why."""
    from pipelines.benchmarks.small_service import small_backend
    from services.app import build_app
    from services.embedded import Server, listening
    from services.keys import KeyFile

    slow_down(slow)
    try:
        with small_backend(disk, _COSTS, port=port) as backend, listening(backend.config.service) as listener:
            Server(build_app(backend, KeyFile(keys)), backend, listener).run()
    except RagspecError as error:
        print(f"the service did not start: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def slow_down(slow: Path) -> None:
    """From now on durable writes of this process wait while the file exists; those of SQLite wait with its lock held."""

    class SlowConnection(sqlite3.Connection):
        def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
            if statement.startswith(_DURABLE):
                _wait(slow)
            return super().execute(statement, *values)

    os.fsync, os.replace = _slowed(os.fsync, slow), _slowed(os.replace, slow)
    sqlite3.connect = functools.partial(sqlite3.connect, factory=SlowConnection)


def _slowed(call: Callable[..., Any], slow: Path) -> Callable[..., Any]:
    def delayed(*arguments: Any) -> Any:
        _wait(slow)
        return call(*arguments)

    return delayed


def _wait(slow: Path) -> None:
    if slow.exists():
        time.sleep(_SLOW_S)

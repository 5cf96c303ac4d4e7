"""The service's process as faults need it: its disk is slow and its clock is wrong while a file says so.

Changes functions of this process for good, so it runs in a process of its own. Never decides when: `service_faults` does.
"""

from __future__ import annotations

import functools
import os
import sqlite3
import sys
import time
from collections.abc import Callable
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any, NamedTuple, Self

from ragspec.errors import RagspecError

_SLOW_S = 0.2
_DURABLE = ("COMMIT", "PRAGMA wal_checkpoint")
"""Statements with which SQLite writes to the disk."""


class ServiceOptions(NamedTuple):
    """`disk`: holds the service's data. `folder`: holds its keys and the files that ask for faults. `namespace`: of its network;
    empty: that of its parent."""

    disk: Path
    folder: Path
    port: int
    host: str = "127.0.0.1"
    namespace: str = ""

    @property
    def keys(self) -> Path:
        return self.folder / "keys.json"

    @property
    def slow(self) -> Path:
        """While this file exists, writing durably takes longer."""
        return self.folder / "slow"

    @property
    def clock(self) -> Path:
        """While this file exists, the wall clock is ahead by the seconds in it."""
        return self.folder / "clock"


def serve(options: ServiceOptions) -> None:
    """The process. Exits with 1 after an error that says why."""
    from pipelines.benchmarks.chaos.network_namespace import enter
    from pipelines.benchmarks.small_service import small_backend
    from ragspec.drafting.cost_model import CostTable
    from services.app import build_app
    from services.embedded import Server, listening
    from services.keys import KeyFile

    # Why not measured: it would take half of a start, and no promise depends on it
    costs = CostTable.measure(lambda rows, context: 0.001 + 1e-5 * rows, [0, 1024], 512)
    if options.namespace:
        enter(options.namespace)
    slow_down(options.slow)
    shift_clock(options.clock)
    try:
        with (
            small_backend(options.disk, costs, host=options.host, port=options.port) as backend,
            listening(backend.config.service) as listener,
        ):
            Server(build_app(backend, KeyFile(options.keys)), backend, listener).run()
    except RagspecError as error:
        print(f"the service did not start: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def shift_clock(clock: Path) -> None:
    """From now on the wall clock of this process is ahead by the seconds in the file, while it exists.

    Reaches `time.time`, `time.time_ns` and every `datetime` in ragspec. Monotonic clocks stay right, and so do times of files.
    """
    right_ns = time.time_ns

    def shifted_ns() -> int:
        try:
            return right_ns() + int(clock.read_text()) * 10**9
        except OSError:
            return right_ns()

    class ShiftedDatetime(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return cls.fromtimestamp(time.time(), tz)

    time.time_ns, time.time = shifted_ns, lambda: shifted_ns() / 1e9
    for name, module in list(sys.modules.items()):
        if name.startswith(("ragspec.", "services.")) and vars(module).get("datetime") is datetime:
            vars(module)["datetime"] = ShiftedDatetime


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

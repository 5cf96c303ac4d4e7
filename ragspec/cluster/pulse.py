"""How long an engine's step has lasted, seen from outside of it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ragspec.engine.engine import Engine
from ragspec.errors import EngineClosed

_PULSE_S = 0.25

log = logging.getLogger(__name__)


class Pulse:
    """Asks the engine's thread for an answer again and again: for as long as it gives none, one step has been running."""

    def __init__(self, engine: Engine, each: Callable[[], None], ended: Callable[[str], None]) -> None:
        self._engine, self._each, self._ended = engine, each, ended
        self._asked_s = 0.0
        self._stopped = threading.Event()
        threading.Thread(target=self._run, daemon=True, name="host-pulse").start()

    @property
    def busy_s(self) -> float:
        asked_s = self._asked_s
        return time.monotonic() - asked_s if asked_s else 0.0

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(_PULSE_S):
            self._asked_s = time.monotonic()
            try:
                self._engine.between_steps(lambda: None)
            except EngineClosed as cause:
                self._ended(self._engine.lost or str(cause))
                return
            self._asked_s = 0.0
            try:
                self._each()
            except Exception:
                log.exception("a host's housekeeping failed")

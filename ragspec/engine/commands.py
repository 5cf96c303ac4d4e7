"""What the outside asks of the engine's thread.

>>> commands.put(call)                              # from any thread
>>> while commands.run(lambda: scheduler.idle): step()
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


class Commands:
    """Calls in order of arrival.

    `beat`: what an idle engine does every `beat_s` seconds, whatever else it is asked; None: it sleeps until it is asked.
    """

    def __init__(self, beat: Callable[[], None], beat_s: float | None) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._beat, self._beat_s = beat, beat_s
        self._due = 0.0

    def put(self, call: Callable[[], None]) -> None:
        self._queue.put(call)

    def end(self) -> None:
        """What is put after this is not run."""
        self._queue.put(None)

    def run(self, idle: Callable[[], bool]) -> bool:
        """Run what was asked; wait for it as long as the engine is idle. False: the end. Raises: what `beat` raises."""
        while True:
            waits = idle()
            try:
                call = self._queue.get(waits, self._until_beat() if waits else None)
            except queue.Empty:
                if not waits:
                    return True
                continue
            if call is None:
                return False
            try:
                call()
            except Exception:
                log.exception("a command to the engine failed")

    def _until_beat(self) -> float | None:
        """Seconds; beats first if that is due."""
        if self._beat_s is None:
            return None
        if time.monotonic() >= self._due:
            self._beat()
            self._due = time.monotonic() + self._beat_s
        return max(0.0, self._due - time.monotonic())


def each_tried(calls: Iterable[Callable[[T], None]], what: T) -> None:
    """One that fails is logged, and keeps no other from being made."""
    for call in calls:
        try:
            call(what)
        except Exception:
            log.exception("%s failed; what comes after it goes on", getattr(call, "__qualname__", call))

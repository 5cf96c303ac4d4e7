"""Whether a model can still compute, asked after a forward that failed.

A forward may fail because of its own rows, and the next one computes. But after memory ran out, oneDNN never again computes a
shape that it has not computed before, though the memory is back ("could not create a primitive"). Then only a new process helps:
a supervisor starts the service again, or another replica goes on.

    >>> ModelHealth("the encoder").failed(lambda: model([[0] * 17]))        # "" as long as the model computes, or has lately
    ''
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

_LOST_S, _FORGOTTEN_S = 10.0, 60.0
"""Why not at once: memory that is short for a moment is no reason to end. Failures an hour apart are two moments."""


class ModelHealth:
    """`name` begins the reason why a model is lost."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._first_s = self._last_s = -math.inf

    def failed(self, probe: Callable[[], object]) -> str:
        """A forward has failed: runs `probe`, a forward of the same shape and arbitrary content.

        Returns why the model is lost, if all probes of 10 seconds have failed; else an empty text.
        """
        try:
            probe()
        except Exception as cause:
            now = time.monotonic()
            if now - self._last_s > _FORGOTTEN_S:
                self._first_s = now
            self._last_s = now
            is_lost = now - self._first_s > _LOST_S
            return f"{self._name} computes nothing new any more: {type(cause).__name__}: {cause}" if is_lost else ""
        self._last_s = -math.inf
        return ""

"""Whether a model can still compute, asked after a forward that failed.

A forward may fail because of its own rows, and the next one computes. But some libraries compute nothing any more after they ran
out of memory, though the memory is back (oneDNN: "could not create a primitive"). Then only a new process helps: a supervisor
starts the service again, or another replica goes on.

    >>> health = ModelHealth("the encoder", lambda: model(PROBE))
    >>> health.failed()         # "" as long as the model computes, or has lately
    ''
"""

from __future__ import annotations

import time
from collections.abc import Callable

_LOST_S = 10.0
"""Why not at once: memory that is short for a moment is no reason to end."""


class ModelHealth:
    """`probe` computes something small; what its error says of a model that cannot compute begins with `name`."""

    def __init__(self, name: str, probe: Callable[[], object]) -> None:
        self._name, self._probe = name, probe
        self._failing_since_s: float | None = None

    def succeeded(self) -> None:
        """A forward has computed something."""
        self._failing_since_s = None

    def failed(self) -> str:
        """A forward has failed: runs the probe. Returns why the model is lost; empty unless nothing computed for 10 seconds."""
        try:
            self._probe()
        except Exception as cause:
            now = time.monotonic()
            self._failing_since_s = now if self._failing_since_s is None else self._failing_since_s
            is_lost = now - self._failing_since_s > _LOST_S
            return f"{self._name} computes nothing any more: {type(cause).__name__}: {cause}" if is_lost else ""
        self._failing_since_s = None
        return ""

"""Whether a target can still compute, asked after a step that failed.

A step may fail because of its own rows, and the next one computes. But some libraries compute nothing any more after they ran out
of memory, though the memory is back (oneDNN: "could not create a primitive"). Then only a new process helps: another replica
goes on, or a supervisor starts the service again.
"""

from __future__ import annotations

import time

from ragspec.engine.measurements import forward_s
from ragspec.engine.target import Target
from ragspec.errors import RankLost
from ragspec.numerics.kv_cache import OutOfSlots

_LOST_S = 10.0
"""Why not at once: memory that is short for a moment is no reason to end."""


class TargetHealth:
    """Used by the engine's thread alone."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._failing_since_s: float | None = None

    def step_succeeded(self) -> None:
        self._failing_since_s = None

    def step_failed(self) -> None:
        """Computes one row of arbitrary content. Raises: RankLost if no row has been computed for 10 seconds."""
        try:
            forward_s(self._target, 1, 1)
        except OutOfSlots:  # running sequences hold all of them, and tell more with their next step
            return
        except Exception as cause:
            now = time.monotonic()
            self._failing_since_s = now if self._failing_since_s is None else self._failing_since_s
            if now - self._failing_since_s > _LOST_S:
                reason = f"the target computes nothing any more: {type(cause).__name__}: {cause}"
                raise RankLost(reason) from cause
        else:
            self._failing_since_s = None

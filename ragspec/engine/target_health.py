"""The health of an engine's target, asked after a step that failed: a target that computes nothing any more ends the engine."""

from __future__ import annotations

import contextlib

from ragspec.engine.measurements import forward_s
from ragspec.engine.target import Target
from ragspec.errors import RankLost
from ragspec.numerics.health import ModelHealth
from ragspec.numerics.kv_cache import OutOfSlots


class TargetHealth:
    """Used by the engine's thread alone."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._health = ModelHealth("the target", self._compute_row)
        self.step_succeeded = self._health.succeeded

    def step_failed(self) -> None:
        """Computes one row of arbitrary content. Raises: RankLost if nothing has been computed for 10 seconds."""
        if reason := self._health.failed():
            raise RankLost(reason)

    def _compute_row(self) -> None:
        with contextlib.suppress(OutOfSlots):  # running sequences hold all, and tell more with their next step
            forward_s(self._target, 1, 1)

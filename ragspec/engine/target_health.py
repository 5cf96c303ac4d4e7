"""The health of an engine's target, asked after a step that failed: a lost target ends the engine."""

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
        self._target, self._health = target, ModelHealth("the target")

    def step_failed(self, num_rows: int) -> None:
        """`num_rows`: of the step. Raises: RankLost if no such forward of arbitrary content has computed for 10 seconds."""

        def compute() -> None:
            with contextlib.suppress(OutOfSlots):  # running sequences hold them, and tell more with their next step
                forward_s(self._target, num_rows, 1)

        if reason := self._health.failed(compute):
            raise RankLost(reason)

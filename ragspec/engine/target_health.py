"""The health of an engine's target, asked after a step that failed: a lost target ends the engine."""

from __future__ import annotations

import numpy as np

from ragspec.engine.target import Target
from ragspec.errors import RankLost
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.health import why_lost
from ragspec.numerics.kv_cache import OutOfSlots, SequenceSlots


def check_target(target: Target, num_rows: int, num_logits: int) -> None:
    """After a step of so many rows, some of them with logits. Called by the engine's thread.

    Raises: RankLost if the target is lost. A group of several ranks is not asked: it ends with any forward that fails.
    """

    def compute() -> None:
        slots = SequenceSlots(target.pool)
        try:
            batch = Batch([ScheduledSequence(slots, np.zeros(num_rows, np.int32))])
            target.forward_tapped(batch.token_ids, batch.metadata, np.arange(num_logits, dtype=np.int32), ())
            target.backend.wait()
        except OutOfSlots:
            pass  # nothing is known: running sequences hold the pages, and tell more with their next step
        finally:
            slots.release()

    if target.ranks.size == 1 and (reason := why_lost("the target", compute)):
        raise RankLost(reason)

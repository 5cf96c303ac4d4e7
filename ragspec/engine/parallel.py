"""The ranks beside rank 0: each runs the same forwards over its part of the target, and decides nothing.

Rank 0's `Target` says what to compute (`ragspec.engine.step_messages`); engine, drafters, samplers and requests are there alone.

    >>> load_follower(TargetConfig(), EngineConfig(), DistributedRanks(address, rank=1, size=2)).run()
"""

from __future__ import annotations

import numpy as np
import torch

from ragspec.config import EngineConfig, TargetConfig
from ragspec.engine.step_messages import Kind, receive
from ragspec.engine.target import Target
from ragspec.errors import ModelError
from ragspec.numerics.kv_cache import SequenceSlots
from ragspec.numerics.ranks import Ranks
from ragspec.numerics.rows import Part, StepRows
from ragspec.numerics.threads import compute_apart, num_processors, set_num_threads


class Follower:
    """A rank that follows. Owns its part of the weights and of the keys and values."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def run(self) -> None:
        """Compute what rank 0 says until it stops. Raises: RankLost when the group is broken."""
        ranks, num_threads = self._target.ranks, 0
        try:
            while (message := receive(ranks)).kind is not Kind.STOP:
                if message.step is None:
                    ranks.beat()
                    continue
                if message.num_threads != num_threads:
                    set_num_threads(num_threads := message.num_threads)
                self._target.compute(*message.step)
        finally:
            ranks.close()


def load_follower(target_config: TargetConfig, config: EngineConfig, ranks: Ranks) -> Follower:
    """This rank's part of the target, ready to `run`. Raises: ModelError, RankLost."""
    num_threads = threads_a_rank(config, ranks)
    return Follower(compute_apart(lambda: load_together(target_config, config, ranks), num_threads))


def load_together(target_config: TargetConfig, config: EngineConfig, ranks: Ranks) -> Target:
    """On every rank at once: load its part, see that all serve the same, and compute a first step, which compiles what it needs.

    Raises: ModelError for what cannot be served by so many ranks, RankLost when another rank failed.
    """
    try:
        target = Target.load(target_config, config.max_kv_tokens, ranks)
        if ranks.size > 1:
            with ranks.patiently():
                _check_alike(target, ranks)
                _warm_up(target)
    except BaseException:
        ranks.close()
        raise
    return target


def threads_a_rank(config: EngineConfig, ranks: Ranks) -> int:
    """The ranks of a group share one machine's processors."""
    return config.num_threads or max(1, num_processors() // ranks.size)


def _check_alike(target: Target, ranks: Ranks) -> None:
    """Raises: ModelError on every rank unless all have equal pools and, as far as shapes tell, parts of the same weights."""
    facts = (target.vocab_size, target.hidden_size, target.num_layers, target.num_parameters, target.pool.num_slots)
    names = ("vocabulary", "hidden size", "layers", "parameters", "KV slots")
    dtypes = ("float32", "bfloat16").index(target.config.dtype)
    own = torch.tensor([[*facts, dtypes]], dtype=torch.int64)
    everyone = ranks.all_gather(own).view(ranks.size, -1)
    differing = (everyone != everyone[0]).any(0).tolist()
    if any(differing):
        what = ", ".join(name for name, differs in zip((*names, "dtype"), differing, strict=True) if differs)
        raise ModelError(f"the ranks of one group were told to serve different targets: they differ in {what}")


def _warm_up(target: Target) -> None:
    slots = SequenceSlots(target.pool)
    step = StepRows([Part(slots, 2)])
    target.compute(np.zeros(2, np.int32), step.rows, np.arange(2, dtype=np.int32))
    step.keep(0)
    slots.release()

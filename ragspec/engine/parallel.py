"""The ranks beside rank 0: each runs the same forwards over its part of the target, and decides nothing.

Rank 0's `Target` sends every forward (`ragspec.engine.rank_messages`). Engine, drafters, samplers and requests exist on rank 0
alone.

    >>> load_follower(TargetConfig(), EngineConfig(), DistributedRanks(address, rank=1, size=2)).run()
"""

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ragspec.config import EngineConfig, TargetConfig
from ragspec.core import Say, log_progress
from ragspec.engine.kv_offload import BlockStore, FileBlocks, make_kv_offload
from ragspec.engine.rank_messages import BlockCopy, KeyRead, MessageKind, receive
from ragspec.engine.target import Target
from ragspec.errors import ConfigError, ModelError
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.kv_cache import SequenceSlots
from ragspec.numerics.ranks import Ranks
from ragspec.numerics.threads import num_processors, run_in_thread, set_num_threads


class Follower:
    """One rank other than 0. Owns its part of the weights, of the KV pool and of the blocks beside the pool."""

    def __init__(self, target: Target, store: BlockStore | None = None) -> None:
        self._target, self._store = target, store

    def run(self) -> None:
        """Compute every forward that rank 0 sends, until it sends STOP. Raises: RankLost when the group is broken."""
        ranks, num_threads = self._target.ranks, 0
        try:
            while (message := receive(ranks)).kind is not MessageKind.STOP:
                if isinstance(message.content, BlockCopy):
                    assert self._store is not None, "all ranks have one engine configuration"
                    self._store.copy(message.content)
                    continue
                if isinstance(message.content, KeyRead):
                    self._target.keys_of(message.content)
                    continue
                if message.content is None:
                    ranks.barrier()
                    continue
                if message.num_threads != num_threads:
                    set_num_threads(num_threads := message.num_threads)
                self._target.compute(*message.content)
        finally:
            ranks.close()


def load_follower(target_config: TargetConfig, config: EngineConfig, ranks: Ranks) -> Follower:
    """This rank's part of the target, ready to `run`. Raises: ModelError, ConfigError, SaveError, RankLost."""
    target = run_in_thread(lambda: load_rank(target_config, config, ranks), threads_a_rank(config, ranks))
    return Follower(target, BlockStore(target.pool, config.kv_offload_dir, ranks) if config.kv_offload_bytes else None)


def load_rank(
    target_config: TargetConfig,
    config: EngineConfig,
    ranks: Ranks,
    say: Say = log_progress,
    reserved_bytes: int = 0,
) -> Target:
    """Load this rank's part of the target. All ranks of a group call this together.

    Checks that all ranks serve the same target and computes a first forward, which compiles the kernels. Raises: ModelError for
    a target that so many ranks cannot serve, ConfigError, SaveError, RankLost when another rank failed.
    """
    try:
        if config.kv_offload_bytes and not config.kv_offload_dir and target_config.device == "cpu":
            raise ConfigError(
                "engine.kv_offload_bytes needs engine.kv_offload_dir: keys and values of this target are in main memory already"
            )
        if config.kv_offload_dir:
            FileBlocks(Path(config.kv_offload_dir), 0)  # a folder that is missing is reported before weights are read
        if ranks.size > 1:  # before the ranks exchange the sums of their int8 weights
            with ranks.without_timeout():
                _check_equal(ranks, ("dtype",), (zlib.crc32(target_config.numerics_dtype.encode()),))
        target = Target.load(target_config, config.max_kv_tokens, ranks, config.max_kv_bytes, say, reserved_bytes)
        make_kv_offload(target.pool, config, ranks)  # a budget below a block is reported before forwards are measured
        if ranks.size > 1:
            with ranks.without_timeout():
                _check_same_target(target, ranks)
                _warm_up(target)
    except BaseException:
        ranks.close()
        raise
    return target


def threads_a_rank(config: EngineConfig, ranks: Ranks) -> int:
    """The ranks of a group share one machine's processors."""
    return config.num_threads or max(1, num_processors() // ranks.size)


def _check_same_target(target: Target, ranks: Ranks) -> None:
    """Raises: ModelError on every rank unless all have equal pools and weights of the same shapes."""
    sizes = (target.vocab_size, target.hidden_size, target.num_layers, target.num_parameters, target.pool.num_slots)
    _check_equal(ranks, ("vocabulary", "hidden size", "layers", "parameters", "KV slots"), sizes)


def _check_equal(ranks: Ranks, names: Sequence[str], values: Sequence[int]) -> None:
    """Raises: ModelError on every rank, with the names of values that differ."""
    everyone = ranks.all_gather(torch.tensor([values], dtype=torch.int64)).view(ranks.size, -1)
    differing = (everyone != everyone[0]).any(0).tolist()
    if any(differing):
        what = ", ".join(name for name, differs in zip(names, differing, strict=True) if differs)
        raise ModelError(f"the ranks of one group were told to serve different targets: they differ in {what}")


def _warm_up(target: Target) -> None:
    slots = SequenceSlots(target.pool)
    batch = Batch([ScheduledSequence(slots, [0, 0])])
    target.compute(batch.token_ids, batch.metadata, np.arange(2, dtype=np.int32))
    slots.release()

"""What the processes of an engine's group become: rank 0 a host with the engine in it, the others its followers.

>>> Role("engine", load_host, (config, 1))
"""

from __future__ import annotations

import ray

from ragspec.cluster.groups import Rank
from ragspec.cluster.host import EngineHost
from ragspec.config import EngineConfig, PipelineConfig
from ragspec.engine.loading import load_engine
from ragspec.engine.parallel import Follower, load_follower
from ragspec.numerics.ranks import ONE_RANK, DistributedRanks, Ranks
from ragspec.numerics.threads import num_processors


def load_host(config: PipelineConfig, num_beside: int, rank: Rank | None = None) -> EngineHost:
    """An engine that serves; `num_beside` groups, itself included, share this node. Raises: ModelError, ConfigError, RankLost."""
    ranks = _joined(rank)
    settings = _share(config.engine, num_beside * ranks.size)
    engine = load_engine(config.target, settings, config.drafting, ranks=ranks)
    return EngineHost(engine, ray.get_runtime_context().get_node_id())


def load_rank(config: PipelineConfig, num_beside: int, rank: Rank) -> Follower:
    """A rank beside rank 0. Raises: ModelError, RankLost."""
    return load_follower(config.target, _share(config.engine, num_beside * rank.size), _joined(rank))


def _joined(rank: Rank | None) -> Ranks:
    """Waits until all of the group are there."""
    if rank is None:
        return ONE_RANK
    return DistributedRanks(rank.address, rank.rank, rank.size, timeout_s=rank.timeout_s)


def _share(config: EngineConfig, num_processes: int) -> EngineConfig:
    """Engines beside each other share the processors, unless the configuration says how many threads each has."""
    if config.num_threads is not None or num_processes == 1:
        return config
    return config.model_copy(update={"num_threads": max(1, num_processors() // num_processes)})

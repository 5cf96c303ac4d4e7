"""An engine replica in a Ray actor: rank 0 with the engine, and the other ranks of its tensor-parallel group.

Rank 0 starts its followers as child actors in its own bundle of a placement group, so a restart of rank 0 rebuilds the whole
group: Ray ends the old followers with the process that owned them. A replica that cannot go on ends its process, and Ray restarts
it.

    >>> remote_class(EngineServer, CONCURRENT_CALLS).options(scheduling_strategy=...).remote(config, topology, 1, 0)
"""

import os
import threading
import time
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ragspec.cluster.actors import HEALTH, WorkerActor, end_process, in_group, ragspec_error
from ragspec.cluster.engine_host import EngineHost, EngineStatus
from ragspec.cluster.processes import STOPPED, Process
from ragspec.cluster.topology import HEARTBEAT_S, RANK_TIMEOUT_S, Topology
from ragspec.config import EngineConfig, PipelineConfig
from ragspec.engine.engine import Engine
from ragspec.engine.loading import load_engine
from ragspec.engine.parallel import load_follower
from ragspec.errors import RagspecError, RankLost
from ragspec.numerics.ranks import ONE_RANK, DistributedRanks, Rendezvous
from ragspec.numerics.threads import num_processors

CONCURRENT_CALLS = 64
"""Each client holds one poll, and makes other calls beside it."""

_LOOPBACK = "127.0.0.1"
_FOLLOWER_ERROR_S = 1.0
_RETRY_LOADING_S = 5.0
_STOPPED_LOOKS = 2
"""A follower seen stopped this many times in a row is lost; once may be a debugger."""


class EngineServer(EngineHost, WorkerActor):
    """An `EngineHost` in an actor. Its constructor returns when the engine is loaded."""

    def __init__(self, config: PipelineConfig, topology: Topology, num_beside: int, bundle: int) -> None:
        """`num_beside`: engines on this node, itself included, which share its processors. `bundle`: of its placement group.

        A ragspec error in the first start is kept for `load`. In a restart any error ends the process, because Ray restarts a
        process that dies but not an actor whose constructor raises.
        """
        self._load_error: RagspecError | None = None
        late = threading.Timer(topology.start_timeout_s, end_process, ("the engine did not load in time",))
        late.daemon = True
        late.start()
        try:
            self._followers = _Followers(config, topology, num_beside, bundle)
            super().__init__(self._loaded(config, num_beside))
        except Exception as error:
            if ray.get_runtime_context().was_current_actor_reconstructed:
                time.sleep(_RETRY_LOADING_S)
                end_process(f"the engine cannot be loaded: {error}")
            if not isinstance(error, RagspecError):
                raise
            self._load_error = error
        late.cancel()
        self._node_id = ray.get_runtime_context().get_node_id()
        threading.Thread(target=self._watch_followers, args=(HEARTBEAT_S,), daemon=True).start()

    def load(self) -> None:
        """Raises: ModelError, ConfigError, RankLost."""
        if self._load_error is not None:
            raise self._load_error

    @in_group(HEALTH)
    def status(self) -> EngineStatus:  # type: ignore[override]
        self.load()
        status = super().status()
        pids = (*status.pids, *(process.pid for process in self._followers.processes))
        return status._replace(pids=pids, node_id=self._node_id)

    def _loaded(self, config: PipelineConfig, num_beside: int) -> Engine:
        settings = _with_threads(config.engine, num_beside * self._followers.group_size)
        try:
            return load_engine(config.target, settings, config.drafting, ranks=self._followers.join(), falls_back=False)
        except RankLost as error:
            raise self._followers.error() or error from None

    def _watch_followers(self, heartbeat_s: float) -> None:
        while self._load_error is None:
            if why := self._followers.lost():
                end_process(why)
            time.sleep(heartbeat_s)

    def _end(self, why: str) -> None:
        """The engine is dead inside a living process."""
        end_process(why)


class RankFollower:
    """A rank beside rank 0, which owns this actor."""

    def pid(self) -> int:
        return os.getpid()

    def follow(
        self, config: PipelineConfig, num_processes: int, address: str, rank: int, size: int, timeout_s: float
    ) -> None:
        """Load this rank's part of the target and compute until rank 0 ends. Raises: ModelError, RankLost."""
        target = config.target
        ranks = DistributedRanks(address, rank, size, target.collectives, timeout_s, adds=target.adds_parts)
        load_follower(target, _with_threads(config.engine, num_processes), ranks).run()


class _Followers:
    """The ranks beside rank 0, as rank 0 sees them; none in a group of one."""

    def __init__(self, config: PipelineConfig, topology: Topology, num_beside: int, bundle: int) -> None:
        self.group_size = size = topology.tensor_parallel_size
        self._timeout_s, self._target = RANK_TIMEOUT_S, config.target
        self._runs: list[Any] = []
        self._num_stopped = 0
        self.processes: list[Process] = []
        if size == 1:
            return
        self._rendezvous = Rendezvous(_LOOPBACK)  # a bundle lies on one node
        group = ray.util.get_current_placement_group()
        assert group is not None
        follower: Any = ray.remote(max_restarts=0, runtime_env={"env_vars": {"OMP_WAIT_POLICY": "PASSIVE"}})
        place = {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, bundle)}
        options = {"num_cpus": topology.cpus_per_rank, "num_gpus": topology.gpus_per_rank} | place
        self._actors = [follower(RankFollower).options(**options).remote() for _ in range(1, size)]
        self.processes = [Process.of(pid) for pid in ray.get([actor.pid.remote() for actor in self._actors])]
        self._runs = [
            actor.follow.remote(config, num_beside * size, self._rendezvous.address, rank, size, self._timeout_s)
            for rank, actor in enumerate(self._actors, 1)
        ]

    def join(self) -> Any:
        """Rank 0's view of the group, once all ranks are there. Raises: RankLost."""
        if self.group_size == 1:
            return ONE_RANK
        target, place = self._target, (self._rendezvous, 0, self.group_size)
        return DistributedRanks(*place, target.collectives, self._timeout_s, adds=target.adds_parts)

    def lost(self) -> str:
        """Why the group cannot go on; empty while it can. A follower stopped by a signal is seen before a gather times out."""
        if error := self.error(timeout_s=0.0):
            return f"a rank ended: {error}"
        is_stopped = any(process.state() in STOPPED for process in self.processes)
        self._num_stopped = self._num_stopped + 1 if is_stopped else 0
        return "a rank is stopped" if self._num_stopped >= _STOPPED_LOOKS else ""

    def error(self, timeout_s: float = _FOLLOWER_ERROR_S) -> RagspecError | None:
        """The error of a follower that ended, which says more than rank 0's."""
        ended, _ = ray.wait(self._runs, timeout=timeout_s) if self._runs else ([], [])
        try:
            ray.get(ended)
        except ray.exceptions.RayError as error:
            return ragspec_error(error, "a rank")
        return RankLost("a rank ended") if ended else None


def _with_threads(config: EngineConfig, num_processes: int) -> EngineConfig:
    """Ranks and engines on one node share its processors, unless the configuration says how many threads each has."""
    if config.num_threads is not None or num_processes == 1:
        return config
    return config.model_copy(update={"num_threads": max(1, num_processors() // num_processes)})

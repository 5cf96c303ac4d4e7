"""How many of each part a deployment has, what each reserves, and whether that fits a cluster.

>>> settings = load_settings(ClusterConfig, "cluster.yaml")        # `topology:` beside the pipeline's sections
>>> check_fits(settings.topology, [NodeResources("a", cpus=8.0, gpus=0.0)])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pydantic import Field, model_validator

from ragspec.config import ConfigSection, PipelineConfig
from ragspec.errors import ConfigError

CPUS_PER_SHARD = CPUS_PER_ENCODER = 0.1
HEARTBEAT_S = 0.5
"""A stopped rank is killed after two of these."""
RANK_TIMEOUT_S = 30.0
"""How long a rank waits for another."""
_SLACK = 1e-6


class Topology(ConfigSection):
    """The parts of a deployment and the resources that Ray reserves for them.

    Ray restarts a part that dies. Its caller kills a part that hangs.
    """

    num_replicas: int = Field(1, ge=0, le=256)
    """Engines; each is a group of ranks on one node. More: more requests at once."""
    tensor_parallel_size: Literal[1, 2, 4] = 1
    """Ranks of an engine, which share the weights. More: larger models fit."""
    num_shards: int = Field(1, ge=0, le=256)
    """Actors that hold the index; 0: no retrieval. More: less memory on each, faster search."""
    shard_replicas: int = Field(1, ge=1, le=16)
    """Shards that hold each segment. More: searches outlive a shard, at as much more memory."""
    num_encoders: int = Field(1, ge=0, le=256)
    """Actors that encode questions; 0: callers encode them."""
    cpus_per_rank: float = Field(0.5, gt=0.0)
    """CPUs that Ray reserves for a rank."""
    gpus_per_rank: float = Field(0.0, ge=0.0)
    """GPUs that Ray reserves for a rank: a whole number, or a share below 1."""
    hang_s: float = Field(4.0, ge=HEARTBEAT_S, le=600.0)
    """An actor that answers no health check for twice this time is killed. Shorter: hangs end sooner, busy machines lose
    actors."""
    start_timeout_s: float = Field(600.0, gt=0.0)
    """Time for an engine to load before it is killed."""

    @model_validator(mode="after")
    def _check(self) -> Topology:
        if not self.num_replicas + self.num_shards + self.num_encoders:
            raise ValueError("a deployment of no engine, no shard and no encoder does nothing")
        if self.gpus_per_rank > 1.0 and not self.gpus_per_rank.is_integer():
            raise ValueError(f"gpus_per_rank ({self.gpus_per_rank:g}) must be a whole number or below 1")
        return self


class ClusterConfig(PipelineConfig):
    """A pipeline's sections and its topology."""

    topology: Topology = Topology()


class DeploymentSpec(NamedTuple):
    """A deployment's topology and configuration, with absolute paths."""

    topology: Topology
    config: PipelineConfig


class NodeResources(NamedTuple):
    """The total CPUs and GPUs of a node, used or not. `name`: Ray's id of the node."""

    name: str
    cpus: float
    gpus: float


class _Demand(NamedTuple):
    """The demand for CPUs or GPUs, and how many each node has. `others`: the parts beside the engines, as text."""

    unit: str
    per_rank: float
    others: str
    for_others: float
    on_nodes: list[float]


def check_fits(topology: Topology, nodes: Sequence[NodeResources]) -> None:
    """Raises: ConfigError with the sums that exceed the cluster."""
    shards = topology.num_shards * topology.shard_replicas
    parts = [
        (shards, "shards", CPUS_PER_SHARD),
        (topology.num_encoders, "encoders", CPUS_PER_ENCODER),
    ]
    others = "".join(f" + {number} {what} x {each:g}" for number, what, each in parts if number)
    for_others = sum(number * each for number, _, each in parts)
    gpus = _Demand("GPUs", topology.gpus_per_rank, "", 0.0, [node.gpus for node in nodes])
    cpus = _Demand("CPUs", topology.cpus_per_rank, others, for_others, [node.cpus for node in nodes])
    wrong = [reason for resource in (gpus, cpus) if (reason := _shortage(topology, resource))]
    if not wrong:
        fitting = sum(min(pair) for pair in zip(_groups(topology, gpus), _groups(topology, cpus), strict=True))
        if fitting < topology.num_replicas:
            group = " and ".join(
                _amount(topology.tensor_parallel_size * r.per_rank, r.unit) for r in (gpus, cpus) if r.per_rank
            )
            wrong = [f"{topology.num_replicas} replicas need {group} on one node each, and only {fitting} find that"]
    if wrong:
        raise ConfigError("the topology does not fit: " + "; ".join(wrong))


def _shortage(topology: Topology, resource: _Demand) -> str:
    """Why the demand exceeds all nodes or the largest one; empty if it does not."""
    unit, per_rank, others, for_others, on_nodes = resource
    replicas, ranks = topology.num_replicas, topology.tensor_parallel_size
    group, largest, has = ranks * per_rank, max(on_nodes, default=0.0), sum(on_nodes)
    needed = replicas * group + for_others
    wrong = []
    if needed > has + _SLACK:
        wrong.append(f"the cluster has {has:g}")
    if replicas and group > largest + _SLACK:
        wrong.append(f"the largest node has {largest:g}, and a group needs {group:g} on one node")
    total = f"{replicas} replicas x {ranks} ranks x {_amount(per_rank, unit)}{others} = {_amount(needed, unit)}"
    return f"{total}, {'; '.join(wrong)}" if wrong else ""


def _groups(topology: Topology, resource: _Demand) -> list[int]:
    """How many engines fit on each node by this resource alone."""
    group = topology.tensor_parallel_size * resource.per_rank
    return [int((room + _SLACK) / group) if group else topology.num_replicas for room in resource.on_nodes]


def _amount(number: float, unit: str) -> str:
    return f"{number:g} {unit.removesuffix('s') if number == 1.0 else unit}"

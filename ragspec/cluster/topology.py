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

_SLACK = 1e-6


class Topology(ConfigSection):
    """The parts of a deployment and what each reserves.

    Engines are `replicas` groups of `tensor_parallel` ranks, each group on one node. The index is spread over `num_shards`
    actors, each segment held by `shard_replicas` of them; 0 shards: no retrieval.

    Ray restarts a part that dies. A part that hangs is killed by its caller: a stopped rank after two heartbeats (`heartbeat_s`),
    an actor that answers no health check for twice `hang_s`, an engine that is not loaded within `start_timeout_s`.
    `rank_timeout_s`: how long a rank waits for another.
    """

    replicas: int = Field(1, ge=0, le=256)
    tensor_parallel: Literal[1, 2, 4] = 1
    num_shards: int = Field(1, ge=0, le=256)
    shard_replicas: int = Field(1, ge=1, le=16)
    num_encoders: int = Field(1, ge=0, le=256)
    cpus_per_rank: float = Field(0.5, gt=0.0)
    gpus_per_rank: float = Field(0.0, ge=0.0)
    cpus_per_shard: float = Field(0.1, gt=0.0)
    cpus_per_encoder: float = Field(0.1, gt=0.0)
    heartbeat_s: float = Field(0.5, gt=0.0, le=60.0)
    hang_s: float = Field(4.0, gt=0.0, le=600.0)
    start_timeout_s: float = Field(600.0, gt=0.0)
    rank_timeout_s: float = Field(30.0, gt=0.0)

    @model_validator(mode="after")
    def _check(self) -> Topology:
        if not self.replicas + self.num_shards + self.num_encoders:
            raise ValueError("a deployment of no engine, no shard and no encoder does nothing")
        if self.hang_s < self.heartbeat_s:
            raise ValueError(f"hang_s ({self.hang_s:g}) is shorter than heartbeat_s ({self.heartbeat_s:g})")
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
        (shards, "shards", topology.cpus_per_shard),
        (topology.num_encoders, "encoders", topology.cpus_per_encoder),
    ]
    others = "".join(f" + {number} {what} x {each:g}" for number, what, each in parts if number)
    for_others = sum(number * each for number, _, each in parts)
    gpus = _Demand("GPUs", topology.gpus_per_rank, "", 0.0, [node.gpus for node in nodes])
    cpus = _Demand("CPUs", topology.cpus_per_rank, others, for_others, [node.cpus for node in nodes])
    wrong = [reason for resource in (gpus, cpus) if (reason := _shortage(topology, resource))]
    if not wrong:
        fitting = sum(min(pair) for pair in zip(_groups(topology, gpus), _groups(topology, cpus), strict=True))
        if fitting < topology.replicas:
            group = " and ".join(
                _amount(topology.tensor_parallel * r.per_rank, r.unit) for r in (gpus, cpus) if r.per_rank
            )
            wrong = [f"{topology.replicas} replicas need {group} on one node each, and only {fitting} find that"]
    if wrong:
        raise ConfigError("the topology does not fit: " + "; ".join(wrong))


def _shortage(topology: Topology, resource: _Demand) -> str:
    """Why the demand exceeds all nodes or the largest one; empty if it does not."""
    unit, per_rank, others, for_others, on_nodes = resource
    replicas, ranks = topology.replicas, topology.tensor_parallel
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
    group = topology.tensor_parallel * resource.per_rank
    return [int((room + _SLACK) / group) if group else topology.replicas for room in resource.on_nodes]


def _amount(number: float, unit: str) -> str:
    return f"{number:g} {unit.removesuffix('s') if number == 1.0 else unit}"

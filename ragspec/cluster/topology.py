"""How many of each part a deployment has, what each reserves, and whether that fits a cluster.

>>> settings = load_settings(ClusterConfig, "cluster.yaml")        # `topology:` beside the pipeline's sections
>>> check_fits(settings.topology, [NodeResources("a", cpus=8.0, gpus=0.0)])
"""

from __future__ import annotations

import math
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


def check_fits(topology: Topology, nodes: Sequence[NodeResources]) -> None:
    """Raises: ConfigError with the sums that exceed the cluster."""
    others = CPUS_PER_SHARD * topology.num_shards * topology.shard_replicas + CPUS_PER_ENCODER * topology.num_encoders
    cpus, gpus = (topology.tensor_parallel_size * each for each in (topology.cpus_per_rank, topology.gpus_per_rank))
    wrong = []
    for unit, needed, has in (
        ("CPUs", topology.num_replicas * cpus + others, sum(node.cpus for node in nodes)),
        ("GPUs", topology.num_replicas * gpus, sum(node.gpus for node in nodes)),
    ):
        if needed > has + _SLACK:
            wrong.append(f"it needs {needed:g} {unit}, and the cluster has {has:g}")
    num_fitting = sum(
        int(min((node.cpus + _SLACK) / cpus, (node.gpus + _SLACK) / gpus if gpus else math.inf)) for node in nodes
    )
    if num_fitting < topology.num_replicas:
        group = f"{cpus:g} CPUs" + (f" and {gpus:g} GPUs" if gpus else "")
        wrong.append(f"{topology.num_replicas} engines need {group} on one node each, and only {num_fitting} find that")
    if wrong:
        raise ConfigError("the topology does not fit: " + "; ".join(wrong))

"""Start the replicas of a deployment: check every node first, create the actors, wait until all are loaded.

Each replica has a bundle of resources in one of Ray's placement groups. Why not Ray's "SPREAD" for actors: it counts no siblings,
so it may put all encoders on one node. A placement group keeps its bundles apart, and Ray moves those of a dead node to another.

>>> check_nodes(spec)
>>> replicas = start_replicas("ragspec", spec, lifetime="detached")
>>> wait_until_loaded(replicas, timeout_s=900.0)
"""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from ragspec.cluster.actors import Replica, ragspec_error, remote_class, wait_for_all
from ragspec.cluster.engine_server import CONCURRENT_CALLS, EngineServer
from ragspec.cluster.registry import KINDS, NAMESPACE, actor_name, alive_nodes, kind_of, own_version, replica_names
from ragspec.cluster.remote_retrieval.encoders import EncoderActor
from ragspec.cluster.remote_retrieval.shards import ShardActor
from ragspec.cluster.topology import CPUS_PER_ENCODER, CPUS_PER_SHARD, DeploymentSpec, Topology
from ragspec.config import PipelineConfig
from ragspec.errors import ConfigError, EngineError

_CHECK_S = 120.0
_LOOK_S = 0.25
_PLACED_S = 10.0


class NodeCheck(NamedTuple):
    """A node's `own_version`, and the paths that do not exist there."""

    version: str
    missing: tuple[str, ...]


def check_here(paths: Sequence[str]) -> NodeCheck:
    """The check of this process's node."""
    return NodeCheck(own_version(), tuple(path for path in paths if not Path(path).exists()))


def check_nodes(spec: DeploymentSpec) -> None:
    """Every node has this version of ragspec and all folders. Ray itself compares its own version and Python's.

    Raises: EngineError for other versions, ConfigError for a path that a node lacks.
    """
    roles = paths_of(spec)
    check: Any = ray.remote(num_cpus=0)(check_here)
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}  # type: ignore[no-untyped-call]
    nodes = [node.name for node in alive_nodes()]
    places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    calls = [check.options(scheduling_strategy=place).remote(list(roles)) for place in places]
    here = check_here(())
    for node, there in zip(nodes, wait_for_all(calls, _CHECK_S, "a node"), strict=True):
        place = f"node {addresses[node]} ({node[:8]})"
        if there.version != here.version:
            raise EngineError(f"versions differ here and on {place}: ragspec {here.version} and {there.version}")
        if there.missing:
            raise ConfigError(f"{place} has no {roles[there.missing[0]]} {there.missing[0]}")


def paths_of(spec: DeploymentSpec) -> dict[str, str]:
    """The absolute paths that the replicas read, each with its role in the configuration."""
    topology, config = spec
    roles: dict[str, str] = {}
    if topology.num_replicas:
        roles |= {
            **{section.path: f"{name} drafter" for name, section in config.drafting.networks.items()},
            config.drafting.datastore.index_dir: "index of the drafter datastore",
            config.target.model: "target",
            config.target.adapter: "adapter",
        }
    if topology.num_shards:
        roles |= {config.retriever.index_dir: "index", config.retriever.reranker: "reranker"}
    if topology.num_encoders:
        roles |= {config.encoder.model: "encoder"}
    return {path: role for path, role in roles.items() if path.startswith("/")}


def with_full_paths(config: PipelineConfig) -> PipelineConfig:
    """Folders become absolute, because processes on other nodes have other working directories."""
    retriever = config.retriever
    index_dir = str(Path(retriever.index_dir).resolve()) if retriever.index_dir else ""
    paths = {"model": _full_path(config.target.model), "adapter": _full_path(config.target.adapter)}
    sections = {
        "target": config.target.model_copy(update=paths),
        "encoder": config.encoder.model_copy(update={"model": _full_path(config.encoder.model)}),
        "retriever": retriever.model_copy(update={"index_dir": index_dir, "reranker": _full_path(retriever.reranker)}),
        "drafting": config.drafting.with_paths(_full_path),
    }
    return config.model_copy(update=sections)


def _full_path(model: str) -> str:
    """A folder's absolute path; a hub's name of a model stays."""
    return str(Path(model).resolve()) if model and (model.startswith((".", "/")) or Path(model).exists()) else model


def start_replicas(deployment: str, spec: DeploymentSpec, lifetime: str | None) -> list[Replica]:
    """Does not wait for them. `lifetime`: "detached", or None to end with this process."""
    places = place_replicas(deployment, spec.topology, lifetime)
    options = {"namespace": NAMESPACE, "lifetime": lifetime}
    return [
        Replica(
            name, _start(name, spec, options | {"name": actor_name(deployment, name), "scheduling_strategy": place})
        )
        for name, place in places.items()
    ]


def _start(name: str, spec: DeploymentSpec, options: dict[str, Any]) -> Any:
    topology, config = spec
    if kind_of(name) == "shard":
        return remote_class(ShardActor).options(num_cpus=CPUS_PER_SHARD, **options).remote()
    if kind_of(name) == "encoder":
        actor = remote_class(EncoderActor).options(num_cpus=CPUS_PER_ENCODER, **options)
        return actor.remote(config.encoder)
    num_beside = -(-topology.num_replicas // max(1, len(alive_nodes())))
    bundle = options["scheduling_strategy"].placement_group_bundle_index
    engine = remote_class(EngineServer, CONCURRENT_CALLS)
    engine = engine.options(num_cpus=topology.cpus_per_rank, num_gpus=topology.gpus_per_rank, **options)
    return engine.remote(config, topology, num_beside, bundle)


def place_replicas(
    deployment: str, topology: Topology, lifetime: str | None
) -> dict[str, PlacementGroupSchedulingStrategy]:
    """Replicas of one kind lie on different nodes, or share nodes evenly where there are fewer nodes than replicas.

    With a node to spare they stay apart for good: a replica whose node died waits for a node without a sibling. Else it moves to
    any node with room.
    """
    places: dict[str, PlacementGroupSchedulingStrategy] = {}
    for kind in KINDS:
        names = [name for name in replica_names(topology) if kind_of(name) == kind]
        bundle = bundle_of(kind, topology)
        num_nodes = sum(node.cpus >= bundle["CPU"] and node.gpus >= bundle.get("GPU", 0.0) for node in alive_nodes())
        num_apart = max(1, num_nodes)  # Why: Ray moves all lost bundles of a group or none, so a node holds one of each
        for first in range(0, len(names), num_apart):
            group_names = names[first : first + num_apart]
            bundles, has_spare = [bundle] * len(group_names), num_nodes > len(group_names)
            group = _group(actor_name(deployment, group_names[0]), bundles, has_spare, lifetime)
            places |= {name: PlacementGroupSchedulingStrategy(group, i) for i, name in enumerate(group_names)}
    return places


def bundle_of(kind: str, topology: Topology) -> dict[str, float]:
    """The resources of a replica's processes, which a bundle keeps on one node."""
    if kind != "engine":
        return {"CPU": CPUS_PER_SHARD if kind == "shard" else CPUS_PER_ENCODER}
    ranks, share = topology.tensor_parallel_size, topology.gpus_per_rank
    gpus = ranks * share
    if share < 1.0 < gpus:  # no rank has parts of two GPUs, so whole GPUs are reserved
        gpus = math.ceil(ranks / math.floor(1.0 / share))
    amounts = {"CPU": ranks * topology.cpus_per_rank, "GPU": float(gpus)}
    return {unit: amount for unit, amount in amounts.items() if amount}


def _group(name: str, bundles: Sequence[dict[str, float]], is_strict: bool, lifetime: str | None) -> PlacementGroup:
    """`is_strict`: never two bundles on one node, unless other work leaves no room for that."""
    if is_strict:
        options = {"name": f"{NAMESPACE}/{name}", "lifetime": lifetime}
        group: PlacementGroup = placement_group(list(bundles), "STRICT_SPREAD", **options)
        if group.wait(_PLACED_S):
            return group
        remove_placement_group(group)
    name = f"{NAMESPACE}/{name}/shared"
    shared: PlacementGroup = placement_group(list(bundles), "SPREAD", name=name, lifetime=lifetime)
    return shared


def wait_until_loaded(replicas: Sequence[Replica], timeout_s: float) -> None:
    """Raises: the first error of loading; EngineError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    calls = {replica.actor.load.remote(): replica for replica in replicas}
    while calls:
        for call in ray.wait(list(calls), timeout=_LOOK_S)[0]:
            replica = calls.pop(call)
            try:
                ray.get(call)
            except ActorUnavailableError:  # its process died; Ray restarts it
                time.sleep(_LOOK_S)
                calls[replica.actor.load.remote()] = replica
            except RayError as error:
                raise ragspec_error(error, replica.name) from error
        if calls and time.monotonic() > deadline:
            late = ", ".join(sorted(replica.name for replica in calls.values()))
            raise EngineError(f"not everything was up after {timeout_s:g} s: {late} still starting")

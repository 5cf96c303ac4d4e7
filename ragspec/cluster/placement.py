"""The nodes of a deployment's replicas: one bundle of resources each, in Ray's placement groups.

Ray's "SPREAD" for actors counts no siblings: it may put all encoders on one node. A placement group keeps its bundles apart, and
Ray moves those of a dead node to another.

>>> places = place_replicas("ragspec", topology, lifetime="detached")
>>> actor_class.options(scheduling_strategy=places["encoder-0"])
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ragspec.cluster.registry import KINDS, NAMESPACE, actor_name, alive_nodes, kind_of, replica_names
from ragspec.cluster.topology import CPUS_PER_ENCODER, CPUS_PER_SHARD, Topology

_PLACED_S = 10.0


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
        group: PlacementGroup = placement_group(
            list(bundles), "STRICT_SPREAD", name=f"{NAMESPACE}/{name}", lifetime=lifetime
        )
        if group.wait(_PLACED_S):
            return group
        remove_placement_group(group)
    shared: PlacementGroup = placement_group(
        list(bundles), "SPREAD", name=f"{NAMESPACE}/{name}/shared", lifetime=lifetime
    )
    return shared

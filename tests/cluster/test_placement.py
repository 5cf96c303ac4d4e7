"""Replicas of one kind lie on different nodes, also after a node has died, and share nodes where there are too few."""

import sys
from collections import Counter
from collections.abc import Iterator

import pytest
import ray
from ray import cloudpickle
from ray.cluster_utils import Cluster
from ray.exceptions import RayError
from ray.util.placement_group import placement_group_table
from stand_ins import until

from ragspec.cluster import launch
from ragspec.cluster.actors import Replica, WorkerActor
from ragspec.cluster.launch import bundle_of, start_replicas
from ragspec.cluster.registry import teardown
from ragspec.cluster.topology import DeploymentSpec, Topology
from ragspec.config import EncoderConfig, PipelineConfig

cloudpickle.register_pickle_by_value(sys.modules[__name__])

_CALL_S = 5.0


class LightActor(WorkerActor):
    """In the place of an encoder."""

    def __init__(self, config: EncoderConfig) -> None:
        pass


@pytest.fixture
def cluster(without_local_ray: None) -> Iterator[Cluster]:
    """A large node and two small ones."""
    # Why no dashboard port: Ray tries its usual one, and leaks a socket where another Ray has that
    head = {"num_cpus": 16, "include_dashboard": False, "dashboard_port": None}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(num_cpus=1, wait=False)
    cluster.wait_for_nodes()
    ray.init(cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def encoders(deployment: str, count: int) -> list[Replica]:
    topology = Topology(num_replicas=0, num_shards=0, num_encoders=count)
    return start_replicas(deployment, DeploymentSpec(topology, PipelineConfig()), None)


def node_of(replica: Replica) -> str:
    """Empty while Ray moves it."""
    try:
        return str(ray.get(replica.actor.status.remote(), timeout=_CALL_S).node_id)
    except RayError:
        return ""


@pytest.mark.ray
@pytest.mark.slow
def test_no_node_holds_all_encoders(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """All encoders die with one node; a restarted encoder joins the other on the node with the most room."""
    monkeypatch.setattr(launch, "EncoderActor", LightActor)
    stays, moves = sorted(
        encoders("apart", 2), key=lambda replica: until(lambda: node_of(replica)) != cluster.head_node.node_id
    )
    first, second = node_of(stays), node_of(moves)
    assert first != second
    cluster.remove_node(next(node for node in cluster.worker_nodes if node.node_id == second))
    until(lambda: node_of(moves) not in ("", second), "the restart")
    assert node_of(stays) == first != node_of(moves)

    shared = encoders("shared", 3)  # on two nodes
    until(lambda: all(map(node_of, shared)), "the start")
    assert sorted(Counter(map(node_of, shared)).values()) == [1, 2]
    for deployment in ("apart", "shared"):
        teardown(deployment)
    until(
        lambda: {group["state"] for group in placement_group_table().values()} == {"REMOVED"}, "the end of all groups"
    )


@pytest.mark.parametrize(
    ("ranks", "share", "gpus"),
    [(2, 0.5, 1.0), (2, 0.6, 2.0), (4, 0.4, 2.0), (4, 0.1, 0.4), (2, 1.0, 2.0), (2, 2.0, 4.0)],
)
def test_a_bundle_holds_each_rank_on_gpus_of_its_own(ranks: int, share: float, gpus: float) -> None:
    """Of 1.2 GPUs two ranks with 0.6 each cannot start: the second would have parts of two."""
    topology = Topology(tensor_parallel_size=ranks, gpus_per_rank=share)
    assert bundle_of("engine", topology) == pytest.approx({"CPU": ranks * topology.cpus_per_rank, "GPU": gpus})

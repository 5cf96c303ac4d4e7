"""A replica as a router calls it through Ray: in order, and a call that is not accepted is a lost replica."""

import sys
from collections.abc import Sequence
from typing import Any

import pytest
import ray
from ray import cloudpickle
from stand_ins import until

from ragspec.cluster import actors
from ragspec.cluster.actors import ORDERED, ActorPool, Replica, WorkerActor, in_group
from ragspec.cluster.engine_host import Polled
from ragspec.cluster.routing.policy import RoutingConfig
from ragspec.cluster.routing.replica_client import ReplicaClient, ReplicaGone
from ragspec.core import Request
from ragspec.errors import ReplicaLost

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Noting(WorkerActor):
    """In the place of an engine server. Refuses what is called "bad"."""

    def __init__(self) -> None:
        self._calls: list[str] = []

    def calls(self) -> list[str]:
        return self._calls

    @in_group(ORDERED)
    def submit(self, client: str, request: Request) -> None:
        if request.id == "bad":
            raise ReplicaLost("the engine was closed")
        self._calls.append(f"submit {request.id}")

    @in_group(ORDERED)
    def cancel(self, client: str, request_id: str) -> None:
        self._calls.append(f"cancel {request_id}")

    @in_group(ORDERED)
    def purge(self, salts: Sequence[str]) -> None:
        self._calls.append(f"purge {' '.join(salts)}")

    @in_group(ORDERED)
    def leave(self, client: str) -> None:
        self._calls.append("leave")

    def poll(self, client: str, wait_s: float) -> Polled:
        return Polled((), 0.0)


def calls(replica: Replica) -> list[str]:
    found: list[str] = ray.get(replica.actor.calls.remote())
    return found


@pytest.mark.ray
@pytest.mark.slow
def test_calls_arrive_in_order_and_one_that_is_refused_is_a_loss(local_ray: None) -> None:
    """A cancellation overtook its request, which ran for nobody; or a request that no replica had was waited for; or a replica
    that was given up went on with what others wrote."""
    with ActorPool(Noting, prefix="engine") as own:
        (replica,) = own.replicas
        client = ReplicaClient(replica.actor, RoutingConfig())
        expected = []
        for number in range(20):
            client.submit(Request(f"r{number}", (5,)))
            client.cancel(f"r{number}")
            client.purge(["a", "b"])
            expected += [f"submit r{number}", f"cancel r{number}", "purge a b"]
        until(lambda: len(calls(replica)) == len(expected))
        assert calls(replica) == expected
        assert client.poll(0.0).deltas == ()
        client.submit(Request("bad", (5,)))

        def is_lost() -> bool:
            try:
                client.poll(0.0)
            except ReplicaLost as error:
                return "the engine was closed" in str(error)
            return False

        until(is_lost)
        client.close(wait_s=60.0)
        assert calls(replica)[len(expected) :] == ["leave"]
        with pytest.raises(ReplicaGone, match="closed"):
            client.poll(0.0)


@pytest.mark.parametrize("num_workers", [1, 2, 7, 100])
@pytest.mark.parametrize("resources", [{"CPU": 1.0}, {"CPU": 2.0}, {"CPU": 64.0}, {"GPU": 1.0}])
def test_workers_leave_room_for_each_other(
    monkeypatch: pytest.MonkeyPatch, num_workers: int, resources: dict[str, Any]
) -> None:
    """More workers than processors wait for each other for ever."""
    monkeypatch.setattr(actors.ray, "cluster_resources", lambda: resources)
    assert 0 < actors.cpus_per_worker(num_workers) <= 0.5
    assert num_workers * actors.cpus_per_worker(num_workers) <= resources.get("CPU", 1.0)

"""Engines in real actors that are killed and stopped in the middle of their streams."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from local_replicas import Heard
from ray import cloudpickle

from pipelines.batch.ray_session import ray_session
from ragspec.cluster.connection import Connection, LocalConnection, ray_connect
from ragspec.cluster.directory import Member, Table
from ragspec.cluster.facts import HostFacts
from ragspec.cluster.host import EngineHost
from ragspec.cluster.router import Router
from ragspec.cluster.routing import RoutingConfig
from ragspec.cluster.shell import Handle, Role, shell_class
from ragspec.config import DraftingConfig, EngineConfig, TargetConfig
from ragspec.core import FinishReason, Request, SamplingParams
from ragspec.engine.client import completion_of
from ragspec.engine.engine import Engine
from ragspec.engine.loading import load_engine
from ragspec.errors import InputError, ReplicaLost

pytestmark = pytest.mark.ray

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SETTINGS = RoutingConfig(poll_s=0.5, heartbeat_timeout_s=2.5, replay_timeout_s=20.0)
NOTICED_S = 5.0
PARAMS = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=200, ignore_eos=True, logprobs=1)


def build_engine(folder: str) -> Engine:
    config = EngineConfig(num_threads=1, adaptive_threads=False, max_kv_tokens=8192)
    return load_engine(TargetConfig(model=folder), config, DraftingConfig())


def build_host(folder: str) -> EngineHost:
    return EngineHost(build_engine(folder), ray.get_runtime_context().get_node_id())


class Actors:
    """A `Directory` of actors, and of one host in this process. None is replaced; one that is reported is lost."""

    def __init__(self, folder: Path, count: int) -> None:
        self.here = EngineHost(build_engine(str(folder)))
        self.shells = shells = [shell_class().options(num_cpus=0.1).remote() for _ in range(count)]
        role = Role(kind="engine", build=build_host, arguments=(str(folder),))
        facts = ray.get([shell.become.remote(role) for shell in shells], timeout=120)
        self._changed = threading.Condition()
        self._version = 0
        self.reported: dict[str, float] = {}
        self.members = {
            f"engine-{i}": Member("engine", f"engine-{i}", 0, "live", facts[i], Handle(shell), facts[i].node_id)
            for i, shell in enumerate(shells)
        }
        self.members["here"] = Member("engine", "here", 0, "live", self.here.facts(), self.here, "")

    def table(self, after: int = -1, timeout_s: float = 0.0) -> Table:
        with self._changed:
            self._changed.wait_for(lambda: self._version > after, timeout_s)
            return Table(self._version, tuple(self.members.values()))

    def report(self, name: str, epoch: int, why: str) -> None:
        with self._changed:
            self.reported[name] = time.monotonic()
            self.members[name] = self.members[name]._replace(state="lost")
            self._version += 1
            self._changed.notify_all()


@pytest.fixture(scope="module")
def actors(model_folder: Path) -> Iterator[Actors]:
    with ray_session(None):
        actors = Actors(model_folder, 2)
        yield actors
        actors.here.close()


def connect(member: Member) -> Connection:
    return LocalConnection(member.actor) if member.name == "here" else ray_connect(SETTINGS)(member)


def streams(count: int) -> list[tuple[Request, Heard]]:
    return [(Request(f"s{i}", (5 + i, 6, 7), PARAMS), Heard()) for i in range(count)]


def on(router: Router, name: str) -> set[str]:
    """Requests that run on a replica and have told something."""
    with router._changed:
        legs = [leg for leg in router._board._legs.values() if leg.link is not None and leg.link.name == name]
        return {leg.ticket.request.id for leg in legs if any(stream.output_ids for stream in leg.streams)}


def busiest(router: Router, names: Sequence[str]) -> str:
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        name = max(names, key=lambda name: len(on(router, name)))
        if len(on(router, name)) >= 3:
            return name
        time.sleep(0.005)
    raise AssertionError("no replica has anything to do")


def test_what_an_actor_refuses_is_no_loss(actors: Actors) -> None:
    """A wrong request was taken for a dead replica, which was then replaced; or a closed connection was waited for."""
    connection = connect(actors.members["engine-0"])
    with pytest.raises(InputError, match="the prompt is empty"):
        connection.submit([Request("a", (), PARAMS)])
    assert connection.poll(0.0).deltas == ()
    threading.Timer(0.3, connection.close).start()
    begin = time.monotonic()
    with pytest.raises(ReplicaLost, match="was closed"):
        connection.poll(20.0)
    assert time.monotonic() - begin < 10.0
    with pytest.raises(ReplicaLost, match="was closed"):
        connection.poll(0.1)


def test_streams_go_on_when_actors_are_killed_and_stopped(actors: Actors) -> None:
    """A stream of a dead actor was lost or began again; a stopped one was waited for; numerics ids of processes differed."""
    asked = streams(16)
    faults: dict[str, float] = {}
    with Router(actors, connect, SETTINGS) as router:
        for request, heard in asked:
            router.submit(request, heard)
        names = ["engine-0", "engine-1"]
        for fault in (signal.SIGKILL, signal.SIGSTOP):
            name = busiest(router, names)
            names.remove(name)
            facts: HostFacts = actors.members[name].facts
            os.kill(facts.pid, fault)
            faults[name] = time.monotonic()
        completions = {request.id: completion_of(heard.wait(60.0)) for request, heard in asked}
        assert router.generate([Request("after", (9, 8, 7), PARAMS)])
    for name in faults:
        with pytest.raises(ReplicaLost):
            connect(actors.members[name]).poll(0.5)
    os.kill(facts.pid, signal.SIGKILL)  # the stopped one
    assert actors.reported.keys() == faults.keys(), "the one that is left was taken for lost"
    assert all(actors.reported[name] - faults[name] < NOTICED_S for name in faults)
    assert len({member.facts.fingerprint for member in actors.members.values()}) == 1
    seeds = {request_id: one.stats.seed for request_id, one in completions.items()}
    again = [replace(request, params=replace(PARAMS, seed=seeds[request.id])) for request, _ in asked]
    truth = actors.here._engine.generate(again)
    assert sum(one.stats.num_replays for one in completions.values()) >= 6
    for plain in truth:
        one = completions[plain.request_id]
        assert (one.token_ids, one.text, one.logprobs) == (plain.token_ids, plain.text, plain.logprobs)
        assert one.finish_reason is FinishReason.LENGTH

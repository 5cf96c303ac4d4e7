"""One replica as a router sees it: what is still said to one that is taken for lost."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from local_replicas import SETTINGS
from stand_ins import until

from ragspec.cluster.actors import Replica
from ragspec.cluster.routing import replica_client
from ragspec.cluster.routing.replica_client import RayReplicaClient
from ragspec.cluster.routing.replica_connection import ReplicaConnection
from ragspec.core import Request, SamplingParams
from ragspec.errors import ReplicaLost


class Slow:
    """A connection to a replica that is late: with its heartbeat once it has a request, or with its answer to the second."""

    def __init__(self) -> None:
        self.taken, self.may_fail = threading.Event(), threading.Event()
        self.cancelled: list[str] = []
        self.num_polls = 0
        self.is_closed = False

    def wait_until_serving(self) -> Any:
        return SimpleNamespace(fingerprint="f", max_context_tokens=64)

    def submit(self, requests: Sequence[Request]) -> None:
        if self.is_closed:
            raise ReplicaLost("the connection was closed")
        self.taken.set()
        if requests[0].id == "second":
            assert self.may_fail.wait(10.0)
            raise ReplicaLost("it did not answer")

    def cancel(self, request_ids: Sequence[str]) -> None:
        assert self.is_closed, "it would wait for an answer, one request after another"
        self.cancelled += request_ids

    def poll(self, wait_s: float) -> Any:
        self.num_polls += 1
        if self.num_polls > 1:
            assert self.taken.wait(10.0)
            if self.may_fail.wait(0.2):
                raise ReplicaLost("no heartbeat")
        return SimpleNamespace(session="s", busy_s=0.0, deltas=[])

    def purge(self, salt: str) -> None: ...

    def close(self) -> None:
        self.is_closed = True


class Listener:
    """A router that cancels what runs on a lost connection."""

    def __init__(self, sent: list[str]) -> None:
        self.sent = sent

    def connection_up(self, connection: ReplicaConnection) -> None: ...

    def connection_down(self, connection: ReplicaConnection, cause: Exception) -> None:
        for name in self.sent:
            connection.cancel(name)


def connected(slow: Slow, listener: Listener) -> ReplicaConnection:
    replica = Replica("engine-0", None)
    connection = ReplicaConnection(replica, lambda _: slow, SETTINGS, listener, 0.0)  # type: ignore[arg-type, return-value]
    connection.start()
    return connection


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_replica_that_is_only_slow_need_not_go_on_with_what_others_write(name: str) -> None:
    """It decoded requests that were replayed elsewhere, for up to half a minute, just when the cluster was overloaded."""
    slow = Slow()
    connection = connected(slow, Listener([name]))
    connection.send(Request(name, (5, 6), SamplingParams()))
    assert slow.taken.wait(10.0)
    slow.may_fail.set()
    until(lambda: slow.cancelled == [name])


def test_a_wish_that_waits_behind_what_fails_is_not_forgotten() -> None:
    """Given up while the call before it hung: whoever gave it up does not ask a second time."""
    slow = Slow()
    connection = connected(slow, Listener(["second", "third"]))
    connection.send(Request("second", (5, 6), SamplingParams()))
    assert slow.taken.wait(10.0)
    connection.send(Request("third", (5, 6), SamplingParams()))
    connection.cancel("first")
    slow.may_fail.set()
    until(lambda: sorted(slow.cancelled) == ["first", "second", "third"])


def test_a_closed_connection_still_cancels_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed first and told to cancel then, it said that it was closed."""
    said: list[tuple[str, list[str]]] = []
    actor = SimpleNamespace(cancel=SimpleNamespace(remote=lambda client, ids: said.append((client, ids))))
    monkeypatch.setattr(replica_client.ray, "is_initialized", lambda: True)
    connection = RayReplicaClient(actor, SETTINGS)
    connection.close()
    connection.cancel(["a", "b"])
    assert [ids for _, ids in said] == [["a", "b"]]
    with pytest.raises(ReplicaLost, match="closed"):
        connection.submit([])

"""One replica as a router sees it: what is still said to one that is taken for lost."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from local_replicas import SETTINGS, until

from ragspec.cluster import connection as connection_module
from ragspec.cluster.connection import RayConnection
from ragspec.cluster.directory import Member
from ragspec.cluster.links import Link
from ragspec.core import Request, SamplingParams
from ragspec.errors import ReplicaLost


class Slow:
    """A connection to a replica that takes a request, and then is late with its heartbeat."""

    def __init__(self) -> None:
        self.taken = threading.Event()
        self.cancelled: list[str] = []
        self.num_polls = 0

    def submit(self, requests: Sequence[Request]) -> None:
        self.taken.set()
        if requests[0].id == "second":
            threading.Event().wait(0.3)
            raise ReplicaLost("it did not answer")

    def cancel(self, request_ids: Sequence[str]) -> None:
        self.cancelled += request_ids

    def poll(self, wait_s: float) -> Any:
        self.num_polls += 1
        if self.num_polls > 1:
            self.taken.wait(10.0)
            raise ReplicaLost("no heartbeat")
        return SimpleNamespace(session="s", busy_s=0.0, deltas=[])

    def purge(self, salt: str) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("sent", [["first"], ["second"]])
def test_a_replica_that_is_only_slow_need_not_go_on_with_what_others_write(sent: list[str]) -> None:
    """It decoded requests that were replayed elsewhere, for up to half a minute, just when the cluster was overloaded."""
    slow = Slow()

    class Hears:
        def link_up(self, link: Link) -> None:
            for name in sent:
                link.send(Request(name, (5, 6), SamplingParams()))

        def link_down(self, link: Link, why: str, *, forgotten: bool) -> None:
            link.cancel(sent[0])

    facts = SimpleNamespace(fingerprint="f", max_context_tokens=64)
    member = Member("engine", "engine-0", 0, "live", facts, None, "here")  # type: ignore[arg-type]
    link = Link(member, lambda *_: None, lambda _: slow, SETTINGS, Hears())  # type: ignore[arg-type]
    link.start()
    until(lambda: slow.cancelled == sent)


def test_a_closed_connection_still_cancels_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed first and told to cancel then, it said that it was closed."""
    said: list[tuple[str, list[str]]] = []
    actor = SimpleNamespace(cancel=SimpleNamespace(remote=lambda client, ids: said.append((client, ids))))
    monkeypatch.setattr(connection_module.ray, "is_initialized", lambda: True)
    connection = RayConnection(actor, heartbeat_timeout_s=1.0)
    connection.close()
    connection.cancel(["a", "b"])
    assert [ids for _, ids in said] == [["a", "b"]]
    with pytest.raises(ReplicaLost, match="closed"):
        connection.submit([])

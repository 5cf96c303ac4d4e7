"""The suite `faults`: signals reach only their victims, and a lost, doubled or changed answer does not go unnoticed."""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from stand_ins import until
from tiny_target import save_model

from pipelines.benchmark import ROOT
from pipelines.benchmarks import faults
from pipelines.benchmarks.fault_injection import injector as injector_module
from pipelines.benchmarks.fault_injection.clients import FaultClients, Refused
from pipelines.benchmarks.fault_injection.injector import Fault, Injected, Injector, all_live
from pipelines.benchmarks.fault_injection.targets import small_disk
from pipelines.benchmarks.faults import FAULTS, QUICK, num_ranks, summarise
from pipelines.benchmarks.harness import Run
from ragspec.cluster.processes import Process
from ragspec.cluster.registry import ReplicaStatus, Status
from ragspec.config import TargetConfig
from ragspec.errors import EngineError

TURNS = [("Question 1?", "one"), ("Question 2?", "two")]


# -- answers -----------------------------------------------------------------------------------------------------------


def clients_after(
    path: str,
    answer: Callable[[web.Request], Awaitable[Any]],
    send: Callable[[FaultClients, aiohttp.ClientSession], Awaitable[None]],
) -> FaultClients:
    """Clients that have sent something to a service of one route."""

    async def served() -> FaultClients:
        app = web.Application()
        app.router.add_route("*", path, answer)
        async with TestServer(app) as server:
            clients = FaultClients(str(server.make_url("")), "key", ["Why?"], max_tokens=4)
            async with clients._session() as session:
                await send(clients, session)
            return clients

    return asyncio.run(served())


@pytest.mark.parametrize(
    ("kept", "mark"),
    [
        (TURNS, None),
        ([*TURNS, ("Question 3?", "three")], None),  # carried out, and its answer lost on the way
        (TURNS[1:], "lost"),
        ([*TURNS, TURNS[0]], "doubled"),
        ([TURNS[0], ("Question 2?", "three")], "changed"),
        (TURNS[::-1], "changed"),
    ],
)
def test_an_acknowledged_turn_is_there_once_and_unchanged(kept: list[tuple[str, str]], mark: str | None) -> None:
    """A thousand faults without a loss, because nobody compared."""

    async def items(request: web.Request) -> web.Response:
        texts = [text for turn in kept for text in turn]
        begin = int(request.query.get("after", -1)) + 1
        data = [{"id": str(n), "content": [{"text": texts[n]}]} for n in range(begin, min(begin + 3, len(texts)))]
        return web.json_response({"data": data, "has_more": begin + 3 < len(texts)})

    async def check(clients: FaultClients, _: aiohttp.ClientSession) -> None:
        clients.turns["conv"] = list(TURNS)
        clients.unsure.add("Question 3?")
        await clients.check()

    clients = clients_after("/v1/conversations/{name}/items", items, check)
    assert +clients.counts == ({} if mark is None else {mark: 1})


def test_an_answer_is_remembered_as_its_conversation_keeps_it() -> None:
    """A target of random weights wrote NUL, which no conversation keeps, and its turn counted as changed."""

    async def reply(request: web.Request) -> web.Response:
        message = {"choices": [{"message": {"content": "a\0b"}}], "ragspec": {"kept": True}}
        return web.json_response(message)

    async def ask(clients: FaultClients, session: aiohttp.ClientSession) -> None:
        clients.turns["conv"] = []
        await clients._turn(session)

    assert clients_after("/v1/chat/completions", reply, ask).turns["conv"] == [("Question 1?", "a\ufffdb")]


@pytest.mark.parametrize(
    ("pieces", "end", "counts"),
    [
        (["on", "e"], b"data: [DONE]\n\n", {}),
        (["on"], b"data: [DONE]\n\n", {"changed": 1}),
        (["on", "x"], b"data: [DONE]\n\n", {"changed": 1}),
        (["on", "e"], b"", {"cut": 1}),
        (["on"], b'data: {"choices": [{"delta": {"cont', {"cut": 1}),
        (["x"], b"", {"cut": 1, "changed": 1}),
        (["on"], b'data: {"error": {"message": "lost"}}\n\n', {"cut": 1}),
    ],
)
def test_a_stream_may_be_cut_and_not_changed(pieces: list[str], end: bytes, counts: dict[str, int]) -> None:
    """A stream that ended early with another text was counted as cut, and its text was not compared."""

    async def stream(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        for text in pieces:
            event = json.dumps({"choices": [{"delta": {"content": text}}]})
            await reply.write(f"data: {event}\n\n".encode())
        await reply.write(end)
        assert request.transport is not None
        if not end.startswith(b"data: [DONE]"):
            request.transport.close()
        return reply

    async def listen(clients: FaultClients, session: aiohttp.ClientSession) -> None:
        clients.expected = ["one"]
        with contextlib.suppress(aiohttp.ClientError, Refused):
            await clients._checked_stream(session)

    assert +clients_after("/v1/chat/completions", stream, listen).counts == counts


# -- disk --------------------------------------------------------------------------------------------------------------


def test_a_full_disk_takes_nothing(tmp_path: Path) -> None:
    """A fault that strikes nothing counts as survived."""
    with small_disk(tmp_path / "disk") as disk:
        if not disk.is_mounted:
            pytest.skip("no right to mount a disk")
        disk.fill()
        with pytest.raises(OSError, match="No space left"):
            (disk.folder / "a").write_bytes(b"a" * 2**16)
        disk.empty()
        (disk.folder / "a").write_bytes(b"a" * 2**16)


# -- injector ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def replica(name: str, epoch: float, state: Any = "live", pids: tuple[int, ...] = ()) -> ReplicaStatus:
    return ReplicaStatus(name, name.rpartition("-")[0], state, epoch, "n", pids, "", None, "")


@pytest.fixture
def injector(sleepers: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch) -> Injector:
    """An engine of two ranks, a lost shard, and clients whose every request succeeds at once."""
    monkeypatch.setattr(injector_module, "_HOLD_S", (0.0, 0.0))
    first, second, other = (process.pid for process in sleepers)
    replicas = replica("engine-0", 3.0, pids=(first, second)), replica("shard-0", 1.0, "lost", (other,))
    clients: Any = SimpleNamespace(counts=Counter(), succeeded_s={"streams": float("inf")})
    service: Any = SimpleNamespace(is_up=True, kill=lambda: None, start=lambda: None)
    nothing: Any = None
    status = Status("d", ("n",), replicas)
    return Injector(nothing, [], lambda: status, service, nothing, clients, random.Random(0))


def test_a_rank_is_struck_and_no_other_process(injector: Injector, sleepers: list[subprocess.Popen[bytes]]) -> None:
    """The group's first process struck in place of another, a shard struck, a stop that kills."""
    struck = injector._inject(Fault("rank", "stop"))
    assert (struck.victim, struck.replicas) == ("engine-0", {"engine-0": 3.0})
    until(lambda: Process.of(sleepers[1].pid).state() == "T", "the stop", 60.0)
    assert [Process.of(process.pid).state() == "T" for process in sleepers] == [False, True, False]
    injector._inject(Fault("engine", "kill"))
    assert sleepers[0].wait(60.0) == -signal.SIGKILL
    assert [process.poll() for process in sleepers[1:]] == [None, None]


@pytest.mark.parametrize("part", ["shard", "encoder"])
def test_a_part_that_is_not_live_is_not_struck(part: str, injector: Injector) -> None:
    """A fault counted that struck nobody; a replica struck while it starts, so that nothing could be lost with it."""
    with pytest.raises(EngineError, match=f"there is no {part}"):
        injector._inject(Fault(part, "kill"))


@pytest.mark.parametrize(
    ("fault", "count", "lost"),
    [
        (Fault("engine", "kill"), "cut", 1),
        (Fault("engine", "kill"), "refused", 1),
        (Fault("service", "kill"), "cut", 0),
        (Fault("service", "kill"), "refused", 0),
        (Fault("service", "restart"), "cut", 1),
        (Fault("service", "restart"), "refused", 0),
        (Fault("disk", "full"), "cut", 1),
    ],
)
def test_a_loss_counts_where_the_fault_does_not_excuse_it(
    fault: Fault, count: str, lost: int, injector: Injector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that a dead engine cut off was excused, as if its connection had been lost."""

    def inject(self: Injector, fault: Fault) -> Injected:
        self.clients.counts[count] += 1
        return Injected(fault.part)

    monkeypatch.setattr(Injector, "_inject", inject)
    monkeypatch.setattr(Injector, "_all_live", lambda self, injected: True)
    row = injector.strike(fault)
    assert (row["lost"], row["recovered"]) == (lost, True)


def test_a_service_that_ends_beside_another_fault_is_counted_and_started(
    injector: Injector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk that took the service along was noted as a slow recovery; a loop that waits for ever."""
    monkeypatch.setattr(injector_module, "_RECOVERY_S", 0.2)
    injector.clients.succeeded_s["streams"] = 0.0
    service: Any = SimpleNamespace(is_up=False)
    service.start = lambda: setattr(service, "is_up", True)
    injector.service = service
    monkeypatch.setattr(Injector, "_inject", lambda self, fault: Injected(fault.part))
    row = injector.strike(Fault("disk", "full"))
    assert (injector.num_service_ends, row["recovered"], row["answered_s"]) == (1, False, 0.2)


@pytest.mark.parametrize(
    ("replicas", "live"),
    [
        ([replica("a-0", 2), replica("b-0", 1)], True),
        ([replica("a-0", 1), replica("b-0", 1)], False),
        ([replica("a-0", 2, "starting"), replica("b-0", 1)], False),
        ([replica("a-0", 2), replica("b-0", 1, "lost")], False),
        ([replica("b-0", 1)], False),
    ],
)
def test_live_again_means_every_replica_and_the_victim_anew(replicas: list[ReplicaStatus], live: bool) -> None:
    """A fault that nobody has noticed yet taken for a fault that was recovered from."""
    assert all_live(Status("d", ("n",), tuple(replicas)), {"a-0": 1.0}) is live


def chosen(run: Run, ranks: int, has_disk: bool) -> list[Fault]:
    topology: Any = SimpleNamespace(tensor_parallel_size=ranks)
    disk: Any = SimpleNamespace(is_mounted=has_disk)
    return list(faults._chosen(run, topology, disk))


def test_every_possible_fault_comes_in_the_order_of_its_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind of fault that is listed and never comes; a failure that nobody can run again; a soak that ends after a round."""
    run = Run(TargetConfig(), tmp_path, seed=1)
    first = chosen(run, 2, True)
    assert set(first) == set(FAULTS) and len(first) == len(FAULTS)
    assert chosen(run, 2, True) == first != chosen(replace(run, seed=2), 2, True)
    assert set(chosen(replace(run, quick=True), 2, True)) == set(QUICK) < set(FAULTS)
    assert {fault.part for fault in FAULTS} - {fault.part for fault in chosen(run, 1, False)} == {"rank", "disk"}
    clock = iter([0.0, 61.0, 119.0, 121.0])
    monkeypatch.setattr(faults, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert Counter(chosen(replace(run, minutes=2.0), 2, True)) == dict.fromkeys(FAULTS, 3)


def test_engines_have_ranks_only_where_they_can_share_the_target_s_heads(tmp_path: Path) -> None:
    """The default target has nine heads, three of keys and values: no engine of the suite ever started with it."""
    assert num_ranks(TargetConfig()) == 1
    assert num_ranks(TargetConfig(model=str(save_model("llama", tmp_path / "model")))) == 2


def test_the_result_adds_up_all_losses_and_names_the_slowest_fault() -> None:
    """Medians alone; a stream lost beside a fault that the check in the end cannot see."""
    fault = {"fault": "engine kill", "answered_s": 1.0, "live_again_s": 9.0, "recovered": True, "lost": 1}
    rows = [fault, fault | {"fault": "disk full", "answered_s": 3.0, "live_again_s": None, "lost": 0}]
    answers = {"row": "answers", "lost": 2, "doubled": 0, "changed": 0, "commit": "c"}
    found = summarise([*rows, answers])
    assert (found["lost"], found["faults"]) == (3, 2)
    assert (found["answered_p50_s"], found["answered_max_s"], found["live_again_max_s"]) == (2.0, 3.0, 9.0)


# -- whole runs --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_whole_suite_loses_nothing(tmp_path: Path) -> None:
    """A fault that no deployment recovers from; processes left behind.

    Why a process of its own: Ray keeps the token of a process's first cluster.
    """
    model, report = save_model("llama", tmp_path / "model", max_position_embeddings=2048), tmp_path / "faults.json"
    command = [sys.executable, "-m", "pipelines.benchmark", "--suite", "faults", "--quick"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    run = subprocess.run(
        [*command, "--target", model, "--json", report], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(report.read_text(encoding="utf-8"))
    assert result["recovered"] == result["faults"] == len(result["rows"]) - 1 >= len(QUICK) - 1, result["rows"]
    assert result["streams"] and result["turns"]
    assert (result["lost"], result["doubled"], result["changed"]) == (0, 0, 0), result["rows"]
    assert result["service_ends"] == 0

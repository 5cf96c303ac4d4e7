"""Faults of one service: they follow from their seed, and nothing that is lost, doubled or changed goes unnoticed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from ipaddress import IPv4Network
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from pipelines.benchmarks import soak
from pipelines.benchmarks.chaos import faulty_service
from pipelines.benchmarks.chaos.faulty_service import ServiceOptions
from pipelines.benchmarks.chaos.network_namespace import NetworkNamespace, enter, free_network, network_namespace
from pipelines.benchmarks.chaos.service_clients import ServiceClients
from pipelines.benchmarks.chaos.service_faults import KINDS, OTHER_KINDS, Fault, ServiceFaults, fault_of, faults_batch
from pipelines.benchmarks.chaos.service_process import Network, small_disk
from ragspec.disk import write_atomically
from ragspec.errors import EngineError
from ragspec.rag.database import Database
from services.settings import ConversationSettings

ROOT = Path(__file__).resolve().parents[2]

TURNS = [("Question 1?", "one"), ("Question 2?", "two")]
FILES = {"file-1": ("vs-1", "1.txt", "A lighthouse."), "file-2": ("vs-2", "2.txt", "Another lighthouse.")}


def test_a_fault_follows_from_its_seed_and_number() -> None:
    """A failure that nobody can run again; a kind that is never drawn."""
    first = [fault_of(7, number) for number in range(3 * len(KINDS))]
    assert first == [fault_of(7, number) for number in range(3 * len(KINDS))] != [fault_of(8, n) for n in range(30)]
    for turn in range(3):
        assert {fault.kind for fault in first[10 * turn : 10 * turn + 10]} == set(KINDS)


def test_faults_of_recorded_runs_stay_as_they_were() -> None:
    """A new kind that made fault n of a seed another: recorded results could not be had again."""
    kinds = "full/read-only/stop/memory/kill/reset/latency/slow disk/no growth/partition/reset/stop/kill/full/latency/partition"
    assert [fault_of(0, number).kind for number in range(16)] == kinds.split("/")
    assert fault_of(0, 999) == ("memory", pytest.approx(0.8900235773737373), pytest.approx(0.371823959992136))


def test_chosen_kinds_come_in_turn_and_clocks_go_wrong_in_all_ways() -> None:
    """A clock that only runs ahead, or by minutes; a start so far ahead that conversations rightly expire."""
    faults = [fault_of(3, number, OTHER_KINDS) for number in range(60 * len(OTHER_KINDS))]
    assert Counter(fault.kind for fault in faults) == dict.fromkeys(OTHER_KINDS, 60)
    for kind, most_days in (("clock", 30), ("clock-start", 6)):
        days = [fault.ahead_s / 86_400 for fault in faults if fault.kind == kind]
        assert min(map(abs, days)) >= 1 / 24 and max(map(abs, days)) <= most_days
        assert max(days) > 1.0 and min(days) < -1.0 and min(map(abs, days)) < 0.5
    assert most_days * 86_400 < ConversationSettings().ttl_s


CLOCK = """
import json, logging, sys, time
from pathlib import Path
from pipelines.benchmarks.chaos.faulty_service import shift_clock
from ragspec.rag.chat import conversations
from services import keys
from services.stores.records import Records

folder = Path(sys.argv[1])
shift_clock(folder / "clock")
records = Records(folder / "records.sqlite")

def days():
    key = keys.add_key(folder / "keys.json", "ann")[1].created
    logged = logging.makeLogRecord({}).created, logging.LogRecord("", 0, "", 0, "", (), None).created
    started = conversations._steady_clock(0.0, 0.0)()
    file = records.add_file("ann", str(time.monotonic_ns()), "a", "b", 1).created_s
    of_key = keys.datetime.fromisoformat(key).timestamp()
    return [time.time() / 86400, time.time_ns() / 86400e9, *(each / 86400 for each in (*logged, started, file, of_key))]

told = [days()]
for ahead_days in (3, -20):
    (folder / "clock").write_text(str(ahead_days * 86400))
    told.append(days())
(folder / "clock").unlink()
print(json.dumps([*told, days()]))
"""


def test_a_clock_that_jumps_does_so_for_all_that_a_service_tells(tmp_path: Path) -> None:
    """A jump that only some readers of the clock meet."""
    command = [sys.executable, "-c", CLOCK, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    right, ahead, behind, again = json.loads(done.stdout)
    now = time.time() / 86_400
    for days, told in ((0, right), (3, ahead), (-20, behind), (0, again)):
        assert told == pytest.approx([now + days] * len(told), abs=0.5)


def test_nothing_reads_the_wall_clock_past_the_jump() -> None:
    """A new reader of the clock that a jump does not reach, so that no fault would ever hit it."""
    other = r"CURRENT_TIMESTAMP|utcnow|clock_gettime|gmtime\(\)|localtime\(\)|\.today\(\)|unixepoch|'now'"
    other += r"|from time import .*\btime|import datetime$"
    sources = [path for folder in ("ragspec", "services") for path in (ROOT / folder).rglob("*.py")]
    found = [path.name for path in sources if re.search(other, path.read_text(encoding="utf-8"), re.MULTILINE)]
    assert len(sources) > 100 and not found


class Shelf:
    """A service that holds what it is told to hold."""

    def __init__(self) -> None:
        self.turns = list(TURNS)
        self.files = list(FILES)
        self.contents = {file: text for file, (_, _, text) in FILES.items()}
        self.found = {store: [text] for store, _, text in FILES.values()}

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/conversations/{name}/items", self._items)
        app.router.add_get("/v1/files", self._files)
        app.router.add_get("/v1/files/{file}/content", self._content)
        app.router.add_get("/v1/vector_stores/{store}/files/{file}", self._member)
        app.router.add_post("/v1/vector_stores/{store}/search", self._search)
        return app

    async def _items(self, request: web.Request) -> web.Response:
        data = [
            {"id": str(n), "content": [{"text": text}]} for n, text in enumerate(t for turn in self.turns for t in turn)
        ]
        return web.json_response({"data": data, "has_more": False})

    async def _files(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": file} for file in self.files], "has_more": False})

    async def _content(self, request: web.Request) -> web.Response:
        return web.Response(body=self.contents[request.match_info["file"]].encode())

    async def _member(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "completed"})

    async def _search(self, request: web.Request) -> web.Response:
        texts = self.found[request.match_info["store"]]
        return web.json_response({"data": [{"content": [{"text": text}]} for text in texts]})


@contextlib.asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[int]:
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


async def marks_of(shelf: Shelf, deleted: str = "") -> dict[str, int]:
    """What clients say that had all of `TURNS` and `FILES` acknowledged."""
    async with serving(shelf.app()) as port:
        clients = ServiceClients(f"http://127.0.0.1:{port}", "key", lambda line: None)
        clients._turns["conv"] = list(TURNS)
        clients._unsure.add("Question 3?")
        clients._documents |= FILES
        clients._deleted |= {deleted} - {""}
        await clients.check()
        return dict(clients.marks)


def damage(shelf: Shelf, name: str) -> None:
    match name:
        case "a turn is gone":
            shelf.turns.pop(0)
        case "a turn comes twice":
            shelf.turns.append(TURNS[0])
        case "an answer is another":
            shelf.turns[1] = ("Question 2?", "three")
        case "turns changed places":
            shelf.turns.reverse()
        case "a file is gone":
            shelf.files.remove("file-1")
        case "a file comes twice":
            shelf.files.append("file-1")
        case "a file is another":
            shelf.contents["file-1"] = "A light"
        case "a file is not found":
            shelf.found["vs-1"] = []
        case "a file is found twice":
            shelf.found["vs-1"] *= 2
        case "a turn was written and not acknowledged":
            shelf.turns.append(("Question 3?", "three"))


@pytest.mark.parametrize(
    ("name", "mark"),
    [
        ("nothing", None),
        ("a turn was written and not acknowledged", None),
        ("a turn is gone", "lost"),
        ("a turn comes twice", "doubled"),
        ("an answer is another", "changed"),
        ("turns changed places", "changed"),
        ("a file is gone", "lost"),
        ("a file comes twice", "doubled"),
        ("a file is another", "changed"),
        ("a file is not found", "lost"),
        ("a file is found twice", "doubled"),
    ],
)
def test_what_was_acknowledged_is_there_once_and_as_it_was(name: str, mark: str | None) -> None:
    """A thousand faults without a loss, because nobody looked."""
    shelf = Shelf()
    damage(shelf, name)
    assert asyncio.run(marks_of(shelf)) == ({} if mark is None else {mark: 1})


def test_a_deleted_file_that_is_there_is_noticed() -> None:
    """A deletion that a fault undid."""
    assert asyncio.run(marks_of(Shelf(), deleted="file-1")) == {"doubled": 1}


@pytest.mark.parametrize(
    ("pieces", "is_marked"),
    [(["on", "e"], False), (["on"], False), (["on", "x"], True), (["x"], True)],
)
def test_a_stream_may_be_cut_and_not_changed(pieces: list[str], is_marked: bool) -> None:
    """A stream that a fault cut off is compared as far as it came, and counted as cut."""

    async def stream(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        for text in pieces:
            event = json.dumps({"choices": [{"delta": {"content": text}}]})
            await reply.write(f"data: {event}\n\n".encode())
        assert request.transport is not None
        request.transport.close()
        return reply

    async def run() -> dict[str, int]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", stream)
        async with serving(app) as port:
            clients = ServiceClients(f"http://127.0.0.1:{port}", "key", lambda line: None)
            clients._expected = dict.fromkeys(range(6), "one")
            async with clients._session() as session:
                with contextlib.suppress(aiohttp.ClientError, Exception):
                    await clients._checked_stream(session, 0)
            return {**clients.marks, "cut": clients.num_cut}

    assert asyncio.run(run()) == {"cut": 1} | ({"changed": 1} if is_marked else {})


def over_a_network(test: Callable[[Network, aiohttp.ClientSession], Awaitable[None]]) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({})

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/", answer)
        async with serving(app) as port, Network(port) as network, aiohttp.ClientSession(network.url) as session:
            assert await asked(session) == 200
            await test(network, session)

    asyncio.run(run())


async def asked(session: aiohttp.ClientSession) -> int:
    """Why a POST: the client repeats a GET by itself."""
    async with session.post("/") as reply:
        return reply.status


def test_a_parted_network_delivers_nothing_until_it_is_whole() -> None:
    """A partition that lets connections through is none."""

    async def parted(network: Network, session: aiohttp.ClientSession) -> None:
        network.part(True)
        call = asyncio.create_task(asked(session))
        done, _ = await asyncio.wait({call}, timeout=0.2)
        assert not done
        network.part(False)
        assert await call == 200

    over_a_network(parted)


def test_a_slow_network_is_waited_for_and_a_cut_one_is_an_error() -> None:
    """Latency that is not there, or a reset that nobody feels."""

    async def slow_and_cut(network: Network, session: aiohttp.ClientSession) -> None:
        network.latency_s = 0.1
        begin_s = asyncio.get_running_loop().time()
        assert await asked(session) == 200
        assert asyncio.get_running_loop().time() - begin_s >= 0.2  # there and back
        network.latency_s = 60.0
        call = asyncio.create_task(asked(session))
        await asyncio.sleep(0.1)
        network.cut()
        with pytest.raises(aiohttp.ClientError):
            await call

    over_a_network(slow_and_cut)


def test_a_slow_disk_is_slow_for_files_and_for_databases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only Python's writes waited, and no database ever met the slow disk: SQLite writes without Python."""
    for module, name in ((os, "fsync"), (os, "replace"), (sqlite3, "connect"), (faulty_service.time, "sleep")):
        monkeypatch.setattr(module, name, getattr(module, name))  # put back afterwards
    waits = list[float]()
    monkeypatch.setattr(faulty_service.time, "sleep", waits.append)
    faulty_service.slow_down(slow := tmp_path / "slow")
    database = Database(tmp_path / "a.sqlite", "CREATE TABLE a (b TEXT);", schema=1)

    def num_waits() -> list[int]:
        waits.clear()
        counts = list[int]()
        with database.writing() as db:
            db.execute("INSERT INTO a VALUES ('c')")
        counts.append(len(waits))
        database.truncate_log()
        counts.append(len(waits))
        with database.reading() as db:
            assert db.execute("SELECT b FROM a").fetchone() == ("c",)
        counts.append(len(waits))
        write_atomically(tmp_path / "file", "text")
        return [*counts, len(waits)]

    assert num_waits() == [0, 0, 0, 0]
    slow.touch()
    *of_database, of_all = num_waits()
    assert of_database == [1, 2, 2] and of_all > 2
    slow.unlink()
    assert num_waits() == [0, 0, 0, 0]
    database.close()


def test_a_full_disk_takes_nothing(tmp_path: Path) -> None:
    """A fault that hits nothing counts as survived."""
    try:
        with small_disk(tmp_path / "disk") as disk:
            disk.fill()
            with pytest.raises(OSError, match="No space left"):
                (disk.folder / "a").write_bytes(b"a" * 2**16)
            disk.empty()
            (disk.folder / "a").write_bytes(b"a" * 2**16)
            disk.mount("ro")
            with pytest.raises(OSError, match="Read-only"):
                (disk.folder / "b").touch()
    except EngineError as error:
        pytest.skip(str(error))


@pytest.fixture
def namespace() -> Iterator[NetworkNamespace]:
    with contextlib.ExitStack() as stack:
        try:
            namespace = stack.enter_context(network_namespace())
        except EngineError as error:
            pytest.skip(str(error))
        yield namespace
    for command in (["ip", "netns", "list"], ["ip", "link", "show"]):
        left = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert namespace.name not in left and namespace.link.removesuffix("-i") not in left


@contextlib.contextmanager
def echoed(namespace: NetworkNamespace) -> Iterator[socket.socket]:
    """A connection into the namespace, from where the first byte comes back."""
    ports = queue.Queue[int]()

    def echo() -> None:
        enter(namespace.name)
        with socket.create_server((namespace.host, 0)) as listener:
            ports.put(listener.getsockname()[1])
            with listener.accept()[0] as connection:
                connection.sendall(connection.recv(1))

    thread = threading.Thread(target=echo, daemon=True)
    thread.start()
    with socket.create_connection((namespace.host, ports.get(timeout=60.0)), 60.0) as client:
        yield client
    thread.join(60.0)


def test_a_parted_link_drops_all_and_tells_nobody(namespace: NetworkNamespace) -> None:
    """A partition whose ends hear of it: what waits for TCP for long was never met."""
    routes = subprocess.run(["ip", "-n", namespace.name, "route"], capture_output=True, text=True, check=True).stdout
    assert len(routes.splitlines()) == 1 and "default" not in routes
    with echoed(namespace) as client:
        namespace.part(True)
        client.sendall(b"a")
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.recv(1)
        with pytest.raises(TimeoutError):
            socket.create_connection(client.getpeername(), 0.3)
        namespace.part(False)
        client.settimeout(60.0)
        assert client.recv(1) == b"a"


def test_a_slow_link_takes_its_time(namespace: NetworkNamespace) -> None:
    """Latency that is not there."""
    try:
        namespace.delay(0.2)
    except EngineError as error:
        pytest.skip(str(error))
    with echoed(namespace) as client:
        begin_s = time.monotonic()
        client.sendall(b"a")
        assert client.recv(1) == b"a" and time.monotonic() - begin_s >= 0.2


def test_a_namespace_takes_no_network_that_is_in_use() -> None:
    """Packets to hosts of the machine's own network that ended in a namespace."""
    half = IPv4Network("10.0.0.0/9")
    assert not any(free_network([half]).overlaps(half) for _ in range(20))
    with pytest.raises(EngineError, match="is free"):
        free_network([IPv4Network("10.0.0.0/8")])


def test_the_probe_does_not_kill_a_service_that_has_just_started() -> None:
    """A start that took longer than the probe waits was followed by a kill at once, which cut off streams."""
    killed = list[bool]()
    service: Any = SimpleNamespace(
        is_up=True, options=ServiceOptions(Path(), Path(), 0), kill=lambda: killed.append(True)
    )
    clients: Any = SimpleNamespace(succeeded_s={"streams": 0.0})
    nothing: Any = None

    async def run() -> None:
        faults = ServiceFaults(nothing, service)
        faults._start = lambda: asyncio.sleep(0)  # type: ignore[method-assign]
        asyncio.get_running_loop().call_later(0.1, lambda: clients.succeeded_s.update(streams=time.monotonic()))
        await faults._recovery_s(clients, time.monotonic() - 100.0)

    asyncio.run(run())
    assert not killed


@pytest.mark.parametrize(
    ("ended", "code", "num_cut", "bad"),
    [
        (True, 0, 0, {}),
        (True, 1, 0, {"upgrade failed": 1}),
        (False, None, 0, {"hang": 1}),
        (True, 0, 2, {"cut off": 2}),
    ],
)
def test_an_upgrade_that_fails_hangs_or_cuts_streams_off_is_counted(
    ended: bool, code: int | None, num_cut: int, bad: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade that counts as survived however the service ends."""
    signals, clients = list[int](), SimpleNamespace(num_cut=7)

    def send(number: int) -> None:
        signals.append(number)
        clients.num_cut += num_cut

    service = SimpleNamespace(is_up=True, options=ServiceOptions(Path(), Path(), 0), send=send, kill=lambda: None)
    service.has_ended, service.exit_code = lambda within_s: ended, code

    async def recovered(*_: object) -> float:
        return 0.5

    monkeypatch.setattr(ServiceFaults, "_back_up", lambda self: None)
    monkeypatch.setattr(ServiceFaults, "_recovery_s", recovered)
    parts: Any = None, service, clients
    faults = ServiceFaults(*parts[:2])
    asyncio.run(faults._strike(Fault("upgrade", 0.0, 0.0), parts[2]))
    assert signals == [signal.SIGTERM] and set(bad) <= set(soak.BAD)
    assert +faults._counts == {"upgrade": 1, "recovered within 1 s": 1} | bad


def survived(state: Path, *options: str) -> dict[str, int]:
    """What a run counted in which clients could do all they do, and lost nothing."""
    try:
        assert soak.main(["faults", "--state", str(state), *options]) == 0
    except EngineError as error:
        pytest.skip(str(error))
    counts: dict[str, int] = json.loads(state.read_text())["counts"]
    assert counts["streams"] and counts["turns"] and counts["documents"]
    return counts


@pytest.mark.slow
def test_a_service_loses_nothing_to_ten_faults(tmp_path: Path) -> None:
    """One fault of every kind; the full numbers are run by hand, in parts."""
    counts = survived(tmp_path / "state.json", "--count", "10")
    assert all(counts[kind] == 1 for kind in KINDS)


@pytest.mark.slow
def test_a_service_survives_wrong_clocks_upgrades_and_a_link_that_is_down(tmp_path: Path) -> None:
    """As above, for kinds that are asked for."""
    kinds = ("clock", "clock-start", "upgrade", "partition-ns")
    counts = survived(tmp_path / "state.json", "--count", "4", "--kinds", *kinds)
    assert all(counts[kind] == 1 for kind in kinds)


@pytest.mark.slow
@pytest.mark.ray
def test_a_gateway_loses_nothing_and_leaves_no_request_to_the_engines(tmp_path: Path) -> None:
    """Engines that go on for ever for a router that was killed; a conversation that ends with its gateway."""
    counts = survived(tmp_path / "state.json", "--count", "2", "--kinds", "gateway-kill", "gateway-stop")
    assert counts["gateway-kill"] == counts["gateway-stop"] == 1


def test_a_gateway_s_faults_are_not_mixed_with_a_service_s() -> None:
    """A full disk or a wrong clock that never reaches the gateway, counted as survived."""
    with pytest.raises(EngineError, match="a run of their own"):
        faults_batch(0, 0, 2, ["gateway-kill", "clock"])

"""Faults of one service: they follow from their seed, and nothing that is lost, doubled or changed goes unnoticed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from pipelines.benchmarks import soak
from pipelines.benchmarks.chaos import faulty_service
from pipelines.benchmarks.chaos.service_clients import ServiceClients
from pipelines.benchmarks.chaos.service_faults import KINDS, fault_of
from pipelines.benchmarks.chaos.service_process import Network, small_disk
from ragspec.disk import write_atomically
from ragspec.errors import EngineError
from ragspec.rag.database import Database

TURNS = [("Question 1?", "one"), ("Question 2?", "two")]
FILES = {"file-1": ("vs-1", "1.txt", "A lighthouse."), "file-2": ("vs-2", "2.txt", "Another lighthouse.")}


def test_a_fault_follows_from_its_seed_and_number() -> None:
    """A failure that nobody can run again; a kind that is never drawn."""
    first = [fault_of(7, number) for number in range(3 * len(KINDS))]
    assert first == [fault_of(7, number) for number in range(3 * len(KINDS))] != [fault_of(8, n) for n in range(30)]
    for turn in range(3):
        assert {fault.kind for fault in first[10 * turn : 10 * turn + 10]} == set(KINDS)


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
    """A stream that a fault cut off is compared as far as it came."""

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
            return dict(clients.marks)

    assert asyncio.run(run()) == ({"changed": 1} if is_marked else {})


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


@pytest.mark.slow
def test_a_service_loses_nothing_to_ten_faults(tmp_path: Path) -> None:
    """One fault of every kind; the full numbers are run by hand, in parts."""
    state: Any = tmp_path / "state.json"
    try:
        assert soak.main(["faults", "--count", "10", "--state", str(state)]) == 0
    except EngineError as error:
        pytest.skip(str(error))
    counts = json.loads(state.read_text())["counts"]
    assert all(counts[kind] == 1 for kind in KINDS) and counts["streams"] and counts["turns"] and counts["documents"]

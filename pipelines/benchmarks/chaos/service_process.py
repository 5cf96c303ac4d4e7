"""A service in a process of its own, on a small disk of its own, behind a network of its own; each of them can fail.

    with small_disk(folder) as disk, ServiceProcess(ServiceOptions(disk.folder, folder, port)) as service:
        service.start()

Processes are forked from one that has imported everything, so that a start takes seconds and not tens of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import resource
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from pipelines.benchmarks.chaos.faulty_service import ServiceOptions, serve
from ragspec.errors import EngineError

DISK_MB = 64
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([serve.__module__, "pipelines.benchmarks.small_service", "services.app"])
_START_S, _LOOK_S = 240.0, 0.05
_PAGE_BYTES = resource.getpagesize()


class SmallDisk:
    """A memory file system of `DISK_MB`, which can be full or read-only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        """Takes all room that is left."""
        room = os.statvfs(self.folder)
        with open(self._ballast, "wb") as file, contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize)

    def empty(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def mount(self, option: str) -> None:
        """`rw` or `ro`. No process may have a file open for writing."""
        subprocess.run(["mount", "-o", f"remount,{option}", str(self.folder)], check=True)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[SmallDisk]:
    """Mounted until the block ends. Raises: EngineError without the right to mount."""
    folder.mkdir()
    options = f"size={DISK_MB}m,mode=700"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True)
    if done.returncode:
        raise EngineError(f"these faults need the right to mount a disk: {done.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


class ServiceProcess:
    """States: down -> up, by `start`; down again if it is killed or ends by itself."""

    def __init__(self, options: ServiceOptions) -> None:
        self.options = options
        self._process: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def is_up(self) -> bool:
        return self._process is not None and self._process.is_alive()

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.exitcode

    def begin(self) -> None:
        """Starts the process, and waits for nothing."""
        self._process = _CONTEXT.Process(target=serve, args=(self.options,))
        self._process.start()

    def start(self) -> bool:
        """Returns when it answers, or False when it has ended."""
        if not self.is_up:
            self.begin()
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self.is_up:
            with contextlib.suppress(OSError), urllib.request.urlopen(self._health, timeout=5.0):
                return True
            time.sleep(_LOOK_S)
        return False

    def has_ended(self, within_s: float) -> bool:
        """Waits for it."""
        self._process.join(within_s)
        return not self.is_up

    def kill(self) -> None:
        if self.is_up:
            self.send(signal.SIGKILL)
        if self._process is not None:
            self._process.join()

    def send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def limit(self, what: int, most: int = resource.RLIM_INFINITY) -> None:
        """Sets a soft limit of the running process."""
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(self._process.pid, what, (most, resource.prlimit(self._process.pid, what)[1]))

    @property
    def memory_bytes(self) -> int:
        """Its address space."""
        try:
            return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[0]) * _PAGE_BYTES
        except (OSError, IndexError):
            return 2**40

    @property
    def _health(self) -> str:
        return f"http://{self.options.host}:{self.options.port}/health/live"


class Network:
    """Between clients and the service. `latency_s`: added to every piece; `is_parted`: nothing arrives, and nobody is told."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._host, self._port, self.latency_s, self._whole = host, port, 0.0, asyncio.Event()
        self._whole.set()
        self._writers, self._tasks = set[asyncio.StreamWriter](), set[asyncio.Task[None]]()
        self.url = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = "http://127.0.0.1:{1}".format(*self._server.sockets[0].getsockname()[:2])
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def part(self, is_parted: bool) -> None:
        (self._whole.clear if is_parted else self._whole.set)()

    def cut(self) -> None:
        """Resets every connection."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._forward(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._whole.wait()
            there, back = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.close()
            return
        both = {writer, back}
        self._writers |= both
        try:
            await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
        finally:
            self._writers -= both

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await source.read(2**16):
                await asyncio.sleep(self.latency_s)
                await self._whole.wait()
                sink.write(piece)
                await sink.drain()
        sink.close()

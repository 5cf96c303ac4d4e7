"""The targets of the suite `faults` outside Ray: a service process and its disk.

    with small_disk(folder / "disk") as disk, GatewayProcess(folder, disk.folder, cluster, environment) as service:
        service.start()
        disk.fill()

Nothing here decides when a fault comes, and nothing compares answers: `injector` and `clients` do.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import yaml

from pipelines.benchmarks.users.service import free_port
from ragspec.errors import EngineError

MODEL = "faults"
_DISK_MB = 64
_START_S = 900.0
_LOOK_S = 0.1


class SmallDisk:
    """A memory file system of 64 MB, which can be full. `is_mounted`: False where this process may not mount one."""

    def __init__(self, folder: Path, is_mounted: bool) -> None:
        self.folder, self.is_mounted = folder, is_mounted
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        """Take all room that is left."""
        room = os.statvfs(self.folder)
        with open(self._ballast, "wb") as file, contextlib.suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize)

    def empty(self) -> None:
        self._ballast.unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[SmallDisk]:
    """Mounted until the block ends; a plain folder where this process may not mount."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_MB}m,mode=700", "tmpfs", str(folder)]
    is_mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield SmallDisk(folder, is_mounted)
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


class GatewayProcess:
    """`ragspec serve --cluster` in a process of its own. States: down -> up, by `start`; down when it is killed or ends."""

    def __init__(self, folder: Path, disk: Path, cluster: Sequence[str], environment: Mapping[str, str]) -> None:
        """`disk`: for the service's data. `cluster`: the options that name the deployment."""
        self.keys_file, port = folder / "keys.json", free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log, self._environment = folder / "service.log", dict(environment)
        config = folder / "service.yaml"
        service = {"model": MODEL, "host": "127.0.0.1", "port": port}
        service |= {"data_dir": str(disk / "data"), "keys_file": str(self.keys_file)}
        config.write_text(yaml.safe_dump({"service": service}), encoding="utf-8")
        self._command = [sys.executable, "-m", "ragspec.cli", "serve", *cluster, "--config", str(config)]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def is_up(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Returns when the service answers. Raises: EngineError if it ends first, or does not answer in time."""
        if not self.is_up:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self.is_up:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health/ready", timeout=5.0):
                return
            time.sleep(_LOOK_S)
        raise EngineError(f"the service did not start: {last_line(self._log)}")

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def has_ended(self, within_s: float) -> bool:
        """Whether the process ends of itself within the time."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        return not self.is_up

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def last_line(log: Path) -> str:
    """The last words of a log, for an error."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "its log is empty")[-400:]

"""The targets of the suite `faults` outside Ray: a service process, its disk, and a batch job.

    with small_disk(folder / "disk") as disk, GatewayProcess(folder, disk.folder, cluster, environment) as service:
        service.start()
        disk.fill()

Nothing here decides when a fault comes, and nothing compares answers: `injector` and `clients` do.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import yaml

from pipelines.batch.records import recorded_row
from pipelines.batch.text_files import whole_lines
from pipelines.benchmarks.users.service import free_port
from ragspec.errors import EngineError

ROOT = Path(__file__).resolve().parents[3]
MODEL = "faults"
_DISK_MB = 64
_START_S = 900.0
_JOB_S = 600.0
_LOOK_S = 0.1
_MAX_JOB_FAILURES = 5
_COMPARED_KEYS = (
    "question", "answer", "finish_reason", "system_fingerprint", "citations", "passages", "dropped_passages",
    "index_generation", "seed", "logprobs", "row_digest",
)  # fmt: skip
"""The fields of an answered row that do not differ from run to run. Log-probabilities name every token."""


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


class BatchJob:
    """`pipelines.batch_rag` on the deployment, one pass over all rows after the other in a thread.

    A driver that dies is started again with the same output folder, as an operator would.
    """

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], folder: Path, options: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        folder.mkdir()
        self._rows, self._folder, self._environment = folder / "rows.jsonl", folder, dict(environment)
        self._rows.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        self._options = list(options)
        self._driver: subprocess.Popen[bytes] | None = None
        self._is_stopping, self._is_abandoned = False, False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.passes = list[Path]()
        self.num_failures = 0
        """Drivers that ended with an error of their own."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_abandoned = True
        self.kill()
        self._thread.join(_JOB_S)

    def undisturbed(self) -> dict[str, str]:
        """The comparable rows of a pass without faults, by id. Raises: EngineError if the job fails."""
        out = self._folder / "undisturbed"
        if self._exit_code(out) != 0:
            raise EngineError(f"the batch job failed without a fault: {last_line(out.with_suffix('.log'))}")
        return dict(comparable_rows(out))

    def kill(self) -> None:
        """SIGKILL the driver, if one runs."""
        if self._driver is not None:
            self._driver.kill()

    def finish(self) -> None:
        """Returns when the present pass is complete, and starts no other."""
        self._is_stopping = True
        self._thread.join(_JOB_S)

    def _run(self) -> None:
        while not self._is_abandoned and not (self._is_stopping and self.passes):
            out = self._folder / f"pass-{len(self.passes)}"
            while (code := self._exit_code(out)) != 0 and not self._is_abandoned:
                self.num_failures += code != -signal.SIGKILL
                if self.num_failures >= _MAX_JOB_FAILURES:
                    break
            self.passes.append(out)

    def _exit_code(self, out: Path) -> int:
        command = [sys.executable, "-m", "pipelines.batch_rag", "--input", str(self._rows), "--out", str(out)]
        with open(out.with_suffix(".log"), "ab") as log:
            self._driver = subprocess.Popen(
                [*command, *self._options],
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            return self._driver.wait()


class Judged(NamedTuple):
    """Sorted names of rows; a name may stand in several."""

    lost: list[str]
    doubled: list[str]
    changed: list[str]


def judge_rows(expected: Mapping[str, Hashable], found: Sequence[tuple[str, Hashable]]) -> Judged:
    """Compare the rows of a job by id. A repeated row is doubled even if both are right, and so is an unknown row."""
    names = [name for name, _ in found]
    lost = expected.keys() - set(names)
    doubled = {name for name in names if names.count(name) > 1 or name not in expected}
    changed = {name for name, row in found if name in expected and row != expected[name]}
    return Judged(sorted(lost), sorted(doubled), sorted(changed))


def comparable_rows(out: Path) -> Iterator[tuple[str, str]]:
    """The id and the compared fields of every row of a job's output folder, unfinished parts included."""
    for path in sorted(out.glob("answers-*.jsonl*")):
        for record in whole_lines(path):
            compared = {key: record.get(key) for key in _COMPARED_KEYS}
            yield recorded_row(record).id, json.dumps(compared, sort_keys=True)


def last_line(log: Path) -> str:
    """The last words of a log, for an error."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "its log is empty")[-400:]

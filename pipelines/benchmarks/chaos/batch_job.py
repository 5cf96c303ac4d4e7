"""The batch job of the suite `chaos`: beside the faults, and afterwards with its own driver killed at random moments.

Every row must be written once, with the same answer.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipelines.batch.records import recorded_row
from pipelines.batch.text_files import whole_lines
from pipelines.benchmarks.chaos.check import Verdict, judge_rows
from pipelines.benchmarks.chaos.load import Load
from pipelines.benchmarks.chaos.oracle import comparable_row
from pipelines.benchmarks.harness import Result
from ragspec.evaluation.measures import Tick

ROOT = Path(__file__).resolve().parents[3]
_LOOK_S = 0.05
_END_S = 10.0
_MOST_S = 600.0
_MOST_EXTRA_S = 0.5
_MOST_FAILURES = 5
_MOST_RUNS = 3


class BatchJob(NamedTuple):
    """The command of the batch job and its output."""

    rows: Path
    options: tuple[str, ...]
    environment: Mapping[str, str]

    @contextlib.contextmanager
    def driver(self, out: Path) -> Iterator[subprocess.Popen[bytes]]:
        """The driver's process, killed at the end of the context; its log stands beside `out`."""
        files = ("--input", str(self.rows), "--out", str(out))
        command = [sys.executable, "-m", "pipelines.batch_rag", *files, *self.options]
        with (
            open(self._log(out), "ab") as log,
            subprocess.Popen(
                command, cwd=ROOT, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            ) as process,
        ):
            try:
                yield process
            finally:
                process.kill()

    def last_words(self, out: Path) -> str:
        lines = self._log(out).read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it says nothing")[-400:]

    def _log(self, out: Path) -> Path:
        return out.with_suffix(".log")


class BatchLoad(Load):
    """`pipelines.batch_rag` as its own process on a deployment, one pass over all rows after the other, at least one.

    A job that fails is counted and submitted again, as an operator would.
    """

    def __init__(self, job: BatchJob, folder: Path) -> None:
        super().__init__()
        self._job, self._folder = job, folder
        self.passes: list[Path] = []
        self.failures: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None

    def _abandon(self) -> None:
        super()._abandon()
        if self._process is not None:
            self._process.kill()
        self._threads[0].join(_END_S)

    def _run(self) -> None:
        while not self._abandoned.is_set() and not (self._stopping.is_set() and self.passes):
            out = self._folder / f"pass-{len(self.passes)}"
            self._pass(out)
            self.passes.append(out)

    def _pass(self, out: Path) -> None:
        while not self._abandoned.is_set() and len(self.failures) < _MOST_FAILURES:
            with self._job.driver(out) as self._process:
                if self._process.wait() == 0 or self._abandoned.is_set():
                    return
            self.failures.append(self._job.last_words(out))


def written_rows(out: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every complete line of a job's answers by id, unfinished parts included."""
    for path in sorted(out.glob("answers-*.jsonl*")):
        for record in whole_lines(path):
            yield recorded_row(record).id, record


def judge_output(expected: Mapping[str, str], out: Path) -> Verdict:
    """Judge the rows of a job's output folder."""
    return judge_rows(expected, [(name, comparable_row(record)) for name, record in written_rows(out)])


def driver_kills(
    job: BatchJob, out: Path, expected: Mapping[str, str], num_kills: int, rng: random.Random, tick: Tick
) -> Result:
    """Kill -9 of the driver, followed by a new submission. The first kill comes during start-up, the others after a random share
    of the rows is written."""
    moments = [0.0, *sorted(rng.uniform(0.05, 0.9) for _ in range(num_kills - 1))]
    killed_at = []
    for number, share in enumerate(moments, 1):
        with job.driver(out) as process:
            _wait_for_rows(process, out, round(share * len(expected)), rng.uniform(0.0, _MOST_EXTRA_S))
            was_running = process.poll() is None
        if was_running:
            killed_at.append(_num_rows(out))
        tick("driver kills", number, num_kills)
    exit_codes: list[int] = []
    while 0 not in exit_codes and len(exit_codes) < _MOST_RUNS:
        with job.driver(out) as process:
            exit_codes.append(process.wait(_MOST_S))
    verdict = judge_output(expected, out)
    return {
        "driver_kills": len(killed_at),
        **{f"driver_{mark}": len(names) for mark, names in verdict._asdict().items()},
        "driver_rows_at_kill": killed_at,
        "driver_exit_codes": exit_codes,
    }


def _wait_for_rows(process: subprocess.Popen[bytes], out: Path, num_rows: int, extra_s: float) -> None:
    """Wait until so many rows are written, and a moment more; or until the job has ended."""
    deadline = time.monotonic() + _MOST_S
    while process.poll() is None and time.monotonic() < deadline:
        if _num_rows(out) >= num_rows:
            time.sleep(extra_s)
            return
        time.sleep(_LOOK_S)


def _num_rows(out: Path) -> int:
    return sum(1 for _ in written_rows(out))

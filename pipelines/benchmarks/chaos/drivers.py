"""kill -9 of a batch job's driver at random moments, followed by a new submission: every row once, with the same
answer."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from pipelines.benchmarks.chaos.check import judge_rows
from pipelines.benchmarks.chaos.load import BatchJob, written_rows
from pipelines.benchmarks.chaos.oracle import comparable_row
from ragspec.evaluation.report import Result
from ragspec.evaluation.timing import Tick

_LOOK_S = 0.05
_MOST_S = 600.0
_MOST_EXTRA_S = 0.5
_MOST_RUNS = 3


def driver_kills(
    job: BatchJob, out: Path, expected: Mapping[str, str], num_kills: int, rng: random.Random, tick: Tick
) -> Result:
    """The first kill comes during start-up, the others after a random share of the rows is written."""
    moments = [0.0, *sorted(rng.uniform(0.05, 0.9) for _ in range(num_kills - 1))]
    killed_at = []
    for number, share in enumerate(moments, 1):
        process = job.start(out)
        try:
            if _reached(process, out, round(share * len(expected)), rng.uniform(0.0, _MOST_EXTRA_S)):
                process.kill()
                process.wait()
                killed_at.append(_num_rows(out))
        finally:
            process.kill()
            process.wait()
        tick("driver kills", number, num_kills)
    exit_codes = _to_the_end(job, out)
    verdict = judge_rows(expected, [(name, comparable_row(record)) for name, record in written_rows(out)])
    return {
        "driver_kills": len(killed_at),
        "driver_lost": len(verdict.lost),
        "driver_duplicated": len(verdict.duplicated),
        "driver_changed": len(verdict.changed),
        "driver_rows_at_kill": killed_at,
        "driver_exit_codes": exit_codes,
    }


def _reached(process: subprocess.Popen[bytes], out: Path, num_rows: int, extra_s: float) -> bool:
    """Wait until so many rows are written, and a moment more. False: the job has ended."""
    deadline = time.monotonic() + _MOST_S
    while process.poll() is None and time.monotonic() < deadline:
        if _num_rows(out) >= num_rows:
            time.sleep(extra_s)
            return process.poll() is None
        time.sleep(_LOOK_S)
    return process.poll() is None


def _to_the_end(job: BatchJob, out: Path) -> list[int]:
    """Exit codes of runs until a run succeeds."""
    codes: list[int] = []
    while not (codes and codes[-1] == 0) and len(codes) < _MOST_RUNS:
        process = job.start(out)
        try:
            codes.append(process.wait(_MOST_S))
        finally:
            process.kill()
            process.wait()
    return codes


def _num_rows(out: Path) -> int:
    return sum(1 for _ in written_rows(out))

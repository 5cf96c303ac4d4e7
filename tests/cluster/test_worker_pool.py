"""The pool of workers: every task once, whatever happens to a worker; a worker that cannot be built is told plainly."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from ray import cloudpickle

from pipelines.batch_session import ray_session
from ragspec.cluster.pool import PoolSize, cpus_per_worker, through_pool
from ragspec.errors import EngineError, ModelError

pytestmark = pytest.mark.ray

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Why: a worker does not find the tests' folder


class Squares:
    """Squares numbers, and notes in a folder how many it had at once."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._running = 0

    async def __call__(self, table: pa.Table) -> pa.Table:
        (number,) = table["number"].to_pylist()
        self._running += 1
        (self._folder / f"{self._running}-at-once").touch()
        await asyncio.sleep(0.05)
        self._running -= 1
        if number == 13 and not (self._folder / "died").exists():
            (self._folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return pa.table({"number": [number], "square": [number * number]})


class Unbuildable:
    def __init__(self) -> None:
        raise ModelError("no weights in the folder")

    async def __call__(self, table: pa.Table) -> pa.Table:
        return table


class Poisoned:
    async def __call__(self, table: pa.Table) -> pa.Table:
        os.kill(os.getpid(), signal.SIGKILL)
        return table


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with ray_session("local"):
        yield


def squares(tasks: list[dict[str, Any]], folder: Path, num_workers: int) -> list[tuple[int, int]]:
    tables = through_pool(tasks, Squares, (str(folder),), PoolSize(num_workers, calls_per_worker=3))
    return sorted(zip(*map(list, pa.concat_tables(tables).to_pydict().values()), strict=True))


def test_every_task_is_done_once_though_a_worker_dies(tmp_path: Path) -> None:
    """A task of the dead worker is lost, or its neighbours come twice."""
    tasks = [{"number": n} for n in range(40)]
    assert squares(tasks, tmp_path, num_workers=2) == [(n, n * n) for n in range(40)]
    assert (tmp_path / "died").exists()
    assert (tmp_path / "3-at-once").exists(), "a worker never had several calls"


def test_no_tasks_need_no_workers(tmp_path: Path) -> None:
    """An empty dataset has no columns, which Ray Data takes badly."""
    assert not list(through_pool([], Squares, (str(tmp_path),), PoolSize(1, 1)))


@pytest.mark.parametrize("num_workers", [1, 2, 7, 100])
def test_workers_leave_room_for_each_other(num_workers: int) -> None:
    """More workers than processors wait for each other for ever."""
    import ray

    assert 0 < cpus_per_worker(num_workers) <= 0.5
    assert num_workers * cpus_per_worker(num_workers) <= ray.cluster_resources()["CPU"]


def test_a_worker_that_cannot_be_built_is_told_in_one_line() -> None:
    """Pages of Ray's own traceback, or a job that waits for ever."""
    with pytest.raises(EngineError) as caught:
        list(through_pool([{"number": 1}], Unbuildable, (), PoolSize(1, 1)))
    assert str(caught.value) == "the job stopped: ModelError: no weights in the folder"


def test_a_task_that_always_kills_its_worker_ends_the_job() -> None:
    """Ray Data starts the worker again without end."""
    with pytest.raises(EngineError) as caught:
        list(through_pool([{"number": 1}], Poisoned, (), PoolSize(1, 1)))
    assert "\n" not in str(caught.value)

"""Small tasks through a pool of long-lived workers, on Ray Data.

Owns how Ray Data is set up for that; knows neither questions nor answers. A worker is a class with a slow constructor and an
async `__call__`; several calls run in one worker at once, so that an engine inside it always has many requests.

    >>> for table in through_pool(tasks, Worker, (config,), PoolSize(num_workers=2, calls_per_worker=8)): ...
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy, DataContext, Dataset
from ray.exceptions import RayError
from ray.util.annotations import RayDeprecationWarning

from ragspec.errors import EngineError

_MAX_BLOCKS = 4096
"""Tasks are put into the object store in at most this many pieces."""

_MAX_CPUS_PER_WORKER = 0.5
_WORKER_SHARE = 0.9
"""Of all processors that the workers together may reserve: a pool that wants more would wait for ever."""

_MAX_TASK_RETRIES = 3
"""A task that kills its worker every time must not be tried without end, which is Ray Data's default."""

_MODULE = re.compile(r"^(?:\w+\.)+(?=\w+: )")
"""`package.module.` before the name of an error."""


class PoolSize(NamedTuple):
    """`calls_per_worker` is how many tasks one worker has at once."""

    num_workers: int
    calls_per_worker: int


def through_pool(
    tasks: Sequence[Mapping[str, Any]], worker: type, worker_args: tuple[Any, ...], size: PoolSize
) -> Iterator[pa.Table]:
    """The worker's table for each task, as soon as it is there, each exactly once; in no fixed order.

    `worker(*worker_args)` is built once an actor; its `async __call__` gets a table of one task and returns a table. A worker
    that dies is replaced and its unfinished tasks are run again. Reading slowly slows the workers down.
    Raises: EngineError when a worker cannot be built, a task raises or a task kills its worker again and again.
    """
    if not tasks:
        return
    _set_up()
    data = ray.data.from_items([dict(task) for task in tasks], override_num_blocks=min(len(tasks), _MAX_BLOCKS))
    results = _mapped(data, worker, worker_args, size)
    try:
        yield from results.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)
    except RayError as cause:
        raise EngineError(f"the job stopped: {_reason(cause)}") from cause


def _mapped(data: Dataset, worker: type, worker_args: tuple[Any, ...], size: PoolSize) -> Dataset:
    """Why the warning is silenced: the retries have no other spelling yet in the Ray that calls this one deprecated."""
    pool = ActorPoolStrategy(
        size=size.num_workers,
        max_concurrent_calls_per_actor=size.calls_per_worker,
        max_tasks_in_flight_per_actor=size.calls_per_worker + 1,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RayDeprecationWarning)
        return data.map_batches(
            worker,
            batch_size=1,
            batch_format="pyarrow",
            fn_constructor_args=worker_args,
            compute=pool,
            num_cpus=cpus_per_worker(size.num_workers),
            max_task_retries=_MAX_TASK_RETRIES,
        )


def cpus_per_worker(num_workers: int) -> float:
    """What one worker reserves of the cluster's processors: half of one, or less where there are few."""
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    share = _WORKER_SHARE * float(resources.get("CPU", 1.0)) / num_workers
    return min(_MAX_CPUS_PER_WORKER, round(share, 4))


def _set_up() -> None:
    """Why a block size of one byte: Ray Data keeps results back until a block is full, and a finished row is to be recorded."""
    context = DataContext.get_current()
    context.target_max_block_size = 1
    context.enable_progress_bars = False
    for handler in logging.getLogger("ray.data").handlers:
        if type(handler).__module__.startswith("ray.") and isinstance(handler, logging.StreamHandler):
            handler.setLevel(logging.CRITICAL)  # Ray's own log files keep everything


def _reason(error: RayError) -> str:
    """The last line of Ray's message, which is where it puts what really happened, without the module's name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return _MODULE.sub("", lines[-1]) if lines else type(error).__name__

"""Runs a table of phases with several threads: the caller and helpers that sleep between two calls.

Each phase is cut into chunks, and chunks are numbered through the whole table. A thread takes the next number once every chunk of
the earlier phases is done. Nobody waits for a thread that has taken nothing, so a helper that other load keeps from running costs
nothing but its help. The helpers belong to the process and serve every engine in it.
"""

import logging
import queue
import threading
import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ragspec.numerics.cpu.kernels import count_failure, number_chunks, take_rest, work
from ragspec.numerics.cpu.llvm_code import DONE, FAILED

log = logging.getLogger(__name__)

Phases = NDArray[np.int64]

_COUNTERS = 2
"""The place of the counters among the arguments of `work`."""
_FAILED_WAIT_S = 0.001
LEAST_SHARED = 4_000_000
"""Products of a weight and a row: fewer are computed by one thread before another is awake."""


class _ThreadPool:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: list[queue.SimpleQueue[tuple[Any, ...]]] = []

    def submit(self, count: int, arguments: tuple[Any, ...]) -> None:
        """Have `count` helpers run `work(*arguments)`."""
        with self._lock:
            while len(self._queues) < count:
                self._queues.append(queue.SimpleQueue())
                threading.Thread(target=_serve, args=(self._queues[-1],), name="ragspec-kernel", daemon=True).start()
        for jobs in self._queues[:count]:
            jobs.put(arguments)


def _serve(jobs: queue.SimpleQueue[tuple[Any, ...]]) -> None:
    while True:
        arguments = jobs.get()
        try:
            work(*arguments)
        except Exception:  # the thread serves the next call
            count_failure(arguments[_COUNTERS])
            log.exception("a helper of a compiled step failed")


_POOL = _ThreadPool()


def run(phases: Phases, num_rows: int, num_tiles: int, *arguments: Any) -> None:
    """Compute all phases, with as many threads as torch would use in the calling thread; little work with one thread.

    `arguments`: the rest of `work`'s.

    Raises: what a chunk raised in this thread; MemoryError if one failed in another, since compiled code raises little else.
    """
    numbered, num_chunks, num_threads = number_chunks(
        phases, num_rows, num_tiles, torch.get_num_threads(), LEAST_SHARED
    )
    counters = np.zeros(16, np.int64)
    try:
        if num_threads > 1:
            _POOL.submit(num_threads - 1, (numbered, num_chunks, counters, False, num_rows, *arguments))
    finally:  # also after Ctrl-C: helpers must not be left alone with the buffers
        _finish(counters, (numbered, num_chunks, counters, True, num_rows, *arguments))


def _finish(counters: NDArray[np.int64], arguments: tuple[Any, ...]) -> None:
    try:
        work(*arguments)
    except Exception:
        count_failure(counters)
        raise
    finally:
        if counters[FAILED]:
            _wait_for_others(counters, num_chunks=arguments[1])
    if counters[FAILED]:
        raise MemoryError("a helper thread of a compiled step failed; the log has its exception")


def _wait_for_others(counters: NDArray[np.int64], num_chunks: int) -> None:
    """Take all chunks that are left, then wait for those that other threads took before: they write into the buffers."""
    num_left = take_rest(counters, num_chunks)
    while counters[DONE] + counters[FAILED] + num_left < num_chunks:
        time.sleep(_FAILED_WAIT_S)

"""How many threads the kernels use. The count changes speed, never a bit of a result (the self-test compares).

Every thread that computes has workers of its own under OpenMP, and once a process has more of them than processors, all of
them sleep between two products instead of waiting for the next one: twice the time of a small model's step. So the engine's
thread is the only one that keeps workers; everything else computes in a thread that ends, and its workers with it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

import numba
import torch

T = TypeVar("T")


def num_processors() -> int:
    """Processors this process may use."""
    return max(1, len(os.sched_getaffinity(0)))


def set_num_threads(num_threads: int) -> None:
    """For the calling thread: the OpenMP libraries under torch and numba keep the count for each thread apart."""
    torch.set_num_threads(num_threads)
    numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))


def compute_apart(call: Callable[[], T], num_threads: int) -> T:
    """Run `call` in a thread of its own that ends with it; its result or its exception is the caller's."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            set_num_threads(num_threads)
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="ragspec-compute")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]

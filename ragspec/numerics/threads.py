"""How many threads the kernels use. The count changes speed, never a bit of a result (the self-test compares)."""

from __future__ import annotations

import os

import numba
import torch


def num_processors() -> int:
    """Processors this process may use."""
    return max(1, len(os.sched_getaffinity(0)))


def set_num_threads(num_threads: int) -> None:
    """For the calling thread: the OpenMP libraries under torch and numba keep the count for each thread apart."""
    torch.set_num_threads(num_threads)
    numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))

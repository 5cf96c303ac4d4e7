"""Measures of machine and process: memory bandwidth, weights read a step, memory, versions."""

from __future__ import annotations

import platform
import resource
import time
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoConfig

from ragspec.engine.checkpoints.target_files import return_freed, target_folder
from ragspec.engine.target import Target

_SMAPS = Path("/proc/self/smaps_rollup")


class PeakMemory:
    """The peak proportional set size. `look` takes milliseconds: call it between timed parts."""

    def __init__(self) -> None:
        self.peak_mb = 0.0

    def look(self) -> float:
        """Note the present size; returns the peak so far, in MB (10^6 bytes)."""
        self.peak_mb = max(self.peak_mb, _smaps_mb("Pss:"))
        return self.peak_mb


def held_mb() -> float:
    """Memory of this process without mapped files, in MB (10^6 bytes), after freed memory is returned."""
    return_freed()
    return _smaps_mb("Pss_Anon:")


def _smaps_mb(field: str) -> float:
    try:
        lines = _SMAPS.read_text().splitlines()
    except OSError:  # no Linux: the peak resident size stands in
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    return sum(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / 1e6


def weight_bytes(target: Target) -> int:
    """Bytes of weights that one step reads: all but an embedding table that the output layer does not share."""
    config = AutoConfig.from_pretrained(target_folder(target.config)).get_text_config()
    unread = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    itemsize: int = getattr(torch, target.config.weight_dtype).itemsize
    return (target.num_parameters - unread) * itemsize


def read_bandwidth(num_bytes: int, repeats: int = 7) -> float:
    """Bytes a second of reading a buffer of this size again and again, with all threads; the best of `repeats`.

    Why the weights' own size: decoding, too, reads from the processor's cache what fits in.
    """
    buffer = torch.ones(max(1, num_bytes // 4))
    best_s = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        buffer.sum()
        best_s = min(best_s, time.perf_counter() - begin)
    return buffer.numel() * 4 / best_s


def versions() -> dict[str, str]:
    packages = ("torch", "transformers", "numba", "numpy")
    return {"python": platform.python_version()} | {name: version(name) for name in packages}

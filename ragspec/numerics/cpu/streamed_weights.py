"""int8 weights of a target that is larger than memory: the layers that do not fit stay in their file.

Owns the file, the memory of the weights and the thread that reads. The first layers and the output layer are read once. The other
layers share two buffers by turns: while the kernels compute a layer, the next one is read. A step then takes as long as reading
them does, for one row or for sixty, so drafts are accepted almost for nothing.
Source: LLMCad (arXiv 2309.04255), for weights that are loaded layer by layer in every verification.

    >>> arena = StreamedArena(path, max_bytes=2**30)
"""

import functools
import json
import os
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from ragspec.errors import ModelError
from ragspec.numerics.cpu.int8_weights import Floats, Phases, WeightArena
from ragspec.numerics.cpu.kernels import Column


class _Load(NamedTuple):
    """A layer that a buffer holds once `done` has a result."""

    layer: int
    done: Future[None]


class StreamedArena(WeightArena):
    """A saved arena of which at most `max_bytes` of weights are in memory, the two buffers included.

    Raises: OSError and SafetensorError for a file that cannot be read; ModelError where the output layer and two layers need
    more than `max_bytes`, or where reading fails later.
    """

    streams = True

    def __init__(self, path: Path, max_bytes: int) -> None:
        with safe_open(path, "pt") as tensors:
            kept = {"parameters", "row_sums", "rotations"} & set(tensors.keys())
            super().__init__({name: tensors.get_tensor(name).clone() for name in kept})
        self._path, self._file = path, os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        header_bytes = int.from_bytes(os.pread(self._file, 8, 0), "little")
        begin, end = json.loads(os.pread(self._file, header_bytes, 8))["weights"]["data_offsets"]
        self._begin, self._num_bytes, self._max_bytes = 8 + header_bytes + begin, end - begin, max_bytes
        self._reader = ThreadPoolExecutor(1, "ragspec-weights")
        self._memory = np.empty(0, np.int8)
        self._loads: list[_Load | None] = [None, None]

    def placed(self, phases: Phases) -> Phases:
        """The phases with the places of their weights in memory. The decoder's come first: they tell where layers end."""
        if not len(self._memory):
            self._allocate()
        places = phases[:, Column.WEIGHT]
        layers = np.searchsorted(self._ends, places, side="right")
        places[places >= 0] += (self._memory_starts - self._starts)[layers][places >= 0]
        return phases

    @functools.cached_property
    def arrays(self) -> tuple[NDArray[np.int8], Floats]:
        parameters = self._saved["parameters"].numpy()
        assert (self._num_bytes, len(parameters)) == (self._num_weights, self._num_parameters), "kernels read unchecked"
        return self._memory, parameters

    @contextmanager
    def layer(self, number: int) -> Iterator[None]:
        """The weights of a layer are in memory inside a `with` block; behind it, another layer is read into their place.

        Raises: ModelError if they cannot be read.
        """
        if not self._num_kept <= number < self._num_layers:
            yield
            return
        buffer = (number - self._num_kept) % 2
        load = self._loads[buffer]
        # The first pass, a pass behind one that failed, or a layer read ahead while the file could not be read
        if load is None or load.layer != number or load.done.exception() is not None:
            load = self._start(number)
        try:
            load.done.result()
        except OSError as cause:
            self._loads[buffer] = None
            raise ModelError(f"weights of layer {number} cannot be read: {cause}") from cause
        try:
            yield
        finally:
            behind = number + 2
            self._start(behind if behind < self._num_layers else behind - self._num_layers + self._num_kept)

    def _start(self, number: int) -> _Load:
        load = _Load(number, self._reader.submit(self._read, number))
        self._loads[(number - self._num_kept) % 2] = load
        return load

    def _allocate(self) -> None:
        """Keeps as many layers as fit. An even number is streamed, so that a buffer's last layer and its first never meet."""
        ends = np.array([*self._layer_ends, self._num_bytes])
        starts = np.array([0, *self._layer_ends])
        sizes = ends - starts
        self._num_layers, largest = len(sizes) - 1, int(sizes[:-1].max())
        kept = range(self._num_layers % 2, self._num_layers - 1, 2)
        needed = {n: int(starts[n] + 2 * largest + sizes[-1]) for n in kept} | {self._num_layers: self._num_bytes}
        fitting = [n for n, num_bytes in needed.items() if num_bytes <= self._max_bytes]
        if not fitting:
            least = min(needed.values())
            raise ModelError(f"target.max_weight_bytes is {self._max_bytes}, and this target needs at least {least}")
        self._num_kept = max(fitting)
        buffers = starts[self._num_kept] + largest * (np.arange(self._num_layers - self._num_kept) % 2)
        size = needed[self._num_kept]
        self._starts, self._ends = starts, ends[:-1]
        self._memory_starts = np.array([*starts[: self._num_kept], *buffers, size - sizes[-1]])
        self._memory = np.empty(size, np.int8)
        self._sizes = sizes
        try:
            for number in (*range(self._num_kept), self._num_layers):
                self._read(number)
        except OSError as cause:
            raise ModelError(f"weights of layer {number} cannot be read: {cause}") from cause

    def _read(self, number: int) -> None:
        """Read a layer into its place; the page cache does not keep it, since it counts as memory too."""
        place = int(self._memory_starts[number])
        room = self._memory.data[place : place + int(self._sizes[number])]
        offset, done = self._begin + int(self._starts[number]), 0
        while done < len(room):
            count = os.preadv(self._file, [room[done:]], offset + done)
            if count == 0:
                raise OSError(f"{self._path} ends early")
            done += count
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, offset, done, os.POSIX_FADV_DONTNEED)

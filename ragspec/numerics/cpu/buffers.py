"""The float32 and int16 arrays that a forward reads and writes, kept from step to step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ragspec.numerics.cpu.kernels import Buffer

Floats = NDArray[np.float32]


def floats_of(**given: Floats) -> tuple[Floats, ...]:
    """One flat array for each `Buffer`, by its lower-case name; empty where none is given."""
    return tuple(given[b.name.lower()].reshape(-1) if b.name.lower() in given else _EMPTY for b in Buffer)


_EMPTY = np.empty(0, np.float32)


class Buffers:
    """Room for any number of rows. `widths`: numbers of a row, by buffer; `aliases`: buffers that share another's memory."""

    def __init__(self, widths: Mapping[Buffer, int], widest_input: int, aliases: Mapping[Buffer, Buffer]) -> None:
        self._widths, self._widest, self._aliases = widths, widest_input, aliases
        self._num_rows = 0
        self._resize(1)

    def of(self, num_rows: int, **own: Floats) -> tuple[tuple[Floats, ...], NDArray[np.int16]]:
        """The arrays, flat, cut to so many rows; those of the caller stand in for ours. Also the quantised rows' array."""
        if num_rows > self._num_rows:
            self._resize(max(num_rows, 2 * self._num_rows))
        kept = {buffer.name.lower(): array[: num_rows * self._widths[buffer]] for buffer, array in self._arrays.items()}
        return floats_of(**kept | own), self._quantised

    def _resize(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._quantised = np.empty(num_rows * self._widest, np.int16)
        self._arrays = {buffer: np.empty(num_rows * width, np.float32) for buffer, width in self._widths.items()}
        for buffer, other in self._aliases.items():
            self._arrays[buffer] = self._arrays[other]

"""The blocks of keys and values that one rank keeps outside its KV pool, in main memory or in a file.

A block is 16 consecutive positions of one text. Rank 0 numbers the blocks and knows their texts (`kv_offload.py`); every rank has
its own part of each. Bytes come back as they were, or the copy counts as failed.

    >>> store = BlockStore(target.pool, "")
    >>> store.copy(BlockCopy(numbers, slots))                     # out of the pool
    >>> store.copy(BlockCopy(numbers, slots, is_read=True))       # and back
"""

from __future__ import annotations

import logging
import os
import tempfile
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ragspec.disk import saving
from ragspec.numerics.attention import PAGE, Ints
from ragspec.numerics.kv_cache import KvPool
from ragspec.numerics.ranks import ONE_RANK, Ranks

log = logging.getLogger(__name__)

Rows = NDArray[np.uint8]


class BlockCopy(NamedTuple):
    """Blocks by number, and the slots of their positions in order; `first` positions of the first block are left out, and the
    last block may end early. `is_read`: from the store into the pool. Without slots, the store forgets the blocks."""

    numbers: Ints
    slots: Ints
    first: int = 0
    is_read: bool = False


class Blocks(Protocol):
    """Where bytes lie. Shape of `rows`: uint8 [16, bytes of a token], contiguous. Raises: OSError, MemoryError.

    A block that is forgotten cannot be read until its number is written again.
    """

    def write(self, number: int, rows: Rows) -> None: ...

    def read(self, number: int, rows: Rows) -> None: ...

    def forget(self, number: int) -> None: ...


class MemoryBlocks:
    """In main memory, which a block takes when it is written and gives back when it is forgotten."""

    def __init__(self) -> None:
        self._blocks: dict[int, Rows] = {}

    def write(self, number: int, rows: Rows) -> None:
        self._blocks[number] = rows.copy()

    def read(self, number: int, rows: Rows) -> None:
        rows[:] = self._blocks[number]

    def forget(self, number: int) -> None:
        self._blocks.pop(number, None)


class FileBlocks:
    """In a file without a name: nobody else can open it, and it ends with the process. Checksums are in memory.

    Why not mapped into memory: a full disk or a truncated file would end the process. Raises: SaveError.
    """

    def __init__(self, folder: Path, block_bytes: int) -> None:
        self._block_bytes, self._checksums = block_bytes, dict[int, int]()
        with saving(folder), tempfile.TemporaryFile(dir=folder) as file:
            self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)

    def write(self, number: int, rows: Rows) -> None:
        self._checksums.pop(number, None)
        if (count := os.pwrite(self._file, rows.data, number * self._block_bytes)) < rows.nbytes:
            raise OSError(f"{count} of {rows.nbytes} bytes of a block were written")
        self._checksums[number] = zlib.crc32(rows.data)

    def read(self, number: int, rows: Rows) -> None:
        os.preadv(self._file, [rows.data], number * self._block_bytes)
        if zlib.crc32(rows.data) != self._checksums.get(number):
            raise OSError("the file of KV offloading is damaged")

    def forget(self, number: int) -> None:
        """The bytes stay in the file, which nobody else can open, until the number is written again or the process ends."""
        self._checksums.pop(number, None)


class BlockStore:
    """This rank's part of the blocks of one pool. `folder`: of the file, "" for main memory. Raises: SaveError."""

    def __init__(self, pool: KvPool, folder: str, ranks: Ranks = ONE_RANK) -> None:
        self._pool, self._ranks = pool, ranks
        self.block_bytes = PAGE * pool.token_bytes
        self._blocks: Blocks = FileBlocks(Path(folder), self.block_bytes) if folder else MemoryBlocks()
        self._has_failed = False

    def copy(self, blocks: BlockCopy) -> int:
        """How many of the slots, from the first, are copied on every rank. All ranks call this together. Raises: RankLost."""
        if not len(blocks.slots):
            for number in blocks.numbers.tolist():
                self._blocks.forget(number)
            return 0
        num_copied = self._read(blocks) if blocks.is_read else self._write(blocks)
        with self._ranks.without_timeout():  # a disk may stall for longer than a group waits for a rank
            return int(self._ranks.all_gather(torch.tensor([[num_copied]], dtype=torch.int32)).min())

    def _write(self, blocks: BlockCopy) -> int:
        num_blocks = 0
        with self._logged_errors():
            rows = self._pool.read(blocks.slots).reshape(len(blocks.numbers), PAGE, -1)
            for number, block in zip(blocks.numbers.tolist(), rows, strict=True):
                self._blocks.write(number, block)
                num_blocks += 1
        return num_blocks * PAGE

    def _read(self, blocks: BlockCopy) -> int:
        num_blocks = 0
        with self._logged_errors():
            rows = np.empty((len(blocks.numbers), PAGE, self._pool.token_bytes), np.uint8)
            for number, block in zip(blocks.numbers.tolist(), rows, strict=True):
                self._blocks.read(number, block)
                num_blocks += 1
        num_rows = min(len(blocks.slots), num_blocks * PAGE - blocks.first)
        with self._logged_errors():
            if num_rows > 0:
                end = blocks.first + num_rows
                self._pool.write(blocks.slots[:num_rows], rows.reshape(-1, rows.shape[-1])[blocks.first : end])
                return num_rows
        return 0

    @contextmanager
    def _logged_errors(self) -> Iterator[None]:
        """Ends a copy that fails, and logs the first failure. RuntimeError: torch has no memory, or a device failed."""
        try:
            yield
        except (OSError, MemoryError, RuntimeError) as cause:
            if not self._has_failed:
                log.warning(
                    "KV offloading failed; prompts are computed again instead, further failures are counted: %s", cause
                )
            self._has_failed = True

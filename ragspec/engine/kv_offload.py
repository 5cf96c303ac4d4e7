"""KV offloading: cached blocks that leave the pool are kept outside it, and read back instead of computed again.

A block is 16 consecutive positions of one text. Blocks are known by their tenant's salt and a digest of the whole text up to
their end, so exactly the requests find them that would have found them in the pool. The least recently used blocks are forgotten
first, and the last block of a text before its first. `KvOffload` lives on rank 0, in the engine's thread; every rank has a
`BlockStore` with its own part of each block, in main memory or in a file. Bytes come back as they were, or the copy counts as
failed.

    >>> offload = make_kv_offload(target.pool, EngineConfig(kv_offload_bytes=2**33), target.ranks)
    >>> offload.keep(salt, tokens, slots, 0)                     # before the pool forgets them
    >>> offload.restore(salt, tokens, sequence_slots, 512)       # True: positions [length, 512) were read back
"""

import hashlib
import logging
import math
import os
import tempfile
import time
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ragspec.config import EngineConfig
from ragspec.core import salt_belongs_to
from ragspec.disk import saving
from ragspec.engine.rank_messages import BlockCopy, in_step, send_blocks
from ragspec.errors import ConfigError
from ragspec.numerics.attention import PAGE, Ints
from ragspec.numerics.kv_cache import KvPool, SequenceSlots
from ragspec.numerics.ranks import ONE_RANK, Ranks

log = logging.getLogger(__name__)

_BLOCKS_A_COPY = 16
"""The most blocks that are copied at once: a GPU may have little memory left."""
_COPIES_UNTIL_RETRY = 16
"""Successful copies after a failure before free numbers are taken again. Until then new blocks replace old ones, because a full
disk stays full for a while and each try costs a copy."""

Key = tuple[str, bytes]
Rows = NDArray[np.uint8]


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


class KvOffload:
    """The blocks of one pool. `num_bytes`: the budget on each rank. `num_errors`: copies that failed.

    Raises: ConfigError, SaveError.
    """

    def __init__(self, pool: KvPool, num_bytes: int, folder: str = "", ranks: Ranks = ONE_RANK) -> None:
        self._store, self._ranks = BlockStore(pool, folder, ranks), ranks
        self._free = list(range(num_bytes // self._store.block_bytes))[::-1]
        if not self._free:
            raise ConfigError(f"engine.kv_offload_bytes is {num_bytes}; a block takes {self._store.block_bytes}")
        self._numbers = OrderedDict[Key, int]()  # the most recently used is last
        self._num_until_retry = 0  # successful copies; 0: free numbers are taken
        self._write_s = math.inf  # left for writing in this step
        self.num_errors = 0

    @property
    def num_bytes(self) -> int:
        """Of the blocks that are kept."""
        return len(self._numbers) * self._store.block_bytes

    def begin_step(self, write_s: float) -> None:
        """In this step, no write begins after so many seconds of writing; 0: no limit. Blocks not written are computed again."""
        self._write_s = write_s or math.inf

    def keep(self, salt: str, tokens: Sequence[int], slots: Ints, start: int) -> None:
        """Keep the blocks with positions in [start, T), the first of them if there is not room or time for all.

        Shapes: T tokens, int32 [T]. Raises: RankLost.
        """
        keys = _keys(salt, tokens)
        self._touch(keys)
        num_own = sum(key in self._numbers for key in keys)
        new = [i for i in range(start // PAGE, len(keys)) if keys[i] not in self._numbers]
        while self._write_s > 0 and (part := new[: min(_BLOCKS_A_COPY, self._room - num_own)]):
            begin, was_full = time.perf_counter(), self._num_until_retry > 0
            places = np.concatenate([slots[i * PAGE : (i + 1) * PAGE] for i in part])
            num_kept = self._write([keys[i] for i in part], places)
            self._write_s -= time.perf_counter() - begin
            if num_kept < len(part) and was_full:
                break
            num_own, new = num_own + num_kept, new[num_kept:]
        self._touch(keys)

    def num_known(self, salt: str, tokens: Sequence[int], start: int) -> int:
        """Where the blocks that are kept end, if all positions before `start` are in the pool; at least `start`."""
        keys, end = _keys(salt, tokens), start // PAGE
        while end < len(keys) and keys[end] in self._numbers:
            end += 1
        self._touch(keys[:end])
        return max(start, end * PAGE)

    def restore(
        self, salt: str, tokens: Sequence[int], slots: SequenceSlots, end: int, limit_s: float = math.inf
    ) -> bool:
        """Read positions [slots.length, end) back into new slots. False: the rest must be computed, because a block was forgotten
        or cannot be read, or because reading took longer than `limit_s`; 0: no limit.

        Raises: RankLost, OutOfSlots.
        """
        begin, keys = time.perf_counter(), _keys(salt, tokens[: -(-end // PAGE) * PAGE])
        while (start := slots.length) < end:
            first = start // PAGE
            part = keys[first : first + _BLOCKS_A_COPY]
            numbers = [self._numbers[key] for key in part if key in self._numbers]
            if len(numbers) < len(part):  # forgotten since they were found
                return False
            count = min(end, (first + len(part)) * PAGE) - start
            reserved, index = slots.reserve(count)
            num_read = self._copy(BlockCopy(np.array(numbers, np.int32), reserved, start % PAGE, is_read=True))
            slots.keep(reserved, index, list(range(num_read)))
            if num_read < count:
                self._free[:0] = self._forgotten([self._numbers.pop(keys[slots.length // PAGE])])
                return False
            if 0 < limit_s < time.perf_counter() - begin:
                return False
        return True

    def purge(self, salt: str) -> None:
        """Forget the blocks of one tenant. Raises: RankLost."""
        keys = [key for key in self._numbers if salt_belongs_to(key[0], salt)]
        self._free += self._forgotten([self._numbers.pop(key) for key in keys])
        self._num_until_retry = 0

    @property
    def _takes_free(self) -> bool:
        """Whether free numbers are taken; not after a failure, so that a full disk keeps as many blocks as it has room for."""
        return not (self._num_until_retry and self._numbers)

    @property
    def _room(self) -> int:
        """The most blocks that can be kept now."""
        return len(self._numbers) + (len(self._free) if self._takes_free else 0)

    def _write(self, keys: Sequence[Key], slots: Ints) -> int:
        """Keep some blocks in the place of others if need be; how many of them, from the first, are kept."""
        takes_free = self._takes_free
        numbers = [
            self._free.pop() if takes_free and self._free else self._numbers.popitem(last=False)[1] for _ in keys
        ]
        num_kept = self._copy(BlockCopy(np.array(numbers, np.int32), slots)) // PAGE
        self._numbers.update(zip(keys[:num_kept], numbers, strict=False))
        if num_kept < len(keys):
            self._free[:0] = self._forgotten(numbers[num_kept:])
            self._num_until_retry = _COPIES_UNTIL_RETRY
        else:
            self._num_until_retry = max(0, self._num_until_retry - 1)
        return num_kept

    def _forgotten(self, numbers: list[int]) -> list[int]:
        """These numbers, after every rank has forgotten their blocks."""
        if numbers:
            self._copy(BlockCopy(np.array(numbers, np.int32), np.empty(0, np.int32)))
        return numbers

    def _copy(self, blocks: BlockCopy) -> int:
        if self._ranks.size > 1:
            send_blocks(self._ranks, blocks)
        with in_step(self._ranks):
            num_copied = self._store.copy(blocks)
        self.num_errors += num_copied < len(blocks.slots)
        return num_copied

    def _touch(self, keys: Sequence[Key]) -> None:
        """Count as used just now. The first block comes last, so that it is evicted last: without it the others are not found."""
        for key in reversed(keys):
            if key in self._numbers:
                self._numbers.move_to_end(key)


def make_kv_offload(pool: KvPool, config: EngineConfig, ranks: Ranks) -> KvOffload | None:
    """As configured, on rank 0. Raises: ConfigError, SaveError."""
    if not config.kv_offload_bytes:
        return None
    return KvOffload(pool, config.kv_offload_bytes, config.kv_offload_dir, ranks)


def _keys(salt: str, tokens: Sequence[int]) -> list[Key]:
    """One for each whole block of a text that begins at its first token."""
    numbers, digest, keys = np.array(tokens, np.int32), b"", list[Key]()
    for end in range(PAGE, len(tokens) + 1, PAGE):
        digest = hashlib.sha256(digest + numbers[end - PAGE : end].tobytes()).digest()
        keys.append((salt, digest))
    return keys

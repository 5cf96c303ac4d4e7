"""KV offloading: cached blocks that leave the pool are kept outside it, and read back instead of computed again.

Blocks are known by their tenant's salt and a digest of the whole text up to their end, so they are found by exactly the requests
that would have found them in the pool. The least recently used are forgotten first, and of one text the last. Lives on rank 0,
in the engine's thread.

    >>> offload = make_kv_offload(target.pool, EngineConfig(kv_offload_bytes=2**33), target.ranks)
    >>> offload.keep(salt, tokens, slots, 0)                     # before the pool forgets them
    >>> offload.restore(salt, tokens, sequence_slots, 512)       # True: positions [length, 512) were read back
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from ragspec.config import EngineConfig
from ragspec.core import salt_belongs_to
from ragspec.engine.kv_offload.block_store import BlockCopy, BlockStore
from ragspec.engine.rank_messages import send_blocks
from ragspec.errors import ConfigError
from ragspec.numerics.attention import PAGE, Ints
from ragspec.numerics.kv_cache import KvPool, SequenceSlots
from ragspec.numerics.ranks import ONE_RANK, Ranks

_BLOCKS_A_COPY = 16
"""Blocks that are gathered at once on their way out of the pool: a GPU may have little memory left."""

Key = tuple[str, bytes]


class KvOffload:
    """See the module. `num_bytes`: of all blocks on a rank. `num_errors`: copies that failed. Raises: ConfigError, SaveError."""

    def __init__(self, pool: KvPool, num_bytes: int, folder: str = "", ranks: Ranks = ONE_RANK) -> None:
        self._store, self._ranks = BlockStore(pool, folder, ranks), ranks
        self._free = list(range(num_bytes // self._store.block_bytes))[::-1]
        if not self._free:
            raise ConfigError(f"engine.kv_offload_bytes is {num_bytes}; a block takes {self._store.block_bytes}")
        self._numbers = OrderedDict[Key, int]()  # the most recently used is last
        self._is_full = False
        self.num_errors = 0

    @property
    def num_bytes(self) -> int:
        """Of the blocks that are kept."""
        return len(self._numbers) * self._store.block_bytes

    def keep(self, salt: str, tokens: Sequence[int], slots: Ints, start: int) -> None:
        """Keep the blocks with positions in [start, T). Shapes: T tokens, int32 [T]. Raises: RankLost."""
        keys = _keys(salt, tokens)
        self._touch(keys)
        room = len(self._free) + len(self._numbers) - sum(key in self._numbers for key in keys)
        new = [i for i in range(start // PAGE, len(keys)) if keys[i] not in self._numbers][:room][::-1]
        for begin in range(0, len(new), _BLOCKS_A_COPY):
            part = new[begin : begin + _BLOCKS_A_COPY]
            numbers = [self._take_number() for _ in part]
            places = np.concatenate([slots[i * PAGE : (i + 1) * PAGE] for i in part])
            num_kept = self._copy(BlockCopy(np.array(numbers, np.int32), places)) // PAGE
            self._numbers.update(zip([keys[i] for i in part[:num_kept]], numbers[:num_kept], strict=True))
            if num_kept < len(part):
                self._free[:0], self._is_full = numbers[num_kept:], True
                break
        self._touch(keys)

    def num_known(self, salt: str, tokens: Sequence[int], start: int) -> int:
        """Where the blocks that are kept end, if all positions before `start` are in the pool; at least `start`."""
        keys, end = _keys(salt, tokens), start // PAGE
        while end < len(keys) and keys[end] in self._numbers:
            end += 1
        self._touch(keys[:end])
        return max(start, end * PAGE)

    def restore(self, salt: str, tokens: Sequence[int], slots: SequenceSlots, end: int) -> bool:
        """Read positions [slots.length, end) back into new slots. False: they end before a block that is not to be had.

        Raises: RankLost, OutOfSlots.
        """
        start = slots.length
        keys = _keys(salt, tokens[: -(-end // PAGE) * PAGE])[start // PAGE :]
        numbers = [self._numbers[key] for key in keys if key in self._numbers]
        if len(numbers) < len(keys):  # forgotten since they were found
            return False
        reserved, index = slots.reserve(end - start)
        blocks = BlockCopy(np.array(numbers, np.int32), reserved, start % PAGE, is_read=True)
        num_read = self._copy(blocks)
        slots.keep(reserved, index, list(range(num_read)))
        if num_read < end - start:
            del self._numbers[keys[(start % PAGE + num_read) // PAGE]]
        return num_read == end - start

    def purge(self, salt: str) -> None:
        """Forget the blocks of one tenant."""
        self._free += [self._numbers.pop(key) for key in list(self._numbers) if salt_belongs_to(key[0], salt)]
        self._is_full = False

    def _take_number(self) -> int:
        """A free number; none while the disk is full, which keeps as many blocks as it had room for."""
        if self._free and not (self._is_full and self._numbers):
            return self._free.pop()
        return self._numbers.popitem(last=False)[1]

    def _copy(self, blocks: BlockCopy) -> int:
        if self._ranks.size > 1:
            send_blocks(self._ranks, blocks)
        num_copied = self._store.copy(blocks)
        self.num_errors += num_copied < len(blocks.slots)
        return num_copied

    def _touch(self, keys: Sequence[Key]) -> None:
        """Count as used just now, the first last: without it the others are not found."""
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

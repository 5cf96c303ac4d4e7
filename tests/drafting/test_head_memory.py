"""A head's memory of one sequence: the states that wait are right, and keep little memory of other sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ragspec.drafting.eagle.memory import HeadMemory, SlotMemory
from ragspec.numerics.attention import AttentionShape
from ragspec.numerics.kv_cache import KvPool, SequenceSlots

SHAPE = AttentionShape(1, 1, 8, 1.0)


def make_cache(pool: KvPool, num_own_slots: int) -> KvPool:
    return KvPool([SHAPE], pool.num_slots + max(16, num_own_slots))


@pytest.mark.parametrize(("read_every", "counts"), [(0, [1] * 9 + [20]), (7, [1] * 9 + [20]), (40, [1, 2]), (15, [6])])
def test_states_wait_without_those_of_other_sequences(read_every: int, counts: list[int]) -> None:
    """One sequence that is not drafted for kept every step of a full batch in memory, for a whole window; or its states were
    taken for those of other positions where others between them had been read."""
    pool = KvPool([SHAPE], 1024)
    slots = SequenceSlots(pool)
    memory = HeadMemory(slots, SlotMemory(pool, make_cache, 1), window=256, max_read=40)
    rng, unread, step = np.random.default_rng(0), list[int](), 0
    while memory.end < 900:
        step += 1
        count, start = int(rng.choice(counts)) if memory.end else 300, memory.end
        states = torch.full((100 + count, 5), -1.0)  # of 100 other sequences, too
        states[:count] = torch.arange(start, start + count)[:, None]
        memory.append((states[:count], 2 * states[:count]))
        slots.keep(*slots.reserve(count), list(range(count)))
        unread = [at for at in [*unread, *range(start, start + count)] if at >= memory.end - 256]
        parts = {part.untyped_storage().data_ptr(): part.untyped_storage() for p in memory._pieces for part in p.states}
        assert sum(len(part) > 2 * 4 * 5 * 300 or len(part) == 4 * 5 * (100 + count) for part in parts.values()) <= 32
        assert sum(map(len, parts.values())) <= 2 * 4 * 5 * (256 + 300 + 16 * 120)
        assert memory.num_waiting == len(unread)
        if read_every and step % read_every == 0:
            pairs, expected = memory.pairs(list(range(1, 1000))), unread[-40:]
            assert pairs.positions.tolist() == expected and pairs.next_tokens == [at + 2 for at in expected]
            assert pairs.features.tolist() == [[float(at)] * 5 + [2.0 * at] * 5 for at in expected]
            memory.read(pairs)
            assert memory.num_waiting == 0  # the last pair is read
            unread = unread[:-40]

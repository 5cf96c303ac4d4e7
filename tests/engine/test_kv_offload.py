"""Offloaded prefixes come back with the same bits or not at all, to their own tenant, within the budget."""

import contextlib
import errno
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conversation_turns import NUM_KV_SLOTS, PLENTY, answered, turns
from oracle_cases import PARAMS, assert_equal, assert_pool_is_empty, truth
from tiny_target import Free, Tiny, tiny_engine, written

from ragspec.config import EngineConfig, TargetConfig, load_config
from ragspec.core import Completion
from ragspec.drafting.copy import CopyDrafter
from ragspec.engine.kv_offload import BlockStore, FileBlocks, KvOffload, MemoryBlocks
from ragspec.engine.parallel import load_rank
from ragspec.engine.rank_messages import BlockCopy, MessageKind, receive, send_blocks
from ragspec.engine.scheduler import Scheduler
from ragspec.engine.target import Target
from ragspec.errors import ConfigError, RankLost, SaveError
from ragspec.numerics.attention import PAGE, AttentionShape
from ragspec.numerics.kv_cache import KvPool
from ragspec.numerics.ranks import Ranks

SHAPES = [AttentionShape(4, 2, 16, 0.25), AttentionShape(4, 1, 24, 0.25)]


def num_computed(completions: Sequence[Completion]) -> int:
    return sum(c.stats.num_prompt_tokens - c.stats.num_cached_tokens for c in completions)


class Clock:
    """The time that scheduler and KV offloading see: each copy out of the pool and each copy back takes so many seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, write_s: float = 0.0, read_s: float = 0.0) -> None:
        self.now, self.num_writes, self.read = 0.0, 0, list[int]()
        copy = KvOffload._copy

        def timed(offload: KvOffload, blocks: BlockCopy) -> int:
            if blocks.is_read:
                self.now += read_s
                self.read.append(len(blocks.slots))
            elif len(blocks.slots):
                self.now += write_s
                self.num_writes += 1
            return copy(offload, blocks)

        for module in ("scheduler", "kv_offload"):
            monkeypatch.setattr(f"ragspec.engine.{module}.time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(KvOffload, "_copy", timed)


def at_each_step(monkeypatch: pytest.MonkeyPatch, count: Callable[[], int]) -> list[int]:
    """What `count` gives at the beginning of every later step."""
    schedule, found = Scheduler.schedule, list[int]()
    monkeypatch.setattr(Scheduler, "schedule", lambda scheduler: found.append(count()) or schedule(scheduler))
    return found


SLOW = (("float32", "T=1"), ("int8", "greedy"), ("torch-float32", "T=1"), ("torch-bfloat16", "greedy"))


@pytest.mark.parametrize(
    ("dtype", "params"),
    [("float32", "greedy"), ("int8", "T=1"), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_a_conversation_that_returns_is_read_back_and_its_tokens_are_the_same(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, params: str
) -> None:
    """A block came back into the wrong positions, or the whole prompt was computed again all the same."""
    target, found = tiny("llama", dtype), {}
    requests = turns(target, PARAMS[params])
    expected = truth(target, list(itertools.chain(*requests)), params)
    folder = "" if dtype.startswith("torch") else str(tmp_path)
    Clock(monkeypatch, read_s=1.0)
    for num_bytes in (0, PLENTY):
        offload = {"kv_offload_bytes": num_bytes, "kv_offload_dir": folder if num_bytes else ""}
        options = {"costs": Free(1.0), "max_num_batched_tokens": 48, **offload}
        with tiny_engine(target, [CopyDrafter(target.tokenizer, target.eos_ids)], NUM_KV_SLOTS, **options) as engine:
            found[num_bytes] = answered(engine, requests)
            assert_equal(list(itertools.chain(*found[num_bytes])), expected)
            load = engine.load()
            assert (load.kv_offload_bytes > 0, load.num_kv_offload_errors) == (num_bytes > 0, 0)
            assert_pool_is_empty(engine)
    assert num_computed(found[0][1]) == num_computed(found[PLENTY][1]) + sum(
        c.stats.num_restored_tokens for c in found[PLENTY][1]
    )
    assert num_computed(found[PLENTY][1]) < num_computed(found[0][1]) / 2
    assert not any(tmp_path.iterdir())


def test_many_conversations_at_once_lose_nothing(tiny: Tiny) -> None:
    """A sequence that reads back was preempted, or its pages were given to the sequences of the same step."""
    target = tiny("llama", "float32")
    requests = turns(target, PARAMS["T=1"])
    expected = truth(target, list(itertools.chain(*requests)), "T=1")
    with tiny_engine(target, (), NUM_KV_SLOTS, max_num_batched_tokens=30, kv_offload_bytes=PLENTY) as engine:
        for turn in (*requests, *requests):
            completions = engine.generate(turn)
            assert_equal(completions, {key: expected[key] for key in ((r.id, 0) for r in turn)})
        assert sum(c.stats.num_restored_tokens for c in completions) > 0
        assert engine.load().num_preemptions > 0
        assert_pool_is_empty(engine)


def test_a_step_reads_no_more_than_it_would_compute(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prefix was read back in one step, and everybody's tokens waited for it."""
    target, clock = tiny("llama", "float32"), Clock(monkeypatch, read_s=1.0)
    first, second = turns(target, PARAMS["greedy"])
    with tiny_engine(
        target, (), NUM_KV_SLOTS, costs=Free(1.0), max_num_batched_tokens=20, kv_offload_bytes=PLENTY
    ) as engine:
        answered(engine, [first])
        steps = at_each_step(monkeypatch, lambda: len(clock.read))
        answered(engine, [second[:1]])
    assert max(clock.read) <= 20 and len(clock.read) > 3
    assert all(after - before <= 1 for before, after in itertools.pairwise(steps))


def test_reading_that_is_slower_than_computing_ends(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk took several times as long for a prompt as computing it, in every step again."""
    target, clock = tiny("llama", "float32"), Clock(monkeypatch, read_s=1.5)
    requests = turns(target, PARAMS["greedy"])
    expected = truth(target, requests[1][:1], "greedy")
    with tiny_engine(
        target, (), NUM_KV_SLOTS, costs=Free(1.0), max_num_batched_tokens=20, kv_offload_bytes=PLENTY
    ) as engine:
        answered(engine, requests[:1])
        ((found,),) = answered(engine, [requests[1][:1]])
    assert_equal([found], expected)
    assert len(clock.read) == 1 and 0 < found.stats.num_restored_tokens <= 20


def test_a_step_begins_no_write_after_its_time_for_writing(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step wrote hundreds of blocks for one long prompt, and everybody's tokens waited for the disk."""
    clock, texts = Clock(monkeypatch, write_s=1.0), Texts(200)
    for seconds, num_writes in ((0.5, 1), (2.5, 3), (0.0, 4)):
        clock.num_writes = 0
        texts.offload.begin_step(seconds)
        texts.keep([num_writes] * 1000)
        assert clock.num_writes == num_writes
        assert texts.known([num_writes] * 1000) == min(num_writes * 256, 992), "the first blocks are kept"
    target = tiny("llama", "float32")
    with tiny_engine(target, (), NUM_KV_SLOTS, costs=Free(0.5), kv_offload_bytes=PLENTY) as engine:
        writes = at_each_step(monkeypatch, lambda: clock.num_writes)
        answered(engine, turns(target, PARAMS["greedy"]))
    assert all(after - before <= 1 for before, after in itertools.pairwise(writes)) and writes[-1] > 1


@pytest.mark.parametrize("num_taps", [0, 1])
def test_a_drafter_with_states_gets_the_last_position_computed(tiny: Tiny, num_taps: int) -> None:
    """The pair of the last state and the next token was missing behind a prefix that was read back."""
    target = tiny("llama", "float32")
    first, second = turns(target, PARAMS["greedy"])
    drafter = CopyDrafter(target.tokenizer, target.eos_ids)
    drafter.taps = (1,) * num_taps
    with tiny_engine(target, [drafter], NUM_KV_SLOTS, kv_offload_bytes=PLENTY) as engine:
        answered(engine, [first])
        (again,) = engine.generate(second[:1])
    assert again.stats.num_restored_tokens > 0
    assert again.stats.num_cached_tokens % PAGE == (PAGE - 1 if num_taps else 0)


def test_offloaded_prefixes_stay_with_their_tenant_and_are_purged_with_it(tiny: Tiny) -> None:
    """Another tenant's text was found by its timing, or outlived the tenant outside the pool."""
    target = tiny("llama", "float32")
    with tiny_engine(target, (), NUM_KV_SLOTS, kv_offload_bytes=PLENTY) as engine:
        salts = ("one\0part", "onerous", "two")
        answered(engine, turns(target, PARAMS["greedy"], salts))
        (other,) = answered(engine, [turns(target, PARAMS["greedy"], ("three",) * 3)[1]])
        assert [c.stats.num_cached_tokens for c in other] == [0, 0, 0]
        engine.purge("one")
        (again,) = answered(engine, [turns(target, PARAMS["greedy"], salts)[1]])
        assert [c.stats.num_restored_tokens > 0 for c in again] == [False, True, True]
        assert again[0].stats.num_cached_tokens == 0
        for salt in ("one", "onerous", "two", "three"):
            engine.purge(salt)
        engine.between_steps(lambda: None)
        assert engine.load().kv_offload_bytes == 0
        blocks: Any = engine._scheduler.offload._store._blocks  # type: ignore[union-attr]
        assert isinstance(blocks, MemoryBlocks) and not blocks._blocks, "bytes outlived their tenant"


def _truncate(blocks: FileBlocks) -> None:
    os.ftruncate(blocks._file, 3 * blocks._block_bytes + 5)


def _damage(blocks: FileBlocks) -> None:
    size = os.fstat(blocks._file).st_size
    for at in range(blocks._block_bytes - 1, size, 2 * blocks._block_bytes):
        os.pwrite(blocks._file, bytes([os.pread(blocks._file, 1, at)[0] ^ 1]), at)


def fill_disk(monkeypatch: pytest.MonkeyPatch, room: int = 0) -> None:
    """Leave `room` bytes to the store's file."""
    write = os.pwrite

    def write_within(file: int, data: memoryview, at: int) -> int:
        if at + data.nbytes > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data, at)

    monkeypatch.setattr("os.pwrite", write_within)


@pytest.mark.parametrize("fault", [_truncate, _damage, None])
def test_what_cannot_be_read_back_is_computed_again(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: Any
) -> None:
    """A damaged block was served, a full disk ended the engine, or every failure was a line in the log."""
    target = tiny("llama", "float32")
    requests = turns(target, PARAMS["T=1"])
    expected = truth(target, list(itertools.chain(*requests)), "T=1")
    options: dict[str, Any] = {"kv_offload_bytes": PLENTY, "kv_offload_dir": str(tmp_path)}
    with tiny_engine(target, (), NUM_KV_SLOTS, **options) as engine, caplog.at_level(logging.WARNING):
        blocks: Any = engine._scheduler.offload._store._blocks  # type: ignore[union-attr]
        if fault is None:
            fill_disk(monkeypatch)
        answered(engine, requests[:1])
        if fault:
            engine.between_steps(lambda: fault(blocks))
        for _ in range(2):
            (found,) = answered(engine, requests[1:])
            assert_equal(found, {(c.request_id, 0): expected[c.request_id, 0] for c in found})
        assert engine.load().num_kv_offload_errors > 1
        assert_pool_is_empty(engine)
    assert sum("KV offloading failed" in record.message for record in caplog.records) == 1


def pool_of(kind: str) -> KvPool:
    """A pool with other numbers in every slot."""
    if kind == "device":
        pool = KvPool(SHAPES, 1024, lambda size: torch.randn(size).to(torch.bfloat16))
    else:
        pool = KvPool(SHAPES[:1] * 3 if kind == "alike" else SHAPES, 1024, dtype=np.uint16)
        for layer in (*pool.keys, *pool.values):
            layer[:] = np.random.default_rng(len(layer)).integers(0, 2**16, len(layer))
    return pool


@pytest.mark.parametrize("kind", ["alike", "different", "device"])
def test_slots_written_are_those_that_were_read(kind: str) -> None:
    """A slot's neighbours in its page, or another layer, were overwritten."""
    pool, everything = pool_of(kind), np.arange(1024, dtype=np.int32)
    before = pool.read(everything)
    assert before.shape == (1024, pool.token_bytes) and len(np.unique(before, axis=0)) == 1024
    moved = np.random.default_rng(5).permutation(everything)
    pool.write(moved[:300], pool.read(moved[300:600]))
    before[moved[:300]] = before[moved[300:600]]
    np.testing.assert_array_equal(pool.read(everything), before)


class Texts:
    """Texts in a pool, and KV offloading with room for so many blocks."""

    def __init__(self, num_blocks: int, folder: str = "", ranks: Ranks | None = None) -> None:
        self.pool = pool_of("different")
        num_bytes = num_blocks * PAGE * self.pool.token_bytes
        self.offload = KvOffload(self.pool, num_bytes, folder, *([ranks] if ranks else []))

    def keep(self, tokens: Sequence[int]) -> np.ndarray:
        """Offload a text; returns its bytes."""
        slots = written(self.pool, len(tokens))
        self.offload.keep("salt", tokens, slots.slots, 0)
        rows = self.pool.read(slots.slots)
        slots.release()
        return rows

    def known(self, tokens: Sequence[int]) -> int:
        return self.offload.num_known("salt", tokens, 0)

    def restored(self, tokens: Sequence[int], end: int) -> np.ndarray:
        """The bytes of the positions that came back, read from an odd position on."""
        slots = written(self.pool, 5)
        self.offload.restore("salt", tokens, slots, end)
        rows = self.pool.read(slots.slots)[5:] if slots.length > 5 else np.empty((0, self.pool.token_bytes), np.uint8)
        slots.release()
        return rows


@pytest.fixture(params=["memory", "disk"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path) if request.param == "disk" else ""


def test_the_budget_holds_the_most_recently_used_and_of_a_text_its_beginning(folder: str) -> None:
    """The store outgrew its budget, or kept blocks that could not be found without those before them."""
    texts = Texts(10, folder)
    first, second, long = [1] * 70, [2] * 70, [3] * 400
    rows = [texts.keep(first), texts.keep(second)]
    assert (texts.known(second), texts.known(first)) == (64, 64)
    texts.keep([4] * 64)
    assert (texts.known(first), texts.known(second), texts.known([4] * 64)) == (64, 32, 64)
    np.testing.assert_array_equal(texts.restored(first, 60), rows[0][5:60])
    texts.keep(long)
    assert [texts.known(text) for text in (long, first, second)] == [160, 0, 0]
    assert texts.offload.num_bytes == 10 * PAGE * texts.pool.token_bytes
    if folder:
        blocks: Any = texts.offload._store._blocks
        assert os.fstat(blocks._file).st_size <= texts.offload.num_bytes
        assert os.fstat(blocks._file).st_mode & 0o077 == 0


def test_a_text_that_grew_loses_its_end_first() -> None:
    """The beginning of a long conversation was forgotten, and all that was kept behind it was of no use."""
    texts = Texts(10)
    for tokens in ([5] * 32, [6] * 64, [5] * 96, [7] * 64, [8] * 32):
        texts.keep(tokens)
    assert [texts.known(tokens) for tokens in ([5] * 96, [6] * 64, [7] * 64, [8] * 32)] == [64, 0, 64, 32]
    texts.keep([5] * 160)
    assert texts.known([5] * 160) == 160


def test_a_disk_that_was_full_once_uses_its_whole_budget_again(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One failed write, and a few blocks of the budget were all that was ever used again."""
    texts = Texts(100, folder)
    texts.keep([1] * 64)
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, "No space left on device")
        patch.setattr(type(texts.offload._store._blocks), "write", Mock(side_effect=full))
        texts.keep([2] * 64)
    for text in range(3, 50):
        texts.keep([text] * 64)
    assert texts.offload.num_bytes == 100 * PAGE * texts.pool.token_bytes


def test_a_full_disk_keeps_as_many_blocks_as_it_has_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was ever offloaded again after the disk was once full; or every so often a text was not kept, although others
    could have made room for it."""
    texts = Texts(100, str(tmp_path))
    room = 20 * PAGE * texts.pool.token_bytes
    fill_disk(monkeypatch, room)
    for text in range(2, 60):
        texts.keep([text] * 64)
        assert texts.known([text] * 64) == 64 and texts.offload.num_bytes <= room
    assert 1 < texts.offload.num_errors < 10


NO_MEMORY = Mock(side_effect=RuntimeError("DefaultCPUAllocator: can't allocate memory"))


def test_a_copy_that_gets_no_memory_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch had no memory on the host, and every sequence of the step ended with an error."""
    texts = Texts(20)
    texts.keep([1] * 64)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryBlocks, "read", NO_MEMORY)
        assert not len(texts.restored([1] * 64, 64))
    with monkeypatch.context() as patch:
        patch.setattr(texts.pool, "write", NO_MEMORY)
        assert not len(texts.restored([1] * 64, 64))
    slots = np.arange(64, dtype=np.int32)
    monkeypatch.setattr(texts.pool, "read", NO_MEMORY)
    texts.offload.keep("salt", [2] * 64, slots, 0)
    assert texts.known([2] * 64) == 0 and texts.offload.num_errors > 2


def test_a_copy_moves_few_blocks_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prefix was read back at once, through memory that a GPU may not have."""
    texts, copy, sizes = Texts(60), BlockStore.copy, list[int]()

    def counted(store: BlockStore, blocks: BlockCopy) -> int:
        sizes.append(len(blocks.numbers))
        return copy(store, blocks)

    monkeypatch.setattr(BlockStore, "copy", counted)
    rows = texts.keep([*range(800)])
    np.testing.assert_array_equal(texts.restored([*range(800)], 795), rows[5:795])
    assert max(sizes) == 16 and len(sizes) == 8


class Pair(Ranks):
    """A group whose other rank copies only `most` slots."""

    size = 2

    def __init__(self) -> None:
        self.most, self.said, self.is_patient, self.is_closed = 10**6, list[torch.Tensor](), False, False

    @contextlib.contextmanager
    def without_timeout(self) -> Iterator[None]:
        self.is_patient = True
        yield
        self.is_patient = False

    def close(self) -> None:
        self.is_closed = True

    def broadcast(self, words: torch.Tensor) -> None:
        self.said.append(words.clone())

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        assert self.is_patient, "a disk that stalled for four seconds ended the engine"
        return torch.cat([part, part.clamp(max=self.most)], 1)


def test_a_block_counts_only_if_every_rank_has_its_part() -> None:
    """One rank's disk failed, and its part of a block was old bytes."""
    ranks = Pair()
    texts = Texts(20, ranks=ranks)
    rows = texts.keep([1] * 64)
    ranks.most = 27
    np.testing.assert_array_equal(texts.restored([1] * 64, 64), rows[5:32])
    assert texts.known([1] * 64) == 32 and texts.offload.num_errors == 1
    texts.keep([2] * 64)
    assert texts.known([2] * 64) == 32, "one block of each of two copies"


def test_a_block_that_cannot_be_read_leaves_its_room() -> None:
    """Each failed read took a block from the budget for good."""
    ranks = Pair()
    texts = Texts(20, ranks=ranks)
    for text in range(1, 6):
        texts.keep([text] * 64)
        ranks.most = 27
        texts.restored([text] * 64, 64)
        ranks.most = 10**6
    texts.keep([7] * 320)
    assert texts.known([7] * 320) == 320


def test_a_failure_of_rank_0_amid_a_copy_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks waited for rank 0's part of the copy, and took its next message for that."""
    ranks = Pair()
    texts = Texts(20, ranks=ranks)
    monkeypatch.setattr(BlockStore, "_write", lambda *_: {}["no"])
    with pytest.raises(RankLost, match="rank 0 failed"):
        texts.keep([1] * 64)
    assert ranks.is_closed


def test_a_copy_of_blocks_arrives_whole() -> None:
    """Other ranks copied into other slots, or the other way."""
    for is_read, num_blocks, num_slots in ((False, 3, 41), (True, 200, 3193), (False, 300, 0)):
        ranks, heard = Pair(), list[torch.Tensor]()
        slots = np.arange(num_slots, dtype=np.int32)[::-1].copy()
        sent = BlockCopy(np.arange(num_blocks, dtype=np.int32), slots, 7, is_read)
        send_blocks(ranks, sent)
        heard += ranks.said
        ranks.broadcast = lambda words, heard=heard: words.copy_(heard.pop(0))  # type: ignore[method-assign,misc]
        kind, _, found = receive(ranks)
        assert kind is MessageKind.COPY_BLOCKS and isinstance(found, BlockCopy)
        assert found[2:] == sent[2:]
        assert all(np.array_equal(ours, theirs) for ours, theirs in zip(found[:2], sent[:2], strict=True))


def test_offloading_that_cannot_begin_is_refused_early(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that was missing was reported after minutes of reading weights, testing and measuring; or main memory was copied
    into main memory, and nothing was ever kept."""
    target = tiny("llama", "float32")
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        load_config(**{"engine.kv_offload_bytes": 2**30, "engine.prefix_cache": False})
    with pytest.raises(ConfigError, match="kv_offload_dir needs kv_offload_bytes"):
        load_config(**{"engine.kv_offload_dir": str(tmp_path)})
    monkeypatch.setattr(Target, "load", lambda *_: pytest.fail("weights were read"))
    missing = EngineConfig(kv_offload_bytes=2**30, kv_offload_dir=str(tmp_path / "missing"))
    with pytest.raises(SaveError, match="missing"):
        load_rank(TargetConfig(), missing, Ranks())
    with pytest.raises(ConfigError, match="kv_offload_dir"):
        load_rank(TargetConfig(), EngineConfig(kv_offload_bytes=2**30), Ranks())
    monkeypatch.setattr(Target, "load", lambda *_: target)
    with pytest.raises(ConfigError, match="kv_offload_bytes is"):
        load_rank(TargetConfig(), EngineConfig(kv_offload_bytes=1000, kv_offload_dir=str(tmp_path)), Ranks())

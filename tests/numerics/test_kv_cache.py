"""The slot pool: nothing leaks, nothing is handed out twice, and what is kept is what a fresh prefill would hold."""

import errno
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from oracle import next_logits
from tiny_target import Tiny, save_model, target_config, written

from ragspec.engine.prefix_cache import PrefixCache
from ragspec.engine.target import Target
from ragspec.errors import SaveError
from ragspec.numerics.attention import PAGE, AttentionShape
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.kv_cache import KvPool, OutOfSlots, SequenceSlots

SHAPE = AttentionShape(1, 1, 16, 1.0)


class Bookkeeper:
    """A pool, sequences and a prefix cache under random use; the contents of a slot are (salt, text up to it)."""

    def __init__(self, seed: int, num_slots: int = 480) -> None:
        self.random = random.Random(seed)
        self.pool = KvPool([SHAPE], num_slots)
        self.cache = PrefixCache(self.pool, (lambda *_: None) if seed % 2 else None)
        self.running: list[tuple[SequenceSlots, str, list[int]]] = []
        self.contents: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.stamped: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}

    def start(self) -> None:
        salt = self.random.choice("ab")
        tokens = [self.random.randrange(3) for _ in range(self.random.randrange(1, 40))]
        slots = SequenceSlots(self.pool)
        known = self.cache.match(salt, tokens[:-1])
        for i, slot in enumerate(known.tolist()):
            assert self.contents[slot] == (salt, tuple(tokens[: i + 1]))
        if len(known):
            slots.share(known)
        text = tokens[: len(known)]
        self.running.append((slots, salt, text))
        self.extend(len(self.running) - 1, tokens[len(known) :], [])

    def grow(self) -> None:
        if self.running:
            chain = [self.random.randrange(3) for _ in range(self.random.randrange(1, 4))]
            nodes = [self.random.randrange(3) for _ in range(self.random.randrange(0, 12))]
            self.extend(self.random.randrange(len(self.running)), chain, nodes)

    def extend(self, which: int, chain: list[int], nodes: list[int]) -> None:
        """Reserve a chain and guesses; keep the chain and some of the guesses."""
        slots, salt, text = self.running[which]
        free = self.pool.num_free_pages
        num = len(chain) + len(nodes)
        needed = slots.num_new_pages(num)
        try:
            got, index = slots.reserve(num)
        except OutOfSlots:
            assert needed > free == self.pool.num_free_pages
            self.cache.evict(needed)
            return
        assert self.pool.num_free_pages == free - needed
        assert len({*got.tolist(), *slots.slots.tolist()}) == num + slots.length
        path = sorted(self.random.sample(range(len(nodes)), self.random.randrange(len(nodes) + 1)))
        chosen = [*range(len(chain)), *(len(chain) + n for n in path)]
        slots.keep(got, index, chosen)
        text += [*chain, *(nodes[n] for n in path)]
        for i, slot in enumerate(slots.slots.tolist()):
            if i >= len(text) - len(chosen):
                self.contents[slot] = (salt, tuple(text[: i + 1]))
            held = self.contents[slot]
            assert self.stamped.setdefault((slot, int(self.pool.stamps[slot])), held) == held

    def roll_back(self) -> None:
        if self.running:
            slots, _, text = self.random.choice(self.running)
            length = self.random.randrange(slots._num_shared, slots.length + 1)
            slots.truncate(length)
            del text[length:]

    def remember(self) -> None:
        """The text as it is now goes into the cache; from then on it is shared and not rolled back."""
        if self.running:
            self.end(insert=True)

    def end(self, insert: bool = False) -> None:
        if self.running:
            slots, salt, text = self.running.pop(self.random.randrange(len(self.running)))
            if insert:
                self.cache.insert(salt, text, slots.slots)
            slots.release()

    def purge(self) -> None:
        if self.random.random() < 0.2:
            self.cache.purge(self.random.choice("ab"))

    def evict(self) -> None:
        wanted, num_tokens = self.random.randrange(self.pool.num_pages), self.cache.num_tokens
        least = self.random.choice((0, wanted // 2, wanted))
        self.cache.evict(wanted, least)
        num_free, is_whole = self.pool.num_free_pages, self.cache.num_tokens == num_tokens
        self.cache.evict(wanted)
        assert num_free == self.pool.num_free_pages if self.pool.num_free_pages >= least else is_whole

    def check(self) -> None:
        """Holders are exactly the sequences' pages and the cache's slots; each kept slot still holds its text."""
        for slots, salt, text in self.running:
            assert slots.length == len(text)
            pages = np.array(slots.pages)
            np.testing.assert_array_equal(pages[slots.index // PAGE] * PAGE + slots.index % PAGE, slots.slots)
            for i, slot in enumerate(slots.slots.tolist()):
                assert self.contents[slot] == (salt, tuple(text[: i + 1]))
        self.pool.check_integrity([*(slots.held_slots() for slots, *_ in self.running), *self.cache.held_slots()])


@pytest.mark.parametrize("seed", range(2))
def test_thousands_of_random_operations_leak_nothing(seed: int) -> None:
    """A slot with two owners, a page never given back, one tenant's text found by another; what was stored beside a position read
    for the next one in its slot, after a roll back or in a page given again."""
    book = Bookkeeper(seed)
    steps = [book.start, book.grow, book.roll_back, book.remember, book.end, book.purge, book.evict]
    weights = [4, 12, 2, 2, 1, 1, 1]
    for i in range(1500):
        book.random.choices(steps, weights)[0]()
        if len(book.running) > 12:
            book.end()
        if i % 10 == 0:
            book.check()
    while book.running:
        book.end()
    book.check()
    book.cache.evict(book.pool.num_pages)
    assert book.pool.num_free_pages == book.pool.num_pages
    assert book.cache.num_tokens == 0


def put(cache: PrefixCache, salt: str, tokens: list[int]) -> np.ndarray:
    """The slots of a text that is cached from now on."""
    slots = written(cache._pool, len(tokens))
    known = slots.slots.copy()
    cache.insert(salt, tokens, known)
    slots.release()
    return known


def test_prefixes_split_and_stay_with_their_tenant() -> None:
    """A purge that forgets somebody else's prefix, a match that goes on past a difference."""
    pool = KvPool([SHAPE], 256)
    cache = PrefixCache(pool)
    first = put(cache, "a", [1, 2, 3, 4, 5])
    put(cache, "a", [1, 2, 9])
    other = put(cache, "b", [1, 2, 3])
    assert cache.num_tokens == 5 + 1 + 3
    np.testing.assert_array_equal(cache.match("a", [1, 2, 3, 7]), first[:3])
    np.testing.assert_array_equal(cache.match("a", [1, 2, 9, 9])[:2], first[:2])
    np.testing.assert_array_equal(cache.match("b", [1, 2, 3, 4, 5]), other)
    assert len(cache.match("c", [1, 2])) == len(cache.match("a", [])) == len(cache.match("a", [2])) == 0
    cache.purge("a")
    assert len(cache.match("a", [1, 2, 3])) == 0
    np.testing.assert_array_equal(cache.match("b", [1, 2, 3]), other)
    cache.purge("b")
    cache.purge("never seen")
    assert pool.num_free_pages == pool.num_pages


def test_the_least_recently_used_leaf_goes_first() -> None:
    """A prefix in daily use was forgotten before one that nobody asks for."""
    cache = PrefixCache(KvPool([SHAPE], 64))
    for salt in ("old", "new"):
        put(cache, salt, list(range(32)))
    cache.match("old", [0])
    cache.evict(1)
    assert len(cache.match("old", list(range(32)))) == 32
    assert len(cache.match("new", list(range(32)))) == 0


@pytest.mark.parametrize(("kind", "dtype"), [("llama", "float32"), ("llama", "bfloat16"), ("mistral", "float32")])
def test_kept_paths_equal_a_fresh_prefill(tiny: Tiny, kind: str, dtype: str) -> None:
    """Keys kept under the wrong position or of a rejected sibling; spare slots read before they are written."""
    target = tiny(kind, dtype)
    rng = np.random.default_rng(7)
    slots = SequenceSlots(target.pool)
    text: list[int] = []
    for step in range(25):
        chain = rng.integers(2, 300, int(rng.integers(1, 9))).tolist()
        num_nodes = int(rng.integers(0, 14))
        nodes = rng.integers(2, 300, num_nodes).tolist()
        parents = [-1, *(int(rng.integers(0, n)) for n in range(1, num_nodes + 1))]
        batch = Batch([ScheduledSequence(slots, [*chain, *nodes], parents)])
        logits = target.forward(batch.token_ids, batch.metadata, batch.logit_rows)
        node = int(rng.integers(0, num_nodes + 1))
        path: list[int] = []
        while node > 0:
            path.insert(0, node)
            node = parents[node]
        batch.keep(path)
        text += [*chain, *(nodes[n - 1] for n in path)]
        assert slots.length == len(text)
        np.testing.assert_array_equal(logits[path[-1] if path else 0], next_logits(target, text))
        if step % 4 == 3:
            length = int(rng.integers(1, len(text)))
            slots.truncate(length)
            del text[length:]
    slots.release()
    assert target.pool.num_free_pages == target.pool.num_pages


def test_a_step_that_does_not_fit_takes_nothing() -> None:
    """Half a reservation was left behind when the pool ran out."""
    pool = KvPool([SHAPE], 32)
    slots = SequenceSlots(pool)
    with pytest.raises(OutOfSlots):
        slots.reserve(33)
    assert pool.num_free_pages == 2
    slots.reserve(0)
    slots.reserve(32)
    assert pool.num_free_pages == 0
    slots.release()
    assert pool.num_free_pages == 2
    assert pool.num_free_pages == pool.num_pages


def test_a_sequence_takes_memory_for_its_own_pages_and_stays_where_it_is() -> None:
    """Thirty-two short sequences of a pool of 262,144 slots took 6 MiB each; or compiled code read arrays that had moved."""
    pool = KvPool([SHAPE], 2**18)
    tracemalloc.start()
    SequenceSlots(pool).take_pages(300)
    assert tracemalloc.get_traced_memory()[1] < 2**16
    tracemalloc.stop()
    slots = SequenceSlots(pool)
    address, kept = slots.address, list[int]()
    for num_rows in (5, 16, 300):
        got, index = slots.reserve(num_rows)
        slots.keep(got, index, list(range(num_rows)))
        kept += got.tolist()
        assert slots.address == address and slots.slots.tolist() == kept


def test_stamps_rise_in_the_slots_given_up_or_given_again_alone() -> None:
    """A roll back made useless what was stored beside the positions that stay, or beside those of other sequences."""
    pool = KvPool([SHAPE], 4 * PAGE)
    ours, _theirs = written(pool, PAGE), written(pool, PAGE)
    before, gone, page = pool.stamps.copy(), ours.slots[5:].tolist(), ours.pages[0]
    ours.truncate(5)
    assert np.flatnonzero(pool.stamps > before).tolist() == sorted(gone)
    ours.release()
    before = pool.stamps.copy()
    assert pool.take_page() == page
    assert np.flatnonzero(pool.stamps > before).tolist() == list(range(page * PAGE, (page + 1) * PAGE))


def test_a_pool_on_a_disk_holds_the_same_bits_in_a_file_without_a_name(tmp_path: Path) -> None:
    """Cached texts of all tenants lay in a file that other users could open, and that outlived the process."""
    folder = tmp_path / "pool"
    folder.mkdir()
    settings = target_config(str(save_model("llama", tmp_path)), "int8")
    text, found = np.arange(3, 40, dtype=np.int32), []
    for kv_dir in ("", str(folder)):
        target = Target.load(settings.model_copy(update={"kv_dir": kv_dir}), 256)
        slots = SequenceSlots(target.pool)
        for part in (text[:20], text[20:]):
            batch = Batch([ScheduledSequence(slots, part)])
            found.append(target.forward(part, batch.metadata, np.arange(len(part), dtype=np.int32)))
            batch.keep(())
        found.append(np.array(target.pool.keys))
    assert all(np.array_equal(memory, disk) for memory, disk in zip(found[:3], found[3:], strict=True))
    assert isinstance(target.pool.keys.base, np.memmap) and list(folder.iterdir()) == []


def test_a_disk_without_room_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process died of SIGBUS hours later, in the middle of a step."""
    asked: list[int] = []

    def full(descriptor: int, begin: int, num_bytes: int) -> None:
        asked.append(num_bytes)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    shape = AttentionShape(4, 2, 16, 0.25)
    with pytest.raises(SaveError, match="No space left"):
        KvPool([shape] * 3, 100 * PAGE, dtype=np.uint16, folder=str(tmp_path))
    assert asked == [3 * 100 * PAGE * 2 * 16 * 2]


def test_text_that_is_asked_for_often_outlives_text_that_was_asked_for_last() -> None:
    """A scan over many documents pushed out the passages of every second question; or old fame filled the cache for ever."""
    cache = PrefixCache(KvPool([SHAPE], 8 * PAGE))

    def ask(number: int) -> bool:
        """Whether a page of text is cached; then it is inserted, in place of another if the pool is full."""
        text = [number] * PAGE
        if found := len(cache.match("", text)) == PAGE:
            cache.insert("", text, cache.match("", text))
            return found
        cache.evict(1)
        put(cache, "", text)
        return found

    for _ in range(9):
        ask(1)
    assert not any(ask(number) for number in range(2, 22)) and ask(1)
    assert not any(ask(number) for number in range(22, 222)) and not ask(1)

"""The scheduler: which sequences take part in the next step, and which KV pages they may use.

Tenants take turns; within a tenant, first come, first served. Running sequences take part in every step within its token
budget, prompts in chunks that measured costs size; waiting sequences are admitted while pages are free. A sequence whose prompt
begins as a prompt that is being read waits for the common part, which is then not computed twice. When pages run out,
cached prefixes are evicted first; then the youngest running sequence of the tenant that runs most is preempted, goes back to the
head of its queue and is computed again later: same key, same tokens. A tenant that runs fewer sequences than others preempts
theirs. Offloaded keys and values are read back in the place of a prompt's chunks. Computes no forward.

    >>> scheduled = scheduler.schedule()        # [(sequence, number of its tokens in this step)]
"""

import bisect
import time
from collections import Counter
from collections.abc import Callable, Container
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from ragspec.config import EngineConfig
from ragspec.core import FinishReason, salt_belongs_to
from ragspec.engine.kv_offload import make_kv_offload
from ragspec.engine.prefix_cache import PrefixCache
from ragspec.engine.sequence import Sequence
from ragspec.numerics.attention import PAGE
from ragspec.numerics.kv_cache import KvPool, SequenceSlots
from ragspec.numerics.ranks import ONE_RANK, Ranks
from ragspec.tenants import FairQueue, fair_shares

_DRAFT_ROWS = 64
"""Draft rows of a sequence that pages are kept free for."""
_NEVER = 2**62
_SHARED_STEP = 2.0
"""A step of several tenants may take this many times as long as if each had no more rows than the smallest of them."""
_CHUNKS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Rows of prompts that a step may have beside sequences that decode, if not all of its budget."""
_PROMPT_SPEED = 0.9
"""Prompts are read at least at this share of the speed that the whole token budget would give."""
_SHARED_TOKENS = 64
"""A sequence waits for another's prompt if it has so many tokens more in common with it than are cached."""
_LOOK_AHEAD = 16
"""Waiting sequences of a tenant of which the first may be admitted that waits for no prompt."""
_PINNED_SHARE = 0.05
_PAGES_AHEAD, _OFFLOADED_AHEAD, _SHARE_AHEAD = 256, 16, 1 / 32
"""Pages evicted beyond the present need, since a search for them takes a part of a millisecond: the most, the most where keys and
values are offloaded, which takes longer, and the largest share of the pool."""


class Load(NamedTuple):
    """The load of an engine: running and waiting choices, the share of KV slots in use by running choices, steps begun; bytes
    of offloaded keys and values on a rank, and copies of them that failed; preemptions since the start."""

    num_running: int
    num_waiting: int
    kv_usage: float
    num_steps: int
    kv_offload_bytes: int = 0
    num_kv_offload_errors: int = 0
    num_preemptions: int = 0


class Scheduler:
    """Owns the queue, the running list and the prefix cache.

    `num_recomputed`: how many positions at the end of a cached prefix are computed again. A drafter that pairs each state with
    the next token needs 1, because the next token may differ. `cost_s`: seconds of a step by its rows and longest context.
    """

    def __init__(
        self,
        pool: KvPool,
        config: EngineConfig,
        num_recomputed: int = 0,
        cost_s: Callable[[int, int], float] = lambda rows, context: 0.0,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        self._pool, self._config, self._cost_s = pool, config, cost_s
        self._num_recomputed = num_recomputed
        self.waiting = FairQueue[Sequence](_tenant)
        self.running: list[Sequence] = []
        self.offload = make_kv_offload(pool, config, ranks)
        self.prefixes = (
            PrefixCache(pool, self.offload.keep if self.offload else None) if config.enable_prefix_caching else None
        )
        self.num_preemptions = 0
        self._num_steps = 0
        self._out_of_reach = _NEVER

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def load(self) -> Load:
        """A snapshot, possibly from the middle of a step. Callable from any thread."""
        running = list(self.running)
        held = [slots.slots for sequence in running if (slots := sequence.slots) is not None]
        num_held = len(np.unique(np.concatenate(held))) if held else 0  # several may hold the same prefix
        num_bytes, num_errors = (self.offload.num_bytes, self.offload.num_errors) if self.offload else (0, 0)
        return Load(
            num_running=len(running),
            num_waiting=len(self.waiting),
            kv_usage=num_held / self._pool.num_slots,
            num_steps=self._num_steps,
            kv_offload_bytes=num_bytes,
            num_kv_offload_errors=num_errors,
            num_preemptions=self.num_preemptions,
        )

    def check_integrity(self) -> None:
        """Check that running sequences and cached prefixes hold every slot in use. Raises: EngineError."""
        held = [sequence.slots.held_slots() for sequence in self.running if sequence.slots is not None]
        self._pool.check_integrity([*held, *(self.prefixes.held_slots() if self.prefixes is not None else ())])

    def schedule(self) -> list[tuple[Sequence, int]]:
        """The sequences of the next step, each with its number of pending tokens within the step's token budget."""
        self._num_steps += 1
        if self.offload is not None:
            self.offload.begin_step(self._cost_s(self._config.max_num_batched_tokens, 0))
        self._admit()
        if self._all_decode():
            return [(sequence, 1) for sequence in self.running]
        demands, chosen = self._demands(), list[tuple[Sequence, int]]()
        shares, promised = fair_shares(demands, self._most_rows(demands)), 0  # pages for what was chosen so far
        for sequence in sorted(self.running, key=lambda each: self._turn(each, demands)):
            tenant = _tenant(sequence)
            num_tokens = min(sequence.num_pending, shares[tenant])
            if num_tokens <= 0 or sequence.slots is None:
                continue
            if self._make_room(sequence, num_tokens, chosen, promised):
                if not self._restore(sequence, num_tokens, promised):
                    chosen.append((sequence, num_tokens))
                    promised += sequence.slots.num_new_pages(sequence.num_pending)
                sequence.last_step = self._num_steps
                shares[tenant] -= num_tokens
        return [(s, n) for s, n in chosen if s.slots is not None]

    def _all_decode(self) -> bool:
        """Whether every running sequence has one pending token, and the step has room for all of them."""
        num_pages = 0
        for sequence in self.running:
            if sequence.slots is None or sequence.num_pending != 1:
                return False
            num_pages += sequence.slots.num_new_pages(1)
        if len(self.running) > self._most_rows(Counter(map(_tenant, self.running))) or not self._free(num_pages):
            return False
        for sequence in self.running:
            sequence.last_step = self._num_steps
        return True

    def _demands(self) -> Counter[str]:
        """The pending tokens of each tenant; of equal ones, the tenant that has waited longest for a step first."""
        demands = Counter[str]()
        for sequence in sorted(self.running, key=lambda each: each.last_step):
            demands[_tenant(sequence)] += sequence.num_pending
        return demands

    def _turn(self, sequence: Sequence, demands: Counter[str]) -> tuple[int, int]:
        """Small tenants first; within a tenant, decoding before prompts, and what has waited longest for a step first."""
        return demands[_tenant(sequence)], sequence.last_step if sequence.num_pending == 1 else _NEVER

    def _most_rows(self, demands: Counter[str]) -> int:
        """Rows of the next step. Why fewer with several tenants: they all wait for the rows of the largest."""
        most = self._rows_beside_decoding()
        even = min(most, len(demands) * min(demands.values(), default=0))
        if len(demands) < 2 or even == most:
            return most
        if sum(demands.values()) <= even:
            return even
        context = max(len(sequence.tokens) for sequence in self.running)
        limit_s = _SHARED_STEP * self._cost_s(even, context)
        return bisect.bisect_right(range(most + 1), limit_s, lo=even, key=lambda rows: self._cost_s(rows, context)) - 1

    def _rows_beside_decoding(self) -> int:
        """Rows of a step in which some sequences decode and others read prompts: as few as read prompts almost as fast as the
        token budget would, because whoever decodes waits for them."""
        most = self._config.max_num_batched_tokens
        decoding = sum(sequence.num_pending == 1 for sequence in self.running)
        if not 0 < decoding < len(self.running):
            return most
        context = max(len(sequence.tokens) for sequence in self.running)
        sizes = [decoding + n for n in _CHUNKS if decoding + n < most] + [most]
        seconds = [self._cost_s(rows, context) for rows in sizes]
        if not all(seconds):
            return most
        speeds = [(rows - decoding) / cost for rows, cost in zip(sizes, seconds, strict=True)]
        return next(rows for rows, speed in zip(sizes, speeds, strict=True) if speed >= _PROMPT_SPEED * max(speeds))

    def spare_rows(self, chosen: list[tuple[Sequence, int]], num_drafting: int) -> int:
        """Rows that drafts for so many of the chosen sequences may add to the step, within the token budget and the free pages.

        Evicts cached prefixes if needed: a full cache must not end speculation.
        """
        left = self._config.max_num_batched_tokens - sum(n for _, n in chosen)
        reserved = sum(s.slots.num_new_pages(n) for s, n in chosen if s.slots) + len(chosen)
        wanted = reserved + -(-min(left, _DRAFT_ROWS * num_drafting) // PAGE)
        self._free(wanted)
        return max(0, min(left, (self._pool.num_free_pages - reserved) * PAGE))

    def purge(self, salt: str) -> None:
        """Forget the cached prefixes of one tenant, and cache nothing of its running sequences."""
        for sequence in (*self.running, *self.waiting):
            if salt_belongs_to(sequence.request.salt, salt):
                sequence.remembered = False
        for cache in (self.prefixes, self.offload):
            if cache is not None:
                cache.purge(salt)
        self._out_of_reach = _NEVER

    def pin(self, salt: str, tokens: list[int]) -> None:
        """As `PrefixCache.pin`, if that takes a small part of the pool."""
        if self.prefixes is not None and len(tokens) <= _PINNED_SHARE * self._pool.num_slots:
            self.prefixes.pin(salt, tokens)

    def remember_prompt(self, sequence: Sequence) -> None:
        """Cache a prompt after its prefill, for later requests with the same prefix."""
        if sequence.slots is not None:
            self._remember(sequence, min(sequence.num_prompt, sequence.slots.length))

    def retire(self, sequence: Sequence) -> None:
        """Free an ended sequence. Its text stays in the prefix cache."""
        if sequence in self.running:
            self.running.remove(sequence)
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence.slots is None:
            return
        try:
            if sequence.finish_reason is not FinishReason.ERROR:
                self._remember(sequence, min(sequence.slots.length, len(sequence.tokens)))
        finally:
            sequence.slots.release()
            self._out_of_reach = _NEVER
            sequence.slots = None

    def _admit(self) -> None:
        if len(self.running) >= self._config.max_num_seqs and self.waiting:
            counts = Counter(map(_tenant, self.running))
            if max(counts.values()) < min(counts[_tenant(head)] for head in self.waiting.heads()) + 2:
                return  # nobody who waits may displace one that runs
        held = set[int]()
        while (sequence := self._next(held)) is not None:
            if len(self.running) >= self._config.max_num_seqs:
                if not self._displace(sequence):
                    return
                continue
            slots = self._known_prefix(sequence)
            if (reader := self._reader_of(sequence, slots.length)) is not None and reader.slots is not None:
                if reader.slots.length < slots.length + _SHARED_TOKENS:
                    held.add(id(sequence))
                else:
                    self._remember(reader, reader.slots.length)
                slots.release()
                continue
            needed = self._promised(self.running) + slots.num_new_pages(len(sequence.tokens) - slots.length) + 1
            if not self._free(needed):
                slots.release()
                if self._displace(sequence):
                    continue
                if self.running:
                    return
                slots = SequenceSlots(self._pool)  # alone and without room: a shared prefix may leave pages half used
                self._out_of_reach = _NEVER
            self.waiting.take(sequence)
            sequence.stats.num_cached_tokens = max(sequence.stats.num_cached_tokens, slots.length)
            if self.offload is not None:
                known = self.offload.num_known(sequence.request.salt, sequence.tokens[:-1], slots.length)
                sequence.num_restorable = known - self._num_recomputed
            sequence.admit(slots)
            self.running.append(sequence)

    def _next(self, held: Container[int]) -> Sequence | None:
        """The first waiting sequence of the tenant that runs fewest, but none that is held, or whose prompt another choice is
        computing."""
        if not self.waiting:
            return None
        begun = {id(sequence.request) for sequence in self.running if sequence.num_output == 0}
        counts, found, fewest = Counter(map(_tenant, self.running)), None, _NEVER
        for head in self.waiting.heads():
            if (count := counts[_tenant(head)]) >= fewest:
                continue
            for each in islice(self.waiting.of(_tenant(head)), _LOOK_AHEAD):
                if id(each.request) not in begun and id(each) not in held:
                    found, fewest = each, count
                    break
            if not fewest:
                break  # no tenant runs fewer
        return found

    def _reader_of(self, sequence: Sequence, num_known: int) -> Sequence | None:
        """The running sequence that is reading a prompt with so much of this one's beginning that waiting for it pays."""
        end = num_known + _SHARED_TOKENS
        if self.prefixes is None or len(sequence.tokens) <= end:
            return None
        beginning, salt = sequence.tokens[:end], sequence.request.salt
        readers = (each for each in self.running if each.num_output == 0 and each.remembered)
        same = (each for each in readers if each.request.salt == salt and each.tokens[:end] == beginning)
        return next(same, None)

    def _displace(self, sequence: Sequence) -> bool:
        """Preempt a sequence of a tenant that still runs as many as this one's tenant afterwards."""
        counts, victim = Counter(map(_tenant, self.running)), self._victim(())
        if victim is None or counts[_tenant(victim)] < counts[_tenant(sequence)] + 2:
            return False
        self._preempt(victim)
        return True

    def _victim(self, spared: Container[Sequence]) -> Sequence | None:
        """The youngest sequence of the tenant that runs most."""
        counts = Counter(map(_tenant, self.running))
        others = (sequence for sequence in reversed(self.running) if sequence not in spared)
        return max(others, key=lambda each: counts[_tenant(each)], default=None)

    def _known_prefix(self, sequence: Sequence) -> SequenceSlots:
        """Slots that share the cached prefix of a sequence. The last token is always computed."""
        slots = SequenceSlots(self._pool)
        if self.prefixes is not None:
            known = self.prefixes.match(sequence.request.salt, sequence.tokens[:-1])
            known = known[: len(known) - self._num_recomputed] if self._num_recomputed else known
            if len(known):
                slots.share(known)
        return slots

    def _restore(self, sequence: Sequence, num_tokens: int, promised: int) -> bool:
        """Read positions back from outside the pool in the place of `num_tokens` rows, and more if that is done in less than the
        seconds of these rows. False: the next position must be computed."""
        slots, begin = sequence.slots, time.perf_counter()
        if self.offload is None or slots is None or slots.length >= sequence.num_restorable:
            return False
        limit_s = self._cost_s(num_tokens, len(sequence.tokens))
        while (count := min(num_tokens, sequence.num_restorable - slots.length)) > 0:
            if not self._free(promised + slots.num_new_pages(count)):
                break
            start = slots.length
            if not self.offload.restore(sequence.request.salt, sequence.tokens, slots, start + count, limit_s):
                sequence.num_restorable = slots.length
            sequence.stats.num_restored_tokens += slots.length - start
            if time.perf_counter() - begin >= limit_s:
                break
        sequence.stats.num_cached_tokens = max(sequence.stats.num_cached_tokens, slots.length)
        if slots.length == sequence.num_restorable:
            self._remember(sequence, slots.length)
        return True

    def _make_room(
        self, sequence: Sequence, num_tokens: int, chosen: list[tuple[Sequence, int]], promised: int
    ) -> bool:
        """Free pages for this sequence's rows beside the `promised` pages of `chosen`. May preempt others, or this one."""
        assert sequence.slots is not None
        while True:
            if self._free(promised + sequence.slots.num_new_pages(num_tokens)):
                return True
            victim = self._victim([s for s, _ in chosen]) or sequence
            self._preempt(victim)
            if victim is sequence:
                return False

    def _promised(self, sequences: list[Sequence]) -> int:
        """Pages for all pending tokens of these sequences."""
        return sum(s.slots.num_new_pages(s.num_pending) for s in sequences if s.slots)

    def _free(self, num_pages: int) -> bool:
        """Whether so many pages are free. Evicts cached prefixes if that suffices, some more than needed, and none otherwise."""
        if self._pool.num_free_pages >= num_pages:
            return True
        if self.prefixes is None or num_pages >= self._out_of_reach:
            return False
        ahead = _PAGES_AHEAD if self.offload is None else _OFFLOADED_AHEAD
        self.prefixes.evict(num_pages + min(ahead, int(_SHARE_AHEAD * self._pool.num_pages)), least=num_pages)
        if self._pool.num_free_pages >= num_pages:
            return True
        self._out_of_reach = num_pages  # until pages are released; searching takes time
        return False

    def _remember(self, sequence: Sequence, length: int) -> None:
        if self.prefixes is not None and sequence.slots is not None and sequence.remembered:
            self.prefixes.insert(sequence.request.salt, sequence.tokens[:length], sequence.slots.slots[:length])

    def _preempt(self, sequence: Sequence) -> None:
        assert sequence.slots is not None
        self._remember(sequence, sequence.slots.length)
        sequence.slots.release()
        self._out_of_reach = _NEVER
        sequence.slots = None
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1


_tenant = attrgetter("tenant")

"""The keys and values of a draft model: a pool of its own, and in it the tokens that the model has read of each sequence.

A sequence's slots hold a prefix of its tokens, so a preempted sequence goes on where it was. The keys of accepted nodes stay, the
keys of rejected nodes are overwritten. When pages run out, cached prefixes are evicted first, then the sequences that have been
drafted for least recently; such a sequence is read again when a draft is wanted.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Protocol

import numpy as np

from ragspec.core import salt_belongs_to
from ragspec.drafting.drafter import SequenceView
from ragspec.drafting.growing.batch import ScheduledDraft
from ragspec.drafting.growing.draft import DraftSettings, GrowingDraft, OpenNode
from ragspec.numerics.attention import Ints
from ragspec.numerics.kv_cache import KvPool, SequenceSlots

_RETRY_TOKENS = 32
"""A sequence that found no room is drafted for again after so many tokens."""

Key = tuple[str, int]


class Prefixes(Protocol):
    """A cache of prefixes over the draft model's pool (`ragspec.engine.prefix_cache.PrefixCache`)."""

    def match(self, salt: str, tokens: SequenceOf[int]) -> Ints: ...

    def insert(self, salt: str, tokens: SequenceOf[int], slots: Ints) -> None: ...

    def evict(self, num_pages: int) -> None: ...

    def purge(self, salt: str) -> None: ...


class ModelMemory:
    """One sequence. Its tokens [0, slots.length) are read. `draft`: the latest draft, until its tokens are decided."""

    def __init__(self, sequence: SequenceView, slots: SequenceSlots) -> None:
        self.sequence, self.slots = sequence, slots
        self.draft: ModelDraft | None = None
        self.cached_tokens = 0  # its first tokens that the cache of prefixes holds
        self.remembered = True
        self.refused_until = 0

    @property
    def end(self) -> int:
        return len(self.sequence.tokens)

    @property
    def num_waiting(self) -> int:
        return self.end - self.slots.length

    def settle(self) -> None:
        """Keep the keys of the latest draft's known tokens and of its accepted nodes. The last token is always read again:
        the next draft starts from its state."""
        if self.draft is not None:
            draft, self.draft = self.draft, None
            kept = draft.kept(self.sequence.tokens) if draft.is_read else []
            self.slots.keep(draft.slots, draft.index, kept)


class ModelDraft(GrowingDraft):
    """A draft with slots reserved for the unread tokens and for its nodes."""

    memory: ModelMemory

    def __init__(self, sequence: SequenceView, memory: ModelMemory, settings: DraftSettings, num_levels: int) -> None:
        super().__init__(sequence, memory, settings, num_levels)
        self.num_new, self.end = memory.num_waiting, memory.end
        self.slots, self.index = memory.slots.reserve(self.num_new + self.num_nodes)
        self.scratch = self.slots[self.num_new :]
        self.is_read = False
        self._computed: dict[int, int] = {}  # node -> its number in scratch

    @property
    def new_tokens(self) -> list[int]:
        return self.sequence.tokens[self.end - self.num_new : self.end]

    def scheduled(self) -> ScheduledDraft:
        context = np.concatenate([self.memory.slots.slots, self.slots[: self.num_new]])
        return ScheduledDraft(context, self.num_new, self.end, self.scratch)

    def descend(self, chosen: list[OpenNode]) -> None:
        """The nodes that were open have keys now."""
        self._computed.update((node.number, node.path[-1]) for node in self.open if node.path)
        super().descend(chosen)

    def kept(self, tokens: SequenceOf[int]) -> list[int]:
        """Of the reserved slots: the ones of known tokens, and of the nodes that became `tokens`."""
        children = {(p.parent, p.token_id): node for node, p in enumerate(self.proposals)}
        kept, node = list(range(self.num_new)), -1
        for token in tokens[self.end : -1]:
            node = children.get((node, token), -2)
            if node not in self._computed:
                break
            kept.append(self.num_new + self._computed[node])
        return kept


class ModelCache:
    """The memories of all sequences in one pool."""

    def __init__(self, pool: KvPool, prefixes: Prefixes) -> None:
        self.pool, self._prefixes = pool, prefixes
        self._memories: dict[Key, ModelMemory] = {}  # the latest drafted for is last
        self._protected: frozenset[Key] = frozenset()

    def __len__(self) -> int:
        return len(self._memories)

    def protect(self, keys: Iterable[Key]) -> None:
        """Make room at no cost of these sequences."""
        self._protected = frozenset(keys)

    def memory(self, sequence: SequenceView) -> ModelMemory:
        """The memory of a sequence; a new one starts from the longest cached prefix."""
        memory = self._memories.get(sequence.key)
        if memory is None:
            memory = self._memories[sequence.key] = ModelMemory(sequence, SequenceSlots(self.pool))
            self._share(memory)
        return memory

    def begin(self, memory: ModelMemory) -> None:
        """A draft is wanted: the sequence is the most recently used, and takes over what others have read meanwhile."""
        memory.settle()
        if memory.slots.length == memory.cached_tokens:
            self._share(memory)
        key = memory.sequence.key
        self._memories[key] = self._memories.pop(key)

    def _share(self, memory: ModelMemory) -> None:
        prefix = self._prefixes.match(memory.sequence.request.salt, memory.sequence.tokens[:-1])
        if len(prefix) > memory.cached_tokens:
            memory.slots.release()
            memory.slots.share(prefix)
            memory.cached_tokens = len(prefix)

    def make_room(self, memory: ModelMemory, num_slots: int) -> bool:
        """Free the pages that so many slots take. False: they are not to be had now, and the sequence waits."""
        needed = memory.slots.num_new_pages(num_slots)
        if self.pool.num_free_pages < needed:
            self._prefixes.evict(needed)
        for key in [key for key in self._memories if key not in self._protected]:
            if self.pool.num_free_pages >= needed:
                break
            self._memories.pop(key).slots.release()
            self._prefixes.evict(needed)
        if self.pool.num_free_pages >= needed:
            return True
        memory.refused_until = memory.end + _RETRY_TOKENS
        return False

    def remember(self, memory: ModelMemory, num_tokens: int) -> None:
        """Cache the first tokens of a sequence for others of its salt."""
        num_tokens = min(num_tokens, memory.slots.length)
        if memory.remembered and num_tokens > memory.cached_tokens:
            tokens = memory.sequence.tokens[:num_tokens]
            self._prefixes.insert(memory.sequence.request.salt, tokens, memory.slots.slots[:num_tokens])
            memory.cached_tokens = num_tokens

    def settle(self, sequence: SequenceView) -> None:
        """The latest draft's tokens are decided."""
        if (memory := self._memories.get(sequence.key)) is not None:
            memory.settle()
            self.remember(memory, sequence.num_prompt)

    def release(self, sequence: SequenceView) -> None:
        if (memory := self._memories.pop(sequence.key, None)) is not None:
            memory.settle()
            self.remember(memory, memory.end)
            memory.slots.release()

    def purge(self, salt: str) -> None:
        """Forget one tenant's cached prefixes, and cache nothing of its running sequences."""
        self._prefixes.purge(salt)
        for memory in self._memories.values():
            memory.remembered = memory.remembered and not salt_belongs_to(memory.sequence.request.salt, salt)

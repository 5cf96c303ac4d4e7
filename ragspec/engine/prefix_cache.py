"""The prefix cache: keys and values of finished text, for later requests with the same prefix.

A radix tree over slots with one root for each tenant salt, so tenants never share text. A node holds a run of tokens and the
slots of their positions; the tree counts as one more holder of these slots. Leaves that were inserted least often are evicted
first, of equal ones the least recently used. Counts begin at that of the last evicted leaf (LFU with dynamic aging), so text that
was asked for often in the past does not stay for ever.
KV offloading copies a leaf out of the pool before its eviction, and then only as much of a leaf is evicted as pages are needed.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing

import numpy as np

from ragspec.core import salt_belongs_to
from ragspec.numerics.attention import PAGE, Ints
from ragspec.numerics.kv_cache import KvPool

Offload = Callable[[str, Sequence[int], Ints, int], None]
"""(salt, a text from its first token, its slots, the first position that the pool is about to forget)."""


class _Node:
    __slots__ = ("children", "is_listed", "last_used", "parent", "salt", "slots", "tokens", "worth")

    def __init__(self, tokens: Sequence[int], slots: Ints, parent: _Node | None, last_used: int, worth: int) -> None:
        self.tokens = list(tokens)
        self.slots = slots
        self.parent = parent
        self.children: dict[int, _Node] = {}
        self.last_used = last_used
        self.worth = worth
        self.salt = ""  # of a root
        self.is_listed = False  # for eviction

    @property
    def rank(self) -> tuple[int, int]:
        """Leaves of the lowest rank are evicted first."""
        return self.worth, self.last_used


_Listed = tuple[int, int, int, _Node]
"""A leaf behind its rank and its id."""


class PrefixCache:
    """`match` before a prefill, `insert` after it, `evict` when pages run out."""

    def __init__(self, pool: KvPool, offload: Offload | None = None) -> None:
        self._pool, self._offload = pool, offload
        self._roots: dict[str, _Node] = {}
        self._clock = itertools.count()
        self._evicted_worth = 0
        self._leaves: list[_Listed] = []  # a heap; nodes may have risen or got children since
        self._pinned: list[tuple[list[int], Ints]] = []

    def match(self, salt: str, tokens: Sequence[int]) -> Ints:
        """Slots of the longest known prefix of `tokens`. Shape: int32 [T'] with T' <= T."""
        found: list[Ints] = [np.empty(0, np.int32)]
        for node, length in self._walk(salt, tokens):
            node.last_used = next(self._clock)
            found.append(node.slots[:length])
        longest = np.concatenate(found)
        for beginning, slots in self._pinned:
            if len(slots) > len(longest) and list(tokens[: len(slots)]) == beginning:
                longest = slots
        return longest

    def pin(self, salt: str, tokens: Sequence[int]) -> None:
        """Keep a cached text for ever, as the beginning of texts of every salt. Only for text that is nobody's."""
        slots = self.match(salt, tokens)
        if len(slots) == len(tokens) and not any(list(tokens) == beginning for beginning, _ in self._pinned):
            self._pool.hold(slots)
            self._pinned.append((list(tokens), slots))

    def insert(self, salt: str, tokens: Sequence[int], slots: Ints) -> None:
        """Cache `tokens`; slots that are cached already stay. Shapes: T tokens, int32 [T]."""
        if not tokens:
            return
        node = self._roots.setdefault(salt, _Node((), np.empty(0, np.int32), None, 0, 0))
        node.salt, at = salt, 0
        for child, length in self._walk(salt, tokens):
            node = child if length == len(child.tokens) else self._split(child, length)
            node.last_used, node.worth = next(self._clock), max(node.worth, self._evicted_worth) + 1
            at += length
        if at < len(tokens):
            rest = slots[at:].copy()
            self._pool.hold(rest)
            leaf = _Node(tokens[at:], rest, node, next(self._clock), self._evicted_worth + 1)
            node.children[tokens[at]] = leaf
            self._list(leaf)

    def evict(self, num_pages: int, least: int = 0) -> None:
        """Evict leaves until `num_pages` pages are free or all other leaves are in use.

        Evicts nothing if fewer than `least` pages would be free then.
        """
        if not self._can_free(least):
            return
        with closing(self._leaves_by_rank()) as leaves:
            while self._pool.num_free_pages < num_pages and (leaf := next(leaves, None)):
                if self._offload is not None:
                    most = (num_pages - self._pool.num_free_pages + 1) * PAGE
                    if len(leaf.tokens) > most:
                        self._split(leaf, len(leaf.tokens) - most)
                    self._offload(*self._text_of(leaf))
                self._evicted_worth = max(self._evicted_worth, leaf.worth)
                parent = self._drop(leaf)
                if not parent.children:
                    self._list(parent)
                    if parent.parent is None:
                        del self._roots[parent.salt]

    def _can_free(self, num_pages: int) -> bool:
        """Whether evicting leaves could make so many pages free."""
        missing, num_dropped = num_pages - self._pool.num_free_pages, Counter[int]()
        if missing <= 0:
            return True
        with closing(self._leaves_by_rank()) as leaves:
            for leaf in leaves:
                missing -= self._pool.num_freed_pages(leaf.slots, num_dropped)
                if missing <= 0:
                    return True
        return False

    def _list(self, node: _Node) -> None:
        """List a leaf for eviction. A listed node that gets children is met and left out by the next search."""
        if not node.is_listed and node.parent is not None:
            heapq.heappush(self._leaves, (*node.rank, id(node), node))
            node.is_listed = True

    def _leaves_by_rank(self) -> Generator[_Node]:
        """Leaves that nobody else holds, the lowest rank first. Each counts as evicted when the next is asked for, so that its
        parent may follow. Leaves that stay are listed again at the end."""
        num_evicted, unlisted = Counter[_Node](), list[_Node]()
        try:
            while self._leaves:
                worth, last_used, _, node = heapq.heappop(self._leaves)
                node.is_listed = False
                if (parent := node.parent) is None or len(node.children) > num_evicted[node]:
                    continue
                unlisted.append(node)
                if (worth, last_used) != node.rank:
                    self._list(node)
                elif self._pool.all_shared(node.slots):
                    node.last_used = next(self._clock)  # evicting it would free nothing
                else:
                    yield node
                    num_evicted[parent] += node.parent is not None
                    if len(parent.children) == num_evicted[parent]:
                        self._list(parent)
        finally:
            for node in unlisted:
                if not node.children:
                    self._list(node)

    def purge(self, salt: str) -> None:
        """Evict everything of one tenant."""
        for each in [each for each in self._roots if salt_belongs_to(each, salt)]:
            for node in list(self._below(self._roots.pop(each))):
                self._pool.release(node.slots)
                node.parent = None
        self._leaves = [entry for entry in self._leaves if entry[-1].parent is not None]
        heapq.heapify(self._leaves)

    def held_slots(self) -> list[Ints]:
        """The slots that each node holds, and each pinned text."""
        nodes = [node.slots for root in self._roots.values() for node in self._below(root)]
        return [*nodes, *(slots for _, slots in self._pinned)]

    @property
    def num_tokens(self) -> int:
        return sum(len(node.tokens) for root in self._roots.values() for node in self._below(root))

    def _walk(self, salt: str, tokens: Sequence[int]) -> Iterator[tuple[_Node, int]]:
        """The nodes along `tokens`, each with the length of its common prefix."""
        node = self._roots.get(salt)
        at = 0
        while node is not None and at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                return
            length = _common_prefix(child.tokens, tokens, at)
            at += length
            node = child if length == len(child.tokens) else None
            yield child, length

    def _split(self, node: _Node, length: int) -> _Node:
        """Cut a node in two; returns the upper part."""
        assert node.parent is not None
        upper = _Node(node.tokens[:length], node.slots[:length], node.parent, node.last_used, node.worth)
        node.parent.children[node.tokens[0]] = upper
        node.tokens, node.slots, node.parent = node.tokens[length:], node.slots[length:], upper
        upper.children[node.tokens[0]] = node
        return upper

    def _text_of(self, leaf: _Node) -> tuple[str, list[int], Ints, int]:
        """The salt, tokens and slots from the root to the end of a leaf, and where the leaf begins."""
        path, node = list[_Node](), leaf
        while node.parent is not None:
            path.insert(0, node)
            node = node.parent
        tokens = [token for part in path for token in part.tokens]
        return node.salt, tokens, np.concatenate([part.slots for part in path]), len(tokens) - len(leaf.tokens)

    def _drop(self, leaf: _Node) -> _Node:
        assert leaf.parent is not None
        self._pool.release(leaf.slots)
        del leaf.parent.children[leaf.tokens[0]]
        parent, leaf.parent = leaf.parent, None
        return parent

    def _below(self, node: _Node | None) -> Iterator[_Node]:
        stack = list(node.children.values()) if node else []
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node


def _common_prefix(run: Sequence[int], tokens: Sequence[int], at: int) -> int:
    """Length of the common prefix of `run` and `tokens[at:]`."""
    most = min(len(run), len(tokens) - at)
    for i in range(most):
        if run[i] != tokens[at + i]:
            return i
    return most

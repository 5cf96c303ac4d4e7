"""Trees of what followed the output's last tokens before, the most frequent first: one search for every store of texts.

A node's count is exact: how often its path follows the match in all visible texts. A sibling's share of the counts that better
siblings leave, the length of the match and the count itself make the node's kind, whose acceptance is learned.

Of the longest match, its half and so on, the one whose tree promises the most accepted tokens is drafted.

    >>> stores = [VisibleSuffixes(SortedSuffixes.build(tokens))]
    >>> CountedDrafts("datastore", stores, acceptance).grow(sequence.tokens, max_nodes=48, max_depth=16)

Sources: REST (He et al. 2023, arXiv 2311.08252), SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975).
"""

import heapq
import itertools
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np

from ragspec.drafting.acceptance import AcceptanceCells, Guess
from ragspec.drafting.suffix_index import SEPARATOR, SORTED_TOKENS, SortedSuffixes, VisibleSuffixes
from ragspec.tree import Origin, Proposal

MAX_MATCH = 16
_MAX_DEPTH = SORTED_TOKENS - MAX_MATCH
_LEAST_MATCH, _NUM_CHILDREN = 2, 4
_LEAST_PROB = 0.02
_SHARES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 0.999)
_COUNTS = (2, 4, 16)


class CountedAcceptance(AcceptanceCells):
    """Acceptance of a counted node given that its parent was accepted and no better sibling was."""

    def __init__(self) -> None:
        middles = np.array([(low + high) / 2 for low, high in itertools.pairwise((0.0, *_SHARES, 1.0))])
        reliable = 0.95 - 0.7 ** np.arange(1, MAX_MATCH + 2)
        prior = reliable[:, None, None] * middles[:, None] * np.ones(len(_COUNTS) + 1)
        super().__init__(prior.ravel())

    def cell(self, match: int, share: float, count: int) -> int:
        """`match`: tokens that the node's parent and the tokens before it have in common with the texts."""
        row = min(match, MAX_MATCH) * (len(_SHARES) + 1) + bisect_right(_SHARES, share)
        return row * (len(_COUNTS) + 1) + bisect_right(_COUNTS, count)


class _Node(NamedTuple):
    """`spans`: of each store with the path, its number and its suffixes [low, high). `number`: in the proposals, -1: the root."""

    number: int
    path_prob: float
    depth: int
    spans: list[tuple[int, int, int]]


class CountedDrafts(NamedTuple):
    """The texts that one draft of a drafter may repeat."""

    drafter: str
    stores: SequenceOf[VisibleSuffixes]
    acceptance: CountedAcceptance

    def grow(self, text: SequenceOf[int], max_nodes: int, max_depth: int) -> tuple[list[Proposal], int]:
        """The best tree, and the length of its match."""
        last = np.array(text[-MAX_MATCH:], np.int32)
        longest = [store.longest(last) for store in self.stores]
        length, best, match = max(longest, default=0), list[Proposal](), 0
        while length >= _LEAST_MATCH:
            root = [
                (n, *self.stores[n].suffixes.find(last[-length:])) for n, most in enumerate(longest) if most >= length
            ]
            tree = self._tree(_Node(-1, 1.0, 0, root), length, max_nodes, min(max_depth, _MAX_DEPTH))
            if sum(p.path_prob for p in tree) > sum(p.path_prob for p in best):
                best, match = tree, length
            length //= 2
        return best, match

    def _tree(self, node: _Node, match: int, max_nodes: int, max_depth: int) -> list[Proposal]:
        """The most probable paths below a root, which ends a match."""
        proposals: list[Proposal] = []
        waiting: list[tuple[float, int, _Node, Proposal]] = []
        order = itertools.count()
        while len(proposals) < max_nodes:
            if node.depth < max_depth:
                for proposal, below in self._children(node, match):
                    heapq.heappush(waiting, (-proposal.path_prob, next(order), below, proposal))
            if not waiting:
                break
            _, _, node, proposal = heapq.heappop(waiting)
            node = node._replace(number=len(proposals))
            proposals.append(proposal)
        return proposals

    def _children(self, node: _Node, match: int) -> Iterator[tuple[Proposal, _Node]]:
        """The most frequent tokens behind a node that are probable enough."""
        stores, offset = self.stores, match + node.depth
        followers = [stores[number].followers(low, high, offset, _NUM_CHILDREN) for number, low, high in node.spans]
        left, prob = sum(stores[number].num_visible(low, high) for number, low, high in node.spans), node.path_prob
        counts, spans = Counter[int](), defaultdict[int, list[tuple[int, int, int]]](list)
        for token in dict.fromkeys(each[0] for found in followers for each in found):
            # Why again: a store may have the token behind its own most frequent ones
            for number, low, high in node.spans:
                first, end = stores[number].suffixes.find(np.array([token], np.int32), (low, high), offset)
                counts[token] += stores[number].num_visible(first, end)
                spans[token].append((number, first, end))
        best = prob
        for token, count in counts.most_common(_NUM_CHILDREN):
            cell = self.acceptance.cell(offset, count / left, count)
            chance = self.acceptance.probability(cell)
            best = min(best, prob * chance)  # Why: learning needs siblings in this order, whatever the estimates say
            if best < _LEAST_PROB:
                return
            origin = Origin(self.drafter, feedback=Guess(self.acceptance, cell))
            yield Proposal(token, node.number, best, origin), _Node(-1, best, node.depth + 1, spans[token])
            left, prob = left - count, prob * (1.0 - chance)


def compile_searches() -> None:
    """Compile now, or read from disk, for the first answer would otherwise wait."""
    suffixes = SortedSuffixes.build(np.array([0, 1, 0, SEPARATOR], np.int32))
    CountedDrafts("any", [VisibleSuffixes(suffixes)], CountedAcceptance()).grow([0, 1], 1, 1)

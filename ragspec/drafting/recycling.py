"""Token recycling: the tokens that the target thought probable after a token are likely candidates after it again.

One table a tenant keeps, for every token, the target's most probable next tokens where the token stood last. A draft is a tree of
table rows, the most probable paths first. No model, no training; a table knows no more than one token of context.

Tables together take at most `max_bytes`; `ragspec.tenants.TenantStates` says whose table goes beyond that.

Source: Token Recycling (Luo et al. 2024, arXiv 2408.08696).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

import numpy as np

from ragspec.core import salt_belongs_to
from ragspec.drafting.acceptance import AcceptanceCells, Cell, Guess
from ragspec.drafting.drafter import NUM_TOP_TOKENS, TOP_TOKENS, Budget, Drafter, Features, SequenceView
from ragspec.errors import ConfigError
from ragspec.numerics.attention import Ints
from ragspec.tenants import TenantStates
from ragspec.tree import Origin, Proposal

_NUM_DEPTHS, _MAX_DEPTH = 4, 8
_LEAST_PROB = 0.02
_BEST, _FADING = 0.4, 0.5
"""Prior chance of the first candidate, and of each further one over the one before."""


class TokenTable:
    """One tenant's candidates after each token, the most probable first; and how often candidates were right.

    Shape: int32 [V, NUM_TOP_TOKENS], ids plus one; 0 is none, so an unused page takes no memory.
    """

    def __init__(self, vocab_size: int) -> None:
        self._next: Ints = np.zeros((vocab_size, NUM_TOP_TOKENS), np.int32)
        prior = [_BEST * _FADING**rank for rank in range(NUM_TOP_TOKENS)] * (2 * _NUM_DEPTHS)
        self._acceptance = AcceptanceCells(prior, prior_weight=4.0, memory=400.0)

    def learn(self, tokens: Ints, candidates: Ints) -> None:
        """Shapes: int32 [T]; int64 [T, k], -1 where the target computed no logits."""
        for row in np.flatnonzero(candidates[:, 0] >= 0).tolist():  # one in most steps
            self._next[tokens[row]] = candidates[row] + 1

    def draft(self, root: int, is_greedy: bool, max_nodes: int, max_depth: int) -> list[Proposal]:
        """The most probable paths from a token, at most `max_nodes` nodes."""
        proposals: list[Proposal] = []
        waiting: list[tuple[float, int, int, int, int, Cell]] = []
        order = itertools.count()  # of equal paths the one found first
        token, parent, path_prob, depth = root, -1, 1.0, 0
        while True:
            if depth < max_depth:
                for following, chance, cell in self._children(token, path_prob, depth, is_greedy):
                    heapq.heappush(waiting, (-chance, next(order), following, parent, depth, cell))
            if not waiting or len(proposals) == max_nodes:
                return proposals
            negative_prob, _, token, above, level, cell = heapq.heappop(waiting)
            path_prob, parent, depth = -negative_prob, len(proposals), level + 1
            origin = Origin(RecyclingDrafter.name, feedback=Guess(self._acceptance, cell))
            proposals.append(Proposal(token, above, path_prob, origin))

    def _children(self, token: int, path_prob: float, depth: int, is_greedy: bool) -> Iterator[tuple[int, float, Cell]]:
        """The candidates after a node that are probable enough, and the probabilities of their paths."""
        for rank, following in enumerate(self._next[token].tolist()):
            cell = self._cell(is_greedy, depth, rank)
            chance = self._acceptance.probability(cell)
            if not following or path_prob * chance < _LEAST_PROB:
                return
            yield following - 1, path_prob * chance, cell
            path_prob *= 1.0 - chance

    def _cell(self, is_greedy: bool, depth: int, rank: int) -> Cell:
        return Cell((is_greedy * _NUM_DEPTHS + min(depth, _NUM_DEPTHS - 1)) * NUM_TOP_TOKENS + rank)


class RecyclingDrafter(Drafter):
    """See the module. Raises: ConfigError if not even one table fits."""

    name = "recycling"
    taps = (TOP_TOKENS,)

    def __init__(self, vocab_size: int, max_bytes: int) -> None:
        needed = vocab_size * NUM_TOP_TOKENS * 4
        if max_bytes < needed:
            raise ConfigError(f"drafting.max_recycling_bytes is {max_bytes}; one tenant's table takes {needed}")
        self._tables = TenantStates(max_bytes // needed, lambda: TokenTable(vocab_size))
        self._teachers: dict[tuple[str, int], str] = {}  # the sequences whose tokens are learned, and their salts

    def start(self, sequence: SequenceView) -> None:
        self._teachers[sequence.key] = sequence.request.salt

    def propose(self, sequences: SequenceOf[SequenceView], budget: Budget) -> list[list[Proposal]]:
        return [self._propose(s, budget.max_nodes, depth) for s, depth in zip(sequences, budget.depths, strict=True)]

    def _propose(self, sequence: SequenceView, max_nodes: int, depth: int) -> list[Proposal]:
        table = self._tables.get(sequence.request.salt)
        if table is None:
            return []
        return table.draft(sequence.tokens[-1], sequence.request.params.greedy, max_nodes, min(depth, _MAX_DEPTH))

    def observe(self, sequence: SequenceView, tokens: SequenceOf[int], features: Features) -> None:
        if sequence.slots is None or not tokens or sequence.key not in self._teachers:
            return
        candidates, end = features[TOP_TOKENS].numpy(), sequence.slots.length
        kept = np.array(sequence.tokens[end - len(candidates) : end], np.int32)
        self._tables.used(sequence.request.salt).learn(kept, candidates)

    def finish(self, sequence: SequenceView) -> None:
        self._teachers.pop(sequence.key, None)

    def purge(self, salt: str) -> None:
        """Forget one tenant's tables, and learn nothing more from its running sequences."""
        self._tables.purge(salt)
        self._teachers = {key: own for key, own in self._teachers.items() if not salt_belongs_to(own, salt)}

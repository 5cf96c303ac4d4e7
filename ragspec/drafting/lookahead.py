"""Look-ahead: the target itself finds likely n-grams, in rows that guess further ahead than anything is accepted.

A window of guessed tokens, one chain, stands in every tree. The target's tokens behind them are the next step's guesses (Jacobi
iteration). A guess and the tokens that the target put behind it, step after step, make an n-gram of the request's pool; the
n-grams that begin with the last token are drafted.

A window's row is worth the accepted tokens that a row brought lately: where rows are dear, the planner leaves the window out.
No model, no training, and nothing outlives the request but rates of acceptance.

Source: Lookahead Decoding (Fu et al. 2024, arXiv 2402.02057); here the rows of the window see one chain, not a chain for each
of the last steps.
"""

from collections.abc import Sequence as SequenceOf

from ragspec.drafting.acceptance import MAX_TENANTS, AcceptanceCells, Guess
from ragspec.drafting.drafter import NODES, Budget, Drafter, Features, SequenceView
from ragspec.tenants import TenantStates, tenant_of
from ragspec.tree import Origin, Proposal

_WINDOW, _NGRAM, _MOST_NGRAMS = 8, 5, 7
"""Tokens of the window; of an n-gram, its key included; n-grams with one key."""
MOST_DEPTH = _NGRAM - 2
"""Deeper tokens are accepted as those of this depth."""
_LEAST_PROB = 0.02
_STRIDE = 7_919


class LookaheadAcceptance(AcceptanceCells):
    """Acceptance of an n-gram's tokens by rank and depth, and the worth of a window's row: accepted tokens a row."""

    def __init__(self) -> None:
        prior = [0.4 if depth else 0.35 / (rank + 1) for rank in range(_MOST_NGRAMS) for depth in range(_NGRAM - 1)]
        super().__init__(prior, prior_weight=4.0, memory=400.0)
        self._tokens, self._rows = 3.0, 40.0

    def cell(self, rank: int, depth: int) -> int:
        return rank * (_NGRAM - 1) + depth

    def learn(self, cell: int, accepted: bool) -> None:
        super().learn(cell, accepted)
        self._tokens += accepted

    def window(self, drafter: str, tokens: SequenceOf[int], first: int) -> list[Proposal]:
        """A window's rows, one chain behind `first` other proposals."""
        worth, origin = min(1.0, self._tokens / self._rows), Origin(drafter)
        return [Proposal(token, first + i - 1 if i else -1, worth, origin) for i, token in enumerate(tokens)]

    def note_rows(self, num_rows: int) -> None:
        """A step had so many rows of a window."""
        self._rows = self._rows * 0.99 + num_rows
        self._tokens *= 0.99


class _Lookahead:
    """One sequence. `window[i]`: the tokens that led to the guess of the token i + 1 places ahead; the guess itself is last."""

    def __init__(self, prompt: SequenceOf[int], acceptance: LookaheadAcceptance) -> None:
        self.acceptance = acceptance
        self._prompt, self._num_guesses = prompt, 0
        self._pool: dict[int, list[tuple[int, ...]]] = {}  # by first token, the rest of each n-gram, the latest last
        self.window: list[list[int]] = []
        self._fill()

    def draft(self, root: int, max_nodes: int, max_depth: int) -> list[Proposal]:
        """N-grams behind the last token, and the window."""
        proposals: list[Proposal] = []
        known: dict[tuple[int, ...], int] = {}  # path: its node
        left, rank = 1.0, -1
        for ngram in reversed(self._pool.get(root, ())):
            parent, prob, rank = -1, left, rank + (ngram[:1] not in known)
            for depth, token in enumerate(ngram[:max_depth]):
                path = ngram[: depth + 1]
                if path not in known:
                    cell = self.acceptance.cell(rank, depth)
                    chance = self.acceptance.probability(cell)
                    if prob * chance < _LEAST_PROB or len(proposals) >= max_nodes:
                        break
                    left *= 1.0 if depth else 1.0 - chance
                    known[path] = len(proposals)
                    origin = Origin(LookaheadDrafter.name, feedback=Guess(self.acceptance, cell))
                    proposals.append(Proposal(token, parent, prob * chance, origin))
                parent, prob = known[path], proposals[known[path]].path_prob
        guesses = [trail[-1] for trail in self.window[: min(max_depth, max_nodes)]]
        return [*proposals, *self.acceptance.window(LookaheadDrafter.name, guesses, len(proposals))]

    def observe(self, nodes: SequenceOf[SequenceOf[int]], num_decided: int) -> None:
        """`nodes`: of every node of the tree its token, its parent, and the target's token behind it."""
        numbers = {(parent, token): number for number, (token, parent, _) in enumerate(nodes)}
        found, node = [[nodes[0][0], nodes[0][2]]], 0
        for trail in self.window:
            child = numbers.get((node, trail[-1]))
            if child is None:
                break
            node = child
            found.append([*trail, nodes[node][2]][-_NGRAM:])
        self.acceptance.note_rows(len(found) - 1)
        for trail in found:
            self._learn(trail)
        self.window = (found + self.window[len(found) :])[num_decided:]
        self._fill()

    def _learn(self, trail: list[int]) -> None:
        """Keep an n-gram; of two that begin alike, the longer one alone."""
        first, rest = trail[0], tuple(trail[1:])
        others = list[tuple[int, ...]]()
        for each in self._pool.get(first, ()):
            if each[: len(rest)] == rest:
                rest = each
            elif each != rest[: len(each)]:
                others.append(each)
        self._pool[first] = [*others, rest][-_MOST_NGRAMS:]

    def _fill(self) -> None:
        """Tokens of the prompt are the guesses where there are none yet."""
        while len(self.window) < _WINDOW:
            self._num_guesses += 1
            self.window.append([self._prompt[self._num_guesses * _STRIDE % len(self._prompt)]])


class LookaheadDrafter(Drafter):
    """See the module."""

    name = "lookahead"
    taps = (NODES,)

    def __init__(self) -> None:
        self._sequences: dict[tuple[str, int], _Lookahead] = {}
        self._acceptance = TenantStates(MAX_TENANTS, LookaheadAcceptance)

    def start(self, sequence: SequenceView) -> None:
        acceptance = self._acceptance.used(tenant_of(sequence.request.salt))
        self._sequences[sequence.key] = _Lookahead(sequence.request.prompt_ids, acceptance)

    def propose(self, sequences: SequenceOf[SequenceView], budget: Budget) -> list[list[Proposal]]:
        parts = zip(sequences, budget.depths, strict=True)
        return [self._sequences[s.key].draft(s.tokens[-1], budget.max_nodes, depth) for s, depth in parts]

    def observe(self, sequence: SequenceView, tokens: SequenceOf[int], features: Features) -> None:
        if tokens:
            self._sequences[sequence.key].observe(features[NODES].tolist(), len(tokens))

    def finish(self, sequence: SequenceView) -> None:
        self._sequences.pop(sequence.key, None)

    def purge(self, salt: str) -> None:
        self._acceptance.purge(salt)

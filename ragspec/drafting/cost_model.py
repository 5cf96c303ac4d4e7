"""What a step costs and what its drafts bring: the objective that the planner maximises.

A forward over n rows beside c tokens of context takes T(n, c) seconds: the time measured at start, times a correction of its
size, times a factor of the machine for all sizes. Every step refines both. A drafted node is worth p, the probability that its
whole path is accepted. With B sequences and M prompt rows that are in the step anyway, the planner chooses the set S of nodes
with the most expected tokens a second:

    maximise over S   (B + sum of p over S) / (T(B, c) + T(B + M + |S|, c) - T(B + M, c))

T(B, c) is how long B tokens take without drafts. To a step that reads a prompt, drafts may add a small share of its time only:
somebody waits for its first token (`rows_beside_prompts`).

Of all sets of one size the most probable nodes are best, so only the size is searched. Where no node raises the rate, nothing is
drafted: a step without drafts is the case |S| = 0. A node raises the rate only if p is greater than the rate times its row's
seconds, and the best rate is at least B / T(B, c). So a node less probable than B / T(B, c) times the cheapest further row is
in no best set (`StepPlan.least_prob`), and a drafter may leave it out.

A drafter whose proposals take D seconds is asked for a set A of sequences where it saves more time than it takes (`saved_s`):

    saved(gains of A) - D(A) > 0

A gain is the tokens that a draft adds, less the price in tokens of the rows that it takes.

Owns seconds and probabilities; knows no drafter.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import numpy as np

from ragspec.drafting.acceptance import Floats, Ints, Mask
from ragspec.drafting.drafter import SequenceView
from ragspec.drafting.step_trees import StepTrees

_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512)
_MOST_MEASURED = 128
"""More rows are extrapolated at start: their forwards would take seconds. Steps of that size then refine them."""
_NUM_ROUNDS, _ENOUGH_S = 4, 3.0
_MACHINE_WEIGHT, _SIZE_WEIGHT = 0.08, 0.04
"""Weights of one step in the machine's factor, since other load comes and goes at once, and in the correction of its size."""
_MOST_CORRECTION, _FORGOTTEN_SHARE = 1.5, 0.003
"""The largest correction; and the share that a step forgets where unused sizes seem dear, or used sizes cheap: a slow spell of
some sizes does not rule them out for good."""


_FIRST_TOKEN_DELAY = 0.02
"""Share of a step that reads a prompt which drafts may add. More: fewer steps for an answer, later first tokens. Without a bound
first tokens of one user came 20 % later, and under 8 users 95 % of answers took twice as long a token."""


class CostTable:
    """T(rows, context) in seconds: measured at start, linear in between, refined while running. More rows never cost less."""

    def __init__(self, seconds: dict[int, list[float]], rows: SequenceOf[int] = _BUCKETS) -> None:
        """`seconds[context]` has one entry for each number of rows."""
        self._rows = list(rows)
        self._measured, self._contexts = seconds, sorted(seconds)
        self._borders = [(low + high) / 2 for low, high in itertools.pairwise(self._contexts)]
        self._machine = 1.0
        self._corrections = {context: [1.0] * len(self._rows) for context in seconds}
        self._seconds = {context: _rising(column) for context, column in seconds.items()}
        """Measurements times corrections."""

    @classmethod
    def measure(cls, forward_s: Callable[[int, int], float], contexts: SequenceOf[int], max_rows: int) -> CostTable:
        """`forward_s(rows, context)` runs one forward and returns its seconds; the fastest of a few rounds counts.

        All sizes take turns, so that a moment of other load does not fall on one size. After `_ENOUGH_S` no further round begins.
        """
        rows = [n for n in _BUCKETS if n <= min(max_rows, _MOST_MEASURED)]
        rounds: list[dict[int, list[float]]] = []
        while not rounds or (len(rounds) < _NUM_ROUNDS and sum(sum(map(sum, r.values())) for r in rounds) < _ENOUGH_S):
            rounds.append({c: [forward_s(n, c) for n in rows] for c in contexts})
        seconds = {c: [min(times) for times in zip(*(r[c] for r in rounds), strict=True)] for c in contexts}
        further = [n for n in _BUCKETS if rows[-1] < n <= max_rows]
        whole = {c: [*column, *_extrapolated(rows, column, further)] for c, column in seconds.items()}
        return cls(whole, [*rows, *further])

    @property
    def measured(self) -> tuple[list[int], dict[int, list[float]]]:
        """The measured numbers of rows, and the seconds of each by context."""
        return self._rows, self._measured

    def cost_s(self, num_rows: int, context: int) -> float:
        """Expected seconds of one forward."""
        column = self._seconds[self._nearest(context)]
        at = bisect_left(self._rows, num_rows)
        if at == 0 or len(column) == 1:
            return column[0] * self._machine
        at = min(at, len(column) - 1)  # beyond the last bucket the last slope goes on
        low, high = self._rows[at - 1], self._rows[at]
        share = (num_rows - low) / (high - low)
        return (column[at - 1] + (column[at] - column[at - 1]) * share) * self._machine

    def costs_s(self, num_rows: Ints, context: int) -> Floats:
        """As `cost_s`. Shape: int64 [N] -> float64 [N]."""
        rows, column = self._rows, self._seconds[self._nearest(context)]
        slope = (column[-1] - column[-2]) / (rows[-1] - rows[-2]) if len(rows) > 1 else 0.0
        beyond_s = slope * np.maximum(0, num_rows - rows[-1])
        seconds: Floats = (np.interp(num_rows, rows, column) + beyond_s) * self._machine
        return seconds

    def rows_beside_prompts(self, num_rows: int, context: int) -> int:
        """The most rows that drafts may add to a step of so many rows that reads a prompt."""
        seconds = self.costs_s(num_rows + np.arange(_BUCKETS[-1]), context)
        return int(np.searchsorted(seconds, (1.0 + _FIRST_TOKEN_DELAY) * seconds[0], side="right")) - 1

    def least_row_s(self, low: int, high: int, context: int) -> float:
        """The least seconds that one row adds between `low` and `high` rows; 0 if they are equal."""
        rows, column = self._rows, self._seconds[self._nearest(context)]
        if low >= high or low < rows[0] or len(rows) == 1:
            return 0.0
        first = min(max(0, bisect_right(rows, low) - 1), len(rows) - 2)  # beyond the last bucket the last slope goes on
        end = max(first + 1, min(bisect_left(rows, high), len(rows) - 1))
        return self._machine * min((column[i + 1] - column[i]) / (rows[i + 1] - rows[i]) for i in range(first, end))

    def node_s(self, num_rows: int, num_nodes: int, context: int, seconds: float) -> float:
        """A drafted node's part of a forward that took so many seconds; 0 without nodes. `num_rows`: nodes included."""
        rest = self.cost_s(num_rows - num_nodes, context) / self.cost_s(num_rows, context)
        return seconds * (1.0 - rest) / max(1, num_nodes)

    def refine(self, num_rows: int, context: int, seconds: float) -> None:
        """Learn from the seconds of a forward. More rows than were measured at start correct their own sizes alone."""
        if num_rows > self._rows[-1]:
            return
        nearest, at = self._nearest(context), bisect_left(self._rows, num_rows)
        ratio = min(2.0, max(0.5, seconds / self.cost_s(num_rows, context)))
        used = {at, at - 1} if at > 0 and self._rows[at] != num_rows else {at}
        corrections, is_chunk = self._corrections[nearest], num_rows > _MOST_MEASURED
        self._machine *= 1.0 if is_chunk else ratio**_MACHINE_WEIGHT
        for i, size in enumerate(self._rows):
            if (size > _MOST_MEASURED) == is_chunk:  # chunks of prompts compute no logits
                learned = corrections[i] * (ratio**_SIZE_WEIGHT if i in used else 1.0)
                if (learned > 1.0) != (i in used):
                    learned **= 1.0 - _FORGOTTEN_SHARE
                corrections[i] = min(_MOST_CORRECTION, max(1 / _MOST_CORRECTION, learned))
        self._seconds[nearest] = _rising([s * c for s, c in zip(self._measured[nearest], corrections, strict=True)])

    def _nearest(self, context: int) -> int:
        return self._contexts[bisect_left(self._borders, context)]


class StepPlan:
    """The trees of some of one step's sequences, and the objective for all.

    `places`: the B sequences that get trees, by default all; `num_prompt_rows`: rows of prompts in the same step; `spare_rows`:
    the most nodes. Shape: trusts float64 [B, drafters].
    """

    def __init__(
        self,
        costs: CostTable,
        sequences: SequenceOf[SequenceView],
        num_prompt_rows: int,
        spare_rows: int,
        trusts: Floats,
        places: SequenceOf[int] | None = None,
    ) -> None:
        self.sequences = sequences if places is None else [sequences[i] for i in places]
        self._every, self.spare_rows = sequences, spare_rows
        self._num_without_tree = len(sequences) - len(self.sequences)
        self.trees = StepTrees([s.tokens[-1] for s in self.sequences], trusts)
        self._costs, self._num_rows = costs, len(sequences) + num_prompt_rows
        self._context = max(len(s.tokens) for s in sequences)
        self.longest = [s.most_tokens - 1 for s in self.sequences]
        """Levels of each sequence's tree at most: the last token of a step is the target's own."""
        self.own_s = costs.cost_s(len(sequences), self._context)
        """Seconds of the sequences' own tokens."""
        row_s = costs.least_row_s(self._num_rows, self._num_rows + spare_rows, self._context)
        self.least_prob = row_s * len(sequences) / self.own_s
        """The probability below which a node's path raises no rate, whatever else is drafted: the price of the cheapest row."""

    def token_s(self) -> float:
        """Seconds a token takes with the trees so far."""
        return self.own_s / self._num_promised()

    def _num_promised(self) -> float:
        return float(self.trees.promised.sum()) + self._num_without_tree

    def saved_s(self, gains: SequenceOf[float]) -> float:
        """Seconds that further accepted tokens save; `gains` has one number for each sequence that gains.

        All sequences wait for the slowest: whole steps are saved only where every unfinished sequence gains, and then by the
        least gain. Otherwise a sequence saves its own row alone.
        """
        count = len(self._every)
        one_s = self._costs.cost_s(1, self._context)
        row_s = (self.own_s - one_s) / (count - 1) if count > 1 else 0.0
        together = min(gains) if gains and len(gains) == sum(s.most_tokens > 1 for s in self._every) else 0.0
        return (sum(gains) * row_s + together * (self.own_s - count * row_s)) / (self._num_promised() / count)

    def fit(self, most: Ints, is_whole: Mask) -> None:
        """Cut the trees to the best set of at most `spare_rows` nodes, `most` of each tree. Shapes: int64 [B], bool [B].

        Whole trees keep all these nodes, their share of the rows at most: to leave out a node of a tree drawn by chance because
        of the tokens drawn below it would change the distribution of the output.
        """
        if num_whole := int(is_whole.sum()):
            most = np.where(is_whole, np.minimum(most, self.spare_rows // num_whole), most)
        num_nodes = min(int(self.trees.counts.sum()) - len(most), self.spare_rows)
        seconds = self._costs.costs_s(self._num_rows + np.arange(num_nodes + 1), self._context)
        others_s = self._costs.cost_s(max(1, len(self._every) - num_whole), self._context)
        self.trees.cut(most, is_whole, len(self._every) - num_whole, others_s, seconds)


def _extrapolated(rows: SequenceOf[int], seconds: SequenceOf[float], further: SequenceOf[int]) -> list[float]:
    """The line through the last measurement and that of half its rows, continued: two neighbours are too close for a slope."""
    half = bisect_left(rows, rows[-1] / 2)
    slope = (seconds[-1] - seconds[half]) / (rows[-1] - rows[half]) if rows[half] < rows[-1] else 0.0
    return [seconds[-1] + max(0.0, slope) * (n - rows[-1]) for n in further]


def _rising(seconds: SequenceOf[float]) -> list[float]:
    """The largest rising sequence under the measurements: noise only adds."""
    return list(itertools.accumulate(reversed(seconds), min))[::-1]

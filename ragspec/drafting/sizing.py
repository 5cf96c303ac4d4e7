"""How large each tree may be: nodes are taken while the step's expected tokens per second rise."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from ragspec.drafting.costs import CostTable
from ragspec.drafting.drafter import Drafted
from ragspec.tree import DraftTree


class Sizing:
    """Cuts trees by what a forward costs. `is_fixed`: trees keep their size, whatever it costs."""

    def __init__(self, costs: CostTable, is_fixed: bool = False) -> None:
        self._costs, self._fixed = costs, is_fixed

    def note_cost(self, num_rows: int, context: int, seconds: float) -> None:
        """What a step's forward took."""
        self._costs.refine(num_rows, context, seconds)

    def fit(
        self, sequences: SequenceOf[Drafted], trees: list[DraftTree], num_other_rows: int, spare_rows: int
    ) -> list[DraftTree]:
        """The trees that pay, of at most `spare_rows` nodes together."""
        if self._fixed:
            return self._fixed_size(trees, spare_rows)
        return self._fitted(sequences, trees, num_other_rows, spare_rows)

    def rows_s(self, sequences: SequenceOf[Drafted], num_nodes: int) -> float:
        """Seconds that so many nodes add to a step."""
        context = max(len(s.tokens) for s in sequences)
        return self._costs.cost_s(len(sequences) + num_nodes, context) - self._costs.cost_s(len(sequences), context)

    def saved_s(self, sequences: SequenceOf[Drafted], trees: SequenceOf[DraftTree], gains: SequenceOf[float]) -> float:
        """Seconds that so many more accepted tokens save, of some sequences or of all of them.

        Sequences side by side: a step fewer is saved only where the slowest of them needs one fewer; others save their row.
        Those that end with this step wait for nothing.
        """
        count, context = len(trees), max(len(s.tokens) for s in sequences)
        step_s = self._costs.cost_s(count, context)
        row_s = (step_s - self._costs.cost_s(1, context)) / (count - 1) if count > 1 else 0.0
        together = min(gains) if gains and len(gains) == sum(s.most_tokens > 1 for s in sequences) else 0.0
        expected = 1.0 + sum(sum(tree.path_probs[1:]) for tree in trees) / count
        return (sum(gains) * row_s + together * (step_s - count * row_s)) / expected

    def token_s(self, sequences: SequenceOf[Drafted], trees: list[DraftTree]) -> float:
        """Seconds a token takes with what is drafted so far."""
        expected = len(trees) + sum(sum(tree.path_probs[1:]) for tree in trees)
        return self._costs.cost_s(len(trees), max(len(s.tokens) for s in sequences)) / expected

    def _fixed_size(self, trees: list[DraftTree], spare_rows: int) -> list[DraftTree]:
        return [tree.best(min(tree.num_drafted, spare_rows // len(trees))) for tree in trees]

    def _fitted(
        self, sequences: SequenceOf[Drafted], trees: list[DraftTree], num_other_rows: int, spare_rows: int
    ) -> list[DraftTree]:
        """Cut to what pays, but for trees that were drawn by chance: to leave a node out for what was drawn below it would shift
        the law of the output."""
        drawn = [i for i, tree in enumerate(trees) if tree.draws]
        if not drawn:
            return self._cut(sequences, trees, num_other_rows, spare_rows)
        for i in drawn:
            trees[i] = trees[i].best(spare_rows // len(drawn))
        kept_rows = sum(trees[i].num_drafted for i in drawn)
        others = [i for i in range(len(trees)) if i not in drawn]
        if others:
            own = [sequences[i] for i in others], [trees[i] for i in others]
            rows = num_other_rows + kept_rows + len(drawn)
            for i, tree in zip(others, self._cut(*own, rows, spare_rows - kept_rows), strict=True):
                trees[i] = tree
        return trees

    def _cut(
        self, sequences: SequenceOf[Drafted], trees: list[DraftTree], num_other_rows: int, spare_rows: int
    ) -> list[DraftTree]:
        """Nodes by probability while expected tokens a second rise. Rows of prompts are paid for anyway and count for nothing."""
        context = max(len(s.tokens) for s in sequences)
        probs = sorted((p for tree in trees for p in tree.path_probs[1:]), reverse=True)[:spare_rows]
        rows = len(sequences) + num_other_rows
        expected = float(len(sequences))
        sunk_s = self._costs.cost_s(rows, context) - self._costs.cost_s(len(sequences), context)
        best_rate, best = expected / self._costs.cost_s(len(sequences), context), 0
        for n, prob in enumerate(probs, 1):
            expected += prob
            rate = expected / (self._costs.cost_s(rows + n, context) - sunk_s)
            if rate > best_rate:
                best_rate, best = rate, n
        if best == 0:
            return [tree.best(0) for tree in trees]
        if best == sum(tree.num_drafted for tree in trees):
            return trees
        return _split_budget(trees, probs[best - 1], best)


def _split_budget(trees: list[DraftTree], threshold: float, num_nodes: int) -> list[DraftTree]:
    """Each tree keeps its nodes above the threshold; nodes at it fill what is left, first trees first."""
    above = [sum(p > threshold for p in tree.path_probs[1:]) for tree in trees]
    at = [sum(p == threshold for p in tree.path_probs[1:]) for tree in trees]
    left = num_nodes - sum(above)
    kept = []
    for tree, high, equal in zip(trees, above, at, strict=True):
        extra = min(left, equal)
        left -= extra
        kept.append(tree.best(high + extra))
    return kept

"""A planner that keeps trees of a fixed size, to measure drafters apart from the cost model."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from ragspec.drafting.cost_model import StepCost
from ragspec.drafting.drafter import SequenceView
from ragspec.drafting.planner import Planner
from ragspec.drafting.safe_drafter import SafeDrafter
from ragspec.tree import DraftTree


class _FreeStep(StepCost):
    """Time does not count: every draft saves time, and no tree is cut for its cost."""

    def token_s(self, trees: SequenceOf[DraftTree]) -> float:
        return 0.0

    def saved_s(self, trees: SequenceOf[DraftTree], gains: SequenceOf[float]) -> float:
        return 1e9 * len(gains)

    def fit(self, trees: list[DraftTree], spare_rows: int) -> list[DraftTree]:
        return [tree.best(min(tree.num_drafted, spare_rows // len(trees))) for tree in trees]


class FixedTreePlanner(Planner):
    """Asks every drafter in every step and keeps the best `max_tree_nodes` nodes of each tree, whatever they cost."""

    step_cost = _FreeStep

    def is_due(self, drafter: SafeDrafter, sequence: SequenceView) -> bool:
        return True

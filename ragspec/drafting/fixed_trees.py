"""A planner whose trees have a fixed number of nodes, whatever they cost: it compares drafters apart from the cost model.

>>> planner = FixedTreePlanner([drafter], costs, max_tree_nodes=16)
"""

from __future__ import annotations

from collections.abc import Sequence

from ragspec.drafting.cost_model import StepPlan
from ragspec.drafting.drafter import SequenceView
from ragspec.drafting.planner import Planner
from ragspec.drafting.safe_drafter import SafeDrafter
from ragspec.tree import DraftTree


class _FreeStep(StepPlan):
    """Time does not count: every draft saves time, and no tree is cut for its cost."""

    def token_s(self) -> float:
        return 0.0

    def saved_s(self, gains: Sequence[float]) -> float:
        return 1e9 * len(gains)

    def least_prob(self, spare_rows: int) -> float:
        return 0.0

    def fit(self, spare_rows: int) -> list[DraftTree]:
        return [tree.best(min(tree.num_drafted, spare_rows // len(self.trees))) for tree in self.trees]


class FixedTreePlanner(Planner):
    """Asks every drafter in every step and keeps the best `max_tree_nodes` nodes of each tree, whatever they cost."""

    step_plan = _FreeStep

    def is_due(self, drafter: SafeDrafter, sequence: SequenceView) -> bool:
        return True

    def limited(self, tree: DraftTree, sequence: SequenceView) -> DraftTree:
        return tree.best(self._max_nodes)

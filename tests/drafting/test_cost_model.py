"""What a draft saves, of sequences side by side."""

from __future__ import annotations

import numpy as np
import pytest
from planner_parts import FREE, Running

from ragspec.drafting.cost_model import CostTable, StepPlan


def saved(gains: list[float], *most_tokens: int, costs: CostTable = FREE, share: float = 1.0) -> float:
    sequences = [Running(str(i), most_tokens=most) for i, most in enumerate(most_tokens)]
    return StepPlan(costs, sequences, 0, share).saved_s(gains)


def test_the_slowest_decides_what_is_saved() -> None:
    """A draft for one of two was taken for half a step saved, though the other needs that step all the same."""
    assert saved([2.0, 1.0], 100, 100) == pytest.approx(1.0)
    assert saved([2.0], 100, 100) == 0.0


def test_one_that_ends_now_holds_nobody_back() -> None:
    """A sequence at its last token, which cannot be drafted for, ended drafting for all beside it."""
    assert saved([2.0], 100, 1) == pytest.approx(2.0)
    assert saved([], 1, 1) == 0.0


def test_where_steps_read_prompts_anyway_rows_are_saved_alone() -> None:
    """A draft for all was worth whole steps that the prompts beside them needed, and a draft for one less than its row."""
    linear = CostTable({64: [9.0, 10.0, 40.0]}, rows=(1, 2, 32))  # 8 and 1 a row
    several = [100] * 4
    assert saved([3.0], *several, costs=linear, share=4 / 12) == pytest.approx(3.0)
    assert saved([3.0] * 4, *several, costs=linear, share=4 / 12) == pytest.approx(12.0)
    assert saved([3.0] * 4, *several, costs=linear) == pytest.approx(36.0)


def test_the_cheapest_further_row_is_that_of_the_table() -> None:
    """A cheaper row was overlooked, and nodes that pay were left out."""
    rng, rows = np.random.default_rng(0), (1, 2, 4, 8, 16, 24)
    for _ in range(200):
        costs = CostTable({64: np.cumsum([5, *rng.integers(0, 3, 5)]).tolist()}, rows)
        low = int(rng.integers(1, 30))
        high = low + int(rng.integers(0, 20))
        every = [costs.cost_s(n + 1, 64) - costs.cost_s(n, 64) for n in range(low, high)]
        assert costs.least_row_s(low, high, 64) == pytest.approx(min(every, default=0.0))

"""What a draft saves, of sequences side by side."""

from __future__ import annotations

import pytest
from test_planner import FREE, Running

from ragspec.drafting.cost_model import StepPlan


def saved(gains: list[float], *most_tokens: int) -> float:
    sequences = [Running(str(i), most_tokens=most) for i, most in enumerate(most_tokens)]
    return StepPlan(FREE, sequences, 0).saved_s(gains)


def test_the_slowest_decides_what_is_saved() -> None:
    """A draft for one of two was taken for half a step saved, though the other needs that step all the same."""
    assert saved([2.0, 1.0], 100, 100) == pytest.approx(1.0)
    assert saved([2.0], 100, 100) == 0.0


def test_one_that_ends_now_holds_nobody_back() -> None:
    """A sequence at its last token, which cannot be drafted for, ended drafting for all beside it."""
    assert saved([2.0], 100, 1) == pytest.approx(2.0)
    assert saved([], 1, 1) == 0.0

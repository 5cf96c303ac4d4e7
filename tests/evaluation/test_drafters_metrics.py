"""What counters say about a drafter, on counters made by hand."""

from __future__ import annotations

import pytest

from ragspec.core import GenerationStats
from ragspec.evaluation.suites.drafters.runs import (
    acceptance_length,
    drafting_row,
    pooled_positions,
    position_acceptance,
    repeated_share,
)


def stats(**counters: object) -> GenerationStats:
    return GenerationStats(**counters)  # type: ignore[arg-type]


def test_the_prompts_step_is_no_decode_step() -> None:
    """Bug guarded: a head that cannot draft in the prompt's step, or a copy that does, measured with that step."""
    first = stats(num_output_tokens=10, num_first_tokens=4, num_steps=3)
    second = stats(num_output_tokens=5, num_first_tokens=1, num_steps=5)
    assert acceptance_length([first]) == 3.0
    assert acceptance_length([first, second]) == pytest.approx(10 / 6), "pooled over steps, not averaged over outputs"
    assert acceptance_length([stats(num_output_tokens=1, num_first_tokens=1, num_steps=1)]) is None
    assert acceptance_length([]) is None


def test_positions_of_all_outputs_are_added_up_by_drafter_and_depth() -> None:
    """Bug guarded: a shorter list that cuts the longer one, or drafters mixed up."""
    first = stats(positions={"eagle": ((10, 8), (8, 4)), "copy": ((3, 1),)})
    second = stats(positions={"eagle": ((5, 5), (5, 1), (1, 1))})
    assert pooled_positions([first, second]) == {"eagle": [(15, 13), (13, 5), (1, 1)], "copy": [(3, 1)]}
    assert pooled_positions([second, first])["eagle"] == [(15, 13), (13, 5), (1, 1)]
    assert first.positions["eagle"] == ((10, 8), (8, 4)), "what was given is not changed"


def test_acceptance_of_a_position_is_of_the_steps_that_reached_it() -> None:
    """Bug guarded: shares of all steps, which fall with depth whatever the head does."""
    assert position_acceptance([(10, 8), (8, 8), (4, 1), (0, 0)]) == [0.8, 1.0, 0.25, None]


def test_only_chains_have_an_n_alpha_and_drafting_is_paid_a_step() -> None:
    """Bug guarded: n-alpha of a tree, whose siblings help; milliseconds an output instead of a step."""
    counters = {"num_output_tokens": 9, "num_first_tokens": 1, "num_steps": 5, "num_drafted": 20, "draft_s": 0.01}
    known = [stats(**counters, positions={"eagle": ((4, 3), (3, 1))}, accepted_by_drafter={"eagle": 4})] * 2
    chain, tree = drafting_row(known, True), drafting_row(known, False)
    assert chain["n_alpha"] == {"eagle": [0.75, pytest.approx(1 / 3)]} and tree["n_alpha"] is None
    assert tree["pos_acc"] == chain["n_alpha"] and tree["pos_reached"] == {"eagle": [8, 6]}
    assert chain["draft_ms"] == pytest.approx(2.0)
    assert chain["drafted_a_step"] == 4.0 and chain["acceptance_length"] == 2.0
    assert chain["accepted_by_drafter"] == {"eagle": 8}


def test_an_output_in_circles_is_found_out() -> None:
    """Bug guarded: "loops" found in text that does not repeat, or only where the circle starts at once."""
    circle = [*range(100, 110), *([1, 2, 3] * 10)]
    assert repeated_share([list(range(40))]) == 0.0
    assert repeated_share([circle]) == pytest.approx(20 / 40), "of 30 tokens, the first 3 + 7 still show something new"
    assert repeated_share([list(range(40)), circle]) == pytest.approx(20 / 80)
    assert repeated_share([]) == 0.0

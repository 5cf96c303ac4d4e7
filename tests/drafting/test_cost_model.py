"""What steps cost, and what a draft saves of sequences side by side."""

import numpy as np
import pytest
from planner_parts import FREE, Running

from ragspec.drafting.cost_model import CostTable, StepPlan
from ragspec.tree import Origin, Proposal, Proposals


def saved(gains: list[float], *most_tokens: int, costs: CostTable = FREE) -> float:
    sequences = [Running(str(i), most_tokens=most) for i, most in enumerate(most_tokens)]
    return StepPlan(costs, sequences, 0, 99, np.ones((len(sequences), 1))).saved_s(gains)


def test_the_slowest_decides_what_is_saved() -> None:
    """A draft for one of two was taken for half a step saved, though the other needs that step all the same."""
    assert saved([2.0, 1.0], 100, 100) == pytest.approx(1.0)
    assert saved([2.0], 100, 100) == 0.0


def test_one_that_ends_now_holds_nobody_back() -> None:
    """A sequence at its last token, which cannot be drafted for, ended drafting for all beside it."""
    assert saved([2.0], 100, 1) == pytest.approx(2.0)
    assert saved([], 1, 1) == 0.0


def test_the_cheapest_further_row_is_that_of_the_table() -> None:
    """A cheaper row was overlooked, and nodes that pay were left out."""
    rng, rows = np.random.default_rng(0), (1, 2, 4, 8, 16, 24)
    for _ in range(200):
        costs = CostTable({64: np.cumsum([5, *rng.integers(0, 3, 5)]).tolist()}, rows)
        low = int(rng.integers(1, 30))
        high = low + int(rng.integers(0, 20))
        every = [costs.cost_s(n + 1, 64) - costs.cost_s(n, 64) for n in range(low, high)]
        assert costs.least_row_s(low, high, 64) == pytest.approx(min(every, default=0.0))


def test_costs_rise_and_are_read_between_the_measurements() -> None:
    """A noisy measurement makes more rows cheaper than fewer, and the planner drafts for their sake."""
    costs = CostTable({100: [3.0, 2.0, 4.0], 1000: [5.0, 6.0, 8.0]}, rows=(1, 4, 8))
    assert costs.cost_s(1, 100) == costs.cost_s(4, 0) == 2.0
    assert costs.cost_s(6, 100) == pytest.approx(3.0)
    assert costs.cost_s(12, 100) == pytest.approx(6.0)
    assert costs.cost_s(8, 10**6) == 8.0
    values = [costs.cost_s(n, 100) for n in range(1, 40)]
    assert values == sorted(values)


def test_costs_of_many_rows_are_extrapolated_without_a_forward() -> None:
    """Chains of hundreds of nodes need the costs of such steps, and a start that measured them would take seconds longer."""
    asked: list[int] = []

    def forward_s(num_rows: int, context: int) -> float:
        asked.append(num_rows)
        return 10.0 + num_rows + (0.9 if num_rows == 96 else 0.0)

    costs = CostTable.measure(forward_s, [100], 512)
    assert max(asked) == 128
    assert costs.cost_s(512, 100) == pytest.approx(10.0 + 512.0, rel=0.02), "one neighbour's error is not multiplied"
    for _ in range(15):
        costs.refine(512, 100, 300.0)
    chunk_s = costs.cost_s(512, 100)
    assert chunk_s < 420.0
    for _ in range(15):
        costs.refine(200, 100, 190.0)
    assert costs.cost_s(128, 100) == pytest.approx(138.0), "what whole chunks of prompts cost says nothing about trees"
    before = costs.cost_s(1, 100)
    costs.refine(1, 100, before)
    assert costs.cost_s(512, 100) == pytest.approx(chunk_s), "and a step that takes as long as expected changes nothing"


def test_costs_follow_what_steps_take() -> None:
    """A table measured at start that never learns what the machine has become, or that one slow step turns over."""
    costs = CostTable({100: [1.0, 2.0, 4.0], 1000: [5.0, 6.0, 8.0]}, rows=(1, 4, 8))
    costs.refine(4, 100, 1000.0)
    assert 2.0 < costs.cost_s(4, 100) < 2.2
    for _ in range(400):
        costs.refine(4, 100, 2.4)
        costs.refine(8, 100, 3.6)
    assert costs.cost_s(4, 100) == pytest.approx(2.4, rel=0.05)
    assert costs.cost_s(8, 100) == pytest.approx(3.6, rel=0.05)
    values = [costs.cost_s(n, 100) for n in range(1, 40)]
    assert values == sorted(values)


def test_a_slower_machine_is_slower_in_steps_of_every_size() -> None:
    """Sizes and contexts not in use kept the costs of the machine before other load came."""
    costs = CostTable({100: [1.0, 2.0, 4.0], 1000: [5.0, 6.0, 8.0]}, rows=(1, 4, 8))
    for _ in range(100):
        costs.refine(4, 100, 2.4)
    assert costs.cost_s(8, 100) == pytest.approx(4.6, rel=0.05)
    assert costs.cost_s(4, 1000) == pytest.approx(6.9, rel=0.05)


def test_plain_steps_do_not_forget_what_steps_with_drafts_cost() -> None:
    """Plain steps cost a fifth more than the forwards at start, drafts do not: one plain answer made drafts a fifth dearer."""
    costs = CostTable({100: [10.0, 11.0, 12.0]}, rows=(1, 4, 8))
    for _ in range(4):
        for num_rows, seconds in ((8, 12.0), (1, 12.0)):
            for _ in range(100):
                costs.refine(num_rows, 100, seconds)
    assert costs.cost_s(1, 100) == pytest.approx(12.0, rel=0.01)
    assert costs.cost_s(8, 100) < 13.2


def test_a_bad_spell_of_large_trees_is_forgotten() -> None:
    """Costs inflated by other load kept every tree away for good: what is not tried is not measured again."""
    costs = CostTable({100: [1.0, 1.1, 1.2]}, rows=(1, 4, 8))
    for _ in range(100):
        costs.refine(8, 100, 50.0)
    assert costs.cost_s(8, 100) > 10.0
    for _ in range(600):
        costs.refine(1, 100, 1.0)
    assert costs.cost_s(8, 100) < 1.5


def test_a_forward_of_more_rows_than_the_table_has_says_nothing() -> None:
    """The line beyond the last size is a guess, and its errors made the last sizes wrong."""
    costs = CostTable({100: [1.0, 2.0, 4.0]}, rows=(1, 4, 8))
    for _ in range(50):
        costs.refine(12, 100, 3.0)
    assert [costs.cost_s(n, 100) for n in (1, 4, 8)] == [1.0, 2.0, 4.0]
    single = CostTable({100: [1.0]}, rows=(1,))
    single.refine(1, 100, 2.0)
    assert 1.0 < single.cost_s(5, 100) < 2.0


def test_no_node_that_pays_is_less_probable_than_the_least_probability() -> None:
    """A drafter left out nodes that the best set of nodes holds."""
    rng = np.random.default_rng(0)
    num_cut = 0
    for _ in range(300):
        costs = CostTable(
            {64: np.cumsum(rng.exponential(1.0, 6) * (3, 1, 1, 1, 1, 1)).tolist()}, rows=(1, 2, 4, 8, 12, 16)
        )
        running, num_prompt_rows = [Running(str(n)) for n in range(3)], int(rng.integers(0, 4))
        step = StepPlan(costs, running, num_prompt_rows, 12, np.ones((3, 1)))
        chances = rng.dirichlet([0.3] * 4, 3)
        drafts = [[Proposal(10 + n, -1, prob, Origin("a")) for n, prob in enumerate(own)] for own in chances]
        limits = np.full(3, 99), 99, np.zeros(3, np.bool_)
        step.trees.merge(range(3), Proposals.of("a", drafts), 0, limits)
        least_prob, probs = step.least_prob, chances.ravel().tolist()
        step.fit(np.full(3, 99), np.zeros(3, np.bool_))
        kept = [prob for tree in step.trees.trees(["a"]) for prob in tree.path_probs[1:]]
        num_cut += sum(prob < least_prob for prob in probs)
        assert all(prob >= least_prob * (1.0 - 1e-9) for prob in kept)
    assert num_cut > 500

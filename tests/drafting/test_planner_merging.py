"""The planner where drafters or sequences meet: what one of them takes, or has already said, counts for the others."""

import pytest
from planner_parts import BY_RULE, FREE, Chain, Costly, Drawn, Running, accept, plan, run

from ragspec.drafting.cost_model import CostTable
from ragspec.drafting.drafter import SequenceView
from ragspec.drafting.planner import Planner
from ragspec.speculation import Speculation
from ragspec.tree import Proposal

NUM_STEPS = 200


class Halving(Chain):
    """Half as sure of each token as of the one before."""

    def draft(self, sequence: SequenceView, max_nodes: int) -> list[Proposal]:
        return [p._replace(path_prob=self.prob / 2**i) for i, p in enumerate(super().draft(sequence, max_nodes))]


def drawn_and_chosen(costs: CostTable, spare: int = 100) -> tuple[int, int]:
    """How many nodes a drawn tree of four has after the cut, and a chosen one in the same step."""
    planner = Planner([Drawn(range(10, 14), 0.3)], costs, 12, vocab_size=300)
    drawn, chosen = plan(planner, Running("drawn", speculation=BY_RULE), Running("chosen"), spare=spare)
    assert drawn.draws and not chosen.draws
    return drawn.num_drafted, chosen.num_drafted


@pytest.mark.parametrize(("num_free_rows", "num_chosen"), [(6, 0), (7, 1), (9, 3), (10, 4)])
def test_rows_of_a_drawn_tree_are_not_free_for_the_others_too(num_free_rows: int, num_chosen: int) -> None:
    """A tree that is never cut took five rows, and the next sequence drafted as if the step were empty."""
    costs = CostTable({64: [1.0, 1.0, 2.0]}, rows=(1, num_free_rows, num_free_rows + 1))
    assert drawn_and_chosen(costs) == (4, num_chosen)


def test_a_drawn_tree_and_the_others_share_the_spare_rows() -> None:
    """More nodes than the step has room for."""
    assert drawn_and_chosen(FREE, spare=6) == (4, 2)


def test_a_costly_drafter_is_asked_for_the_sequences_in_which_it_is_right() -> None:
    """What it gains on the average decided for all: time was spent on a sequence in which it is never right."""
    drafter = Costly(range(10, 14), 0.9, seconds=0.4)
    costs = CostTable({64: [1.0, 1.6, 1.7]}, rows=(1, 2, 20))  # a row less is worth something, nodes are cheap
    planner, right, wrong = Planner([drafter], costs, 12), Running("right"), Running("wrong")
    for _ in range(NUM_STEPS):
        first, second = plan(planner, right, wrong)
        accept(planner, right, first, range(10, 14))
        accept(planner, wrong, second, ())
    assert drafter.asked_for["right"] > 0.9 * NUM_STEPS
    assert drafter.asked_for["wrong"] < 0.3 * NUM_STEPS


def test_each_request_is_drafted_for_by_the_head_that_is_right_in_it() -> None:
    """The head named first drafted for all requests, since a second head adds little beside it; or both took their time."""
    heads = [Costly(range(10, 14), 0.9, 0.1, "first"), Costly(range(20, 24), 0.9, 0.1, "second")]
    planner, one, other = Planner(heads, FREE, 12), Running("one"), Running("other")
    for sequence, right_tokens in ((one, range(10, 14)), (other, range(20, 24))):
        for _ in range(NUM_STEPS):
            (tree,) = plan(planner, sequence)
            assert tree.num_drafted <= 4  # of one head
            accept(planner, sequence, tree, right_tokens)
    first, second = (head.asked_for for head in heads)
    assert first["one"] > 0.85 * NUM_STEPS > 0.15 * NUM_STEPS > second["one"] > 1
    assert second["other"] > 0.85 * NUM_STEPS > 0.15 * NUM_STEPS > first["other"] > 1


def test_requests_side_by_side_have_the_head_that_is_right_in_each_if_both_pay() -> None:
    """The head of most worth drafted for all, and sequences in which another head is right for nothing."""
    heads = [Costly(range(10, 14), 0.9, 0.1, "first"), Costly(range(20, 24), 0.9, 0.1, "second")]
    costs = CostTable({64: [1.0, 1.6, 1.7]}, rows=(1, 3, 20))  # a row less is worth something, nodes are cheap
    planner, sequences = Planner(heads, costs, 12), [Running(name) for name in "abc"]
    for _ in range(NUM_STEPS):
        for number, tree in enumerate(plan(planner, *sequences)):
            accept(planner, sequences[number], tree, range(10, 14) if number == 0 else range(20, 25))
    assert heads[0].asked_for["a"] > 0.8 * NUM_STEPS > 0.2 * NUM_STEPS > heads[1].asked_for["a"]
    assert heads[1].asked_for["b"] == heads[1].asked_for["c"] > 0.8 * NUM_STEPS


def test_a_request_may_name_its_head() -> None:
    """The choice among heads passed over the request's own."""
    heads = [Costly(range(10, 14), 0.9, 0.1, "first"), Costly(range(20, 24), 0.9, 0.1, "second")]
    planner, named = Planner(heads, FREE, 12), Running("named", speculation=Speculation(("second",)))
    run(planner, named, range(20, 24), 20)
    assert heads[1].asked_for["named"] == 20 and not heads[0].asked_for


@pytest.mark.parametrize(("num_known", "is_asked"), [(4, False), (1, True)])
def test_what_others_guessed_too_is_no_gain_of_a_costly_drafter(num_known: int, is_asked: bool) -> None:
    """A head was paid for tokens that a copy had proposed for nothing, because it was surer of them."""
    cheap, costly = Halving(range(10, 10 + num_known), 0.95, "cheap"), Costly(range(10, 14), 0.9, seconds=0.15)
    planner, sequence = Planner([cheap, costly], FREE, 12), Running()
    run(planner, sequence, range(10, 14), NUM_STEPS)
    share = costly.asked_for["a"] / NUM_STEPS
    assert share > 0.9 if is_asked else share < 0.3


def test_a_head_that_does_not_pay_is_tried_for_a_hundredth_of_the_time() -> None:
    """A trial cost as much whatever a draft takes; or there was none, and a head that had become right was never found."""
    for seconds in (2.0, 20.0):
        head = Costly(range(10, 14), 0.9, seconds)
        run(Planner([head], FREE, 12), Running(), (), 10_000)
        assert 0.5 < head.asked * seconds / 100 < 1.5
    good = Costly(range(10, 14), 0.9, 0.1)
    run(Planner([good], FREE, 12), Running(), range(10, 14), NUM_STEPS)
    assert good.asked == NUM_STEPS


@pytest.mark.parametrize(("num_copied", "num_free"), [(12, 1), (12, 2), (30, 4), (8, 4)])
def test_a_head_that_pays_beside_no_copy_drafts_as_soon_as_a_copy_ends(num_copied: int, num_free: int) -> None:
    """The pause of the copied steps went on."""
    copies, head = Chain(range(10, 20), 0.97, "copy"), Costly(range(50, 54), 0.9, 0.4, "head")
    planner, sequence, asked = Planner([copies, head], FREE, 12), Running(), list[bool]()
    for step in range(10 * (num_copied + num_free)):
        is_free = step % (num_copied + num_free) >= num_copied
        copies.tokens = () if is_free else range(10, 20)
        before = head.asked_for["a"]
        (tree,) = plan(planner, sequence)
        accept(planner, sequence, tree, range(50, 54) if is_free else range(10, 20))
        asked += [head.asked_for["a"] > before] if is_free else []
    assert all(asked)

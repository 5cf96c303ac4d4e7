"""The planner where drafters or sequences meet: what one of them takes, or has already said, counts for the others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from planner_parts import FREE, Chain, Costly, Running, accept, plan, run

from ragspec.drafting.children import draws_children
from ragspec.drafting.cost_model import CostTable
from ragspec.drafting.drafter import SequenceView
from ragspec.drafting.drafter_stats import DrafterStats, Pause
from ragspec.drafting.planner import Planner
from ragspec.speculation import AcceptanceRule, Speculation
from ragspec.tree import Draw, Proposal

LAW = np.full(300, 1 / 300)
NUM_STEPS = 200


class ChildSampler(Chain):
    """Draws its chain by chance where the request's rule is for such drafts."""

    def draft(self, sequence: SequenceView, max_nodes: int) -> list[Proposal]:
        chain = super().draft(sequence, max_nodes)
        return [p._replace(draw=Draw((p.token_id,), LAW)) for p in chain] if draws_children(sequence) else chain


class Halving(Chain):
    """Half as sure of each token as of the one before."""

    def draft(self, sequence: SequenceView, max_nodes: int) -> list[Proposal]:
        return [p._replace(path_prob=self.prob / 2**i) for i, p in enumerate(super().draft(sequence, max_nodes))]


def drawn_and_chosen(costs: CostTable, spare: int = 100) -> tuple[int, int]:
    """How many nodes a drawn tree of four has after the cut, and a chosen one in the same step."""
    planner = Planner([ChildSampler(range(10, 14), 0.3)], costs, 12, vocab_size=300)
    by_rule = Running("drawn", speculation=Speculation(rule=AcceptanceRule.TRAVERSAL))
    drawn, chosen = plan(planner, by_rule, Running("chosen"), spare=spare)
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


class Head(Costly):
    is_head = True


def test_each_request_is_drafted_for_by_the_head_that_is_right_in_it() -> None:
    """The head named first drafted for all requests, since a second head adds little beside it; or both took their time."""
    heads = [Head(range(10, 14), 0.9, 0.1, "first"), Head(range(20, 24), 0.9, 0.1, "second")]
    planner, one, other = Planner(heads, FREE, 12), Running("one"), Running("other")
    for _ in range(NUM_STEPS):
        for sequence, right_tokens in ((one, range(10, 14)), (other, range(20, 24))):
            (tree,) = plan(planner, sequence)
            assert tree.num_drafted <= 4  # of one head
            accept(planner, sequence, tree, right_tokens)
    first, second = (head.asked_for for head in heads)
    assert first["one"] > 0.85 * NUM_STEPS > 0.15 * NUM_STEPS > second["one"] > 1
    assert second["other"] > 0.85 * NUM_STEPS > 0.15 * NUM_STEPS > first["other"] > 1
    for sequence in (one, other):
        planner.finish(sequence)
    assert not planner._choices


def test_requests_side_by_side_share_the_head_that_is_right_in_most() -> None:
    """Half of a batch drafted by each of two heads saves no step, and takes the time of both."""
    heads = [Head(range(10, 14), 0.9, 0.1, "first"), Head(range(20, 24), 0.9, 0.1, "second")]
    planner, sequences = Planner(heads, FREE, 12), [Running(name) for name in "abc"]
    for _ in range(NUM_STEPS):
        for number, tree in enumerate(plan(planner, *sequences)):
            accept(planner, sequences[number], tree, range(10, 14) if number == 0 else range(20, 25))
    assert sum(heads[1].asked_for.values()) > 4 * sum(heads[0].asked_for.values())
    assert heads[1].asked_for["a"] == heads[1].asked_for["b"]


def test_a_request_may_name_its_head() -> None:
    """The choice among heads passed over the request's own."""
    heads = [Head(range(10, 14), 0.9, 0.1, "first"), Head(range(20, 24), 0.9, 0.1, "second")]
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


class Timed(Head):
    """Counts how often its time is asked for. Reads no prompt: `unread` sequences get no draft."""

    def __init__(self, seconds: float) -> None:
        super().__init__(range(10, 14), 0.9, seconds)
        self.times, self.unread = Counter[str](), set[str]()

    def cost_s(self, sequences: Sequence[SequenceView]) -> float:
        self.times[sequences[0].key[0]] += len(sequences) == 1  # once a computation
        read = [sequence for sequence in sequences if sequence.key[0] not in self.unread]
        return super().cost_s(read) if read else math.inf


def test_the_worth_of_a_head_that_does_not_pay_is_seldom_computed() -> None:
    """It was computed in every step of every sequence; or trials came later; or it did not come back when it paid."""
    head = Timed(2.0)
    planner, first = Planner([head], FREE, 12), Running("first")
    run(planner, first, (), NUM_STEPS)
    assert head.times["first"] < NUM_STEPS / 3
    assert 5 <= head.asked_for["first"] <= 7
    run(planner, first, (), 10_000)
    assert head.times["first"] < 2_600
    good = Timed(0.1)
    run(Planner([good], FREE, 12), first, range(10, 14), NUM_STEPS)
    assert good.asked_for["first"] == NUM_STEPS


def test_a_pause_of_many_sequences_is_a_pause() -> None:
    """A neighbour without speculation, or one new sequence, had the worth computed in every step for all."""
    head, num_steps = Timed(9.0), 400
    planner = Planner([head], FREE, 12)
    steady = [Running(f"steady{i}") for i in range(8)]
    for step in range(num_steps):
        plain = Running(f"plain{step // 3}", speculation=False)
        plan(planner, *steady, *([Running("late")] if step >= num_steps // 2 else []), plain)
    assert num_steps / 5 <= head.times["steady0"] < num_steps / 4
    assert not any(name.startswith("plain") for name in head.times)


def test_a_pause_ends_where_a_sequence_has_ended() -> None:
    """The last of a batch, for which a draft would have paid, ended in the pause."""
    pause, both = Pause(), {("a", 0): 0.0, ("b", 0): 0.0}
    for _ in range(20):
        pause.begin_step(both)
        pause.note(False)
    while not pause.begin_step(both):
        pass
    assert not pause.begin_step(both)
    assert pause.begin_step({("b", 0): 0.0})
    assert not pause.begin_step({("b", 0): 0.0})


def test_steps_before_a_sequence_do_not_count_for_its_trials() -> None:
    """A sequence that began in a pause was tried in its first step."""
    pause = Pause()
    for _ in range(20):
        pause.begin_step({("old", 0): 0.0})
        pause.note(False)
    while not pause.begin_step({("old", 0): 0.0}):
        pass
    assert not any(pause.begin_step({("old", 0): 0.0}) for _ in range(2))
    assert pause.begin_step({("old", 0): 0.0, ("new", 0): 0.0})
    assert pause.num_steps_of(("old", 0)) == 3 and pause.num_steps_of(("new", 0)) == 1


def test_a_new_sequence_is_looked_at_as_soon_as_its_prompt_is_read() -> None:
    """A pause that began beside another sequence went on, or its end was used up while the prompt was read."""
    for num_waited in range(6):
        head = Timed(2.0)
        planner, first, new = Planner([head], FREE, 12), Running("first"), Running("new")
        run(planner, first, (), NUM_STEPS)
        planner.start(new)
        run(planner, first, (), num_waited)
        head.unread.add("new")
        plan(planner, first, new)
        head.unread.clear()
        before = head.times["new"]
        plan(planner, first, new)
        assert head.times["new"] > before, num_waited


def test_trials_of_all_sequences_come_after_as_many_steps_with_a_pause_as_without() -> None:
    """Only the steps that were looked at counted."""
    waited = {}
    for num_steps in (1, 5):
        stats, found = DrafterStats(), list[int]()
        for step in range(0, 100, num_steps):
            if stats.joint_trial_due(num_steps):
                found.append(step)
        waited[num_steps] = found
    assert len(waited[1]) > 5 and abs(len(waited[1]) - len(waited[5])) <= 2


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

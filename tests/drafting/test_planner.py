"""The planner: everything where rows are free, nothing where they cost more than they bring, and no drafter can harm it."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from planner_parts import BY_RULE, FREE, LAW, Chain, Drawn, Running, accept, plan, run

from ragspec.core import Request
from ragspec.drafting.acceptance import (
    ACCEPTED,
    ASKED,
    EXPECTED,
    NUM_FIGURES,
    NUM_HITS,
    NUM_NODES,
    UNCOVERED,
    AcceptanceCells,
    Trust,
)
from ragspec.drafting.cost_model import CostTable
from ragspec.drafting.drafter import Drafter, SequenceView
from ragspec.drafting.planner import Planner
from ragspec.speculation import Speculation
from ragspec.tree import PARENT, TOKEN, Draw, Origin, Proposal, Proposals, StepResult

DEAR = CostTable({64: [1.0, 2.0]}, rows=(1, 2))  # every row costs a whole step more
EVEN = {64: [1.0, 1.3, 1.6, 1.9]}, (1, 2, 3, 4)
"""Every row costs 0.3 steps more."""


@pytest.mark.parametrize(("costs", "prob", "num_drafted"), [
    (FREE, 0.3, 10),
    (DEAR, 0.9, 0),
    (CostTable({64: [1.0, 1.0, 1.3, 3.0]}, rows=(1, 4, 5, 9)), 0.99, 3),
    (CostTable({64: [1.0, 1.6, 1.6]}, rows=(1, 2, 16)), 0.99, 10),
])  # fmt: skip
def test_rows_are_taken_while_they_pay(costs: CostTable, prob: float, num_drafted: int) -> None:
    """Guesses thrown away that would have cost nothing; speculation that makes decoding slower; a tree cut at a fixed size;
    growth that stopped at the first row that does not pay, where the next block of rows is free."""
    planner = Planner([Chain(range(10, 20), prob)], costs, 12)
    (tree,) = plan(planner, Running())
    assert tree.token_ids == [3, *range(10, 10 + num_drafted)]
    if num_drafted == 0:
        assert [tree.num_drafted for tree in plan(planner, Running("a"), Running("b"))] == [0, 0]


def test_the_budget_goes_to_the_most_probable_nodes_of_all() -> None:
    """The first sequence of a batch took all the rows."""

    class Two(Chain):
        def draft(self, sequence: SequenceView, max_nodes: int) -> list[Proposal]:
            self.prob = 0.2 if sequence.key[0] == "a" else 0.9
            return super().draft(sequence, max_nodes)

    trees = plan(Planner([Two(range(10, 20), 0.0)], FREE, 12), Running("a"), Running("b"), spare=4)
    assert [tree.num_drafted for tree in trees] == [0, 4]
    trees = plan(Planner([Chain(range(10, 20), 0.5)], FREE, 12), Running("a"), Running("b"), spare=5)
    assert sorted(tree.num_drafted for tree in trees) == [2, 3]
    assert plan(Planner([Chain([10], 0.5)], FREE, 12), Running(), spare=0)[0].num_drafted == 0


def test_the_tree_beside_its_likeliest_path_is_no_larger_than_allowed() -> None:
    """Several drafters together exceeded `max_tree_nodes`, or it cut a chain that the first of them was sure of."""
    drafters = [Chain(range(10 * n, 10 * n + 7), 0.9, f"d{n}") for n in range(1, 4)]
    long = Chain(range(100, 130), 0.97, "long")
    long.draft = lambda sequence, most: Chain.draft(long, sequence, 99)
    (tree,) = plan(Planner([long, *drafters], FREE, 7), Running())
    assert tree.num_drafted == 30 + 7
    assert {*range(100, 130)} < set(tree.token_ids)
    (tree,) = plan(Planner([long, *drafters], FREE, 7), Running(speculation=Speculation(max_nodes=9)))
    assert tree.num_drafted == 9


def test_nothing_is_drafted_past_the_end_of_the_output() -> None:
    """Rows, and positions, behind the last token that the request may have."""
    drafter = Chain(range(10, 30), 0.9)
    for most, expected in ((1, 0), (2, 1), (5, 4)):
        (tree,) = plan(Planner([drafter], FREE, 50), Running(most_tokens=most))
        assert tree.num_drafted == expected


def test_drafters_are_merged_and_learn_their_own_nodes() -> None:
    """Agreement counted twice, or a drafter taught by another one's nodes."""
    one, two = Chain([10, 11], 0.9, "one"), Chain([10, 12], 0.5, "two")
    planner = Planner([one, two], FREE, 12)
    sequence = Running()
    (tree,) = plan(planner, sequence)
    assert sorted(tree.token_ids[1:]) == [10, 11, 12]
    first, second = tree.child(0, 10), tree.child(tree.child(0, 10) or 0, 12)
    assert first and second
    planner.observe([sequence], [StepResult(tree, [first, second], [10, 12, 50])], [{}])
    assert one.learned == [(10, True), (11, False)]
    assert two.learned == [(12, True)]
    assert one.observed == two.observed == {("a", 0): [10, 12, 50]}


def test_nodes_behind_a_miss_teach_nothing() -> None:
    """Guesses that nobody could judge counted as wrong."""
    drafter = Chain([10, 11, 12], 0.9)
    planner = Planner([drafter], FREE, 12)
    (tree,) = plan(planner, Running())
    planner.observe([Running()], [StepResult(tree, [1], [10, 77])], [{}])
    assert drafter.learned == [(10, True), (11, False)]


def test_a_sequence_for_which_nothing_is_found_is_asked_less_and_less() -> None:
    """Looking for drafts in vain at every step costs what speculation was to save."""
    drafter = Chain([], 0.5)
    planner = Planner([drafter], FREE, 12)
    asked = []
    for _ in range(60):
        before = drafter.asked
        plan(planner, Running())
        asked.append(drafter.asked - before)
    gaps = np.diff(np.flatnonzero(asked)).tolist()
    assert gaps[:3] == [1, 1, 1]  # a few empty steps are no pattern yet
    assert gaps == sorted(gaps)
    assert gaps[-1] == 8
    drafter.tokens = [5, 6]
    for _ in range(10):
        (tree,) = plan(planner, Running())
    assert tree.num_drafted == 2
    assert plan(planner, Running())[0].num_drafted == 2  # awake again at every step
    drafter.tokens = []
    for _ in range(60):
        plan(planner, Running())
    planner.finish(Running())
    before = drafter.asked
    for _ in range(3):
        plan(planner, Running())
    assert drafter.asked == before + 3, "what is known of a sequence ends with it"


class Nothing(Chain):
    """Has nothing to propose, and says so."""

    observe = Drafter.observe

    def cost_s(self, sequences: Sequence[SequenceView]) -> float:
        self.asked += 1
        return math.inf


def test_a_request_without_speculation_puts_nobody_else_to_sleep() -> None:
    """A step in which no drafter was allowed ended drafting for the sequences that came after it."""
    planner = Planner([Chain([5, 6], 0.5)], FREE, 12)
    plan(planner, Running("off", speculation=False))
    assert [plan(planner, Running("off", speculation=False), Running("on"))[1].num_drafted for _ in range(3)] == [2] * 3
    planner.finish(Running("on"))
    assert [plan(planner, Running("on"))[0].num_drafted for _ in range(3)] == [2] * 3


def test_a_sequence_whose_prompt_takes_steps_of_its_own_gets_drafts() -> None:
    """A long prompt ended drafting for its sequence, which was first met in a step that had no sequence to plan for."""
    planner = Planner([Chain([5, 6], 0.5)], FREE, 12)
    plan(planner)
    planner.observe([Running()], [StepResult(None, [], [])], [{}])
    assert plan(planner, Running())[0].num_drafted == 2


def test_steps_in_which_nobody_is_due_touch_no_drafter() -> None:
    """Speculation that had nothing to copy cost 12 microseconds a sequence and step: drafters read every token."""
    drafter = Nothing([], 0.5)
    planner, sequences, asked = Planner([drafter], FREE, 12), [Running(f"{n}") for n in range(4)], []
    for _ in range(64):
        before = drafter.asked
        plan(planner, *sequences)
        planner.observe(sequences, [StepResult(None, [], [9])] * 4, [{}] * 4)
        asked.append(drafter.asked - before)
    assert asked[-32:] == [int(number % 8 == 1) for number in range(33, 65)] and not drafter.observed


@pytest.mark.parametrize("method", ["prepare", "start", "propose", "observe", "learn", "finish", "purge"])
def test_exceptions_are_contained(method: str, caplog: pytest.LogCaptureFixture) -> None:
    """One drafter's bug stopped the others, or the step."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    broken, sound = Chain([9], 0.9, "broken"), Chain([10, 11], 0.9)
    setattr(broken, method, fail)
    planner = Planner([broken, sound], FREE, 12)
    sequence = Running()
    sequence.prepared = planner.prepare(sequence.request)
    planner.start(sequence)
    (tree,) = plan(planner, sequence)
    assert {10, 11} <= set(tree.token_ids)
    planner.observe([sequence], [StepResult(tree, [], [50])], [{}])
    planner.finish(sequence)
    planner.purge("salt")
    assert planner.num_failures == 1
    assert sound.events == {"start": 1, "observe": 1, "learn": 0, "finish": 1}
    assert "the drafter broken failed" in caplog.text


def test_acceptance_follows_what_happens() -> None:
    """A table that does not learn, or never forgets."""
    table, cell, other = AcceptanceCells([0.2, 0.4]), 0, 1
    assert [table.probability(cell), table.probability(other)] == pytest.approx([0.2, 0.4])
    for _ in range(300):
        table.learn(cell, True)
    assert table.probability(cell) > 0.95 and table.probability(other) < 0.9
    for _ in range(1500):
        table.learn(cell, False)
    assert 0.0 < table.probability(cell) < 0.05


def test_a_sequence_whose_drafts_fail_is_drafted_for_less_and_less() -> None:
    """What other requests taught was believed for ever in one that copies nothing, and speculation cost a tenth of its time."""
    drafted = run(Planner([Chain([5, 6, 7], 0.9)], CostTable(*EVEN), 12), Running(), (), 60)
    assert drafted[0] == 3
    assert sum(drafted[20:]) <= 15


def test_a_sequence_that_begins_to_copy_late_is_drafted_for_again() -> None:
    """One that failed at first was given up."""
    planner, sequence = Planner([Chain([5, 6, 7], 0.9)], FREE, 12), Running()
    run(planner, sequence, (), 20)
    assert run(planner, sequence, (5, 6, 7), 60)[-20:] == [3] * 20


def test_trust_comes_back_by_guesses_that_took_no_row() -> None:
    """A sequence whose drafts had stopped to pay was never drafted for again: nothing drafted, nothing learned."""
    planner, sequence = Planner([Chain([5, 6, 7], 0.9)], CostTable(*EVEN), 12), Running()
    assert 0 in run(planner, sequence, (), 400)[20:200]
    for _ in range(200):
        (tree,) = plan(planner, sequence)
        path = list(range(1, len(tree)))
        planner.observe([sequence], [StepResult(tree, path, [*tree.token_ids[1:], [5, 6, 7, 50][len(path)]])], [{}])
    assert tree.num_drafted == 3


def test_where_tokens_are_cheaper_than_asking_a_poor_drafter_is_asked_seldom() -> None:
    """On a fast device the host's time for drafts that brought little made decoding slower than without them."""
    asked, sequence = list[int](), Running()
    for step_s in (1e-8, 1.0):
        drafter = Chain([5], 0.6)
        planner = Planner([drafter], CostTable({64: [step_s, 1.2 * step_s]}, rows=(1, 2)), 12)
        for number in range(200):
            (tree,) = plan(planner, sequence)
            path = [1] if number % 2 and tree.num_drafted else []
            planner.observe([sequence], [StepResult(tree, path, [5, 50] if number % 2 else [51])], [{}])
        asked.append(drafter.asked)
    assert asked[1] == 200 and asked[0] < 20


def test_a_drafter_that_waited_and_became_right_is_asked_again() -> None:
    """A drafter was judged by what it had done before its wait, and so never asked again."""
    trust = Trust(1)
    rows, asked = np.array([trust.start("", [0])]), list[int]()
    for trust.step in range(1, 400):
        due = trust.due(rows)
        if (due & ~trust.not_worth(rows, due, 0.5)).any():
            figures = np.zeros((1, 1, NUM_FIGURES))
            figures[..., [ASKED, UNCOVERED]] = 1.0
            figures[..., [EXPECTED, ACCEPTED, NUM_NODES, NUM_HITS]] = 4.0 * (trust.step > 200)
            trust.learn(rows, figures, 0.1)
            asked.append(trust.step)
    assert sum(step <= 200 for step in asked) < 20
    assert min(step for step in asked if step > 200) <= 264 and sum(step > 300 for step in asked) > 80


def test_guesses_that_took_no_row_are_judged_by_what_the_target_said() -> None:
    """A drafter whose guesses seemed too poor for a row never learned that they were right, or how poor they were."""
    drafter = Chain([10, 11], 0.3)
    planner = Planner([drafter], CostTable({64: [1.0, 1.5]}, rows=(1, 2)), 12)
    for token in (10, 99):
        (tree,) = plan(planner, Running())
        assert tree.num_drafted == 0
        planner.observe([Running()], [StepResult(tree, [], [token])], [{}])
    assert drafter.learned == [(10, True), (10, False)], "nothing is known of the second token"


def test_a_deep_guess_that_took_no_row_counts_as_what_its_drafter_said() -> None:
    """Distrust was divided out twice: a deep guess counted as several tokens, and a drafter once wrong came back late."""
    planner = Planner([Chain([5, 6, 7, 8], 0.9)], CostTable({64: [1.0, 1.5, 2.0, 2.5, 3.0]}, rows=(1, 2, 3, 4, 5)), 12)
    sequence = Running()
    assert run(planner, sequence, (), 30)[-1] == 0
    for _ in range(30):
        (tree,) = plan(planner, sequence)
        if tree.num_drafted:
            break
        planner.observe([sequence], [StepResult(tree, [], [5, 6, 7, 8])], [{}])
    assert tree.num_drafted > 0


def test_an_answer_without_a_guess_says_nothing_about_a_drafter() -> None:
    """Some answers of one word, for which nothing was guessed, halved what was known of a drafter."""
    trust, figures = Trust(1), np.zeros((1, 1, NUM_FIGURES))
    figures[..., [ASKED, EXPECTED]] = 1.0, 20.0
    first = trust.start("", [0])
    trust.learn(np.array([first]), figures, 0.0)
    trust.finish(first, "")
    known = trust.ratios(np.array([trust.start("", [0])]))
    for _ in range(50):
        trust.finish(trust.start("", [0]), "")
    assert known < 0.5 and trust.ratios(np.array([trust.start("", [0])])) == known


def answer(planner: Planner, name: str, num_right: int, salt: str) -> int:
    """Nodes drafted in the first of eight steps of a sequence; so many tokens of each draft are right."""
    sequence, drafted = Running(name, salt=salt), []
    for _ in range(8):
        (tree,) = plan(planner, sequence)
        drafted.append(tree.num_drafted)
        path = list(range(1, 1 + min(num_right, tree.num_drafted)))
        tokens = [*(tree.token_ids[n] for n in path), 5 if num_right > len(path) else 50]
        planner.observe([sequence], [StepResult(tree, path, tokens)], [{}])
    planner.finish(sequence)
    return drafted[0]


def test_a_short_answer_begins_with_what_its_tenants_answers_began_with() -> None:
    """Every answer believed a drafter anew, which trusted guesses that are right in long answers alone: short ones got slower."""
    planner = Planner([Chain([5, 6, 7], 0.9)], CostTable(*EVEN), 12)
    assert answer(planner, "first", 0, "one") == 3
    assert answer(planner, "lucky", 3, "one") > 0
    for number in range(20):
        answer(planner, f"{number}", 0, "one")
    answer(planner, "lucky again", 3, "one")
    assert answer(planner, "short", 0, "one\0part") == 0, "one answer that repeats itself says nothing about others"
    assert answer(planner, "other", 0, "two") == 3, "what one tenant's answers began with showed in another's drafts"
    planner.purge("one")
    assert answer(planner, "anew", 0, "one") == 3


def test_rows_of_a_prompt_do_not_make_guesses_cheap() -> None:
    """Beside a long prompt a row more hardly changed the step's rate, so guesses were drafted that no step would pay for."""
    costs = CostTable({64: [1.0, 2.0, 3.0, 4.0, 103.0]}, rows=(1, 2, 3, 4, 103))
    for num_other_rows in (0, 60):
        planner = Planner([Chain([5, 6], 0.3)], costs, 12)
        assert planner.plan([Running()], num_other_rows, lambda _: 200)[0].num_drafted == 0


def test_a_first_token_does_not_wait_for_drafts() -> None:
    """The tree beside the end of a prompt delayed the first token by a fifth, and under load each prompt waited for all trees."""
    linear = CostTable({64: [8.0, 9.0, 108.0]}, rows=(1, 2, 101))  # every row costs as much as the others
    flat = CostTable({64: [8.0] * 3}, rows=(1, 2, 101))
    for costs, beside in ((linear, 0), (flat, 4)):
        planner = Planner([drafter := Chain(range(10, 14), 0.9)], costs, 12)
        assert planner.plan([Running()], 0, lambda _: 100)[0].num_drafted == 4
        asked = drafter.asked
        for sequence, num_prompt_rows in ((Running("ends", [1, 2]), 0), (Running(), 40)):
            planner.start(sequence)
            assert planner.plan([sequence], num_prompt_rows, lambda _: 100)[0].num_drafted == beside
        assert (drafter.asked == asked) is (beside == 0), "a drafter was asked for drafts that find no room"


def test_room_for_drafts_is_made_for_those_who_draft() -> None:
    """Every step of a service whose cache was full evicted prefixes for drafts, also where nobody drafted."""
    planner = Planner([Chain([5, 6], 0.9)], CostTable({64: [8.0] * 3}, rows=(1, 2, 101)), 12)
    spare_rows, plain = Mock(return_value=100), [Running(f"off{n}", speculation=False) for n in range(3)]
    for sequences in (plain, [*plain, Running()]):
        trees = planner.plan(sequences, 0, spare_rows)
        assert [tree.num_drafted for tree in trees] == [0, 0, 0, 2][: len(sequences)]
    spare_rows.assert_called_once_with(1)


def test_sequences_learn_from_their_own_drafts_beside_others_without_any() -> None:
    """Trees are planned for a part of a step's sequences, and judged beside the tokens of all."""
    planner, drafted = Planner([Chain([5, 6], 0.5)], FREE, 12), Counter[str]()
    off, plain = (Running(name, speculation=False) for name in ("off", "plain"))
    sequences = [off, Running("poor"), plain, Running("good")]
    for _ in range(40):
        trees = plan(planner, *sequences)
        drafted.update({s.name: tree.num_drafted for s, tree in zip(sequences, trees, strict=True)})
        paths = [[n for n in range(1, len(tree)) if s.name == "good"] for s, tree in zip(sequences, trees, strict=True)]
        results = [
            StepResult(t, path, [*(t.token_ids[n] for n in path), 50]) for t, path in zip(trees, paths, strict=True)
        ]
        planner.observe(sequences, results, [{}] * 4)
    assert drafted["good"] == 80 and 0 < drafted["poor"] < 40 and not drafted["off"] + drafted["plain"]


def test_a_drawn_tree_is_never_cut_for_what_it_costs() -> None:
    """A node left out for what was drawn below it: the law of the output shifts (total variation 0.03 where costs jump)."""
    planner = Planner([Drawn(range(10, 14), 0.3)], DEAR, 12, vocab_size=300)
    drawn, plain = Running("a", speculation=BY_RULE), Running("b")
    (tree,) = plan(planner, drawn)
    assert tree.token_ids == [3, 10, 11, 12, 13] and len(tree.draws) == 4
    assert plan(planner, Running("d", [1, 2], speculation=BY_RULE))[0].num_drafted == 4, "beside the end of a prompt"
    (short,) = plan(planner, Running("c", speculation=BY_RULE), spare=2)
    assert short.token_ids == [3, 10, 11] and set(short.draws) == {0, 1, 2}
    assert [tree.num_drafted for tree in plan(planner, drawn, plain)] == [4, 0]
    mixed = Planner([Chain(range(10, 14), 0.3)], DEAR, 12)
    assert plan(mixed, plain)[0].num_drafted == 0


def test_a_drawn_node_stays_or_goes_whatever_is_drawn_below_it() -> None:
    """The likeliest path stood beside the limit of nodes, and with a likely token below it a node stayed that else had gone."""
    draw = Draw((10, 11, 12), np.full(300, 1 / 300), with_replacement=False)

    class ChildSampler(Chain):
        def draft(self, sequence: SequenceView, max_nodes: int) -> list[Proposal]:
            probs = zip(draw.tokens, (0.30, 0.31, 0.32), strict=True)
            siblings = [Proposal(token, -1, prob, Origin(self.name), draw) for token, prob in probs]
            return [*siblings, Proposal(20, 0, self.prob, Origin(self.name), Draw((20,), draw.draft_probs))]

    for below in (0.29, 0.01):
        (tree,) = plan(Planner([ChildSampler((), below)], FREE, 1, vocab_size=300), Running(speculation=BY_RULE))
        assert tree.token_ids == [3, 12] and tree.draws[0] == draw


FALSE_DRAWS = {
    "other vocabulary": (10, np.full(200, 1 / 200)),
    "zero probability": (10, np.where(np.arange(300) == 10, 0.0, LAW)),
    "not a number": (10, np.where(np.arange(300) == 0, np.nan, LAW)),
    "outside": (300, LAW),
}


@pytest.mark.parametrize("fault", FALSE_DRAWS)
def test_a_draw_that_cannot_have_been_is_no_draft(fault: str) -> None:
    """It was found out in the middle of a step, which ended the engine's thread."""
    token, law = FALSE_DRAWS[fault]
    planner = Planner([Drawn([token], 0.5, law)], FREE, 12, vocab_size=300)
    (tree,) = plan(planner, Running("a", speculation=BY_RULE))
    assert tree.token_ids == [3] and not tree.draws


def test_what_is_no_proposal_and_what_costs_no_number_are_contained() -> None:
    """A drafter that returned a number, a tuple without origin, or a word for seconds ended every request."""

    class Odd(Chain):
        given: object = 7
        seconds: object = 0.0

        def propose(self, sequences: Sequence[SequenceView], budget: object) -> list[list[Proposal]]:
            return self.given  # type: ignore[return-value]

        def cost_s(self, sequences: Sequence[SequenceView]) -> float:
            return self.seconds  # type: ignore[return-value]

    origin = Origin("odd")
    wrong = (7, [7], [[7]], [[(1, -1, 0.5, origin)]], [[Proposal(1, -1, 0.5, None)]], [[Proposal(1, 5, 0.5, origin)]],
             [[Proposal(None, -1, 0.5, origin)]], [[Proposal(1, -1, 0.5, Origin("odd", None))]])  # fmt: skip
    for given, seconds in [*((given, 0.0) for given in wrong), ([], "long"), ([], None)]:
        odd, sound = Odd([], 0.0, "odd"), Chain(range(10, 12), 0.5, "sound")
        odd.given, odd.seconds = given, seconds
        planner = Planner([odd, sound], FREE, 12)
        (tree,) = plan(planner, Running())
        assert tree.token_ids == [3, 10, 11] and planner.num_failures > 0, (given, seconds)


NODES = np.array([[9, -1, -1, -1, 0], [9, 0, -1, -1, 1]])
SOUND = {"nodes": NODES, "probs": np.array([0.9, 0.8]), "starts": np.array([0, 2])}


def node_with(column: int, value: int) -> dict[str, Any]:
    nodes = NODES.copy()
    nodes[1, column] = value
    return {"nodes": nodes}


def test_a_token_that_the_target_lacks_costs_its_node_alone() -> None:
    """A tokenizer may write more tokens than its model has: copies of a client's text that spells them would end all copying."""
    planner = Planner([Chain([10, 300, 11], 0.9)], FREE, 12, vocab_size=300)
    for turn in range(60):
        assert [list(tree.token_ids)[1:] for tree in plan(planner, Running(f"{turn}"))] == [[10]]
    assert planner.num_failures == 0


@pytest.mark.parametrize("fault", [
    {}, node_with(TOKEN, -1), node_with(PARENT, -7), node_with(PARENT, 10**12),
    {"nodes": NODES.astype(float)}, {"probs": np.array([0.9, math.nan])}, {"probs": np.array([0.9, math.inf])},
    {"starts": np.array([0])}, {"starts": np.array([0, 1, 2])}, {"starts": np.array([0, 10**9])}, {"draws": {99: Draw((9,))}},
    {"no such argument": 0},
])  # fmt: skip
def test_arrays_that_are_no_proposals_end_their_drafter_alone(
    fault: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Arrays were believed: a parent outside read other memory and ended the process, draws and feedback that fail ended every
    request; or a drafter that always raises left a traceback a step and sequence. The feedback of each of these fails."""

    class Arrays(Chain):
        def propose(self, sequences: Sequence[SequenceView], budget: object) -> Proposals:  # type: ignore[override]
            self.asked += 1
            return Proposals("arrays", **(SOUND | fault), feedback={}.__getitem__)

    drafter = Arrays([], 0.0, "arrays")
    planner = Planner([Chain(range(10, 12), 0.5), drafter], FREE, 12, vocab_size=300)
    for turn in range(200):
        sequence = Running(f"{turn}")
        (tree,) = plan(planner, sequence)
        assert {10, 11} <= set(tree.token_ids)
        planner.observe([sequence], [StepResult(tree, [], [50])], [{}])
        planner.finish(sequence)
    assert (drafter.asked == planner.num_failures < 30) == bool(fault)
    assert [record.levelname for record in caplog.records] == (["ERROR", "WARNING"] if fault else ["ERROR"])


def test_side_by_side_the_slowest_decides_what_a_draft_saves() -> None:
    """Eight at once, one of them hopeless: drafts for the others saved rows, not steps, and took more time than that."""
    costs = CostTable({64: [1.0, 1.1]}, rows=(1, 8))
    for num_hopeless, is_asked in ((0, True), (1, False)):
        drafter = Chain(range(10, 14), 0.9, "costly")
        drafter.cost_s = lambda sequences: 0.7  # type: ignore[method-assign]
        planner, running = Planner([drafter], costs, 12), [Running(f"{i}") for i in range(8)]
        for _ in range(300):
            for i, (sequence, tree) in enumerate(zip(running, plan(planner, *running), strict=True)):
                accept(planner, sequence, tree, range(10, 14) if i >= num_hopeless else ())
        assert (drafter.asked > 8 * 150) == is_asked, drafter.asked


def test_requests_that_break_a_drafter_do_not_end_drafting_for_others() -> None:
    """Fifty odd requests over a process's life, and nobody was drafted for again."""

    class Picky(Chain):
        def prepare(self, request: Request) -> None:
            raise ValueError("a bug")

        def draft(self, sequence: SequenceView, max_nodes: int) -> list[Proposal]:
            if sequence.key[0] == "odd":
                raise ValueError("a bug")
            return super().draft(sequence, max_nodes)

    planner = Planner([Picky(range(10, 12), 0.5)], FREE, 12)
    for _ in range(100):
        planner.prepare(Running().request)
        plan(planner, Running("odd"))
        assert plan(planner, Running("sound"))[0].num_drafted == 2
    for _ in range(100):
        assert plan(planner, Running("odd"), Running("sound"))[1].num_drafted == 2  # in one step with it

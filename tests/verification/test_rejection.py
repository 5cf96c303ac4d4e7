"""The acceptance rules: their borders, their law by following every draw and decision, and what biases them.

No sampling, no tolerance for bias.
"""

import functools
import itertools
from collections.abc import Callable

import numpy as np
import pytest
from branches import ScriptedRandom
from drafters import add_node
from hypothesis import given, settings
from hypothesis import strategies as st
from rejection_cases import (
    CASES,
    EXACT,
    LENGTH,
    LOSSLESS,
    Case,
    V,
    chosen,
    measure,
    measured,
    probability,
    pruned,
    sampled,
    verdict_of,
)

from ragspec.errors import InputError
from ragspec.speculation import CHAIN_RULES, AcceptanceRule, Speculation
from ragspec.tree import DraftTree, Draw
from ragspec.verification.probabilities import KeyedRandom, RandomStream
from ragspec.verification.rejection import allows, rejection_sample
from ragspec.verification.verify import VerifyResult

RULES = [rule for rule in AcceptanceRule if rule is not AcceptanceRule.KEYED]
GREATEST = 1.0 - 2.0**-53


class FixedRandom(KeyedRandom):
    """The same number each time."""

    def __init__(self, number: float) -> None:
        super().__init__(0, 0, 0, RandomStream.VERIFY)
        self._fixed = number

    def uniform(self) -> float:
        return self._fixed


def law(weights: list[int]) -> np.ndarray:
    probs = np.array(weights, np.float64)
    return probs / probs.sum()


WEIGHTS = st.lists(st.sampled_from([0, 0, 1, 3, 10**15]), min_size=4, max_size=4).filter(any)


@settings(max_examples=200, deadline=None)
@given(WEIGHTS, WEIGHTS, st.sampled_from(RULES), st.sampled_from([0.0, 0.5, GREATEST]), st.booleans())
def test_no_rounding_gives_an_impossible_token(
    target: list[int], draft: list[int], rule: AcceptanceRule, number: float, agree: bool
) -> None:
    """A residual without mass divided by 0, or a random number at the edge of its range that meets a token of probability 0."""
    target_probs = law(target)
    draft_probs = target_probs * (1.0 + 2.0**-52) if agree else law(draft)
    token = FixedRandom(number).categorical(draft_probs)
    tree = DraftTree(0)
    child = add_node(tree, add_node(tree, 0, token), token)
    draws = {node: Draw((token,), draft_probs) for node in range(child)}
    verdict = rejection_sample(rule, tree, draws, lambda node: target_probs, FixedRandom(number), 9)
    assert all(target_probs[token] > 0.0 for token in verdict.tokens)


@pytest.mark.parametrize("number", [0.0, 0.25, GREATEST])
def test_chance_at_its_edges(number: float) -> None:
    """What is impossible happens once in 2**53 times, or what is certain does not."""
    chance = FixedRandom(number)
    assert not chance.bernoulli(0.0)
    assert chance.bernoulli(1.0)
    for weights in ([0.0, 1.0, 0.0], [0.0, 1e-300, 0.0], [0.0, 7.0, 0.0]):
        assert chance.categorical(np.array(weights)) == 1


def tree_of(*nodes: tuple[int, int]) -> DraftTree:
    """The parent and the token of each node."""
    tree = DraftTree(0)
    for parent, token in nodes:
        add_node(tree, parent, token)
    return tree


TWO_CHILDREN = (0, 1), (0, 2)


HALVES = np.array([0.0, 0.5, 0.5])
WRONG = {
    "keyed": (AcceptanceRule.KEYED, {}),
    "chain with two children": (AcceptanceRule.CHAIN, {}),
    "block with two draws": (AcceptanceRule.BLOCK, {0: Draw((1, 2), HALVES)}),
    "iid rule, no replacement": (AcceptanceRule.IID, {0: Draw((1, 2), HALVES, with_replacement=False)}),
    "other rule, replacement": (AcceptanceRule.WITHOUT_REPLACEMENT, {0: Draw((1, 2), HALVES)}),
    "drawn twice, no replacement": (AcceptanceRule.TRAVERSAL, {0: Draw((1, 1), HALVES, with_replacement=False)}),
    "cannot have been drawn": (AcceptanceRule.TRAVERSAL, {0: Draw((0, 1), HALVES)}),
    "no such node": (AcceptanceRule.TRAVERSAL, {3: Draw((1,), HALVES)}),
    "no such token": (AcceptanceRule.TRAVERSAL, {0: Draw((3,))}),
    "token -1": (AcceptanceRule.TRAVERSAL, {0: Draw((-1,))}),
    "another vocabulary": (AcceptanceRule.TRAVERSAL, {0: Draw((1,), np.full(4, 0.25))}),
    "negative": (AcceptanceRule.TRAVERSAL, {0: Draw((1,), np.array([-0.5, 1.0, 0.5]))}),
    "not a number": (AcceptanceRule.TRAVERSAL, {0: Draw((1,), np.array([np.nan, 0.5, 0.5]))}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_drafts_are_refused(name: str) -> None:
    """A rule silently biased on draws it was not made for; padding (-1) that meets the last token's probability."""
    rule, draws = WRONG[name]
    with pytest.raises(InputError):
        rejection_sample(rule, tree_of(*TWO_CHILDREN), draws, lambda node: HALVES, FixedRandom(0.5), 4)


def test_a_tree_with_padding_is_refused() -> None:
    """As above, for tokens that no draw lists."""
    with pytest.raises(InputError, match="-1"):
        rejection_sample(AcceptanceRule.IID, tree_of((0, -1)), {}, lambda node: HALVES, FixedRandom(0.5), 4)


def test_each_rule_says_what_it_keeps() -> None:
    """A lossy output reported as exact."""
    kept = {rule: Speculation(rule=rule, lossy=True).exactness for rule in AcceptanceRule}
    assert kept.pop(AcceptanceRule.KEYED) == "path"
    assert kept.pop(AcceptanceRule.TYPICAL) == kept.pop(AcceptanceRule.TOP_BETA) == "none"
    assert set(kept.values()) == {"distribution"}


def test_typical_thresholds() -> None:
    """Entropy in bits, or the greater of the two thresholds."""
    typical = functools.partial(allows, AcceptanceRule.TYPICAL)
    flat = np.full(20, 0.05)  # e^-entropy = 1/20, so the threshold is 0.3 / 20
    assert typical(flat, 3)
    sharp = np.array([0.905, 0.085, 0.01])  # e^-entropy about 0.7, so the threshold is 0.09
    assert [typical(sharp, v) for v in range(3)] == [True, False, False]
    uneven = np.array([0.4, *[0.024] * 20, *[0.006] * 20])  # e^-entropy about 0.063, so the threshold is 0.019
    assert [typical(uneven, v) for v in (0, 20, 21)] == [True, True, False]


def test_top_beta_thresholds() -> None:
    """Ranks by probability alone where tokens tie, or a gap that reaches tokens of probability 0."""
    lenient = functools.partial(allows, AcceptanceRule.TOP_BETA)
    ties = np.array([0.2, 0.2, 0.2, 0.2, 0.2])
    assert [lenient(ties, v) for v in range(5)] == [True, True, True, False, False]
    steep = np.array([0.6, 0.23, 0.17])  # 0.6 / e = 0.221
    assert [lenient(steep, v) for v in range(3)] == [True, True, False]
    assert not lenient(np.array([1.0, 0.0]), 1)


def test_lenient_walks_take_the_deepest_allowed_path() -> None:
    """The first child that is allowed hid a longer path beside it."""
    short, long = tree_of(*TWO_CHILDREN), tree_of(*TWO_CHILDREN, (2, 1))
    for tree, number, most, decided in (
        (long, 0.9, 9, ([2, 3], [2, 1, 2])),
        (long, 0.9, 2, ([2], [2, 1])),
        (short, 0.0, 9, ([1], [1, 1])),
    ):
        chance = FixedRandom(number)
        assert rejection_sample(AcceptanceRule.TOP_BETA, tree, {}, lambda node: HALVES, chance, most) == decided


@pytest.mark.parametrize(
    ("case", "name"),
    [("random 0", "chain"), ("random 1", "block"), ("random 2", "iid"), ("random 0", "traversal, without replacement")],
)
def test_a_pruned_node_whose_draw_stays_listed_keeps_the_law(case: str, name: str) -> None:
    """Low-probability nodes taken out of the tree took their trial along, which biases every rule for drawn drafts."""
    laws, (rule, counts, with_replacement) = CASES[case], LOSSLESS[name]

    def run(chance: ScriptedRandom) -> VerifyResult:
        drafted = sampled(laws, counts, with_replacement, chance)
        return verdict_of(laws, rule, pruned(drafted, lambda p: laws.draft[p[:-1]][p[-1]] > 0.4), chance)

    assert measure(laws, run).variation < EXACT


@pytest.mark.parametrize(("num_nodes", "name"), [(1, "iid"), (2, "without replacement"), (2, "traversal, iid")])
def test_reranking_a_drawn_tree_keeps_the_law(name: str, num_nodes: int) -> None:
    """The best nodes of the whole tree kept, where what is kept of one branch depends on the draws of the others."""
    laws, (rule, counts, with_replacement) = CASES["random 2"], LOSSLESS[name]

    def run(chance: ScriptedRandom) -> VerifyResult:
        drafted = sampled(laws, counts, with_replacement, chance)
        order = sorted(drafted.prefixes[1:], key=lambda p: (-probability(laws.draft, p), len(p), p))
        return verdict_of(laws, rule, pruned(drafted, lambda p: p in order[:num_nodes]), chance)

    assert measure(laws, run).variation < EXACT


@pytest.mark.parametrize("name", ["without replacement", "traversal, iid"])
def test_pruning_a_node_for_what_was_drawn_below_it_is_noticed(name: str) -> None:
    """The one pruning that no rule survives: the draws that stay are no longer distributed as they say."""
    laws, (rule, counts, with_replacement) = CASES["random 2"], LOSSLESS[name]

    def run(chance: ScriptedRandom) -> VerifyResult:
        drafted = sampled(laws, counts, with_replacement, chance)
        firsts = {drafted.prefixes[node]: draw.tokens[0] for node, draw in drafted.draws.items()}
        return verdict_of(laws, rule, pruned(drafted, lambda p: firsts.get(p) != 0), chance)

    assert measure(laws, run).variation > 0.005


def redrawing(case: Case, chance: ScriptedRandom) -> VerifyResult:
    """Match the target's sample; on a miss draw once more (several public engines)."""
    token = chance.categorical(case.target[()])
    return VerifyResult([], [token if token == 2 else chance.categorical(case.target[()])])


def unwarped_bonus(case: Case, chance: ScriptedRandom) -> VerifyResult:
    """Accept by the warped law, then take the token after a whole path from another."""
    drafted = sampled(case, (1, 1), True, chance)
    raw = np.full(V, 1.0 / V)

    def probs_at(node: int) -> np.ndarray:
        return case.target[drafted.prefixes[node]] if drafted.tree.depths[node] < 2 else raw

    return rejection_sample(AcceptanceRule.CHAIN, drafted.tree, drafted.draws, probs_at, chance, LENGTH)


def wrong_replacement(case: Case, chance: ScriptedRandom) -> VerifyResult:
    """The rule for independent draws over draws without replacement."""
    drafted = sampled(case, (2, 2), False, chance)
    for node, draw in drafted.draws.items():
        drafted.draws[node] = draw._replace(with_replacement=True)
    return verdict_of(case, AcceptanceRule.IID, drafted, chance)


def argmax_as_a_draw(case: Case, chance: ScriptedRandom) -> VerifyResult:
    """The drafter's most probable token, taken for a draw from its softmax."""
    drafted = chosen(case, 1)
    for node, draw in drafted.draws.items():
        drafted.draws[node] = draw._replace(draft_probs=case.draft[drafted.prefixes[node]])
    return verdict_of(case, AcceptanceRule.CHAIN, drafted, chance)


def dropped_draws(case: Case, chance: ScriptedRandom) -> VerifyResult:
    """Drawn tokens of low draft probability left out, trial and all."""
    drafted = pruned(sampled(case, (1, 1), True, chance), lambda p: case.draft[p[:-1]][p[-1]] > 0.4)
    for node, draw in list(drafted.draws.items()):
        drafted.draws[node] = draw._replace(tokens=tuple(v for v in draw.tokens if drafted.tree.child(node, v)))
    return verdict_of(case, AcceptanceRule.CHAIN, drafted, chance)


@pytest.mark.parametrize("biased", [redrawing, unwarped_bonus, wrong_replacement, argmax_as_a_draw, dropped_draws])
def test_known_biased_variants_are_noticed(biased: Callable[..., VerifyResult]) -> None:
    """A comparison of laws that cannot fail: each of these defects of public code must fail it."""
    assert measure(CASES["random 2"], functools.partial(biased, CASES["random 2"])).variation > 0.005


@pytest.mark.parametrize("rule", [AcceptanceRule.TYPICAL, AcceptanceRule.TOP_BETA])
def test_lossy_rules_are_exact_for_a_greedy_target_only(rule: AcceptanceRule) -> None:
    """A lenient rule that is in fact exact needs no consent; and leniency must not reach tokens of probability 0."""

    def run(laws: Case, chance: ScriptedRandom) -> VerifyResult:
        tree, draws, prefixes = sampled(laws, (2, 1), True, chance)
        return rejection_sample(rule, tree, draws, lambda n: laws.target[prefixes[n]], chance, LENGTH)

    assert measure(CASES["random 2"], functools.partial(run, CASES["random 2"])).variation > 0.01
    assert measure(CASES["greedy target"], functools.partial(run, CASES["greedy target"])).variation < EXACT


PAIRS = [
    pytest.param(case, name, marks=pytest.mark.slow if (i + j) % 4 else [])
    for (i, case), (j, name) in itertools.product(enumerate(CASES), enumerate(LOSSLESS))
]


@pytest.mark.parametrize(("case", "name"), PAIRS)
def test_outputs_have_the_targets_law(case: str, name: str) -> None:
    """A residual not renormalised, taken in the wrong order, or a bonus token from another law."""
    assert measured(case, name).variation < EXACT


@pytest.mark.parametrize("case", ["random 1", "top-p", "half disjoint", "nearly the same"])
@pytest.mark.parametrize("rule", dict.fromkeys(rule for rule, *_ in LOSSLESS.values()))
def test_drafts_chosen_without_chance_are_exact_and_accepted_as_often_by_all(case: str, rule: AcceptanceRule) -> None:
    """The drafter's softmax taken for the law of a draft that involved no chance; acceptance is the paths' probability."""
    laws = CASES[case]
    drafted = chosen(laws, 1 if rule in CHAIN_RULES else 2)
    found = measure(laws, lambda chance: verdict_of(laws, rule, drafted, chance))
    assert found.variation < EXACT
    most = sum(probability(laws.target, prefix) for prefix in drafted.prefixes[1:])
    assert found.num_accepted == pytest.approx(most, abs=EXACT)


@pytest.mark.parametrize("rule", [AcceptanceRule.IID, AcceptanceRule.TRAVERSAL])
def test_drawn_and_chosen_children_mix(rule: AcceptanceRule) -> None:
    """Copied tokens merged into a drawn tree were tried as draws, or the residual of the draws was not what they met."""

    def run(chance: ScriptedRandom) -> VerifyResult:
        drafted = sampled(CASES["random 2"], (2, 1), True, chance)
        for path in ((0,), (0, 2), (0, 1)):
            node = drafted.tree.child(drafted.prefixes.index(path[:-1]), path[-1])
            if node is None:
                add_node(drafted.tree, drafted.prefixes.index(path[:-1]), path[-1])
                drafted.prefixes.append(path)
        return verdict_of(CASES["random 2"], rule, drafted, chance)

    assert measure(CASES["random 2"], run).variation < EXACT


@pytest.mark.parametrize(
    ("name", "most"), [("iid", 1), ("without replacement", 2), ("traversal, iid", 2), ("block", 1)]
)
def test_a_step_cut_short_has_the_targets_law(name: str, most: int) -> None:
    """`max_tokens` inside a path turned an undecided node into a token."""
    rule, counts, with_replacement = LOSSLESS[name]
    laws = CASES["random 1"]

    def run(chance: ScriptedRandom) -> VerifyResult:
        verdict = verdict_of(laws, rule, sampled(laws, counts, with_replacement, chance), chance, most)
        assert len(verdict.tokens) <= most
        return verdict

    assert measure(laws, run).variation < EXACT


FIGURES = {
    "random 0": (1.3480, 1.3627, 1.4951, 1.6314, 1.6444, 1.0976),
    "random 1": (0.2957, 0.3390, 0.3219, 0.3997, 0.4422, 0.3005),
    "random 2": (0.9227, 1.0204, 1.1630, 1.4894, 1.5381, 1.5128),
}
"""Accepted nodes expected, by a separate enumeration over the same laws with a copy of a subtree for each draw."""


@pytest.mark.parametrize("case", FIGURES)
def test_expected_acceptance_is_that_of_a_separate_enumeration(case: str) -> None:
    """Exact but wasteful: a rule that rejects what it might accept has the right law too."""
    names = ("chain", "block", "iid", "without replacement", "traversal, without replacement")
    drafted = chosen(CASES[case], 2)
    sequential = measure(CASES[case], lambda chance: verdict_of(CASES[case], AcceptanceRule.IID, drafted, chance))
    found = [measured(case, name).num_accepted for name in names] + [sequential.num_accepted]
    assert found == pytest.approx(FIGURES[case], abs=6e-5)


def test_the_published_form_of_block_verification_accepts_as_much() -> None:
    """Walking back from the leaf is not block verification: its acceptance must be that of the paper's own formulas."""
    for case in ("random 0", "random 2", "top-p", "half disjoint"):
        laws, total = CASES[case], 0.0
        for tokens in itertools.product(range(V), repeat=2):
            reach, stop = [1.0], []
            for i, token in enumerate(tokens):
                target, draft = laws.target[tokens[:i]], laws.draft[tokens[:i]]
                if draft[token] == 0.0:
                    break
                reach.append(min(1.0, reach[-1] * target[token] / draft[token]))
            else:
                excess = np.maximum(reach[1] * laws.target[tokens[:1]] - laws.draft[tokens[:1]], 0.0).sum()
                stop = [excess / (excess + 1.0 - reach[1]) if excess else float(reach[1] == 1.0), reach[2]]
                accepted = 2 * stop[1] + (1 - stop[1]) * stop[0]
                total += probability(laws.draft, tokens) * accepted
        assert measured(case, "block").num_accepted == pytest.approx(total, abs=EXACT)

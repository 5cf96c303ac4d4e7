"""What biases a rule and what does not: pruned drafts, and known defects of public code that the comparison must notice."""

import functools
from collections.abc import Callable

import numpy as np
import pytest
from branches import ScriptedRandom
from rejection_cases import (
    CASES,
    EXACT,
    LENGTH,
    LOSSLESS,
    Case,
    V,
    chosen,
    measure,
    probability,
    pruned,
    sampled,
    verdict_of,
)

from ragspec.speculation import AcceptanceRule
from ragspec.verification.rejection import rejection_sample
from ragspec.verification.verify import VerifyResult


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

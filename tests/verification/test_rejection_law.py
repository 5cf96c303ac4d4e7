"""The law of what each acceptance rule emits, by following every draw and every decision: no sampling, no tolerance for bias."""

import itertools

import numpy as np
import pytest
from branches import ScriptedRandom
from rejection_cases import CASES, EXACT, LOSSLESS, V, chosen, measure, measured, probability, sampled, verdict_of

from ragspec.speculation import CHAIN_RULES, AcceptanceRule
from ragspec.tree import Origin
from ragspec.verification.verify import VerifyResult

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
                drafted.tree.add(drafted.prefixes.index(path[:-1]), path[-1], 0.5, Origin("copy"))
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

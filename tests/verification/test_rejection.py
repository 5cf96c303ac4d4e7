"""The acceptance rules at their borders: wrong drafts, rounding, consent to loss, lenient thresholds."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragspec.errors import InputError
from ragspec.speculation import AcceptanceRule, Speculation
from ragspec.tree import DraftTree, Draw, Origin
from ragspec.verification.probabilities import KeyedRandom, RandomStream
from ragspec.verification.rejection import allows, rejection_sample

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
    child = tree.add(tree.add(0, token, 0.5, Origin("test")), token, 0.5, Origin("test"))
    draws = {node: Draw((token,), draft_probs) for node in range(child)}
    acceptance = rule
    verdict = rejection_sample(acceptance, tree, draws, lambda node: target_probs, FixedRandom(number), 9)
    assert all(target_probs[token] > 0.0 for token in verdict.tokens)


@pytest.mark.parametrize("number", [0.0, 0.25, GREATEST])
def test_chance_at_its_edges(number: float) -> None:
    """What is impossible happens once in 2**53 times, or what is certain does not."""
    chance = FixedRandom(number)
    assert not chance.bernoulli(0.0)
    assert chance.bernoulli(1.0)
    for weights in ([0.0, 1.0, 0.0], [0.0, 1e-300, 0.0], [0.0, 7.0, 0.0]):
        assert chance.categorical(np.array(weights)) == 1


def two_children(tree: DraftTree) -> DraftTree:
    for token in (1, 2):
        tree.add(0, token, 0.5, Origin("test"))
    return tree


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
        rejection_sample(rule, two_children(DraftTree(0)), draws, lambda node: HALVES, FixedRandom(0.5), 4)


def test_a_tree_with_padding_is_refused() -> None:
    """As above, for tokens that no draw lists."""
    tree = DraftTree(0)
    tree.add(0, -1, 0.5, Origin("test"))
    with pytest.raises(InputError, match="-1"):
        rejection_sample(AcceptanceRule.IID, tree, {}, lambda node: HALVES, FixedRandom(0.5), 4)


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
    tree = two_children(DraftTree(0))
    tree.add(2, 1, 0.5, Origin("test"))
    acceptance = AcceptanceRule.TOP_BETA
    assert rejection_sample(acceptance, tree, {}, lambda node: HALVES, FixedRandom(0.9), 9) == ([2, 3], [2, 1, 2])
    assert rejection_sample(acceptance, tree, {}, lambda node: HALVES, FixedRandom(0.9), 2) == ([2], [2, 1])
    assert rejection_sample(acceptance, two_children(DraftTree(0)), {}, lambda node: HALVES, FixedRandom(0.0), 9) == (
        [1],
        [1, 1],
    )

"""Draft trees: merging, cutting, judging, and what a careless drafter may hand in."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.drafting.acceptance import ACCEPTED, EXPECTED
from ragspec.drafting.step_trees import StepTrees
from ragspec.tree import DraftTree, Draw, Origin, Proposal, Proposals

ANY = 2**31

A, B = Origin("a"), Origin("b")


def chain(tokens: list[int], prob: float, origin: Origin) -> list[Proposal]:
    return [Proposal(token, i - 1, prob ** (i + 1), origin) for i, token in enumerate(tokens)]


def merged(
    *drafts: Sequence[Proposal],
    trusts: Sequence[float] = (1.0, 1.0),
    max_depth: int = ANY,
    vocab_size: int = ANY,
    is_chain: bool = False,
) -> StepTrees:
    trees, limits = (StepTrees([9], np.array([trusts])), (np.array([max_depth]), vocab_size, np.array([is_chain])))
    for number, proposals in enumerate(drafts):
        trees.merge([0], Proposals.of("ab"[number], [proposals]), number, limits)
    return trees


def cut(trees: StepTrees, most: int = ANY) -> DraftTree:
    trees.cut(np.array([most]), np.array([True]), 0, 1.0, np.zeros(1))
    return trees.trees(["a", "b"])[0]


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    return {tuple(tree.token_ids[n] for n in tree.ancestors(node)[1:]) for node in range(1, len(tree))}


def test_common_prefixes_are_one_path() -> None:
    """Two drafters that agree cost two rows a token, and siblings hold the same token."""
    tree = cut(merged(chain([1, 2, 3], 0.5, A), chain([1, 2, 4], 0.9, B)))
    assert paths(tree) == {(1,), (1, 2), (1, 2, 3), (1, 2, 4)}
    assert tree.depths == [0, 1, 2, 3, 3]
    assert [origin.drafter for origin in tree.origins] == ["root", "a", "a", "a", "b"]
    assert tree.child(2, 4) == 4
    assert tree.child(2, 5) is None


def test_duplicate_siblings_of_one_drafter_are_merged() -> None:
    """A token drafted twice under one parent was verified as two different guesses."""
    tree = cut(
        merged([Proposal(1, -1, 0.2, A), Proposal(1, -1, 0.6, A), Proposal(2, 0, 0.1, A), Proposal(3, 1, 0.6, A)])
    )
    assert paths(tree) == {(1,), (1, 2), (1, 3)}
    assert tree.path_probs == pytest.approx([1.0, 0.6, 0.3, 0.6])


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(-1, 20), st.floats(0, 3), st.sampled_from([A, B])), max_size=40),
    st.integers(0, 40),
)
def test_any_proposals_make_a_valid_tree(proposals: list[tuple[int, int, float, Origin]], num_nodes: int) -> None:
    """A node without its parent, a path more probable than its beginning, siblings alike, or a node lost in the cut."""
    drafts = [Proposal(t, min(parent, i - 1), prob, origin) for i, (t, parent, prob, origin) in enumerate(proposals)]
    tree, kept = cut(merged(drafts)), cut(merged(drafts), most=num_nodes)
    for any_tree in (tree, kept):
        assert any_tree.token_ids[0] == 9
        for node in range(1, len(any_tree)):
            parent = any_tree.parents[node]
            assert 0 <= parent < node
            assert any_tree.depths[node] == any_tree.depths[parent] + 1
            assert any_tree.path_probs[node] <= any_tree.path_probs[parent] <= 1.0
            assert any_tree.child(parent, any_tree.token_ids[node]) == node
        assert len(paths(any_tree)) == any_tree.num_drafted
    assert kept.num_drafted == min(num_nodes, tree.num_drafted)
    assert paths(kept) <= paths(tree)
    dropped = sorted(tree.path_probs)[: len(tree) - len(kept)]
    assert not dropped or max(dropped) <= min(kept.path_probs)


def test_the_cut_keeps_the_most_probable_nodes() -> None:
    """The budget was spent in the order of drafters instead of by probability."""
    drafts = chain([1, 2, 3], 0.5, A), chain([4, 5], 0.9, B)
    assert paths(cut(merged(*drafts), most=3)) == {(4,), (4, 5), (1,)}
    assert len(cut(merged(*drafts))) == 6
    assert len(cut(merged(*drafts), most=0)) == 1


def test_what_cannot_be_verified_is_left_out_with_all_below() -> None:
    """A token that the model does not have, or a position past the end of the context, reached the forward."""
    trees = merged(
        [
            Proposal(100, -1, 0.9, A),
            Proposal(1, 0, 0.9, A),
            Proposal(-1, -1, 0.9, A),
            Proposal(2, -1, float("nan"), A),
            Proposal(3, -1, 0.5, A),
            Proposal(4, 4, 0.4, A),
            Proposal(5, 5, 0.3, A),
        ],
        max_depth=2,
        vocab_size=100,
    )
    assert paths(cut(trees)) == {(3,), (3, 4)}
    assert len(cut(merged(chain([1, 2], 0.5, A), max_depth=0))) == 1


def test_siblings_of_two_drafters_exclude_each_other() -> None:
    """Drafters that disagree were both believed in full, and the budget went to tokens of which one at most is right."""
    second = [Proposal(1, -1, 0.6, B), Proposal(3, 0, 0.4, B), Proposal(4, 0, 0.2, B), Proposal(5, -1, 0.4, B)]
    tree = cut(merged([Proposal(1, -1, 0.6, A), Proposal(2, 0, 0.3, A)], second))
    assert tree.token_ids == [9, 1, 2, 3, 4, 5]
    assert tree.path_probs == pytest.approx([1.0, 0.6, 0.3, 0.2, 0.1, 0.16])


@pytest.mark.parametrize(("theirs", "own", "below"), [(0.9, 0.2, 0.45), (0.2, 0.8, 0.4), (0.5, 0.0, 0.0)])
def test_below_a_node_of_others_a_guess_is_as_sure_as_it_was_of_its_parent(
    theirs: float, own: float, below: float
) -> None:
    """A drafter's doubt about a token that another one is sure of went on to all it proposed below."""
    tree = cut(merged([Proposal(1, -1, theirs, A)], [Proposal(1, -1, own, B), Proposal(2, 0, own / 2, B)]))
    assert tree.path_probs == pytest.approx([1.0, max(theirs, own), below])


def test_a_path_is_trusted_as_far_as_its_drafters() -> None:
    """A node became more probable than its parent, and was chosen where the parent was not."""
    drafts = chain([1, 2], 0.8, A), [Proposal(1, -1, 0.8, B), Proposal(2, 0, 0.64, B), Proposal(3, 1, 0.4, B)]
    assert cut(merged(*drafts, trusts=(0.5, 0.25))).path_probs == pytest.approx([1.0, 0.4, 0.32, 0.05])
    drafts = chain([1, 2], 0.5, A), [Proposal(3, -1, 0.4, B)]
    assert cut(merged(*drafts, trusts=(0.5, 0.25))).path_probs == pytest.approx([1.0, 0.25, 0.125, 0.075])


def test_a_chain_keeps_how_its_nodes_were_drawn() -> None:
    """A chain drawn by chance was verified as if it were chosen, or by the draws of a branch beside it."""
    first, second, aside = Draw((1, 4)), Draw((2,)), Draw((5,))
    one = [Proposal(1, -1, 0.5, A, first), Proposal(4, -1, 0.4, A, first), Proposal(5, 1, 0.3, A, aside)]
    other = [Proposal(1, -1, 0.5, B, first), Proposal(2, 0, 0.3, B, second)]
    assert cut(merged(one, other)).draws == {0: first, 1: second, 2: aside}
    path = cut(merged(one, other, is_chain=True))
    assert path.token_ids == [9, 1, 2]
    assert path.draws == {0: first, 1: second}


def test_below_what_was_made_less_probable_everything_is() -> None:
    """Only the first node of a branch was scaled: deeper ones kept what they were worth alone."""
    second = [Proposal(2, -1, 0.4, B), Proposal(3, 0, 0.2, B), Proposal(4, 1, 0.1, B)]
    tree = cut(merged([Proposal(1, -1, 0.6, A)], second))
    assert tree.path_probs == pytest.approx([1.0, 0.6, 0.16, 0.08, 0.04])
    second = [Proposal(1, -1, 0.2, B), Proposal(2, 0, 0.1, B), Proposal(3, 1, 0.05, B)]
    tree = cut(merged([Proposal(1, -1, 0.9, A)], second))
    assert tree.path_probs == pytest.approx([1.0, 0.9, 0.45, 0.225])


def test_a_node_without_probability_is_judged() -> None:
    """A draft drawn by chance whose siblings were certain, accepted, and its child left out: the step divided by zero."""
    trees = merged([Proposal(5, -1, 0.0, Origin("a", feedback=5)), Proposal(6, 0, 0.0, Origin("a", feedback=6))])
    cut(trees, most=1)
    ((drafter, given, judged),) = trees.judge([[5, 6]])
    assert all(row.flags.c_contiguous for row in judged)  # or a first answer compiles code for other arrays
    assert drafter == 0 and [(given.feedback(own, c), right) for own, c, right in judged.T.tolist()] == [(5, 1), (6, 1)]
    assert trees.figures[0, 0, [EXPECTED, ACCEPTED]].tolist() == [0.0, 2.0]

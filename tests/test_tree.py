"""Draft trees: merging, cutting, and what a careless drafter may hand in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.tree import DraftTree, Origin, Proposal

A, B = Origin("a"), Origin("b")


def chain(tokens: list[int], prob: float, origin: Origin) -> list[Proposal]:
    return [Proposal(token, i - 1, prob ** (i + 1), origin) for i, token in enumerate(tokens)]


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    return {tuple(tree.token_ids[n] for n in tree.ancestors(node)[1:]) for node in range(1, len(tree))}


def test_common_prefixes_are_one_path() -> None:
    """Two drafters that agree cost two rows a token, and siblings hold the same token."""
    tree = DraftTree(9)
    tree.merge(chain([1, 2, 3], 0.5, A))
    tree.merge(chain([1, 2, 4], 0.9, B))
    assert paths(tree) == {(1,), (1, 2), (1, 2, 3), (1, 2, 4)}
    assert tree.depths == [0, 1, 2, 3, 3]
    assert [origin.drafter for origin in tree.origins] == ["root", "b", "b", "a", "b"]
    assert tree.child(2, 4) == 4
    assert tree.child(2, 5) is None


def test_duplicate_siblings_of_one_drafter_are_merged() -> None:
    """A token drafted twice under one parent was verified as two different guesses."""
    tree = DraftTree(9)
    tree.merge([Proposal(1, -1, 0.2, A), Proposal(1, -1, 0.6, B), Proposal(2, 0, 0.1, A), Proposal(3, 1, 0.6, B)])
    assert paths(tree) == {(1,), (1, 2), (1, 3)}
    assert tree.path_probs == [1.0, 0.6, 0.1, 0.6]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(-1, 20), st.floats(0, 3), st.sampled_from([A, B])), max_size=40),
    st.integers(0, 40),
)
def test_any_proposals_make_a_valid_tree(proposals: list[tuple[int, int, float, Origin]], num_nodes: int) -> None:
    """A node without its parent, a path more probable than its beginning, siblings alike, or a node lost in the cut."""
    tree = DraftTree(9)
    tree.merge(Proposal(t, min(parent, i - 1), prob, origin) for i, (t, parent, prob, origin) in enumerate(proposals))
    kept = tree.best(num_nodes)
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
    tree = DraftTree(9)
    tree.merge(chain([1, 2, 3], 0.5, A))
    tree.merge(chain([4, 5], 0.9, B))
    assert paths(tree.best(3)) == {(4,), (4, 5), (1,)}
    assert tree.best(99) is tree
    assert len(tree.best(0)) == 1


def test_what_cannot_be_verified_is_left_out_with_all_below() -> None:
    """A token that the model does not have, or a position past the end of the context, reached the forward."""
    tree = DraftTree(9)
    tree.merge(
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
    assert paths(tree) == {(3,), (3, 4)}
    empty = DraftTree(9)
    empty.merge(chain([1, 2], 0.5, A), max_depth=0)
    assert len(empty) == 1


def test_a_parent_that_does_not_exist_is_an_error() -> None:
    """A malformed list was silently hung somewhere else."""
    with pytest.raises(IndexError):
        DraftTree(9).merge([Proposal(1, 5, 0.9, A)])

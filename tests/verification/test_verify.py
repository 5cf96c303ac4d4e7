"""The walk down the tree: exact for any tree, by path identity and by the joint law on a three-token vocabulary."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from drafters import add_node
from oracle import choose
from statistics_of import softmax, surprise

from ragspec.core import Request, SamplingParams
from ragspec.tree import DraftTree
from ragspec.verification.sampling import KeyedSampler
from ragspec.verification.verify import verify

V, LENGTH, NUM_KEYS = 3, 3, 3000
PARAMS = SamplingParams(temperature=1.0)
TREES: dict[str, tuple[tuple[int, ...], ...]] = {
    "root only": (),
    "one guess": ((0,),),
    "all siblings": ((0,), (1,), (2,)),
    "chain": ((1,), (1, 0), (1, 0, 2)),
    "uneven": ((2,), (0,), (2, 2), (0, 1), (0, 2), (0, 1, 0)),
    "everything": tuple(path for d in (1, 2, 3) for path in itertools.product(range(V), repeat=d)),
}


@pytest.fixture(scope="module")
def law() -> dict[tuple[int, ...], np.ndarray]:
    """Logits of a target after each prefix; some tokens are impossible."""
    rng = np.random.default_rng(4)
    prefixes = [p for d in range(LENGTH) for p in itertools.product(range(V), repeat=d)]
    logits = {prefix: rng.normal(0, 1.2, V).astype(np.float32) for prefix in prefixes}
    logits[(1,)][0] = -np.inf
    return logits


def tree_of(paths: Sequence[tuple[int, ...]]) -> tuple[DraftTree, list[tuple[int, ...]]]:
    """The tree and each node's prefix."""
    tree, number, prefixes = DraftTree(0), {(): 0}, [()]
    for path in paths:
        number[path] = add_node(tree, number[path[:-1]], path[-1])
        prefixes.append(path)
    return tree, prefixes


def emit(law: dict[tuple[int, ...], np.ndarray], paths: Sequence[tuple[int, ...]], seed: int) -> tuple[int, ...]:
    """Tokens emitted until there are LENGTH, with the same draft offered below every committed prefix."""
    sampler = KeyedSampler(Request("a", (0,), PARAMS), seed, 0, (), [])
    output: tuple[int, ...] = ()
    while len(output) < LENGTH:
        known = [path for path in paths if len(path) <= LENGTH - 1 - len(output)]
        tree, prefixes = tree_of(known)
        logits = np.stack([law[(*output, *prefix)] for prefix in prefixes])
        path, tokens = verify(tree, lambda node, rows=logits: sampler(rows[node]), LENGTH - len(output))
        assert [tree.token_ids[node] for node in path] == tokens[: len(path)]
        assert len(tokens) == len(path) + 1 or len(output) + len(tokens) == LENGTH
        output = (*output, *tokens)
    return output


def joint(law: dict[tuple[int, ...], np.ndarray]) -> np.ndarray:
    """Probability of every output of LENGTH tokens."""
    paths = itertools.product(range(V), repeat=LENGTH)
    return np.array([np.prod([softmax(law[path[:i]])[path[i]] for i in range(LENGTH)]) for path in paths])


def counts_of(outputs: Sequence[tuple[int, ...]]) -> np.ndarray:
    numbers = [(a * V + b) * V + c for a, b, c in outputs]
    return np.bincount(numbers, minlength=V**LENGTH)


def test_outputs_follow_the_targets_law(law: dict[tuple[int, ...], np.ndarray]) -> None:
    """The joint law of several tokens of one request is not the target's."""
    outputs = [emit(law, TREES["uneven"], seed) for seed in range(NUM_KEYS)]
    assert surprise(counts_of(outputs), NUM_KEYS * joint(law)) < 6


@pytest.mark.parametrize("name", TREES)
def test_every_tree_gives_the_same_path(law: dict[tuple[int, ...], np.ndarray], name: str) -> None:
    """Lossless in law but not in path: a draft changed a seeded output."""
    for seed in range(300):
        plain: tuple[int, ...] = ()
        for i in range(LENGTH):
            plain = (*plain, choose(law[plain], PARAMS, seed, 0, i))
        assert emit(law, TREES[name], seed) == plain


def test_the_walk_stops_at_the_last_allowed_token() -> None:
    """More tokens than `max_tokens` allows were decided, which advances keys and penalties too far."""
    tree, _ = tree_of([(5,), (5, 6), (5, 6, 7)])
    for most, path in ((4, [1, 2, 3]), (99, [1, 2, 3]), (2, [1]), (1, [])):
        assert verify(tree, [5, 6, 7, 8].__getitem__, most) == (path, [5, 6, 7, 8][: len(path) + 1])


def test_the_walk_asks_for_each_token_once() -> None:
    """A sampler with state (penalties, key index) was asked about rows that are not on the path."""
    tree, _ = tree_of([(5,), (4,), (5, 6), (4, 9)])
    asked: list[int] = []

    def token_after(node: int) -> int:
        asked.append([5, 6, 1, 2, 3][node])
        return asked[-1]

    assert verify(tree, token_after, 9) == ([1, 3], [5, 6, 2])
    assert asked == [5, 6, 2]

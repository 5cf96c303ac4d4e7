"""The walk down the tree: exact for any tree, by path identity and by the joint law on a three-token vocabulary."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from oracle import choose
from statistics_of import softmax, surprise

from ragspec.core import Request, SamplingParams
from ragspec.tree import DraftTree, Origin
from ragspec.verification.sampling import KeyedSampler
from ragspec.verification.verify import verify

V, LENGTH, NUM_KEYS = 3, 3, 6000
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
        number[path] = tree.add(number[path[:-1]], path[-1], 0.5, Origin("test"))
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
    return np.array(
        [
            np.prod([softmax(law[path[:i]])[path[i]] for i in range(LENGTH)])
            for path in itertools.product(range(V), repeat=LENGTH)
        ]
    )


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
    for seed in range(1500):
        plain: tuple[int, ...] = ()
        for i in range(LENGTH):
            plain = (*plain, choose(law[plain], PARAMS, seed, 0, i))
        assert emit(law, TREES[name], seed) == plain


@pytest.fixture
def always() -> Callable[[Sequence[int]], tuple[np.ndarray, Callable[[np.ndarray], int]]]:
    """A target that says what each node's row names."""
    return lambda tokens: (np.eye(10, dtype=np.float32)[list(tokens)], lambda row: int(row.argmax()))


def test_the_walk_stops_at_the_last_allowed_token(always: Callable[..., object]) -> None:
    """More tokens than `max_tokens` allows were decided, which advances keys and penalties too far."""
    tree, _ = tree_of([(5,), (5, 6), (5, 6, 7)])
    logits, sampler = always([5, 6, 7, 8])  # type: ignore[misc]
    assert verify(tree, lambda node: sampler(logits[node]), 4) == ([1, 2, 3], [5, 6, 7, 8])
    assert verify(tree, lambda node: sampler(logits[node]), 99) == ([1, 2, 3], [5, 6, 7, 8])
    assert verify(tree, lambda node: sampler(logits[node]), 2) == ([1], [5, 6])
    assert verify(tree, lambda node: sampler(logits[node]), 1) == ([], [5])


def test_the_walk_asks_for_each_token_once(always: Callable[..., object]) -> None:
    """A sampler with state (penalties, key index) was asked about rows that are not on the path."""
    tree, _ = tree_of([(5,), (4,), (5, 6), (4, 9)])
    logits, _ = always([5, 6, 1, 2, 3])  # type: ignore[misc]
    asked: list[int] = []

    def counting(row: np.ndarray) -> int:
        asked.append(int(row.argmax()))
        return asked[-1]

    assert verify(tree, lambda node: counting(logits[node]), 9) == ([1, 3], [5, 6, 2])
    assert asked == [5, 6, 2]

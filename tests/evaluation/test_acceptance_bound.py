"""The bound at T=1 is an expectation: by enumeration, and against what sampling really accepts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ragspec.core import Request, SamplingParams
from ragspec.evaluation.suites.acceptance_bound import expected_accepted
from ragspec.tree import DraftTree, Origin
from ragspec.verification.sampling import KeyedSampler
from ragspec.verification.verify import verify

ORIGIN = Origin("test")


def small_tree() -> DraftTree:
    """Root with children 1 and 2; below 1 a child 0."""
    tree = DraftTree(0)
    first = tree.add(0, 1, 0.5, ORIGIN)
    tree.add(0, 2, 0.3, ORIGIN)
    tree.add(first, 0, 0.2, ORIGIN)
    return tree


def test_expected_acceptance_is_the_sum_of_path_probabilities() -> None:
    """Bug guarded: a node's own probability taken for that of its path, or a sibling's row for the parent's."""
    logits = np.log(np.array([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8], [0.3, 0.3, 0.4]], np.float32))
    assert expected_accepted(small_tree(), logits) == pytest.approx(0.5 + 0.3 + 0.5 * 0.6, abs=1e-6)


def test_sampling_accepts_as_many_as_expected() -> None:
    """Bug guarded: a bound that has nothing to do with what verification does."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(4, 3)).astype(np.float32)
    tree, params = small_tree(), SamplingParams(temperature=1.0)
    num_draws = 4000
    samplers = (KeyedSampler(Request("r", (0,), params), seed, 0, (), []) for seed in range(num_draws))
    accepted = sum(len(verify(tree, lambda node, s=s: s(logits[node]), 10).path) for s in samplers)
    expected = expected_accepted(tree, logits)
    assert accepted / num_draws == pytest.approx(expected, abs=4 * 1.0 / math.sqrt(num_draws))

"""Whole rows of probabilities have the survivors that sampling has; draws have the law they say; chance is keyed."""

import itertools

import numpy as np
import oracle
import pytest
from branches import branches
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from statistics_of import softmax, surprise

from ragspec.core import SamplingParams
from ragspec.numerics.noise import output_key
from ragspec.verification.probabilities import (
    KeyedRandom,
    RandomStream,
    draw_iid,
    draw_without_replacement,
    token_probs,
)
from ragspec.verification.sampling import TokenCounts

LOGITS = st.lists(
    st.one_of(st.sampled_from([-np.inf, 0.0, 1.0, 2.0]), st.floats(-30, 30, width=32)), min_size=1, max_size=12
).map(lambda values: np.array(values, np.float32))


@settings(max_examples=100, deadline=None)
@given(
    LOGITS,
    st.sampled_from([0, 1, 2, 3, 7, 100]),
    st.sampled_from([1.0, 0.9, 0.731, 0.5, 0.137, 1e-9]),
    st.sampled_from([0.0, 0.05, 0.3, 1.0]),
)
def test_rows_hold_the_survivors_of_sampling(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> None:
    """The law a rule accepts by is not the law that plain decoding samples from."""
    assume(logits.max() > -np.inf)
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    assume(not oracle.is_ambiguous(logits, top_k, top_p))
    probs = token_probs(logits, params)
    kept = oracle.survivors(logits, params)
    assert np.flatnonzero(probs).tolist() == sorted(kept)
    np.testing.assert_allclose(probs[kept], softmax(logits[kept]), rtol=1e-12)
    assert probs.sum() == pytest.approx(1.0, abs=1e-15 * 8)


def test_rows_are_warped_as_the_oracle_says() -> None:
    """A warp missing, or in another order than sampling's."""
    logits = np.random.default_rng(0).normal(0, 2, 9).astype(np.float32)
    params = SamplingParams(
        temperature=0.6,
        repetition_penalty=1.5,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        logit_bias={3: 2.0},
        min_tokens=9,
    )
    probs = token_probs(logits, params, TokenCounts((1, 2), [2, 4, 4]), forbidden=(7,))
    np.testing.assert_allclose(probs, softmax(oracle.warped(logits, (1, 2), [2, 4, 4], params, (7,))), rtol=1e-12)


@pytest.mark.parametrize(
    ("logits", "temperature", "expected"),
    [([1, 3, 3], 0.0, 1), ([-0.0, 0.0], 0.0, 0), ([-np.inf] * 3, 1.0, 0), ([-np.inf, 2.0, 1.0], 1e-7, 1)],
)
def test_one_token_takes_all(logits: list[float], temperature: float, expected: int) -> None:
    """Ties at temperature 0 shared, or nothing left where everything is forbidden."""
    probs = token_probs(np.array(logits, np.float32), SamplingParams(temperature=temperature))
    np.testing.assert_array_equal(probs, np.eye(len(logits))[expected])


DRAFT_PROBS = np.array([0.5, 0.0, 0.3, 0.2])


def test_draws_have_their_law() -> None:
    """Draws without replacement from probabilities not renormalised, or in another order than drawn."""
    found: dict[tuple[int, ...], float] = {}
    for prob, tokens in branches(lambda chance: draw_without_replacement(DRAFT_PROBS, 2, chance)):
        found[tokens] = found.get(tokens, 0.0) + prob
    expected = {
        (a, b): DRAFT_PROBS[a] * DRAFT_PROBS[b] / (1 - DRAFT_PROBS[a]) for a, b in itertools.permutations((0, 2, 3), 2)
    }
    assert found == pytest.approx(expected, abs=1e-15)
    independent = {tokens: prob for prob, tokens in branches(lambda chance: draw_iid(DRAFT_PROBS, 2, chance))}
    assert independent == pytest.approx(
        {(a, b): DRAFT_PROBS[a] * DRAFT_PROBS[b] for a, b in itertools.product((0, 2, 3), repeat=2)}
    )


def test_draws_end_with_the_support() -> None:
    """A fourth draw where three tokens have a probability."""
    drawn = draw_without_replacement(DRAFT_PROBS, 9, KeyedRandom(1, 0, 0, RandomStream.DRAFT))
    assert sorted(drawn) == [0, 2, 3]
    np.testing.assert_array_equal(DRAFT_PROBS, [0.5, 0.0, 0.3, 0.2])


def test_every_key_has_numbers_of_its_own() -> None:
    """Two tokens, two choices, or drafts and decisions that meet the same numbers, or those of the Gumbel noise."""
    keys = itertools.product((0, 2**64 - 1), (0, 1), (0, 1, 5), RandomStream)
    numbers = [chance.uniform() for chance in (KeyedRandom(*key) for key in keys) for _ in range(5)]
    noise = [
        bits / 2**53
        for parts in itertools.product((0, 2**64 - 1), (0, 1), (0, 1, 5))
        for bits in oracle.bits(*parts, 20)
    ]
    assert len({*numbers, *noise}) == len(numbers) + len(noise)
    again = KeyedRandom(0, 0, 0, RandomStream.VERIFY)
    assert [again.uniform() for _ in range(5)] == numbers[:5]
    nested = int(output_key(int(output_key(0, 0, 0)), 1, 2))
    assert numbers[2] == (nested >> 11) / 2**53


@pytest.mark.parametrize("stride", [1, 2])
def test_numbers_are_uniform_and_independent(stride: int) -> None:
    """Numbers of one key, or the first numbers of neighbouring keys, that share structure: pairs in an 8 x 8 grid."""
    chance = KeyedRandom(7, 0, 3, RandomStream.VERIFY)
    in_a_row = [chance.uniform() for _ in range(12_800)]
    of_neighbours = [KeyedRandom(7, 0, index, RandomStream.VERIFY).uniform() for index in range(12_800)]
    for numbers in (in_a_row, of_neighbours):
        cells = (np.array(numbers) * 8).astype(int)
        pairs = cells[:-stride:2] * 8 + cells[stride::2][: len(cells[:-stride:2])]
        counts = np.bincount(pairs, minlength=64)
        assert surprise(counts, np.full(64, len(pairs) / 64)) < 6

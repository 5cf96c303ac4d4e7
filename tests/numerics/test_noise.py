"""Quality of the keyed noise: equal to its definition, uniform, independent between neighbouring keys, never infinite."""

import math
from itertools import pairwise

import numpy as np
import oracle
import pytest
from statistics_of import softmax, surprise

from ragspec.core import SamplingParams
from ragspec.numerics.noise import LARGEST_GUMBEL, bits, gumbel, output_key, random_seed, row_seed
from ragspec.sampling_params import MAX_SEED
from ragspec.verification.sampling import sample

PARTS = ("seed", "choice", "index", "token")
NUM = 20_000


def walk(part: str, num: int = NUM, start: int = 0) -> np.ndarray:
    """53-bit values along one part of the key, the others fixed. uint64 [num]."""
    fixed = {"seed": 123, "choice": 1, "index": 17, "token": 9}
    if part == "token":
        key = output_key(fixed["seed"], fixed["choice"], fixed["index"])
        return np.array([bits(key, np.uint64(start + i)) for i in range(num)], np.uint64)
    values = []
    for i in range(num):
        at = {**fixed, part: start + i}
        values.append(bits(output_key(at["seed"], at["choice"], at["index"]), np.uint64(at["token"])))
    return np.array(values, np.uint64)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63, MAX_SEED])
@pytest.mark.parametrize(("choice", "index"), [(0, 0), (3, 1), (63, 2**31)])
def test_the_row_is_its_definition(seed: int, choice: int, index: int) -> None:
    """A shift of signed integers, an overflow or a lost part of the key."""
    expected = [oracle.gumbel(h) for h in oracle.bits(seed, choice, index, 50)]
    key = output_key(seed, choice, index)
    np.testing.assert_allclose([gumbel(bits(key, np.uint64(v))) for v in range(50)], expected, rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("part", PARTS)
def test_every_bit_is_fair_and_neighbours_are_independent(part: str) -> None:
    """A weak mixing step leaves a bit constant or biased along one part of the key; keys combined linearly: neighbouring seeds,
    choices, positions or ids share structure."""
    values = walk(part)
    for bits_of in (values, values[1:] ^ values[:-1]):
        ones = np.array([((bits_of >> np.uint64(b)) & np.uint64(1)).sum() for b in range(53)], np.float64)
        assert np.abs(ones - NUM / 2).max() < 4.5 * math.sqrt(NUM) / 2
    assert int(values.max()) < 2**53
    cells = np.bincount((values >> np.uint64(43)).astype(np.int64), minlength=1024)
    assert abs(surprise(cells, np.full(1024, NUM / 1024))) < 6
    u = values.astype(np.float64) / 2**53
    for lag in (1, 2, 16, 64):
        assert abs(np.corrcoef(u[lag:], u[:-lag])[0, 1]) < 5 / math.sqrt(NUM)
    high = (values >> np.uint64(50)).astype(np.int64)
    pairs = np.bincount(8 * high[1:] + high[:-1], minlength=64)
    assert abs(surprise(pairs, np.full(64, (NUM - 1) / 64))) < 6


def test_the_parts_of_the_key_do_not_stand_in_for_each_other() -> None:
    """(seed, choice + 1) met the noise of (seed + 1, choice): the choices of one request repeat another's."""
    keys = [output_key(s, c, i) for s in range(12) for c in range(12) for i in range(12)]
    values = {int(bits(key, np.uint64(v))) for key in keys for v in range(12)}
    assert len(values) == 12**4


@pytest.mark.parametrize("h", [0, 1, 2**52 - 1, 2**52, 2**52 + 1, 2**53 - 3, 2**53 - 2, 2**53 - 1])
def test_noise_is_finite_and_right_at_the_ends(h: int) -> None:
    """u rounded to 1 in float64 gives infinite noise: a random token, once in 2**53 draws (2**24 in float32)."""
    g = gumbel(np.uint64(h))
    assert math.isfinite(g)
    assert g == pytest.approx(oracle.gumbel(h), rel=1e-15)
    assert g <= LARGEST_GUMBEL


def test_noise_rises_with_the_bits() -> None:
    """A seam between the two formulas of the Gumbel function."""
    near = [2**52 + d for d in range(-50, 50)]
    values = [gumbel(np.uint64(h)) for h in (*range(100), *near, *range(2**53 - 100, 2**53))]
    assert all(a <= b for a, b in pairwise(values))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("part", ["seed", "choice", "index"])
def test_three_tokens_occur_as_often_as_they_should(part: str, temperature: float) -> None:
    """Sampling that is not the softmax's distribution."""
    logits = np.array([0.3, -1.0, 1.2], np.float32)
    params = SamplingParams(temperature=temperature)
    x = logits / np.float32(temperature)
    keys = {"seed": lambda i: (i, 0, 0), "choice": lambda i: (5, i, 0), "index": lambda i: (5, 0, i)}[part]
    tokens = np.array([sample(x, params, *keys(i)) for i in range(NUM)])
    assert surprise(np.bincount(tokens, minlength=3), NUM * softmax(x)) < 6
    pairs = np.bincount(3 * tokens[1::2] + tokens[::2], minlength=9)
    assert surprise(pairs, NUM / 2 * np.outer(softmax(x), softmax(x)).ravel()) < 6


def test_a_biased_sampler_would_be_noticed() -> None:
    """A chi-square that accepts everything."""
    p = softmax(np.array([0.3, -1.0, 1.2], np.float32))
    biased = NUM * softmax(np.array([0.37, -1.0, 1.2], np.float32))
    assert surprise(biased, NUM * p) > 6


def test_seeds_of_rows_depend_on_the_id_only() -> None:
    """A row of a batch job answered differently when the input was reordered, or two rows alike."""
    seeds = [row_seed(7, f"row {i}") for i in range(1000)]
    assert len(set(seeds)) == 1000 == len({random_seed() for _ in range(1000)})
    assert seeds == [row_seed(7, f"row {i}") for i in range(1000)]
    assert row_seed(8, "row 0") not in seeds
    assert all(0 <= seed <= MAX_SEED for seed in seeds)
    assert row_seed(1, "2") != row_seed(12, "")

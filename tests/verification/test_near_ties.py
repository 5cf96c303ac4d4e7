"""Near ties: whatever other roundings may decide is counted, and not much else."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ragspec.core import Request, SamplingParams
from ragspec.numerics.noise import output_key
from ragspec.verification.near_ties import is_near_tie
from ragspec.verification.sampling import KeyedSampler, sample

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "top_k": {"temperature": 1.0, "top_k": 4},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "min_p": {"temperature": 1.0, "min_p": 0.2},
    "all": {"temperature": 1.0, "top_k": 9, "top_p": 0.85, "min_p": 0.05},
}
SLACK = 0.05


@pytest.mark.parametrize("way", WAYS)
def test_whatever_may_be_decided_otherwise_is_a_near_tie(way: str) -> None:
    """A text that came out otherwise, with no near tie counted: the warps' own edges are ties, too."""
    params, rng, num_changed = SamplingParams(**WAYS[way]), np.random.default_rng(3), 0
    for index in range(400):
        row = rng.normal(0.0, 1.5, 40).astype(np.float32)
        token = sample(row, params, 7, 0, index)
        near = is_near_tie(row, params, output_key(7, 0, index), token, SLACK * 1.001)  # float32 rounds the sum
        for _ in range(30):
            off = (SLACK * rng.choice([-1.0, 1.0], 40)).astype(np.float32)
            if sample(row + off, params, 7, 0, index) != token:
                num_changed += 1
                assert near, (index, token)
    assert num_changed > 50


@pytest.mark.parametrize("way", WAYS)
def test_what_is_decided_clearly_is_none(way: str) -> None:
    """A count that says near tie to everything says nothing."""
    params, rng = SamplingParams(**WAYS[way]), np.random.default_rng(4)
    rows = [rng.normal(0.0, 1.5, 200).astype(np.float32) for _ in range(300)]
    for slack, most in ((1e-6, 0), (1e-3, 30)):
        keys = [output_key(1, 0, index) for index in range(len(rows))]
        tokens = [sample(row, params, 1, 0, index) for index, row in enumerate(rows)]
        near = [is_near_tie(row, params, key, token, slack) for row, key, token in zip(rows, keys, tokens, strict=True)]
        assert sum(near) <= most


def test_a_sampler_counts_in_the_units_of_its_logits() -> None:
    """At a low temperature a difference of logits grows: counted by the logits, ties there were missed."""
    row = np.array([1.0, 0.0, -3.0], np.float32)
    for temperature, uncertainty, expected in (
        (0.0, 0.4, 0),
        (0.0, 0.5, 1),
        (1e-3, 0.4, 0),
        (1e-3, 0.6, 1),
        (1.0, 0.0, 0),
    ):
        request = Request("a", (0,), SamplingParams(temperature=temperature))
        sampler = KeyedSampler(request, 5, 0, (), [], uncertainty)
        assert sampler(row) == 0 or temperature == 1.0
        assert sum(sampler.near_ties) == expected, (temperature, uncertainty)


def test_penalties_stretch_what_is_uncertain() -> None:
    """A penalised logit is divided: both sides of the comparison move."""
    request = Request("a", (0,), SamplingParams(temperature=0.0, repetition_penalty=0.5))
    sampler = KeyedSampler(request, 5, 0, (), [], uncertainty=0.3)
    assert sampler(np.array([1.0, 1.0, -3.0], np.float32)) == 0  # 2 after the penalty, against 1
    assert sampler.near_ties == [True]


@pytest.mark.parametrize(
    "extra", [{"logit_bias": {0: 100.0, 1: 100.0}}, {"frequency_penalty": 2.0, "presence_penalty": 1.0}]
)
def test_what_the_warps_round_is_uncertain_too(extra: dict[str, Any]) -> None:
    """A bias of 100 rounds differences away that decide without it: 235 of 235 changed tokens were not counted."""
    rng, num_changed, uncertainty = np.random.default_rng(2), 0, 9.6e-7
    for _ in range(4_000):
        first = np.float32(rng.uniform(3.0, 4.0))
        row = np.array([first, first + np.float32(rng.uniform(-6e-6, 6e-6)), -3.0], np.float32)
        off = (row + np.array([uncertainty / 2, -uncertainty / 2, 0.0])).astype(np.float32)
        samplers = [
            KeyedSampler(Request("a", (0,), SamplingParams(temperature=0.0, **extra)), 5, 0, (), [0, 1], uncertainty)
            for _ in range(2)
        ]
        tokens = [sampler(each) for sampler, each in zip(samplers, (row, off), strict=True)]
        if tokens[0] != tokens[1]:
            num_changed += 1
            assert all(sampler.near_ties == [True] for sampler in samplers)
    assert num_changed > 20


@pytest.mark.parametrize("way", WAYS)
def test_where_logits_are_no_numbers_everything_is_a_tie(way: str) -> None:
    """A self-test that met a NaN knows no bound."""
    params, row = SamplingParams(**WAYS[way]), np.arange(5, dtype=np.float32)
    assert is_near_tie(row, params, output_key(1, 0, 0), sample(row, params, 1, 0, 0), math.inf)

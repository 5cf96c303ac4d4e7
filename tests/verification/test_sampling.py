"""Sampling without a sort equals its definition with one; penalties are those of vLLM and Hugging Face."""

import numpy as np
import oracle
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from statistics_of import softmax
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from ragspec.core import Request, SamplingParams
from ragspec.numerics.noise import bits, gumbel, output_key
from ragspec.verification.sampling import KeyedSampler, TokenCounts, _best_noisy, logprob, sample, warp

INF = np.float32(np.inf)
LOGITS = st.lists(
    st.one_of(
        st.sampled_from([-np.inf, -3.0, 0.0, 1.0, 1.5, 2.0]),
        st.floats(-30, 30, width=32),
        st.sampled_from([-1e30, 1e30, 1e-30]),
    ),
    min_size=1,
    max_size=14,
).map(lambda values: np.array(values, np.float32))


@settings(max_examples=120, deadline=None)
@given(
    LOGITS,
    st.sampled_from([0, 1, 2, 3, 7, 14, 100]),
    st.sampled_from([1.0, 0.999, 0.9, 0.731, 0.5, 0.137, 1e-9]),
    st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    st.integers(0, 2**64 - 1),
)
def test_survivors_without_a_sort(logits: np.ndarray, top_k: int, top_p: float, min_p: float, seed: int) -> None:
    """A tie at the edge of top-k or top-p decided otherwise, a filter applied to another one's survivors, a banned token."""
    assume(logits.max() > -np.inf)
    assume(not oracle.is_ambiguous(logits, top_k, top_p))
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = oracle.survivors(logits, params)
    for index in range(4):
        token = sample(logits, params, seed, 0, index)
        assert token == oracle.choose(logits, params, seed, 0, index)
        assert token in kept
        assert logits[token] > -np.inf


def test_many_tokens_with_few_values() -> None:
    """The heap of the k best kept a higher id among equal logits."""
    rng = np.random.default_rng(1)
    for _ in range(80):
        logits = rng.integers(0, 4, 200).astype(np.float32)
        top_k = int(rng.integers(1, 200))
        params = SamplingParams(temperature=1.0, top_k=top_k, top_p=float(rng.uniform(0.1, 1.0)))
        seed = int(rng.integers(2**62))
        assert sample(logits, params, seed, 1, 2) == oracle.choose(logits, params, seed, 1, 2)


@pytest.mark.parametrize(
    ("params", "warper"),
    [
        (SamplingParams(temperature=1.0, top_k=5), TopKLogitsWarper(5)),
        (SamplingParams(temperature=1.0, top_p=0.8), TopPLogitsWarper(0.8)),
        (SamplingParams(temperature=1.0, min_p=0.1), MinPLogitsWarper(0.1)),
    ],
)
def test_survivors_are_those_of_transformers(params: SamplingParams, warper: object) -> None:
    """Our oracle and our engine share a wrong definition of top-p."""
    rng = np.random.default_rng(3)
    for _ in range(50):
        logits = rng.normal(0, 2, 40).astype(np.float32)
        theirs = warper(None, torch.from_numpy(logits)[None])[0]  # type: ignore[operator]
        assert sorted(oracle.survivors(logits, params)) == torch.isfinite(theirs).nonzero()[:, 0].tolist()


def test_pruned_argmax_equals_the_whole_argmax() -> None:
    """A token was skipped whose noise would have won."""
    rng = np.random.default_rng(2)
    scales = (0.0, 1e-30, 1.0, 8.0, 40.0, 1e4, 1e30)
    for i in range(1_000):
        num = int(rng.integers(1, 80))
        x = (rng.normal(size=num) * scales[i % len(scales)]).astype(np.float32)
        if i % 3 == 0:
            x = np.round(x)
        if i % 4 == 0:
            x[rng.random(num) < 0.4] = -INF
        start = int(x.argmax())
        key = output_key(i, 0, 0)
        sums = x.astype(np.float64) + [gumbel(bits(key, np.uint64(v))) for v in range(num)]
        if x[start] > -np.inf:
            assert _best_noisy(x, key, start, -INF, num) == int(sums.argmax())


def test_greedy_takes_the_lower_id_on_ties() -> None:
    """Greedy decoding that depends on the order of the search."""
    params = SamplingParams()
    assert sample(np.array([1, 3, 3, 2], np.float32), params, 0, 0, 0) == 1
    assert sample(np.array([-INF, -INF, -5, -5], np.float32), params, 0, 0, 0) == 2
    assert sample(np.array([-0.0, 0.0], np.float32), params, 0, 0, 0) == 0


def test_everything_forbidden_still_ends() -> None:
    """An endless search for a survivor where every logit is -inf."""
    logits = np.full(7, -np.inf, np.float32)
    for params in (SamplingParams(), SamplingParams(temperature=1.0, top_p=0.5, top_k=3, min_p=0.2)):
        assert 0 <= sample(logits, params, 1, 0, 0) < 7


@pytest.mark.parametrize("temperature", [1e-4, 1e-7, 1e-30, 5e-324, 100.0])
def test_extreme_temperatures(temperature: float) -> None:
    """A tiny temperature overflows the logits: infinities tie and the lowest id wins instead of the best."""
    logits = np.array([1.0, 5.0, 2.0, -3.0], np.float32)
    params = SamplingParams(temperature=temperature)
    tokens = {sample(warp(logits, params, None), params, seed, 0, 0) for seed in range(200)}
    assert tokens == ({1} if temperature < 1 else {0, 1, 2, 3})


def test_repetition_penalty_is_that_of_transformers() -> None:
    """Negative logits divided, or prompt tokens left out."""
    rng = np.random.default_rng(5)
    prompt, output = (3, 3, 8, 11), [1, 8, 20, 1]
    for penalty in (0.5, 1.2, 3.0):
        logits = rng.normal(0, 3, 30).astype(np.float32)
        logits[3] = 0.0
        ids = torch.tensor([[*prompt, *output]])
        theirs = RepetitionPenaltyLogitsProcessor(penalty)(ids, torch.from_numpy(logits.copy())[None])[0].numpy()
        params = SamplingParams(repetition_penalty=penalty)
        ours = warp(logits, params, TokenCounts(prompt, output))
        np.testing.assert_array_equal(ours, theirs)


def test_presence_and_frequency_count_the_output_only() -> None:
    """Presence scaled by the count, or the prompt counted too (vLLM and OpenAI: output only)."""
    logits = np.zeros(6, np.float32)
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, logit_bias={2: 4.0})
    ours = warp(logits, params, TokenCounts((0, 1, 1), [3, 3, 4]))
    np.testing.assert_array_equal(ours, np.array([0, 0, 4, -1.0, -0.75, 0], np.float32))
    np.testing.assert_array_equal(logits, np.zeros(6))


def test_warps_come_in_order() -> None:
    """Bias before the penalty or after the temperature."""
    logits = np.array([2.0, -2.0, 1.0, 0.0], np.float32)
    params = SamplingParams(temperature=0.5, repetition_penalty=2.0, presence_penalty=1.0, logit_bias={0: 3.0})
    ours = warp(logits, params, TokenCounts((0,), [1]), forbidden=(3,))
    np.testing.assert_array_equal(ours, np.array([8.0, -10.0, 2.0, -np.inf], np.float32))


def test_the_sampler_counts_what_it_decided() -> None:
    """Penalties of a path inside a draft tree that do not see the path's own tokens; keys that do not advance."""
    params = SamplingParams(
        temperature=1.0, seed=4, repetition_penalty=1.5, presence_penalty=0.3, frequency_penalty=0.2, min_tokens=4
    )
    rng = np.random.default_rng(6)
    rows = rng.normal(0, 1, (12, 9)).astype(np.float32)
    prompt = (2, 5, 5)
    sampler = KeyedSampler(Request("a", prompt, params), 4, 2, (0, 7), [])
    output: list[int] = []
    for row in rows:
        expected = oracle.choose(oracle.warped(row, prompt, output, params, (0, 7)), params, 4, 2, len(output))
        assert sampler(row) == expected
        output.append(expected)
    assert not {0, 7} & set(output[:4])
    resumed = KeyedSampler(Request("a", prompt, params), 4, 2, (0, 7), output[:5])
    assert [resumed(row) for row in rows[5:]] == output[5:]


def test_logprobs_are_of_the_unwarped_logits() -> None:
    """Alternatives unsorted, or normalised over the wrong row."""
    logits = np.array([1.0, 3.0, 3.0, -np.inf, 0.0], np.float32)
    got = logprob(logits, 4, 3)
    expected = np.log(softmax(logits)[[4, 1, 2, 0]])
    assert got.token_id == 4
    assert got.logprob == pytest.approx(expected[0], rel=1e-12)
    assert [v for v, _ in got.top] == [1, 2, 0]
    assert [p for _, p in got.top] == pytest.approx(expected[1:], rel=1e-12)
    assert logprob(logits, 1, 0).top == ()

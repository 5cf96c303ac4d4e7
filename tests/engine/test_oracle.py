"""The engine equals plain decoding token for token: whatever is drafted, whoever else is in the batch, however it is cut up."""

import itertools
from dataclasses import replace

import pytest
from drafters import Half, Raising
from oracle_cases import (
    PARAMS,
    PROMPTS,
    asked,
    assert_equal,
    assert_pool_is_empty,
    drafters,
    generated,
    params_key,
    requests_of,
    total,
    truth,
)
from tiny_target import Tiny, tiny_engine

from ragspec.core import Request, SamplingParams

DTYPES = ("float32", "bfloat16", "torch-float32", "torch-bfloat16")
DRAFTERS = ("off", "copy", "random", "perfect", "wrong", "half", "raises")
QUICK = 2
"""Every second pair of parameters and drafter runs by default; together they hold every drafter, parameter and dtype."""


PAIRS = [
    pytest.param(name, kind, DTYPES[(i + j) // QUICK % len(DTYPES)], marks=[pytest.mark.slow] * ((i + j) % QUICK))
    for (i, name), (j, kind) in itertools.product(enumerate(PARAMS), enumerate(DRAFTERS))
]


@pytest.mark.parametrize(("name", "kind", "dtype"), PAIRS)
def test_every_drafter_alone_and_in_a_ragged_batch(tiny: Tiny, name: str, kind: str, dtype: str) -> None:
    """A draft, or the company in a batch, changed the output."""
    target = tiny("llama", dtype)
    requests, expected = asked(target, name)
    drafter = None if kind == "off" else drafters(target, expected)[kind]
    with tiny_engine(target, [drafter] if drafter else []) as engine:
        together = engine.generate(requests)
        alone = [engine.generate([request])[0] for request in requests[::5]]
    assert_equal(together, expected)
    assert_equal(alone, expected)
    for completions in (together, alone):
        accepted, drafted = total(completions, "num_accepted"), total(completions, "num_drafted")
        if kind in ("perfect", "half"):
            share = 0.7 if kind == "perfect" else 0.4
            assert accepted > share * total(completions, "num_output_tokens")
        if kind in ("off", "raises"):
            assert drafted == 0
        if kind == "wrong":
            assert drafted > 0 == accepted


@pytest.mark.parametrize(
    ("kind", "name", "which", "dtype"),
    [
        ("qwen2", "greedy", "half", "torch-bfloat16"),
        ("qwen3", "top-p", "copy", "float32"),
        ("mistral", "top-p", "half", "float32"),
        ("mistral", "greedy", "copy", "torch-bfloat16"),
    ],
)
def test_other_architectures(tiny: Tiny, kind: str, name: str, which: str, dtype: str) -> None:
    """A sliding window counted in slots, a bias or a query norm lost, trees at other positions than chains."""
    target = tiny(kind, dtype)
    requests, expected = asked(target, name, PROMPTS[:6])
    drafter = drafters(target, expected)[which]
    assert_equal(generated(target, [drafter], [requests], max_num_batched_tokens=40), expected)


@pytest.mark.parametrize(
    ("max_num_batched_tokens", "dtype", "name", "which", "enable_prefix_caching"),
    [
        (16, "float32", "greedy", "perfect", True),
        (16, "torch-float32", "T=1", "random", False),
        (23, "float32", "T=1", "random", False),
        (23, "torch-float32", "greedy", "perfect", True),
        (512, "float32", "T=1", "perfect", True),
    ],
)
def test_chunked_prefill(
    tiny: Tiny, max_num_batched_tokens: int, dtype: str, name: str, which: str, enable_prefix_caching: bool
) -> None:
    """A prompt cut into chunks, or found in the cache, gave other bits; a chunk's last row was taken for a decision."""
    target = tiny("llama", dtype)
    requests, expected = asked(target, name)
    drafter = drafters(target, expected)[which]
    options = {"max_num_batched_tokens": max_num_batched_tokens, "enable_prefix_caching": enable_prefix_caching}
    completions = generated(target, [drafter], [requests, requests], **options)
    assert_equal(completions, expected)
    assert (total(completions[len(requests) :], "num_cached_tokens") > 0) == enable_prefix_caching


@pytest.mark.parametrize(("dtype", "enable_prefix_caching"), [("float32", True), ("torch-float32", False)])
def test_choices_have_their_own_keys_and_share_the_prompt(tiny: Tiny, dtype: str, enable_prefix_caching: bool) -> None:
    """All choices alike, or the second choice waiting for a prompt that nobody computes."""
    target = tiny("llama", dtype)
    params = SamplingParams(temperature=1.0, n=3, seed=8, max_tokens=12)
    requests = requests_of(target, params, PROMPTS[:4])
    expected = truth(target, requests, params_key(params))
    options = {"enable_prefix_caching": enable_prefix_caching, "max_num_batched_tokens": 30}
    completions = generated(target, [drafters(target, expected)["half"]], [requests], **options)
    assert_equal(completions, expected)
    assert [(c.request_id, c.choice) for c in completions] == list(expected)
    assert len({c.token_ids for c in completions if c.request_id == "r0"}) == 3
    if enable_prefix_caching:
        long = [c.stats.num_cached_tokens for c in completions if c.request_id == "r3"]
        assert max(long) == len(requests[3].prompt_ids) - 1


@pytest.mark.parametrize(("dtype", "enable_prefix_caching"), [("float32", True), ("torch-float32", False)])
def test_preemption_changes_nothing(tiny: Tiny, dtype: str, enable_prefix_caching: bool) -> None:
    """Sequences that all fit when they began and outgrew the pool together."""
    target = tiny("llama", dtype)
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=3, ignore_eos=True)
    requests = [Request(f"p{i}", tuple(range(5 + i, 11 + i)), params) for i in range(6)]
    with tiny_engine(target) as engine:
        expected = [completion.token_ids for completion in engine.generate(requests)]
    with tiny_engine(target, num_kv_slots=128, enable_prefix_caching=enable_prefix_caching) as engine:
        assert [completion.token_ids for completion in engine.generate(requests)] == expected
        assert engine.load().num_preemptions > 0
        assert_pool_is_empty(engine)


@pytest.mark.parametrize(
    ("num_kv_slots", "name", "which", "dtype", "enable_prefix_caching"),
    [
        (128, "greedy", "perfect", "float32", True),
        (128, "penalties", "wrong", "torch-float32", False),
        (160, "penalties", "random", "float32", True),
        (256, "greedy", "wrong", "float32", False),
    ],
)
def test_a_small_pool_changes_nothing(
    tiny: Tiny, num_kv_slots: int, name: str, which: str, dtype: str, enable_prefix_caching: bool
) -> None:
    """A preempted sequence was resumed with another key, lost tokens, or its pages were never given back."""
    target = tiny("llama", dtype)
    requests, expected = asked(target, name)
    drafter = drafters(target, expected)[which]
    options = {"num_kv_slots": num_kv_slots, "enable_prefix_caching": enable_prefix_caching}
    assert_equal(generated(target, [drafter], [requests], **options), expected)


@pytest.mark.parametrize(
    "where", ["start", "propose", "observe", "learn", "finish", "malformed", "nan", "too few", "vocabulary"]
)
def test_a_broken_drafter_costs_nothing_but_its_draft(tiny: Tiny, where: str) -> None:
    """An exception in a drafter ended every running request; a token that the model does not have failed the step."""
    target = tiny()
    requests, expected = asked(target, "T=1", PROMPTS[:3])
    answers = {key: plain.token_ids for key, plain in expected.items()}
    with tiny_engine(target, [Raising(where, answers), Half(answers)]) as engine:
        completions = engine.generate(requests)
        assert_equal(completions, expected)
        assert total(completions, "num_accepted") > 0
        assert_pool_is_empty(engine)
        if where not in ("nan", "too few", "vocabulary"):
            assert engine.num_drafter_failures > 0


def test_requests_without_speculation_draft_nothing(tiny: Tiny) -> None:
    """`speculation=False` drafted all the same, or stopped its neighbours from drafting."""
    target = tiny()
    requests, expected = asked(target, "T=1")
    halved = [replace(request, speculation=i % 2 == 0) for i, request in enumerate(requests)]
    completions = generated(target, [drafters(target, expected)["perfect"]], [halved])
    assert_equal(completions, expected)
    assert total(completions[1::2], "num_drafted") == 0 < total(completions[::2], "num_accepted")

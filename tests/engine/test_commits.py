"""Many tokens in one step: the end cuts tokens, text, log-probabilities, usage and keys at the same place."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from drafters import Perfect
from oracle import Plain, decode
from statistics_of import softmax
from tiny_target import Tiny, tiny_engine

from ragspec.core import Completion, Delta, FinishReason, Request, SamplingParams
from ragspec.engine.client import Collector
from ragspec.engine.target import Target

Case = tuple[Target, SamplingParams, Plain]

EOS = 1
PROMPT = "The mill needs"


def readable(target: Target) -> dict[int, float]:
    """A bias under which only whole ASCII characters are written."""
    words = {v: target.tokenizer.decode([v]) for v in range(target.vocab_size)}
    return {v: -100.0 for v, word in words.items() if v == EOS or not word.isascii() or not word.isprintable()}


def run(target: Target, params: SamplingParams, answer: tuple[int, ...]) -> tuple[Completion, list[Delta], int]:
    """(completion, deltas, output positions whose keys are cached) with a draft that goes on past the end."""
    deltas: list[Delta] = []
    prompt = tuple(target.tokenizer(PROMPT).input_ids)
    request = Request("a", prompt, params)
    with tiny_engine(target, [Perfect({("a", 0): answer})], max_nodes=30) as engine:
        collector = Collector([request])

        def hear(delta: Delta) -> None:
            deltas.append(delta)
            collector(delta)

        engine.submit(request, hear)
        (completion,) = collector.wait()
        follow_up = Request("b", (*prompt, *completion.token_ids, 5, 6), SamplingParams(max_tokens=5))
        (after,) = engine.generate([follow_up])
        engine.check_integrity()
    assert after.token_ids == decode(target, follow_up.prompt_ids, follow_up.params).token_ids
    return completion, deltas, after.stats.num_cached_tokens - len(prompt)


def check(target: Target, params: SamplingParams, answer: tuple[int, ...]) -> tuple[Completion, Plain]:
    """Everything that must be cut at the same place."""
    plain = decode(target, target.tokenizer(PROMPT).input_ids, params)
    completion, deltas, num_kept = run(target, params, answer)
    num = len(plain.token_ids)
    assert completion.token_ids == plain.token_ids
    assert completion.text == plain.text
    assert completion.finish_reason == plain.finish_reason
    assert completion.stats.num_output_tokens == num
    assert num_kept in (num - 1, num)
    assert completion.stats.num_accepted >= num - 2
    assert completion.stats.num_accepted + completion.stats.num_steps >= num
    assert [logprob.token_id for logprob in completion.logprobs] == list(plain.token_ids)
    for logprob, row in zip(completion.logprobs, plain.logits, strict=True):
        assert logprob.logprob == pytest.approx(math.log(softmax(row)[logprob.token_id]), abs=1e-6)
        assert len(logprob.top) == 2
    assert "".join(delta.text for delta in deltas) == plain.text
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert len(deltas) <= 3
    return completion, plain


@pytest.fixture
def case(tiny: Tiny) -> Case:
    """A target, parameters that give readable text, and what it says in 24 tokens when nothing stops it."""
    target = tiny()
    params = SamplingParams(temperature=1.0, seed=12, max_tokens=24, logprobs=2, logit_bias=readable(target))
    return target, params, decode(target, target.tokenizer(PROMPT).input_ids, params)


def test_max_tokens_inside_a_run(case: Case) -> None:
    """More tokens than asked for, because a run was accepted whole."""
    target, params, free = case
    for most in (1, 2, 7, 23):
        completion, _ = check(target, replace(params, max_tokens=most), free.token_ids)
        assert len(completion.token_ids) == most
        assert completion.finish_reason is FinishReason.LENGTH


def test_stop_strings_inside_a_run(case: Case) -> None:
    """Tokens, log-probabilities or keys behind the stop string leaked (vLLM #47616, SGLang #23802)."""
    target, params, free = case
    for start, length in ((3, 1), (6, 4), (9, 7), (0, 2), (len(free.text) - 3, 3)):
        stop = free.text[start : start + length]
        completion, plain = check(target, replace(params, stop=("never there", stop)), free.token_ids)
        assert completion.finish_reason is FinishReason.STOP
        assert completion.text == free.text[: free.text.index(stop)]
        assert stop not in plain.text


@pytest.mark.parametrize("min_tokens", [1, 3, 4, 5, 6, 8])
def test_a_stop_string_may_begin_before_the_least_number_of_tokens(case: Case, min_tokens: int) -> None:
    """One that began in a token that may not stop, and ended in one that may, was never found again."""
    target, params, free = case
    words = [target.tokenizer.decode([token]) for token in free.token_ids]
    stop = words[3][-1:] + words[4] + words[5][:1]
    completion, _ = check(target, replace(params, stop=(stop,), min_tokens=min_tokens), free.token_ids)
    assert (completion.finish_reason is FinishReason.STOP) == (min_tokens < 6)


def test_stop_wins_over_length_at_the_same_token(case: Case) -> None:
    """A stop string completed by the last allowed token was reported as `length` (SGLang #31599)."""
    target, params, free = case
    words = [target.tokenizer.decode([token]) for token in free.token_ids]
    stop = words[8] + words[9]
    if stop in "".join(words[:9]):
        pytest.skip("the stop string occurs earlier")
    completion, _ = check(target, replace(params, stop=(stop,), max_tokens=10), free.token_ids)
    assert completion.finish_reason is FinishReason.STOP
    completion, _ = check(target, replace(params, stop=(stop,), max_tokens=9), free.token_ids)
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.text == "".join(words[:9])  # what was held back comes at the end


def with_eos(case: Case, bias: float) -> SamplingParams:
    params = case[1]
    return replace(params, logit_bias={**params.logit_bias, EOS: bias})


def ends_in_the_middle(case: Case, least: int) -> Iterator[tuple[SamplingParams, Plain, tuple[int, ...]]]:
    """Parameters whose output ends by EOS after `least` tokens or more, that output, and its tokens where EOS is ignored."""
    target, prompt = case[0], case[0].tokenizer(PROMPT).input_ids
    for seed in range(60):
        params = replace(with_eos(case, 4.0), seed=seed)
        plain = decode(target, prompt, params)
        if plain.finish_reason == "stop" and least <= len(plain.token_ids) <= 20:
            yield params, plain, decode(target, prompt, replace(params, ignore_eos=True)).token_ids


def test_eos_inside_a_run(case: Case) -> None:
    """Tokens behind EOS were kept, or EOS itself was lost (HF #47912, vLLM #23938)."""
    target, ends = case[0], list(itertools.islice(ends_in_the_middle(case, 4), 2))
    assert len(ends) == 2
    for params, _, beyond in ends:
        assert len(beyond) == 24
        completion, _ = check(target, params, beyond)
        assert completion.token_ids[-1] == EOS
        assert completion.finish_reason is FinishReason.STOP
        assert target.tokenizer.eos_token not in completion.text


def test_eos_and_a_stop_string_in_one_run(case: Case) -> None:
    """Whichever comes first ends the output (vLLM #23938)."""
    target, (params, plain, beyond) = case[0], next(ends_in_the_middle(case, 6))
    words = [target.tokenizer.decode([token], skip_special_tokens=True) for token in beyond]
    first = check(target, replace(params, stop=(words[2] + words[3],)), beyond)[0]
    assert len(first.token_ids) <= 4
    position = len(plain.token_ids)
    late = words[position] + words[position + 1]
    if late and late not in plain.text:
        assert check(target, replace(params, stop=(late,)), beyond)[0].token_ids == plain.token_ids


def test_min_tokens_holds_eos_back(case: Case) -> None:
    """EOS before `min_tokens`, or suppressed for one token too many."""
    target, _, _ = case
    params = replace(with_eos(case, 100.0), min_tokens=5)
    answer = decode(target, target.tokenizer(PROMPT).input_ids, params).token_ids
    completion, _ = check(target, params, (*answer, 9, 9))
    assert len(completion.token_ids) == 6
    assert EOS not in completion.token_ids[:5]
    assert completion.finish_reason is FinishReason.STOP


def test_ignore_eos_goes_on(case: Case) -> None:
    """`ignore_eos` stopped all the same, or wrote the name of the token into the text."""
    target, _, _ = case
    params = replace(with_eos(case, 100.0), ignore_eos=True)
    completion, _ = check(target, params, (EOS,) * 24)
    assert completion.token_ids == (EOS,) * 24
    assert completion.text == ""
    assert completion.finish_reason is FinishReason.LENGTH


def test_streams_join_to_the_text_whatever_bytes_come(tiny: Tiny) -> None:
    """A piece lost, doubled or changed later; tokens of deltas that do not add up."""
    target = tiny()
    prompts = [tuple(target.tokenizer(text).input_ids) for text in ("A", "é", "water")]
    for seed in range(6):
        params = SamplingParams(temperature=1.5, seed=seed, max_tokens=40, n=2, logprobs=0)
        requests = [Request(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)]
        with tiny_engine(target) as engine:
            completions = engine.generate(requests)
        for completion in completions:
            whole = target.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            assert whole.rstrip("\ufffd") == completion.text.rstrip("\ufffd")
            assert len(completion.logprobs) == len(completion.token_ids)


def test_logprobs_do_not_depend_on_the_draft(case: Case) -> None:
    """Log-probabilities taken from a sibling's row (vLLM #34497)."""
    target, params, free = case
    drafted, _, _ = run(target, params, free.token_ids)
    plain, _, _ = run(target, params, ())
    assert drafted.logprobs == plain.logprobs
    assert np.isfinite([logprob.logprob for logprob in drafted.logprobs]).all()
    assert plain.stats.num_accepted == 0 < drafted.stats.num_accepted

"""Many prompts on the default target: the same tokens whatever is drafted, whoever is beside, with two threads."""

import argparse
import inspect
from dataclasses import replace

import pytest
from tiny_target import tiny_engine

from ragspec.config import TargetConfig
from ragspec.core import Completion, CopySource, Request, SamplingParams, SourceKind
from ragspec.drafting.copy import CopyDrafter
from ragspec.engine.target import Target
from ragspec.speculation import Speculation

pytestmark = pytest.mark.slow

NUM_PROMPTS, NUM_WORDS = 90, 12
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
PARAMS = (GREEDY, replace(GREEDY, temperature=1.0), replace(GREEDY, temperature=1.0, top_p=0.9))
NUM_SLOTS = 4096


def requests_of(target: Target, *, speculation: bool) -> list[Request]:
    """Lines of Python, each followed by its own first half: a trained target goes on copying."""
    words = inspect.getsource(argparse).split()
    texts = [" ".join(words[i * NUM_WORDS : (i + 1) * NUM_WORDS]) for i in range(NUM_PROMPTS)]
    assert all(texts)
    return [
        Request(
            f"r{i}",
            tuple(target.tokenizer(f"{text}\n{text[: len(text) // 2]}").input_ids),
            replace(PARAMS[i % len(PARAMS)], seed=i),
            (CopySource(SourceKind.PASSAGE, text),),
            speculation=Speculation.of(speculation),
        )
        for i, text in enumerate(texts)
    ]


def generated(target: Target, requests: list[Request], beside: int, num_threads: int) -> list[Completion]:
    """All requests, `beside` of them at a time."""
    options = {"max_num_seqs": beside, "num_threads": num_threads, "max_num_batched_tokens": 256}
    copy = CopyDrafter(target.tokenizer, target.eos_ids)
    with tiny_engine(target, [copy], num_kv_slots=NUM_SLOTS, **options) as engine:
        return engine.generate(requests)


def test_the_default_target_writes_the_same_tokens_in_every_way() -> None:
    """A draft, seven requests beside or a second thread changed one token in a hundred texts."""
    target = Target.load(TargetConfig(), NUM_SLOTS)
    plain, drafted = (requests_of(target, speculation=on) for on in (False, True))
    expected = [done.token_ids for done in generated(target, plain, 1, 1)]
    assert len(set(expected)) > 0.9 * NUM_PROMPTS
    for requests, beside, num_threads in ((plain, 8, 1), (drafted, 8, 2)):
        completions = generated(target, requests, beside, num_threads)
        assert [done.token_ids for done in completions] == expected
        assert (sum(done.stats.num_accepted for done in completions) > NUM_PROMPTS) == (requests is drafted)

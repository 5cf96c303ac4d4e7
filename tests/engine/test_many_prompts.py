"""Many prompts on targets in int8: the same tokens whatever is drafted, whoever is beside, with two threads, on four ranks."""

import argparse
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from drafters import Half
from rank_process import Followers
from tiny_target import save_model, target_config, tiny_engine

from ragspec.config import EngineConfig, TargetConfig
from ragspec.core import Completion, CopySource, Request, SamplingParams, SourceKind
from ragspec.drafting.copy import CopyDrafter
from ragspec.drafting.drafter import Drafter
from ragspec.engine.target import Target
from ragspec.speculation import Speculation

pytestmark = pytest.mark.slow

NUM_PROMPTS, NUM_ON_RANKS, NUM_WORDS = 90, 40, 12
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
PARAMS = (GREEDY, replace(GREEDY, temperature=1.0), replace(GREEDY, temperature=1.0, top_p=0.9))
NUM_SLOTS = 4096


def requests_of(target: Target, count: int, *, speculation: bool) -> list[Request]:
    """Lines of Python, each followed by its own first half: a trained target goes on copying."""
    words = inspect.getsource(argparse).split()
    texts = [" ".join(words[i * NUM_WORDS : (i + 1) * NUM_WORDS]) for i in range(count)]
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


def generated(
    target: Target, requests: list[Request], beside: int, num_threads: int = 1, drafters: Sequence[Drafter] = ()
) -> list[Completion]:
    """All requests, `beside` of them at a time."""
    options = {"max_num_seqs": beside, "num_threads": num_threads, "max_num_batched_tokens": 256}
    with tiny_engine(target, drafters, num_kv_slots=NUM_SLOTS, **options) as engine:
        return engine.generate(requests)


def test_the_default_target_writes_the_same_tokens_in_every_way() -> None:
    """A draft, seven requests beside or a second thread changed one token in a hundred texts."""
    target = Target.load(TargetConfig(), NUM_SLOTS)
    plain, drafted = (requests_of(target, NUM_PROMPTS, speculation=on) for on in (False, True))
    expected = [done.token_ids for done in generated(target, plain, beside=1)]
    assert len(set(expected)) > 0.9 * NUM_PROMPTS
    for requests, beside, num_threads in ((plain, 8, 1), (drafted, 8, 2)):
        copy = CopyDrafter(target.tokenizer, target.eos_ids)
        completions = generated(target, requests, beside, num_threads, [copy])
        assert [done.token_ids for done in completions] == expected
        assert (sum(done.stats.num_accepted for done in completions) > NUM_PROMPTS) == (requests is drafted)


@pytest.fixture(scope="module")
def followers() -> Iterator[Followers]:
    with Followers(3) as followers:
        yield followers


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_write_the_same_tokens_in_every_way(followers: Followers, size: int, tmp_path: Path) -> None:
    """Ranks that agree on the bits of one forward, and not after hundreds of steps with drafts."""
    shape = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512}
    config = target_config(str(save_model("llama", tmp_path / "model", **shape)), "int8")
    one = Target.load(config, NUM_SLOTS)
    plain, drafted = (requests_of(one, NUM_ON_RANKS, speculation=on) for on in (False, True))
    expected = {(done.request_id, done.choice): done.token_ids for done in generated(one, plain, beside=1)}
    settings = EngineConfig(max_kv_tokens=NUM_SLOTS, num_threads=1)
    with followers.target(size, config, settings) as target:
        for requests, beside in ((plain, 8), (drafted, 8)):
            completions = generated(target, requests, beside, drafters=[Half(expected)])
            assert [done.token_ids for done in completions] == [*expected.values()]
            assert (sum(done.stats.num_accepted for done in completions) > NUM_ON_RANKS) == (requests is drafted)

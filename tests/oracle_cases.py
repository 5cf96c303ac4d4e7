"""Requests, their outputs under plain decoding, and the checks that every engine test makes: shared by tests/engine.

>>> requests, expected = asked(target, "greedy")
>>> assert_equal(generated(target, [drafter], [requests]), expected)
"""

import functools
from collections.abc import Sequence
from typing import Any

from drafters import Half, Perfect, Raising, Random, Wrong, noted
from oracle import Plain, decode
from tiny_target import SENTENCES, tiny_engine

from ragspec.core import Completion, CopySource, Request, SamplingParams, SourceKind
from ragspec.drafting.copy import CopyDrafter
from ragspec.drafting.drafter import Drafter
from ragspec.engine.engine import Engine
from ragspec.engine.target import Target

PARAMS = {
    "greedy": SamplingParams(max_tokens=14),
    "T=1": SamplingParams(temperature=1.0, seed=3, max_tokens=14),
    "top-p": SamplingParams(temperature=0.7, top_p=0.9, seed=2**63 + 5, max_tokens=14),
    "top-k, min-p": SamplingParams(temperature=1.3, top_k=20, min_p=0.05, seed=2**64 - 1, max_tokens=14),
    "penalties": SamplingParams(
        temperature=0.8,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.7,
        logit_bias={1: 6.0, 40: 3.0, 41: -50.0},
        first_token_bias={40: -9.0, 77: 12.0},
        prefix_bias={(): {77: 1.0}, (77,): {5: 30.0, 40: -2.0}, (77, 5): {6: 30.0}, (3, 4): {1: 9.0}},
        min_tokens=6,
        seed=0,
        max_tokens=14,
    ),
}


PROMPTS = [
    "The river rises in the northern hills",
    "A",
    'The report says: "The bridge was',
    "Every spring the water carries sand and small stones down to the sea. " * 2,
    "mill",
    "She said that the bridge was built by the people",
    "é ü 水 🌊",
    "A mill needs water, and water needs rain. The",
]


@functools.cache  # the same outputs in every test of a run
def _plain(target: Target, prompt: tuple[int, ...], params: Any, choice: int) -> Plain:
    return decode(target, prompt, PARAMS[params] if isinstance(params, str) else params, choice)


def requests_of(target: Target, params: SamplingParams, prompts: Sequence[str] = PROMPTS) -> list[Request]:
    sources = tuple(CopySource(SourceKind.PASSAGE, text, str(i)) for i, text in enumerate(SENTENCES))
    return [
        Request(f"r{i}", tuple(target.tokenizer(text).input_ids), params, sources) for i, text in enumerate(prompts)
    ]


def truth(target: Target, requests: Sequence[Request], params: Any) -> dict[tuple[str, int], Plain]:
    return {
        (r.id, choice): _plain(target, r.prompt_ids, params, choice) for r in requests for choice in range(r.params.n)
    }


def asked(
    target: Target, name: str, prompts: Sequence[str] = PROMPTS
) -> tuple[list[Request], dict[tuple[str, int], Plain]]:
    """The requests with the parameters of that name, and what plain decoding writes for them."""
    requests = requests_of(target, PARAMS[name], prompts)
    return requests, truth(target, requests, name)


def drafters(target: Target, expected: dict[tuple[str, int], Plain]) -> dict[str, Drafter]:
    answers = {key: plain.token_ids for key, plain in expected.items()}
    return {
        "copy": CopyDrafter(target.tokenizer, target.eos_ids),
        "random": Random(target.vocab_size),
        "perfect": Perfect(answers),
        "wrong": Wrong(answers),
        "half": Half(answers),
        "raises": Raising("propose", answers),
    }


def assert_equal(completions: Sequence[Completion], expected: dict[tuple[str, int], Plain]) -> None:
    for completion in completions:
        plain = expected[completion.request_id, completion.choice]
        assert completion.token_ids == plain.token_ids
        assert completion.finish_reason == plain.finish_reason
        assert completion.stats.num_output_tokens == len(plain.token_ids)


def total(completions: Sequence[Completion], name: str) -> int:
    return sum(getattr(completion.stats, name) for completion in completions)


def assert_pool_is_empty(engine: Engine) -> None:
    """No request is left, and cached prefixes alone hold slots."""
    assert engine.idle()
    engine.check_integrity()


def generated(
    target: Target, drafters: Sequence[Drafter], batches: Sequence[list[Request]], **options: Any
) -> list[Completion]:
    """The completions of one batch after another. No drafter may fail, and no slot may be lost."""
    with tiny_engine(target, drafters, **options) as engine:
        completions = [done for batch in batches for done in engine.generate(batch)]
        assert engine.num_drafter_failures == 0
        assert_pool_is_empty(engine)
    return completions


def watched_beside_half(target: Target, watched: Drafter, name: str, **options: Any) -> None:
    """Drafts of `watched` beside some that are accepted half the way, over texts that come twice: no token changes."""
    requests, expected = asked(target, name)
    both = [drafters(target, expected)["half"], watched]
    assert_equal(generated(target, both, (requests, requests[::2], requests), **options), expected)


def drafted_as_plainly(engine: Engine, temperature: float = 1.0) -> list[Completion]:
    """Three requests for whose every token drafts were tried, and which got the tokens of plain decoding."""
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=16, ignore_eos=True)
    requests = [Request(f"{i}", tuple(range(20 + i, 50 + 2 * i)), params) for i in range(3)]
    completions = engine.generate(requests)
    assert engine.num_drafter_failures == 0
    for request, done in zip(requests, completions, strict=True):
        assert done.stats.num_drafted > 0
        assert done.token_ids == decode(engine.target, request.prompt_ids, params, 0).token_ids
    return completions


def names_of(engine: Engine) -> list[str]:
    return [drafter.name for drafter in engine._planner._drafters]


def params_key(params: SamplingParams) -> str:
    """A name for params that are made in a test, so that plain decoding is done once."""
    name = repr(params)
    PARAMS.setdefault(name, params)
    return name


def drafts_of(target: Target, drafter: Drafter, before: Sequence[Request], own: Sequence[Request]) -> list[Any]:
    """Every draft for `own`, by the text that it followed, after the requests `before`."""
    with tiny_engine(target, [drafter]) as engine:
        for request in before:
            engine.generate([request])
        drafts = noted(drafter)
        for request in own:
            engine.generate([request])
        assert engine.num_drafter_failures == 0
    return [(text, [(p.token_id, p.parent, p.path_prob) for p in nodes]) for text, nodes in drafts]

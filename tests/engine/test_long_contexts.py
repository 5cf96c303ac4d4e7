"""Contexts of thousands of tokens: prompts in chunks, trees and copies give the tokens of a whole prompt decoded plainly.

A likely chain of hundreds of nodes needs few steps, and the output stays what it is.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafters import Random
from drafting.eagle_heads import LLAMA3
from oracle import decode, fresh_forward
from tiny_target import SENTENCES, save_model, target_config, tiny_engine
from transformers import AutoModelForCausalLM

from ragspec.core import CopySource, Request, SamplingParams, Segment, SourceKind
from ragspec.drafting.copy import CopyDrafter
from ragspec.engine.engine import Engine
from ragspec.engine.target import Target
from ragspec.errors import PromptTooLong
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.kv_cache import KvPool, SequenceSlots

ROPE: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 8.0},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 512},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 512},
}
LENGTHS = [4096, *(pytest.param(1024 * n, marks=pytest.mark.slow) for n in (8, 16, 32))]


def long_target(folder: Path, length: int, rope: str, dtype: str = "int8") -> Target:
    """Room for the length, an answer and a tree. The second pool holds as much again, for a second sequence."""
    rotation = {"rope_type": rope, "rope_theta": 10_000.0, **ROPE[rope]}
    model = save_model("llama", folder / rope, max_position_embeddings=length + 256, rope_parameters=rotation)
    return Target.load(target_config(str(model), dtype), num_kv_slots=2 * length + 1024)


def text(length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(5).integers(2, 300, length).tolist())


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("rope", [pytest.param("default", marks=pytest.mark.slow), "yarn"])
def test_chunks_trees_and_copies_change_no_token(tmp_path: Path, length: int, rope: str) -> None:
    """Positions, tiles or page lists that overflow behind some length: another answer with drafts than without."""
    target, prompt = long_target(tmp_path, length, rope), text(length)
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=3, ignore_eos=True)
    repeated = target.tokenizer.decode(prompt[-600:])
    request = Request("a", prompt, params, sources=(CopySource(SourceKind.PASSAGE, repeated, "p"),))
    pool: dict[str, Any] = {"num_kv_slots": 2 * length + 1024}
    with tiny_engine(target, max_num_batched_tokens=512, **pool) as engine:
        plain = engine.generate([request])[0].token_ids
    copy = CopyDrafter(target.tokenizer, target.eos_ids)
    with tiny_engine(target, [copy, Random(300)], max_num_batched_tokens=97, fixed_nodes=16, **pool) as engine:
        drafted = engine.generate([request])[0]
        again = engine.generate([Request("b", (*prompt, *plain[:8]), params)])[0]
    assert drafted.token_ids == plain and drafted.stats.num_drafted > 0
    assert again.stats.num_cached_tokens >= length, "a conversation that goes on reads its beginning from the cache"


@pytest.mark.parametrize("rope", ROPE)
def test_rotary_positions_are_scaled_as_the_model_says(tmp_path: Path, rope: str) -> None:
    """Behind the length that a model was trained for, unscaled positions give noise, and nothing else shows it."""
    length = 1024
    target, prompt = long_target(tmp_path, length, rope, "float32"), np.array(text(length), np.int32)
    ours = fresh_forward(target, prompt)[0][[63, length - 1]]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / rope, dtype=torch.float32)
    with torch.inference_mode():
        theirs = model(torch.from_numpy(prompt[None].astype(np.int64))).logits[0, [63, length - 1]].numpy()
    np.testing.assert_allclose(ours, theirs, atol=2e-3)
    if rope != "default":
        unscaled = long_target(tmp_path / "plain", length, "default", "float32")
        others = fresh_forward(unscaled, prompt)[0][-1]
        assert np.abs(others - theirs[1]).max() > 0.01, "this test sees the scaling"


def test_what_does_not_fit_is_refused_with_the_limit(tmp_path: Path) -> None:
    """A prompt that is too long by one token waited for room that never came, or said nothing of the limit."""
    target = long_target(tmp_path, 512, "default")
    assert target.pool.keys.nbytes + target.pool.values.nbytes == target.token_bytes * target.pool.num_slots
    with tiny_engine(target, num_kv_slots=512) as engine:
        most = engine.max_context_tokens
        assert most == 512 - 32, "the pool decides where it holds less than the model"
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        assert len(engine.generate([Request("a", text(most - 4), params)])[0].token_ids) == 4
        with pytest.raises(PromptTooLong, match=str(most)):
            engine.generate([Request("b", text(most), params)])


NUM_TOKENS = 150
PARAMS = {
    "greedy": SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True),
    "T=1": SamplingParams(temperature=1.0, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = save_model("llama", tmp_path_factory.mktemp("long") / "llama", max_position_embeddings=384)
    return Target.load(target_config(str(folder), "float32"), num_kv_slots=4096)


@pytest.fixture(scope="module")
def prompt(target: Target) -> tuple[int, ...]:
    return tuple(target.tokenizer("Repeat the text: ").input_ids)


@pytest.fixture(scope="module")
def longest(target: Target, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """What plain decoding writes up to the end of the context."""
    return tuple(decode(target, prompt, SamplingParams(max_tokens=5000, ignore_eos=True)).token_ids)


def engine_with_copies(target: Target, **config: Any) -> Engine:
    copy = CopyDrafter(target.tokenizer, target.eos_ids)
    return tiny_engine(target, [copy], 4096, max_nodes=12, **{"max_num_batched_tokens": 256, **config})


@pytest.fixture
def rows_of_steps(target: Target, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of rows of every forward."""
    rows: list[int] = []
    forward = Target.forward_tapped

    def counted(self: Target, token_ids: Any, *rest: Any) -> Any:
        rows.append(len(token_ids))
        return forward(self, token_ids, *rest)

    monkeypatch.setattr(Target, "forward_tapped", counted)
    yield rows


def request(prompt: Sequence[int], text: Sequence[int], params: SamplingParams, name: str = "long") -> Request:
    """`text` is what the target will write: it follows the source."""
    return Request(name, tuple(prompt), params, segment=Segment(draft_ids=tuple(text)))


@pytest.mark.parametrize("params", PARAMS)
def test_a_source_that_is_followed_takes_few_steps(
    params: str, target: Target, prompt: tuple[int, ...], longest: tuple[int, ...]
) -> None:
    """Chains were cut at `max_tree_nodes`, 12: a copy of 150 tokens took 13 steps at least, whatever rows cost."""
    is_greedy = PARAMS[params].greedy
    plain = longest[:NUM_TOKENS] if is_greedy else tuple(decode(target, prompt, PARAMS[params]).token_ids)
    with engine_with_copies(target) as engine:
        (off,) = engine.generate([Request("off", prompt, PARAMS[params], speculation=False)])
        (first,) = engine.generate([request(prompt, plain, PARAMS[params], "first")])
        (again,) = engine.generate([request(prompt, plain, PARAMS[params], "again")])
    assert off.token_ids == first.token_ids == again.token_ids == plain
    assert first.stats.num_steps <= 8
    assert again.stats.num_steps <= 4, "what was learned of the first copy makes the next chain longer"


def test_a_long_chain_beside_other_sequences(target: Target, prompt: tuple[int, ...], longest: tuple[int, ...]) -> None:
    """Rows of a long chain attended to a neighbour's nodes, or the neighbours lost theirs."""
    sources = tuple(CopySource(SourceKind.PASSAGE, text, str(i)) for i, text in enumerate(SENTENCES))
    short = SamplingParams(max_tokens=40, temperature=0.8, seed=5)
    others = [Request(f"r{i}", tuple(target.tokenizer(t).input_ids), short, sources) for i, t in enumerate(SENTENCES)]
    plain = longest[:NUM_TOKENS]
    expected = [plain, *(decode(target, other.prompt_ids, short).token_ids for other in others)]
    with engine_with_copies(target) as engine:
        engine.generate([request(prompt, plain, PARAMS["greedy"], "before")])
        completions = engine.generate([request(prompt, plain, PARAMS["greedy"]), *others])
    assert [completion.token_ids for completion in completions] == expected
    assert completions[0].stats.num_steps <= 10


def test_the_step_and_the_context_bound_a_chain(
    target: Target, prompt: tuple[int, ...], longest: tuple[int, ...], rows_of_steps: list[int]
) -> None:
    """A chain that overran the step's rows, the pool's pages, or the positions that the target has."""
    params = SamplingParams(max_tokens=5000, ignore_eos=True)
    with engine_with_copies(target, max_num_batched_tokens=40) as engine:
        rows_of_steps.clear()
        (found,) = engine.generate([request(prompt, longest + (7,) * 200, params)])
    assert found.token_ids == longest
    assert len(prompt) + len(found.token_ids) == target.max_context_tokens
    assert 12 < max(rows_of_steps) <= 40


def test_a_requests_own_limit_holds(
    target: Target, prompt: tuple[int, ...], longest: tuple[int, ...], rows_of_steps: list[int]
) -> None:
    """`max_nodes` of a request limited what stands beside the chain alone."""
    plain = longest[:NUM_TOKENS]
    limited = Request("a", prompt, PARAMS["greedy"], speculation={"max_nodes": 20},
                      segment=Segment(draft_ids=plain))  # fmt: skip
    with engine_with_copies(target) as engine:
        rows_of_steps.clear()
        (found,) = engine.generate([limited])
    assert found.token_ids == plain
    assert max(rows_of_steps[1:]) == 21


def test_a_chains_metadata_is_as_long_as_the_chain(target: Target) -> None:
    """Every node listed all nodes above it: half a million numbers for a chain of a thousand."""
    target.pool = KvPool(target.shapes, 4096)
    num_nodes, branch = 900, [10, 901, 902]
    parents = [-1, *range(num_nodes), *branch]
    metadata = Batch([ScheduledSequence(SequenceSlots(target.pool), np.arange(len(parents) + 4), parents)]).metadata
    assert len(metadata.path_slots) == 1 + 2 + 3
    assert len(metadata.context_slots) == 5 + num_nodes
    assert metadata.context_end[[4, 5, 4 + num_nodes, 4 + num_nodes + 1]].tolist() == [5, 6, 5 + num_nodes, 15]
    assert metadata.positions[[4, 4 + num_nodes, 4 + num_nodes + 1]].tolist() == [4, 4 + num_nodes, 15]

"""Contexts of thousands of tokens: prompts in chunks, trees and copies give the tokens of a whole prompt decoded plainly."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafters import Random
from oracle import fresh_forward
from tiny_target import save_model, target_config, tiny_engine
from transformers import AutoModelForCausalLM

from ragspec.core import CopySource, Request, SamplingParams, SourceKind
from ragspec.drafting.copy import CopyDrafter
from ragspec.engine.target import Target
from ragspec.errors import PromptTooLong

ROPE: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 8.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 512,
    },
}
LENGTHS = [4096, *(pytest.param(1024 * n, marks=pytest.mark.slow) for n in (8, 16, 32))]


def long_target(folder: Path, length: int, rope: str, dtype: str = "int8") -> Target:
    """Room for the length, an answer and a tree. The second pool holds as much again, for a second sequence."""
    model = save_model("llama", folder / rope, max_position_embeddings=length + 256, rope_parameters=ROPE[rope])
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

"""A published Llama of 260K parameters with odd widths: the engine equals transformers' own greedy `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ragspec.config import DraftingConfig, EngineConfig, TargetConfig
from ragspec.core import CopySource, Request, SamplingParams, SourceKind
from ragspec.engine.loading import load_engine

TEXT = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big, "
    "red ball. She wanted to play with it, but it was too high. Lily's mom said, \"Lily, let's go to the park.\" Lily was "
    "sad and didn't know what to do. She said, \"I want to play with your ball, but I can't find it.\" Tim and Sam were "
    "friends, and they had a box with many toys. The water of the river was cold, but the sun was warm on 12 May 1999."
)
NUM_PROMPTS, NUM_TOKENS = 50, 40


def their_greedy(model: Any, prompt: list[int]) -> tuple[int, ...]:
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
    return tuple(output[0, len(prompt) :].tolist())


@pytest.mark.parametrize("speculation", [True, False])
def test_greedy_equals_generate(shared_data: Path, speculation: bool) -> None:
    """Packed layers, odd widths, tied embeddings or the copy drafter give other text than the model's own code."""
    folder = shared_data / "tiny_llama"
    if not folder.is_dir():
        pytest.skip(f"needs {folder}")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    drafting = DraftingConfig(speculation=speculation)
    with load_engine(TargetConfig(model=str(folder)), EngineConfig(max_kv_tokens=8192), drafting) as engine:
        tokens = engine.target.tokenizer(TEXT, add_special_tokens=False).input_ids
        prompts = [tokens[3 * i : 3 * i + 1 + (7 * i) % 60] for i in range(NUM_PROMPTS)]
        assert {1, 60} <= {len(prompt) for prompt in prompts}
        sources = (CopySource(SourceKind.PASSAGE, TEXT, "story"),)
        requests = [
            Request(str(i), tuple(prompt), SamplingParams(max_tokens=NUM_TOKENS), sources)
            for i, prompt in enumerate(prompts)
        ]
        completions = engine.generate(requests)
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.token_ids == their_greedy(model, prompt)

"""A published Llama of 260K parameters with odd widths: the engine equals transformers' own greedy `generate`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragspec.config import DraftingConfig, DraftTreeConfig, EngineConfig, TargetConfig
from ragspec.core import CopySource, Request, SamplingParams, SourceKind
from ragspec.drafting.planner import FixedTreePlanner
from ragspec.engine.loading import load_engine

TEXT = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big, "
    "red ball. She wanted to play with it, but it was too high. Lily's mom said, \"Lily, let's go to the park.\" Lily was "
    "sad and didn't know what to do. She said, \"I want to play with your ball, but I can't find it.\" Tim and Sam were "
    "friends, and they had a box with many toys. The water of the river was cold, but the sun was warm on 12 May 1999."
)
NUM_PROMPTS, NUM_TOKENS = 12, 24


@pytest.fixture(scope="module")
def folder(shared_data: Path) -> Path:
    folder = shared_data / "tiny_llama"
    if not folder.is_dir():
        pytest.skip(f"needs {folder}")
    return folder


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[tuple[int, ...]]:
    """Of 1 to 60 tokens."""
    tokens = AutoTokenizer.from_pretrained(folder)(TEXT, add_special_tokens=False).input_ids
    prompts = [tuple(tokens[3 * i : 3 * i + 1 + (11 * i) % 60]) for i in range(NUM_PROMPTS)]
    assert min(map(len, prompts)) == 1 and max(map(len, prompts)) > 50
    return prompts


@pytest.fixture(scope="module")
def theirs(folder: Path, prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """What the model's own code writes."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return [their_greedy(model, list(prompt)) for prompt in prompts]


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


@pytest.mark.parametrize("speculation", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_greedy_equals_generate(
    folder: Path, prompts: list[tuple[int, ...]], theirs: list[tuple[int, ...]], speculation: bool
) -> None:
    """Packed layers, odd widths, tied embeddings or the copy drafter give other text than the model's own code."""
    drafting = DraftingConfig(speculation=speculation, tree=DraftTreeConfig(max_nodes=8))
    sources = (CopySource(SourceKind.PASSAGE, TEXT, "story"),)
    params = SamplingParams(max_tokens=NUM_TOKENS)
    requests = [Request(str(i), prompt, params, sources) for i, prompt in enumerate(prompts)]
    config = TargetConfig(model=str(folder), quantization="none")  # as transformers' own
    settings = EngineConfig(max_kv_tokens=8192)
    with load_engine(config, settings, drafting, planner_class=FixedTreePlanner) as engine:
        completions = engine.generate(requests)
    assert [completion.token_ids for completion in completions] == theirs
    assert any(completion.stats.num_accepted for completion in completions) == speculation

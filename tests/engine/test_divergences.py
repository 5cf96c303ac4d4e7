"""Where rows depend on their company, drafts may change a text, and only at a token that was counted as a near tie."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_target import save_model

from ragspec.config import DraftingConfig, EngineConfig, TargetConfig
from ragspec.core import Completion, CopySource, Request, SamplingParams, SourceKind
from ragspec.drafting.planner import FixedTreePlanner
from ragspec.engine.loading import load_engine
from ragspec.numerics.linear import PackedLinear

REAL = PackedLinear.forward
NUM_TOKENS = 48


def depends_on_company(self: PackedLinear, x: torch.Tensor) -> torch.Tensor:
    """One row alone is computed a little otherwise."""
    y = REAL(self, x)
    return y + 0.06 * torch.sin(40.0 * y) if x.numel() // self.in_features == 1 else y


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_every_divergence_is_a_counted_near_tie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """A count that misses what happened tells operators that their texts would come again."""
    monkeypatch.setattr(PackedLinear, "forward", depends_on_company)
    config = TargetConfig(model=str(save_model("llama", tmp_path)), quantization="none", exactness="fast")
    num_diverged = num_near = 0
    drafting = DraftingConfig(drafters=("copy",), max_tree_nodes=4)
    with load_engine(config, EngineConfig(max_kv_tokens=2048), drafting, planner_class=FixedTreePlanner) as engine:

        def write(number: int, speculation: bool, max_tokens: int = NUM_TOKENS) -> Completion:
            params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=number, ignore_eos=True)
            sources = (CopySource(SourceKind.PASSAGE, "the river rises in the hills and flows past the mill"),)
            prompt = tuple(range(number + 5, number + 25))
            return engine.generate([Request("a", prompt, params, sources, f"{number}", speculation)])[0]

        for number in range(40):
            plain, drafted = write(number, False), write(number, True)
            num_near += plain.stats.num_near_ties
            pairs = zip(plain.token_ids, drafted.token_ids, strict=True)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            if at is not None:
                num_diverged += 1
                before = write(number, False, at).stats.num_near_ties if at else 0
                assert write(number, False, at + 1).stats.num_near_ties == before + 1
    assert num_diverged > 3
    assert num_near < 40 * NUM_TOKENS * 2 / 3

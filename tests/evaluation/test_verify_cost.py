"""What verifying a tree costs: the same work on a small model without a GPU, and arithmetic on made-up times."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ragspec.errors import ConfigError
from ragspec.evaluation.report import complete, summary
from ragspec.evaluation.suites.verify_cost import (
    LLAMA_8B,
    METRICS,
    TreeVerifier,
    branching_tree,
    cost_row,
    tree_mask,
    verify_cost,
    verify_cost_tables,
)

TINY = LlamaConfig(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=256
)  # fmt: skip
CONTEXT = 24


def no_tick(stage: str, done: int, total: int) -> None:
    assert 0 <= done <= total


def test_a_node_sees_the_context_and_its_path() -> None:
    """Bug guarded: siblings that see each other, or a node that does not see itself."""
    mask = tree_mask(branching_tree(4), 2, 8, torch.float32)
    assert mask.shape == (1, 1, 4, 8)
    visible = (mask[0, 0] == 0.0).tolist()
    assert visible == [
        [True, True, True, False, False, False, False, False],
        [True, True, True, True, False, False, False, False],
        [True, True, True, False, True, False, False, False],
        [True, True, True, True, False, True, False, False],
    ]
    assert (mask[mask != 0.0] == -torch.inf).all()


def test_what_is_timed_verifies_the_tree() -> None:
    """Bug guarded: a forward that is fast because it forgets the context, or that adds to the cache at every call."""
    verifier = TreeVerifier(TINY, CONTEXT, 8, torch.device("cpu"))
    tree = branching_tree(7)
    forward = verifier.forward_of(tree)
    first = forward()
    assert torch.equal(first, forward()), "every call is the same work"
    for node in range(7):
        ids = torch.tensor([[*range(CONTEXT), *tree.ancestors(node)]])
        with torch.no_grad():
            alone = verifier._model(input_ids=ids).logits[0, -1]
        assert torch.allclose(first[node], alone, atol=1e-5)


def test_trees_branch_in_two() -> None:
    """Bug guarded: a chain timed under the name of a tree, or a tree of the wrong size."""
    assert branching_tree(1).parents == [-1]
    assert branching_tree(6).parents == [-1, 0, 0, 1, 1, 2]


def test_weights_read_leave_out_the_embedding_table() -> None:
    """Bug guarded: a bandwidth too high by a table of which a step reads a few rows."""
    verifier = TreeVerifier(TINY, CONTEXT, 8, torch.device("cpu"))
    num_weights = sum(p.numel() for p in verifier._model.parameters())
    assert verifier.num_weight_bytes == 4 * (num_weights - 256 * 64)
    with torch.device("meta"):
        eight_b = LlamaForCausalLM(LLAMA_8B)
    num_read = eight_b.num_parameters() - eight_b.model.embed_tokens.weight.numel()
    assert 14e9 < 2 * num_read < 16e9, "8B parameters in bfloat16, without the embedding table"


def test_costs_are_told_in_one_token_steps() -> None:
    """Bug guarded: ratios against the largest tree, seconds for milliseconds, a share of an unknown peak."""
    eight = cost_row(8, 0.005, 0.004, True, 8 * 10**9, 4e12)
    assert eight == {
        "nodes": 8, "step_ms": 5.0, "over_one_token": 1.25, "captured": True, "gb_per_s": 1600.0, "share_of_peak": 0.4
    }  # fmt: skip
    assert cost_row(8, 0.005, 0.004, True, 8 * 10**9, None)["share_of_peak"] is None


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: times of a processor under the name of a GPU's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="GPU"):
        verify_cost(no_tick, TINY)


def test_tables_name_the_way_of_launching() -> None:
    """Bug guarded: a table that fails for a device whose bandwidth nobody knows."""
    both = [cost_row(n, 1e-3 * (4 + n), 5e-3, captured, 10**9, None) for captured in (True, False) for n in (1, 6)]
    result = {"device": "a GPU", "peak_bytes_per_s": None, "weights_gb": 1.0, "rows": both}
    captured, stock = verify_cost_tables(result).values()
    assert captured["over_one_token"] == {"1 nodes": 1.0, "6 nodes": 2.0} == stock["over_one_token"]
    assert [name for name, _, _ in summary(result, METRICS)] == ["device", "weights_gb"]


@pytest.mark.gpu
def test_on_a_gpu_every_size_is_measured() -> None:
    """Bug guarded: a graph that captures nothing, or a device that is not named."""
    config = LlamaConfig(**TINY.to_diff_dict() | {"dtype": "bfloat16"})
    result = complete({"suite": "verify_cost"} | verify_cost(no_tick, config, CONTEXT, (1, 8)))
    assert result["device"] == torch.cuda.get_device_name()
    assert [(row["captured"], row["nodes"]) for row in result["rows"]] == [
        (c, n) for c in (False, True) for n in (1, 8)
    ]
    assert all(row["step_ms"] > 0 for row in result["rows"])

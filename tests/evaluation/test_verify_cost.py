"""What verifying a tree costs: the same work on a small model without a GPU, and arithmetic on made-up times."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ragspec.errors import ConfigError
from ragspec.evaluation.report import complete, summary
from ragspec.evaluation.suites.verify_cost import (
    METRICS,
    LlamaShape,
    TreeVerifier,
    bandwidth,
    branching_parents,
    cost_rows,
    depths_of,
    tree_mask,
    verify_cost,
    verify_cost_tables,
)

TINY = LlamaShape(64, 96, 2, 4, 2, 256, 24, (1, 8), torch.float32)


def no_tick(stage: str, done: int, total: int) -> None:
    assert 0 <= done <= total


def test_a_node_sees_the_context_and_its_path() -> None:
    """Bug guarded: siblings that see each other, or a node that does not see itself."""
    mask = tree_mask([-1, 0, 0, 1], 2, 8, torch.float32)
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
    verifier = TreeVerifier(TINY, torch.device("cpu"))
    parents = branching_parents(7)
    forward = verifier.forward_of(parents)
    first = forward()
    assert torch.equal(first, forward()), "every call is the same work"
    context = list(range(TINY.context))
    for node in range(7):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        ids = torch.tensor([[*context, *path]])
        with torch.no_grad():
            alone = verifier._model(input_ids=ids).logits[0, -1]
        assert torch.allclose(first[node], alone, atol=1e-5)


def test_trees_branch_in_two() -> None:
    """Bug guarded: a chain timed under the name of a tree, or a tree of the wrong size."""
    assert branching_parents(1) == [-1]
    assert branching_parents(6) == [-1, 0, 0, 1, 1, 2]
    assert depths_of(branching_parents(6)) == [0, 1, 1, 2, 2, 2]


def test_weights_read_leave_out_the_embedding_table() -> None:
    """Bug guarded: a bandwidth too high by a table of which a step reads a few rows."""
    verifier = TreeVerifier(TINY, torch.device("cpu"))
    num_weights = sum(p.numel() for p in verifier._model.parameters())
    assert verifier.num_weight_bytes == 4 * (num_weights - 256 * 64)
    assert 14e9 < 2 * parameters_of(LlamaShape()) < 16e9, "8B parameters in bfloat16, without the embedding table"


def parameters_of(shape: LlamaShape) -> int:
    with torch.device("meta"):
        model = torch.nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
    kv = shape.hidden_size // shape.num_heads * shape.num_kv_heads
    attention = 2 * shape.hidden_size**2 + 2 * shape.hidden_size * kv
    return model.weight.numel() + shape.num_layers * (attention + 3 * shape.hidden_size * shape.intermediate_size)


def test_costs_are_told_in_one_token_steps() -> None:
    """Bug guarded: ratios against the largest tree, seconds for milliseconds, a share of an unknown peak."""
    one, eight = cost_rows([(1, 0.004), (8, 0.005)])
    assert one == {"nodes": 1, "step_ms": 4.0, "over_one_token": 1.0}
    assert (eight["nodes"], eight["step_ms"], eight["over_one_token"]) == (8, 5.0, 1.25)
    assert bandwidth(8 * 10**9, 4.0, 4e12) == {"gb_per_s": 2000.0, "share_of_peak": 0.5}
    assert bandwidth(8 * 10**9, 4.0, None)["share_of_peak"] is None


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: times of a processor under the name of a GPU's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="GPU"):
        verify_cost(TINY, no_tick)


def test_tables_name_the_way_of_launching() -> None:
    """Bug guarded: a table that fails for a device whose bandwidth nobody knows."""
    rows = [row | bandwidth(10**9, row["step_ms"], None) for row in cost_rows([(1, 0.004), (8, 0.005)])]
    both = [row | {"captured": captured} for captured in (True, False) for row in rows]
    result = {"device": "a GPU", "peak_bytes_per_s": None, "weights_gb": 1.0, "rows": both}
    captured, stock = verify_cost_tables(result).values()
    assert captured["over_one_token"] == {"1 nodes": 1.0, "8 nodes": 1.25} == stock["over_one_token"]
    assert [name for name, _, _ in summary(result, METRICS)] == ["device", "weights_gb"]


@pytest.mark.gpu
def test_on_a_gpu_every_size_is_measured() -> None:
    """Bug guarded: a graph that captures nothing, or a device that is not named."""
    shape = dataclasses.replace(TINY, dtype=torch.bfloat16)
    result = complete({"suite": "verify_cost"} | verify_cost(shape, no_tick))
    assert result["device"] == torch.cuda.get_device_name()
    assert [(row["captured"], row["nodes"]) for row in result["rows"]] == [
        (c, n) for c in (False, True) for n in (1, 8)
    ]
    assert all(row["step_ms"] > 0 for row in result["rows"])

"""Look-ahead embeddings (PaSS): the target reads them as trained, guesses stand where they belong, no output changes."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from head_parts import near
from oracle_cases import PARAMS, assert_equal, generated, names_of, requests_of, total, truth
from tiny_target import Tiny, save_model

from ragspec.config import DraftingConfig, EagleConfig, EngineConfig, TargetConfig
from ragspec.core import Request, SamplingParams
from ragspec.drafting.block.checkpoint import read_look_ahead, write_look_ahead
from ragspec.drafting.block.drafter import LookAheadDrafter
from ragspec.drafting.drafter import NODES, Budget
from ragspec.drafting.heads.learning import Objective
from ragspec.drafting.planner import FixedTreePlanner
from ragspec.engine.loading import load_engine
from ragspec.errors import ModelError
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.kv_cache import SequenceSlots
from ragspec.speculation import AcceptanceRule, Speculation
from ragspec.training.heads.frozen_target import FrozenTarget
from ragspec.training.heads.initialisation import fresh_look_ahead

NUM_ROWS = 3


@pytest.mark.parametrize("dtype", ["float32", "torch-float32"])
def test_the_target_reads_rows_as_they_were_trained(tiny: Tiny, tmp_path: Path, dtype: Any) -> None:
    """A row one position off, or one that sees its neighbour's rows, learns from texts what it is never asked."""
    target, folder = tiny("llama", dtype), save_model("llama", tmp_path)
    frozen = FrozenTarget.load(TargetConfig(model=str(folder)), dtype=torch.float32)
    head, text = fresh_look_ahead(NUM_ROWS, frozen, seed=1), [9, 40, 7, 88, 21, 60]
    first = target.add_embeddings(head.embeddings.detach())
    part = ScheduledSequence(SequenceSlots(target.pool), [*text, *range(first, first + NUM_ROWS)], (-1, 0, 1, 2))
    batch = Batch([part])
    logits = np.asarray(target.forward(batch.token_ids, batch.metadata, batch.logit_rows))
    ids, rows = torch.tensor([[*text, 5, 6]]), torch.tensor([[2, len(text) - 1]])
    with torch.no_grad():
        states = head.unroll(frozen.embed(ids), torch.zeros(1, 8, 1), rows, Objective(NUM_ROWS))
        expected = frozen.logits(states[:, 0, 1])
    np.testing.assert_allclose(logits[1:], expected.numpy(), rtol=0, atol=2e-4)


def test_guesses_stand_behind_the_tokens_that_were_decided() -> None:
    """Guesses shifted by one place, or those of tokens that are known: nothing would ever be accepted."""
    drafter, counts, tokens = LookAheadDrafter(50, NUM_ROWS), list[int](), [6]
    request = Request("a", (1,), SamplingParams())
    for _ in range(8):
        sequence: Any = SimpleNamespace(key=("a", 0), request=request, tokens=tokens)
        proposals = drafter.propose([sequence], Budget(16, 0.0, [16]))[0]
        truths = [(tokens[-1] + i) % 50 for i in range(1, 9)]
        drafted = [p.token_id for p in proposals if p.token_id < 50]
        accepted = next((i for i, token in enumerate(drafted) if token != truths[i]), len(drafted))
        assert accepted == len(drafted)
        nodes = [[50 + row, -1, truths[row + 1]] for row in range(NUM_ROWS)]
        tokens = [*tokens, *truths[: accepted + 1]]
        drafter.observe(sequence, truths[: accepted + 1], {NODES: torch.tensor(nodes)})
        counts.append(accepted + 1)
    assert counts == [1, 4] * 4


@pytest.mark.parametrize(
    ("params", "dtype"),
    [("greedy", "int8"), ("T=1", "torch-float32"), ("top-p", "float32"), ("penalties", "torch-float32")],
)
def test_outputs_are_plain_decodings(tiny: Tiny, params: str, dtype: Any) -> None:
    """A token that does not exist was sampled, counted or kept: alone, in a batch, in a pool too small for all."""
    target = tiny("llama", dtype)
    requests = requests_of(target, PARAMS[params])
    drafter = LookAheadDrafter(target.add_embeddings(torch.randn(NUM_ROWS, 64) / 4), NUM_ROWS)
    batches = [requests[:1], requests[:6], requests]
    completions = generated(target, [drafter], batches, fixed_nodes=6, num_kv_slots=256)
    assert_equal(completions, truth(target, requests, params))
    assert (total(completions, "num_drafted") > 0) == (params != "penalties")


def test_other_drafters_draw_children_beside_look_ahead_rows(tiny: Tiny) -> None:
    """Draws over the vocabulary were refused because the target had more embeddings: nobody drafted by a published rule."""
    target = tiny()
    drafters = [LookAheadDrafter(target.add_embeddings(torch.randn(NUM_ROWS, 64)), NUM_ROWS), near(target)]
    rule = Speculation(rule=AcceptanceRule.TRAVERSAL)
    requests = [replace(request, speculation=rule) for request in requests_of(target, PARAMS["T=1"])]
    assert total(generated(target, drafters, [requests], fixed_nodes=6), "num_drafted") > 0


def test_embeddings_are_served_by_their_directory(tmp_path: Path) -> None:
    """Only EAGLE's loader was asked, or a file of another target drafted noise."""
    save_model("llama", tmp_path / "target")
    write_look_ahead(tmp_path / "head", torch.randn(NUM_ROWS, 64))
    heads = DraftingConfig(drafters=("copy", "own"), eagle_heads={"own": EagleConfig(path=str(tmp_path / "head"))})
    settings, limits = TargetConfig(model=str(tmp_path / "target")), EngineConfig(max_kv_tokens=1024, num_threads=1)
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    request = Request("a", tuple(range(20, 40)), SamplingParams(json_schema=schema, max_tokens=30))
    with load_engine(settings, limits, heads, planner_class=FixedTreePlanner) as engine:
        assert names_of(engine) == ["copy", "own"]
        plain, drafted = (engine.generate([replace(request, speculation=Speculation(n))])[0] for n in ((), ("own",)))
    assert drafted.token_ids == plain.token_ids and drafted.stats.num_drafted > 0
    with pytest.raises(ModelError, match="embeddings is"):
        read_look_ahead(tmp_path / "head", 32)

"""Medusa and Hydra in the engine: they read the right states, change no output, and heads that are right are accepted."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from drafting.medusa_heads import (
    Tensors,
    hydra_plus_tensors,
    hydra_tensors,
    medusa_tensors,
    position_drafter,
    save_hydra,
    save_medusa,
)
from oracle import fresh_forward
from oracle_cases import (
    PARAMS,
    PROMPTS,
    asked,
    assert_equal,
    drafted_as_plainly,
    generated,
    names_of,
    requests_of,
    total,
    truth,
    watched_beside_half,
)
from safetensors.torch import load_file, save_file
from tiny_target import Tiny, save_model

from ragspec.config import DraftingConfig, DraftTreeConfig, EngineConfig, HeadConfig, TargetConfig
from ragspec.core import Request, SamplingParams
from ragspec.drafting.cost_model import CostTable
from ragspec.drafting.drafter import SequenceView
from ragspec.drafting.growing.draft import GrowingDraft, make_shape
from ragspec.drafting.medusa.checkpoint import read_medusa
from ragspec.drafting.medusa.drafter import MedusaDrafter
from ragspec.drafting.medusa.network import PositionNetwork
from ragspec.drafting.planner import FixedTreePlanner
from ragspec.engine.loading import load_engine
from ragspec.engine.target import FINAL, Target
from ragspec.errors import ConfigError
from ragspec.speculation import AcceptanceRule, Speculation


def solved(inputs: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """The least weight of a linear layer that gives these outputs. Shapes: [N, F], [N, G] -> float32 [G, F]."""
    return torch.linalg.lstsq(inputs.double(), outputs.double(), driver="gelsd").solution.T.float().contiguous()


def fitted_tensors(target: Target, family: str, texts: Sequence[tuple[int, Sequence[int]]], num_heads: int) -> Tensors:
    """Heads that give the target's own logits along some texts, each given as (prompt length, tokens).

    There are at most H places in the texts: a grounded head's first block maps each to a unit vector of its own, from its state
    and the tokens that follow it; output layers map the vector, or Medusa's state itself, to the logits.
    """
    made = medusa_tensors(num_heads) if family == "medusa" else hydra_tensors(num_heads, 1)
    tensors = {name: torch.zeros_like(t) for name, t in made.items()}
    forwards = []
    for start, tokens in texts:
        logits, tapped = fresh_forward(target, tokens, (FINAL,))
        forwards.append((start, tokens, logits, tapped[FINAL]))
    for i in range(num_heads):
        inputs = torch.cat([states[start - 1 : len(states) - 1 - i] for start, _, _, states in forwards])
        wanted = torch.cat([torch.from_numpy(logits[start + i :]) for start, _, logits, _ in forwards])
        assert len(inputs) == len(wanted) <= target.hidden_size
        if family == "medusa":
            tensors[f"{i}.1.weight"] = solved(inputs, wanted)
            continue
        for ahead in range(i + 1):
            ids = [t for start, tokens, *_ in forwards for t in tokens[start + ahead : len(tokens) - i + ahead]]
            inputs = torch.cat([inputs, target.embedding[ids].float()], 1)
        own = torch.eye(target.hidden_size)[: len(inputs)]
        tensors[f"hydra_mlp.{i}.0.res_connection.weight"] = solved(inputs, own)
        tensors[f"hydra_lm_head.{i}.weight"] = solved(own, wanted)
    return tensors


class Watched(MedusaDrafter):
    """Notes the text and the state that each draft grew from."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[tuple[list[int], torch.Tensor]] = []

    def _draft(self, sequence: SequenceView, *args: Any) -> GrowingDraft | None:
        draft = super()._draft(sequence, *args)
        if draft is not None:
            self.seen.append((list(sequence.tokens), draft.memory.state.clone()))
        return draft


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 16},
        {"num_kv_slots": 256},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"enable_prefix_caching": False}, marks=pytest.mark.slow),
    ],
)
def test_states_are_right_after_copies_prefixes_chunks_and_preemption(
    tiny: Tiny, tmp_path: Path, options: dict[str, Any]
) -> None:
    """The state of a rejected node, of a chunk's end or of the sequence before its preemption was drafted from."""
    target = tiny()
    made = position_drafter(target, tmp_path)
    watched = Watched(made.network, made._settings.shape, made._costs)
    watched_beside_half(target, watched, "T=1", **options)
    assert not watched._states and len(watched.seen) > 12
    for tokens, state in watched.seen[:: 1 + len(watched.seen) // 30]:
        assert torch.allclose(state, fresh_forward(target, tokens, (FINAL,))[1][FINAL][-2:-1], atol=1e-4)


@pytest.mark.parametrize("family", ["medusa", "hydra"])
@pytest.mark.parametrize(("name", "dtype"), [("greedy", "float32"), ("top-p", "float32"), ("T=1", "torch-float32")])
def test_heads_with_the_targets_logits_and_noise_draft_the_token_first(
    tiny: Tiny, tmp_path: Path, family: str, name: str, dtype: str
) -> None:
    """Head i read for level i, the state or the tokens one too early, the noise of another position: nearly nothing fitted."""
    target = tiny("llama", dtype)
    requests, expected = asked(target, name, [PROMPTS[0], PROMPTS[2], PROMPTS[5]])
    texts = [(len(r.prompt_ids), [*r.prompt_ids, *expected[r.id, 0].token_ids]) for r in requests]
    tensors = fitted_tensors(target, family, texts, num_heads=3)
    completions = generated(target, [position_drafter(target, tmp_path, family, "chain", tensors)], [requests])
    assert_equal(completions, expected)
    assert total(completions, "num_accepted") >= 0.95 * total(completions, "num_drafted") > 20


@pytest.mark.parametrize(
    ("rule", "family"),
    [
        (AcceptanceRule.TRAVERSAL, "medusa"),
        (AcceptanceRule.IID, "hydra"),
        pytest.param(AcceptanceRule.CHAIN, "medusa", marks=pytest.mark.slow),
        pytest.param(AcceptanceRule.TRAVERSAL, "hydra", marks=pytest.mark.slow),
    ],
)
def test_children_drawn_by_chance_are_drafted_and_accepted(
    tiny: Tiny, tmp_path: Path, rule: AcceptanceRule, family: str
) -> None:
    """Nodes of one level share a row of logits: draws took the row of another sequence, or none."""
    target = tiny()
    requests = [
        Request(r.id, r.prompt_ids, r.params, speculation=Speculation(rule=rule))
        for r in requests_of(target, SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True))
    ]
    completions = generated(target, [position_drafter(target, tmp_path, family)], [requests])
    assert all(len(completion.token_ids) == 24 for completion in completions)
    assert total(completions, "num_drafted") > 40 and total(completions, "num_accepted") > 0


def test_heads_draft_no_deeper_than_there_are_heads(tiny: Tiny, tmp_path: Path) -> None:
    """A tree of four levels over two heads failed in every step."""
    target = tiny()
    requests = requests_of(target, PARAMS["greedy"])
    drafter = position_drafter(target, tmp_path, tensors=medusa_tensors(2))
    completions = generated(target, [drafter], [requests])
    assert_equal(completions, truth(target, requests, "greedy"))
    assert total(completions, "num_drafted") > 0


def merge(model: Path, tensors: Tensors) -> Path:
    """A target and its heads in one directory, as Medusa-2 is published."""
    config = json.loads((model / "config.json").read_text()) | {"medusa_num_heads": 5, "medusa_num_layers": 1}
    (model / "config.json").write_text(json.dumps(config))
    weights = model / "model.safetensors"
    every = load_file(weights) | {f"medusa_head.{name}": t for name, t in tensors.items()}
    save_file(every, weights, metadata={"format": "pt"})
    return model


@pytest.mark.parametrize("form", [pytest.param("pt", marks=pytest.mark.slow), "merged", "hydra", "hydra++"])
def test_a_configured_head_is_loaded_and_drafts(tmp_path: Path, form: str) -> None:
    """`drafting.medusa.path` alone was not enough, a target that holds its heads could not be loaded, or the architecture of the
    published Hydra heads was refused.
    """
    model = save_model("llama", tmp_path / "target")
    config, engine_config = TargetConfig(model=str(model)), EngineConfig(max_kv_tokens=2048)
    if form == "merged":
        head = merge(model, medusa_tensors())
    elif form == "hydra":
        head = save_hydra(tmp_path / "head", hydra_tensors(), hidden_state_offset=1)
    elif form == "hydra++":
        tensors = hydra_plus_tensors(Target.load(config, 64))
        head = save_hydra(tmp_path / "head", tensors, hydra_head_arch="prefix-mlp")
    else:
        head = save_medusa(tmp_path / "head", medusa_tensors(), form)
    name = form.rstrip("+") if form.startswith("hydra") else "medusa"
    drafting = DraftingConfig(**{name: HeadConfig(path=str(head))}, tree=DraftTreeConfig(max_nodes=6))
    with load_engine(config, engine_config, drafting, planner_class=FixedTreePlanner) as engine:
        assert names_of(engine) == ["copy", name]
        drafted_as_plainly(engine)
    with pytest.raises(ConfigError, match=rf"drafting\.{name}\.path"):
        load_engine(config, engine_config, DraftingConfig(drafters=(name,)))


def test_a_draft_of_one_level_costs_one_level(tiny: Tiny, tmp_path: Path) -> None:
    """It was taken for two, and such heads were asked where two would have paid."""
    target = tiny()
    network = PositionNetwork(read_medusa(save_medusa(tmp_path, medusa_tensors(with_output=False)), target), target)
    costs = CostTable({0: [1.0, 1.0]}, rows=(1, 2))
    for max_depth, expected_s in ((1, 1.0), (2, 2.0), (6, 2.0)):
        drafter = MedusaDrafter(network, make_shape("dynamic", 1, 1, max_depth), costs)
        seen = SimpleNamespace(key=("a", 0), tokens=[1, 2], most_tokens=9, slots=SimpleNamespace(length=1))
        sequence = cast(SequenceView, seen)
        drafter.observe(sequence, [2], {drafter.taps[0]: torch.zeros(1, target.hidden_size)})
        assert drafter.cost_s([sequence]) == expected_s

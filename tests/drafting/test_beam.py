"""Trees that grow on a device: the same to the last bit as trees that grow level by level, and one transfer for each draft."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_target import Free

from ragspec.core import Request, SamplingParams
from ragspec.drafting.acceptance import Cell, Guess
from ragspec.drafting.cost_model import CostTable
from ragspec.drafting.drafter import Budget
from ragspec.drafting.growing import beam, drafter
from ragspec.drafting.growing.draft import DraftSettings, GrowingDraft, OpenRows
from ragspec.drafting.growing.drafter import GrowingDrafter, Level, Levels
from ragspec.drafting.growing.shapes import MEDUSA_TREE, make_shape
from ragspec.errors import EngineError
from ragspec.numerics.torch.sampling import TorchLogits
from ragspec.speculation import ON, AcceptanceRule, Speculation
from ragspec.tree import Proposal

VOCAB = 40
SHAPES = {
    "chain": ("chain", 1, 1, 5),
    "dynamic": ("dynamic", 4, 4, 5),
    "wider than its children": ("dynamic", 2, 7, 4),
    "more children than tokens": ("dynamic", 50, 2, 3),
    "EAGLE-1": ("static", 4, 4, 5),
    "Medusa": ("static", 10, 10, 4, MEDUSA_TREE),
    "confidence": ("dynamic", 4, 3, 5, (), 9),
}


class Bigrams(GrowingDrafter[GrowingDraft]):
    """A token's logits depend on the token before and on the level. `shared`: on the sequence and the level alone."""

    name = "bigrams"

    def __init__(
        self, shape: Sequence[Any], costs: CostTable, logits: np.ndarray, shared: bool = False, device: str = "cpu"
    ) -> None:
        super().__init__(np.arange(VOCAB), VOCAB, make_shape(*shape), costs, coupled=True)
        self._logits, self.nodes_share_rows = torch.from_numpy(logits).to(device), shared  # [levels, VOCAB, VOCAB]
        self.num_levels = 0

    def _draft(self, sequence: Any, settings: DraftSettings, num_levels: int) -> GrowingDraft:
        return GrowingDraft(sequence, SimpleNamespace(end=len(sequence.tokens)), settings, num_levels)

    def _levels(self, drafts: list[GrowingDraft]) -> Levels:
        rows = torch.tensor([draft.sequence.tokens[-1] for draft in drafts])
        for level in self._logits:
            self.num_levels += 1
            nodes: OpenRows = yield Level(TorchLogits(level[rows]), len(rows))
            rows = rows[torch.as_tensor(nodes.above)] if self.nodes_share_rows else torch.as_tensor(nodes.token_ids)
            assert len(rows) == (len(nodes.above) if self.nodes_share_rows else sum(map(len, nodes.paths)))


def sequence(number: int, params: SamplingParams, most_tokens: int, rule: AcceptanceRule = AcceptanceRule.KEYED) -> Any:
    request = Request(f"r{number}", (3, 4), params, speculation=Speculation(rule=rule) if rule.value != "keyed" else ON)
    tokens = [3, 4, 7, 5 + number]
    return SimpleNamespace(
        request=request, key=(request.id, 0), tokens=tokens, num_prompt=2, num_output=2, most_tokens=most_tokens
    )


def some_sequences(rng: np.random.Generator) -> list[Any]:
    """Greedy and sampled ones, one near its last token."""
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(temperature=0.7, top_k=2, seed=2**40),
        SamplingParams(temperature=1.3, top_p=0.6, repetition_penalty=1.4, logit_bias={3: 4.0}),
    ]
    most_tokens = rng.integers(2, 9, int(rng.integers(1, 6))).tolist()
    if rng.random() < 0.2:  # as a rule without branches wants its drafts where nothing is drawn
        return [sequence(i, params[0], most, AcceptanceRule.CHAIN) for i, most in enumerate(most_tokens)]
    return [sequence(i, params[i % 4], most) for i, most in enumerate(most_tokens)]


def logits_of(rng: np.random.Generator, num_digits: int) -> np.ndarray:
    """Of few digits: many are equal."""
    return (rng.normal(size=(6, VOCAB, VOCAB)) * 2).round(num_digits).astype(np.float32)


def taught(made: Bigrams, seed: int) -> Bigrams:
    rng = np.random.default_rng(seed)
    for cell in rng.integers(0, made.acceptance.chances(0).size * 4, 3000):
        made.acceptance.learn(Cell(int(cell)), bool(rng.random() < 0.6))
    return made


def grown(made: Bigrams, sequences: list[Any], token_s: float, on_device: bool) -> list[list[Proposal]]:
    """Three drafts one after the other, of which the later ones know how deep the earlier ones were. Each node's feedback is its
    cell: the tables of two drafters are two objects."""
    budget, lists = Budget(48, token_s, [], [5] * len(sequences)), []
    with pytest.MonkeyPatch.context() as patched:
        if not on_device:
            patched.setattr(drafter, "can_grow_on_device", lambda drafts: False)
        for _ in range(3):
            lists += made.propose(sequences, budget)
    return [[p._replace(origin=p.origin._replace(feedback=_cell(p))) for p in proposals] for proposals in lists]


def _cell(proposal: Proposal) -> Cell:
    assert isinstance(proposal.origin.feedback, Guess)
    return proposal.origin.feedback.cell


@pytest.mark.parametrize("shared", [False, True], ids=["a row each", "shared rows"])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_trees_are_those_of_growth_level_by_level(
    monkeypatch: pytest.MonkeyPatch, device: str, name: str, shared: bool
) -> None:
    """Another order of equal paths, a probability rounded otherwise, a parent in another row, a draft that ended early and
    shifted its neighbours; a draft that went on where another level would not pay."""
    num_nodes, on_device = 0, set[float]()
    path_probs_of = beam.Beam._path_probs_of

    def noted(self: beam.Beam, scores: torch.Tensor) -> torch.Tensor:
        path_probs = path_probs_of(self, scores)
        on_device.update(path_probs.flatten().tolist())
        return path_probs

    monkeypatch.setattr(beam.Beam, "_path_probs_of", noted)
    for seed in range(12):
        rng = np.random.default_rng(seed)
        sequences, logits, token_s = some_sequences(rng), logits_of(rng, seed % 3), (0.0, 1.0, 3.0)[seed % 3]
        ours, theirs = (taught(Bigrams(SHAPES[name], Free(0.4), logits, shared, device), seed) for _ in range(2))
        trees = grown(ours, sequences, token_s, on_device=True)
        assert trees == grown(theirs, sequences, token_s, on_device=False)
        assert ours.acceptance.typical == theirs.acceptance.typical and ours._num_levels == theirs._num_levels
        assert ours.num_levels >= theirs.num_levels
        num_nodes += sum(map(len, trees))
        assert name == "confidence" or {node.path_prob for tree in trees for node in tree} <= on_device
    assert num_nodes > 300


def test_a_draft_is_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each level waited for the device; or levels beyond the usual depth were computed for nothing."""
    rng, sizes = np.random.default_rng(3), list[int]()
    to_host = beam.to_host

    def counted(tensor: torch.Tensor) -> np.ndarray:
        sizes.append(tensor.numel())
        return to_host(tensor)

    monkeypatch.setattr(beam, "to_host", counted)
    sequences = [sequence(i, SamplingParams(temperature=1.0, seed=i), 9) for i in range(3)]
    made = Bigrams(SHAPES["dynamic"], Free(1e-9), logits_of(rng, 3))
    made.propose(sequences, Budget(48, 0.0, [], [5] * 3))
    assert len(sizes) == 1 and made.num_levels == 5
    made._num_levels = 2.0
    made.propose(sequences, Budget(48, 1.0, [], [5] * 3))
    assert len(sizes) == 1 + 4  # two usual levels, then level by level
    made._num_levels = 4.9
    made.propose(sequences, Budget(48, 1.0, [], [5] * 3))
    assert len(sizes) == 1 + 4 + 1
    made = Bigrams(SHAPES["dynamic"], Free(1e9), logits_of(rng, 3))
    made.propose(sequences, Budget(48, 1.0, [], [5] * 3))
    assert made.num_levels == 2 and len(sizes) == 1 + 4 + 1 + 1


def test_a_sequence_without_numbers_ends_alone() -> None:
    """NaN in one sequence's logits ended all drafts, or its rows shifted the others'."""
    rng = np.random.default_rng(6)
    logits = logits_of(rng, 3)
    logits[0, 6, 20:24], logits[1, :20] = 9.0, np.nan  # the children of the second sequence's root; all others'
    logits[1, 24:] = np.nan
    sequences = [sequence(i, SamplingParams(temperature=0.0), 9) for i in range(3)]
    ours, theirs = (Bigrams(SHAPES["dynamic"], Free(1e-9), logits) for _ in range(2))
    trees = grown(ours, sequences, 0.0, on_device=True)
    assert trees == grown(theirs, sequences, 0.0, on_device=False)
    assert ours._failed == theirs._failed and len(ours._failed) == 2 and any(trees)
    alone = [s for s in sequences if s.key in ours._failed]
    with pytest.raises(EngineError, match="not finite"):
        Bigrams(SHAPES["dynamic"], Free(1e-9), np.full_like(logits, np.nan)).propose(
            alone, Budget(48, 0.0, [], [5] * 2)
        )


def test_drawn_children_are_drawn_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that needs the distribution of its children got the most probable ones; a chain stood in a beam of trees."""
    rng = np.random.default_rng(8)
    params = SamplingParams(temperature=1.0, seed=1)
    made = Bigrams(SHAPES["dynamic"], Free(1e-9), logits_of(rng, 3))
    drawn = [sequence(0, params, 9), sequence(1, params, 9, AcceptanceRule.CHAIN)]
    monkeypatch.setattr(beam, "to_host", None)
    keyed, chain = made.propose(drawn, Budget(48, 0.0, [], [5] * 2))
    assert all(p.draw is None for p in keyed) and len(keyed) > len(chain) > 0
    assert all(p.draw is not None for p in chain)

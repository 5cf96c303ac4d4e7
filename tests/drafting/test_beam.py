"""The choice of nodes: on the host and on a device the trees of plain loops to the last bit, and one transfer for each draft."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from planner_parts import Running
from tiny_target import Free

from ragspec.core import SamplingParams
from ragspec.drafting.acceptance import MARGINS, Guess
from ragspec.drafting.cost_model import CostTable
from ragspec.drafting.drafter import Budget
from ragspec.drafting.growing import beam, drafter
from ragspec.drafting.growing.beam import GrownLevel
from ragspec.drafting.growing.draft import (
    DRAWN,
    MEDUSA_TREE,
    STATIC_TREE,
    Children,
    GrowingDraft,
    OpenRows,
    StaticShape,
    make_shape,
)
from ragspec.drafting.growing.drafter import GrowingDrafter, Level, Levels
from ragspec.errors import EngineError
from ragspec.numerics.torch.sampling import TorchLogits
from ragspec.speculation import AcceptanceRule, Speculation
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
    draft_class = GrowingDraft

    def __init__(
        self, shape: Sequence[Any], costs: CostTable, logits: np.ndarray, shared: bool = False, device: str = "cpu"
    ) -> None:
        super().__init__(np.arange(VOCAB), VOCAB, make_shape(*shape), costs)
        self._on_host = device == "host"
        self._logits = torch.from_numpy(logits).to("cpu" if self._on_host else device)  # [levels, VOCAB, VOCAB]
        self.nodes_share_rows, self.num_levels = shared, 0

    def _memory(self, sequence: Any) -> Any:
        return SimpleNamespace(end=len(sequence.tokens))

    def _levels(self, drafts: list[GrowingDraft]) -> Levels:
        device = self._logits.device
        rows = torch.tensor([draft.sequence.tokens[-1] for draft in drafts], device=device)
        for level in self._logits:
            self.num_levels += 1
            logits = level[rows].numpy() if self._on_host else TorchLogits(level[rows])
            nodes: OpenRows = yield Level(logits, len(rows))
            chosen = torch.as_tensor(nodes.above if self.nodes_share_rows else nodes.token_ids, device=device)
            rows = rows[chosen] if self.nodes_share_rows else chosen
            assert len(rows) == (len(nodes.above) if self.nodes_share_rows else sum(map(len, nodes.paths)))


class PlainBeam:
    """The formulas of `beam.Beam`, a node at a time."""

    def __init__(self, drafts: list[GrowingDraft], num_children: int) -> None:
        self._drafts, self._num_children = drafts, num_children
        self._paths: list[list[tuple[int, ...]]] = [[()] for _ in drafts]  # the ranks of each open node's path

    def grown(self, picks: np.ndarray, num_rows: int) -> GrownLevel:
        rows = iter(picks)
        found = [self._children(number, [next(rows) for _ in draft.open]) for number, draft in enumerate(self._drafts)]
        return GrownLevel(found, num_rows)

    def _children(self, number: int, picks: list[np.ndarray]) -> Children:
        draft, k = self._drafts[number], self._num_children
        settings, paths = draft.settings, self._paths[number]
        tree = (MEDUSA_TREE if k == 10 else STATIC_TREE) if isinstance(settings.shape, StaticShape) else None
        made = np.zeros((len(picks), 3 * k + 2))
        made[:, :k] = -1.0
        further: list[tuple[float, int, tuple[int, ...]]] = []
        for row, (node, pick) in enumerate(zip(draft.open, picks, strict=True)):
            left, scores = 1.0, pick[k : 2 * k].tolist()
            for rank in range(1 if settings.is_chain else k):
                ranks = (*paths[row], rank)
                if pick[rank] < 0 or (tree is not None and ranks not in tree):
                    break
                leads = rank == 0 and k > 1 and not settings.is_chain and settings.mode != DRAWN
                behind = scores[0] - scores[1 if leads else rank]
                strata = (settings.mode * 4 + min(len(ranks), 4) - 1) * 8 + min(rank, 7)
                cell = strata * 11 + bisect_right(MARGINS, behind)
                chance = settings.acceptance.probability(cell)
                path_prob = node.path_prob * (math.exp(scores[rank]) if settings.by_confidence else left * chance)
                left *= 1.0 - chance
                if path_prob < settings.least_prob:
                    continue
                made[row, [rank, k + rank, 2 * k + rank]] = pick[rank], cell, path_prob
                if tree is None or any(path[:-1] == ranks for path in tree):
                    further.append((0.0 if tree else -path_prob, row * k + rank, ranks))
            made[row, -2:] = left, pick[-1]
        kept = sorted(sorted(further)[: settings.width], key=lambda each: each[1])
        self._paths[number] = [ranks for _, _, ranks in kept]
        return Children.of(made, np.array([place for _, place, _ in kept], np.float64))


def sequence(number: int, params: SamplingParams, most: int, rule: AcceptanceRule = AcceptanceRule.KEYED) -> Running:
    return Running(f"r{number}", [3, 4, 7, 5 + number], 2, most, Speculation(rule=rule), params=params)


def some_sequences(rng: np.random.Generator) -> list[Running]:
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
    for cell in rng.integers(0, made.acceptance.chances(range(4)).size, 3000):
        made.acceptance.learn(int(cell), bool(rng.random() < 0.6))
    return made


def grown(made: Bigrams, sequences: list[Any], token_s: float, plain: bool = False) -> list[list[Proposal]]:
    """Three drafts one after the other, of which the later ones know how deep the earlier ones were. Each node's feedback is its
    cell: the tables of two drafters are two objects."""
    budget, lists = Budget(48, token_s, [5] * len(sequences)), []
    with pytest.MonkeyPatch.context() as patched:
        if plain:
            patched.setattr(drafter, "needs_host", lambda drafts: True)
            patched.setattr(drafter, "Beam", PlainBeam)
        for _ in range(3):
            lists += made.propose(sequences, budget)
    return [[_comparable(proposal) for proposal in proposals] for proposals in lists]


def _comparable(proposal: Proposal) -> Proposal:
    feedback, draw = proposal.origin.feedback, proposal.draw and proposal.draw._replace(draft_probs=None)
    assert isinstance(feedback, Guess)
    return proposal._replace(origin=proposal.origin._replace(feedback=feedback.cell), draw=draw)


@pytest.mark.parametrize(("name", "shared"), [*((name, False) for name in SHAPES), ("dynamic", True), ("Medusa", True)])
@pytest.mark.parametrize("device", ["host", "cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_trees_are_those_of_plain_loops(device: str, name: str, shared: bool) -> None:
    """Another order of equal paths, a probability rounded otherwise, a parent in another row, a draft that ended early and
    shifted its neighbours; a draft that went on where another level would not pay."""
    num_nodes = 0
    for seed in range(4):
        rng = np.random.default_rng(seed)
        sequences, logits, token_s = some_sequences(rng), logits_of(rng, seed % 3), (0.0, 1.0, 3.0)[seed % 3]
        ours, theirs = (taught(Bigrams(SHAPES[name], Free(0.4), logits, shared, device), seed) for _ in range(2))
        trees, expected = grown(ours, sequences, token_s), grown(theirs, sequences, token_s, plain=True)
        if name == "confidence":  # a device's exponential may differ in the last bit
            trees, expected = ([[_rounded(p) for p in tree] for tree in each] for each in (trees, expected))
        assert trees == expected
        assert ours.acceptance.typical == theirs.acceptance.typical
        assert ours.num_levels >= theirs.num_levels
        num_nodes += sum(map(len, trees))
    assert num_nodes > 60


def _rounded(proposal: Proposal) -> Proposal:
    return proposal._replace(path_prob=round(proposal.path_prob, 12))


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
    made.propose(sequences, Budget(48, 0.0, [5] * 3))
    assert len(sizes) == 1 and made.num_levels == 5
    made.propose(sequences, Budget(48, 1.0, [5] * 3))
    assert len(sizes) == 1 + 4  # two usual levels, then level by level
    for _ in range(100):  # five levels are usual now
        made.propose(sequences, Budget(48, 0.0, [5] * 3))
    made.propose(sequences, Budget(48, 1.0, [5] * 3))
    assert len(sizes) == 1 + 4 + 100 + 1
    made = Bigrams(SHAPES["dynamic"], Free(1e9), logits_of(rng, 3))
    made.propose(sequences, Budget(48, 1.0, [5] * 3))
    assert made.num_levels == 2 and len(sizes) == 1 + 4 + 100 + 1 + 1


def test_a_sequence_without_numbers_ends_alone() -> None:
    """NaN in one sequence's logits ended all drafts, or its rows shifted the others'."""
    rng = np.random.default_rng(6)
    logits = logits_of(rng, 3)
    logits[0, 6, 20:24], logits[1, :20] = 9.0, np.nan  # the children of the second sequence's root; all others'
    logits[1, 24:] = np.nan
    sequences = [sequence(i, SamplingParams(temperature=0.0), 9) for i in range(3)]
    ours, theirs = (Bigrams(SHAPES["dynamic"], Free(1e-9), logits) for _ in range(2))
    trees = grown(ours, sequences, 0.0)
    assert trees == grown(theirs, sequences, 0.0, plain=True)
    assert [bool(tree) for tree in trees[-3:]] == [False, True, False]
    alone = [sequences[0], sequences[2]]
    with pytest.raises(EngineError, match="not finite"):
        Bigrams(SHAPES["dynamic"], Free(1e-9), np.full_like(logits, np.nan)).propose(alone, Budget(48, 0.0, [5] * 2))


@pytest.mark.parametrize("name", ["dynamic", "EAGLE-1", "confidence"])
def test_drawn_children_are_drawn_by_the_host(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A rule that needs the distribution of its children got the most probable ones, or branches in a chain; a drawn child was
    left out; or the plain loops give another tree."""
    params = SamplingParams(temperature=1.0, top_k=3, seed=1)
    rules = [AcceptanceRule.KEYED, AcceptanceRule.CHAIN, AcceptanceRule.IID, AcceptanceRule.WITHOUT_REPLACEMENT]
    sequences = [sequence(i, params, 9, rule) for i, rule in enumerate(rules)]
    logits = logits_of(np.random.default_rng(8), 3)
    monkeypatch.setattr(beam, "to_host", None)
    ours, theirs = (Bigrams(SHAPES[name], Free(1e-9), logits) for _ in range(2))
    trees = grown(ours, sequences, 0.0)
    assert trees == grown(theirs, sequences, 0.0, plain=True)
    keyed, chain, *others = trees[:4]
    assert all(p.draw is None for p in keyed) and len(keyed) > len(chain) > 0
    assert all(p.draw is not None for tree in (chain, *others) for p in tree)
    assert [p.parent for p in chain] == [*range(-1, len(chain) - 1)]

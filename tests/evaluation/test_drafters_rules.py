"""The laws behind a beginning, against a second computation; and the rules, on laws whose answer is known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from drafters_data import save_heads
from drafting.eagle_heads import random_head
from drafting.eagle_reference import draft_outputs, eagle3_outputs, eagle_outputs, head_logits, target_ids
from oracle import next_logits
from statistics_of import softmax

from ragspec.config import TargetConfig
from ragspec.drafting.eagle.checkpoint import HeadCheckpoint, read_head
from ragspec.engine.target import Target
from ragspec.errors import ModelError
from ragspec.evaluation.suites.drafters import acceptance_rules
from ragspec.evaluation.suites.drafters.acceptance_rules import (
    METHODS,
    Floats,
    Method,
    TargetAndHead,
    Tokens,
    rule_table,
    step_lengths,
)
from ragspec.evaluation.suites.drafters.variants import CHAIN, TREE
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.kv_cache import SequenceSlots
from ragspec.tree import DraftTree, Origin

PREFIX = tuple(range(40, 60))
VOCAB = 12


@pytest.fixture(scope="module")
def heads_dir(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path) -> Path:
    return save_heads(tmp_path_factory.mktemp("heads"), tiny_dir)


def features_of(target: Target, taps: tuple[int, ...]) -> torch.Tensor:
    """Shape: [T, F]."""
    slots = SequenceSlots(target.pool)
    batch = Batch([ScheduledSequence(slots, PREFIX)])
    _, tapped = target.forward_tapped(batch.token_ids, batch.metadata, np.array([0], np.int32), taps)
    slots.release()
    return torch.cat([tapped[tap] for tap in taps], -1)


def referred(target: Target, checkpoint: HeadCheckpoint, taps: tuple[int, ...], path: Tokens) -> Floats:
    """The head's law behind a path by the slow reference. Shape: [V]."""
    features, embed = features_of(target, taps)[:-1], target.embedding
    outputs = eagle_outputs if checkpoint.config.family == "eagle" else eagle3_outputs
    hidden = outputs(checkpoint, embed, PREFIX, features)[-1:]
    if path:
        hidden = draft_outputs(checkpoint, embed, PREFIX, features, path)[-1:]
    if checkpoint.config.family == "eagle":
        return softmax(target.logits_of(hidden.float()).double().numpy()[0])
    full = np.zeros(target.vocab_size)
    full[target_ids(checkpoint).numpy()] = softmax(head_logits(checkpoint, hidden)[0].numpy())
    return full


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
def test_the_heads_law_is_the_references(family: str, heads_dir: Path, tiny_dir: Path) -> None:
    """Bug guarded: a feature shifted by one, a state that is not fed back, a draft vocabulary read as the target's."""
    laws = TargetAndHead.load(TargetConfig(model=str(tiny_dir)), heads_dir / family)
    checkpoint = read_head(heads_dir / family)
    with laws.behind(PREFIX) as place:
        (alone,) = place.draft_probs([()])
        behind = place.draft_probs([(7, 9), (9, 7), (7, 7)])
    assert np.allclose(alone, referred(laws.target, checkpoint, laws.taps, ()), atol=1e-5)
    for path, law in zip(((7, 9), (9, 7), (7, 7)), behind, strict=True):
        assert np.allclose(law, referred(laws.target, checkpoint, laws.taps, path), atol=1e-5)
        assert law.sum() == pytest.approx(1.0) and np.abs(law - alone).max() > 1e-5
    assert laws.target.pool.num_free_pages == laws.target.pool.num_pages, "the place gave its slots back"


def test_the_targets_law_is_that_of_each_path(heads_dir: Path, tiny_dir: Path) -> None:
    """Bug guarded: laws of the wrong nodes; a second tree that sees what the first one left."""
    laws = TargetAndHead.load(TargetConfig(model=str(tiny_dir)), heads_dir / "eagle3")
    with laws.behind(PREFIX) as place:
        for token in (5, 6):
            tree = DraftTree(PREFIX[-1])
            tree.add(tree.add(0, token, 1.0, Origin("x")), 8, 1.0, Origin("x"))
            probs = place.target_probs(tree)
            for node, tokens in enumerate(((), (token,), (token, 8))):
                assert np.allclose(probs[node], softmax(next_logits(laws.target, [*PREFIX, *tokens])), atol=1e-6)


def test_a_dialect_that_is_not_computed_is_refused(tmp_path: Path, tiny_dir: Path) -> None:
    """Bug guarded: a table of a head that was computed wrongly."""
    laws = TargetAndHead.load(TargetConfig(model=str(tiny_dir)), save_heads(tmp_path / "a", tiny_dir) / "eagle3")
    vocab = laws.target.vocab_size
    taps = (0, 1, 2)
    random_head("eagle3", tmp_path / "b", hidden=64, vocab=vocab, aux_layers=taps, norm_before_residual=True,
                dialect="speculators")  # fmt: skip
    with pytest.raises(ModelError, match="not computed here"):
        TargetAndHead.load(TargetConfig(model=str(tiny_dir)), tmp_path / "b")


class MadeUp:
    """A place whose laws depend on the last token alone: `follows[v]` is the target's, `drafts[v]` the head's."""

    def __init__(self, follows: Floats, drafts: Floats) -> None:
        self._follows, self._drafts = follows, drafts
        self.root = 0

    def draft_probs(self, paths: Sequence[Tokens]) -> Floats:
        return self._drafts[[path[-1] if path else self.root for path in paths]]

    def target_probs(self, tree: DraftTree) -> Floats:
        return self._follows[tree.token_ids]


def laws_of(seed: int, sharpness: float = 2.0) -> Floats:
    rows = np.random.default_rng(seed).normal(size=(VOCAB, VOCAB)) * sharpness
    return np.stack([softmax(row) for row in rows])


def mean_length(place: MadeUp, shape: str, method: Method, num_seeds: int = 40) -> float:
    return float(np.mean([step_lengths(place, 0, shape, method, 100 * seed) for seed in range(num_seeds)]))  # type: ignore[arg-type]


def methods() -> list[tuple[str, Method]]:
    return [(shape, method) for shape, own in METHODS.items() for method in own]


@pytest.mark.parametrize(("shape", "method"), methods(), ids=lambda v: getattr(v, "name", v))
def test_a_head_that_is_the_target_is_always_right(shape: str, method: Method) -> None:
    """Bug guarded: noise of another position or seed in a coupled draft; laws passed to the rules in the wrong places."""
    place = MadeUp(laws_of(1), laws_of(1))
    length = mean_length(place, shape, method, 10)
    deepest = {CHAIN: 5, TREE: 4}[shape]
    if method.name == "keyed, uncoupled":
        assert 1.0 < length < deepest, "it does not know the noise"
    else:
        assert length == deepest


@pytest.mark.parametrize(("shape", "method"), methods(), ids=lambda v: getattr(v, "name", v))
def test_a_head_that_is_always_wrong_gives_one_token(shape: str, method: Method) -> None:
    """Bug guarded: drafted tokens counted instead of accepted ones."""
    follows = laws_of(1)
    follows[:, VOCAB // 2 :] = 0.0
    follows /= follows.sum(-1, keepdims=True)
    drafts = laws_of(2)
    drafts[:, : VOCAB // 2] = 0.0
    drafts /= drafts.sum(-1, keepdims=True)
    assert mean_length(MadeUp(follows, drafts), shape, method, 5) == 1.0


def test_rules_stand_in_their_known_order() -> None:
    """Bug guarded: two rules under each other's name.

    Block verification accepts at least as much as the chain rule and traversal as its tree's rule, in expectation.
    """
    place = MadeUp(laws_of(1, 1.5), laws_of(2, 1.5))
    known = {(shape, method.name): mean_length(place, shape, method, 150) for shape, method in methods()}
    assert known[CHAIN, "block"] > known[CHAIN, "chain"]
    assert known[TREE, "traversal, iid"] > known[TREE, "iid"]
    assert known[TREE, "traversal, without replacement"] > known[TREE, "without replacement"]
    assert known[TREE, "without replacement"] > known[TREE, "iid"]
    assert known[TREE, "keyed, coupled"] > known[TREE, "keyed, uncoupled"]


def test_chain_acceptance_is_the_overlap_of_the_laws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug guarded: verification at another temperature, or with a law that the draft was not drawn from."""
    monkeypatch.setitem(acceptance_rules._DEPTHS, CHAIN, 1)
    follows, drafts = laws_of(3, 1.0), laws_of(4, 1.0)
    (rule,) = [method for method in METHODS[CHAIN] if method.name == "chain"]
    overlap = float(np.minimum(follows[0], drafts[0]).sum())
    num_seeds = 400
    error = 4 * np.sqrt(overlap * (1 - overlap) / (num_seeds * acceptance_rules.NUM_WALKS / 2))
    assert mean_length(MadeUp(follows, drafts), CHAIN, rule, num_seeds) == pytest.approx(1 + overlap, abs=error)


def test_the_table_has_every_rule_in_its_shapes(heads_dir: Path, tiny_dir: Path) -> None:
    """Bug guarded: a rule left out, or a chain's number under trees."""
    laws = TargetAndHead.load(TargetConfig(model=str(tiny_dir)), heads_dir / "eagle3")
    seen: list[tuple[int, int]] = []
    table = rule_table(laws, [PREFIX, PREFIX[:9]], 0, lambda _, done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]
    assert set(table) == {method.name for own in METHODS.values() for method in own}
    for name, row in table.items():
        for shape, own in METHODS.items():
            assert (row[shape] is not None) == (name in [method.name for method in own])
            assert row[shape] is None or 1.0 <= row[shape] <= 5.0

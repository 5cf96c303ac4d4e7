"""Token recycling: the target's candidates are drafted where their token comes again, and each tenant has a table of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from oracle_cases import PARAMS, PROMPTS, assert_equal, generated, requests_of, total, truth
from tiny_target import tiny_engine

from ragspec.config import DraftingConfig
from ragspec.core import Request, SamplingParams
from ragspec.drafting.drafter import NUM_TOP_TOKENS, TOP_TOKENS, Budget, SequenceView
from ragspec.drafting.recycling import RecyclingDrafter, TokenTable
from ragspec.engine.loading import make_drafters
from ragspec.engine.target import Target
from ragspec.errors import ConfigError
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.kv_cache import SequenceSlots
from ragspec.tree import Proposal

Tiny = Callable[..., Target]
TABLE_BYTES = 320 * NUM_TOP_TOKENS * 4


class Noting(RecyclingDrafter):
    """Keeps every draft, by the text that it followed."""

    def __init__(self, vocab_size: int = 320, max_bytes: int = 2**20) -> None:
        super().__init__(vocab_size, max_bytes)
        self.drafts: list[tuple[str, list[int], list[tuple[int, int, float]]]] = []

    def propose(self, sequences: Sequence[SequenceView], budget: Budget) -> list[list[Proposal]]:
        lists = super().propose(sequences, budget)
        for sequence, proposals in zip(sequences, lists, strict=True):
            nodes = [(p.token_id, p.parent, p.path_prob) for p in proposals]
            self.drafts.append((sequence.request.salt, list(sequence.tokens), nodes))
        return lists


@pytest.mark.parametrize("dtype", ["float32", "torch-float32"])
def test_the_tap_has_the_targets_best_tokens(tiny: Tiny, dtype: str) -> None:
    """Candidates of another row, or of rows without logits."""
    target = tiny("llama", dtype)
    parts = [ScheduledSequence(SequenceSlots(target.pool), range(9 + i, 14 + i)) for i in range(2)]
    parts.append(ScheduledSequence(SequenceSlots(target.pool), (5, 6), wants_logits=False))
    batch = Batch(parts)
    logits, features = target.forward_tapped(batch.token_ids, batch.metadata, batch.logit_rows, (TOP_TOKENS,))
    top = features[TOP_TOKENS].numpy()
    assert top.shape == (12, NUM_TOP_TOKENS) and batch.logit_rows.tolist() == [4, 9]
    assert (np.delete(top, [4, 9], 0) == -1).all()
    assert (top[[4, 9]] == np.argsort(-np.asarray(logits), 1)[:, :NUM_TOP_TOKENS]).all()


@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in PARAMS), ("T=1", "torch-float32")])
def test_no_output_changes(tiny: Tiny, name: str, dtype: str) -> None:
    """A draft changed a token, alone or in a batch; or nothing was drafted at all."""
    target = tiny("llama", dtype)
    requests = requests_of(target, PARAMS[name])
    drafter = Noting(target.vocab_size)
    completions = generated(target, [drafter], [requests, requests], num_kv_slots=256, max_step_tokens=24)
    assert_equal(completions, truth(target, requests, name))
    assert total(completions, "num_drafted") > 20 and total(completions, "num_accepted") > 0


def test_what_was_probable_is_drafted_again(tiny: Tiny) -> None:
    """Rows of the wrong positions were learned: what comes again was not accepted."""
    target = tiny()
    requests = requests_of(target, SamplingParams(max_tokens=40, ignore_eos=True), PROMPTS[:1])
    drafter = Noting()
    with tiny_engine(target, [drafter]) as engine:
        first, second = (engine.generate([replace(requests[0], id=name)]) for name in "ab")
    (tokens,) = {done[0].token_ids for done in (first, second)}
    assert total(second, "num_accepted") > total(first, "num_accepted")
    assert total(second, "num_accepted") >= 0.5 * len(tokens)


def test_the_likeliest_paths_come_first() -> None:
    """A branch without its parent, a cycle without an end, or more nodes than allowed."""
    table = TokenTable(10)
    rows = np.full((3, NUM_TOP_TOKENS), -1)
    rows[0, :2], rows[1, :1] = (4, 5), (3,)
    table.learn(np.array([3, 4, 5], np.int32), rows)
    proposals = table.draft(
        3, True, max_nodes=9, max_depth=5
    )  # 3 -> 4 or 5, 4 -> 3, and round again until too improbable
    assert [(p.token_id, p.parent) for p in proposals] == [(4, -1), (3, 0), (5, -1), (4, 1), (3, 3)]
    probs = [p.path_prob for p in proposals]
    assert probs == sorted(probs, reverse=True)
    assert all(p.path_prob < (proposals[p.parent].path_prob if p.parent >= 0 else 1.0) for p in proposals)
    assert len(table.draft(3, True, max_nodes=2, max_depth=5)) == 2
    assert {p.parent for p in table.draft(3, True, max_nodes=6, max_depth=1)} == {-1}
    assert table.draft(5, True, 6, 5) == []


def test_tables_are_bounded_and_the_greediest_tenant_pays() -> None:
    """A tenant with a salt for every request pushed others out, or took all memory."""
    drafter = RecyclingDrafter(320, 4 * TABLE_BYTES + 100)
    for salt in ("b", "a\0" + "0", "c", *(f"a\0{i}" for i in range(1, 50))):
        drafter._tables.used(salt)
        assert sum(table._next.nbytes for table in drafter._tables.values()) <= 4 * TABLE_BYTES
    assert list(drafter._tables) == ["b", "c", "a\x0048", "a\x0049"]
    with pytest.raises(ConfigError, match=r"max_recycling_bytes is 10; one tenant's table takes 10240"):
        RecyclingDrafter(320, 10)


def test_a_purged_tenant_leaves_nothing(tiny: Tiny) -> None:
    """A table stayed, or a sequence that ran during the purge filled a new one."""
    target, drafter = tiny(), Noting()
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    steps: list[int] = []
    with tiny_engine(target, [drafter]) as engine:
        engine.generate([Request("b", (7, 8, 9), params, salt="b")])

        def purge_once(delta: Any) -> None:
            steps.append(len(delta.token_ids))
            if len(steps) == 3:
                engine.purge("a")

        engine.submit_all([Request("a", (7, 8, 9), params, salt="a\0x")], purge_once)
        while sum(steps) < 40:
            engine.between_steps(lambda: None)
        engine.between_steps(lambda: None)
        assert list(drafter._tables) == ["b"] and not drafter._teachers and len(steps) > 4
        engine.generate([Request("c", (7, 8, 9), params, salt="a\0x")])
        assert list(drafter._tables) == ["b", "a\0x"], "a tenant that comes back is served as before"


def test_it_is_named_in_the_configuration(tiny: Tiny) -> None:
    """The drafter had no entry, or was on for everybody."""
    target = tiny()
    (drafter,) = make_drafters(target, DraftingConfig(drafters=("recycling",)))
    assert isinstance(drafter, RecyclingDrafter)
    assert [drafter.name for drafter in make_drafters(target, DraftingConfig())] == ["copy"]

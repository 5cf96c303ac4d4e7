"""Drafters with networks for tests: random heads, a head with the target's own logits, and the states that drafts grow from."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from drafting.eagle_heads import random_head
from drafting.eagle_reference import head_outputs
from oracle import fresh_forward
from tiny_target import Free

from ragspec.drafting.cost_model import CostTable
from ragspec.drafting.eagle.drafter import EagleDrafter
from ragspec.drafting.eagle.layout import HeadCheckpoint
from ragspec.drafting.eagle.network import EagleNetwork
from ragspec.drafting.growing.draft import DraftBatch, make_shape
from ragspec.engine.target import Target
from ragspec.numerics.kv_cache import KvPool

FAMILIES = ["eagle", "eagle3"]
TAPS = (0, 1, 2)


def head_for(target: Target, family: str, **fields: Any) -> HeadCheckpoint:
    if family == "poss":
        family, fields = "eagle", {"num_layers": 2, "positions_per_layer": 2, **fields}
    if family == "eagle3":
        fields = {"aux_layers": TAPS, "draft_vocab": 200, **fields}
    return random_head(family, hidden=target.hidden_size, vocab=target.vocab_size, **fields)


def free() -> CostTable:
    """A head that costs nothing, however long it takes here: whether it is asked must not depend on this machine."""
    return Free(1e-9)


def drafter_for(target: Target, family: str, tree: str = "dynamic", **options: Any) -> EagleDrafter:
    network = EagleNetwork(head_for(target, family), target, 300)
    return EagleDrafter(network, make_shape(tree, 3, 2, 4), free(), **options)


def features_of(target: Target, tokens: Sequence[int], taps: Sequence[int]) -> torch.Tensor:
    """All tokens in one fresh forward. Shape: [T, F]."""
    tapped = fresh_forward(target, tokens, taps)[1]
    return torch.cat([tapped[tap] for tap in taps], 1)


def naive_outputs(target: Target, head: HeadCheckpoint, tokens: Sequence[int], taps: Sequence[int]) -> torch.Tensor:
    features = features_of(target, tokens, taps).double()
    return head_outputs(head, target.embedding, tokens, features)


class NotesReads:
    """Mixed into a drafter with a head: notes, at every draft, the text and the state that the draft grew from, and how much of
    the text it had not read.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[tuple[list[int], torch.Tensor, int]] = []

    def _read(self, drafts: list[Any], rows: DraftBatch, cache: KvPool) -> torch.Tensor:
        states: torch.Tensor = super()._read(drafts, rows, cache)  # type: ignore[misc]
        for draft, state in zip(drafts, states, strict=True):
            unread = int((~draft.memory._read[: draft.memory.end]).sum())
            self.seen.append((list(draft.sequence.tokens), state.clone(), unread))
        return states


def differs(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> bool:
    """Beyond what rounding to float32, or weights and inputs in int8, explain."""
    if dtype == torch.int8:
        return bool(torch.linalg.norm(found.double() - wanted) > 0.15 * torch.linalg.norm(wanted))
    return not torch.allclose(found.double(), wanted, rtol=0, atol=2e-5)


class Near(EagleDrafter):
    """Its logits are the target's own, shifted by a fixed amount a token: without a shift its drafts are nearly always right."""

    def __init__(self, target: Target, tree: tuple[str, int, int, int], shift: float = 0.0) -> None:
        super().__init__(EagleNetwork(head_for(target, "eagle"), target, 300), make_shape(*tree), free())
        self._target, self._known = target, dict[tuple[int, ...], np.ndarray]()
        noise = np.random.default_rng(5).normal(size=target.vocab_size).astype(np.float32)
        self._shift = shift * noise

    def _picks(self, drafts: list[Any], logits: Any, depth: int) -> np.ndarray:
        rows = [self._true(draft, node) for draft in drafts for node in draft.open]
        return super()._picks(drafts, np.stack(rows)[:, self.network.draft_ids], depth)

    def _true(self, draft: Any, node: Any) -> np.ndarray:
        tokens, number = [], node.number
        while number >= 0:
            tokens.insert(0, draft.proposals[number].token_id)
            number = draft.proposals[number].parent
        text = (*draft.sequence.tokens, *tokens)
        if text not in self._known:
            self._known[text] = fresh_forward(self._target, text)[0][-1] + self._shift
        return self._known[text]


def near(target: Target) -> Near:
    """Near enough to be accepted, far enough to be rejected."""
    return Near(target, ("dynamic", 3, 2, 3), 0.7)

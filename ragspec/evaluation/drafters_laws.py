"""The laws of target and head behind a beginning: what each thinks comes next at every node of a tree.

The target runs as the engine runs it. The head runs as it was trained (`ragspec.training.heads.eagle_model`), one step a
level, which is slow and needs nothing of the drafter.

    >>> laws = Laws.load(TargetConfig(), head_dir)
    >>> with laws.behind(prefix_ids) as place: place.draft_probs([()])
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.config import TargetConfig
from ragspec.drafting.eagle.checkpoint import check_fits, read_head
from ragspec.drafting.eagle.network import taps_of
from ragspec.engine.target import Target
from ragspec.errors import ModelError
from ragspec.numerics.kv_cache import SequenceSlots
from ragspec.numerics.rows import Part, StepRows
from ragspec.training.heads.eagle_model import Head, build_head, unroll
from ragspec.tree import DraftTree

Floats = NDArray[np.float64]
Tokens = tuple[int, ...]

_NUM_SLOTS = 2048
_OF_TARGET = "embed_tokens.weight"


class Laws(NamedTuple):
    """A target and one of its heads. `taps`: what the head reads of the target."""

    target: Target
    head: Head
    taps: tuple[int, ...]

    @classmethod
    def load(cls, config: TargetConfig, head_dir: Path) -> Laws:
        """Raises: ModelError."""
        target = Target.load(config, _NUM_SLOTS)
        head_config, tensors = read_head(head_dir)
        check_fits(head_config, target.vocab_size, target.hidden_size, target.num_layers)
        if head_config.norm_before_residual or head_config.norm_before_fc or head_config.norm_output:
            raise ModelError(f"the head {head_dir} is of a dialect that is served, but not computed here")
        head = build_head(head_config)
        weights = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
        weights.pop(_OF_TARGET, None)
        try:
            head.load_state_dict(weights)
        except RuntimeError as cause:
            raise ModelError(
                f"the head {head_dir} has tensors that are served, but not computed here: {cause}"
            ) from cause
        return cls(target, head.eval().requires_grad_(False), taps_of(head_config, target.num_layers))

    @contextmanager
    def behind(self, prefix_ids: Sequence[int]) -> Iterator[Place]:
        """The place behind a beginning of at least two tokens."""
        slots = SequenceSlots(self.target.pool)
        try:
            known = np.array(prefix_ids[:-1], np.int32)
            step = StepRows([Part(slots, len(known))])
            _, tapped = self.target.forward_tapped(known, step.rows, np.array([len(known) - 1], np.int32), self.taps)
            step.keep(0)
            features = np.concatenate([tapped[tap] for tap in self.taps], -1)  # [T - 1, F]
            yield Place(self, slots, list(prefix_ids), torch.from_numpy(features))
        finally:
            slots.release()


class Place:
    """A beginning of T tokens: T - 1 of them read by the target, the last one the root of trees."""

    def __init__(self, laws: Laws, slots: SequenceSlots, prefix_ids: list[int], features: Tensor) -> None:
        self._laws, self._slots = laws, slots
        self._prefix_ids = prefix_ids
        self._features = features

    @torch.no_grad()
    def draft_probs(self, paths: Sequence[Tokens]) -> Floats:
        """The head's law behind paths of equal length D, at temperature 1. Shapes: B paths -> float64 [B, V]."""
        target, head, _ = self._laws
        size, num_steps = len(paths), len(paths[0]) + 1
        ids = torch.tensor([[*self._prefix_ids, *path] for path in paths])
        embedded = target.embedding[ids].float()  # [B, T + D, H]
        # Why the last row again: what the target has not read yet is hidden from the pair that drafts
        unread = self._features[-1:].expand(num_steps, -1)
        features = torch.cat([self._features, unread])[None].expand(size, -1, -1)
        last_pair = torch.full((size, 1), len(self._prefix_ids) - 2)
        state = unroll(head, embedded, features, last_pair, num_steps)[-1, :, 0]
        logits = head.logits(state, lambda states: torch.from_numpy(target.logits_of(states.to(_dtype(target)))))
        return scattered(torch.softmax(logits.double(), -1), head, target.vocab_size)

    def target_probs(self, tree: DraftTree) -> Floats:
        """The target's law at every node of a tree whose root is the last token, at temperature 1. Shape: float64 [N, V]."""
        step = StepRows([Part(self._slots, 1, tree.parents)])
        token_ids = np.array(tree.token_ids, np.int32)
        logits = self._laws.target.forward(token_ids, step.rows, np.arange(len(tree), dtype=np.int32))
        step.drop(0)
        mass = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
        return np.asarray(mass / mass.sum(-1, keepdims=True))


def scattered(draft_probs: Tensor, head: Head, vocab_size: int) -> Floats:
    """From the draft vocabulary to the target's; tokens outside it have no probability. Shapes: [B, Vd] -> [B, V]."""
    offsets: Any = getattr(head, "d2t", None)
    if offsets is None:
        return np.asarray(draft_probs.numpy())
    full = np.zeros((len(draft_probs), vocab_size))
    full[:, np.arange(draft_probs.shape[1]) + offsets.numpy()] = draft_probs.numpy()
    return full


def _dtype(target: Target) -> torch.dtype:
    return target.embedding.dtype

"""Hydra++: the heads read the target's states through one decoder layer, which attends to the states of the text.

    s = norm(layer(states of the text));  then Hydra's heads read s in place of the state

The layer's keys are kept as those of an EAGLE head: under the target's slots, in a window, read when a draft is wanted.

Source: Hydra (Ankner et al. 2024, arXiv 2402.05109).
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.drafting.cost_model import CostTable
from ragspec.drafting.drafter import SequenceView
from ragspec.drafting.eagle.drafter import HeadDraft, PairDrafter
from ragspec.drafting.growing.batch import DraftBatch, ScheduledDraft
from ragspec.drafting.growing.draft import DraftSettings
from ragspec.drafting.growing.drafter import Levels
from ragspec.drafting.growing.shapes import TreeShape
from ragspec.drafting.heads.layer import make_cache, make_layer, make_norm
from ragspec.drafting.heads.target import HeadTarget
from ragspec.drafting.medusa.checkpoint import PositionHeads
from ragspec.drafting.medusa.drafter import levels_of
from ragspec.drafting.medusa.hydra import prefix_attention
from ragspec.drafting.medusa.network import PositionNetwork
from ragspec.numerics.attention import AttentionMetadata, Ints
from ragspec.numerics.kv_cache import KvPool
from ragspec.numerics.layers import RotaryTable


class PrefixNetwork(PositionNetwork):
    """Heads with a prefix layer. Raises: ModelError for rotary positions that depend on the length of the text."""

    def __init__(
        self, heads: PositionHeads, target: HeadTarget, max_positions: int, dtype: torch.dtype | None = None
    ) -> None:
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # Why here: two seconds of imports

        super().__init__(heads, target, dtype)
        self.draft_ids: NDArray[np.int64] = np.arange(target.vocab_size)
        config, section = target.text_config, "prefix."
        weights = {
            name.removeprefix(section): tensor.to(self.backend.device, self._dtype)
            for name, tensor in heads.tensors.items()
            if name.startswith(section)
        }
        rotations = RotaryTable(LlamaRotaryEmbedding(config), max_positions, torch.zeros(1)).rotations
        self._layer = make_layer(weights, prefix_attention(target), config.rms_norm_eps, rotations, self.backend)
        self._input_norm = make_norm(self.backend, weights["input_layernorm.weight"], config.rms_norm_eps)
        self._norm = make_norm(self.backend, weights["norm.weight"], config.rms_norm_eps)

    def make_cache(self, pool: KvPool, num_own_slots: int = 0) -> KvPool:
        return make_cache([self._layer], self.backend, pool, num_own_slots)

    def first(self, token_ids: Ints, features: Tensor, cache: KvPool, metadata: AttentionMetadata) -> Tensor:
        """The states that heads read; the tokens are not read. Shapes: float32 [N, H] -> [N, H]."""
        num_rows = len(features)
        with torch.inference_mode():
            if num_rows < self.backend.least_rows:
                features = features.repeat(2, 1)
            x = self._input_norm(features)
            hidden: Tensor = self._norm(self._layer(features, x, self.backend.context(cache, metadata)))
            return hidden[:num_rows]


class PrefixHydraDrafter(PairDrafter[PrefixNetwork]):
    """See the module."""

    name = "hydra"

    def __init__(self, network: PrefixNetwork, shape: TreeShape, costs: CostTable, **options: Any) -> None:
        super().__init__(network, shape, costs, **options)
        self.nodes_share_rows = not network.is_grounded

    def _draft(self, sequence: SequenceView, settings: DraftSettings, num_levels: int) -> HeadDraft | None:
        return super()._draft(sequence, settings, min(num_levels, self.network.num_heads))

    def _levels(self, drafts: list[HeadDraft]) -> Levels:
        assert self._slots is not None
        parts = [draft.scheduled() for draft in drafts]
        states = self._read(drafts, DraftBatch(parts), self._slots.cache)
        yield from levels_of(self.network, states, drafts)


class PrefixTimer:
    """Times the prefix layer and one head over a context of zeros. Keys that it writes are never read."""

    def __init__(self, network: PrefixNetwork, pool: KvPool) -> None:
        self.network, self._cache = network, network.make_cache(pool)

    def seconds(self, num_rows: int, context: int) -> float:
        """Seconds of one forward of so many rows."""
        network, slots = self.network, np.arange(context + num_rows, dtype=np.int32)
        rows = DraftBatch([ScheduledDraft(slots, num_rows, len(slots), slots[:0])]).chains()
        states, ids = torch.zeros(num_rows, network.width, device=network.backend.device), np.zeros(num_rows, np.int32)
        begin = time.perf_counter()
        network.logits(network.inputs(network.first(ids, states, self._cache, rows), ids), 0)
        network.backend.wait()
        return time.perf_counter() - begin

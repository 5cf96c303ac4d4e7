"""The draft model: a small language model with the target's vocabulary drafts a chain or a small tree.

The model is one that ragspec can serve as a target. It reads the text itself, not the target's hidden states, and has a KV pool
of its own. In a tensor-parallel group it runs on rank 0 alone.

    >>> drafter = ModelDrafter(Target.load(config, num_kv_slots), target.vocab_size, shape, costs, PrefixCache(model.pool))

Sources: speculative sampling (Chen et al. 2023, arXiv 2302.01318; Leviathan et al. 2022, arXiv 2211.17192). Children are coupled
with the target's noise (`ragspec.drafting.coupling`).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ragspec.drafting.cost_model import CostTable
from ragspec.drafting.draft_model.memory import ModelCache, ModelDraft, ModelMemory, Prefixes
from ragspec.drafting.drafter import Budget, Features, SequenceView
from ragspec.drafting.growing.attending import AttendingDrafter
from ragspec.drafting.growing.batch import DraftBatch, ScheduledDraft
from ragspec.drafting.growing.draft import DraftSettings, OpenRows
from ragspec.drafting.growing.shapes import TreeShape
from ragspec.drafting.heads.target import FINAL, DraftTarget
from ragspec.errors import ModelError
from ragspec.numerics.attention import AttentionMetadata, Ints
from ragspec.numerics.backend import LogitRows
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.kv_cache import KvPool
from ragspec.tree import Proposal

_MAX_WAITING = 64
"""Unread tokens of one sequence that the first forward of a draft takes; more are read before it, in chunks."""
_CHUNK = 512


class ModelDrafter(AttendingDrafter[ModelDraft]):
    """See the module. `vocab_size`: the target's; either model may have a longer output layer, whose rest means nothing.

    Several draft models have several names; the planner merges their trees (SpecInfer, Miao et al. 2023, arXiv 2305.09781).
    """

    def __init__(
        self,
        model: DraftTarget,
        vocab_size: int,
        shape: TreeShape,
        costs: CostTable,
        prefixes: Prefixes,
        *,
        coupled: bool = True,
        name: str = "draft_model",
    ) -> None:
        self.name = name
        draft_ids = np.arange(min(vocab_size, model.vocab_size))
        super().__init__(draft_ids, vocab_size, shape, costs, coupled=coupled)
        self._model = model
        self._ids_on_device = model.backend.tokens(draft_ids)
        self.cache = ModelCache(model.pool, prefixes)

    def propose(self, sequences: SequenceOf[SequenceView], budget: Budget) -> list[list[Proposal]]:
        self.cache.protect(sequence.key for sequence in sequences)
        return super().propose(sequences, budget)

    def observe(self, sequence: SequenceView, tokens: SequenceOf[int], features: Features) -> None:
        self.cache.settle(sequence)

    def finish(self, sequence: SequenceView) -> None:
        super().finish(sequence)
        self.cache.release(sequence)

    def purge(self, salt: str) -> None:
        self.cache.purge(salt)

    def _ready(self, sequence: SequenceView) -> ModelMemory | None:
        """A sequence's memory, if the text fits into the model's context and pool and a draft can be of use."""
        num_tokens = len(sequence.tokens)
        fits = num_tokens < min(self._model.num_positions, self._model.pool.num_slots)
        if not fits or sequence.most_tokens < 2 or sequence.key in self._failed:
            return None
        memory = self.cache.memory(sequence)
        return memory if num_tokens >= memory.refused_until else None

    def _draft(self, sequence: SequenceView, settings: DraftSettings, num_levels: int) -> ModelDraft | None:
        memory = self._ready(sequence)
        if memory is None:
            return None
        self.cache.begin(memory)
        if not self._prefill(memory):
            return None
        num_levels = min(num_levels, self._model.num_positions - memory.end)
        num_nodes = settings.shape.max_depth * settings.shape.max_width
        if not self.cache.make_room(memory, memory.num_waiting + num_nodes):
            return None
        memory.draft = ModelDraft(sequence, memory, settings, num_levels)
        return memory.draft

    def _prefill(self, memory: ModelMemory) -> bool:
        """Read most of a long text. False: there is no room for it now."""
        while memory.num_waiting > _MAX_WAITING:
            start, count = memory.slots.length, min(_CHUNK, memory.num_waiting - 1)
            if not self.cache.make_room(memory, count):
                return False
            chunk = memory.sequence.tokens[start : start + count]
            part = ScheduledSequence(memory.slots, chunk, wants_logits=False)
            try:
                batch = Batch([part])
                self._model.forward_tapped(batch.token_ids, batch.metadata, batch.logit_rows, ())
            except BaseException:
                part.drop()
                raise
            part.keep()
        self.cache.remember(memory, memory.sequence.num_prompt)  # choices of one request come next
        return True

    def _scheduled(self, drafts: list[ModelDraft]) -> tuple[list[ScheduledDraft], KvPool]:
        return [draft.scheduled() for draft in drafts], self._model.pool

    def _read(self, drafts: list[ModelDraft], rows: DraftBatch, cache: KvPool) -> Tensor:
        token_ids = np.array([token for draft in drafts for token in draft.new_tokens], np.int32)
        states = self._forward(token_ids, rows.chains())
        for draft in drafts:
            draft.is_read = True
        ends = np.cumsum([draft.num_new for draft in drafts]) - 1
        return states[self._model.backend.tokens(ends)]

    def _descend(self, nodes: OpenRows, states: Tensor, metadata: AttentionMetadata, cache: KvPool) -> Tensor:
        return self._forward(nodes.token_ids, metadata)

    def _forward(self, token_ids: Ints | Tensor, metadata: AttentionMetadata) -> Tensor:
        """States after the final norm. Shapes: N tokens -> float32 [N, H]."""
        none = np.empty(0, np.int32)
        return self._model.forward_tapped(token_ids, metadata, none, (FINAL,))[1][FINAL]

    def _logits(self, states: Tensor) -> LogitRows:
        values = self._model.logits_of(states.to(self._model.embedding.dtype))
        return self._model.backend.logits(values[:, : len(self._draft_ids)], self._ids_on_device, self._vocab_size)


def check_vocabulary(path: str, ours: PreTrainedTokenizerBase, targets: PreTrainedTokenizerBase) -> None:
    """Special tokens may differ: models of one family name theirs differently.

    Raises: ModelError that names the first token which the two tokenizers do not share.
    """
    special = {**ours.added_tokens_decoder, **targets.added_tokens_decoder}.keys()
    draft, target = ({i: token for token, i in each.get_vocab().items()} for each in (ours, targets))
    for i in sorted((draft.keys() | target.keys()) - special):
        if draft.get(i) != target.get(i):
            raise ModelError(
                f"the draft model {path} has another vocabulary than the target: "
                f"token {i} is {draft.get(i)!r} there and {target.get(i)!r} in the target"
            )

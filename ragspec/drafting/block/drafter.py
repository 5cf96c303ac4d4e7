"""The drafters of heads that draft a whole block in one forward (P-EAGLE, DFlash, DSpark; PaSS in the target's own).

A draft's forward has a row for each level of the tree; levels below the first cost a choice of children, no forward. With a bias
by the previous token each node has logits of its own, else all nodes of a level share them.

Sources: see `ragspec.drafting.block.network`; drafts grow in `ragspec.drafting.growing`.
"""

from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ragspec.drafting.acceptance import MAX_TENANTS, Guess
from ragspec.drafting.block.network import BlockNetwork
from ragspec.drafting.cost_model import CostTable
from ragspec.drafting.drafter import NODES, Budget, Drafter, Features, SequenceView
from ragspec.drafting.eagle.drafter import MOST_DRAFTS, HeadDraft, PairDrafter
from ragspec.drafting.growing.draft import DraftBatch, NewRows, ScheduledDraft, TreeShape
from ragspec.drafting.growing.drafter import Level, Levels
from ragspec.drafting.lookahead import MOST_DEPTH, LookaheadAcceptance
from ragspec.numerics.attention import Ints
from ragspec.speculation import AcceptanceRule
from ragspec.tenants import TenantStates, tenant_of
from ragspec.tree import Origin, Proposal


class BlockDrafter(PairDrafter[BlockNetwork]):
    """See the module."""

    name = "eagle"

    def __init__(self, network: BlockNetwork, shape: TreeShape, costs: CostTable, **options: Any) -> None:
        super().__init__(network, shape, costs, **options)
        self.nodes_share_rows = not network.block.markov_rank
        self._num_guesses = network.block.num_guesses or shape.max_depth
        self._most_levels = self._num_guesses
        self._num_own = network.block.block_size or self._num_guesses - 1
        self.first_rows = 4 + self._num_own

    @property
    def num_own_slots(self) -> int:
        return self._num_own

    def _grow(self, drafts: list[HeadDraft], budget: Budget) -> None:
        super()._grow(drafts[:MOST_DRAFTS], budget)  # further drafts have no slots for their blocks, and stay empty

    def _level_s(self, num_rows: int, longest: int) -> float:
        return 0.0

    def _refine_costs(self, rows: list[int], longest: int, seconds: float) -> None:
        if rows[0]:
            super()._refine_costs(rows[:1], longest, seconds)

    def _levels(self, drafts: list[HeadDraft]) -> Levels:
        backend, num_levels = self.network.backend, max(draft.max_depth for draft in drafts)
        states, num_rows = self._states(drafts)
        base = self.network.base_logits(states[:, :num_levels].flatten(0, 1)).unflatten(0, (len(drafts), num_levels))
        owners = torch.arange(len(drafts), device=base.device)
        previous = backend.tokens(np.array([draft.sequence.tokens[-1] for draft in drafts], np.int32))
        for level in range(num_levels):
            own = base[:, level].index_select(0, owners)
            nodes = yield Level(self.network.level_logits(own, previous), num_rows)
            owners = owners.index_select(0, backend.tokens(nodes.above))
            previous, num_rows = backend.tokens(nodes.token_ids), 0

    def _states(self, drafts: SequenceOf[HeadDraft]) -> tuple[Tensor, int]:
        """The states of each draft's guesses, and the rows of the forwards. Shape: [B, guesses, H]."""
        assert self._slots is not None
        network, cache, texts = self.network, self._slots.cache, [draft.scheduled() for draft in drafts]
        parts = [_with_block(text, self._slots.scratch(i, self._num_own)) for i, text in enumerate(texts)]
        features, masks = [draft.pairs.features for draft in drafts], [network.block.mask_token_id] * self._num_own
        batch, blocks, token_ids = DraftBatch(parts), [part.new_rows for part in parts], list[int]()
        if network.block.is_causal:  # the text's new pairs are rows of the same forward
            hidden_masks = network.mask_hidden.expand(self._num_own, -1)
            features = [rows for own in features for rows in (own, hidden_masks)]
            token_ids = [token for draft in drafts for token in (*draft.pairs.next_tokens, *masks)]
            blocks = [
                NewRows(*map(np.concatenate, zip(text.new_rows, block, strict=True)))
                for text, block in zip(texts, blocks, strict=True)
            ]
        else:
            token_ids = [token for draft in drafts for token in (draft.sequence.tokens[-1], *masks[1:])]
            network.read(torch.cat(features), cache, batch.chains([text.new_rows for text in texts]))
        metadata = batch.chains(blocks, network.block.is_causal)
        hidden = network.first(np.array(token_ids, np.int32), torch.cat(features), cache, metadata)
        for draft in drafts:
            draft.memory.read(draft.pairs)
        guesses = metadata.row_start[1:, None] - np.arange(self._num_guesses, 0, -1)
        num_rows = sum(part.num_new for part in (*texts, *parts))
        states = hidden.index_select(0, network.backend.tokens(guesses.flatten()))
        return states.unflatten(0, guesses.shape), num_rows


def _with_block(text: ScheduledDraft, slots: Ints) -> ScheduledDraft:
    """The text and a block behind it, whose rows are the new ones."""
    return ScheduledDraft(np.concatenate([text.context, slots]), len(slots), text.end + len(slots), slots[:0])


class LookAheadDrafter(Drafter):
    """Look-ahead embeddings (PaSS). The target guesses further tokens in rows behind its last token.

        step's forward:  root -> draft                 verified as any tree
                         root -> row 1 -> row 2 ...    row j's input is embedding j; it guesses the token j + 1 places ahead

    The rows are nodes with token ids behind the vocabulary, from `first_id` on. No sample can be such a token, so none is ever
    accepted. Guesses that are ahead of the tokens that the step decides are the next step's draft: the target's most probable
    tokens, whatever the temperature. Rows stand in the tree as long as they bring accepted tokens. Requests with penalties or
    another acceptance rule than the default are left out: these read the probabilities of a path's tokens.
    """

    taps = (NODES,)

    def __init__(self, first_id: int, num_rows: int, name: str = "pass") -> None:
        self.name, self._rows = name, range(first_id, first_id + num_rows)
        self._guesses: dict[tuple[str, int], list[int]] = {}
        self._acceptance = TenantStates(MAX_TENANTS, LookaheadAcceptance)

    def propose(self, sequences: SequenceOf[SequenceView], budget: Budget) -> list[list[Proposal]]:
        return [self._draft(sequence, depth) for sequence, depth in zip(sequences, budget.depths, strict=True)]

    def _draft(self, sequence: SequenceView, most: int) -> list[Proposal]:
        request, proposals, prob = sequence.request, list[Proposal](), 1.0
        if request.speculation.rule is not AcceptanceRule.KEYED or request.params.has_penalties:
            return []
        acceptance = self._acceptance.used(tenant_of(request.salt))
        for depth, token in enumerate(self._guesses.get(sequence.key, ())[:most]):
            cell = acceptance.cell(0, min(depth, MOST_DEPTH))
            prob *= acceptance.probability(cell)
            origin = Origin(self.name, feedback=Guess(acceptance, cell))
            proposals.append(Proposal(token, depth - 1, prob, origin))
        return [*proposals, *acceptance.window(self.name, self._rows[:most], len(proposals))]

    def observe(self, sequence: SequenceView, tokens: SequenceOf[int], features: Features) -> None:
        if tokens:
            guesses = [guess for token, _, guess in features[NODES].tolist() if token in self._rows]
            self._acceptance.used(tenant_of(sequence.request.salt)).note_rows(len(guesses))
            self._guesses[sequence.key] = guesses[len(tokens) - 1 :]

    def finish(self, sequence: SequenceView) -> None:
        self._guesses.pop(sequence.key, None)

    def purge(self, salt: str) -> None:
        self._acceptance.purge(salt)

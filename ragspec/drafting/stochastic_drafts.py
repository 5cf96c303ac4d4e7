"""Children drawn at random from the drafter's own distribution, for requests with a published acceptance rule.

These rules need the distribution that a child was drawn from, and no drawn child may be left out because of its token. The
distribution has the request's own warps. Random numbers are keyed, so a repeated request draws the same children.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragspec.core import SamplingParams
from ragspec.drafting.drafter import SequenceView
from ragspec.numerics.backend import LogitRows
from ragspec.speculation import CHAIN_RULES, LOSSY_RULES, AcceptanceRule
from ragspec.tree import Draw
from ragspec.verification.probabilities import KeyedRandom, RandomStream, draw_iid, draw_without_replacement, row_probs
from ragspec.verification.sampling import TokenCounts


class DrawnChildren(NamedTuple):
    """A draw, its distinct tokens in order, and their log-probabilities."""

    draw: Draw
    token_ids: list[int]
    log_probs: list[float]


def draws_children(sequence: SequenceView) -> bool:
    """Whether the request's rule gains from drawn children: all rules but the keyed and the lossy ones."""
    return sequence.request.speculation.rule not in (AcceptanceRule.KEYED, *LOSSY_RULES)


def needs_chain(sequence: SequenceView) -> bool:
    """Whether the request's rule needs drafts without branches."""
    return sequence.request.speculation.rule in CHAIN_RULES


class ChildSampler:
    """Draws children in one step of one sequence, all from one random stream."""

    def __init__(self, sequence: SequenceView, draft_ids: NDArray[np.int64], vocab_size: int) -> None:
        params = sequence.request.params
        self._params: SamplingParams = params
        self._ids, self._vocab_size = draft_ids, vocab_size
        self._iid = sequence.request.speculation.rule is AcceptanceRule.IID
        self._random = KeyedRandom(params.seed or 0, sequence.key[1], sequence.num_output, RandomStream.DRAFT)
        self._counts = None
        if params.has_penalties:
            self._counts = TokenCounts(sequence.request.prompt_ids, sequence.tokens[sequence.num_prompt :])

    def children(self, logits: LogitRows, row: int, count: int) -> DrawnChildren:
        """Shape: float32 [N, Vd]; `row`: of one node."""
        if isinstance(logits, np.ndarray):
            full = np.full((1, self._vocab_size), np.float32(-np.inf))
            full[0, self._ids] = logits[row]
            logits, row = full, 0
        probs = row_probs(logits, row, self._params, self._counts)
        draw = draw_iid if self._iid else draw_without_replacement
        tokens = draw(probs, count, self._random)
        distinct = list(dict.fromkeys(tokens))
        return DrawnChildren(
            Draw(tokens, probs, self._iid), distinct, [float(np.log(probs[token])) for token in distinct]
        )

"""Perplexity of a target on a text: what quantised weights cost.

>>> perplexity(target, target.tokenizer(text)["input_ids"])
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ragspec.engine.target import Target
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.kv_cache import SequenceSlots

_ROWS = 128
"""Of one forward: their logits take 25 MB with a vocabulary of 49,152."""


def perplexity(target: Target, token_ids: Sequence[int], window_tokens: int = 1024) -> float:
    """e to the mean negative log-likelihood of each token after the first of its window, at temperature 1."""
    window = min(window_tokens, target.max_context_tokens, target.pool.num_slots)
    windows = [np.asarray(token_ids[i : i + window], np.int32) for i in range(0, len(token_ids), window)]
    losses = np.concatenate([_losses(target, tokens) for tokens in windows if len(tokens) > 1])
    return math.exp(losses.mean())


def _losses(target: Target, tokens: np.ndarray) -> np.ndarray:
    """Shapes: int32 [T] -> float64 [T - 1]."""
    slots, losses = SequenceSlots(target.pool), []
    for start in range(0, len(tokens) - 1, _ROWS):
        known = tokens[start : min(start + _ROWS, len(tokens) - 1)]
        batch = Batch([ScheduledSequence(slots, known)])
        rows = np.arange(len(known), dtype=np.int32)
        logits = target.forward(batch.token_ids, batch.metadata, rows).astype(np.float64)
        batch.sequences[0].keep()
        top = logits.max(1)
        following = logits[rows, tokens[start + 1 : start + 1 + len(known)]]
        losses.append(top + np.log(np.exp(logits - top[:, None]).sum(1)) - following)
    slots.release()
    return np.concatenate(losses)

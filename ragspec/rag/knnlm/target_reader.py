"""The target's hidden state and probabilities after each token, for KNN-LM. Owns the KV cache of one sequence.

>>> TargetReader(target, SequenceSlots(target.pool), AdaptiveThreads(None)).read(prompt_ids).query
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ragspec.engine.target import FINAL, Target
from ragspec.numerics.batch import Batch, ScheduledSequence
from ragspec.numerics.kv_cache import SequenceSlots
from ragspec.numerics.threads import AdaptiveThreads
from ragspec.numerics.torch.transfer import to_host
from ragspec.retrieval.encoder import FloatArray
from ragspec.retrieval.knnlm.neighbours import Doubles, softmax, unit_rows

_PREFILL_ROWS = 256


class TargetOutput(NamedTuple):
    """After one token: the hidden state as a search query [H], and the target's probabilities [V]."""

    query: FloatArray
    target_probs: Doubles


class TargetReader:
    """The target with the KV cache of one sequence."""

    def __init__(self, target: Target, slots: SequenceSlots, threads: AdaptiveThreads) -> None:
        self._target, self._slots, self._threads = target, slots, threads

    @property
    def length(self) -> int:
        """Tokens in the KV cache."""
        return self._slots.length

    def read(self, tokens: Sequence[int]) -> TargetOutput:
        """Append these tokens; the output after the last."""
        for start in range(0, len(tokens), _PREFILL_ROWS):
            state, logits = self._forward(tokens[start : start + _PREFILL_ROWS])
        return TargetOutput(unit_rows(state)[0], softmax(logits[0]))

    def roll_back(self, length: int) -> None:
        """Keep the first `length` tokens."""
        self._slots.truncate(min(length, self._slots.length))

    def _forward(self, tokens: Sequence[int]) -> tuple[FloatArray, FloatArray]:
        batch = Batch([ScheduledSequence(self._slots, tokens)])
        self._threads.begin(len(tokens))
        begin = time.perf_counter()
        logits, tapped = self._target.forward_tapped(batch.token_ids, batch.metadata, batch.logit_rows, (FINAL,))
        self._threads.end(len(tokens), time.perf_counter() - begin)
        batch.sequences[0].keep()
        return to_host(tapped[FINAL])[batch.logit_rows], np.asarray(logits)

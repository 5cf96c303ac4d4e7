"""A target read token by token: what KNN-LM takes from it at each position. Owns one sequence's keys and values.

>>> TargetReader(target, SequenceSlots(target.pool), ThreadChoice(None)).read(prompt_ids).query
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ragspec.engine.target import Target
from ragspec.numerics.kv_cache import SequenceSlots
from ragspec.numerics.rows import Part, StepRows
from ragspec.numerics.threads import ThreadChoice
from ragspec.retrieval.encoder import FloatArray
from ragspec.retrieval.knnlm.neighbours import Doubles, softmax, unit_rows

_PREFILL_ROWS = 256


class TargetOutput(NamedTuple):
    """What decides one token beside its neighbours: the state as a query [H], and the target's own probabilities [V]."""

    query: FloatArray
    target_probs: Doubles


class TargetReader:
    """The target and one sequence's keys and values."""

    def __init__(self, target: Target, slots: SequenceSlots, threads: ThreadChoice) -> None:
        self._target = target
        self._slots = slots
        self._threads = threads

    @property
    def length(self) -> int:
        """Tokens that have keys and values."""
        return self._slots.length

    def read(self, tokens: Sequence[int]) -> TargetOutput:
        """The position after these tokens, which come next."""
        for start in range(0, len(tokens), _PREFILL_ROWS):
            state, logits = self._forward(tokens[start : start + _PREFILL_ROWS])
        return TargetOutput(unit_rows(state)[0], softmax(logits[0]))

    def roll_back(self, length: int) -> None:
        """Forget what follows the first `length` tokens."""
        self._slots.truncate(min(length, self._slots.length))

    def _forward(self, tokens: Sequence[int]) -> tuple[FloatArray, FloatArray]:
        step = StepRows([Part(self._slots, len(tokens))])
        self._threads.begin()
        begin = time.perf_counter()
        result = self._target.forward_states(
            np.array(tokens, np.int32), step.rows, np.array([len(tokens) - 1], np.int32)
        )
        self._threads.end(len(tokens), time.perf_counter() - begin)
        step.keep(0)
        return result

"""One group of ranks beside one rank: every bit of their logits, every token of their answers, and how long their steps take.

Runs on rank 0, whatever the size of the group; who starts the others is not known here.

    >>> alone = measure_ranks(TargetConfig(), cases, OneRank())
    >>> both = measure_ranks(TargetConfig(), cases, DistributedRanks(address, 0, 2))
    >>> both.bits == alone.bits, both.answers == alone.answers
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from ragspec.config import DraftingConfig, EngineConfig, TargetConfig
from ragspec.engine.engine import Engine
from ragspec.engine.loading import load_engine
from ragspec.engine.target import Floats, Ints, Target
from ragspec.evaluation.cases import Case
from ragspec.evaluation.decoders import EngineDecoder
from ragspec.evaluation.report import Result
from ragspec.numerics.attention import Rows
from ragspec.numerics.kv_cache import SequenceSlots
from ragspec.numerics.ranks import Ranks
from ragspec.numerics.rows import Part, StepRows
from ragspec.numerics.self_test import self_test
from ragspec.numerics.threads import num_processors, set_num_threads

STEP_ROWS = (1, 8, 64)
_CONTEXT = 512
_NUM_STEPS = 9
_NODES = 8
_THREADS = 1
"""Of a rank. One rank alone is timed with all of them, too, and its better time counts."""

Answers = dict[str, list[tuple[int, ...]]]


class Measured(NamedTuple):
    """`bits`: a digest of every logit of `num_rows` rows in prompts, chunks, trees and batches. `answers`: tokens by setting.

    `step_ms`: milliseconds of a forward by its rows; `fingerprint`: the numerics id.
    """

    bits: str
    num_rows: int
    answers: Answers
    step_ms: dict[int, float]
    fingerprint: str


class Recorder:
    """Stands before a target and digests the bits of all logits that it gives."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.pool, self.vocab_size = target.pool, target.vocab_size
        self._digest = hashlib.sha256()
        self.num_rows = 0

    @property
    def bits(self) -> str:
        return self._digest.hexdigest()

    def forward(self, token_ids: Ints, rows: Rows, wanted: Ints) -> Floats:
        logits = self._target.forward(token_ids, rows, wanted)
        self._digest.update(np.ascontiguousarray(logits).tobytes())
        self.num_rows += len(logits)
        return logits


def measure_ranks(config: TargetConfig, cases: Sequence[Case], ranks: Ranks, seed: int = 0) -> Measured:
    """Rank 0's part; the others follow meanwhile, and end with it. Raises: ModelError, RankLost."""
    settings = EngineConfig(max_kv_tokens=4096, max_running=8, num_threads=_THREADS, adaptive_threads=False)
    with load_engine(config, settings, DraftingConfig(fixed_nodes=_NODES), ranks=ranks) as engine:
        target, recorder = engine.target, Recorder(engine.target)
        steps: dict[int, float] = {}

        def compute() -> None:  # Why in the engine's thread: the ranks follow what that says
            self_test(recorder, target.max_context_tokens, config.dtype, _THREADS)
            for num_threads in (num_processors(), _THREADS) if ranks.size == 1 else (_THREADS,):
                set_num_threads(num_threads)
                for num_rows in STEP_ROWS:
                    steps[num_rows] = min(_step_ms(target, num_rows), steps.get(num_rows, math.inf))

        engine.between_steps(compute)
        return Measured(recorder.bits, recorder.num_rows, _answers(engine, cases, seed), steps, engine.fingerprint)


def compared(alone: Measured, group: Measured) -> Result:
    """What a group has equal to one rank: all bits or not, and of the answers how many."""
    pairs = [
        (a, b)
        for setting, tokens in alone.answers.items()
        for a, b in zip(tokens, group.answers.get(setting, []), strict=True)
    ]
    return {
        "bitwise": (alone.bits, alone.num_rows) == (group.bits, group.num_rows),
        "num_rows": group.num_rows,
        "same_numerics_id": alone.fingerprint == group.fingerprint,
        "num_identical": sum(a == b for a, b in pairs),
        "num_compared": len(pairs),
        "step_ms": {str(rows): ms for rows, ms in group.step_ms.items()},
        "step_over_one_rank": {str(rows): ms / alone.step_ms[rows] for rows, ms in group.step_ms.items()},
    }


def _answers(engine: Engine, cases: Sequence[Case], seed: int) -> Answers:
    answers: Answers = {}
    for temperature in (0.0, 1.0):
        for speculation in (False, True):
            decoder = EngineDecoder(engine, speculation=speculation, seed=seed, temperature=temperature)
            runs = decoder.together(cases).runs
            answers[f"T={temperature:g}, speculation {'on' if speculation else 'off'}"] = [r.token_ids for r in runs]
    return answers


def _step_ms(target: Target, num_rows: int) -> float:
    context = min(_CONTEXT, target.max_context_tokens - num_rows)
    slots = SequenceSlots(target.pool)
    slots.keep(*slots.reserve(context), list(range(context)))
    token_ids = np.arange(num_rows, dtype=np.int32) % target.vocab_size
    times = []
    for _ in range(_NUM_STEPS):
        step = StepRows([Part(slots, num_rows)])
        begin = time.perf_counter()
        target.forward(token_ids, step.rows, np.arange(num_rows, dtype=np.int32))
        times.append(time.perf_counter() - begin)
        step.drop(0)
    slots.release()
    return 1e3 * median(times)

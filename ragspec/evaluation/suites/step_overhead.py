"""Step overhead: the share of an engine's step outside the forward (planning, sampling, committing, reporting).

Weights are random, so answers are given; every token is sampled and then overruled. Only steps count in which every
row decides: steps that read prompts have longer forwards and would lower the share.

    >>> StepOverhead(TimedTarget.load(config, KV_SLOTS), cases, texts).measure(batch=8, num_cases=24, tick=tick)[0]["overhead"]
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from statistics import median
from typing import Any, NamedTuple

from torch import Tensor

from ragspec.config import EngineConfig
from ragspec.engine.engine import Engine
from ragspec.engine.loading import measure_costs
from ragspec.engine.target import Ints, Target
from ragspec.evaluation.cases import Case
from ragspec.evaluation.overrides import OverruledAnswers, answer_ids
from ragspec.evaluation.report import Result
from ragspec.evaluation.suite import engine_over
from ragspec.evaluation.timing import EngineDecoder, Tick
from ragspec.numerics.attention import AttentionMetadata
from ragspec.numerics.backend import LogitRows
from ragspec.numerics.threads import num_processors, run_in_thread

KV_SLOTS = 16_384
_MAX_STEP_TOKENS = 512
_WAYS = (("plain", False), ("copy", True))
_TEMPERATURES = (0.0, 1.0)
_SHARES = ("overhead", "mean_overhead", "outside_ms", "step_ms", "forward_ms", "rows")


class Step(NamedTuple):
    """One step of the engine. Units: seconds. `decides`: the forward returned logits for every row."""

    begin_s: float
    forward_s: float
    num_rows: int
    num_sequences: int
    decides: bool


class TimedTarget(Target):
    """Records the time of its forwards. `latest`: the step of the last forward, without what only the engine knows."""

    latest = Step(0.0, 0.0, 0, 0, False)

    def forward_tapped(
        self, token_ids: Ints | Tensor, metadata: AttentionMetadata, logit_rows: Ints, taps: Sequence[int]
    ) -> tuple[LogitRows, dict[int, Tensor]]:
        begin = time.perf_counter()
        computed = super().forward_tapped(token_ids, metadata, logit_rows, taps)
        seconds = time.perf_counter() - begin
        self.latest = Step(begin, seconds, len(token_ids), 0, len(logit_rows) == len(token_ids))
        return computed


class TimedEngine(Engine):
    """Records its steps. Time between two steps (commands from outside) belongs to the first step."""

    target: TimedTarget

    def __init__(self, *parts: Any) -> None:
        self.steps: list[Step] = []
        super().__init__(*parts)

    def step(self) -> None:
        begin = time.perf_counter()
        super().step()
        self.steps.append(self.target.latest._replace(begin_s=begin, num_sequences=len(self._in_step)))


class StepOverhead:
    """`texts`: by case id, the given answer, which quotes the case's copy sources."""

    def __init__(self, target: TimedTarget, cases: Sequence[Case], texts: Mapping[str, str], seed: int = 0) -> None:
        """Raises: InputError for an empty answer."""
        self._target = target
        self.costs = run_in_thread(lambda: measure_costs(self._target, _MAX_STEP_TOKENS), num_processors())
        self._cases, self._seed = cases, seed
        self._answers = OverruledAnswers()
        for case in cases:
            self._answers.force(case.id, answer_ids(self._target.tokenizer, texts[case.id], self._target.eos_ids))

    def measure(self, batch: int, num_cases: int, tick: Tick) -> list[Result]:
        """One row for each way of decoding and temperature: the first cases, `batch` of them side by side."""
        rows: list[Result] = []
        cases = self._cases[:num_cases]
        config = EngineConfig(
            max_kv_tokens=KV_SLOTS, max_step_tokens=_MAX_STEP_TOKENS, max_running=batch, adaptive_threads=False
        )
        settings = list(itertools.product(_WAYS, _TEMPERATURES))
        for number, ((name, speculation), temperature) in enumerate(settings, 1):
            with engine_over(TimedEngine, self._target, config, deepcopy(self.costs), self._answers) as engine:
                decoder = EngineDecoder(engine, speculation=speculation, seed=self._seed, temperature=temperature)
                decoder.together(cases[:batch])  # Why: kernels compile, prior acceptance rates settle
                engine.steps.clear()
                runs = decoder.together(cases).runs
            length = sum(len(run.token_ids) for run in runs) / sum(run.num_steps for run in runs)
            way = {"way": name, "temperature": temperature, "batch": batch, "acceptance_length": length}
            size = {"num_parameters": self._target.num_parameters}
            rows.append(way | overhead_of(engine.steps, batch) | size)
            tick(f"step overhead, {batch} side by side", number, len(settings))
        return rows


def overhead_of(steps: Sequence[Step], batch: int) -> Result:
    """Medians over steps of `batch` sequences in which every row decides; a step lasts until the next step begins.

    `overhead`: share of a step outside its forward. `mean_overhead`: the same over the sum of all steps.
    """
    pairs = [
        (step, after.begin_s - step.begin_s)
        for step, after in itertools.pairwise(steps)
        if step.decides and after.decides and step.num_sequences == after.num_sequences == batch
    ]
    if not pairs:
        return {"num_steps": 0, **dict.fromkeys(_SHARES)}
    forward_s, whole_s = sum(step.forward_s for step, _ in pairs), sum(seconds for _, seconds in pairs)
    return {
        "num_steps": len(pairs),
        "overhead": median(1.0 - step.forward_s / seconds for step, seconds in pairs),
        "mean_overhead": 1.0 - forward_s / whole_s,
        "outside_ms": 1e3 * median(seconds - step.forward_s for step, seconds in pairs),
        "step_ms": 1e3 * median(seconds for _, seconds in pairs),
        "forward_ms": 1e3 * median(step.forward_s for step, _ in pairs),
        "rows": median(step.num_rows for step, _ in pairs),
    }


def largest_overhead(rows: Sequence[Result], batch: int) -> float | None:
    """The largest overhead of any way at this batch size; None if a way had no steps."""
    shares = [row["overhead"] for row in rows if row["batch"] == batch]
    return None if None in shares or not shares else max(shares)

"""Variants of retrieval within an answer, and the stopwatch that times them.

The variants are RaLMSpec's: P prefetches, S chooses the stride, A verifies beside decoding. Like the product, all
variants speculate only if they predict a gain of 3 %; otherwise they retrieve like the baseline.

    >>> timed = Stopwatch(engine, questions, seed=0, tick=tick).time(index, Workload(TABLE, 10, 3), "exact dense")
    >>> timed.takes["+PSA"][0][2].seconds     # first question, third run

Source: Zhang et al. 2024 (arXiv 2401.14021), table 1.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import cycle, islice
from statistics import median
from typing import NamedTuple

import numpy as np

from ragspec.config import SpeculationConfig, StrideConfig
from ragspec.core import Completion, Delta, Request, SamplingParams
from ragspec.engine.engine import Engine
from ragspec.evaluation.timing import Tick, take_turns
from ragspec.rag.answer import Answer
from ragspec.rag.iterative.pipeline import IterativePipeline
from ragspec.rag.iterative.policies import InContextRalm, Policy
from ragspec.rag.prompt import PromptBuilder
from ragspec.retrieval.search.index_types import IndexLike, Query
from ragspec.retrieval.speculative.stride_costs import StrideTiming

BASELINE, PSA = "baseline", "+PSA"
TABLE = "In-Context RALM, T=0"

_RALM = InContextRalm()
_FIXED = StrideConfig(stride=3)
VARIANTS: dict[str, SpeculationConfig] = {
    BASELINE: SpeculationConfig(enabled=False),
    "stride 3": SpeculationConfig(asynchronous=False, prefetch_k=1, stride=_FIXED),
    "+P": SpeculationConfig(asynchronous=False, stride=_FIXED),
    "+S": SpeculationConfig(asynchronous=False, prefetch_k=1),
    "+A": SpeculationConfig(prefetch_k=1, stride=_FIXED),
    PSA: SpeculationConfig(),
}

_WARM_UP_TOKENS = 32
_LOOKUP_SIZES = (1, 2, 4, 8, 16, 32)
_LOOKUP_REPEATS = 5
_LONG_LOOKUP_S = 0.1


@dataclass(frozen=True, slots=True)
class Workload:
    """Questions to an index and the variants that answer them; `num_in_flight` questions start together.

    `has_optimum`: OS3's formula applies, because every step retrieves and one question runs at a time.
    """

    name: str
    num_questions: int
    num_runs: int
    variants: tuple[str, ...] = tuple(VARIANTS)
    policy: Policy = _RALM
    temperature: float = 0.0
    max_tokens: int = 96
    num_in_flight: int = 1

    @property
    def has_optimum(self) -> bool:
        return isinstance(self.policy, InContextRalm) and self.num_in_flight == 1

    def units(self, questions: Sequence[str]) -> list[tuple[str, ...]]:
        """Groups of questions that start together. Every group is full, because smaller groups wait less."""
        whole = range(self.num_questions // self.num_in_flight)
        return [tuple(questions[i * self.num_in_flight : (i + 1) * self.num_in_flight]) for i in whole]


class TimedUnit(NamedTuple):
    """One unit asked once; `seconds` until the last answer, wall clock."""

    seconds: float
    answers: list[Answer]


Ask = Callable[[Sequence[str]], TimedUnit]
UnitTimes = dict[str, list[list[TimedUnit]]]
"""`takes[variant][unit][run]`."""


@dataclass(frozen=True, slots=True)
class WorkloadTimes:
    """The times of a workload. `apart`: a step and a lookup of the baseline, medians; `beside`: the same of
    variants that verify beside decoding."""

    takes: UnitTimes
    apart: StrideTiming
    beside: dict[str, StrideTiming | None]


@dataclass(frozen=True, slots=True)
class SharedEngine:
    """An engine for one pipeline; closing the pipeline leaves the engine open."""

    engine: Engine

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return self.engine.generate(requests)

    def stream(self, request: Request) -> AsyncIterator[Delta]:
        return self.engine.stream(request)

    def close(self) -> None:
        """Does nothing: the engine stays open."""


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Times questions to one engine. The engine's prefix cache is empty before every question; the schedulers keep
    their estimates."""

    engine: Engine
    questions: Sequence[str]
    seed: int
    tick: Tick

    def time(self, index: IndexLike, workload: Workload, stage: str) -> WorkloadTimes:
        """All variants in turns, after one untimed question, the last of the list."""
        units = workload.units(self.questions)
        with ExitStack() as opened:
            pipelines = {
                name: opened.enter_context(self._pipeline(index, workload, name)) for name in workload.variants
            }
            short = replace(workload, max_tokens=min(_WARM_UP_TOKENS, workload.max_tokens))
            for pipeline in pipelines.values():
                self._ask(pipeline, short)(self.questions[-1:])
            asks = {name: self._ask(pipeline, workload) for name, pipeline in pipelines.items()}
            self.tick(stage, 0, len(units) * workload.num_runs)
            runs = take_turns(asks, units, workload.num_runs, self.tick, stage)
            takes = {name: [list(of_unit) for of_unit in zip(*table, strict=True)] for name, table in runs.items()}
            costs = {name: pipeline.scheduler.costs() for name, pipeline in pipelines.items()}
        baseline = costs[BASELINE]
        assert baseline is not None
        apart = StrideTiming(baseline.apart.step_s, self._by_size_s(index, baseline.apart.verification_s(1)))
        return WorkloadTimes(takes, apart, {name: known.beside if known else None for name, known in costs.items()})

    def lookup_s(self, index: IndexLike) -> float:
        """Seconds of a lookup of one query, median, apart from decoding."""
        queries = index.encode(self.questions)
        return median(_seconds(index, [query]) for _ in range(_LOOKUP_REPEATS) for query in queries)

    def _by_size_s(self, index: IndexLike, one_s: float) -> Callable[[int], float]:
        """Seconds of a lookup by its number of queries: `one_s` for one query, plus measured differences,
        interpolated."""
        pinned = index.pinned()
        queries = pinned.encode(list(islice(cycle(self.questions), max(_LOOKUP_SIZES))))
        repeats = _LOOKUP_REPEATS if one_s < _LONG_LOOKUP_S else 1
        seconds = [median(_seconds(pinned, queries[:size]) for _ in range(repeats)) for size in _LOOKUP_SIZES]
        return lambda size: one_s + max(0.0, float(np.interp(size, _LOOKUP_SIZES, seconds)) - seconds[0])

    def _pipeline(self, index: IndexLike, workload: Workload, name: str) -> IterativePipeline:
        tokenizer, context_tokens = self.engine.target.tokenizer, self.engine.max_context_tokens
        prompts = PromptBuilder(tokenizer, context_tokens)
        return IterativePipeline(
            index, SharedEngine(self.engine), prompts, policy=workload.policy, speculation=VARIANTS[name]
        )

    def _ask(self, pipeline: IterativePipeline, workload: Workload) -> Ask:
        params = SamplingParams(workload.temperature, max_tokens=workload.max_tokens, seed=self.seed)

        def ask(questions: Sequence[str]) -> TimedUnit:
            self.engine.purge("")  # Why: or the first variant would compute prompts for the others
            begin = time.perf_counter()
            answers = pipeline.ask_many(questions, params)
            return TimedUnit(time.perf_counter() - begin, answers)

        return ask


def _seconds(index: IndexLike, queries: Sequence[Query]) -> float:
    begin = time.perf_counter()
    index.search(queries, 1)
    return time.perf_counter() - begin

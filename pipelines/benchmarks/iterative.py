"""The suite `iterative`: answers that retrieve every few tokens, with retrievals speculated by RaLMSpec's variants.

The variants are the paper's: P prefetches, S chooses the stride, A verifies beside decoding; +PSA is the product. A variant
speculates only where it predicts a gain of 3 %, else it retrieves like the baseline. Rows are local indexes and slow indexes:
exact dense search in an actor, plus a constant service time a call, so that a lookup (b) costs so many steps of decoding (a).
Needs a running Ray.

Source: Zhang et al. 2024 (arXiv 2401.14021), table 1.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from pipelines.benchmarks.cases.timing import take_turns
from pipelines.benchmarks.harness import Plot, Result, Row, Run, Suite, metrics_of
from ragspec.cluster.actors import ActorPool, wait_for_all
from ragspec.cluster.remote_retrieval.cluster_retriever import ClusterRetriever
from ragspec.cluster.remote_retrieval.shards import ShardActor
from ragspec.config import DraftingConfig, EngineConfig, RetrieverConfig, SpeculationConfig
from ragspec.core import SamplingParams
from ragspec.engine.engine import Engine
from ragspec.engine.loading import load_engine
from ragspec.rag.answer import Answer, IterativeStats
from ragspec.rag.iterative.pipeline import IterativePipeline
from ragspec.rag.iterative.policies import Flare, InContextRalm, IterRetGen, Policy
from ragspec.rag.prompt import PromptBuilder
from ragspec.retrieval.encoder import Encoder, TextEncoder
from ragspec.retrieval.retriever import Retriever
from ragspec.retrieval.search.segment_search import Query, RetrievalMode, SearchResult
from ragspec.retrieval.speculative.stride import GAMMA_MAX, MAX_STRIDE, StrideCosts, StrideTiming, best_plan

BASELINE, PSA, TABLE = "baseline", "+PSA", "In-Context RALM, T=0"
_RALM = InContextRalm()
VARIANTS: dict[str, SpeculationConfig] = {
    BASELINE: SpeculationConfig(enabled=False),
    "stride 3": SpeculationConfig(prefetch_k=1, stride=3),
    "+P": SpeculationConfig(stride=3),
    "+S": SpeculationConfig(prefetch_k=1),
    "+A": SpeculationConfig(prefetch_k=1, stride=3),
    PSA: SpeculationConfig(),
}
_SYNCHRONOUS = frozenset({"stride 3", "+P", "+S"})
"""Variants that do not decode during a verification."""
_MODES: dict[str, RetrievalMode] = {"exact dense": "dense", "BM25": "sparse", "hybrid": "hybrid"}
IN_FLIGHT = 8
_OPEN_TIMEOUT_S = 600.0
"""Also for `slow_down`: a timeout of searches may be shorter than the call takes."""
_WARM_UP_TOKENS = 32
_LOOKUP_SIZES, _LOOKUP_REPEATS, _LONG_LOOKUP_S = (1, 2, 4, 8, 16, 32), 5, 0.1
_SLOW = 10.0


class SlowShardActor(ShardActor):
    """A shard whose calls take `service_s` seconds longer."""

    def __init__(self) -> None:
        super().__init__()
        self._service_s = 0.0

    def slow_down(self, service_s: float) -> None:
        self._service_s = service_s

    def search(self, *arguments: Any) -> Any:
        answer = super().search(*arguments)
        time.sleep(self._service_s)
        return answer

    def look_up(self, *arguments: Any) -> list[SearchResult]:
        lookup = super().look_up(*arguments)
        time.sleep(self._service_s)
        return lookup


@contextlib.contextmanager
def slow_index(folder: Path, encoder: TextEncoder) -> Iterator[tuple[Retriever, Callable[[float], None]]]:
    """Exact dense search on one shard. Calling the second value with `service_s` makes every call so many seconds longer.

    Raises: ConfigError, StoreError or RetrievalError.
    """
    config = RetrieverConfig(index_dir=str(folder), mode="dense")
    with ActorPool(SlowShardActor, prefix="shard") as actors:
        (shard,) = actors.replicas

        def slow_down(service_s: float) -> None:
            wait_for_all([shard.actor.slow_down.remote(service_s)], _OPEN_TIMEOUT_S, "the index")

        with contextlib.closing(ClusterRetriever(config, encoder, [shard], late_s=15.0)) as index:
            yield index, slow_down


@dataclass(frozen=True, slots=True)
class Workload:
    """Questions to an index, and the variants that answer them. `num_in_flight` questions start together."""

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
        """OS3's formula applies: every step retrieves, and one question runs at a time."""
        return isinstance(self.policy, InContextRalm) and self.num_in_flight == 1

    def units(self, questions: Sequence[str]) -> list[tuple[str, ...]]:
        """Groups of questions that start together. Every group is full, because smaller groups wait less."""
        size = self.num_in_flight
        return [tuple(questions[i * size : (i + 1) * size]) for i in range(self.num_questions // size)]


class TimedUnit(NamedTuple):
    """One unit asked once. `seconds`: until the last answer, wall clock."""

    seconds: float
    answers: list[Answer]


Takes = Sequence[Sequence[TimedUnit]]
"""`takes[unit][run]`."""


class WorkloadTimes(NamedTuple):
    """`apart`: a step and a lookup of the baseline, medians."""

    takes: dict[str, Takes]
    apart: StrideTiming


@dataclass(frozen=True)
class Stopwatch:
    """Times questions to one engine, whose prefix cache is empty before every question."""

    run: Run
    engine: Engine
    questions: Sequence[str]

    def time(self, index: Retriever, workload: Workload, stage: str) -> WorkloadTimes:
        """All variants in turns, after one untimed question, the last of the list."""
        with contextlib.ExitStack() as opened:
            pipelines = {
                name: opened.enter_context(self._pipeline(index, workload, name)) for name in workload.variants
            }
            short = replace(workload, max_tokens=min(_WARM_UP_TOKENS, workload.max_tokens))
            for pipeline in pipelines.values():
                self._ask(pipeline, short)(self.questions[-1:])
            asks = {name: self._ask(pipeline, workload) for name, pipeline in pipelines.items()}
            runs = take_turns(asks, workload.units(self.questions), workload.num_runs, self.run.tick, stage)
            costs = pipelines[BASELINE].scheduler.costs()
        assert costs is not None
        apart = StrideTiming(costs.apart.step_s, self._by_size_s(index, costs.apart.verification_s(1)))
        return WorkloadTimes({name: list(zip(*table, strict=True)) for name, table in runs.items()}, apart)

    def lookup_s(self, index: Retriever) -> float:
        """Seconds of a lookup of one query, median, apart from decoding."""
        queries = index.encode(self.questions)
        return median(_search_s(index, [query]) for _ in range(_LOOKUP_REPEATS) for query in queries)

    def _by_size_s(self, index: Retriever, one_s: float) -> Callable[[int], float]:
        """Seconds of a lookup by its number of queries: `one_s` plus measured differences, interpolated."""
        pinned = index.pinned()
        queries = pinned.encode(list(islice(cycle(self.questions), max(_LOOKUP_SIZES))))
        repeats = _LOOKUP_REPEATS if one_s < _LONG_LOOKUP_S else 1
        seconds = [median(_search_s(pinned, queries[:size]) for _ in range(repeats)) for size in _LOOKUP_SIZES]
        return lambda size: one_s + max(0.0, float(np.interp(size, _LOOKUP_SIZES, seconds)) - seconds[0])

    def _pipeline(self, index: Retriever, workload: Workload, name: str) -> IterativePipeline:
        engine = self.engine
        prompts = PromptBuilder(engine.target.tokenizer, engine.max_context_tokens)
        shared: Any = SimpleNamespace(generate=engine.generate, stream=engine.stream, purge=engine.purge)
        shared.close = lambda: None  # Several pipelines use the engine, so closing one of them leaves it open
        return IterativePipeline(
            index,
            shared,
            prompts,
            policy=workload.policy,
            speculation=VARIANTS[name],
            asynchronous=name not in _SYNCHRONOUS,
        )

    def _ask(self, pipeline: IterativePipeline, workload: Workload) -> Callable[[Sequence[str]], TimedUnit]:
        params = SamplingParams(workload.temperature, max_tokens=workload.max_tokens, seed=self.run.seed)

        def ask(questions: Sequence[str]) -> TimedUnit:
            self.engine.purge("")  # Why: or the first variant would compute prompts for the others
            begin = time.perf_counter()
            answers = pipeline.ask_many(questions, params)
            return TimedUnit(time.perf_counter() - begin, answers)

        return ask


def _search_s(index: Retriever, queries: Sequence[Query]) -> float:
    begin = time.perf_counter()
    index.search(queries, 1)
    return time.perf_counter() - begin


def workloads_of(run: Run, b_over_a: float | None) -> Iterator[Workload]:
    """The workload of all variants; at some b/a also other policies, T = 1 and several questions in flight, by +PSA alone."""
    quick, is_slow = run.quick, b_over_a is not None and b_over_a >= _SLOW
    num_questions = run.count(4 if is_slow else 10, 1)
    num_runs = min(run.num_runs, 2) if is_slow else run.num_runs
    variants = (BASELINE, PSA) if quick else tuple(VARIANTS)
    table = Workload(TABLE, num_questions, num_runs, variants, max_tokens=32 if quick else 96)
    yield table
    pair = replace(table, variants=(BASELINE, PSA), num_questions=run.count(4, 1))
    if b_over_a == _SLOW:
        yield replace(pair, name="In-Context RALM, T=1", temperature=1.0)
        yield replace(pair, name="FLARE, T=0", policy=Flare())
        yield replace(pair, name="Iter-RetGen, T=0", policy=IterRetGen())
        name = f"In-Context RALM, T=0, {IN_FLIGHT} in flight"
        yield replace(pair, name=name, num_questions=IN_FLIGHT, num_in_flight=IN_FLIGHT)


def run_iterative(run: Run) -> Iterator[Row]:
    """Raises: InputError, ModelError, SaveError, RetrievalError, EngineError."""
    listed = run.questions(1 + max(IN_FLIGHT, run.count(10, 1)))
    encoder = Encoder.load(run.encoder)
    store = run.store(listed.documents, encoder)
    config = EngineConfig(max_num_seqs=IN_FLIGHT)
    with load_engine(run.target, config, DraftingConfig(), adaptive_threads=False) as engine:
        stopwatch = Stopwatch(run, engine, [question.text for question in listed.questions])
        rows: list[Row] = []
        for label, mode in _MODES.items():
            retriever = Retriever(encoder, store, RetrieverConfig(mode=mode), follow=False)
            rows += timed_rows(stopwatch, label, None, retriever)
        yield from rows
        step_s = 1e-3 * rows[0]["a_ms"]
        with slow_index(store.index_dir, encoder) as (index, slow_down):
            own_s = stopwatch.lookup_s(index)
            for b_over_a in (1.0, _SLOW, 40.0) if run.quick else (0.3, 1.0, _SLOW, 40.0):
                slow_down(max(0.0, b_over_a * step_s - own_s))
                yield from timed_rows(stopwatch, f"elsewhere, b/a = {b_over_a:g}", b_over_a, index)


def timed_rows(stopwatch: Stopwatch, label: str, b_over_a: float | None, index: Retriever) -> Iterator[Row]:
    """A row for each workload and variant. All variants of a workload are timed in turns, once one of their rows is missing."""
    for workload in workloads_of(stopwatch.run, b_over_a):
        timed = functools.cache(functools.partial(stopwatch.time, index, workload, f"{label}: {workload.name}"))
        for variant in workload.variants:
            if variant != BASELINE:
                measure = functools.partial(_row, label, b_over_a, workload, variant, timed)
                yield stopwatch.run.row(f"{label}: {workload.name}, {variant}", measure)


def _row(
    label: str, b_over_a: float | None, workload: Workload, variant: str, timed: Callable[[], WorkloadTimes]
) -> Row:
    takes, apart = timed()
    baseline, own = takes[BASELINE], takes[variant]
    same = same_answers(baseline, own)
    right, wrong = _total(own, "num_right"), _total(own, "num_wrong")
    strides = [stride for stats in _stats(own) for stride in stats.strides]
    row: Row = {
        "retriever": label,
        "workload": workload.name,
        "variant": variant,
        "stated_b_over_a": b_over_a,
        "a_ms": 1e3 * apart.step_s,
        "b_over_a": apart.verification_s(1) / apart.step_s,
        "speedup": sum(_seconds(baseline)) / sum(_seconds(own)),
        "gamma": right / (right + wrong) if right + wrong else None,
        "mean_stride": mean(strides) if strides else None,
        "num_kept_tokens": _total(own, "num_kept_tokens"),
        "num_lost_tokens": _total(own, "num_lost_tokens"),
        "num_identical": sum(same),
        "num_compared": len(same),
    }
    if not workload.has_optimum:
        return row | {"optimum": None, "share_of_optimum": None}
    # The scheduler's estimate of gamma, which is never 1; without a guess the prediction for right guesses
    gamma = (right + 0.5) / (right + wrong + 1.0) if right + wrong else GAMMA_MAX
    gain = optimum(apart, gamma, b_over_a is not None and variant not in _SYNCHRONOUS)
    return row | {"optimum": gain, "share_of_optimum": row["speedup"] / gain}


def optimum(timing: StrideTiming, gamma: float, asynchronous: bool) -> float:
    """OS3's predicted gain of its best stride, 1 at least. `asynchronous`: verifications may run beside decoding."""
    costs = StrideCosts(timing, gamma)
    apart = best_plan(costs, MAX_STRIDE, lambda _: 0).gain
    return max(1.0, apart, best_plan(costs, MAX_STRIDE, lambda _: 1).gain if asynchronous else apart)


def same_answers(baseline: Takes, own: Takes) -> list[bool]:
    """For every answer of every run, whether tokens and text are those of the baseline's first run."""
    return [
        (one.token_ids, one.text) == (other.token_ids, other.text)
        for expected, runs in zip(baseline, own, strict=True)
        for take in runs
        for one, other in zip(expected[0].answers, take.answers, strict=True)
    ]


def _seconds(takes: Takes) -> list[float]:
    """The median seconds of each unit's runs."""
    return [median(take.seconds for take in runs) for runs in takes]


def _stats(takes: Takes) -> Iterator[IterativeStats]:
    for runs in takes:
        for take in runs:
            for answer in take.answers:
                assert answer.stats.iterative is not None
                yield answer.stats.iterative


def _total(takes: Takes, name: str) -> float:
    """One counter, summed over all answers."""
    return sum(float(getattr(stats, name)) for stats in _stats(takes))


def summarise(rows: Sequence[Row]) -> Result:
    table = [row for row in rows if row["variant"] == PSA and row["workload"] == TABLE]
    lost = sum(row["num_lost_tokens"] for row in rows)

    def least(key: str, b_over_a: float | None = None) -> float | None:
        chosen = [row[key] for row in table if b_over_a is None or row["stated_b_over_a"] == b_over_a]
        return min((value for value in chosen if value is not None), default=None)

    return {
        "share_of_optimum_min": least("share_of_optimum"),
        "speedup_b_over_a_40": least("speedup", 40.0),
        "speedup_b_over_a_1": least("speedup", 1.0),
        "slowdown_worst": min(row["speedup"] for row in rows),
        "kept_after_mismatch": sum(row["num_kept_tokens"] for row in rows) / lost if lost else None,
        "identical": sum(row["num_identical"] for row in rows) / sum(row["num_compared"] for row in rows),
        "num_compared": sum(row["num_compared"] for row in rows),
    }


PLOT = Plot(
    "b_over_a",
    {"optimum": "OS3's prediction", "speedup": f"measured, {PSA}"},
    lambda row: (
        row["variant"] == PSA and row["workload"] == TABLE and row["retriever"].startswith(("exact", "elsewhere"))
    ),
    is_curve=True,
)
SUITE = Suite("iterative", run_iterative, summarise, metrics_of("iterative"), PLOT)

"""The suite `cluster`: tensor parallel, step overhead, two replicas and shards, on one machine.

Several devices must change no bit and no token. Needs a running Ray.

    >>> with ray_session("local"):
    ...     run_cluster(settings, tick).result["tp_identical"]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.benchmarks.cluster.scaling import Scaling, sleeping_replicas, usual_successors
from pipelines.benchmarks.cluster.shards import identical_share, segmented_index, sharded
from pipelines.benchmarks.cluster.tensor_parallel import RANDOM, saved_model, tensor_parallel, tp_headlines
from ragspec.config import TargetConfig
from ragspec.drafting.cost_model import CostTable
from ragspec.engine.target import load_tokenizer
from ragspec.evaluation.cases import rag_cases
from ragspec.evaluation.datasets import RagList
from ragspec.evaluation.machine import PeakMemory
from ragspec.evaluation.overrides import gold_answers
from ragspec.evaluation.report import Metric, Result, Table, at_least, equal_to, select, share, transposed, under
from ragspec.evaluation.suite import Outcome, Settings, Suite
from ragspec.evaluation.suites.backends.models import MAX_CONTEXT_TOKENS, SHAPES, random_model
from ragspec.evaluation.suites.step_overhead import KV_SLOTS, StepOverhead, TimedTarget, largest_overhead
from ragspec.evaluation.timing import Tick
from ragspec.rag.prompt import PromptBuilder
from ragspec.retrieval.encoder import Encoder, TextEncoder

NOTES = (
    "ranks: each has one thread and they share this machine's cores; with two cores a group is slower than one rank, what it "
    "gives is room for a target that no one device holds",
    "scaling: only the forward is a sleep; the router, actors, retrieval, prompts, planner, sampling and commits are real",
)
BATCHES = (1, 8)
WEIGHTS: dict[str, dict[str, str]] = {
    "float32": {"quantization": "none", "dtype": "float32"},
    "bfloat16": {"quantization": "none", "dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
}
"""Settings of a target by the type of its weights."""


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Sizes of the parts. `num_alone`: questions where one request runs at a time."""

    num_questions: int = 48
    num_ranks_cases: int = 12
    num_alone: int = 12
    num_documents: int = 800
    num_queries: int = 200
    num_runs: int = 3
    all_targets: bool = True

    @classmethod
    def of(cls, settings: Settings) -> ClusterPlan:
        runs = settings.plan.num_runs
        if not settings.quick:
            return cls(settings.num_prompts or 48, num_runs=runs)
        return cls(settings.num_prompts or 24, 4, 6, 150, 40, runs, all_targets=False)


class ClusterSuite:
    """The four parts, in the order of the tables."""

    def __init__(self, settings: Settings, tick: Tick) -> None:
        """Raises: ModelError, SaveError."""
        self._settings, self._tick = settings, tick
        self._plan = ClusterPlan.of(settings)
        self._encoder: TextEncoder = Encoder.load(settings.encoder)
        count = max(self._plan.num_questions, self._plan.num_queries)
        self._list: RagList = settings.questions(count)
        self._retriever = settings.retriever(self._list, tick)
        self._tokenizer: Any = load_tokenizer(settings.target)
        self._prompts = PromptBuilder(self._tokenizer, MAX_CONTEXT_TOKENS)
        questions = self._list.questions[: self._plan.num_questions]
        self._cases = list(rag_cases(questions, self._retriever, self._prompts))

    def measure(self) -> Result:
        """Raises: what a part raises."""
        memory = PeakMemory()
        seed = self._settings.plan.seed
        tp_rows = tensor_parallel(self._targets(), self._cases[: self._plan.num_ranks_cases], seed, self._tick)
        steps, costs = self._steps()
        scaling = self._scaling(costs)
        shard_rows = self._sharded()
        result = tp_headlines(tp_rows)
        result |= {f"step_overhead_b{batch}": largest_overhead(steps, batch) for batch in BATCHES} | scaling
        result |= {"sharded_identical": identical_share(shard_rows)}
        result |= {"tp_rows": tp_rows, "step_rows": steps, "shard_rows": shard_rows, "notes": list(NOTES)}
        identical = result["tp_identical"] == result["sharded_identical"] == 1.0 and scaling["scaling_identical"]
        result |= {"identical": identical, "bitwise": result["tp_bitwise"], "num_prompts": len(self._cases)}
        return result | {"num_runs": self._plan.num_runs, "label": self._list.label, "peak_pss_mb": memory.look()}

    def _targets(self) -> list[tuple[str, TargetConfig]]:
        """The target and random models with grouped queries, each with both types of weights; fewer with `quick`."""
        own = self._settings.target
        models = {"target": own.model}
        folder = self._settings.cache_dir / "random_models"
        models |= {name: str(saved_model(name, self._tokenizer, folder)) for name in RANDOM}
        pairs = [(name, dtype) for name in models for dtype in WEIGHTS]
        if not self._plan.all_targets:
            pairs = [("target", "float32"), ("random Qwen3", "bfloat16")]
        return [(name, own.model_copy(update={"model": models[name], **WEIGHTS[dtype]})) for name, dtype in pairs]

    def _steps(self) -> tuple[list[Result], CostTable]:
        questions = self._list.questions[: len(self._cases)]
        gold = gold_answers(questions, [case.passages for case in self._cases])
        # Why longer: between short answers nearly every step reads somebody's prompt, and few are left to measure
        texts = {case.id: f"{gold[case.id]} {case.passages[0].text}" for case in self._cases}
        config = TargetConfig(quantization="none")
        model = random_model(SHAPES[0]._replace(vocab=len(self._tokenizer)), config)
        target = TimedTarget(model, self._tokenizer, config, KV_SLOTS)
        bench = StepOverhead(target, self._cases, texts, self._settings.plan.seed)
        rows = bench.measure(1, self._plan.num_alone, self._tick)
        rows += bench.measure(8, len(self._cases), self._tick)
        return rows, bench.costs

    def _scaling(self, costs: CostTable) -> Result:
        successors = usual_successors([case.prompt_ids for case in self._cases])
        with sleeping_replicas(2, self._settings.target, costs, successors) as replicas:
            questions = [question.text for question in self._list.questions[: self._plan.num_questions]]
            return Scaling(replicas, self._retriever, self._prompts, questions).measure(self._plan.num_runs, self._tick)

    def _sharded(self) -> list[Result]:
        documents = self._list.documents[: self._plan.num_documents]
        index_dir: Path = segmented_index(documents, self._encoder, self._settings.cache_dir)
        queries: Sequence[str] = [question.text for question in self._list.questions[: self._plan.num_queries]]
        return sharded(index_dir, self._encoder, queries, self._tick)


def run_cluster(settings: Settings, tick: Tick) -> Outcome:
    """Raises: ConfigError, ModelError, SaveError, EngineError."""
    return Outcome(ClusterSuite(settings, tick).measure())


METRICS = (
    Metric(
        "tp_identical", "answers of 2 and 4 ranks with the tokens of one rank: drafts on and off, T=0, T=1", equal_to(1)
    ),
    Metric(
        "tp_bitwise", "every logit of prompts, chunks, trees and batches has the bits of one rank's", equal_to(True)
    ),
    Metric(
        "step_overhead_b1", "share of a step outside its forward, 0.1 B parameters, one request, worst way", under(0.1)
    ),
    Metric("step_overhead_b8", "the same, eight requests side by side", under(0.15)),
    Metric("replica_scaling_simulated", "speed of two replicas over one, forwards replaced by sleeps", at_least(1.9)),
    Metric("sharded_identical", "queries with the bits of one process: 1, 2, 4 shards, once and twice", equal_to(1)),
)


def cluster_tables(result: Result) -> dict[str, Table]:
    """Ranks, steps and shards; only measured rows."""
    ranks = {f"{r['target']} {r['dtype']}, {r['ranks']} ranks": r for r in result["tp_rows"]}
    steps = {f"{r['way']}, T={r['temperature']:g}, {r['batch']} side by side": r for r in result["step_rows"]}
    shards = {f"{r['shards']} shards x {r['copies']}, {r['mode']}": r for r in result["shard_rows"]}
    step_ms = transposed({name: row["step_ms"] for name, row in ranks.items()})
    tables: dict[str, Table] = {
        "ranks": select(ranks, {"bits equal": "bitwise"})
        | {"answers equal": share(ranks)}
        | {f"{rows} rows, ms": column for rows, column in step_ms.items()},
        "step outside the forward": select(steps, ("overhead", "mean_overhead", "step_ms", "outside_ms", "num_steps")),
        "sharded retrieval": {"answers equal": share(shards)},
    }
    return {title: table for title, table in tables.items() if any(table.values())}


SUITE = Suite("cluster", run_cluster, METRICS, ("notes",), cluster_tables)

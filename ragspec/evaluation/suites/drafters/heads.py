"""The suite `heads`: every trained head of a folder on one target, by the measures of the papers.

    heads/eagle  heads/eagle2  heads/eagle3  heads/hass  heads/poss  heads/medusa  heads/hydra  heads/hydra++     (any of them)

A head's name begins with its family; `eagle` drafts EAGLE-1's static tree, all others a dynamic one. Each head drafts alone:
trees that pay, for speed; trees of 16 nodes whatever they cost, for acceptance; chains, for n-alpha. The head that is fastest on
prose then drafts beside copies, in batches, in trees of several depths and widths, and under the rules that change the text.
With `--quick` chains, shapes and rules are left out, and most tasks and temperatures.

    >>> run_suite("heads", replace(settings, heads=Path("heads")), tick).result["order_held"]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

from ragspec.config import DraftingConfig, EagleConfig, EngineConfig, HydraConfig, TreeHeadConfig
from ragspec.core import Message, Request, SamplingParams
from ragspec.engine.engine import Engine
from ragspec.engine.loading import load_engine
from ragspec.errors import ModelError, PromptTooLong
from ragspec.evaluation.cases import Case
from ragspec.evaluation.datasets import json_rows, squad_list
from ragspec.evaluation.overrides import OverruledAnswers
from ragspec.evaluation.report import Result
from ragspec.evaluation.suite import Outcome, Settings, Suite, open_engine
from ragspec.evaluation.suites.drafters.heads_report import (
    CHAT,
    MERGED,
    METRICS,
    draw,
    fastest,
    merged_over_best,
    orders_of,
    rows_of,
    tables,
)
from ragspec.evaluation.suites.drafters.prefixes import Prefix, cut_prefixes, ratio_with_error, step_lengths
from ragspec.evaluation.suites.drafters.prompts import PROSE, RAG, drafter_cases
from ragspec.evaluation.suites.drafters.runs import Sampling, acceptance_length, alone_rows, together_rows
from ragspec.evaluation.suites.drafters.variants import CHAIN, COPY, NONE, TREE_NODES, Setup
from ragspec.evaluation.timing import Tick
from ragspec.rag.prompt import PromptBuilder
from ragspec.speculation import ON, AcceptanceRule, Speculation

QUESTIONS = {
    CHAT: "mt_bench/question.jsonl",
    "HumanEval": "eagle_eval/humaneval.jsonl",
    "GSM8K": "eagle_eval/gsm8k.jsonl",
    "Alpaca": "eagle_eval/alpaca.jsonl",
    "CNN/DM": "eagle_eval/sum.jsonl",
    "NQ": "eagle_eval/qa.jsonl",
}
TOKENS = 96
_BATCHES, _DEPTHS, _WIDTHS = (1, 2, 4, 8, 16, 32), (1, 2, 4, 6, 8), (1, 2, 4, 8)
_SECTIONS = {"eagle": EagleConfig, "medusa": TreeHeadConfig, "hydra": HydraConfig}


@dataclass(frozen=True, slots=True)
class HeadSetup(Setup):
    """An engine with a head of any family, and perhaps with copies. `sizes`: of the head's trees."""

    family: str = "eagle"
    sizes: tuple[tuple[str, int], ...] = ()

    @property
    def drafting(self) -> DraftingConfig:
        values: dict[str, Any] = {
            "path": str(self.head),
            "tree": self.head_tree,
            "coupled": self.coupled,
            **dict(self.sizes),
        }
        section = _SECTIONS[self.family](**values)
        most = self.fixed_nodes or DraftingConfig().max_tree_nodes
        return DraftingConfig(drafters=self.drafters, max_tree_nodes=most).model_copy(update={self.family: section})


@dataclass(frozen=True, slots=True)
class TrainedHead:
    """A head's folder; its name is the family's, or begins with it."""

    name: str
    path: Path

    @property
    def family(self) -> str:
        """The drafter that reads the files. PosS and HASS are EAGLE heads."""
        found = (family for family in ("medusa", "hydra") if list(self.path.glob(f"{family}_lm_head.*")))
        return next(found, "eagle")

    def setup(self, **fields: Any) -> HeadSetup:
        values: dict[str, Any] = {"variants": {self.name: ON}, "drafters": (self.family,)}
        values["head_tree"] = "static" if self.name == "eagle" else "dynamic"
        return HeadSetup(head=self.path, family=self.family, **(values | fields))


def find_heads(folder: Path | None) -> list[TrainedHead]:
    """Heads below the folder. Raises: ModelError without any."""
    paths = sorted(folder.glob("*/config.json")) if folder is not None else []
    if not paths:
        raise ModelError(f"--heads names a folder with heads, each in a folder of its name; {folder} has none")
    return [TrainedHead(path.parent.name, path.parent) for path in paths]


def question_cases(data_dir: Path, prompts: PromptBuilder, tasks: Iterable[str], count: int) -> dict[str, list[Case]]:
    """The first questions of each list that fit the target, with nothing to copy from. Raises: InputError."""
    return {task: list(islice(_questions(data_dir / QUESTIONS[task], prompts, task), count)) for task in tasks}


def _questions(path: Path, prompts: PromptBuilder, task: str) -> Iterator[Case]:
    for number, (_, row) in enumerate(json_rows(path)):
        try:
            prompt = prompts.build([Message("user", str(row["turns"][0]))], (), TOKENS)
        except PromptTooLong:
            continue
        yield Case(f"{task}-{number}", task, prompt.prompt_ids, (), TOKENS)


class HeadsSuite:
    """Measures one head after the other; one engine is open at a time."""

    def __init__(self, settings: Settings, tick: Tick) -> None:
        self._settings, self._tick, self._quick = settings, tick, settings.quick
        self._heads = find_heads(settings.heads)
        self._count = settings.num_prompts or (2 if settings.quick else 5)
        self._cases: dict[str, list[Case]] = {}

    def measure(self) -> Result:
        """All rows and headlines. Raises: ConfigError without data, InputError, ModelError, EngineError."""
        self._cases, prefixes = self._read()
        rows: list[Result] = []
        ratios: dict[str, float] = {}
        for head in self._heads:
            own, ratios[head.name] = self._alone(head, prefixes)
            rows += own
        best = fastest(rows)
        head = next(head for head in self._heads if head.name == best["variant"])
        merged = self._merged(head)
        rows += [*merged, *self._batches(head), *([] if self._quick else self._shapes(head))]
        longest = max(rows_of(rows, PROSE, 0.0, TREE_NODES), key=lambda row: row["acceptance_length"] or 0.0)
        orders = orders_of(rows)
        return {
            "label": "papers' prompts, held-out articles",
            "num_prompts": self._count,
            "families": [head.name for head in self._heads],
            "orders": orders,
            "order_held": mean(ratio > 1.0 for ratio in orders.values()) if orders else None,
            "best_head": best["variant"],
            "best_speedup_prose": best["speedup"],
            "best_acceptance_prose": longest["acceptance_length"],
            "merged_over_best": (over := merged_over_best(merged, head.name)),
            "merged_over_best_min": min(over.values(), default=None),
            "t1_over_t0": ratios,
            "t1_over_t0_min": min(ratios.values()),
            "lossy_rules": {} if self._quick else self._lossy(head),
            "identical": all(row["identical"] is not False for row in rows),
            "rows": rows,
        }

    def _read(self) -> tuple[dict[str, list[Case]], list[Prefix]]:
        """The prompts by task, and beginnings of the target's own answers."""
        data_dir = self._settings.require_data("mt_bench, eagle_eval, squad, sgd and jfleg")
        retriever = self._settings.retriever(squad_list(data_dir, self._count), self._tick)
        with open_engine(self._settings.target, None, DraftingConfig())[0] as engine:
            prompts = PromptBuilder(engine.target.tokenizer, engine.target.max_context_tokens)
            mixed = drafter_cases(data_dir, retriever, prompts, max(self._count, 8))
            tasks = (CHAT,) if self._quick else QUESTIONS
            cases = {task: mixed[task] for task in (PROSE, RAG)}
            cases |= question_cases(data_dir, prompts, tasks, self._count)
            return cases, cut_prefixes(engine, cases[PROSE][: 1 if self._quick else self._count], self._seed)

    @property
    def _seed(self) -> int:
        return self._settings.plan.seed

    def _sampling(self, temperature: float) -> Sampling:
        return Sampling(temperature, self._seed, self._settings.plan.num_runs)

    def _alone(self, head: TrainedHead, prefixes: Sequence[Prefix]) -> tuple[list[Result], float]:
        """One head's rows, and its tokens a step at T = 1 over those at T = 0 from the same beginnings."""
        rows, given, lengths = [], OverruledAnswers(repeats=False), {}
        with self._open(setup := head.setup()) as engine:
            for temperature in (0.0,) if self._quick else (0.0, 1.0):
                for task in (PROSE, CHAT) if self._quick else self._cases:
                    rows += self._rows(engine, setup, task, temperature)
        with self._open(setup := head.setup(fixed_nodes=TREE_NODES), given) as engine:
            for temperature in (0.0, 1.0):
                for task in (PROSE,) if self._quick else (PROSE, CHAT):
                    rows += self._rows(engine, setup, task, temperature)
                lengths[temperature] = step_lengths(engine, given, prefixes, temperature, self._tick)
        if not self._quick:
            with self._open(setup := head.setup(fixed_nodes=TREE_NODES, head_tree=CHAIN)) as engine:
                rows += self._rows(engine, setup, PROSE, 0.0)
        return rows, ratio_with_error(lengths[1.0], lengths[0.0])[0]

    def _rows(self, engine: Engine, setup: Setup, task: str, temperature: float) -> list[Result]:
        cases = self._cases[task][: self._count]
        rows = alone_rows(engine, setup, task, cases, self._sampling(temperature), self._tick)
        return [row for row in rows if row["variant"] != NONE]

    def _merged(self, head: TrainedHead) -> list[Result]:
        """Copies, the head, and both in one tree, in one engine."""
        alone = {COPY: Speculation((COPY,)), head.name: Speculation((head.family,))}
        setup = head.setup(variants={**alone, MERGED: ON}, drafters=(COPY, head.family))
        rows: list[Result] = []
        with self._open(setup) as engine:
            for temperature in (0.0, 1.0):
                for task in (RAG, CHAT):
                    rows += [row | {"part": "merged"} for row in self._rows(engine, setup, task, temperature)]
        return rows

    def _batches(self, head: TrainedHead) -> list[Result]:
        """Up to 32 requests side by side."""
        sizes = (1, 4) if self._quick else _BATCHES
        cases = [case for number in range(-(-max(sizes) // 8)) for case in _again(self._cases[PROSE][:8], number)]
        setup, config = head.setup(), EngineConfig(max_running=max(sizes), adaptive_threads=False)
        rows: list[Result] = []
        with load_engine(self._settings.target, config, setup.drafting) as engine:
            for number, size in enumerate(sizes, 1):
                rows += together_rows(engine, setup, PROSE, cases[: max(size, 8)], size, self._sampling(0.0))
                self._tick("batches", number, len(sizes))
        return [row | {"part": "batch"} for row in rows if row["variant"] != NONE]

    def _shapes(self, head: TrainedHead) -> Iterator[Result]:
        """Trees of several depths, and of several widths, with all their nodes."""
        sweeps = [{"max_depth": depth} for depth in _DEPTHS] + [{"width": w, "num_children": w} for w in _WIDTHS]
        for sizes in sweeps:
            setup = head.setup(fixed_nodes=64, head_tree="dynamic", sizes=tuple(sizes.items()))
            with self._open(setup) as engine:
                rows = self._rows(engine, setup, PROSE, 0.0)
            yield from (row | {"part": "shape"} | sizes for row in rows)

    def _lossy(self, head: TrainedHead) -> Result:
        """Tokens a step and mean log-probability of the text at T = 1, under the sample and under rules that change the text."""
        found: Result = {}
        with self._open(head.setup()) as engine:
            for rule in (AcceptanceRule.KEYED, AcceptanceRule.TYPICAL, AcceptanceRule.TOP_BETA):
                way = Speculation(rule=rule, lossy=rule is not AcceptanceRule.KEYED)
                params = SamplingParams(1.0, max_tokens=TOKENS, seed=self._seed, ignore_eos=True, logprobs=0)
                cases = self._cases[PROSE][: self._count]
                done = engine.generate([Request(c.id, c.prompt_ids, params, speculation=way) for c in cases])
                logs = [token.logprob for completion in done for token in completion.logprobs]
                length = acceptance_length([completion.stats for completion in done])
                found[str(rule)] = {"acceptance_length": length, "logprob": mean(logs) if logs else None}
        return found

    def _open(self, setup: Setup, given: OverruledAnswers | None = None) -> Engine:
        return open_engine(self._settings.target, given, setup.drafting, setup.planner_class)[0]


def _again(cases: Sequence[Case], number: int) -> list[Case]:
    """The same prompts under other ids, thus with other seeds."""
    return [Case(f"{c.id}-{number}", c.part, c.prompt_ids, c.sources, c.max_tokens) for c in cases]


def run_heads(settings: Settings, tick: Tick) -> Outcome:
    """Raises: ConfigError without data, InputError, ModelError, EngineError."""
    return Outcome(HeadsSuite(settings, tick).measure())


SUITE = Suite("heads", run_heads, METRICS, tables=tables, draw=draw, options=("heads",))

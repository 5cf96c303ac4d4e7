"""The suite `drafters`: speed and acceptance of each drafter by task, temperature and batch size, and the cost of
sampling.

Not every cell of the grid is measured: chains only of the heads, on chat and prose; batches only of trees, at T = 0, on questions
and prose; fixed trees only on prose. `LEFT_OUT` says so in the result.

    >>> DraftersSuite(TargetConfig(), data_dir, retriever, Heads.find(), drafters_plan(quick=True), tick).measure()
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from ragspec.config import DraftingConfig, TargetConfig
from ragspec.engine.admission import SamplerFactory
from ragspec.engine.engine import Engine
from ragspec.errors import ModelError
from ragspec.evaluation.cases import Case
from ragspec.evaluation.datasets import squad_list
from ragspec.evaluation.machine import PeakMemory
from ragspec.evaluation.overrides import OverruledAnswers
from ragspec.evaluation.report import Result
from ragspec.evaluation.suite import Outcome, Settings, Suite, open_engine
from ragspec.evaluation.suites.drafters.acceptance_rules import TargetAndHead, rule_table
from ragspec.evaluation.suites.drafters.prefixes import Prefix, cut_prefixes, prefix_row, step_lengths
from ragspec.evaluation.suites.drafters.prompts import CHAT, PROSE, RAG, TASKS, drafter_cases
from ragspec.evaluation.suites.drafters.report import METRICS, NOTES, drafters_tables, headlines
from ragspec.evaluation.suites.drafters.runs import Sampling, alone_rows, together_rows
from ragspec.evaluation.suites.drafters.variants import (
    EAGLE2,
    EAGLE3,
    NONE,
    Heads,
    Setup,
    chain_setups,
    fixed_setups,
    tree_setups,
)
from ragspec.evaluation.timing import Tick
from ragspec.numerics.threads import num_processors, run_in_thread
from ragspec.rag.prompt import PromptBuilder
from ragspec.rag.steps import RetrieverLike

TEMPERATURES = (0.0, 1.0)
COMPARED = (EAGLE2, EAGLE3)
"""Variants whose steps are counted from the same prefixes."""
LEFT_OUT = (
    "chains of copying, chains on questions and grammar, and chains as long as pay: all go on while the head gives them a chance",
    "batches of chains, at T = 1, and on chat and grammar",
    "fixed trees, beginnings and acceptance rules on anything but prose",
)


@dataclass(frozen=True, slots=True)
class DraftersPlan:
    """Numbers of prompts: of a cell, side by side in all, of fixed trees, cut into prefixes; `num_ruled` prefixes
    serve the acceptance rules."""

    num_prompts: int = 5
    num_together: int = 8
    num_fixed: int = 12
    num_cut: int = 12
    num_ruled: int = 32
    batches: tuple[int, ...] = (1, 2, 4, 8)
    num_runs: int = 3
    seed: int = 0

    @property
    def num_cases(self) -> int:
        """The longest list."""
        return max(self.num_prompts, self.num_together, self.num_fixed, self.num_cut)

    def sampling(self, temperature: float, once: bool = False) -> Sampling:
        """Half the repetitions at T = 1, where the gain is smaller."""
        several = (self.num_runs + 1) // 2 if temperature else self.num_runs
        return Sampling(temperature, self.seed, 1 if once else several)


def drafters_plan(
    quick: bool = False, num_runs: int = 3, seed: int = 0, num_prompts: int | None = None
) -> DraftersPlan:
    """`num_prompts` replaces every number of prompts."""
    plan = DraftersPlan(num_runs=num_runs, seed=seed)
    if quick:
        plan = replace(plan, num_prompts=2, num_together=4, num_fixed=4, num_cut=2, num_ruled=4, batches=(1, 4))
    if num_prompts is None:
        return plan
    batches = tuple(batch for batch in plan.batches if batch <= num_prompts)
    every = num_prompts
    return DraftersPlan(every, every, every, every, every, batches, num_runs, seed)


@dataclass(frozen=True)
class DraftersSuite:
    """Measures the grid; one engine is open at a time."""

    target: TargetConfig
    data_dir: Path
    retriever: RetrieverLike
    heads: Heads
    plan: DraftersPlan
    tick: Tick

    def measure(self) -> Result:
        """All rows and headlines. Raises: InputError if data is missing, ModelError, EngineError."""
        memory, plan = PeakMemory(), self.plan
        engine, bitwise = open_engine(self.target, None, DraftingConfig())
        with engine:
            prompts = PromptBuilder(engine.target.tokenizer, engine.target.max_context_tokens)
            cases = drafter_cases(self.data_dir, self.retriever, prompts, plan.num_cases)
            prefixes = cut_prefixes(engine, cases[PROSE][: plan.num_cut], plan.seed)
        rows = [*self._tree_rows(cases), *self._chain_rows(cases)]
        memory.look()
        fixed_rows, from_prefixes = self._fixed(cases[PROSE][: plan.num_fixed], prefixes)
        rows += fixed_rows
        rules, unruled = self._rules(prefixes)
        result: Result = {
            "bitwise": bitwise,
            "label": "held-out articles, MT-bench, SGD, JFLEG",
            "missing": self.heads.missing,
            "left_out": [*LEFT_OUT, *unruled],
            "num_prompts": plan.num_prompts,
            "num_runs": plan.num_runs,
            "rows": rows,
            "same_beginnings": from_prefixes,
            "acceptance_rules": rules,
        }
        return result | headlines(rows, from_prefixes) | {"peak_pss_mb": memory.look()}

    def _open(self, setup: Setup, make_sampler: SamplerFactory | None = None) -> Engine:
        return open_engine(self.target, make_sampler, setup.drafting, setup.planner_class)[0]

    def _tree_rows(self, cases: dict[str, list[Case]]) -> Iterator[Result]:
        """Plain decoding's rows come from the first engine."""
        plan = self.plan
        for number, setup in enumerate(tree_setups(self.heads)):
            with self._open(setup) as engine:
                rows: list[Result] = []
                for temperature, task in product(TEMPERATURES, TASKS):
                    few, sampling = cases[task][: plan.num_prompts], plan.sampling(temperature)
                    rows += alone_rows(engine, setup, task, few, sampling, self.tick)
                rows += self._together(engine, setup, cases)
            yield from (row for row in rows if number == 0 or row["variant"] != NONE)

    def _together(self, engine: Engine, setup: Setup, cases: dict[str, list[Case]]) -> Iterator[Result]:
        sampling = self.plan.sampling(0.0, once=True)
        for task in (RAG, PROSE):
            grouped = cases[task][: self.plan.num_together]
            for number, batch in enumerate(self.plan.batches, 1):
                yield from together_rows(engine, setup, task, grouped, batch, sampling)
                self.tick(f"{', '.join(setup.variants)}, {task}, batches", number, len(self.plan.batches))

    def _chain_rows(self, cases: dict[str, list[Case]]) -> Iterator[Result]:
        for setup in chain_setups(self.heads):
            with self._open(setup) as engine:
                for temperature, task in product(TEMPERATURES, (CHAT, PROSE)):
                    yield from self._drafting_rows(engine, setup, task, cases[task], temperature)

    def _fixed(self, cases: Sequence[Case], prefixes: Sequence[Prefix]) -> tuple[list[Result], dict[str, Result]]:
        """Rows of fixed trees on texts of their own, and step lengths from the same prefixes by variant."""
        rows: list[Result] = []
        lengths: dict[str, list[list[int]]] = {}
        for coupled, temperatures in ((True, TEMPERATURES), (False, TEMPERATURES[1:])):
            for setup in fixed_setups(self.heads, coupled):
                (name,) = setup.variants
                given = OverruledAnswers(repeats=False)
                with self._open(setup, given) as engine:
                    for temperature in temperatures:
                        rows += self._drafting_rows(engine, setup, PROSE, cases, temperature)
                        if name in COMPARED:
                            found = step_lengths(engine, given, prefixes, temperature, self.tick)
                            lengths.setdefault(name, []).append(found)
        return rows, {name: prefix_row(*three) for name, three in lengths.items()}

    def _rules(self, prefixes: Sequence[Prefix]) -> tuple[Result | None, list[str]]:
        """Acceptance rules on evenly spaced sampled prefixes; None with a reason if no head can be computed."""
        head = self.heads.eagle3 or self.heads.eagle
        if head is None:
            return None, ["acceptance rules: there is no head"]
        sampled = prefixes[len(prefixes) // 2 :]
        chosen = sampled[:: max(1, len(sampled) // self.plan.num_ruled)][: self.plan.num_ruled]
        texts = [(*prefix.prompt_ids, *prefix.output_ids) for prefix in chosen]

        def table() -> Result:
            return dict(rule_table(TargetAndHead.load(self.target, head), texts, self.plan.seed, self.tick))

        try:
            return run_in_thread(table, num_processors()), []
        except ModelError as error:
            return None, [f"acceptance rules: {error}"]

    def _drafting_rows(
        self, engine: Engine, setup: Setup, task: str, cases: Sequence[Case], temperature: float
    ) -> Iterator[Result]:
        """Rows without plain decoding, which other engines measured."""
        sampling = self.plan.sampling(temperature, once=True)
        rows = alone_rows(engine, setup, task, cases, sampling, self.tick)
        return (row for row in rows if row["variant"] != NONE)


def run_drafters(settings: Settings, tick: Tick) -> Outcome:
    """Raises: ConfigError without data, InputError, ModelError, EngineError."""
    data_dir = settings.require_data("squad, sgd, mt_bench and jfleg")
    plan = drafters_plan(settings.quick, settings.plan.num_runs, settings.plan.seed, settings.num_prompts)
    heads = Heads.find(settings.heads)
    retriever = settings.retriever(squad_list(data_dir, plan.num_cases), tick)
    return Outcome(DraftersSuite(settings.target, data_dir, retriever, heads, plan, tick).measure())


SUITE = Suite("drafters", run_drafters, METRICS, NOTES, drafters_tables, options=("heads",))

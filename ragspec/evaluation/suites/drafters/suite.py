"""The suite `drafters`, also called `heads`: copies, and every trained head of a folder, by the measures of the papers.

    heads/eagle  heads/eagle2  heads/eagle3  heads/hass  heads/poss  heads/medusa  heads/hydra  heads/hydra++     (any of them)

Copies are measured first, beside plain decoding. Then each head drafts alone: trees that pay, for speed; trees of 16 nodes
whatever they cost, for acceptance, their children chosen with the target's noise and without; chains, for n-alpha. The head
that is fastest on prose then drafts beside copies, in batches, in trees of several depths and widths, and under every
acceptance rule. With `--quick` chains, shapes, rules and children without the noise are left out, and most tasks and
temperatures of heads.

    >>> run_suite("heads", replace(settings, heads=Path("heads")), tick).result["order_held"]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from statistics import mean

from ragspec.config import DraftingConfig, EngineConfig
from ragspec.core import Request, SamplingParams
from ragspec.engine.engine import Engine
from ragspec.engine.loading import load_engine
from ragspec.evaluation.cases import Case
from ragspec.evaluation.datasets import squad_list
from ragspec.evaluation.machine import PeakMemory
from ragspec.evaluation.overrides import OverruledAnswers
from ragspec.evaluation.report import Result
from ragspec.evaluation.suite import Outcome, Settings, Suite, open_engine
from ragspec.evaluation.suites.drafters.prefixes import Prefix, cut_prefixes, prefix_row, step_lengths
from ragspec.evaluation.suites.drafters.prompts import (
    MT_BENCH,
    PROSE,
    PROSE_TOKENS,
    QUESTIONS,
    RAG,
    TASKS,
    drafter_cases,
    question_cases,
)
from ragspec.evaluation.suites.drafters.report import METRICS, NOTES, draw, fastest, headlines, tables
from ragspec.evaluation.suites.drafters.runs import Sampling, acceptance_length, alone_rows, together_rows
from ragspec.evaluation.suites.drafters.variants import (
    CHAIN,
    COPY,
    MERGED,
    NONE,
    TREE_NODES,
    Setup,
    TrainedHead,
    find_heads,
)
from ragspec.evaluation.timing import Tick
from ragspec.rag.prompt import PromptBuilder
from ragspec.speculation import LOSSY_RULES, ON, AcceptanceRule, Speculation

_TEMPERATURES = (0.0, 1.0)
_BATCHES, _DEPTHS, _WIDTHS = (1, 2, 4, 8, 16, 32), (1, 2, 4, 6, 8), (1, 2, 4, 8)
_NO_HEADS = "heads: --heads named no folder of them"


class DraftersSuite:
    """Measures one drafter after the other; one engine is open at a time."""

    def __init__(self, settings: Settings, tick: Tick) -> None:
        self._settings, self._tick, self._quick = settings, tick, settings.quick
        self._seed, self._heads = settings.plan.seed, find_heads(settings.heads)
        self._count = settings.num_prompts or (2 if settings.quick else 5)
        self._cases: dict[str, list[Case]] = {}
        self._prefixes: list[Prefix] = []

    def measure(self) -> Result:
        """All rows and headlines. Raises: ConfigError without data, InputError, ModelError, EngineError."""
        memory, bitwise = PeakMemory(), self._read()
        rows = [{"part": "copy"} | row for row in self._copies()]
        same_beginnings: dict[str, Result] = {}
        for head in self._heads:
            own, same_beginnings[head.name] = self._alone(head)
            rows += own
        result: Result = {"missing": [] if self._heads else [_NO_HEADS], "acceptance_rules": {}}
        if self._heads:
            best = next(head for head in self._heads if head.name == fastest(rows)["variant"])
            rows += [*self._merged(best), *self._batches(best.setup(), PROSE)]
            if not self._quick:
                rows += self._shapes(best)
                result["acceptance_rules"] = self._rules(best)
        result |= headlines(rows, same_beginnings) | {"same_beginnings": same_beginnings, "rows": rows}
        result |= {"label": "papers' prompts, held-out articles", "bitwise": bitwise, "num_prompts": self._count}
        result |= {"num_runs": self._settings.plan.num_runs, "families": [head.name for head in self._heads]}
        return result | {"peak_pss_mb": memory.look()}

    def _read(self) -> bool:
        """The prompts by task, and beginnings of the target's own answers; whether the target's numerics are bitwise."""
        data_dir = self._settings.require_data("mt_bench, eagle_eval, squad, sgd and jfleg")
        retriever = self._settings.retriever(squad_list(data_dir, self._count), self._tick)
        engine, bitwise = open_engine(self._settings.target, None, DraftingConfig())
        with engine:
            prompts = PromptBuilder(engine.target.tokenizer, engine.target.max_context_tokens)
            self._cases = drafter_cases(data_dir, retriever, prompts, max(self._count, 8))
            if self._heads:
                questions = (MT_BENCH,) if self._quick else QUESTIONS
                self._cases |= question_cases(data_dir, prompts, questions, self._count)
                few = 1 if self._quick else self._count
                self._prefixes = cut_prefixes(engine, self._cases[PROSE][:few], self._seed)
        return bitwise

    def _sampling(self, temperature: float) -> Sampling:
        return Sampling(temperature, self._seed, self._settings.plan.num_runs)

    def _copies(self) -> list[Result]:
        """Copies and plain decoding on every kind of task, alone and side by side."""
        setup, rows = Setup({COPY: ON}, (COPY,)), list[Result]()
        with self._open(setup) as engine:
            for temperature, task in product(_TEMPERATURES, TASKS):
                rows += self._rows(engine, setup, task, temperature)
        return rows + [row for task in (RAG, PROSE) for row in self._batches(setup, task)]

    def _alone(self, head: TrainedHead) -> tuple[list[Result], Result]:
        """One head's rows, and its tokens a step at both temperatures from the same beginnings."""
        rows, lengths = list[Result](), list[list[int]]()
        with self._open(setup := head.setup()) as engine:
            for temperature in _TEMPERATURES[: 1 if self._quick else 2]:
                for task in (PROSE, MT_BENCH) if self._quick else (PROSE, RAG, *QUESTIONS):
                    rows += self._rows(engine, setup, task, temperature)
        for coupled, temperatures in ((True, _TEMPERATURES), (False, _TEMPERATURES[1:]))[: 1 if self._quick else 2]:
            given = OverruledAnswers(repeats=False)
            with self._open(setup := head.setup(fixed_nodes=TREE_NODES, coupled=coupled), given) as engine:
                for temperature in temperatures:
                    for task in (PROSE, MT_BENCH) if coupled and not self._quick else (PROSE,):
                        rows += self._rows(engine, setup, task, temperature)
                    lengths.append(step_lengths(engine, given, self._prefixes, temperature, self._tick))
        if not self._quick:
            with self._open(setup := head.setup(fixed_nodes=TREE_NODES, head_tree=CHAIN)) as engine:
                rows += self._rows(engine, setup, PROSE, 0.0)
        return [row for row in rows if row["variant"] != NONE], prefix_row(*lengths)

    def _rows(self, engine: Engine, setup: Setup, task: str, temperature: float) -> list[Result]:
        cases = self._cases[task][: self._count]
        return alone_rows(engine, setup, task, cases, self._sampling(temperature), self._tick)

    def _merged(self, head: TrainedHead) -> list[Result]:
        """Copies, the head, and both in one tree, in one engine."""
        alone = {COPY: Speculation((COPY,)), head.name: Speculation((head.family,))}
        setup, rows = head.setup(variants={**alone, MERGED: ON}, drafters=(COPY, head.family)), list[Result]()
        with self._open(setup) as engine:
            for temperature, task in product(_TEMPERATURES, (RAG, MT_BENCH)):
                rows += self._rows(engine, setup, task, temperature)
        return [row | {"part": "merged"} for row in rows if row["variant"] != NONE]

    def _batches(self, setup: Setup, task: str) -> list[Result]:
        """Up to 32 requests side by side."""
        sizes, fewest = ((1, 4), 4) if self._quick else (_BATCHES, 8)
        cases = [case for number in range(-(-max(sizes) // 8)) for case in _again(self._cases[task][:8], number)]
        config, rows = EngineConfig(max_running=max(sizes), adaptive_threads=False), list[Result]()
        with load_engine(self._settings.target, config, setup.drafting) as engine:
            for number, size in enumerate(sizes, 1):
                rows += together_rows(engine, setup, task, cases[: max(size, fewest)], size, self._sampling(0.0))
                self._tick(f"batches, {task}", number, len(sizes))
        return [row | {"part": "batch"} for row in rows if row["variant"] != NONE]

    def _shapes(self, head: TrainedHead) -> Iterator[Result]:
        """Trees of several depths, and of several widths, with all their nodes."""
        sweeps = [{"max_depth": depth} for depth in _DEPTHS] + [{"width": w, "num_children": w} for w in _WIDTHS]
        for sizes in sweeps:
            setup = head.setup(fixed_nodes=64, head_tree="dynamic", sizes=sizes)
            with self._open(setup) as engine:
                rows = self._rows(engine, setup, PROSE, 0.0)
            yield from (row | {"part": "shape"} | sizes for row in rows if row["variant"] != NONE)

    def _rules(self, head: TrainedHead) -> Result:
        """Tokens a step and mean log-probability of the text at T = 1 by acceptance rule: of trees, or chains where a rule needs
        them."""
        found: Result = {}
        with self._open(head.setup(fixed_nodes=TREE_NODES)) as engine:
            for rule in AcceptanceRule:
                way = Speculation(rule=rule, lossy=rule in LOSSY_RULES)
                params = SamplingParams(1.0, max_tokens=PROSE_TOKENS, seed=self._seed, ignore_eos=True, logprobs=0)
                cases = self._cases[PROSE]
                done = engine.generate([Request(c.id, c.prompt_ids, params, speculation=way) for c in cases])
                logs = [token.logprob for completion in done for token in completion.logprobs]
                length = acceptance_length([completion.stats for completion in done])
                found[str(rule)] = {"acceptance_length": length, "logprob": mean(logs) if logs else None}
                self._tick("acceptance rules", len(found), len(AcceptanceRule))
        return found

    def _open(self, setup: Setup, given: OverruledAnswers | None = None) -> Engine:
        return open_engine(self._settings.target, given, setup.drafting, setup.planner_class)[0]


def _again(cases: Sequence[Case], number: int) -> list[Case]:
    """The same prompts under other ids, thus with other seeds."""
    return [Case(f"{c.id}-{number}", c.part, c.prompt_ids, c.sources, c.max_tokens) for c in cases]


def run_drafters(settings: Settings, tick: Tick) -> Outcome:
    """Raises: ConfigError without data, InputError, ModelError, EngineError."""
    return Outcome(DraftersSuite(settings, tick).measure())


SUITE = Suite("drafters", run_drafters, METRICS, NOTES, tables, draw, options=("heads",))

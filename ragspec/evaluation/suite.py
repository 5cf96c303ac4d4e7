"""The frame of a benchmark suite: settings, outcome, and the registry of the suites that need the library alone.

A suite is one module (or package) below `suites/` with a constant `SUITE`. Nothing here reads the environment or prints.

    >>> outcome = run_suite("rag", Settings(TargetConfig(), data_dir, cache_dir, Repetitions(num_runs=1), quick=True), tick)
    >>> outcome.result["speedup_vs_plain"]
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ragspec.config import DraftingConfig, EncoderConfig, EngineConfig, IndexConfig, TargetConfig
from ragspec.core import Document
from ragspec.drafting.cost_model import CostTable
from ragspec.drafting.planner import Planner
from ragspec.engine.admission import Admission, SamplerFactory
from ragspec.engine.engine import Engine
from ragspec.engine.loading import load_engine, make_drafters, measure_costs
from ragspec.engine.target import Target
from ragspec.errors import ConfigError, ModelError
from ragspec.evaluation.datasets import RagList, cached_store, squad_list, stdlib_list
from ragspec.evaluation.report import Figures, Metric, Result, Table
from ragspec.evaluation.timing import Tick
from ragspec.retrieval.encoder import Encoder, TextEncoder
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.retriever import Retriever

if TYPE_CHECKING:
    from ragspec.evaluation.suites.generation import MeasuredGeneration
    from ragspec.evaluation.suites.iterative.suite import RemoteOpeners

AnyEngine = TypeVar("AnyEngine", bound=Engine)

QUICK_QUESTIONS = 8
CONCURRENCY = 8
NUM_WARM_UP = 6
SUITES = {name: f"ragspec.evaluation.suites.{name}" for name in ("rag", "grammar", "cpu", "target", "spec_bench")} | {
    name: f"ragspec.evaluation.suites.{name}.suite"
    for name in ("retrieval", "iterative", "drafters", "answers", "backends")
}
SUITES["heads"] = SUITES["drafters"]
"""The module of each suite."""
OPTIONS = ("forced", "full", "reranker", "heads")
"""Settings that only the suites that name them understand."""


@dataclass(frozen=True, slots=True)
class Repetitions:
    """`num_runs`: the median of so many counts. `num_nothing`: prompts with nothing to copy; `num_nothing_runs`: their fewest
    runs, for no difference is expected, and single runs of twelve prompts scatter by several percent. `num_warm_up`: prompts of
    the uncounted runs before, at most half of a list."""

    num_runs: int = 3
    num_nothing: int = 12
    num_nothing_runs: int = 5
    seed: int = 0
    num_warm_up: int = NUM_WARM_UP


@dataclass(frozen=True, slots=True)
class Settings:
    """The choices of the command line. `num_prompts` shortens the lists; `forced`: a file of answers, "gold", or nothing.

    `full` and `reranker` belong to the suite retrieval, `elsewhere` to iterative, `heads` (a folder) to drafters and spec_bench,
    `verdicts` (a folder) to target and answers.
    """

    target: TargetConfig
    data_dir: Path | None
    cache_dir: Path
    plan: Repetitions = field(default_factory=Repetitions)
    quick: bool = False
    forced: str = ""
    peers: bool = True
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    num_prompts: int | None = None
    full: bool = False
    reranker: str = ""
    elsewhere: RemoteOpeners | None = None
    heads: Path | None = None
    verdicts: Path | None = None

    def require_data(self, folders: str) -> Path:
        """The data folder. Raises: ConfigError without one; `folders` says what it must hold."""
        if self.data_dir is None:
            raise ConfigError(f"this suite needs a data folder with {folders}: give --data")
        return self.data_dir

    def questions(self, count: int) -> RagList:
        """SQuAD where there is data, else the standard library. Raises: InputError."""
        return squad_list(self.data_dir, count) if self.data_dir else stdlib_list(count)

    def store(
        self, documents: Sequence[Document], encoder: TextEncoder, tick: Tick, config: IndexConfig | None = None
    ) -> Store:
        """The index of these documents, kept in `cache_dir`. Raises: SaveError, InputError."""

        def progress(done: int, _: int) -> None:
            tick(f"index of {len(documents):,} (once)", done, len(documents))

        return cached_store(documents, encoder, self.cache_dir, config, progress)

    def retriever(self, listed: RagList, tick: Tick) -> Retriever:
        """The default retriever over the list's documents."""
        encoder = Encoder.load(self.encoder)
        return Retriever(encoder, self.store(listed.documents, encoder, tick), follow=False)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result for the JSON line, and the timings behind it where the suite generates text."""

    result: Result
    measured: MeasuredGeneration | None = None


def _no_figures(outcome: Outcome, title: str) -> Figures:
    return {}


@dataclass(frozen=True)
class Suite:
    """`run` measures; the rest presents a complete result. `notes`: keys of texts; `options`: of `OPTIONS`."""

    name: str
    run: Callable[[Settings, Tick], Outcome]
    metrics: Sequence[Metric]
    notes: tuple[str, ...] = ()
    tables: Callable[[Result], Mapping[str, Table]] = lambda result: {}
    draw: Callable[[Outcome, str], Figures] = _no_figures
    options: tuple[str, ...] = ()

    def measure(self, settings: Settings, tick: Tick) -> Outcome:
        """Run, and name the result. Raises: ConfigError for an option of another suite, and the errors of the suite."""
        for option in OPTIONS:
            if getattr(settings, option) and option not in self.options:
                raise ConfigError(f"--{option} is not an option of the suite {self.name}")
        outcome = self.run(settings, tick)
        named = {"suite": self.name, "quick": settings.quick, "seed": settings.plan.seed}
        named |= {"target": Path(settings.target.model).name, "dtype": settings.target.weight_dtype}
        return Outcome(named | outcome.result, outcome.measured)


def find_suite(name: str, modules: Mapping[str, str] = SUITES) -> Suite:
    """Import the suite's module. Raises: ConfigError for an unknown name."""
    if name not in modules:
        raise ConfigError(f"unknown suite {name!r}; there are: {', '.join(modules)}")
    suite: Suite = importlib.import_module(modules[name]).SUITE
    return replace(suite, name=name)


def run_suite(name: str, settings: Settings, tick: Tick) -> Outcome:
    """Measure a suite of the library. Raises: ConfigError for an unknown name, and the errors of the suite."""
    return find_suite(name).measure(settings, tick)


def engine_config() -> EngineConfig:
    """At most eight requests side by side, which does not change one alone; all threads, as for the peers."""
    return EngineConfig(max_running=CONCURRENCY, adaptive_threads=False)


def open_engine(
    config: TargetConfig,
    make_sampler: SamplerFactory | None = None,
    drafting: DraftingConfig | None = None,
    planner_class: type[Planner] = Planner,
) -> tuple[Engine, bool]:
    """A running engine, and whether its numerics are bitwise. Raises: ModelError."""
    drafting = drafting or DraftingConfig()
    load = partial(load_engine, make_sampler=make_sampler, planner_class=planner_class)
    try:
        return load(config, engine_config(), drafting), config.exactness == "bitwise"
    except ModelError:
        fast = config.model_copy(update={"exactness": "fast"})
        return load(fast, engine_config(), drafting), False


def engine_over(
    engine_class: type[AnyEngine],
    target: Target,
    config: EngineConfig,
    costs: CostTable | None = None,
    make_sampler: SamplerFactory | None = None,
) -> AnyEngine:
    """An engine with the default drafters over a loaded target, whose pool it replaces. Measures `costs` by default."""
    drafting = DraftingConfig()
    target.reset_pool(config.max_kv_tokens)
    drafters, costs = make_drafters(target, drafting), costs or measure_costs(target, config.max_step_tokens)
    planner = Planner(drafters, costs, drafting.max_tree_nodes, target.vocab_size)
    return engine_class(target, planner, Admission(target, "benchmark", make_sampler), config)

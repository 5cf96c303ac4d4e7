"""The frame of the benchmark suites: the choices of a run, rows that survive a stop, metrics with goals, the JSON line.

A suite is a module of this folder with a constant `SUITE`. `Suite.run` takes a `Run` and yields rows, flat dictionaries, each
with its `row`: a name that is unique in the suite. `Suite.summarise` turns all rows into the flat figures of the JSON line. A
suite measures every row through `Run.row`, so that a run which was stopped goes on after its last row:

    def run(run: Run) -> Iterator[Row]:
        for workload in ("rag", "grammar"):
            yield run.row(workload, lambda: measured(workload))

    SUITE = Suite("example", run, summarise, (Metric("speedup_vs_plain", "plain over speculative seconds", at_least(1.0)),))

This module knows no suite and prints nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from ragspec.config import EncoderConfig, IndexConfig, TargetConfig
from ragspec.core import Document, Say, log_progress
from ragspec.disk import make_folder, saving
from ragspec.errors import ConfigError
from ragspec.evaluation.datasets import RagList, cached_store, squad_list, stdlib_list
from ragspec.evaluation.measures import PeakMemory, rounded, versions
from ragspec.numerics.threads import num_processors
from ragspec.retrieval.encoder import Encoder, TextEncoder
from ragspec.retrieval.index.store import Store
from ragspec.retrieval.retriever import Retriever

Row = dict[str, Any]
Result = dict[str, Any]
"""Flat figures by key."""


class Goal(NamedTuple):
    text: str
    is_reached: Callable[[Any], bool]


class Metric(NamedTuple):
    """One figure of a result, by its key."""

    name: str
    meaning: str
    goal: Goal | None = None


def at_most(limit: float) -> Goal:
    return Goal(f"{limit:g} at most", lambda value: bool(value <= limit))


def at_least(limit: float) -> Goal:
    return Goal(f"{limit:g} at least", lambda value: bool(value >= limit))


def equal_to(expected: float | bool) -> Goal:
    return Goal(cell(expected), lambda value: bool(value == expected))


_GOALS = {"at_most": at_most, "at_least": at_least, "equal_to": equal_to}


def metrics_of(suite: str) -> list[Metric]:
    """The figures of a suite, by `metrics.toml`."""
    tables = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text(encoding="utf-8"))
    metrics = []
    for name, given in tables[suite].items():
        goals = [make(given[kind]) for kind, make in _GOALS.items() if kind in given]
        metrics.append(Metric(name, given["meaning"], *goals))
    return metrics


class RowFile:
    """Measured rows as JSON lines, by name. Without a path nothing is kept."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._rows = {row["row"]: row for row in _whole_lines(path)} if path else {}

    def get(self, name: str) -> Row | None:
        return self._rows.get(name)

    def add(self, row: Row) -> None:
        """Raises: SaveError."""
        self._rows[row["row"]] = row
        if self._path is None:
            return
        with saving(self._path):
            make_folder(self._path.parent)
            with open(self._path, "a", encoding="utf-8") as file:
                file.write("\n" + json.dumps(row))  # Why first: the line before may have been cut off


def _whole_lines(path: Path) -> Iterator[Row]:
    """The rows of the file without a line that was cut off."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):
                yield json.loads(line)


@dataclass(frozen=True)
class Run:
    """The choices of the command line, and what every suite needs.

    `num_runs`: timed repetitions, whose median counts. `num_prompts`: shortens every list. `peers`: run other programs beside.
    `minutes`: how long the suite `faults` goes on with further rounds. `heads`: a folder with a folder for each trained head.
    `device`: "stub" measures the host's time on a device of tables; None: the target's own.
    """

    target: TargetConfig
    cache_dir: Path
    data_dir: Path | None = None
    quick: bool = False
    num_runs: int = 3
    num_prompts: int | None = None
    seed: int = 0
    peers: bool = True
    minutes: float = 0.0
    heads: Path | None = None
    device: str | None = None
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    tick: Say = log_progress
    kept: RowFile = field(default_factory=RowFile)
    memory: PeakMemory = field(default_factory=PeakMemory)

    def row(self, name: str, measure: Callable[[], Row]) -> Row:
        """The kept row of this name, or else the measured one, which is kept. Raises: SaveError, and the errors of `measure`."""
        found = self.kept.get(name)
        if found is None:
            found = rounded({"row": name} | measure())
            self.kept.add(found)
        self.memory.look()
        return found

    def count(self, full: int, quick: int) -> int:
        """The length of a list of prompts: `full`, or `quick` with --quick, and at most `num_prompts`."""
        return min(quick if self.quick else full, self.num_prompts or full)

    def require_data(self, folders: str) -> Path:
        """The data folder. Raises: ConfigError without one; `folders` names the folders that it must hold."""
        if self.data_dir is None:
            raise ConfigError(f"this suite needs a data folder with {folders}: give --data")
        return self.data_dir

    def questions(self, count: int) -> RagList:
        """Questions of SQuAD if there is data, else of the standard library. Raises: InputError."""
        return squad_list(self.data_dir, count) if self.data_dir else stdlib_list(count)

    def store(
        self, documents: Sequence[Document], encoder: TextEncoder | None = None, config: IndexConfig | None = None
    ) -> Store:
        """The index of these documents, kept in `cache_dir`. Raises: SaveError, InputError."""

        def progress(done: int, _: int) -> None:
            self.tick(f"index of {len(documents):,} (once)", done, len(documents))

        return cached_store(documents, encoder or Encoder.load(self.encoder), self.cache_dir, config, progress)

    def retriever(self, documents: Sequence[Document]) -> Retriever:
        """The default retriever over an index of the documents."""
        encoder = Encoder.load(self.encoder)
        return Retriever(encoder, self.store(documents, encoder), follow=False)

    def resumed(self, suite: str, commit: str) -> Run:
        """With the rows of this suite, commit and machine and of the same choices. A checkout with changes keeps no rows."""
        if commit == "unknown" or commit.endswith("-dirty"):
            return self
        inputs = self.target.model_dump_json(), self.encoder.model_dump_json(), self.data_dir, self.heads, machine()
        choices = self.quick, self.num_runs, self.num_prompts, self.seed, self.peers, self.device
        digest = hashlib.sha256("\n".join(map(str, inputs + choices)).encode()).hexdigest()[:12]
        return replace(self, kept=RowFile(self.cache_dir / "rows" / f"{suite}-{commit[:12]}-{digest}.jsonl"))


class Plot(NamedTuple):
    """Lines or, over names, bars over the column `x` of the rows that `shows` chooses: a column each, with its label."""

    x: str
    lines: Mapping[str, str]
    shows: Callable[[Row], bool]
    is_curve: bool = False


class Suite(NamedTuple):
    """`summarise`: the flat figures of all rows."""

    name: str
    run: Callable[[Run], Iterable[Row]]
    summarise: Callable[[Sequence[Row]], Result]
    metrics: Sequence[Metric]
    plot: Plot | None = None


def measure(suite: Suite, run: Run, commit: str) -> tuple[Result, list[Row]]:
    """The complete flat result of a suite, and its rows, each with the commit. Raises: the errors of the suite."""
    rows = [row | {"commit": commit} for row in suite.run(run)]
    result: Result = {
        "suite": suite.name,
        "commit": commit,
        "target": Path(run.target.model).name,
        "dtype": run.target.weight_dtype,
        "threads": num_processors(),
        "machine": machine(),
        "versions": versions(),
        "quick": run.quick,
        "seed": run.seed,
        "num_runs": run.num_runs,
        "num_rows": len(rows),
    }
    result |= suite.summarise(rows) | {"peak_pss_mb": run.memory.look()}
    missed = [metric.name for metric, is_reached in _measured(suite, result) if not is_reached]
    return rounded(result | {"goals_missed": ", ".join(missed)}), rows


def _measured(suite: Suite, result: Result) -> Iterator[tuple[Metric, bool]]:
    """The metrics with a value, and whether it reaches the goal, if there is one."""
    for metric in suite.metrics:
        if result.get(metric.name) is not None:
            yield metric, metric.goal is None or metric.goal.is_reached(result[metric.name])


def machine() -> str:
    """The processor's model and number of cores."""
    model = "processor"
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return f"{num_processors()} x {model}"


def tables(suite: Suite, result: Result, rows: Sequence[Row]) -> Iterator[Table]:
    """The metrics with their goals, then all rows, for a terminal."""
    title = f"{suite.name}: {result['target']}, {result['dtype']}, {result['machine']}"
    summary = Table("", "", "", title=title, show_header=False, title_justify="left")
    for (name, meaning, goal), is_reached in _measured(suite, result):
        reached = f" (goal: {goal.text}; {'met' if is_reached else 'MISSED'})" if goal else ""
        summary.add_row(name, cell(result[name]), meaning + reached)
    yield summary
    for keys, alike in _by_keys(rows).items():
        shown = Table(*keys)
        for row in alike:
            shown.add_row(*(cell(row[key]) for key in keys))
        yield shown


def _by_keys(rows: Sequence[Row]) -> dict[tuple[str, ...], list[Row]]:
    """Rows with the same keys stand in one table."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(key for key in row if key != "commit"), []).append(row)
    return found


def cell(value: Any) -> str:
    """A value for people: floats with four digits, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def draw(plot: Plot, rows: Sequence[Row], title: str) -> Any:
    """A matplotlib figure that needs no display. Raises: ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as cause:
        raise ConfigError('plots need matplotlib: pip install "ragspec[bench]"') from cause
    figure = Figure(figsize=(8.0, 4.2), layout="constrained")  # inches
    axes = figure.subplots()
    chosen = [row for row in rows if plot.shows(row)]
    chosen = sorted(chosen, key=lambda row: row[plot.x]) if plot.is_curve else chosen
    names, width = [row[plot.x] for row in chosen], 0.8 / len(plot.lines)
    for number, (column, label) in enumerate(plot.lines.items()):
        values = [math.nan if row[column] is None else row[column] for row in chosen]
        if plot.is_curve:
            axes.plot(names, values, marker="o", label=label)
        else:
            begins = [place + width * number for place in range(len(chosen))]
            bars = axes.bar(begins, values, width, align="edge", label=label)
            axes.bar_label(bars, [cell(value) for value in values])
    if plot.is_curve:
        axes.set_xscale("log")
    ticks = names if plot.is_curve else [place + 0.4 for place in range(len(chosen))]
    axes.set_xticks(ticks, [cell(name) for name in names])
    axes.minorticks_off()
    axes.set_xlabel(plot.x)
    axes.set_title(title, loc="left")
    axes.legend(frameon=False)
    return figure

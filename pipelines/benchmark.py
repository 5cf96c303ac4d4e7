"""Measure ragspec: against its own plain decoding, against transformers, and every output token for equality.

    python -m pipelines.benchmark --suite rag --quick
    python -m pipelines.benchmark --suite grammar --json grammar.json --plots plots
    python -m pipelines.benchmark --suite rag --forced gold
    python -m pipelines.benchmark --suite retrieval
    python -m pipelines.benchmark --suite iterative --plots plots
    python -m pipelines.benchmark --suite drafters --heads heads --plots plots
    python -m pipelines.benchmark --suite cluster --quick
    python -m pipelines.benchmark --suite chaos
    python -m pipelines.benchmark --suite chat
    python -m pipelines.benchmark --suite load

The last line on stdout is one JSON object. Tables and progress go to stderr.
"""

from __future__ import annotations

import enum
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers.utils import logging as transformers_logging

from pipelines.benchmarks.above_library import ABOVE_THE_LIBRARY, run_above
from ragspec.config import REFERENCE_TARGET, load_config
from ragspec.errors import ConfigError, RagspecError, SaveError
from ragspec.evaluation.cluster_report import chaos_rows, chaos_tables, cluster_rows, cluster_tables
from ragspec.evaluation.plots import draw
from ragspec.evaluation.report import Result, complete, rows
from ragspec.evaluation.service_report import chat_rows, chat_tables, load_rows, load_tables
from ragspec.evaluation.suite import Outcome, Settings, run_suite
from ragspec.evaluation.suites.drafters.plots import draw_drafters
from ragspec.evaluation.suites.drafters.report import drafters_rows, drafters_tables
from ragspec.evaluation.suites.generation import Plan
from ragspec.evaluation.suites.grammar import draw_grammar
from ragspec.evaluation.suites.iterative.plots import draw_iterative
from ragspec.evaluation.suites.iterative.report import iterative_rows, iterative_tables
from ragspec.evaluation.suites.retrieval.collections import DIMENSION
from ragspec.evaluation.suites.retrieval.report import draw_retrieval, retrieval_rows, retrieval_tables
from ragspec.evaluation.suites.verify_cost import verify_cost_rows, verify_cost_tables
from ragspec.evaluation.timing import Tick
from ragspec.numerics.threads import num_processors

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_DATA = ROOT.parent / "shared" / "data"


class Suite(enum.StrEnum):
    RAG = "rag"
    GRAMMAR = "grammar"
    NUMERICS = "numerics"
    TARGET = "target"
    RETRIEVAL = "retrieval"
    ITERATIVE = "iterative"
    DRAFTERS = "drafters"
    VERIFY_COST = "verify_cost"
    CLUSTER = "cluster"
    CHAOS = "chaos"
    CHAT = "chat"
    LOAD = "load"


class Dtype(enum.StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


_REPORTS = {
    Suite.ITERATIVE: (iterative_rows, iterative_tables),
    Suite.DRAFTERS: (drafters_rows, drafters_tables),
    Suite.VERIFY_COST: (verify_cost_rows, verify_cost_tables),
    Suite.CLUSTER: (cluster_rows, cluster_tables),
    Suite.CHAOS: (chaos_rows, chaos_tables),
    Suite.CHAT: (chat_rows, chat_tables),
    Suite.LOAD: (load_rows, load_tables),
}
"""What stands first in a result, and its tables."""
_PLOTS = {
    Suite.RETRIEVAL: draw_retrieval,
    Suite.ITERATIVE: draw_iterative,
    Suite.DRAFTERS: draw_drafters,
    Suite.GRAMMAR: draw_grammar,
}
_NESTED = (
    *("parts", "edit_rates", "document", "quality", "roofline", "identical_counts", "t1_bounds", "step_cost"),
    "plain_vs_generate_1k",
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_console = Console(stderr=True)


@app.command()
def main(
    suite: Annotated[Suite, typer.Option(help="What to measure.")],
    quick: Annotated[bool, typer.Option(help="Short prompt lists, one run.")] = False,
    forced: Annotated[
        str, typer.Option(help='JSON lines {id, answer} to decode instead of own answers, or "gold".')
    ] = "",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the result here, too.")] = None,
    data: Annotated[Path | None, typer.Option(help="Data folder; by default shared/data beside the checkout.")] = None,
    target: Annotated[str, typer.Option(help="Model directory or name.")] = REFERENCE_TARGET,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights.")] = Dtype.FLOAT32,
    plots: Annotated[Path | None, typer.Option(help="Write PNG plots into this folder.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the sampled runs.")] = 0,
    runs: Annotated[
        int | None, typer.Option(min=1, help="Their median counts; 3, or 1 with --quick; 5 where nothing is gained.")
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Shorter prompt lists (grammar: of each part).")
    ] = None,
    peers: Annotated[bool, typer.Option(help="Run transformers beside.")] = True,
    full: Annotated[bool, typer.Option(help="Retrieval: a million vectors, 100,000 passages, 10,000 queries.")] = False,
    reranker: Annotated[str, typer.Option(help="Retrieval: a cross-encoder's directory or name.")] = "",
    heads: Annotated[Path | None, typer.Option(help="Drafters: a folder with eagle/ and eagle3/.")] = None,
) -> None:
    """Run one suite and print what it found."""
    transformers_logging.disable_progress_bar()
    measured_commit = commit()  # Why now: the checkout may move on before a long run ends
    try:
        config = load_config(None, **{"target.model": target, "target.dtype": dtype.value})
        settings = Settings(
            target=config.target,
            data_dir=data_folder(data),
            cache_dir=cache_folder(),
            plan=Plan(runs or (1 if quick else 3), 3 if quick else 12, seed),
            quick=quick,
            forced=forced,
            peers=peers,
            num_prompts=num_prompts,
            full=full,
            reranker=reranker,
            heads=heads,
        )
        with progress_ticks() as tick:
            outcome = (run_above if suite in ABOVE_THE_LIBRARY else run_suite)(suite.value, settings, tick)
        result = complete(outcome.result | {"commit": measured_commit, "threads": num_processors()})
        show(result)
        print(json.dumps(result), flush=True)
        save(result, outcome, json_path, plots)
    except (RagspecError, FileNotFoundError) as error:
        _console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error


def data_folder(given: Path | None) -> Path | None:
    """The folder named, the usual one if it exists, or none. Raises: ConfigError if the one named is no folder."""
    if given is not None and not given.is_dir():
        raise ConfigError(f"--data {given} is not a folder")
    return given or (DEFAULT_DATA if DEFAULT_DATA.is_dir() else None)


def cache_folder() -> Path:
    """Where indexes are kept between runs: below $XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ragspec" / "benchmark"


def commit() -> str:
    """The commit of this checkout, with "-dirty" if files differ from it; "unknown" outside a checkout."""
    try:
        head = _git("rev-parse", "HEAD")
        return head + ("-dirty" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@contextmanager
def progress_ticks() -> Iterator[Tick]:
    """A bar for each stage, made when the stage is first heard of."""
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=_console) as bars:

        def tick(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield tick


def save(result: Result, outcome: Outcome, json_path: Path | None, plots: Path | None) -> None:
    """Files that were asked for. Raises: SaveError."""
    if json_path is not None:
        try:
            json_path.parent.mkdir(parents=True, exist_ok=True)
            json_path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        except OSError as cause:
            raise SaveError(f"cannot write {json_path}: {cause.strerror}") from cause
    if plots is not None and result["suite"] in _PLOTS:
        subject = f"{DIMENSION} dimensions" if result["suite"] == Suite.RETRIEVAL else result["label"]
        for path in _PLOTS[result["suite"]](
            result, f"{result['suite']}: {subject}, {result['threads']} threads", plots
        ):
            _console.print(f"plot: {path}", highlight=False)
    if plots is not None and outcome.measured is not None:
        title = f"{result['suite']}: {result['num_prompts']} prompts, {result['dtype']}, {result['threads']} threads"
        title += " (forced answers)" if "forced" in result["label"] else ""
        for path in draw(outcome.measured, title, plots, f"{result['suite']}_{result['dtype']}"):
            _console.print(f"plot: {path}", highlight=False)


def show(result: Result) -> None:
    """Tables for people."""
    parts = [result[key] for key in ("label", "target", "dtype") if result[key]]
    title = f"{result['suite']}: {', '.join(parts)}, {result['threads']} threads"
    table = Table("", "", "", title=title, show_header=False, title_justify="left")
    rows_of, tables_of = _REPORTS.get(result["suite"], (_general_rows, retrieval_tables))
    for name, value, meaning in rows_of(result):
        table.add_row(name, value, meaning)
    _console.print(table)
    for name in _NESTED:
        if result.get(name):
            _console.print(nested_table(name, result[name]))
    for name, values in tables_of(result).items():
        _console.print(nested_table(name, values))


def _general_rows(result: Result) -> list[tuple[str, str, str]]:
    return [*rows(result), *retrieval_rows(result)]


def nested_table(name: str, values: dict[str, Any]) -> Table:
    """A dictionary as two columns; a dictionary of dictionaries as one column a key."""
    columns = {key: value for key, value in values.items() if isinstance(value, dict)} or {"": values}
    table = Table("", *columns, title=name, title_justify="left")
    for key in dict.fromkeys(key for column in columns.values() for key in column):
        cells = [column.get(key) for column in columns.values()]
        table.add_row(key, *("" if cell is None else f"{cell}" for cell in cells))
    return table


if __name__ == "__main__":
    app()

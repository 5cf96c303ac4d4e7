"""Measure ragspec: against its own plain decoding, against transformers, and every output token for equality.

    python -m pipelines.benchmark --suite rag --quick
    python -m pipelines.benchmark --suite grammar --json grammar.json --plots plots
    python -m pipelines.benchmark --suite rag --forced gold
    python -m pipelines.benchmark --suite cpu --quick
    python -m pipelines.benchmark --suite retrieval
    python -m pipelines.benchmark --suite iterative --plots plots
    python -m pipelines.benchmark --suite drafters
    python -m pipelines.benchmark --suite spec_bench --plots plots
    python -m pipelines.benchmark --suite heads --heads heads
    python -m pipelines.benchmark --suite cluster --quick
    python -m pipelines.benchmark --suite chaos
    python -m pipelines.benchmark --suite chat
    python -m pipelines.benchmark --suite load
    python -m pipelines.benchmark --suite attack --quick

The last line on stdout is one JSON object. Tables and progress go to stderr.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from transformers.utils import logging as transformers_logging

from pipelines.batch.ray_session import ray_session
from ragspec.cli.terminal import cache_folder
from ragspec.config import DEFAULT_TARGET, load_config
from ragspec.errors import ConfigError, RagspecError, SaveError
from ragspec.evaluation.report import complete, render, write_figures
from ragspec.evaluation.suite import SUITES as LIBRARY_SUITES
from ragspec.evaluation.suite import Outcome, Repetitions, Settings, Suite, find_suite
from ragspec.evaluation.timing import Tick
from ragspec.numerics.threads import num_processors

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_DATA = ROOT.parent / "shared" / "data"
_IN_RAY = {"iterative": "iterative", "cluster": "cluster.suite", "chat": "chat.suite"}
"""Suites that run in a Ray of their own on this machine. Ray's session must be set up before Ray is imported."""
_OWN = _IN_RAY | {"chaos": "chaos.suite", "load": "load", "attack": "attack"}
SUITES = LIBRARY_SUITES | {name: f"pipelines.benchmarks.{module}" for name, module in _OWN.items()}
"""The module of each suite."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_console = Console(stderr=True)


def _weight_settings(dtype: str | None) -> dict[str, str]:
    if dtype is None:
        return {}
    if dtype == "int8":
        return {"target.quantization": "int8"}
    return {"target.quantization": "none", "target.dtype": dtype}


@app.command()
def main(
    suite: Annotated[str, typer.Option(help=f"What to measure: {', '.join(SUITES)}.")],
    quick: Annotated[bool, typer.Option(help="Short prompt lists, one run.")] = False,
    forced: Annotated[str, typer.Option(help='JSON lines {id, answer} to decode, not own answers; or "gold".')] = "",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the result here, too.")] = None,
    data: Annotated[Path | None, typer.Option(help="Data folder; by default shared/data beside the checkout.")] = None,
    target: Annotated[str, typer.Option(help="Model directory, name or GGUF file.")] = DEFAULT_TARGET,
    dtype: Annotated[
        Literal["float32", "bfloat16", "int8"] | None,
        typer.Option(help="Of the weights; default: as the target is served."),
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Write PNG plots into this folder.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the sampled runs.")] = 0,
    runs: Annotated[int | None, typer.Option(min=1, help="Their median counts; 3, or 1 with --quick.")] = None,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="Shorter lists (grammar: of each part).")] = None,
    peers: Annotated[bool, typer.Option(help="Run transformers beside, in the suite cpu llama.cpp too.")] = True,
    full: Annotated[bool, typer.Option(help="Retrieval: a million vectors, 100,000 passages, 10,000 queries.")] = False,
    reranker: Annotated[str, typer.Option(help="Retrieval: a cross-encoder's directory or name.")] = "",
    heads: Annotated[
        Path | None, typer.Option(help="Drafters, Spec-Bench: a folder with a folder for each head.")
    ] = None,
) -> None:
    """Run one suite and print what it found."""
    transformers_logging.disable_progress_bar()
    measured_commit = commit()  # Why now: the checkout may move on before a long run ends
    quick_plan = Repetitions(runs or 1, num_nothing=2, num_nothing_runs=3, seed=seed, num_warm_up=1)
    try:
        config = load_config(None, **{"target.model": target, **_weight_settings(dtype)})
        settings = Settings(
            target=config.target,
            data_dir=data_folder(data),
            cache_dir=cache_folder() / "benchmark",
            plan=quick_plan if quick else Repetitions(runs or 3, seed=seed),
            quick=quick,
            forced=forced,
            peers=peers,
            num_prompts=num_prompts,
            full=full,
            reranker=reranker,
            heads=heads,
            verdicts=ROOT / "infra/results",
        )
        with progress_ticks() as tick:
            measured_suite, outcome = measure_suite(suite, settings, tick)
        result = complete(outcome.result | {"commit": measured_commit, "threads": num_processors()})
        for table in render(result, measured_suite.metrics, measured_suite.notes, measured_suite.tables(result)):
            _console.print(table)
        print(json.dumps(result), flush=True)
        save(measured_suite, replace(outcome, result=result), json_path, plots)
    except (RagspecError, FileNotFoundError) as error:
        _console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error


def measure_suite(name: str, settings: Settings, tick: Tick) -> tuple[Suite, Outcome]:
    """Raises: the errors of the suite."""
    with ray_session("local") if name in _IN_RAY else contextlib.nullcontext():
        suite = find_suite(name, SUITES)
        return suite, suite.measure(settings, tick)


def data_folder(given: Path | None) -> Path | None:
    """The folder named, the usual one if it exists, or none. Raises: ConfigError if the one named is no folder."""
    if given is not None and not given.is_dir():
        raise ConfigError(f"--data {given} is not a folder")
    return given or (DEFAULT_DATA if DEFAULT_DATA.is_dir() else None)


def commit() -> str:
    """The commit of this checkout, with "-dirty" if files differ from it; "unknown" outside a checkout."""
    command = ["git", "--no-optional-locks", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@contextlib.contextmanager
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


def save(suite: Suite, outcome: Outcome, json_path: Path | None, plots: Path | None) -> None:
    """Write the requested files. Raises: SaveError, ConfigError without matplotlib."""
    result = outcome.result
    if json_path is not None:
        try:
            json_path.parent.mkdir(parents=True, exist_ok=True)
            json_path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        except OSError as cause:
            raise SaveError(f"cannot write {json_path}: {cause.strerror}") from cause
    if plots is not None:
        title = f"{result['suite']}: {result['label']}, {result['threads']} threads"
        for path in write_figures(lambda: suite.draw(outcome, title), plots):
            _console.print(f"plot: {path}", highlight=False)


if __name__ == "__main__":
    app()

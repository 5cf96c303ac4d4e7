"""Measure ragspec by one of seven suites; every suite takes any target.

    python -m pipelines.benchmark --suite speculation --quick     drafts against plain decoding, transformers and llama.cpp
    python -m pipelines.benchmark --suite speculation --device stub    what a step costs the host, without a model
    python -m pipelines.benchmark --suite answers                 what answers, citations and abstentions are worth
    python -m pipelines.benchmark --suite iterative               retrieval while an answer is written, speculated
    python -m pipelines.benchmark --suite load                    the service under users
    python -m pipelines.benchmark --suite faults                  the service while processes die
    python -m pipelines.benchmark --suite gpu                     steps of models of 0.1 to 32 billion parameters
    python -m pipelines.benchmark --suite serve                   the engine under users on a GPU, without HTTP

The last line on stdout is one JSON object of flat keys; `--json FILE` holds the same and every row. Tables and progress go to
stderr. With `--resume`, rows that were measured at this commit with the same options are read back.
"""

import importlib
import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Literal

import typer
from transformers.utils import logging as transformers_logging

from pipelines.batch.ray_session import ray_session
from pipelines.benchmarks.harness import Result, Row, Run, Suite, draw, measure, tables
from ragspec.cli.terminal import cache_folder, loading, one_line, print_error, stderr_console
from ragspec.config import DEFAULT_TARGET, load_config
from ragspec.disk import make_folder, saving
from ragspec.errors import ConfigError, RagspecError
from ragspec.evaluation.measures import commit

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_DATA = ROOT.parent / "shared" / "data"
SUITES = ("speculation", "answers", "iterative", "load", "faults", "gpu", "serve")
"""Modules of `pipelines.benchmarks`, each with a constant `SUITE`."""
GPU_SUITES = ("gpu", "serve")
"""Need a CUDA device."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
_console = stderr_console()


@app.command(epilog="Example: ragspec bench --suite speculation --quick")
def main(
    suite: Annotated[str, typer.Option(help=f"What to measure: {', '.join(SUITES)}.")],
    quick: Annotated[bool, typer.Option(help="Short prompt lists, one run: at most 5 minutes.")] = False,
    target: Annotated[str, typer.Option(help="Model directory, name or GGUF file.")] = DEFAULT_TARGET,
    dtype: Annotated[
        Literal["float32", "bfloat16", "int8"] | None,
        typer.Option(help="Of the weights; default: as the target is served."),
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the result and its rows here, too.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Write the suite's plot as a PNG into this folder.")] = None,
    data: Annotated[Path | None, typer.Option(help="Data folder; by default shared/data beside the checkout.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the sampled runs.")] = 0,
    runs: Annotated[int | None, typer.Option(min=1, help="Their median counts; 3, or 1 with --quick.")] = None,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="At most so many prompts of each list.")] = None,
    peers: Annotated[bool, typer.Option(help="Run transformers and llama.cpp beside.")] = True,
    minutes: Annotated[float, typer.Option(min=0, help="Faults: further rounds until the time is over.")] = 0.0,
    heads: Annotated[Path | None, typer.Option(help="A folder with a folder for each trained head.")] = None,
    device: Annotated[
        Literal["stub"] | None, typer.Option(help="Speculation: the host's time a step, on a device of tables.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Read rows back that were measured at this commit.")] = False,
) -> None:
    """Run one suite and print its figures."""
    transformers_logging.disable_progress_bar()
    measured_commit = commit()  # Why now: the checkout may move on before a long run ends
    weights = (
        {"target.quantization": "int8"} if dtype == "int8" else {"target.quantization": "none", "target.dtype": dtype}
    )
    try:
        if suite not in SUITES:
            raise ConfigError(f"unknown suite {suite!r}; there are: {', '.join(SUITES)}")
        config = load_config(None, **{"target.model": target, **(weights if dtype else {})})
        with loading(_console, suite, logs_stages=True) as tick:
            run = Run(
                target=config.target,
                cache_dir=cache_folder() / "benchmark",
                data_dir=data_folder(data),
                quick=quick,
                num_runs=runs or (1 if quick else 3),
                num_prompts=num_prompts,
                seed=seed,
                peers=peers,
                minutes=minutes,
                heads=heads,
                device=device,
                tick=tick,
            )
            run = run.resumed(suite, measured_commit) if resume else run
            # Why before the import: Ray reads its environment then
            with ray_session("local") if suite == "iterative" else nullcontext():
                measured = suite_of(suite)
                result, rows = measure(measured, run, measured_commit)
        for table in tables(measured, result, rows):
            _console.print(table)
        print(json.dumps(result), flush=True)
        save(measured, result, rows, json_path, plots)
    except (RagspecError, FileNotFoundError) as error:
        print_error(one_line(error))
        raise typer.Exit(1) from error


def suite_of(name: str) -> Suite:
    suite: Suite = importlib.import_module(f"pipelines.benchmarks.{name}").SUITE
    return suite


def data_folder(given: Path | None) -> Path | None:
    """The named folder, the usual one if it exists, or none. Raises: ConfigError if the named one is no folder."""
    if given is not None and not given.is_dir():
        raise ConfigError(f"--data {given} is not a folder")
    return given or (DEFAULT_DATA if DEFAULT_DATA.is_dir() else None)


def save(suite: Suite, result: Result, rows: Sequence[Row], json_path: Path | None, plots: Path | None) -> None:
    """Write the requested files. Raises: SaveError, ConfigError without matplotlib."""
    if json_path is not None:
        with saving(json_path):
            make_folder(json_path.parent)
            json_path.write_text(json.dumps(result | {"rows": list(rows)}, indent=1) + "\n", encoding="utf-8")
    if plots is not None and suite.plot is not None:
        title = f"{suite.name}: {result['target']}, {result['dtype']}, {result['machine']}"
        with saving(plots):
            make_folder(plots)
            draw(suite.plot, rows, title).savefig(plots / f"{suite.name}.png", dpi=150)


if __name__ == "__main__":
    app()

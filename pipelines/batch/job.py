"""A batch job, whatever it does with its rows: input checked, rows through the stages of a task, results on the disk.

What a job promises: every id at most once in the output, whenever it is killed; a row's text depends on the job's seed and the
row alone; a row without a result has its reason; and where engines or index are lost for good, the job ends instead of writing
something else.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pipelines.batch.input import Checks, Span, check_rows, find_inputs
from pipelines.batch.machines import Machines, Used, used
from pipelines.batch.output import OutputFolder
from pipelines.batch.records import error_record, recorded_digest, recorded_fingerprint, recorded_id
from pipelines.batch.summary import Summary, say
from pipelines.batch.task import Asking, Task
from pipelines.batch.writing import Writing
from ragspec.config import PipelineConfig
from ragspec.core import SamplingParams
from ragspec.engine.target_files import files_digest
from ragspec.errors import ConfigError, ModelError, RagspecError

_console = Console(stderr=True)

_RAY_COPY = "working_dir_files"
"""The folder in which Ray unpacks the working directory of a job; it is removed with the job."""

_ERRORS_PER_WRITE = 1000


@dataclass(frozen=True, slots=True)
class Job:
    """What to do, how, and where the results go."""

    inputs: Path
    out: Path
    config: PipelineConfig
    seed: int
    resume: bool = True
    machines: Machines = field(default_factory=Machines)
    price_per_hour: float | None = None

    @property
    def defaults(self) -> SamplingParams:
        generation = self.config.generation
        return SamplingParams(
            max_tokens=generation.max_tokens, temperature=generation.temperature, top_p=generation.top_p
        )


def run(job: Job, task: Task, folder: OutputFolder | None = None) -> Summary:
    """The whole job; `folder`: that of the results, if it is open already, and then it stays so.

    Raises: ConfigError, InputError, StoreError, SaveError, EngineError.
    """
    check_places(job.inputs, job.out)
    with used(job.machines, job.config, task.sections) as machines, task.pinned(machines.config) as config:
        files = find_inputs(job.inputs)
        with nullcontext(folder) if folder else OutputFolder(job.out) as opened:
            return _run(replace(job, config=config), task, machines, files, opened)


def finish(job: Job, task: Task, folder: OutputFolder | None = None) -> Summary:
    """The job as a command: summary on stdout, everything else on stderr. Raises: typer.Exit."""
    try:
        summary = run(job, task, folder)
    except RagspecError as error:
        fail(error)
    print(json.dumps(summary.to_dict(job.out)), flush=True)
    return summary


def judge(summary: Summary, strict: bool) -> None:
    """Raises: typer.Exit where rows have failed and none may."""
    if strict and summary.num_failed:
        raise typer.Exit(1)


def fail(error: RagspecError) -> NoReturn:
    """One line that says why. Raises: typer.Exit."""
    say(_console, f"error: {error}", "red")
    raise typer.Exit(1) from error


def _run(job: Job, task: Task, machines: Used, files: list[Path], folder: OutputFolder) -> Summary:
    summary = Summary(task.rows, price_per_hour=job.price_per_hour)
    folder.open_job(_what_decides(job, task), job.resume)
    done = {}
    for record in folder.answers():
        done[recorded_id(record)] = recorded_digest(record)
        summary.know(recorded_fingerprint(record))
    checks = Checks(task.form, job.defaults, job.seed, done)
    spans = _spans(files, checks, folder, summary)
    summary.num_skipped, summary.ignored = checks.num_skipped, checks.ignored
    if spans:
        _answer(job, task, spans, machines, folder, summary)
    folder.finish()
    summary.show(_console, job.out / "errors.jsonl")
    return summary


def check_places(inputs: Path, out: Path) -> None:
    """Raises: ConfigError for an output that would be lost, or read by the next run."""
    if not out.is_absolute() and _RAY_COPY in Path.cwd().parts:
        raise ConfigError(f"--out {out} must be absolute in a submitted job: Ray removes the working directory")
    if inputs.is_dir() and out.resolve().is_relative_to(inputs.resolve()):
        raise ConfigError(f"--out {out} lies in the input folder {inputs}, and would become input")


def _what_decides(job: Job, task: Task) -> dict[str, Any]:
    """Everything but the rows that decides a text."""
    config = job.config
    return {
        "seed": job.seed,
        "target": config.target.model_dump(),
        **({"target_files": files} if (files := _files_of(config)) else {}),
        "max_kv_tokens": config.engine.max_kv_tokens,
        "generation": config.generation.model_dump(exclude={"seed"}),
        **task.what_decides(config),
    }


def _files_of(config: PipelineConfig) -> str:
    """What is in the target's folder; empty for a hub's name, which stands for what it stood for. Raises: ModelError."""
    folder = Path(config.target.model)
    try:
        return files_digest(folder, config.target.dtype, of_texts=True) if folder.is_dir() else ""
    except OSError as cause:
        raise ModelError(f"the files of the target {folder} cannot be read: {cause}") from cause


def _spans(files: list[Path], checks: Checks, folder: OutputFolder, summary: Summary) -> list[Span]:
    """What is to be answered; wrong rows are written down on the way."""
    spans: list[Span] = []
    bad: list[str] = []
    with _console.status("checking the input"):
        for found in check_rows(files, checks):
            if isinstance(found, Span):
                spans.append(found)
                continue
            bad.append(json.dumps(error_record(*found)))
            summary.num_failed += 1
            if len(bad) == _ERRORS_PER_WRITE:
                folder.append_errors(bad)
                bad = []
    folder.append_errors(bad)
    return spans


def _answer(job: Job, task: Task, spans: list[Span], machines: Used, folder: OutputFolder, summary: Summary) -> None:
    with _progress() as bar:
        shown = bar.add_task("starting the engines", total=sum(len(span.wanted) for span in spans), rates="")

        def tell(num_rows: int) -> None:
            rates = f"{summary.tokens_per_s:.0f} tokens/s, acceptance {summary.acceptance_length:.2f}"
            bar.update(shown, description="rows", advance=num_rows, rates=rates)

        with machines.serving(job.config) as served:
            stages = task.stages(served)
            summary.num_machines, summary.stages = served.num_machines, stages.metrics
            writing = Writing(task, Asking(job.config, job.defaults, job.seed), folder, summary, tell)
            asyncio.run(writing.run(spans, stages))


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), TextColumn("{task.fields[rates]}"), console=_console)

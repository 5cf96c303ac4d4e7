"""Answer a file of questions, on this machine or as a job on a Ray cluster; a killed job goes on where it stopped.

    python -m pipelines.batch_rag --input questions.jsonl --index index --out answers
    ray job submit --address http://127.0.0.1:8265 --working-dir . -- \
        python -m pipelines.batch_rag --input questions.jsonl --index /data/index --out /data/answers

Rows are `{"id": ..., "question": ...}`, with sampling parameters beside them if need be, or lines of an OpenAI batch file.
The seed of a row comes from the job's seed and the row's id, so neither order nor batches nor an interruption change a text.
The last line on stdout is one JSON object with what was done.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pipelines.batch_input import ROWS_PER_SPAN, Checks, Span, check_rows, find_inputs
from pipelines.batch_output import OutputFolder
from pipelines.batch_records import error_record, recorded_digest, recorded_fingerprint, recorded_id
from pipelines.batch_session import ray_session
from ragspec.config import PipelineConfig, load_config
from ragspec.core import SamplingParams
from ragspec.errors import ConfigError, RagspecError
from ragspec.retrieval.lease import lease
from ragspec.retrieval.manifest import read_generation

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_console = Console(stderr=True)

_RAY_COPY = "working_dir_files"
"""The folder in which Ray unpacks the working directory of a job; it is removed with the job."""

_ERRORS_PER_WRITE = 1000


@dataclass(frozen=True, slots=True)
class Job:
    """What to answer, how, and where the answers go."""

    inputs: Path
    out: Path
    config: PipelineConfig
    seed: int
    num_engines: int
    resume: bool
    address: str | None

    @property
    def defaults(self) -> SamplingParams:
        generation = self.config.generation
        return SamplingParams(
            max_tokens=generation.max_tokens, temperature=generation.temperature, top_p=generation.top_p
        )


@dataclass
class Summary:
    """Counts of one run; `num_skipped` rows were answered by earlier ones."""

    num_answered: int = 0
    num_failed: int = 0
    num_skipped: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    started_s: float = field(default_factory=time.monotonic)
    generating_s: float = 0.0
    fingerprints: set[str] = field(default_factory=set)
    ignored: set[str] = field(default_factory=set)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.generating_s if self.generating_s else 0.0

    @property
    def acceptance_length(self) -> float:
        return self.num_tokens / self.num_steps if self.num_steps else 0.0

    def to_dict(self, out: Path) -> dict[str, Any]:
        return {
            "out": str(out),
            "rows": self.num_answered + self.num_failed + self.num_skipped,
            "answered": self.num_answered,
            "failed": self.num_failed,
            "skipped": self.num_skipped,
            "tokens": self.num_tokens,
            "tokens_per_s": round(self.tokens_per_s, 1),
            "acceptance_length": round(self.acceptance_length, 2),
            "elapsed_s": round(time.monotonic() - self.started_s, 2),
            "system_fingerprints": sorted(self.fingerprints),
            "ignored_columns": sorted(self.ignored),
        }


@app.command()
def main(
    inputs: Annotated[
        Path, typer.Option("--input", help="A .jsonl or .parquet file of questions, or a folder of them.")
    ],
    out: Annotated[Path, typer.Option(help="The folder of the answers; in a submitted job an absolute path.")],
    index: Annotated[Path | None, typer.Option(help="The index's folder.")] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML configuration; options win.")] = None,
    target: Annotated[str | None, typer.Option(help="The model that answers: a folder or a Hugging Face name.")] = None,
    seed: Annotated[int | None, typer.Option(help="Rows get seeds made from this and their ids.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, for rows that do not say.")] = None,
    temperature: Annotated[float | None, typer.Option(help="For rows that do not say.")] = None,
    top_p: Annotated[float | None, typer.Option(help="For rows that do not say.")] = None,
    passages: Annotated[int | None, typer.Option(help="Passages given to the target for each question.")] = None,
    engines: Annotated[int, typer.Option(min=1, help="Engines, each in a process of its own.")] = 1,
    resume: Annotated[bool, typer.Option(help="Keep the answers in the folder, and add those that miss.")] = True,
    strict: Annotated[bool, typer.Option(help="Exit with 1 if any row has no answer.")] = False,
    address: Annotated[
        str | None, typer.Option(help="A Ray cluster; default RAY_ADDRESS, else one of its own.")
    ] = None,
) -> None:
    """Answer every row of a file; wrong rows go to errors.jsonl with the reason, and the job goes on."""
    overrides = {
        "retriever.index_dir": str(index) if index else None,
        "retriever.num_passages": passages,
        "target.model": target,
        "generation.seed": seed,
        "generation.max_tokens": max_tokens,
        "generation.temperature": temperature,
        "generation.top_p": top_p,
    }
    try:
        settings = load_config(config, **overrides)
        job = Job(inputs, out, settings, settings.generation.seed or 0, engines, resume, address)
        summary = run(job)
    except RagspecError as error:
        _say(f"error: {error}", "red")
        raise typer.Exit(1) from error
    print(json.dumps(summary.to_dict(out)), flush=True)
    if strict and summary.num_failed:
        raise typer.Exit(1)


def run(job: Job) -> Summary:
    """The whole job. Raises: ConfigError, InputError, StoreError, SaveError, EngineError."""
    _check_places(job)
    with lease(
        Path(job.config.retriever.index_dir)
    ) as pointer:  # Why: all workers answer from one generation, to the end
        return _run(replace(job, config=_pinned(job.config, pointer)))


def _run(job: Job) -> Summary:
    files = find_inputs(job.inputs)
    settings = _what_decides(job)
    summary = Summary()
    with OutputFolder(job.out) as folder:
        folder.open_job(settings, job.resume)
        done = {}
        for record in folder.answers():
            done[recorded_id(record)] = recorded_digest(record)
            summary.fingerprints.add(recorded_fingerprint(record))
        checks = Checks(job.defaults, job.seed, done)
        spans = _spans(files, checks, folder, summary)
        summary.num_skipped, summary.ignored = checks.num_skipped, checks.ignored
        if spans:
            _answer(job, spans, folder, summary)
        folder.finish()
    _warn(summary, job)
    return summary


def _check_places(job: Job) -> None:
    if not job.config.retriever.index_dir:
        raise ConfigError("no index: name its folder with --index, or as retriever.index_dir in the configuration")
    if not job.out.is_absolute() and _RAY_COPY in Path.cwd().parts:
        raise ConfigError(f"--out {job.out} must be absolute in a submitted job: Ray removes the working directory")
    if job.inputs.is_dir() and job.out.resolve().is_relative_to(job.inputs.resolve()):
        raise ConfigError(f"--out {job.out} lies in the input folder {job.inputs}, and would become input")


def _what_decides(job: Job) -> dict[str, Any]:
    """Everything but the rows that decides a text."""
    config = job.config
    _, manifest = read_generation(Path(config.retriever.index_dir), config.retriever.pointer)
    return {
        "seed": job.seed,
        "target": config.target.model_dump(),
        "encoder": config.encoder.model,
        "retriever": config.retriever.model_dump(exclude={"index_dir", "pointer"}),
        "max_kv_tokens": config.engine.max_kv_tokens,
        "generation": config.generation.model_dump(exclude={"seed"}),
        "index_generation": manifest.generation_id,
    }


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


def _answer(job: Job, spans: list[Span], folder: OutputFolder, summary: Summary) -> None:
    """Why imports in here: they take seconds, a finished job needs none of them, and Ray wants its session set up first."""
    with _progress() as bar, ray_session(job.address):
        from pipelines.batch_worker import JobParams, SpanWorker
        from ragspec.cluster.pool import PoolSize, through_pool

        task = bar.add_task("starting the engines", total=sum(len(span.wanted) for span in spans), rates="")
        size = PoolSize(job.num_engines, max(1, job.config.engine.max_running // ROWS_PER_SPAN))
        worker_args = (_with_threads(job), JobParams(job.defaults, job.seed))
        begin = time.monotonic()
        for results in through_pool([asdict(span) for span in spans], SpanWorker, worker_args, size):
            for failed, lines in _by_failure(results):
                (folder.append_errors if failed else folder.append)(lines)
            _count(summary, results, time.monotonic() - begin)
            rates = f"{summary.tokens_per_s:.0f} tokens/s, acceptance {summary.acceptance_length:.2f}"
            bar.update(task, description="rows", advance=results.num_rows, rates=rates)


def _by_failure(results: pa.Table) -> Iterator[tuple[bool, list[str]]]:
    rows = results.select(["failed", "line"]).to_pylist()
    for failed in (False, True):
        if lines := [row["line"] for row in rows if row["failed"] is failed]:
            yield failed, lines


def _count(summary: Summary, results: pa.Table, generating_s: float) -> None:
    num_failed = sum(results["failed"].to_pylist())
    summary.num_failed += num_failed
    summary.num_answered += results.num_rows - num_failed
    summary.num_tokens += sum(results["num_tokens"].to_pylist())
    summary.num_steps += sum(results["num_steps"].to_pylist())
    summary.fingerprints.update(name for name in results["system_fingerprint"].to_pylist() if name)
    summary.generating_s = generating_s


def _with_threads(job: Job) -> PipelineConfig:
    """Engines beside each other share the processors, unless the configuration says how many threads each has."""
    engine = job.config.engine
    if engine.num_threads is not None or job.num_engines == 1:
        return job.config
    num_threads = max(1, len(os.sched_getaffinity(0)) // job.num_engines)
    return job.config.model_copy(update={"engine": engine.model_copy(update={"num_threads": num_threads})})


def _pinned(config: PipelineConfig, pointer: str) -> PipelineConfig:
    return config.model_copy(update={"retriever": config.retriever.model_copy(update={"pointer": pointer})})


def _warn(summary: Summary, job: Job) -> None:
    if summary.num_failed:
        _say(f"{summary.num_failed} rows have no answer; the reasons are in {job.out / 'errors.jsonl'}", "yellow")
    if summary.ignored:
        _say(
            f"these columns are no sampling parameters and were ignored: {', '.join(sorted(summary.ignored))}", "yellow"
        )
    if len(summary.fingerprints) > 1:
        _say(
            "answers come from machines whose numerics differ; a repetition elsewhere may differ in near ties", "yellow"
        )


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), TextColumn("{task.fields[rates]}"), console=_console)


def _say(text: str, style: str) -> None:
    _console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    app()

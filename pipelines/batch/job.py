"""A batch job: rows checked, taken through the stages of a task, and written as they finish; a killed job resumes.

Promises: every id is in the output at most once, whenever the job is killed. A row's text depends on the job's seed and the row
alone. A row without a result has its reason in errors.jsonl. If engines or index are lost for good, the job ends and writes
nothing wrong.

Why not Ray Data: it would replace the two readers in `input`, about 20 lines, and little else.
- Reading: a block has one schema, so one bad line fails its file, and no row has the line number that errors.jsonl names.
- Writing: results reach the disk block by block, so a kill loses finished rows; here each finished row is on the disk.
- Checkpoint: Ray Data skips rows by id alone, so an edited question keeps its old answer; here the request's digest decides.
- Back-pressure: `Stages` has bounded queues already, and the pipeline API shares them. The engine batches rows continuously.
- A job of one engine runs in its own process, without Ray.

    >>> summary = run_job(Job(Path("questions.jsonl"), Path("answers"), config, seed=0), RagTask())
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pipelines.batch.backend import Backend, BackendSpec, open_backend
from pipelines.batch.input import JobInput, find_inputs
from pipelines.batch.output import OutputFolder
from pipelines.batch.records import error_record, recorded_row
from pipelines.batch.summary import Summary
from pipelines.batch.task import RowLoop, Task
from ragspec.config import PipelineConfig, PromptConfig, TargetConfig
from ragspec.core import SamplingParams
from ragspec.engine.checkpoints.target_files import files_digest, target_folder, with_known_weights
from ragspec.errors import ConfigError, ModelError

_console = Console(stderr=True)

_RAY_WORKING_DIR = "working_dir_files"
"""The folder in which Ray unpacks the working directory of a submitted job; Ray removes it with the job."""

_ERRORS_PER_WRITE = 1000


@dataclass(frozen=True, slots=True)
class Job:
    """What to do, how, and where the results go. `price_per_hour`: of one machine."""

    inputs: Path
    out: Path
    config: PipelineConfig
    seed: int
    resume: bool = True
    backend: BackendSpec = field(default_factory=BackendSpec)
    price_per_hour: float | None = None

    @property
    def defaults(self) -> SamplingParams:
        """The parameters of rows that have none."""
        return SamplingParams(**self.config.generation.model_dump(exclude={"seed"}))


def run_job(job: Job, task: Task, output: OutputFolder | None = None) -> Summary:
    """The whole job. `output`: the folder of the results if the caller has opened it; it is left open.

    Raises: ConfigError, InputError, StoreError, SaveError, EngineError.
    """
    check_paths(job.inputs, job.out)
    with (
        open_backend(job.backend, job.config, task.config_sections) as backend,
        task.pinned_config(backend.config) as config,
    ):
        files = find_inputs(job.inputs)
        with nullcontext(output) if output else OutputFolder(job.out) as opened:
            return _run(job, task, backend._replace(config=config), files, opened)


def run_command(job: Job, task: Task, output: OutputFolder | None = None) -> Summary:
    """Like `run_job`, with the summary on stdout and everything else on stderr."""
    summary = run_job(job, task, output)
    print(json.dumps(summary.to_dict(job.out)), flush=True)
    return summary


def check_paths(inputs: Path, out: Path) -> None:
    """Raises: ConfigError for an output folder that Ray would remove, or that the next run would read as input."""
    if not out.is_absolute() and _RAY_WORKING_DIR in Path.cwd().parts:
        raise ConfigError(f"--out {out} must be absolute in a submitted job: Ray removes the working directory")
    if inputs.is_dir() and out.resolve().is_relative_to(inputs.resolve()):
        raise ConfigError(f"--out {out} lies in the input folder {inputs}, and would become input")


def _run(job: Job, task: Task, backend: Backend, files: list[Path], output: OutputFolder) -> Summary:
    summary = Summary(task.row_noun, price_per_hour=job.price_per_hour)
    begun = output.begun() if job.resume else {}
    config = task.config_of_begun(backend.config, begun)
    backend = backend._replace(config=config.model_copy(update={"target": _target_of_begun(config.target, begun)}))
    output.open_job(_text_settings(job.seed, task, backend.config), job.resume)
    answered = {}
    for record in output.answers():
        recorded = recorded_row(record)
        answered[recorded.id] = recorded.digest
        summary.add_fingerprint(recorded.fingerprint)
    rows = JobInput(files, task.schema, job.defaults, job.seed, answered)
    summary.num_failed = _check(rows, output)
    summary.num_skipped, summary.ignored_columns = rows.num_skipped, rows.ignored_columns
    if rows.num_pending:
        _answer(task, rows, backend, output, summary)
    output.finish()
    summary.show(_console, job.out / "errors.jsonl")
    return summary


def _target_of_begun(target: TargetConfig, begun: Mapping[str, Any]) -> TargetConfig:
    """The target with its weights' type settled: where the configuration leaves it open, the type that the job began with.

    Jobs in float weights name no type. Those from before int8 was automatic for every model go on in float32.
    """
    if begun and target.quantization == "auto" and target.backend_name == "cpu":
        weights = begun.get("weights", "none")
        if weights == "none" and target.max_weight_bytes:
            raise ConfigError("max_weight_bytes needs int8 weights, and this job was begun in float weights")
        return target.model_copy(update={"quantization": weights})
    return with_known_weights(target)


_NOT_OF_TEXTS = {
    "adapter",
    "quantization",
    "kv_cache_dtype",
    "cache_dir",
    "device",
    "backend",
    "max_weight_bytes",
    "kv_dir",
}
"""The digest of the files stands for the adapter; the others are told where they change numerics."""
_FIRST_NUMERICS = {"float32", "bfloat16"}
"""Jobs from before there were others name none."""


_WHERE_FREE = {"verbatim_quotes"}
"""Jobs from before quotes were held to their passages do not name it."""


def _text_settings(seed: int, task: Task, config: PipelineConfig) -> dict[str, Any]:
    """Every setting that decides a text; `job.json` holds them."""
    folder, numerics = Path(target_folder(config.target)), config.target.numerics_dtype
    is_free = not config.generation.verbatim_quotes
    try:  # a model hub's name has no digest
        digest = files_digest(folder, config.target.dtype, of_texts=True) if folder.is_dir() else ""
    except OSError as cause:
        raise ModelError(f"the files of the target {folder} cannot be read: {cause}") from cause
    return {
        "seed": seed,
        "target": config.target.model_dump(exclude=_NOT_OF_TEXTS),
        **({"weights": "int8"} if config.target.is_int8 else {}),
        **({"numerics": numerics} if numerics not in _FIRST_NUMERICS else {}),
        **({"target_files": digest} if digest else {}),
        **_words(config.prompts),
        "max_kv_tokens": config.engine.max_kv_tokens,
        "generation": config.generation.model_dump(exclude={"seed", *(_WHERE_FREE if is_free else ())}),
        **task.text_settings(config),
    }


def _words(prompts: PromptConfig) -> dict[str, Any]:
    """The prompts' own words. Why without the layout: jobs from before there were two name none."""
    words = prompts.model_dump(exclude_defaults=True, exclude={"layout"})
    names = ("instruction", "question", "grammar")
    return {"prompts": dict.fromkeys(names, "") | words} if words else {}


def _check(rows: JobInput, output: OutputFolder) -> int:
    """Writes the wrong rows to errors.jsonl; returns their number."""
    num_bad = 0
    with _console.status("checking the input"):
        bad = (json.dumps(error_record(*found)) for found in rows.check())
        while lines := list(itertools.islice(bad, _ERRORS_PER_WRITE)):
            output.append_errors(lines)
            num_bad += len(lines)
    return num_bad


def _answer(task: Task, rows: JobInput, backend: Backend, output: OutputFolder, summary: Summary) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rates = TextColumn("{task.fields[rates]}")
    with Progress(*columns, TimeRemainingColumn(), rates, console=_console) as bar:
        shown = bar.add_task("starting the engines", total=rows.num_pending, rates="")

        def on_written(num_rows: int) -> None:
            speed = f"{summary.tokens_per_s:.0f} tokens/s, acceptance {summary.acceptance_length:.2f}"
            bar.update(shown, description="rows", advance=num_rows, rates=speed)

        with backend.load(backend.config) as runtime:
            stages = task.stages(runtime)
            summary.num_machines, summary.stages = runtime.num_machines, stages.metrics
            asyncio.run(RowLoop(task, backend.config, output, summary, on_written).run(rows.pending(), stages))

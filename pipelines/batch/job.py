"""A batch job: rows checked, taken through the stages of a task, and written as they finish; a killed job resumes. And its
report: counts, speed, cost, and the work of every stage.

Promises: every id is in the output at most once, whenever the job is killed. A row's text depends on the job's seed and the row
alone. A row without a result has its reason in errors.jsonl. If engines or index are lost for good, the job ends and writes
nothing wrong. Owns the last line on stdout and the report on stderr.

Why not Ray Data: it would replace the two readers in `rows`, about 20 lines, and little else.
- Reading: a block has one schema, so one bad line fails its file, and no row has the line number that errors.jsonl names.
- Writing: results reach the disk block by block, so a kill loses finished rows; here each finished row is on the disk.
- Checkpoint: Ray Data skips rows by id alone, so an edited question keeps its old answer; here the request's digest decides.
- Back-pressure: `Stages` has bounded queues already, and the pipeline API shares them. The engine batches rows continuously.
- A job of one engine runs in its own process, without Ray.

    >>> summary = run_job(Job(Path("questions.jsonl"), Path("answers"), config, seed=0), RagTask())
"""

import asyncio
import itertools
import json
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipelines.batch.backend import Backend, BackendSpec, Runtime, open_backend
from pipelines.batch.output import OutputFolder
from pipelines.batch.rows import (
    JobInput,
    Row,
    RowLocation,
    RowResult,
    RowSchema,
    error_record,
    find_inputs,
    output_record,
    recorded_row,
)
from ragspec.cli.terminal import loading, stderr_console
from ragspec.config import PipelineConfig, PromptConfig, TargetConfig
from ragspec.core import GenerationStats, SamplingParams, Say
from ragspec.engine.checkpoints.target_files import files_digest, target_folder
from ragspec.errors import ConfigError, EngineError, InputError, ModelError, PromptTooLong, RagspecError
from ragspec.rag.pipeline_stages import HasId, ItemResult, StagedPipeline, StageMetrics
from ragspec.rag.wording import FORMER_RULES, TextRules

_HOUR_S = 3600.0


@dataclass
class Summary:
    """Counts of one run; `num_skipped` rows were answered by earlier runs. `row_noun` names the rows: questions, texts.

    `generated`: the sum over this run's rows.
    `generating_s` begins when engines and index are loaded, the whole run with the command. `price_per_hour`: of one machine.
    `sentences`: of answers, by label.
    """

    row_noun: str
    num_machines: int = 1
    price_per_hour: float | None = None
    num_answered: int = 0
    num_failed: int = 0
    num_skipped: int = 0
    generated: GenerationStats = field(default_factory=GenerationStats)
    started_s: float = field(default_factory=time.monotonic)
    generating_s: float = 0.0
    stages: Sequence[StageMetrics] = ()
    fingerprints: set[str] = field(default_factory=set)
    ignored_columns: set[str] = field(default_factory=set)
    sentences: Counter[str] = field(default_factory=Counter)

    def add_answer(self, stats: GenerationStats, labels: Sequence[str] = ()) -> None:
        self.num_answered += 1
        self.sentences.update(labels)
        self.generated.add(stats)
        self.add_fingerprint(stats.system_fingerprint)

    def add_fingerprint(self, fingerprint: str) -> None:
        """An empty fingerprint belongs to a row that needed no target."""
        if fingerprint:
            self.fingerprints.add(fingerprint)

    def to_dict(self, out: Path) -> dict[str, Any]:
        """Plain values, for JSON. Machine seconds and cost are None if this run answered no row."""
        elapsed_s = time.monotonic() - self.started_s
        tokens, generating_s = self.generated.num_output_tokens, self.generating_s or float("inf")
        rows_per_s = self.num_answered / generating_s
        machine_s = cost = None
        if self.num_answered:
            machine_s = 1000.0 * self.num_machines * elapsed_s / self.num_answered
            cost = None if self.price_per_hour is None else round(machine_s / _HOUR_S * self.price_per_hour, 4)
            machine_s = round(machine_s, 2)
        return {
            "out": str(out),
            "rows": self.num_answered + self.num_failed + self.num_skipped,
            "answered": self.num_answered,
            "failed": self.num_failed,
            "skipped": self.num_skipped,
            "tokens": tokens,
            "tokens_per_s": round(tokens / generating_s, 1),
            "rows_per_s": round(rows_per_s, 3),
            f"{self.row_noun}_per_hour": round(rows_per_s * _HOUR_S),
            "acceptance_length": round(self.generated.acceptance_length, 2),
            "replays": self.generated.num_replays,
            "near_ties": self.generated.num_near_ties,
            "sentences": dict(self.sentences),
            "elapsed_s": round(elapsed_s, 2),
            "generating_s": round(self.generating_s, 2),
            "machines": self.num_machines,
            f"machine_s_per_1k_{self.row_noun}": machine_s,
            f"cost_per_1k_{self.row_noun}": cost,
            "stages": [stage.to_dict() for stage in self.stages],
            "system_fingerprints": sorted(self.fingerprints),
            "ignored_columns": sorted(self.ignored_columns),
        }

    def show(self, console: Console, errors: Path) -> None:
        """The stages as a table, with units in its head, and warnings of one line each."""
        if self.num_answered:
            table = Table("stage", "items", "failed", "batches", "busy s", "waiting s", "blocked s", "queue, most")
            for stage in self.stages:
                counts = (str(count) for count in (stage.num_items, stage.num_failed, stage.num_batches))
                times = (f"{seconds:.1f}" for seconds in (stage.busy_s, stage.waiting_s, stage.blocked_s))
                table.add_row(stage.name, *counts, *times, str(stage.max_depth))
            console.print(table)
        warnings = []
        if self.num_failed:
            warnings.append(f"{self.num_failed} rows have no answer; the reasons are in {errors}")
        if self.ignored_columns:
            columns = ", ".join(sorted(self.ignored_columns))
            warnings.append(f"these columns are no sampling parameters and were ignored: {columns}")
        if len(self.fingerprints) > 1:
            warnings.append(
                "the numerics of the answers' machines differ; a repetition elsewhere may differ in near ties"
            )
        for warning in warnings:
            console.print(Text(warning, "yellow"), soft_wrap=True)


_console = stderr_console()

_RAY_WORKING_DIR = "working_dir_files"
"""The folder in which Ray unpacks the working directory of a submitted job; Ray removes it with the job."""

_ERRORS_PER_WRITE = 1000

_CHANGES_NO_TEXT = set("adapter quantization kv_cache_dtype cache_dir device backend max_weight_bytes kv_dir".split())
"""Settings of the target that job.json leaves out. The digest of the files stands for the adapter; numerics and weights have
entries of their own."""

_UNNAMED_NUMERICS = {"float32", "bfloat16"}
"""Jobs from before there were other numerics name none."""


class Task(ABC):
    """What a job does with a row. A subclass imports models and indexes where it uses them, so that creating a task is fast."""

    schema: ClassVar[RowSchema]
    row_noun: ClassVar[str]
    """What a row is, in the plural; part of the summary's field names."""
    config_sections: ClassVar[tuple[str, ...]]
    """The parts of the configuration that decide a text."""

    @abstractmethod
    def pinned_config(self, config: PipelineConfig) -> AbstractContextManager[PipelineConfig]:
        """The configuration with its index pinned to one generation for as long as the job runs.

        Raises: ConfigError, StoreError.
        """

    def config_of_begun(self, config: PipelineConfig, begun: Mapping[str, Any]) -> PipelineConfig:
        """The configuration with what a begun job of these settings was made with, where only the defaults have changed since."""
        return config

    @abstractmethod
    def text_settings(self, config: PipelineConfig) -> dict[str, Any]:
        """Every setting that decides a text, except rows, seed, target, rules and sampling parameters; for job.json."""

    def rules(self, config: PipelineConfig, begun: Mapping[str, Any]) -> TextRules | None:
        """By which the texts are made; None where no such rule decides them. Raises: ConfigError, ModelError."""
        return None

    @abstractmethod
    def stages(self, runtime: Runtime) -> StagedPipeline:
        """The stages from a request to the value that `row_result` takes."""

    @abstractmethod
    def request(self, row: Row, params: SamplingParams, config: PipelineConfig) -> HasId:
        """The row as the stages take it; its id is the row's."""

    @abstractmethod
    def row_result(self, finished: Any) -> RowResult:
        """Raises: EngineError if the value must not be written because part of it is missing."""


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
        return SamplingParams(**self.config.generation.model_dump(exclude={"seed", "passage_order"}))


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
    if begun and "passage_order" not in begun.get("generation", {}):  # begun before there was another order, or by rank
        by_rank = config.generation.model_copy(update={"passage_order": "rank"})
        config = config.model_copy(update={"generation": by_rank})
    target = _target_of_begun(config.target, begun)
    if target.dtype == "bfloat16" and not job.backend.cluster:  # job.json names the type that computes
        from ragspec.engine.target import with_available_dtype  # Why here: it imports torch

        target = with_available_dtype(target)
    backend = backend._replace(config=config.model_copy(update={"target": target}))
    rules = task.rules(backend.config, begun)
    settings = _text_settings(job.seed, task, backend.config, rules)
    if "rules" in begun:  # in the words of its version, which may have had fewer
        settings["rules"] = begun["rules"]
    output.open_job(settings, job.resume)
    answered = {}
    for record in output.answers():
        recorded = recorded_row(record)
        answered[recorded.id] = recorded.digest
        summary.add_fingerprint(recorded.fingerprint)
    rows = JobInput(files, task.schema, job.defaults, job.seed, answered)
    summary.num_failed = _check(rows, output)
    summary.num_skipped, summary.ignored_columns = rows.num_skipped, rows.ignored_columns
    if rows.num_pending:
        _answer(task, rules, rows, backend, output, summary)
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
    return target


def _text_settings(seed: int, task: Task, config: PipelineConfig, rules: TextRules | None) -> dict[str, Any]:
    """Every setting that decides a text; `job.json` holds them."""
    folder, numerics = Path(target_folder(config.target)), config.target.numerics_dtype
    # Jobs from before quotes were held to their passages, or passages had another order, do not name these settings
    unnamed = {"verbatim_quotes": False, "passage_order": "rank"}
    not_named = {"seed", *(name for name, value in unnamed.items() if getattr(config.generation, name) == value)}
    try:  # a model hub's name has no digest
        digest = files_digest(folder, config.target.dtype, of_texts=True) if folder.is_dir() else ""
    except OSError as cause:
        raise ModelError(f"the files of the target {folder} cannot be read: {cause}") from cause
    return {
        "seed": seed,
        "target": config.target.model_dump(exclude=_CHANGES_NO_TEXT),
        **({"weights": "int8"} if config.target.is_int8 else {}),
        **({"numerics": numerics} if numerics not in _UNNAMED_NUMERICS else {}),
        **({"target_files": digest} if digest else {}),
        **_words(config.prompts),
        "max_kv_tokens": config.engine.max_kv_tokens,
        "generation": config.generation.model_dump(exclude=not_named),
        **({"rules": rules.to_json()} if rules and rules != FORMER_RULES else {}),
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
    with loading(_console, "checking the input"):
        bad = (json.dumps(error_record(*found)) for found in rows.check())
        while lines := list(itertools.islice(bad, _ERRORS_PER_WRITE)):
            output.append_errors(lines)
            num_bad += len(lines)
    return num_bad


def _answer(
    task: Task, rules: TextRules | None, rows: JobInput, backend: Backend, output: OutputFolder, summary: Summary
) -> None:
    with loading(_console, "starting the engines", logs_stages=True) as say, backend.load(backend.config) as runtime:
        stages = task.stages(runtime if rules is None else runtime._replace(prompts=runtime.prompts.by(rules)))
        summary.num_machines, summary.stages = runtime.num_machines, stages.metrics
        asyncio.run(_RowLoop(task, backend.config, output, summary, say).run(rows, stages))


class _RowLoop:
    """Owns the rows in flight. A row is read when the first stage has room, and written as soon as it is finished."""

    def __init__(self, task: Task, config: PipelineConfig, output: OutputFolder, summary: Summary, say: Say) -> None:
        self._task, self._config = task, config
        self._output, self._summary, self._say = output, summary, say
        self._in_flight: dict[str, tuple[RowLocation, Row]] = {}

    async def run(self, rows: JobInput, stages: StagedPipeline) -> None:
        """Raises: EngineError when engines or index are lost for good, SaveError, InputError if the input was changed."""
        summary, begin = self._summary, time.monotonic()
        num_failed_before = summary.num_failed
        async with aclosing(stages.run(self._requests(rows))) as batches:
            async for batch in batches:
                await asyncio.to_thread(self._write, batch)  # Why a thread: a slow disk must not stop the event loop
                summary.generating_s = time.monotonic() - begin
                num_done = summary.num_answered + summary.num_failed - num_failed_before
                self._say("answering rows", num_done, rows.num_pending)

    def _requests(self, rows: JobInput) -> Iterator[HasId]:
        for location, row, params in rows.pending():
            self._in_flight[row.id] = location, row
            yield self._task.request(row, params, self._config)

    def _write(self, batch: Sequence[ItemResult[Any]]) -> None:
        """Writes every row of the batch that can be written before it raises the first error that ends the job."""
        lines: list[str] = []
        failed: list[str] = []
        fatal: Exception | None = None
        for finished in batch:
            location, row = self._in_flight.pop(finished.id)
            try:
                lines.append(self._output_line(row, finished))
            except Exception as error:  # Why all: one row must not end the job, now and at every resume
                if _is_fatal(error):
                    fatal = fatal or error
                else:
                    failed.append(_error_line(location, row, error))
        if lines:
            self._output.append(lines)
        if failed:
            self._summary.num_failed += len(failed)
            self._output.append_errors(failed)
        if fatal is not None:
            raise EngineError(f"the job stopped: {fatal}. What was finished is kept; run it again to go on") from fatal

    def _output_line(self, row: Row, finished: ItemResult[Any]) -> str:
        """Raises: the row's error."""
        result = self._task.row_result(finished.result())
        record = output_record(row, result, Path(self._config.target.model).name, int(time.time()))
        line = json.dumps(record, ensure_ascii=False)
        self._summary.add_answer(result.stats, result.labels)
        return line


def _is_fatal(error: Exception) -> bool:
    """Whether engines or index are lost, so that the following rows would fail too."""
    return isinstance(error, RagspecError) and not isinstance(error, InputError) and type(error) is not EngineError


def _error_line(location: RowLocation, row: Row, error: Exception) -> str:
    code = "invalid_request" if isinstance(error, InputError) else "engine_error"
    if isinstance(error, PromptTooLong):
        code = "context_length_exceeded"
    record = error_record(location, code, str(error), {"custom_id" if row.openai else "id": row.id})
    return json.dumps(record, ensure_ascii=False)

"""The part in which batch jobs differ (`Task`), and the loop that takes rows through a task's stages and onto the disk."""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from pathlib import Path
from typing import Any, ClassVar

from pipelines.batch.backend import Runtime
from pipelines.batch.input import CheckedRow, RowLocation
from pipelines.batch.output import OutputFolder
from pipelines.batch.records import RowResult, error_record, output_record
from pipelines.batch.rows import Row, RowSchema
from pipelines.batch.summary import Summary
from ragspec.config import PipelineConfig
from ragspec.core import SamplingParams
from ragspec.errors import EngineError, InputError, PromptTooLong, RagspecError
from ragspec.rag.pipeline_stages import HasId, ItemResult, StagedPipeline


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
        """Every setting that decides a text, except rows, seed, target and sampling parameters; plain values for job.json."""

    @abstractmethod
    def stages(self, runtime: Runtime) -> StagedPipeline:
        """The stages from a request to the value that `row_result` takes."""

    @abstractmethod
    def request(self, row: Row, params: SamplingParams, config: PipelineConfig) -> HasId:
        """The row as the stages take it; its id is the row's."""

    @abstractmethod
    def row_result(self, finished: Any) -> RowResult:
        """Raises: EngineError if the value must not be written because part of it is missing."""


class RowLoop:
    """Owns the rows in flight. A row is read when the first stage has room, and written as soon as it is finished."""

    def __init__(
        self,
        task: Task,
        config: PipelineConfig,
        output: OutputFolder,
        summary: Summary,
        on_written: Callable[[int], None],
    ) -> None:
        """`on_written` gets the number of rows after each write."""
        self._task, self._config = task, config
        self._output, self._summary, self._on_written = output, summary, on_written
        self._in_flight: dict[str, tuple[RowLocation, Row]] = {}

    async def run(self, rows: Iterable[CheckedRow], stages: StagedPipeline) -> None:
        """Raises: EngineError when engines or index are lost for good, SaveError, InputError if the input was changed."""
        begin = time.monotonic()
        async with aclosing(stages.run(self._requests(rows))) as batches:
            async for batch in batches:
                await asyncio.to_thread(self._write, batch)  # Why a thread: a slow disk must not stop the event loop
                self._summary.generating_s = time.monotonic() - begin
                self._on_written(len(batch))

    def _requests(self, rows: Iterable[CheckedRow]) -> Iterator[HasId]:
        for location, row, params in rows:
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
        line = json.dumps(
            output_record(row, result, Path(self._config.target.model).name, int(time.time())), ensure_ascii=False
        )
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

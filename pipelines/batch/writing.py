"""Rows through the stages of a job and onto the disk, as they finish."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from pipelines.batch.input import Place, Span, read_span
from pipelines.batch.output import OutputFolder
from pipelines.batch.records import error_record, output_record
from pipelines.batch.rows import Row
from pipelines.batch.summary import Summary
from pipelines.batch.task import Asking, Task
from ragspec.errors import EngineError, InputError, PromptTooLong, RagspecError
from ragspec.rag.pipeline_stages import Finished, Named, Stages


class Writing:
    """Owns the rows under way: read a span at a time as the stages take them, forgotten once they are written down."""

    def __init__(
        self, task: Task, asking: Asking, folder: OutputFolder, summary: Summary, tell: Callable[[int], None]
    ) -> None:
        """`tell` hears how many rows have just been written."""
        self._task, self._asking = task, asking
        self._folder, self._summary, self._tell = folder, summary, tell
        self._model = Path(asking.config.target.model).name
        self._open: dict[str, tuple[Place, Row]] = {}

    async def run(self, spans: Sequence[Span], stages: Stages) -> None:
        """To the last row.

        Raises: EngineError when engines or index are lost for good, SaveError, InputError if a file was changed meanwhile.
        """
        begin = time.monotonic()
        async with aclosing(stages.run(self._asked(spans))) as batches:
            async for batch in batches:
                await asyncio.to_thread(self._write, batch)  # Why: the disk may be slow, and engines go on meanwhile
                self._summary.generating_s = time.monotonic() - begin
                self._tell(len(batch))

    def _asked(self, spans: Sequence[Span]) -> Iterator[Named]:
        for span in spans:
            for place, row in read_span(span, self._task.form):
                self._open[row.id] = place, row
                yield self._task.asked(row, self._asking)

    def _write(self, batch: Sequence[Finished[Any]]) -> None:
        """All that can be written is, also when one of the batch ends the job."""
        lines: list[str] = []
        failed: list[str] = []
        last: Exception | None = None
        for finished in batch:
            place, row = self._open.pop(finished.id)
            try:
                lines.append(self._line(row, finished))
            except Exception as error:  # Why all: one row must not end the job, now and at every resume
                if _ends_job(error):
                    last = last or error
                else:
                    failed.append(_failure(place, row, error))
        if lines:
            self._folder.append(lines)
        if failed:
            self._summary.num_failed += len(failed)
            self._folder.append_errors(failed)
        if last is not None:
            raise EngineError(f"the job stopped: {last}. What was finished is kept; run it again to go on") from last

    def _line(self, row: Row, finished: Finished[Any]) -> str:
        """Raises: what the row met on its way."""
        written = self._task.written(finished.result())
        line = _json(output_record(row, written, self._model, int(time.time())))
        self._summary.count(written.stats)
        return line


def _ends_job(error: Exception) -> bool:
    """Whether it is not the row's: engines or index are gone, and the rows after it would meet the same."""
    return isinstance(error, RagspecError) and not isinstance(error, InputError) and type(error) is not EngineError


def _failure(place: Place, row: Row, error: Exception) -> str:
    code = "invalid_request" if isinstance(error, InputError) else "engine_error"
    if isinstance(error, PromptTooLong):
        code = "context_length_exceeded"
    return _json(error_record(place, code, str(error), {"custom_id" if row.openai else "id": row.id}))


def _json(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False)

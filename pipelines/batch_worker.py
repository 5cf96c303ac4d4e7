"""What runs inside an actor of a batch job: one engine, and many rows in it at once."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipelines.batch_input import Place, Span, read_span
from pipelines.batch_records import answer_record, error_record
from pipelines.batch_rows import Row
from ragspec.config import PipelineConfig
from ragspec.core import SamplingParams
from ragspec.errors import InputError, PromptTooLong
from ragspec.rag.answer import Answer

RESULT_SCHEMA = pa.schema(
    [
        ("line", pa.large_string()),  # JSON, as it goes into a file
        ("failed", pa.bool_()),
        ("num_tokens", pa.int64()),
        ("num_steps", pa.int64()),
        ("system_fingerprint", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class JobParams:
    """What decides every row's sampling parameters, beside the row."""

    defaults: SamplingParams
    seed: int


class SpanWorker:
    """Reads the rows of a span and answers them; calls overlap, and the engine batches whatever is in it."""

    def __init__(self, config: PipelineConfig, job: JobParams) -> None:
        """Why the import is in here: the process that starts the job needs no engine, which is seconds and half a gigabyte."""
        from ragspec.rag.pipeline import Pipeline

        self._pipeline = Pipeline.from_config(config)
        self._model = Path(config.target.model).name
        self._job = job

    async def __call__(self, spans: pa.Table) -> pa.Table:
        rows = [placed for span in spans.to_pylist() for placed in read_span(Span(**span))]
        results = await asyncio.gather(*(self._result(place, row) for place, row in rows))
        return pa.Table.from_pylist(results, schema=RESULT_SCHEMA)

    async def _result(self, place: Place, row: Row) -> dict[str, Any]:
        try:
            answer = await self._answer(row)
        except Exception as error:  # Why all: one row must not end the job, now and at every resume
            record = error_record(place, _code(error), str(error), {"custom_id" if row.openai else "id": row.id})
            return {"line": _json(record), "failed": True, "num_tokens": 0, "num_steps": 0, "system_fingerprint": ""}
        stats = answer.stats.generation
        return {
            "line": _json(answer_record(row, answer, self._model, int(time.time()))),
            "failed": False,
            "num_tokens": stats.num_output_tokens,
            "num_steps": stats.num_steps,
            "system_fingerprint": answer.system_fingerprint,
        }

    async def _answer(self, row: Row) -> Answer:
        params = row.params(self._job.defaults, self._job.seed)
        async for piece in self._pipeline.stream(row.question, params, tenant=row.tenant, filter=row.filter):
            if isinstance(piece, Answer):
                return piece
        raise AssertionError("a stream ends with its answer")


def _code(error: Exception) -> str:
    if isinstance(error, PromptTooLong):
        return "context_length_exceeded"
    return "invalid_request" if isinstance(error, InputError) else "engine_error"


def _json(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False)

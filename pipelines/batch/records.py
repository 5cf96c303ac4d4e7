"""Lines of a batch job's output: answers and errors, each in the form of its row.

Pure functions from a result, or the reason of an error, to a value that `json` writes. A row of an OpenAI batch file gets a line
of an OpenAI output file; fields that OpenAI does not have stand under `ragspec` in the body.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipelines.batch.rows import Row, RowLocation, id_of
from ragspec.core import FinishReason, GenerationStats
from ragspec.rag.answer import Answer
from ragspec.rag.openai_fields import usage

if TYPE_CHECKING:  # Why: these imports take seconds, and a job whose rows are all answered needs none of them
    from ragspec.rag.grammar.correction import Correction


class RowResult(NamedTuple):
    """The result of a row. The plain form has the fields of `plain`, the OpenAI form has `text`; both have `details`.
    `labels`: of an answer's sentences."""

    text: str
    finish_reason: FinishReason
    stats: GenerationStats
    plain: Mapping[str, Any]
    details: Mapping[str, Any]
    labels: Sequence[str] = ()


def answer_result(answer: Answer) -> RowResult:
    names = ("retrieve_s", "encode_s", "search_s", "prompt_s", "first_token_s")
    times = {name: getattr(answer.stats, name) for name in names}
    details = {
        "citations": [asdict(citation) for citation in answer.citations],
        "sentences": [asdict(sentence) for sentence in answer.sentences],
        "unknown_quotations": [list(span) for span in answer.unknown_quotations],
        "passages": [passage.id for passage in answer.passages],
        "ranks": list(answer.ranks),
        "passage_order": answer.passage_order,
        "dropped_passages": [passage.id for passage in answer.dropped_passages],
        "index_generation": answer.stats.index_generation,
        "stats": _stats(answer.stats.generation) | times,
    }
    if answer.logprobs:
        details["logprobs"] = [asdict(logprob) for logprob in answer.logprobs]
    plain = {"question": answer.question, "answer": answer.text}
    labels = [sentence.label for sentence in answer.sentences]
    return RowResult(answer.text, answer.finish_reason, answer.stats.generation, plain, details, labels)


def correction_result(correction: Correction) -> RowResult:
    details = {
        "edits": [asdict(edit) for edit in correction.edits],
        "withheld": [{**asdict(each.edit), "withheld": each.reason} for each in correction.withheld],
        "unfinished": [list(span) for span in correction.unfinished],
        "stats": _stats(correction.stats) | {"prompt_s": correction.prompt_s},
    }
    plain = {"text": correction.text, "corrected": correction.corrected}
    return RowResult(correction.corrected, correction.finish_reason, correction.stats, plain, details)


def output_record(row: Row, result: RowResult, model: str, created: int) -> dict[str, Any]:
    """`created` is in seconds since 1970."""
    details = {**result.details, "seed": result.stats.seed, "row_digest": row.digest}
    if row.openai:
        return _envelope(row.id, 200, _completion(row, result, model, created) | {"ragspec": details})
    return {
        "id": row.id,
        **result.plain,
        "finish_reason": result.finish_reason.value,
        "system_fingerprint": result.stats.system_fingerprint,
        **details,
    }


def error_record(location: RowLocation, code: str, reason: str, record: Any) -> dict[str, Any]:
    """Why with the location: a row that cannot be read has no id."""
    where = {"source": Path(location.path).name, "row": location.number}
    row_id = id_of(record)
    if row_id is not None and "custom_id" in record:
        status, kind = (500, "server_error") if code == "engine_error" else (400, "invalid_request_error")
        body = {"error": {"message": reason, "type": kind, "param": None, "code": code}}
        return _envelope(row_id, status, body) | where
    return {"id": row_id, **where, "code": code, "reason": reason}


class RecordedRow(NamedTuple):
    """A row of the output. `fingerprint` is empty if the row needed no target: its text holds no sentence to correct."""

    id: str
    digest: str
    fingerprint: str


def recorded_row(record: dict[str, Any]) -> RecordedRow:
    """The inverse of `output_record`, as far as a job needs it to resume."""
    openai = "custom_id" in record
    body = record["response"]["body"] if openai else record
    details = body["ragspec"] if openai else body
    return RecordedRow(
        str(record["custom_id" if openai else "id"]), str(details["row_digest"]), str(body["system_fingerprint"])
    )


def _completion(row: Row, result: RowResult, model: str, created: int) -> dict[str, Any]:
    message = {"role": "assistant", "content": result.text, "refusal": None}
    return {
        "id": f"chatcmpl-{_short_hash(row.id)}",
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": result.finish_reason.value}],
        "usage": usage([result.stats]),
        "system_fingerprint": result.stats.system_fingerprint,
    }


def _stats(stats: GenerationStats) -> dict[str, Any]:
    plain = asdict(stats)
    del plain["seed"], plain["system_fingerprint"]
    return plain | {"acceptance_length": stats.acceptance_length}


def _envelope(row_id: str, status_code: int, body: dict[str, Any]) -> dict[str, Any]:
    response = {"status_code": status_code, "request_id": f"req_{_short_hash(row_id)}", "body": body}
    return {"id": f"batch_req_{_short_hash(row_id)}", "custom_id": row_id, "response": response, "error": None}


def _short_hash(row_id: str) -> str:
    return hashlib.sha256(row_id.encode()).hexdigest()[:24]

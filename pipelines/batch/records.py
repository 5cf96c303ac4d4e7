"""Lines of a batch job's output: answers and errors, each in the form its row came in.

Pure functions from what was written, or a reason, to a value that `json` writes. The OpenAI form is that of a batch's output
file; what it has no place for stands under `ragspec` in the body.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipelines.batch.input import Place
from pipelines.batch.rows import Row, id_of
from ragspec.core import FinishReason, GenerationStats, TokenLogprob
from ragspec.rag.answer import Answer
from ragspec.rag.openai_fields import usage

if TYPE_CHECKING:  # Why: seconds of imports that a job with nothing to do needs none of
    from ragspec.rag.grammar.grammar import Correction

_SERVER_CODES = {"engine_error": 500}


class Written(NamedTuple):
    """What a job wrote for a row. `plain` stands beside the id where `text` would in the OpenAI form; `details` in both."""

    text: str
    finish_reason: FinishReason
    stats: GenerationStats
    plain: Mapping[str, Any]
    details: Mapping[str, Any]


def written_answer(answer: Answer) -> Written:
    times = {"retrieve_s": answer.stats.retrieve_s, "prompt_s": answer.stats.prompt_s}
    details = {
        "citations": [asdict(citation) for citation in answer.citations],
        "passages": [passage.id for passage in answer.passages],
        "dropped_passages": [passage.id for passage in answer.dropped_passages],
        "index_generation": answer.stats.index_generation,
        "stats": _stats(answer.stats.generation) | times,
        **_logprobs(answer.logprobs),
    }
    plain = {"question": answer.question, "answer": answer.text}
    return Written(answer.text, answer.finish_reason, answer.stats.generation, plain, details)


def written_correction(correction: Correction) -> Written:
    details = {
        "edits": [asdict(edit) for edit in correction.edits],
        "withheld": [{**asdict(each.edit), "withheld": each.reason} for each in correction.withheld],
        "unfinished": [list(span) for span in correction.unfinished],
        "stats": _stats(correction.stats) | {"prompt_s": correction.prompt_s},
    }
    plain = {"text": correction.text, "corrected": correction.corrected}
    return Written(correction.corrected, correction.finish_reason, correction.stats, plain, details)


def output_record(row: Row, written: Written, model: str, created: int) -> dict[str, Any]:
    """`created` is in seconds since 1970."""
    details = {**written.details, "seed": written.stats.seed, "row_digest": row.digest}
    if row.openai:
        return _envelope(row.id, 200, _completion(row, written, model, created) | {"ragspec": details})
    return {
        "id": row.id,
        **written.plain,
        "finish_reason": written.finish_reason.value,
        "system_fingerprint": written.stats.system_fingerprint,
        **details,
    }


def error_record(place: Place, code: str, reason: str, record: Any) -> dict[str, Any]:
    """The place is given too, since a row that cannot be read has no id."""
    where = {"source": Path(place.path).name, "row": place.number}
    row_id = id_of(record)
    if row_id is not None and "custom_id" in record:
        status = _SERVER_CODES.get(code, 400)
        kind = "invalid_request_error" if status == 400 else "server_error"
        body = {"error": {"message": reason, "type": kind, "param": None, "code": code}}
        return _envelope(row_id, status, body) | where
    return {"id": row_id, **where, "code": code, "reason": reason}


def recorded_id(record: dict[str, Any]) -> str:
    return str(record["custom_id"] if "custom_id" in record else record["id"])


def recorded_digest(record: dict[str, Any]) -> str:
    extra = record["response"]["body"]["ragspec"] if "custom_id" in record else record
    return str(extra["row_digest"])


def recorded_fingerprint(record: dict[str, Any]) -> str:
    """Empty if the target was not asked: there was nothing to correct."""
    answer = record["response"]["body"] if "custom_id" in record else record
    return str(answer["system_fingerprint"])


def _completion(row: Row, written: Written, model: str, created: int) -> dict[str, Any]:
    stats = written.stats
    message = {"role": "assistant", "content": written.text, "refusal": None}
    return {
        "id": f"chatcmpl-{_short_hash(row.id)}",
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": written.finish_reason.value}],
        "usage": usage([stats]),
        "system_fingerprint": stats.system_fingerprint,
    }


def _stats(stats: GenerationStats) -> dict[str, Any]:
    plain = asdict(stats)
    del plain["seed"], plain["system_fingerprint"]
    return plain | {"acceptance_length": stats.acceptance_length}


def _logprobs(logprobs: tuple[TokenLogprob, ...]) -> dict[str, Any]:
    return {"logprobs": [asdict(logprob) for logprob in logprobs]} if logprobs else {}


def _envelope(row_id: str, status_code: int, body: dict[str, Any]) -> dict[str, Any]:
    response = {"status_code": status_code, "request_id": f"req_{_short_hash(row_id)}", "body": body}
    return {"id": f"batch_req_{_short_hash(row_id)}", "custom_id": row_id, "response": response, "error": None}


def _short_hash(row_id: str) -> str:
    return hashlib.sha256(row_id.encode()).hexdigest()[:24]

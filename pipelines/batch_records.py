"""Lines of a batch job's output: answers and errors, each in the form its row came in.

Pure functions from an `Answer` or a reason to a value that `json` writes.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipelines.batch_input import Place
from pipelines.batch_rows import Row, id_of
from ragspec.rag.answer import Answer


def answer_record(row: Row, answer: Answer, model: str, created: int) -> dict[str, Any]:
    """`created` is in seconds since 1970."""
    return _completion(row, answer, model, created) if row.openai else _answer(row, answer)


def error_record(place: Place, code: str, reason: str, record: Any) -> dict[str, Any]:
    """The place is given too, since a row that cannot be read has no id."""
    where = {"source": Path(place.path).name, "row": place.number}
    row_id = id_of(record)
    if row_id is not None and "custom_id" in record:
        body = {"error": {"message": reason, "type": "invalid_request_error", "param": None, "code": code}}
        status = 500 if code == "engine_error" else 400
        return _envelope(row_id, status, body) | where
    return {"id": row_id, **where, "code": code, "reason": reason}


def recorded_id(record: dict[str, Any]) -> str:
    return str(record["custom_id"] if "custom_id" in record else record["id"])


def recorded_digest(record: dict[str, Any]) -> str:
    extra = record["response"]["body"]["ragspec"] if "custom_id" in record else record
    return str(extra["row_digest"])


def recorded_fingerprint(record: dict[str, Any]) -> str:
    answer = record["response"]["body"] if "custom_id" in record else record
    return str(answer["system_fingerprint"])


def _answer(row: Row, answer: Answer) -> dict[str, Any]:
    return {
        "id": row.id,
        "question": answer.question,
        "answer": answer.text,
        "finish_reason": answer.finish_reason.value,
        "system_fingerprint": answer.system_fingerprint,
        **_details(row, answer),
    }


def _completion(row: Row, answer: Answer, model: str, created: int) -> dict[str, Any]:
    num_prompt, num_output = answer.stats.generation.num_prompt_tokens, answer.stats.generation.num_output_tokens
    message = {"role": "assistant", "content": answer.text, "refusal": None}
    body = {
        "id": f"chatcmpl-{_short_hash(row.id)}",
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": answer.finish_reason.value}],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        },
        "system_fingerprint": answer.system_fingerprint,
        "ragspec": _details(row, answer),
    }
    return _envelope(row.id, 200, body)


def _details(row: Row, answer: Answer) -> dict[str, Any]:
    stats = asdict(answer.stats.generation)
    del stats["seed"], stats["system_fingerprint"]
    times = {"retrieve_s": answer.stats.retrieve_s, "prompt_s": answer.stats.prompt_s}
    return {
        "citations": [asdict(citation) for citation in answer.citations],
        "passages": [passage.id for passage in answer.passages],
        "dropped_passages": [passage.id for passage in answer.dropped_passages],
        "seed": answer.seed,
        "index_generation": answer.stats.index_generation,
        "stats": stats | times | {"acceptance_length": answer.stats.acceptance_length},
        "row_digest": row.digest,
        **({"logprobs": [asdict(logprob) for logprob in answer.logprobs]} if answer.logprobs else {}),
    }


def _envelope(row_id: str, status_code: int, body: dict[str, Any]) -> dict[str, Any]:
    response = {"status_code": status_code, "request_id": f"req_{_short_hash(row_id)}", "body": body}
    return {"id": f"batch_req_{_short_hash(row_id)}", "custom_id": row_id, "response": response, "error": None}


def _short_hash(row_id: str) -> str:
    return hashlib.sha256(row_id.encode()).hexdigest()[:24]

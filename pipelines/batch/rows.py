"""The rows of a batch job: JSONL and Parquet files, parsed, checked and read twice; and the lines of its output.

A row is `{"id": ..., "question": ...}` (or `"text"`, if the job corrects texts) with optional sampling parameters, or a line of
an OpenAI batch file. Both may stand in one file. The first reading checks every row, so that the job knows from the start how
many rows there are and which of them are wrong. The second yields the rows to answer, as the engines take them. Neither keeps
texts, only ids.

A line of the output has the form of its row: a row of an OpenAI batch file gets a line of an OpenAI output file, where fields
that OpenAI does not have stand under `ragspec` in the body.

    >>> parse_row({"id": 7, "question": "When did it rain?", "temperature": 0.5}, QUESTIONS).overrides
    {'temperature': 0.5}
    >>> rows = JobInput(find_inputs(Path("questions.jsonl")), QUESTIONS, defaults, seed, answered={})
    >>> for bad in rows.check(): ...
    >>> for location, row, params in rows.pending(): ...
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from ragspec.core import FinishReason, GenerationStats, SamplingParams, check_text
from ragspec.errors import InputError
from ragspec.numerics.noise import row_seed
from ragspec.rag.answer import Answer
from ragspec.rag.grammar.correction import Correction, CorrectionRequest
from ragspec.rag.openai_fields import (
    IGNORED_FIELDS,
    SAMPLING_FIELDS,
    UNSUPPORTED_FIELDS,
    content_text,
    normalize_parameter,
    refused_field,
    sampling_arguments,
    usage,
)
from ragspec.retrieval.search.filters import parse_filter

_PARAMETERS = frozenset(field.name for field in fields(SamplingParams))
ROW_SUFFIXES = (".jsonl", ".parquet")
_ROWS_PER_BATCH = 1024
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_CHAT_URL = "/v1/chat/completions"
_BODY_IGNORED = IGNORED_FIELDS | UNSUPPORTED_FIELDS.keys() | {"model", "messages"}


@dataclass(frozen=True, slots=True)
class Row:
    """A question, or a text to correct. `overrides` are the row's own sampling parameters, `ignored` its unknown columns;
    `tenant` and `filter` restrict the documents that may answer the row. `system` is the system message before the question.
    """

    id: str
    text: str
    overrides: Mapping[str, Any]
    openai: bool = False
    ignored: tuple[str, ...] = ()
    tenant: str = ""
    filter: Mapping[str, Any] | None = None
    system: str = ""

    @property
    def digest(self) -> str:
        """A hash of the request, independent of the row's location and form."""
        scope = [self.tenant, self.filter] if self.tenant or self.filter else []
        system = [{"system": self.system}] if self.system else []
        request = json.dumps([self.text, self.overrides, *scope, *system], sort_keys=True, default=str)
        return hashlib.sha256(request.encode()).hexdigest()[:16]

    def params(self, defaults: SamplingParams, job_seed: int) -> SamplingParams:
        """The job's parameters, overridden by the row's own. The default seed is a hash of the job's seed and the row's id.

        Raises: InputError.
        """
        params = replace(defaults, **{"seed": row_seed(job_seed, self.id), **self.overrides})
        if params.n != 1:
            raise InputError(f"n must be 1 in a batch job, not {params.n}: write one row for each answer")
        return params


class RowSchema(NamedTuple):
    """The columns of a job's rows. `text_column` holds the text; `scope_columns` restrict the documents. `check` raises
    InputError for a row or parameters that the job cannot take.
    """

    text_column: str
    scope_columns: frozenset[str]
    check: Callable[[Row, SamplingParams], object]


QUESTIONS = RowSchema("question", frozenset({"tenant", "filter"}), lambda row, params: None)


def _check_correction(row: Row, params: SamplingParams) -> None:
    if row.system:
        raise InputError("a correction takes no system message: the model is told to correct the text and nothing else")
    CorrectionRequest(row.id, row.text, params)


TEXTS = RowSchema("text", frozenset({"tenant"}), _check_correction)


def parse_line(raw: bytes) -> Any:
    """The value of one line of JSON. Raises: InputError."""
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as cause:
        raise InputError(f"not UTF-8: byte {cause.start} of the line") from cause
    except (ValueError, RecursionError) as cause:
        raise InputError(f"not JSON: {cause}") from cause


def id_of(record: Any) -> str | None:
    """The id of a record, which may be invalid otherwise; None if there is no id."""
    value = record.get("custom_id", record.get("id")) if isinstance(record, dict) else None
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return str(value)


def parse_row(record: Any, schema: RowSchema) -> Row:
    """Raises: InputError with the reason."""
    if not isinstance(record, dict):
        raise InputError(f"a row must be a JSON object, not {type(record).__name__}")
    given = _given(record)
    row_id = id_of(given)
    if row_id is None:
        raise InputError("a row needs an id, a string or an integer")
    check_text(row_id, "the id")
    return _openai_row(row_id, given, schema) if "custom_id" in given else _plain_row(row_id, given, schema)


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields without those that are null."""
    return {name: value for name, value in fields.items() if value is not None}


def _plain_row(row_id: str, given: dict[str, Any], schema: RowSchema) -> Row:
    if schema.text_column not in given:
        raise InputError(f"the row has no {schema.text_column}")
    text = check_text(given[schema.text_column], f"the {schema.text_column}")
    overrides = _given({name: normalize_parameter(name, value) for name, value in given.items() if name in _PARAMETERS})
    ignored = tuple(sorted(given.keys() - _PARAMETERS - schema.scope_columns - {"id", schema.text_column}))
    return Row(row_id, text, overrides, ignored=ignored, **_scope(given, schema))


def _scope(given: Mapping[str, Any], schema: RowSchema) -> dict[str, Any]:
    tenant = given.get("tenant", "")
    if not isinstance(tenant, str):
        raise InputError(f"the tenant must be a string, not {tenant!r}")
    return {"tenant": tenant, "filter": _filter(given.get("filter")) if "filter" in schema.scope_columns else None}


def _filter(value: Any) -> Mapping[str, Any] | None:
    """Why also JSON in a string: a Parquet column cannot hold filters of different shapes. Raises: InputError."""
    if value is None:
        return None
    if isinstance(value, str):
        value = parse_line(value.encode("utf-8", "surrogatepass"))
    parse_filter(value)
    return value  # type: ignore[no-any-return]


def _openai_row(row_id: str, given: dict[str, Any], schema: RowSchema) -> Row:
    if given.get("method", "POST") != "POST" or given.get("url", _CHAT_URL) != _CHAT_URL:
        raise InputError(f"only POST {_CHAT_URL} is served, not {given.get('method')} {given.get('url')}")
    body = given.get("body")
    if not isinstance(body, dict):
        raise InputError("the row has no body, or it is no JSON object")
    body = {name: value for name, value in _given(body).items() if value or name in SAMPLING_FIELDS}
    if refused := refused_field(body):
        raise InputError(f"{refused}: {UNSUPPORTED_FIELDS[refused]}")
    unknown = sorted(body.keys() - SAMPLING_FIELDS.keys() - _BODY_IGNORED)
    if unknown:
        raise InputError(f"the body's parameter {unknown[0]!r} is not supported")
    system, question = _texts(body.get("messages"))
    text = check_text(question, f"the {schema.text_column}")
    return Row(row_id, text, _given(sampling_arguments(body)), openai=True, system=system, **_scope(given, schema))


def _texts(messages: Any) -> tuple[str, str]:
    """The text of the system messages, joined as in a chat, and of the user's message.

    Raises: InputError, also for a chat history: leaving the history out would change the request.
    """
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages) or not messages:
        raise InputError("messages must be a list of messages")
    *before, last = messages
    if last.get("role") != "user" or any(message.get("role") not in ("system", "developer") for message in before):
        raise InputError(
            "messages must hold one message of the user, behind system messages alone: a job has no chat history"
        )
    system = [text for message in before if (text := content_text(message.get("content") or "")).strip()]
    return "\n\n".join(check_text(text, "a system message") for text in system), content_text(last.get("content"))


class RowLocation(NamedTuple):
    """A row's file and its number in the file, from 1 (for JSONL the line); 0 means the file as a whole."""

    path: str
    number: int


class BadRow(NamedTuple):
    """A row that cannot be answered; `record` is its value, None if it has none that can be read."""

    location: RowLocation
    code: str
    reason: str
    record: Any = None


class CheckedRow(NamedTuple):
    """A row that can be answered, with its sampling parameters."""

    location: RowLocation
    row: Row
    params: SamplingParams


class JobInput:
    """The rows of a job. After `check`, `num_pending` rows are to be answered, and `num_skipped` rows were answered before."""

    def __init__(
        self,
        files: Sequence[Path],
        schema: RowSchema,
        defaults: SamplingParams,
        job_seed: int,
        answered: Mapping[str, str],
    ) -> None:
        """`answered` maps the ids of answered rows to the digests of those rows."""
        self.num_pending = self.num_skipped = 0
        self.ignored_columns: set[str] = set()
        self._files, self._schema, self._answered = files, schema, answered
        self._defaults, self._job_seed = defaults, job_seed
        self._bad: set[RowLocation] = set()

    def check(self) -> Iterator[BadRow]:
        """The first pass: yields the wrong rows and counts the others."""
        for found in self._rows():
            if isinstance(found, BadRow):
                self._bad.add(found.location)
                yield found
                continue
            self.ignored_columns.update(found.row.ignored)
            if found.row.id in self._answered:
                self.num_skipped += 1
            else:
                self.num_pending += 1

    def pending(self) -> Iterator[CheckedRow]:
        """The second pass: yields the rows to answer. Raises: InputError if a file was changed since the first pass."""
        left = self.num_pending
        for found in self._rows() if left else ():
            if isinstance(found, BadRow):
                if found.location not in self._bad:
                    raise InputError(f"{found.location.path} was changed while the job ran: {found.reason}")
            elif found.row.id not in self._answered:
                yield found
                left -= 1
                if not left:
                    return
        if left:
            raise InputError(f"the input was changed while the job ran: {left} of its rows are gone")

    def _rows(self) -> Iterator[CheckedRow | BadRow]:
        seen: set[str] = set()
        for path in self._files:
            try:
                for number, read in _parquet_rows(path) if path.suffix == ".parquet" else _lines(path):
                    yield self._checked(RowLocation(str(path), number), read, seen)
            except (OSError, pa.ArrowException) as cause:
                yield BadRow(RowLocation(str(path), 0), "unreadable_file", f"cannot read {path}: {cause}")

    def _checked(self, location: RowLocation, read: Callable[[], Any], seen: set[str]) -> CheckedRow | BadRow:
        record = None
        try:
            record = read()
            row = parse_row(record, self._schema)
            if row.id in seen:
                return BadRow(location, "duplicate_id", f"the id {row.id!r} came before", record)
            seen.add(row.id)
            params = row.params(self._defaults, self._job_seed)
            self._schema.check(row, params)
        except InputError as error:
            if (row_id := id_of(record)) is not None:
                seen.add(row_id)
            return BadRow(location, "invalid_row", str(error), record)
        if self._answered.get(row.id, row.digest) != row.digest:
            reason = f"the row {row.id!r} was answered before it was changed; answer it into an empty folder"
            return BadRow(location, "changed_row", reason, record)
        return CheckedRow(location, row, params)


def find_inputs(path: Path) -> list[Path]:
    """A file, or every JSONL and Parquet file below a folder, by name. Raises: InputError."""
    if path.is_file():
        if path.suffix not in ROW_SUFFIXES:
            raise InputError(f"{path} is neither .jsonl nor .parquet")
        return [path]
    if not path.is_dir():
        raise InputError(f"there is no input {path}")
    files = sorted(file for file in path.rglob("*") if file.suffix in ROW_SUFFIXES and file.is_file())
    if not files:
        raise InputError(f"the folder {path} holds no .jsonl or .parquet file")
    return files


def _lines(path: Path) -> Iterator[tuple[int, Callable[[], Any]]]:
    """Blank lines have a number, but are no rows."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if text := line.removeprefix(_BYTE_ORDER_MARK).strip():
                yield number, partial(parse_line, text)


def _parquet_rows(path: Path) -> Iterator[tuple[int, Callable[[], Any]]]:
    """Why one row group at a time: a damaged group costs no rows of the groups before it."""
    number = 0
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(_ROWS_PER_BATCH, row_groups=[group]):
                for i in range(batch.num_rows):
                    number += 1
                    yield number, partial(_record, batch, i)


def _record(batch: pa.RecordBatch, i: int) -> Any:
    """Raises: InputError for a cell that is not of its column's type, such as text that is no UTF-8."""
    try:
        return batch.slice(i, 1).to_pylist()[0]
    except (ValueError, pa.ArrowException) as cause:
        raise InputError(f"the row cannot be read: {cause}") from cause


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
        **({"other_language": correction.other_language} if correction.other_language else {}),
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
    details, row_id = (body["ragspec"], record["custom_id"]) if openai else (body, record["id"])
    return RecordedRow(str(row_id), str(details["row_digest"]), str(body["system_fingerprint"]))


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

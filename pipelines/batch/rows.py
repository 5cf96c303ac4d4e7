"""One row of a batch job: what a user may write, checked.

Two forms, told apart row by row: `{"id": ..., "question": ...}` (or `"text"`, where texts are corrected) with sampling parameters
beside them, and a line of an OpenAI batch file. Pure functions; nothing here reads a file.

    >>> parse_row({"id": 7, "question": "When did it rain?", "temperature": 0.5}, QUESTIONS).overrides
    {'temperature': 0.5}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from ragspec.core import SamplingParams, check_text
from ragspec.errors import InputError
from ragspec.numerics.noise import row_seed
from ragspec.rag.grammar.correction_request import Manuscript
from ragspec.rag.openai_fields import IGNORED, SAMPLING, content_text, parameter, sampling
from ragspec.retrieval.search.filters import parse_filter

_PARAMETERS = frozenset(field.name for field in fields(SamplingParams))
_CHAT_URL = "/v1/chat/completions"
_BODY_IGNORED = IGNORED | {"model", "messages"}


@dataclass(frozen=True, slots=True)
class Row:
    """A question, or a text to correct, with its identity. `overrides` are the sampling parameters that the row itself gives;
    `tenant` and `filter` say which documents may answer it.
    """

    id: str
    text: str
    overrides: Mapping[str, Any]
    openai: bool = False
    ignored: tuple[str, ...] = ()
    tenant: str = ""
    filter: Mapping[str, Any] | None = None

    @property
    def digest(self) -> str:
        """Names what was asked, whatever the row's place or form."""
        scope = [self.tenant, self.filter] if self.tenant or self.filter else []
        asked = json.dumps([self.text, self.overrides, *scope], sort_keys=True, default=str)
        return hashlib.sha256(asked.encode()).hexdigest()[:16]

    def params(self, defaults: SamplingParams, job_seed: int) -> SamplingParams:
        """The job's parameters under the row's own; the seed depends on the job and the id only. Raises: InputError."""
        seed = {"seed": row_seed(job_seed, self.id)}
        params = replace(defaults, **(seed | dict(self.overrides)))
        if params.n != 1:
            raise InputError(f"n must be 1 in a batch job, not {params.n}: write one row for each answer")
        return params


class Form(NamedTuple):
    """What the rows of a job are: the column of their text, the columns that say what it may be answered from, and what else of a
    row and its parameters is refused (`check` raises InputError).
    """

    column: str
    scope: frozenset[str]
    check: Callable[[Row, SamplingParams], object]


QUESTIONS = Form("question", frozenset({"tenant", "filter"}), lambda row, params: None)
TEXTS = Form("text", frozenset({"tenant"}), lambda row, params: Manuscript(row.id, row.text, params))


def parse_line(raw: bytes) -> Any:
    """The value of one line of JSON. Raises: InputError."""
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as cause:
        raise InputError(f"not UTF-8: byte {cause.start} of the line") from cause
    except (ValueError, RecursionError) as cause:
        raise InputError(f"not JSON: {cause}") from cause


def id_of(record: Any) -> str | None:
    """The identity of a record that may be wrong otherwise; None if it has none."""
    value = record.get("custom_id", record.get("id")) if isinstance(record, dict) else None
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return str(value)


def parse_row(record: Any, form: Form) -> Row:
    """Raises: InputError with the reason."""
    if not isinstance(record, dict):
        raise InputError(f"a row must be a JSON object, not {type(record).__name__}")
    given = {name: value for name, value in record.items() if value is not None}
    row_id = id_of(given)
    if row_id is None:
        raise InputError("a row needs an id, a string or an integer")
    check_text(row_id, "the id")
    return _openai_row(row_id, given, form) if "custom_id" in given else _plain_row(row_id, given, form)


def _plain_row(row_id: str, given: dict[str, Any], form: Form) -> Row:
    if form.column not in given:
        raise InputError(f"the row has no {form.column}")
    text = check_text(given[form.column], f"the {form.column}")
    overrides = {name: parameter(name, value) for name, value in given.items() if name in _PARAMETERS}
    ignored = tuple(sorted(given.keys() - _PARAMETERS - form.scope - {"id", form.column}))
    return Row(row_id, text, overrides, ignored=ignored, **_scope(given, form))


def _scope(given: Mapping[str, Any], form: Form) -> dict[str, Any]:
    tenant = given.get("tenant", "")
    if not isinstance(tenant, str):
        raise InputError(f"the tenant must be a string, not {tenant!r}")
    return {"tenant": tenant, "filter": _filter(given.get("filter")) if "filter" in form.scope else None}


def _filter(value: Any) -> Mapping[str, Any] | None:
    """A filter as an object or, since a table has no such column, as JSON in a string. Raises: InputError."""
    if value is None:
        return None
    if isinstance(value, str):
        value = parse_line(value.encode("utf-8", "surrogatepass"))
    parse_filter(value)
    return value  # type: ignore[no-any-return]


def _openai_row(row_id: str, given: dict[str, Any], form: Form) -> Row:
    if given.get("method", "POST") != "POST" or given.get("url", _CHAT_URL) != _CHAT_URL:
        raise InputError(f"only POST {_CHAT_URL} is served, not {given.get('method')} {given.get('url')}")
    body = given.get("body")
    if not isinstance(body, dict):
        raise InputError("the row has no body, or it is no JSON object")
    body = {name: value for name, value in body.items() if value is not None and value is not False}
    unknown = sorted(body.keys() - SAMPLING.keys() - _BODY_IGNORED)
    if unknown:
        raise InputError(f"the body's parameter {unknown[0]!r} is not supported")
    text = check_text(_only_message(body.get("messages")), f"the {form.column}")
    return Row(row_id, text, sampling(body), openai=True, **_scope(given, form))


def _only_message(messages: Any) -> str:
    """Why one message only: a system message or a history left out in silence would change what was asked."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages) or not messages:
        raise InputError("messages must be a list of messages")
    if len(messages) > 1 or messages[0].get("role") != "user":
        raise InputError("messages must hold one message of the user: this job takes single ones")
    return content_text(messages[0].get("content"))

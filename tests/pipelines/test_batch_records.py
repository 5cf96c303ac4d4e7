"""Results in OpenAI's form: what a client of a batch's output file reads, field by field."""

from typing import Any

import pytest
from batch_files import chat_row
from openai.types.chat import ChatCompletion

from pipelines.batch.records import answer_result, correction_result, error_record, output_record, recorded_row
from pipelines.batch.rows import QUESTIONS, TEXTS, RowLocation, parse_row
from ragspec.core import FinishReason, GenerationStats, Passage, TokenLogprob
from ragspec.rag.answer import Answer, AnswerStats
from ragspec.rag.grammar.correction import Correction
from ragspec.rag.grammar.edit_filters import WithheldEdit, WithholdReason
from ragspec.rag.grammar.edits import Edit, EditKind

STATS = GenerationStats(
    num_prompt_tokens=30, num_cached_tokens=20, num_output_tokens=6, num_steps=3, seed=7, system_fingerprint="fp"
)


def completion_of(line: dict[str, Any]) -> ChatCompletion:
    """The body of a line of a batch's output file, as OpenAI's client reads it."""
    assert line.keys() == {"id", "custom_id", "response", "error"} and line["error"] is None
    assert line["response"].keys() == {"status_code", "request_id", "body"}
    body = ChatCompletion.model_validate(line["response"]["body"], strict=True)
    assert body.model_extra is not None and body.model_extra.keys() == {"ragspec"}
    return body


def answer(reason: FinishReason = FinishReason.STOP) -> Answer:
    passage = Passage("mill", 0, "The mill is old.", 0, 16)
    logprobs = (TokenLogprob(5, -0.5),)
    stats = AnswerStats(0.1, 0.2, "g1", STATS)
    return Answer("Which mill?", "The old one.", (), (passage,), (), reason, (5, 6), logprobs, stats)


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_an_answered_chat_row_is_a_line_of_openais_output_file(reason: FinishReason) -> None:
    """A client that finds no usage, or a finish reason that it does not know."""
    row = parse_row(chat_row("c1", "Which mill?"), QUESTIONS)
    record = output_record(row, answer_result(answer(reason)), "tiny", 1_700_000_000)
    body = completion_of(record)
    assert (record["custom_id"], record["response"]["status_code"]) == ("c1", 200)
    assert (body.created, body.model, body.system_fingerprint) == (1_700_000_000, "tiny", "fp")
    assert body.choices[0].message.content == "The old one."
    assert body.choices[0].finish_reason == reason.value
    usage, details = body.usage, record["response"]["body"]["ragspec"]
    assert usage is not None and usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (30, 6, 36)
    assert usage.prompt_tokens_details.cached_tokens == 20
    assert details["passages"] == ["mill#0"] and details["seed"] == 7
    assert details["logprobs"][0]["logprob"] == -0.5
    assert recorded_row(record) == ("c1", row.digest, "fp")


def test_ids_of_lines_differ_and_stay() -> None:
    """Two lines of one id, or another id for the same row after a resume."""
    rows = [parse_row(chat_row(name), QUESTIONS) for name in ("a", "b", "a")]
    lines = [output_record(row, answer_result(answer()), "tiny", 1) for row in rows]
    assert lines[0] == lines[2]
    assert len({line["id"] for line in lines}) == len({line["response"]["request_id"] for line in lines}) == 2


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("invalid_request", 400, "invalid_request_error"),
        ("context_length_exceeded", 400, "invalid_request_error"),
        ("engine_error", 500, "server_error"),
    ],
)
def test_a_failed_chat_row_is_a_line_of_openais_error_file(code: str, status: int, kind: str) -> None:
    """A server's fault that a client takes for its own and never tries again."""
    line = error_record(RowLocation("in/q.jsonl", 3), code, "so it is", chat_row("c1"))
    assert (line["custom_id"], line["source"], line["row"], line["error"]) == ("c1", "q.jsonl", 3, None)
    assert line["response"]["status_code"] == status
    error = {"message": "so it is", "type": kind, "param": None, "code": code}
    assert line["response"]["body"] == {"error": error}


def test_a_correction_has_both_forms() -> None:
    """A corrected text without its edits; a sentence left as it was that nobody is told of."""
    edit, name = (
        Edit(3, 5, "go", "goes", EditKind.AGREEMENT),
        WithheldEdit(Edit(0, 2, "He", "Hed"), WithholdReason.NAME),
    )
    correction = Correction("a", "He go. It", "He goes. It", (edit,), ((7, 9),), STATS, 0.1, (name,))
    result = correction_result(correction)
    plain = output_record(parse_row({"id": "a", "text": "He go. It"}, TEXTS), result, "tiny", 1)
    assert (plain["text"], plain["corrected"], plain["finish_reason"]) == ("He go. It", "He goes. It", "length")
    assert plain["edits"] == [{"start": 3, "end": 5, "original": "go", "replacement": "goes", "kind": "agreement"}]
    assert [(each["original"], each["withheld"]) for each in plain["withheld"]] == [("He", "name")]
    assert plain["unfinished"] == [[7, 9]] and recorded_row(plain).fingerprint == "fp"
    line = output_record(parse_row(chat_row("a", "He go. It"), TEXTS), result, "tiny", 1)
    assert completion_of(line).choices[0].message.content == "He goes. It"
    assert line["response"]["body"]["ragspec"]["edits"] == plain["edits"]

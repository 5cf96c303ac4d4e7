"""The files of a batch job: rows as they are written, read in two passes, and the folder of results, in OpenAI's form too."""

import contextlib
import json
import resource
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from batch_files import SEED, answers_of, chat_row, plain_rows, read_lines, write_lines
from openai.types.chat import ChatCompletion

from pipelines.batch.output import JsonLines, OutputFolder
from pipelines.batch.rows import (
    QUESTIONS,
    TEXTS,
    BadRow,
    JobInput,
    Row,
    RowLocation,
    answer_result,
    correction_result,
    error_record,
    find_inputs,
    output_record,
    parse_row,
    recorded_row,
)
from ragspec.core import FinishReason, GenerationStats, Passage, SamplingParams, TokenLogprob
from ragspec.errors import ConfigError, InputError, SaveError, StoreCorrupt
from ragspec.numerics.noise import row_seed
from ragspec.rag.answer import Answer, AnswerStats
from ragspec.rag.grammar.correction import Correction
from ragspec.rag.grammar.edit_filters import WithheldEdit, WithholdReason
from ragspec.rag.grammar.edits import Edit, EditKind

USER = {"role": "user", "content": "Which bridge?"}
WRONG_ROWS = read_lines(Path(__file__).with_name("wrong_rows.jsonl"))

# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", WRONG_ROWS, ids=lambda wrong: wrong["reason"])
def test_a_wrong_row_is_refused_with_the_reason(wrong: dict[str, Any]) -> None:
    """A row that cannot be meant is answered anyway, or ends the job."""
    with pytest.raises(InputError, match=wrong["reason"]):
        parse_row(wrong["row"], QUESTIONS).params(SamplingParams(), SEED)


@pytest.mark.parametrize(
    ("record", "overrides"),
    [
        ({"id": 7, "question": "x", "gold": 1}, {}),
        ({"id": "a", "question": "x", "max_tokens": 8.0, "top_k": None}, {"max_tokens": 8}),
        (
            {"id": "a", "question": "x", "stop": "END", "logit_bias": {"5": 2.0}},
            {"stop": ("END",), "logit_bias": {5: 2.0}},
        ),
        (
            chat_row("a", seed=3, temperature=0.5, max_completion_tokens=9),
            {"seed": 3, "temperature": 0.5, "max_tokens": 9},
        ),
        (chat_row("a", stop=["x", "y"], user="u", stream=False), {"stop": ("x", "y")}),
        (chat_row("a", tools=[], tool_choice="auto", logprobs=False, top_logprobs=0, reasoning_effort=None), {}),
        (chat_row("a", seed=-1, top_k=-1), {"top_k": 0}),
        ({"id": "a", "question": "x", "seed": -1, "top_k": -1}, {"top_k": 0}),
        (chat_row("a", verbatim_quotes=False, ignore_eos=False), {"verbatim_quotes": False, "ignore_eos": False}),
    ],
)
def test_a_row_may_bring_its_own_parameters(record: Any, overrides: dict[str, Any]) -> None:
    """A parameter that a file could only write as a list, a float or a text is refused or dropped."""
    assert parse_row(record, QUESTIONS).overrides == overrides


def test_system_messages_stand_before_the_question() -> None:
    """A line with a system message was refused, or would have the answer of the same line without."""
    before = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": [{"type": "text", "text": "A"}]},
    ]
    row = parse_row(chat_row("a", messages=[*before, {"role": "system", "content": None}, USER]), QUESTIONS)
    assert (row.system, row.text) == ("Be brief.\n\nA", "Which bridge?")
    plain = parse_row(chat_row("a", messages=[USER]), QUESTIONS)
    assert plain == parse_row(chat_row("a"), QUESTIONS) and plain.digest != row.digest
    with pytest.raises(InputError, match="a correction takes no system message"):
        TEXTS.check(row, SamplingParams())


def test_texts_to_correct_have_rows_of_their_own() -> None:
    """A question that is corrected, a filter that is obeyed by nobody, a stop string that cuts a text."""
    row = parse_row({"id": "a", "text": "He go.", "tenant": "ann", "filter": {"type": "eq"}, "seed": 4}, TEXTS)
    assert (row.text, row.tenant, row.filter, row.ignored) == ("He go.", "ann", None, ("filter",))
    assert parse_row(chat_row("a", "He go.", temperature=0.5), TEXTS).text == "He go."
    with pytest.raises(InputError, match="the row has no text"):
        parse_row({"id": "a", "question": "He go."}, TEXTS)
    with pytest.raises(InputError, match="stop"):
        TEXTS.check(*with_params({"id": "a", "text": "He go.", "stop": "o"}))


def with_params(record: dict[str, Any]) -> tuple[Row, SamplingParams]:
    row = parse_row(record, TEXTS)
    return row, row.params(SamplingParams(), SEED)


def test_the_seed_of_a_row_depends_on_the_job_and_its_id_only() -> None:
    """A row answered in another place or batch gets another text."""
    row = parse_row({"id": "a", "question": "x"}, QUESTIONS)
    assert row.params(SamplingParams(), SEED).seed == row_seed(SEED, "a")
    assert parse_row({"id": "a", "question": "x", "seed": 9}, QUESTIONS).params(SamplingParams(), SEED).seed == 9


# -- input -------------------------------------------------------------------------------------------------------------


def job_input(path: Path, answered: dict[str, str] | None = None) -> JobInput:
    return JobInput(find_inputs(path), QUESTIONS, SamplingParams(), SEED, answered or {})


def checked(rows: JobInput) -> tuple[list[str], list[BadRow]]:
    """The ids of the rows to answer, and the wrong rows."""
    bad = list(rows.check())
    ids = [pending.row.id for pending in rows.pending()]
    assert len(ids) == rows.num_pending
    return ids, bad


def test_the_second_reading_meets_the_same_rows(tmp_path: Path) -> None:
    """A worker that seeks to the wrong byte answers another row, or half of one."""
    text = "\ufeff" + "\r\n".join(json.dumps(row, ensure_ascii=False) for row in plain_rows(21)) + "\n\n  \n"
    (tmp_path / "a.jsonl").write_text(text + json.dumps({"id": "last", "question": "x"}), encoding="utf-8", newline="")
    ids, bad = checked(job_input(tmp_path / "a.jsonl"))
    assert ids == [*(f"q{n}" for n in range(21)), "last"]
    assert not bad


def test_parquet_is_read_by_row_groups(tmp_path: Path) -> None:
    """Rows of a later row group get the content of an earlier one."""
    table = pa.Table.from_pylist([row | {"max_tokens": 4 if row["id"] == "q3" else None} for row in plain_rows(25)])
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    answered = {"q11": parse_row({"id": "q11", "question": "Überfrage 11?"}, QUESTIONS).digest}
    ids, bad = checked(rows := job_input(tmp_path / "a.parquet", answered))
    assert ids == [f"q{n}" for n in range(25) if n != 11]
    assert (bad, rows.num_skipped) == ([], 1)


def test_wrong_rows_do_not_disturb_their_neighbours(tmp_path: Path) -> None:
    """One bad line shifts the numbers of all that follow, or ends the job."""
    lines = [
        b'{"id": "a", "question": "x"}',
        b"{",
        b"",
        b'{"id": "b\xff"}',
        b"[" * 100_000,
        b'{"id": "a", "question": "y"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*lines, b'{"id": "z", "question": "x"}', b""]))
    ids, bad = checked(job_input(tmp_path / "a.jsonl"))
    assert ids == ["a", "z"]
    assert [(b.location.number, b.code, b.reason.split(":")[0]) for b in bad] == [
        (2, "invalid_row", "not JSON"),
        (4, "invalid_row", "not UTF-8"),
        (5, "invalid_row", "not JSON"),
        (6, "duplicate_id", "the id 'a' came before"),
    ]


def test_a_parquet_cell_that_is_no_text_is_one_bad_row(tmp_path: Path) -> None:
    """One damaged cell ended the whole job."""
    questions = pa.Array.from_buffers(pa.string(), 3, pa.array([b"x", b"caf\xe9", b"y"]).buffers())
    table = pa.table({"id": ["a", "b", "c"], "question": questions})
    pq.write_table(table, tmp_path / "a.parquet")
    ids, bad = checked(job_input(tmp_path / "a.parquet"))
    assert ids == ["a", "c"]
    assert [(b.location.number, b.code) for b in bad] == [(2, "invalid_row")]


def test_answered_rows_are_skipped_and_changed_ones_are_told(tmp_path: Path) -> None:
    """A question that was edited after it was answered keeps the old answer in silence, or gets two."""
    rows = plain_rows(30)
    done = {row["id"]: parse_row(row, QUESTIONS).digest for row in rows[3:28]}
    rows[5]["question"] = "another"
    ids, bad = checked(found := job_input(write_lines(tmp_path / "a.jsonl", rows), done))
    assert ids == ["q0", "q1", "q2", "q28", "q29"]
    assert found.num_skipped == 24
    assert [b.code for b in bad] == ["changed_row"]


def test_a_file_that_cannot_be_read_is_one_error_of_a_folder(tmp_path: Path) -> None:
    """One damaged file ends a job of thousands."""
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    write_lines(tmp_path / "b.jsonl", plain_rows(2))
    ids, bad = checked(job_input(tmp_path))
    assert ids == ["q0", "q1"]
    assert [b.code for b in bad] == ["unreadable_file"]


@pytest.mark.parametrize("name", ["missing.jsonl", "empty", "a.csv"])
def test_an_input_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    """A job that does nothing and says that all is well."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.csv").touch()
    with pytest.raises(InputError):
        find_inputs(tmp_path / name)


# -- output ------------------------------------------------------------------------------------------------------------

SETTINGS = {"seed": SEED, "target": "t"}


def opened(folder: Path, resume: bool = True, **settings: Any) -> OutputFolder:
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(OutputFolder(folder, rows_per_part=3))
        out.open_job(SETTINGS | settings, resume)
        stack.pop_all()
    return out


@pytest.mark.parametrize("line", ['{"id": "b", "ans', "[1]", '"b"'])
def test_a_torn_finished_file_says_how_to_go_on(tmp_path: Path, line: str) -> None:
    """A job that cannot be resumed, and a message that leaves its user alone with it."""
    path = tmp_path / "answers-00000.jsonl"
    path.write_text(f'{{"id": "a"}}\n{line}')
    with OutputFolder(tmp_path) as output, pytest.raises(StoreCorrupt, match="delete line 2 of that file") as caught:
        list(output.answers())
    assert str(path) in str(caught.value)


def test_a_torn_line_is_cut_and_what_was_whole_stays(tmp_path: Path) -> None:
    """A process killed within a write leaves half a line, and every later run fails on it or glues the next line to it."""
    with opened(tmp_path) as out:
        out.append(['{"id": "a"}', '{"id": "b"}'])
    (tmp_path / "answers-00001.jsonl.part").write_text('{"id": "c"}\n{"id": "d')
    with opened(tmp_path) as out:
        assert [record["id"] for record in out.answers()] == ["a", "b", "c"]
        out.append(['{"id": "d"}'])
    assert [record["id"] for record in answers_of(tmp_path)] == ["a", "b", "c", "d"]
    assert not list(tmp_path.glob("answers*.part"))


def test_parts_have_a_size(tmp_path: Path) -> None:
    """One file of a million answers that nobody can open."""
    with opened(tmp_path) as out:
        for n in range(7):
            out.append([json.dumps({"id": n})])
    assert [len(read_lines(path)) for path in sorted(tmp_path.glob("answers-*.jsonl"))] == [3, 3, 1]


def test_two_jobs_do_not_share_a_folder(tmp_path: Path) -> None:
    """Both answer every row, and every id is there twice."""
    with opened(tmp_path), pytest.raises(ConfigError, match="another job writes to"):
        opened(tmp_path)


def test_a_folder_is_not_continued_with_other_settings(tmp_path: Path) -> None:
    """Half of the answers come from one model and half from another."""
    with opened(tmp_path):
        pass
    with pytest.raises(ConfigError, match=r"a job with target 't', not 'u'.*--no-resume"):
        opened(tmp_path, target="u")
    with opened(tmp_path, resume=False, target="u") as out:
        assert not list(out.answers())


def test_answers_without_their_settings_are_not_continued(tmp_path: Path) -> None:
    """Answers of unknown origin are taken for this job's."""
    write_lines(tmp_path / "answers-00000.jsonl", [{"id": "a"}])
    with pytest.raises(StoreCorrupt, match=r"no job\.json"):
        opened(tmp_path)


def test_a_full_disk_keeps_what_was_finished(tmp_path: Path) -> None:
    """A failed write leaves half a line, or loses what was there."""
    path = tmp_path / "a.jsonl"
    lines = JsonLines(path)
    lines.append(['{"id": "a"}'])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(SaveError, match=r"cannot write .*what was finished is kept"):
            lines.append([json.dumps({"id": "b" * 2000})])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        lines.close()
    assert read_lines(tmp_path / "a.jsonl.part") == [{"id": "a"}]


def test_an_input_that_is_gone_is_an_error_of_one_line(tmp_path: Path) -> None:
    """A traceback in the middle of the job."""
    pq.write_table(pa.Table.from_pylist(plain_rows(3)), tmp_path / "a.parquet")
    for path in (write_lines(tmp_path / "a.jsonl", plain_rows(3)), tmp_path / "a.parquet"):
        rows = job_input(path)
        assert not list(rows.check())
        path.unlink()
        with pytest.raises(InputError, match="was changed while the job ran"):
            next(rows.pending())


def test_an_input_that_shrinks_or_breaks_ends_the_job_and_one_that_grows_does_not(tmp_path: Path) -> None:
    """Rows that are silently left out; half a line at the end of a log that still grows."""
    path = write_lines(tmp_path / "a.jsonl", plain_rows(4))
    for content, reason in (("", "4 of its rows are gone"), ("{\n", "was changed while the job ran: not JSON")):
        rows = job_input(write_lines(path, plain_rows(4)))
        assert not list(rows.check())
        path.write_text(content)
        with pytest.raises(InputError, match=reason):
            list(rows.pending())
    rows = job_input(write_lines(path, plain_rows(4)))
    assert not list(rows.check())
    path.write_text(path.read_text() + "{")
    assert len(list(rows.pending())) == 4


def test_rows_before_a_damaged_page_are_answered(tmp_path: Path) -> None:
    """Of a row group whose end cannot be read the first rows passed the check, and then the job could never finish."""
    path, num_rows = tmp_path / "a.parquet", 9_000  # the first batches of 1,024 can be read
    table = pa.table({"id": [f"{n}" for n in range(num_rows)], "question": [f"{n:020d}" for n in range(num_rows)]})
    pq.write_table(table, path, row_group_size=num_rows, compression="gzip", data_page_size=2**12, use_dictionary=False)
    raw = bytearray(path.read_bytes())
    column = pq.read_metadata(path).row_group(0).column(1)
    end = column.data_page_offset + column.total_compressed_size
    raw[end - 3000 : end - 1000] = bytes(2000)
    path.write_bytes(raw)
    rows = job_input(path)
    assert [each.code for each in rows.check()] == ["unreadable_file"]
    assert [each.row.id for each in rows.pending()] == [f"{n}" for n in range(rows.num_pending)]
    assert rows.num_pending >= 1024


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
    edit = Edit(3, 5, "go", "goes", EditKind.AGREEMENT)
    name = WithheldEdit(Edit(0, 2, "He", "Hed"), WithholdReason.NAME)
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

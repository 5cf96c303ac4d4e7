"""The batch job: what it reads, what it writes, and that killing it changes nothing."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from tiny_target import SENTENCES, save_model
from typer.testing import CliRunner, Result

from pipelines import batch_rag
from pipelines.batch_input import BadRow, Checks, Span, check_rows, find_inputs, read_span
from pipelines.batch_output import JsonLines, OutputFolder
from pipelines.batch_rag import Job, app, run
from pipelines.batch_rows import parse_row
from ragspec.config import EncoderConfig, load_config
from ragspec.core import Document, SamplingParams
from ragspec.errors import ConfigError, InputError, SaveError, StoreCorrupt
from ragspec.numerics.noise import row_seed
from ragspec.retrieval.writer import IndexWriter

ROOT = Path(__file__).resolve().parents[2]
SEED = 5
CHAT = "/v1/chat/completions"
QUESTIONS = tuple(f"What does sentence {n} say about the river?" for n in range(80))


def chat_row(custom_id: str, content: str = "Which bridge?", **body: Any) -> dict[str, Any]:
    message = {"role": "user", "content": content}
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": CHAT,
        "body": {"model": "m", "messages": [message], **body},
    }


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def read_lines(*paths: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def answers_of(out: Path) -> list[dict[str, Any]]:
    return read_lines(*sorted(out.glob("answers-*.jsonl")))


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (["a"], "a row must be a JSON object, not list"),
        ({"question": "x"}, "a row needs an id"),
        ({"id": True, "question": "x"}, "a row needs an id"),
        ({"id": "", "question": "x"}, "the id is empty"),
        ({"id": "a"}, "the row has no question"),
        ({"id": "a", "question": None}, "the row has no question"),
        ({"id": "a", "question": " "}, "the question is empty"),
        ({"id": "a", "question": 3}, "the question must be a string, not int"),
        ({"id": "a", "question": "nul \0"}, "the question holds a NUL"),
        ({"id": "a", "question": "\ud800"}, "the question holds a lone surrogate"),
        ({"id": "a", "question": "x", "temperature": "hot"}, "temperature must be a number"),
        ({"id": "a", "question": "x", "temperature": float("nan")}, "temperature must be a number"),
        ({"id": "a", "question": "x", "max_tokens": -1}, "max_tokens must be a number"),
        ({"id": "a", "question": "x", "max_tokens": 1.5}, "max_tokens must be an integer"),
        ({"id": "a", "question": "x", "seed": "7"}, "seed must be an integer"),
        ({"id": "a", "question": "x", "stop": [""]}, "stop must be a tuple"),
        ({"id": "a", "question": "x", "logit_bias": {"no": 1.0}}, "logit_bias must map token ids"),
        ({"id": "a", "question": "x", "n": 2}, "n must be 1 in a batch job"),
        ({"custom_id": "a", "url": "/v1/embeddings", "body": {}}, f"only POST {CHAT} is served"),
        ({"custom_id": "a", "url": CHAT}, "the row has no body"),
        ({"custom_id": "a", "url": CHAT, "body": {"messages": []}}, "messages must be a list"),
        ({"id": "a", "question": "x", "tenant": 3}, "the tenant must be a string"),
        ({"id": "a", "question": "x", "filter": {"type": "eq"}}, "filter"),
        ({"id": "a", "question": "x", "filter": "{"}, "not JSON"),
        ({**chat_row("a"), "filter": {"type": "near"}}, "filter"),
        (chat_row("a", tools=[{}]), "the body's parameter 'tools' is not supported"),
        (chat_row("a", temperature=[1]), "temperature must be a number"),
        (
            {"custom_id": "a", "url": CHAT, "body": {"messages": [{"role": "system", "content": "x"}]}},
            "messages must hold one message of the user",
        ),
    ],
)
def test_a_wrong_row_is_refused_with_the_reason(record: Any, reason: str) -> None:
    """A row that cannot be meant is answered anyway, or ends the job."""
    with pytest.raises(InputError, match=reason):
        parse_row(record).params(SamplingParams(), SEED)


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
    ],
)
def test_a_row_may_bring_its_own_parameters(record: Any, overrides: dict[str, Any]) -> None:
    """A parameter that a file could only write as a list, a float or a text is refused or dropped."""
    assert parse_row(record).overrides == overrides


def test_the_seed_of_a_row_depends_on_the_job_and_its_id_only() -> None:
    """A row answered in another place or batch gets another text."""
    row = parse_row({"id": "a", "question": "x"})
    assert row.params(SamplingParams(), SEED).seed == row_seed(SEED, "a")
    assert parse_row({"id": "a", "question": "x", "seed": 9}).params(SamplingParams(), SEED).seed == 9


# -- input -------------------------------------------------------------------------------------------------------------


def checks(done: dict[str, str] | None = None) -> Checks:
    return Checks(SamplingParams(), SEED, done or {})


def checked(path: Path, against: Checks) -> tuple[list[str], list[BadRow]]:
    """The ids that the workers will read, and the wrong rows."""
    found = list(check_rows(find_inputs(path), against))
    rows = [row for span in found if isinstance(span, Span) for _, row in read_span(span)]
    return [row.id for row in rows], [bad for bad in found if isinstance(bad, BadRow)]


def plain_rows(num_rows: int) -> list[dict[str, Any]]:
    return [{"id": f"q{n}", "question": f"Überfrage {n}?"} for n in range(num_rows)]


def test_the_second_reading_meets_the_same_rows(tmp_path: Path) -> None:
    """A worker that seeks to the wrong byte answers another row, or half of one."""
    text = "\ufeff" + "\r\n".join(json.dumps(row, ensure_ascii=False) for row in plain_rows(21)) + "\n\n  \n"
    (tmp_path / "a.jsonl").write_text(text + json.dumps({"id": "last", "question": "x"}), encoding="utf-8", newline="")
    ids, bad = checked(tmp_path / "a.jsonl", checks())
    assert ids == [*(f"q{n}" for n in range(21)), "last"]
    assert not bad


def test_parquet_is_read_by_row_groups(tmp_path: Path) -> None:
    """Rows of a later row group get the content of an earlier one."""
    table = pa.Table.from_pylist([row | {"max_tokens": 4 if row["id"] == "q3" else None} for row in plain_rows(25)])
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    against = checks({"q11": parse_row({"id": "q11", "question": "Überfrage 11?"}).digest})
    ids, bad = checked(tmp_path / "a.parquet", against)
    assert ids == [f"q{n}" for n in range(25) if n != 11]
    assert (bad, against.num_skipped) == ([], 1)


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
    ids, bad = checked(tmp_path / "a.jsonl", checks())
    assert ids == ["a", "z"]
    assert [(b.place.number, b.code, b.reason.split(":")[0]) for b in bad] == [
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
    ids, bad = checked(tmp_path / "a.parquet", checks())
    assert ids == ["a", "c"]
    assert [(b.place.number, b.code) for b in bad] == [(2, "invalid_row")]


def test_answered_rows_are_skipped_and_changed_ones_are_told(tmp_path: Path) -> None:
    """A question that was edited after it was answered keeps the old answer in silence, or gets two."""
    rows = plain_rows(30)
    done = {row["id"]: parse_row(row).digest for row in rows[3:28]}
    rows[5]["question"] = "another"
    against = checks(done)
    ids, bad = checked(write_lines(tmp_path / "a.jsonl", rows), against)
    assert ids == ["q0", "q1", "q2", "q28", "q29"]
    assert against.num_skipped == 24
    assert [b.code for b in bad] == ["changed_row"]


def test_a_file_that_cannot_be_read_is_one_error_of_a_folder(tmp_path: Path) -> None:
    """One damaged file ends a job of thousands."""
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    write_lines(tmp_path / "b.jsonl", plain_rows(2))
    ids, bad = checked(tmp_path, checks())
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
    out = OutputFolder(folder, rows_per_part=3)
    try:
        out.open_job(SETTINGS | settings, resume)
    except BaseException:
        out.close()
        raise
    return out


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
    opened(tmp_path).close()
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
    assert read_lines(path) == [{"id": "a"}]


# -- the whole job -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, an index of five sentences, a configuration that names both."""
    from ragspec.retrieval.encoder import Encoder
    from ragspec.retrieval.retriever import build_index

    folder = tmp_path_factory.mktemp("batch")
    save_model("llama", folder / "target", max_position_embeddings=1024)
    documents = [Document(f"d{n}", sentence) for n, sentence in enumerate(SENTENCES)]
    build_index(documents, folder / "index", Encoder.load(EncoderConfig()))
    config = {
        "retriever": {"index_dir": str(folder / "index"), "num_passages": 2},
        "target": {"model": str(folder / "target")},
        "engine": {"max_kv_tokens": 8192, "max_step_tokens": 64, "max_running": 16},
        "generation": {"max_tokens": 24, "temperature": 0.8, "seed": SEED},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def called(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_a_job_of_wrong_rows_says_so_and_ends_well(place: Path, tmp_path: Path) -> None:
    """Wrong rows are taken for a failed job, or `--strict` for nothing; Ray is started for no row at all."""
    inputs = write_lines(tmp_path / "q.jsonl", [{"id": "a"}, "b", {"id": "a", "question": "x"}, chat_row("c", "")])
    usual = ["--config", str(place / "config.yaml"), "--input", str(inputs), "--out", str(tmp_path / "out")]
    result = called(*usual)
    assert result.exit_code == 0
    summary = json.loads(result.stdout.splitlines()[-1])
    assert (summary["rows"], summary["failed"], summary["answered"], summary["skipped"]) == (4, 4, 0, 0)
    assert "4 rows have no answer" in result.stderr
    assert called(*usual, "--strict").exit_code == 1
    plain, chat = read_lines(tmp_path / "out" / "errors.jsonl")[::3]
    assert plain == {
        "id": "a",
        "source": "q.jsonl",
        "row": 1,
        "code": "invalid_row",
        "reason": "the row has no question",
    }
    assert (chat["custom_id"], chat["response"]["status_code"], chat["error"]) == ("c", 400, None)
    assert chat["response"]["body"]["error"]["message"] == "the question is empty"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--input", "no.jsonl"], "there is no input"),
        (["--index", "nowhere"], "nowhere"),
        (["--out", "in/out"], "would become input"),
        (["--max-tokens", "0"], "generation.max_tokens"),
        (["--config", "no.yaml"], "cannot read the configuration"),
    ],
)
def test_a_job_that_cannot_begin_says_why_in_one_line(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], reason: str
) -> None:
    """A traceback, or an answer folder made for nothing known."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    write_lines(tmp_path / "in" / "q.jsonl", plain_rows(1))
    result = called("--config", str(place / "config.yaml"), "--input", "in", "--out", "out", *options)
    assert result.exit_code == 1
    assert reason in result.stderr
    assert (len(result.stderr.splitlines()), result.stdout) == (1, "")


def job(place: Path, inputs: Path, out: Path, num_engines: int = 1) -> Job:
    return Job(inputs, out, load_config(place / "config.yaml"), SEED, num_engines, resume=True, address="local")


def command(place: Path, inputs: Path, out: Path, *more: str) -> list[str]:
    options = ["--config", str(place / "config.yaml"), "--input", str(inputs), "--out", str(out), *more]
    return [sys.executable, "-m", "pipelines.batch_rag", *options]


def in_this_process(
    tasks: Sequence[Mapping[str, Any]], worker: type, worker_args: tuple[Any, ...], size: object
) -> Iterator[pa.Table]:
    """What a pool of workers does, without Ray."""
    one = worker(*worker_args)
    for task in tasks:
        yield asyncio.run(one(pa.Table.from_pylist([dict(task)])))


@pytest.mark.parametrize("by_ray", [False, pytest.param(True, marks=[pytest.mark.ray, pytest.mark.slow])])
def test_a_job_keeps_tenants_apart_and_its_generation(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_ray: bool
) -> None:
    """A filter or a tenant that the workers never hear of; answers from an index that was changed while the job ran."""
    from ragspec.retrieval.encoder import Encoder

    if not by_ray:
        monkeypatch.setattr("ragspec.cluster.pool.through_pool", in_this_process)
        monkeypatch.setattr(batch_rag, "ray_session", lambda address: nullcontext())
    shutil.copytree(place / "index", tmp_path / "index")
    encoder = Encoder.load(EncoderConfig())
    secret = Document("secret", "The secret of the mill is an old stone.", owner="ann", metadata={"n": 1})
    with IndexWriter(tmp_path / "index", encoder) as writer:
        writer.upsert(secret)
        generation = writer.commit().generation_id
    wanted = {"type": "eq", "key": "n", "value": 1}
    row = {"question": "What is the secret of the mill?"}
    rows = [
        {"id": "ann", **row, "tenant": "ann", "filter": wanted},
        {"id": "bob", **row, "tenant": "bob"},
        {"id": "none", **row, "tenant": "ann", "filter": json.dumps({"type": "not", "filter": wanted})},
        {**chat_row("chat", row["question"]), "tenant": "ann", "filter": wanted},
    ]
    inputs = write_lines(tmp_path / "q.jsonl", rows)
    answer = batch_rag._answer

    def change_first(*arguments: Any) -> None:
        for number in range(3):
            with IndexWriter(tmp_path / "index", encoder) as writer:
                writer.upsert(Document("secret", f"Changed {number}.", owner="ann", metadata={"n": 1}))
                writer.compact()
                writer.purge()
        answer(*arguments)

    monkeypatch.setattr(batch_rag, "_answer", change_first)
    begun = job(place, inputs, tmp_path / "out")
    retriever = begun.config.retriever.model_copy(update={"index_dir": str(tmp_path / "index")})
    run(replace(begun, config=begun.config.model_copy(update={"retriever": retriever})))
    answers = {answer.get("custom_id", answer["id"]): answer for answer in answers_of(tmp_path / "out")}
    details = {**answers, "chat": answers["chat"]["response"]["body"]["ragspec"]}
    assert details["ann"]["passages"] == details["chat"]["passages"] == ["secret#0"]
    assert all("secret#0" not in details[name]["passages"] and details[name]["passages"] for name in ("bob", "none"))
    assert {each["index_generation"] for each in details.values()} == {generation}
    assert not list((tmp_path / "index").glob(".lease-*"))


@pytest.mark.ray
def test_a_job_answers_as_the_pipeline_does(place: Path, tmp_path: Path) -> None:
    """Ray, batches, forms of input or the order change a text; a wrong row disappears."""
    from ragspec.rag.pipeline import Pipeline

    (tmp_path / "in").mkdir()
    plain = [{"id": f"q{n}", "question": question} for n, question in enumerate(QUESTIONS[:10])]
    too_long = {"id": "long", "question": "x", "max_tokens": 5000}
    chat = chat_row("chat", seed=3, temperature=0.5, max_completion_tokens=12)
    write_lines(tmp_path / "in" / "a.jsonl", [*plain, too_long, {"id": "none"}, chat])
    table = pa.table({"id": [1, 2], "question": ["Which mill?", "Which sea?"], "temperature": [0.0, None]})
    pq.write_table(table, tmp_path / "in" / "b.parquet")
    out = tmp_path / "out"

    summary = run(job(place, tmp_path / "in", out, num_engines=2))

    assert (summary.num_answered, summary.num_failed, summary.num_skipped) == (13, 2, 0)
    answers = {answer.get("custom_id", answer["id"]): answer for answer in answers_of(out)}
    assert len(answers_of(out)) == len(answers) == 13
    defaults = job(place, tmp_path, out).defaults
    with Pipeline.from_config(load_config(place / "config.yaml")) as pipeline:
        for row in [*plain, {"id": 1, "question": "Which mill?", "temperature": 0.0}, chat]:
            parsed = parse_row(row)
            expected = pipeline.ask(parsed.question, parsed.params(defaults, SEED))
            answer = answers[parsed.id]
            got = answer["response"]["body"] if parsed.openai else answer
            text = got["choices"][0]["message"]["content"] if parsed.openai else got["answer"]
            details = got["ragspec"] if parsed.openai else got
            assert text == expected.text
            assert got["system_fingerprint"] == expected.system_fingerprint
            assert details["passages"] == [passage.id for passage in expected.passages]
            assert details["seed"] == expected.seed
            assert details["index_generation"] == pipeline._retriever.generation
    chat_body = answers["chat"]["response"]["body"]
    assert answers["chat"]["response"]["status_code"] == 200
    assert (chat_body["object"], chat_body["usage"]["completion_tokens"] <= 12) == ("chat.completion", True)
    errors = {error["id"]: error for error in read_lines(out / "errors.jsonl")}
    assert {name: (error["source"], error["row"], error["code"]) for name, error in errors.items()} == {
        "none": ("a.jsonl", 12, "invalid_row"),
        "long": ("a.jsonl", 11, "context_length_exceeded"),
    }


def start(place: Path, inputs: Path, out: Path) -> subprocess.Popen[bytes]:
    log = open(out.with_suffix(".log"), "ab")  # noqa: SIM115 - the process keeps it
    with log:
        return subprocess.Popen(
            command(place, inputs, out, "--address", "local"),
            cwd=out.parent,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 240.0) -> Any:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if found := condition():
            return found
        time.sleep(0.02)
    pytest.fail(f"{what} did not happen within {timeout_s} s")


def children(pid: int) -> list[int]:
    """Every living descendant."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, todo = [], [pid]
    while todo:
        todo.extend(parents.get(todo[0], ()))
        found.append(todo.pop(0))
    return found[1:]


def alive(pids: list[int]) -> list[int]:
    states = {pid: Path(f"/proc/{pid}/stat") for pid in pids}
    return [pid for pid, stat in states.items() if stat.exists() and ") Z " not in stat.read_text()]


def is_worker(pid: int) -> bool:
    try:
        return b"SpanWorker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def some_rows(out: Path) -> bool:
    parts = list(out.glob("answers-*"))
    return any(part.read_bytes().count(b"\n") >= 8 for part in parts)


def texts(out: Path) -> dict[str, str]:
    answers = answers_of(out)
    assert len({answer["id"] for answer in answers}) == len(answers)
    return {answer["id"]: answer["answer"] for answer in answers}


@pytest.fixture(scope="module")
def straight(place: Path) -> dict[str, str]:
    """80 rows, answered without interruption."""
    write_lines(place / "q.jsonl", [{"id": f"q{n}", "question": q, "max_tokens": 96} for n, q in enumerate(QUESTIONS)])
    subprocess.run(command(place, place / "q.jsonl", place / "straight", "--address", "local"), check=True, cwd=place)
    return texts(place / "straight")


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("victim", ["driver", "worker", "everything"])
def test_a_killed_job_is_finished_by_running_it_again(
    place: Path, straight: dict[str, str], tmp_path: Path, victim: str
) -> None:
    """Rows are lost, answered twice, or answered differently."""
    out = tmp_path / "out"
    process = start(place, place / "q.jsonl", out)
    everyone: list[int] = []
    try:
        wait_for(lambda: some_rows(out) or process.poll() is not None, "the first answer")
        everyone = children(process.pid)
        workers = [pid for pid in everyone if is_worker(pid)]
        assert process.poll() is None, out.with_suffix(".log").read_text()
        assert workers
        for pid in {"driver": [process.pid], "worker": workers, "everything": [*everyone, process.pid]}[victim]:
            os.kill(pid, signal.SIGKILL)
        code = process.wait(300)
        wait_for(lambda: not alive(workers), "the end of the engines", 60)
    finally:
        process.kill()
        for pid in alive(everyone):
            os.kill(pid, signal.SIGKILL)
    assert code == (0 if victim == "worker" else -signal.SIGKILL)
    if victim != "worker":
        whole = sum(part.read_bytes().count(b"\n") for part in out.glob("answers-*"))
        assert 0 < whole < len(QUESTIONS), "killed too late to show anything"
        last = subprocess.run(
            command(place, place / "q.jsonl", out, "--address", "local"),
            check=True,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
        )
        summary = json.loads(last.stdout.splitlines()[-1])
        assert (summary["skipped"], summary["answered"], summary["failed"]) == (whole, len(QUESTIONS) - whole, 0)
    assert texts(out) == straight
    assert not read_lines(out / "errors.jsonl")


def free_ports(count: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture
def cluster() -> Iterator[dict[str, str]]:
    """A head of its own, guarded by a token: the environment of a client. Stopped by the ids of its processes."""
    folder = tempfile.mkdtemp(prefix="rs")  # Why not tmp_path: a socket's path may have 107 bytes
    gcs, dashboard, agent, agent_grpc, client, metrics = free_ports(6)
    environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment.pop("RAY_ADDRESS", None)
    ports = f"--port={gcs} --dashboard-port={dashboard} --dashboard-agent-listen-port={agent}"
    more = f"--dashboard-agent-grpc-port={agent_grpc} --ray-client-server-port={client} --metrics-export-port={metrics}"
    head = subprocess.Popen(
        ["ray", "start", "--head", "--block", f"--temp-dir={folder}", *ports.split(), *more.split(), "--num-cpus=2"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd=folder,
    )
    address = f"http://127.0.0.1:{dashboard}"
    try:
        wait_for(lambda: _jobs_answer(address, environment), "a head that takes jobs", 120)
        yield environment | {"ADDRESS": address}
    finally:
        everyone = [*children(head.pid), head.pid]
        head.terminate()
        for pid in everyone:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        head.wait(30)
        wait_for(lambda: not alive(everyone), "the end of the head", 30)
        shutil.rmtree(folder, ignore_errors=True)


def _jobs_answer(address: str, environment: dict[str, str]) -> bool:
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", int(address.rpartition(":")[2]))):
            return False
    return (
        subprocess.run(["ray", "job", "list", "--address", address], env=environment, capture_output=True).returncode
        == 0
    )


@pytest.mark.slow
@pytest.mark.ray
def test_a_job_is_submitted_to_a_guarded_cluster(cluster: dict[str, str], place: Path, tmp_path: Path) -> None:
    """The token, the installed package or the uploaded folder are not found; or half a gigabyte is uploaded."""
    work = tmp_path / "work"
    work.mkdir()
    write_lines(work / "q.jsonl", [{"id": f"q{n}", "question": question} for n, question in enumerate(QUESTIONS[:6])])
    submit = ["ray", "job", "submit", "--address", cluster["ADDRESS"], "--working-dir", str(work), "--"]
    arguments = ["--config", str(place / "config.yaml"), "--input", "q.jsonl"]
    job_command = [*submit, "python", "-m", "pipelines.batch_rag", *arguments]

    relative = subprocess.run([*job_command, "--out", "out"], env=cluster, capture_output=True, text=True)
    assert relative.returncode == 1
    assert "must be absolute in a submitted job" in relative.stdout + relative.stderr

    done = subprocess.run(
        [*job_command, "--out", str(tmp_path / "out")], env=cluster, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(texts(tmp_path / "out")) == 6

    stranger = cluster | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    refused = subprocess.run(
        [*job_command, "--out", str(tmp_path / "no")], env=stranger, capture_output=True, text=True
    )
    assert refused.returncode != 0
    assert not (tmp_path / "no").exists()

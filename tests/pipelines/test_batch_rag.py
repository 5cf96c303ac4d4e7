"""The job that answers questions: what it writes, that killing it changes nothing, and how it ends when something is lost."""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from batch_files import ASKED, SEED, answers_by_id, chat_row, read_lines, text_of, texts_of, uneven_rows, write_lines
from typer.testing import CliRunner, Result

from pipelines.batch import backend as batch_backend
from pipelines.batch import job as batch_job
from pipelines.batch.backend import BackendSpec, Runtime
from pipelines.batch.job import Job, run_job
from pipelines.batch.rows import QUESTIONS, parse_row
from pipelines.batch_rag import RagTask, app
from ragspec.config import EncoderConfig, PipelineConfig, TargetConfig, load_config
from ragspec.core import Document, Message
from ragspec.core import Request as EngineRequest
from ragspec.errors import ConfigError, EngineError, ReplicaLost, RetrievalError
from ragspec.rag import steps
from ragspec.rag.chat.chat import Chat
from ragspec.rag.chat.history import ChatTurn
from ragspec.rag.pipeline import Pipeline
from ragspec.rag.steps import collect_completions
from ragspec.retrieval.encoder import Encoder
from ragspec.retrieval.index.pointer import read_pointer
from ragspec.retrieval.index.writer import IndexWriter
from ragspec.retrieval.retriever import Retriever

NUM_ROWS = 30


def called(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def job(place: Path, inputs: Path, out: Path, **options: Any) -> Job:
    config = load_config(place / "config.yaml")
    return Job(inputs, out, config, SEED, **{"backend": BackendSpec(address="local"), **options})


def test_a_job_of_wrong_rows_says_so_and_ends_well(place: Path, tmp_path: Path) -> None:
    """Wrong rows are taken for a failed job, or `--strict` for nothing; an engine is loaded for no row at all."""
    inputs = write_lines(tmp_path / "q.jsonl", [{"id": "a"}, "b", {"id": "a", "question": "x"}, chat_row("c", "")])
    usual = ["--config", str(place / "config.yaml"), "--input", str(inputs), "--out", str(tmp_path / "out")]
    result = called(*usual)
    assert result.exit_code == 0
    summary = json.loads(result.stdout.splitlines()[-1])
    assert (summary["rows"], summary["failed"], summary["answered"], summary["skipped"]) == (4, 4, 0, 0)
    assert summary["machine_s_per_1k_questions"] is summary["cost_per_1k_questions"] is None
    assert "4 rows have no answer" in result.stderr
    assert called(*usual, "--strict").exit_code == 1
    plain, chat = read_lines(tmp_path / "out" / "errors.jsonl")[::3]
    place = {"id": "a", "source": "q.jsonl", "row": 1}
    assert plain == place | {"code": "invalid_row", "reason": "the row has no question"}
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
    write_lines(tmp_path / "in" / "q.jsonl", [{"id": "a", "question": "x"}])
    result = called("--config", str(place / "config.yaml"), "--input", "in", "--out", "out", *options)
    assert result.exit_code == 1
    assert reason in result.stderr
    assert (len(result.stderr.splitlines()), result.stdout) == (1, "")


@pytest.fixture
def straight(place: Path, loaded: Runtime) -> dict[str, str]:
    """Rows answered without interruption."""
    if not (place / "straight").exists():
        write_lines(place / "q.jsonl", uneven_rows(NUM_ROWS))
        summary = run_job(job(place, place / "q.jsonl", place / "straight"), RagTask())
        assert (summary.num_answered, summary.num_failed) == (NUM_ROWS, 0)
    return texts_of(place / "straight")


def changed(begun: Job, section: str, **settings: str) -> Job:
    own = getattr(begun.config, section).model_copy(update=settings)
    return replace(begun, config=begun.config.model_copy(update={section: own}))


def test_a_job_begun_in_float_weights_is_not_continued_in_others(place: Path, tmp_path: Path) -> None:
    """An update made int8 automatic: a begun job was refused, or went on in other weights."""
    begun = job(place, write_lines(tmp_path / "q.jsonl", [{"id": "a"}]), tmp_path / "out")  # no row needs an engine
    run_job(changed(begun, "target", quantization="none"), RagTask())
    assert "weights" not in json.loads((tmp_path / "out" / "job.json").read_text())
    run_job(begun, RagTask())
    with pytest.raises(ConfigError, match="holds a job"):
        run_job(changed(begun, "target", quantization="int8"), RagTask())


@pytest.mark.slow
def test_a_job_begun_in_float_weights_goes_on_in_them(place: Path, tmp_path: Path) -> None:
    """Half of a begun job's texts came from other weights."""
    begun = job(place, write_lines(tmp_path / "q.jsonl", uneven_rows(4)), tmp_path / "out")
    run_job(changed(begun, "target", quantization="none"), RagTask())
    whole = texts_of(begun.out)
    [answers] = begun.out.glob("answers-*.jsonl")
    answers.write_text("".join(answers.read_text().splitlines(keepends=True)[:2]))  # the begun job
    summary = run_job(begun, RagTask())
    assert (summary.num_skipped, summary.num_answered) == (2, 2)
    assert texts_of(begun.out) == whole


def test_a_job_from_before_learned_fusion_goes_on_by_rank(place: Path, tmp_path: Path) -> None:
    """A half-done job was refused after an update, for a setting that nobody had made; or went on in another order or layout."""
    inputs, out = write_lines(tmp_path / "q.jsonl", [{"id": "a"}]), tmp_path / "out"
    run_job(job(place, inputs, out), RagTask())
    settings = json.loads((out / "job.json").read_text())
    assert settings["retriever"].pop("fusion") == "learned"
    assert settings.pop("layout") == "free"
    (out / "job.json").write_text(json.dumps(settings))
    run_job(job(place, inputs, out), RagTask())
    assert json.loads((out / "job.json").read_text()) == settings
    config = job(place, inputs, out).config
    before = RagTask().config_of_begun(config, settings)
    assert (before.retriever.fusion, before.wording.layout) == ("rank", "quote")
    quoting = config.model_copy(update={"target": TargetConfig(model="Qwen2.5-Coder-0.5B-Instruct")})
    assert RagTask().config_of_begun(quoting, settings | {"layout": "short"}).wording.layout == "short"
    unset = PipelineConfig(target=config.target)
    assert (unset.retriever.num_passages, unset.retriever.abstain_below) == (5, 0.12)
    begun_so = RagTask().config_of_begun(unset, settings).retriever
    assert (begun_so.num_passages, begun_so.abstain_below, begun_so.fusion) == (2, 0.0, "rank")
    asked = config.retriever.model_validate({**config.retriever.model_dump(exclude_unset=True), "fusion": "learned"})
    begun = job(place, inputs, out)
    with pytest.raises(ConfigError, match="holds a job with retriever"):
        run_job(replace(begun, config=config.model_copy(update={"retriever": asked})), RagTask())
    run_job(replace(begun, resume=False), RagTask())
    assert json.loads((out / "job.json").read_text())["retriever"]["fusion"] == "learned"


def test_a_job_begun_without_an_order_of_passages_goes_on_by_rank(place: Path, tmp_path: Path) -> None:
    """Half of a job's prompts had another order; or a job was refused for a setting from after it."""
    begun = job(place, write_lines(tmp_path / "q.jsonl", [{"id": "a"}]), tmp_path / "out")
    run_job(begun, RagTask())
    assert "passage_order" not in json.loads((begun.out / "job.json").read_text())["generation"]
    run_job(changed(begun, "generation", passage_order="shared"), RagTask())
    run_job(replace(changed(begun, "generation", passage_order="shared"), resume=False), RagTask())
    assert json.loads((begun.out / "job.json").read_text())["generation"]["passage_order"] == "shared"
    with pytest.raises(ConfigError, match="holds a job"):
        run_job(begun, RagTask())


def test_a_job_keeps_tenants_apart_and_its_generation(
    place: Path, served: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A filter or a tenant that retrieval never hears of; answers from an index that was changed while the job ran."""
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
    answer = batch_job._answer

    def change_first(*arguments: Any) -> None:
        for number in range(3):
            with IndexWriter(tmp_path / "index", encoder) as writer:
                writer.upsert(Document("secret", f"Changed {number}.", owner="ann", metadata={"n": 1}))
                writer.compact()
                writer.purge()
        answer(*arguments)

    @contextlib.contextmanager
    def load(config: PipelineConfig) -> Iterator[Runtime]:
        yield served._replace(retriever=Retriever.from_config(config.retriever, encoder))

    monkeypatch.setattr(batch_job, "_answer", change_first)
    monkeypatch.setattr(batch_backend, "_load_in_process", load)
    begun = job(place, inputs, tmp_path / "out")
    run_job(changed(begun, "retriever", index_dir=str(tmp_path / "index")), RagTask())
    answers = answers_by_id(tmp_path / "out")
    details = {**answers, "chat": answers["chat"]["response"]["body"]["ragspec"]}
    assert details["ann"]["passages"] == details["chat"]["passages"] == ["secret#0"]
    assert all("secret#0" not in details[name]["passages"] and details[name]["passages"] for name in ("bob", "none"))
    assert {each["index_generation"] for each in details.values()} == {generation}
    assert not list((tmp_path / "index").glob(".lease-*"))


def test_a_system_message_is_read_as_in_a_chat(place: Path, loaded: Runtime, tmp_path: Path) -> None:
    """A line with a system message was answered without it, or by another prompt than the same chat completion's."""
    messages = [{"role": "system", "content": "Answer like a miller."}, {"role": "user", "content": "Which mill?"}]
    inputs = write_lines(tmp_path / "in.jsonl", [chat_row("own", messages=messages), chat_row("none", "Which mill?")])
    begun = job(place, inputs, tmp_path / "out")
    run_job(begun, RagTask())
    texts = texts_of(tmp_path / "out")
    assert loaded.retriever is not None
    params = parse_row(chat_row("own"), QUESTIONS).params(begun.defaults, SEED)
    asked = tuple(Message(message["role"], message["content"]) for message in messages)
    turn = ChatTurn("own", asked, params, num_passages=2)
    (expected,) = loaded.engine.generate([Chat(loaded.retriever, loaded.prompts, None).prepare(turn).request])
    assert texts["own"] == expected.text != texts["none"]


def test_a_job_answers_as_the_pipeline_does(place: Path, loaded: Runtime, tmp_path: Path) -> None:
    """Stages, batches, forms of input or the order change a text; a wrong row disappears."""
    (tmp_path / "in").mkdir()
    plain = [{"id": f"q{n}", "question": question} for n, question in enumerate(ASKED[:10])]
    too_long = {"id": "long", "question": "x", "max_tokens": 5000}
    chat = chat_row("chat", seed=3, temperature=0.5, max_completion_tokens=12)
    write_lines(tmp_path / "in" / "a.jsonl", [*plain, too_long, {"id": "none"}, chat])
    table = pa.table({"id": [1, 2], "question": ["Which mill?", "Which sea?"], "temperature": [0.0, None]})
    pq.write_table(table, tmp_path / "in" / "b.parquet")
    out = tmp_path / "out"

    begun = job(place, tmp_path / "in", out, price_per_hour=7.2)
    summary = run_job(begun, RagTask())

    assert (summary.num_answered, summary.num_failed, summary.num_skipped) == (13, 2, 0)
    _check_speed(summary.to_dict(out))
    answers = answers_by_id(out)
    assert len(answers) == 13
    assert loaded.retriever is not None
    pipeline = Pipeline(loaded.retriever, loaded.engine, loaded.prompts, num_passages=2)
    for row in [*plain, {"id": 1, "question": "Which mill?", "temperature": 0.0}, chat]:
        parsed = parse_row(row, QUESTIONS)
        expected = pipeline.ask(parsed.text, parsed.params(begun.defaults, SEED))
        answer = answers[parsed.id]
        got = answer["response"]["body"] if parsed.openai else answer
        details = got["ragspec"] if parsed.openai else got
        assert text_of(answer, "answer") == expected.text
        assert got["system_fingerprint"] == expected.system_fingerprint
        assert details["passages"] == [passage.id for passage in expected.passages]
        assert details["seed"] == expected.seed
        assert details["index_generation"] == expected.stats.index_generation
    errors = {error["id"]: error for error in read_lines(out / "errors.jsonl")}
    assert {name: (error["source"], error["row"], error["code"]) for name, error in errors.items()} == {
        "none": ("a.jsonl", 12, "invalid_row"),
        "long": ("a.jsonl", 11, "context_length_exceeded"),
    }


def _check_speed(summary: dict[str, Any]) -> None:
    """The figures follow from each other as the help says."""
    assert [stage["name"] for stage in summary["stages"]] == ["retrieve", "prompt", "generate", "cite"]
    assert [stage["num_items"] for stage in summary["stages"]] == [14, 14, 13, 13]
    assert sum(stage["num_failed"] for stage in summary["stages"]) == 1
    assert summary["questions_per_hour"] == pytest.approx(summary["rows_per_s"] * 3600, rel=0.01)
    assert summary["rows_per_s"] == pytest.approx(13 / summary["generating_s"], rel=0.05)
    assert (summary["machines"], summary["replays"], summary["near_ties"]) == (1, 0, 0)
    rounding = 1000 * 0.01 / 13  # of `elapsed_s`
    assert summary["machine_s_per_1k_questions"] == pytest.approx(1000 * summary["elapsed_s"] / 13, abs=rounding)
    assert summary["cost_per_1k_questions"] == pytest.approx(summary["machine_s_per_1k_questions"] * 0.002, abs=1e-3)


def fail_generation(
    monkeypatch: pytest.MonkeyPatch, error: Exception, is_lost: Callable[[EngineRequest], bool]
) -> None:
    """Raise the error for every request of which `is_lost` says so."""

    async def losing(engine: Any, request: EngineRequest) -> Any:
        if is_lost(request):
            raise error
        return await collect_completions(engine, request)

    monkeypatch.setattr(steps, "collect_completions", losing)


@pytest.mark.parametrize("error", [ReplicaLost("no engine is left"), RetrievalError("the index is lost")])
def test_a_loss_for_good_ends_the_job_and_nothing_wrong_is_written(
    place: Path, straight: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A thousand rows "failed" because of one dead machine; or answered from what was left of the index."""
    with monkeypatch.context() as patch:
        left = iter(range(10))
        fail_generation(patch, error, lambda request: next(left, None) is None)
        with pytest.raises(EngineError, match=f"the job stopped: {error}.*run it again"):
            run_job(job(place, place / "q.jsonl", tmp_path / "out"), RagTask())
    kept = texts_of(tmp_path / "out")
    assert len(kept) <= 10 and kept.items() <= straight.items()
    assert not read_lines(tmp_path / "out" / "errors.jsonl.part")
    summary = run_job(job(place, place / "q.jsonl", tmp_path / "out"), RagTask())
    assert (summary.num_skipped, summary.num_failed) == (len(kept), 0)
    assert texts_of(tmp_path / "out") == straight


def test_an_error_of_one_request_is_its_rows(
    place: Path, straight: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row that no engine can answer ends the job, now and at every resume."""
    fail_generation(monkeypatch, EngineError("a step failed"), lambda request: request.id == "q7")
    summary = run_job(job(place, place / "q.jsonl", tmp_path / "out"), RagTask())
    assert (summary.num_answered, summary.num_failed) == (NUM_ROWS - 1, 1)
    assert texts_of(tmp_path / "out") == {name: text for name, text in straight.items() if name != "q7"}
    (failed,) = read_lines(tmp_path / "out" / "errors.jsonl")
    assert (failed["id"], failed["code"], failed["reason"]) == ("q7", "engine_error", "a step failed")


def test_a_generation_that_is_named_is_the_one_that_answers(place: Path, tmp_path: Path) -> None:
    """The job overwrote it with the current one, so that nothing could be pinned."""
    shutil.copytree(place / "index", tmp_path / "index")
    first = read_pointer(tmp_path / "index")
    with IndexWriter(tmp_path / "index", Encoder.load(EncoderConfig())) as writer:
        writer.upsert(Document("more", "Another text."))
        writer.commit()
    given = {"retriever.index_dir": str(tmp_path / "index")}
    for pointer, wanted in ((first, first), ("", read_pointer(tmp_path / "index"))):
        config = load_config(place / "config.yaml", **given, **{"retriever.pointer": pointer})
        with RagTask().pinned_config(config) as pinned:
            assert pinned.retriever.pointer == wanted

"""The job that corrects texts: the same machinery as for questions, with rows, results and settings of its own."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batch_files import SEED, answers_by_id, chat_row, read_lines, text_of, write_lines
from tiny_target import SENTENCES
from typer.testing import CliRunner, Result

from pipelines.batch.backend import BackendSpec, Runtime
from pipelines.batch.job import Job, run_job
from pipelines.batch.output import OutputFolder
from pipelines.batch.rows import TEXTS, RowResult, parse_row
from pipelines.batch.text_files import collect_texts, holds_texts, write_corrected_files
from pipelines.batch_grammar import GrammarTask, app, with_correction_length
from ragspec.cluster.topology import ClusterConfig
from ragspec.config import load_config, load_settings
from ragspec.errors import ConfigError, EngineError, InputError
from ragspec.rag.grammar.correction import DEFAULT_PARAMS, Correction, CorrectionRequest
from ragspec.rag.grammar.edits import Edit, apply_edits
from ragspec.rag.grammar.grammar import Grammar

TEXT = f"{SENTENCES[0]}  {SENTENCES[1]}\n\n{SENTENCES[2]}\n"


def job(place: Path, inputs: Path, out: Path) -> Job:
    return Job(inputs, out, load_config(place / "config.yaml"), SEED, backend=BackendSpec(address="local"))


def test_a_job_corrects_as_the_library_does(place: Path, loaded: Runtime, tmp_path: Path) -> None:
    """A job whose rows are split, seeded or put together otherwise; a bad row that ends it."""
    rows: list[dict[str, Any]] = [{"id": f"t{n}", "text": TEXT * n, "max_tokens": 8 + n} for n in range(1, 5)]
    rows += [{"id": "none", "text": "42, 43."}, {"id": "stop", "text": TEXT, "stop": "x"}, {"id": "empty", "text": ""}]
    rows += [chat_row("chat", TEXT, max_tokens=8)]
    begun = job(place, write_lines(tmp_path / "t.jsonl", rows), tmp_path / "out")
    summary = run_job(begun, GrammarTask())
    assert (summary.num_answered, summary.num_failed) == (6, 2)
    assert {row["id"] for row in read_lines(tmp_path / "out" / "errors.jsonl")} == {"stop", "empty"}
    corrector = Grammar(loaded.engine, loaded.prompts)
    answers = answers_by_id(tmp_path / "out")
    for row in [*rows[:5], rows[-1]]:
        parsed = parse_row(row, TEXTS)
        expected = corrector.correct(parsed.text, parsed.params(begun.defaults, SEED))
        got = answers[parsed.id]
        details = got["response"]["body"]["ragspec"] if parsed.openai else got
        text = text_of(got, "corrected")
        assert text == expected.corrected
        assert apply_edits(parsed.text, [Edit(**edit) for edit in details["edits"]]) == text
        assert [tuple(span) for span in details["unfinished"]] == list(expected.unfinished)
        assert details["stats"]["num_output_tokens"] == expected.stats.num_output_tokens
    assert answers["none"]["corrected"] == "42, 43." and answers["none"]["system_fingerprint"] == ""
    report = summary.to_dict(tmp_path / "out")
    assert [stage["name"] for stage in report["stages"]] == ["split", "generate", "edit"]
    assert report["texts_per_hour"] > 0 and report["machine_s_per_1k_texts"] > 0
    assert len(report["system_fingerprints"]) == 1


def test_a_folder_of_answers_is_not_continued_with_corrections(place: Path, tmp_path: Path) -> None:
    """Answers and corrections in one file."""
    inputs = write_lines(tmp_path / "t.jsonl", [{"id": "a", "question": "x"}])
    run_job(job(place, inputs, tmp_path / "out"), GrammarTask())
    settings = json.loads((tmp_path / "out" / "job.json").read_text())
    del settings["task"]
    (tmp_path / "out" / "job.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="a job with task None, not 'grammar'"):
        run_job(job(place, inputs, tmp_path / "out"), GrammarTask())


def test_a_job_without_an_index_needs_none(place: Path, tmp_path: Path) -> None:
    """A corrector that asks for an index; wrong rows alone load no target."""
    inputs = write_lines(tmp_path / "t.jsonl", [{"id": "a"}])
    target = ["--target", str(place / "target")]
    result = CliRunner().invoke(app, ["--input", str(inputs), "--out", str(tmp_path / "out"), *target])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["failed"] == 1


def test_a_manuscript_is_what_a_row_says(place: Path, tmp_path: Path) -> None:
    """A tenant's text in everybody's cache."""
    row = parse_row({"id": "a", "text": "He go.", "tenant": "ann", "seed": 3}, TEXTS)
    begun = job(place, tmp_path, tmp_path)
    params = row.params(begun.defaults, SEED)
    assert GrammarTask().request(row, params, begun.config) == CorrectionRequest("a", "He go.", params, "ann")
    assert params.seed == 3


def test_files_of_text_come_back_as_files(tmp_path: Path) -> None:
    """A folder of documents that has to be made into rows by hand; a photograph that ends the job; two files of one name."""
    folder, out, told = tmp_path / "in", tmp_path / "out", list[str]()
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_bytes(b"He go.\r\n")
    (folder / "sub" / "a.txt").write_bytes("\ufeffIt rain.".encode())
    (folder / "photo.md").write_bytes(b"\xff\xd8")
    (folder / "empty.txt").write_bytes(b" \n")
    (folder / "data.bin").write_bytes(b"\0")
    assert holds_texts(folder) and holds_texts(folder / "a.txt") and not holds_texts(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").write_text("")
    assert not holds_texts(tmp_path)
    rows = read_lines(collect_texts(folder, out, told.append))
    assert [(row["id"], row["text"]) for row in rows] == [("a.txt", "He go.\r\n"), ("sub/a.txt", "\ufeffIt rain.")]
    assert len(told) == 2 and "photo.md is not UTF-8: byte 0" in told[1]
    answers = [{"id": row["id"], "corrected": row["text"].replace("go", "goes")} for row in rows]
    (out / "answers-00000.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    assert write_corrected_files(out) == 2
    assert (out / "files" / "a.txt").read_bytes() == b"He goes.\r\n"
    assert (out / "files" / "sub" / "a.txt").read_bytes() == "\ufeffIt rain.".encode()
    with pytest.raises(InputError, match="no text"):
        collect_texts(folder / "data.bin", out, told.append)


def corrected(place: Path, inputs: Path, out: Path, *more: str) -> Result:
    call = ["--input", str(inputs), "--out", str(out), "--config", str(place / "config.yaml"), "--address", "local"]
    return CliRunner().invoke(app, [*call, "--max-tokens", "8", *more])


def test_a_job_of_files_corrects_and_goes_on(place: Path, loaded: Runtime, tmp_path: Path) -> None:
    """Files that are corrected again from the start; other guards for the second half."""
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.md").write_text(f"# Title\n\n{TEXT}")
    first = corrected(place, folder, out)
    assert first.exit_code == 0, first.stderr
    assert sorted(path.name for path in (out / "files").iterdir()) == ["0.md", "1.md", "2.md"]
    assert json.loads(corrected(place, folder, out).stdout.splitlines()[-1])["skipped"] == 3
    other = corrected(place, folder, out, "--max-edit-ratio", "0.2")
    assert other.exit_code == 1 and "max_edit_ratio" in other.stderr
    rows = (out / "input" / "texts.jsonl").read_bytes()
    (folder / "0.md").unlink()
    (folder / "1.md").write_text("Other.")
    with OutputFolder(out):  # a job that runs there: what it reads stays
        busy = corrected(place, folder, out)
    assert busy.exit_code == 1 and "another job writes to" in busy.stderr
    assert (out / "input" / "texts.jsonl").read_bytes() == rows
    assert json.loads(corrected(place, folder, out).stdout.splitlines()[-1])["failed"] == 1
    assert [path.name for path in (out / "files").iterdir()] == ["2.md"]  # no text that is of no file any more


def test_files_are_written_though_a_row_failed_and_none_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Path, loaded: Runtime
) -> None:
    """--strict threw away all that was corrected."""
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    (folder / "a.md").write_text(TEXT)
    kept = GrammarTask.row_result

    def failing(task: GrammarTask, result: Correction) -> RowResult:
        if result.text != TEXT:
            raise EngineError("its replica is lost")
        return kept(task, result)

    monkeypatch.setattr(GrammarTask, "row_result", failing)
    (folder / "b.md").write_text(f"{TEXT} And more.")
    ended = corrected(place, folder, out, "--strict")
    assert ended.exit_code == 1 and json.loads(ended.stdout.splitlines()[-1])["failed"] == 1
    assert [path.name for path in (out / "files").iterdir()] == ["a.md"]


def test_an_output_inside_the_input_is_refused_every_time(tmp_path: Path) -> None:
    """The first run took it; the second took the first one's rows for its input, and could not go on."""
    (tmp_path / "a.md").write_text(TEXT)
    for _ in range(2):
        ended = CliRunner().invoke(app, ["--input", str(tmp_path), "--out", str(tmp_path / "out")])
        assert ended.exit_code == 1 and "lies in the input folder" in ended.stderr
        assert not (tmp_path / "out").exists()


def test_the_length_of_a_correction_is_the_one_that_is_given(tmp_path: Path) -> None:
    """The option's own default won over the file's `generation.max_tokens`."""
    (tmp_path / "c.yaml").write_text("generation: {max_tokens: 64}")
    given = with_correction_length(load_settings(ClusterConfig, tmp_path / "c.yaml"))
    assert given.generation.max_tokens == 64
    assert with_correction_length(load_settings(ClusterConfig)).generation.max_tokens == DEFAULT_PARAMS.max_tokens


def test_a_job_is_not_continued_with_other_weights_of_the_same_name(place: Path, tmp_path: Path) -> None:
    """A target that was trained on and exported again: half of the texts of one model, half of another."""
    model = tmp_path / "model"
    shutil.copytree(load_config(place / "config.yaml").target.model, model)
    config = load_config(place / "config.yaml", **{"target.model": str(model)})
    inputs = write_lines(tmp_path / "t.jsonl", [{"id": "a"}])
    for _ in range(2):
        run_job(replace(job(place, inputs, tmp_path / "out"), config=config), GrammarTask())
    (weights,) = model.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    with pytest.raises(ConfigError, match="a job with target_files"):
        run_job(replace(job(place, inputs, tmp_path / "out"), config=config), GrammarTask())

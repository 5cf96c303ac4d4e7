"""From questions to passages, and from files to an index."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from letter_encoder import LetterEncoder
from typer.testing import CliRunner

import pipelines.build_index as build_index_job
from ragspec.config import ChunkingConfig, EncoderConfig, RetrieverConfig
from ragspec.core import Document
from ragspec.errors import ConfigError, EncoderMismatch, InputError, StoreMissing
from ragspec.retrieval import retriever as retriever_module
from ragspec.retrieval.encoder import Encoder
from ragspec.retrieval.reading import read_documents
from ragspec.retrieval.retriever import Retriever, build_index
from ragspec.retrieval.store import Store

FACTS = [
    Document("rivers", "The Danube flows into the Black Sea. The Rhine flows into the North Sea.", "Rivers"),
    Document("kings", "Charlemagne was crowned in the year 800. He lived in Aachen.", "Kings"),
    Document("plants", "Chlorophyll makes leaves green. Roots take up water.", "Plants"),
    Document("copy", "Chlorophyll makes leaves green. Roots take up water.", "Plants"),
]
QUESTIONS = ["Where does the Danube end?", "Who was crowned in 800?", "Why are leaves green?"]


@pytest.fixture(scope="module")
def facts_dir(tmp_path_factory: pytest.TempPathFactory, encoder: Encoder) -> Path:
    folder = tmp_path_factory.mktemp("facts")
    build_index(FACTS, folder, encoder, ChunkingConfig(max_chars=45))
    return folder


def test_questions_find_their_facts_alone_and_together(facts_dir: Path, encoder: Encoder) -> None:
    """A batch that shuffles its rows answers everybody with somebody else's passages."""
    retriever = Retriever(encoder, Store.open(facts_dir))
    together = retriever.retrieve(QUESTIONS, 3)
    assert [passages[0].document_id for passages in together] == ["rivers", "kings", "copy"]
    assert together == [retriever.retrieve([question], 3)[0] for question in QUESTIONS]
    for passages in together:
        scores = [passage.score for passage in passages]
        assert scores == sorted(scores, reverse=True) and len({p.id for p in passages}) == 3
        for passage in passages:
            text = next(d.text for d in FACTS if d.id == passage.document_id)
            assert text[passage.start : passage.end] == passage.text
    same = together[2][:2]
    assert [p.document_id for p in same] == ["copy", "plants"] and same[0].score == same[1].score


def test_generation_and_edges(facts_dir: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """k above the number of passages, no question, and what names the index."""
    monkeypatch.setattr(retriever_module.Encoder, "load", lambda _: encoder)
    retriever = Retriever.from_config(RetrieverConfig(index_dir=str(facts_dir)), EncoderConfig())
    assert retriever.generation == Store.open(facts_dir).generation
    assert retriever.retrieve([], 3) == []
    assert len(retriever.retrieve(["leaves"], 64)[0]) == 8


@pytest.mark.parametrize("bad", ["", "  \n", "a\0b", "\ud800", 3])
def test_a_question_that_is_no_text_is_refused(bad: str, facts_dir: Path, encoder: Encoder) -> None:
    """The tokenizer's own error for a surrogate names neither the question nor the place."""
    with pytest.raises(InputError, match="question"):
        Retriever(encoder, Store.open(facts_dir)).retrieve(["fine", bad], 1)


def test_a_wrong_setup_is_told_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts_dir: Path, letters: LetterEncoder
) -> None:
    """Half a minute of loading, then "index not found"."""
    with pytest.raises(EncoderMismatch):
        Retriever(letters, Store.open(facts_dir))
    monkeypatch.setattr(retriever_module.Encoder, "load", lambda _: pytest.fail("loaded a model"))
    with pytest.raises(ConfigError, match="index_dir"):
        Retriever.from_config(RetrieverConfig(), EncoderConfig())
    with pytest.raises(StoreMissing):
        Retriever.from_config(RetrieverConfig(index_dir=str(tmp_path / "none")), EncoderConfig())


def test_building_streams_and_reports(tmp_path: Path, letters: LetterEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collecting all passages before encoding does not fit a large collection."""
    monkeypatch.setattr(retriever_module, "_PASSAGES_PER_ENCODE", 10)
    given: list[int] = []

    def stream() -> Iterator[Document]:
        for n in range(100):
            given.append(n)
            yield Document(str(n), f"Text {n}.")

    seen: list[tuple[int, int, int]] = []
    build_index(stream(), tmp_path, letters, ChunkingConfig(), lambda d, p: seen.append((d, p, len(given))))
    assert seen == [(n, n, n) for n in range(10, 101, 10)]


def test_nothing_to_index_and_double_ids_are_errors(tmp_path: Path, letters: LetterEncoder) -> None:
    """An empty index answers every question with "no passages"; a double id makes citations ambiguous."""
    with pytest.raises(InputError, match="nothing to index"):
        build_index([Document("a", " \n ")], tmp_path, letters, ChunkingConfig())
    with pytest.raises(InputError, match="two documents have the id 'a'"):
        build_index([Document("a", "x"), Document("a", "y")], tmp_path, letters, ChunkingConfig())


def test_files_and_folders_become_documents(tmp_path: Path) -> None:
    """Files read in the order of the disk give another index on every machine."""
    docs = tmp_path / "docs"
    (docs / "sub").mkdir(parents=True)
    (docs / "b.md").write_text("# The title\n\nBody.", encoding="utf-8")
    (docs / "sub" / "a.txt").write_text("\ufeffPlain.", encoding="utf-8")
    (docs / ".hidden.txt").write_text("no")
    (docs / "empty.rst").write_text("  \n")
    (docs / "image.png").write_bytes(b"\x89PNG")
    rows = [{"id": 7, "text": "Row.", "title": None, "year": 1900}, {"text": "Unnamed."}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    found = list(read_documents([docs, tmp_path / "rows.jsonl"]))
    assert [(d.id, d.text, d.title) for d in found] == [
        ("docs/b.md", "# The title\n\nBody.", "The title"),
        ("docs/sub/a.txt", "Plain.", "a"),
        ("7", "Row.", ""),
        ("rows.jsonl:2", "Unnamed.", ""),
    ]
    assert found[2].metadata == {"year": 1900}


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.txt", b"caf\xe9", "not UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{oops', "line 2: not JSON"),
        ("a.jsonl", b'{"id": "x"}', "line 1: not an object with a string `text`"),
        ("a.jsonl", b'{"text": "x", "id": ""}', "`id`"),
        ("a.jsonl", b'{"text": "x", "title": 3}', "`title`"),
        ("a.jsonl", b'{"text": "x", "metadata": [1]}', "`metadata`"),
        ("a.pdf", b"%PDF", "no kind"),
        (None, b"", "does not exist"),
    ],
)
def test_files_that_cannot_be_read_give_place_and_reason(
    tmp_path: Path, name: str | None, content: bytes, reason: str
) -> None:
    """One bad line in a million, without its number, is not found again."""
    if name:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=reason):
        list(read_documents([tmp_path / (name or "none.txt")]))
    with pytest.raises(InputError, match="holds no file"):
        (tmp_path / "folder").mkdir()
        list(read_documents([tmp_path / "folder"]))


def test_the_job_builds_an_index_and_reports_errors_in_one_line(
    tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traceback is not an error message, and a job's last line is for machines."""
    monkeypatch.setattr(build_index_job.Encoder, "load", lambda _: encoder)
    (tmp_path / "a.txt").write_text("The Danube flows into the Black Sea.")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    out = tmp_path / "index"
    for arguments, reason in (
        ([str(tmp_path)], "b.txt is not UTF-8"),
        ([str(tmp_path / "none")], "does not exist"),
        ([str(tmp_path / "a.txt"), "--max-chars", "3"], "chunking.max_chars"),
    ):
        failed = CliRunner().invoke(build_index_job.app, [*arguments, "--out", str(out)])
        assert failed.exit_code == 1 and not failed.stdout
        assert reason in failed.stderr.splitlines()[-1] and "Traceback" not in failed.stderr
    done = CliRunner().invoke(build_index_job.app, [str(tmp_path), "--out", str(out), "--skip-unreadable"])
    assert done.exit_code == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["documents"], summary["passages"], summary["dimension"]) == (1, 1, 384)
    found = Retriever(encoder, Store.open(out)).retrieve(["Where does the Danube end?"], 1)[0]
    assert found[0].text == "The Danube flows into the Black Sea."


def test_a_file_with_one_bad_line_is_skipped_as_a_whole(
    tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job said "skipped" when half of the file was in the index."""
    monkeypatch.setattr(build_index_job.Encoder, "load", lambda _: encoder)
    (tmp_path / "a.txt").write_text("The Danube flows into the Black Sea.")
    (tmp_path / "b.jsonl").write_text('{"id": "1", "text": "The Rhine is long."}\n{\n')
    out = tmp_path / "index"
    done = CliRunner().invoke(build_index_job.app, [str(tmp_path), "--out", str(out), "--skip-unreadable"])
    assert "skipped" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["documents"] == 1

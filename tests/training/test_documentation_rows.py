"""Rows of documentation packages: spans and hashes that are kept, and the texts that the packages give back.

Questions by rule are answered by their quotes; those that a reader writes, by the parts that the reader names.
"""

import gzip
import json
import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from pipelines import documentation_rows
from ragspec.core import Block, BlockKind, Document, Passage
from ragspec.errors import InputError
from ragspec.training.documentation import (
    UNANSWERABLE,
    WRITTEN,
    documentation_questions,
    evaluation_questions,
    is_for_evaluation,
)
from ragspec.training.documentation_rows import (
    PackageFile,
    TextRow,
    check_package,
    debian_packages,
    package_files,
    read_packed,
    readings_of,
    restored,
    rule_rows,
    write_packed,
)
from ragspec.training.grammar_errors import misspell, tokenised
from ragspec.training.reference.mixture import row_paragraphs
from ragspec.training.stdlib_corpus import first_doc_sentence

pytestmark = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb is not installed")
ABSENT = next(f"no{n}-doc" for n in range(9) if not is_for_evaluation(f"no{n}-doc"))
NAME = next(f"pump{n}-doc" for n in range(9) if not is_for_evaluation(f"pump{n}-doc"))
KEPT_OUT = next(f"pump{n}-doc" for n in range(99) if is_for_evaluation(f"pump{n}-doc"))
SENTENCE = "To stop pump number {n} of hall {n} safely, use the red lever at the side of the tank."
PAGE = "".join(
    f"<h2>Hall {n}</h2><p>This is the text of hall {n}, and the hall is for the pumps that the town has in it. "
    f"{SENTENCE.format(n=n)}</p><p>To clean pump number {n} run:</p><pre>pump --clean {n}</pre>"
    for n in range(12)
)
PAGE += "".join(
    f"<h2>Tour {n}</h2><p>You can book tour {n} of the garden of roses by writing to the office that is in the house. "
    f"To visit rose {n} without waiting for the guide, use the path that is behind the house.</p>"
    for n in range(6)
)


def write_package(folder: Path, page: str = PAGE, name: str = NAME, source: str = "pump") -> Path:
    root = folder / name
    docs = root / "usr/share/doc" / name
    (root / "DEBIAN").mkdir(parents=True, exist_ok=True)
    docs.mkdir(parents=True, exist_ok=True)
    control = f"Package: {name}\nSource: {source}\nVersion: 1.0\nArchitecture: all\nMaintainer: a <a@b.c>\nDescription: pumps\n"
    (root / "DEBIAN/control").write_text(control)
    (docs / "copyright").write_text("Format: x\n\nFiles: *\nCopyright: us\nLicense: GPL-2+\n all of it\n")
    (docs / "halls.html.gz").write_bytes(gzip.compress(page.encode(), mtime=0))
    (docs / "changelog.html").write_text(page)
    deb = folder / f"{name}_1.0_all.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-b", root, deb], check=True, capture_output=True)
    return deb


def test_rows_keep_no_text_and_get_it_back(tmp_path: Path) -> None:
    """Text of a document in the committed file; a quote that is no slice of its passage; a licence or a file that is lost."""
    deb, packed = write_package(tmp_path), tmp_path / "rows.jsonl.gz"
    rows = rule_rows(deb, "pump", 35)
    assert write_packed(rows, packed) == len(rows) > 18
    assert sorted(read_packed(packed)) == sorted(rows)
    assert b"red lever" not in gzip.decompress(packed.read_bytes())
    lost = Counter[str]()
    found = list(restored(read_packed(packed), tmp_path, lost))
    assert len(found) == len(rows) and not lost
    quotes = {row.question: row.quote for row in found if row.quote}
    assert quotes["How do I stop pump number 3 of hall 3 safely?"] == SENTENCE.format(n=3)
    assert quotes["How do I clean pump number 3?"] == "To clean pump number 3 run:\n\npump --clean 3"
    for row in found:
        assert (row.quote in row.passage) and (row.licence, row.path) == (
            "GPL-2+",
            f"{NAME}/usr/share/doc/{NAME}/halls.html.gz",
        )
        assert bool(row.quote) == (row.kind != UNANSWERABLE)
    absent = [row for row in found if row.kind == UNANSWERABLE]
    assert absent and all(("rose" in row.question) != ("rose" in row.passage) for row in absent)


def fake_archive(folder: Path) -> Path:
    """A folder with an apt-get that has no package."""
    (folder / "bin").mkdir()
    (folder / "bin/apt-get").write_text("#!/bin/sh\nexit 100\n")
    (folder / "bin/apt-get").chmod(0o755)
    return folder / "bin"


def test_rows_follow_a_reader_that_moves_the_text_and_leave_a_changed_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quotes cut in the middle after a reader's change; a file of another version under the old spans."""
    rows = rule_rows(write_package(tmp_path), "pump", 7)
    before = {(row.question, row.quote) for row in restored(rows, tmp_path)}
    moved = [
        row._replace(
            passage=(row.passage[0] + 9, row.passage[1] + 9), quote=tuple(at + 9 * any(row.quote) for at in row.quote)
        )
        for row in rows
    ]
    assert {(row.question, row.quote) for row in restored(moved, tmp_path)} == before
    monkeypatch.setenv("PATH", f"{fake_archive(tmp_path)}:{os.environ['PATH']}")
    unknown = [row._replace(file=row.file._replace(package=ABSENT)) for row in rows]
    assert not list(restored(unknown, tmp_path, lost := Counter())) and lost == {ABSENT: 7}
    write_package(tmp_path, PAGE.replace("red", "blue"))
    assert not list(restored(rows, tmp_path, lost := Counter())) and lost == {NAME: 7}


def test_packages_for_evaluation_are_refused(tmp_path: Path) -> None:
    """A name or a source that an evaluation uses, read for training."""
    for name, source in ((KEPT_OUT, "pump"), (NAME, "git")):
        deb = write_package(tmp_path, name=name, source=source)
        with pytest.raises(InputError, match="kept for evaluation"):
            next(package_files(deb))
    with pytest.raises(InputError, match="kept for evaluation"):
        next(debian_packages([KEPT_OUT], tmp_path))


def test_the_command_goes_on_after_a_kill(tmp_path: Path) -> None:
    """A line that a kill has cut, read as the end of all or joined with the next."""
    write_package(tmp_path)
    (tmp_path / "names").write_text(NAME)
    out, packed, rows = (tmp_path / name for name in ("rules.jsonl", "packed.gz", "rows.jsonl"))
    documentation_rows.rules(tmp_path / "names", tmp_path, out, 14)
    whole = out.read_bytes()
    out.write_bytes(whole[:-20])
    documentation_rows.rules(tmp_path / "names", tmp_path, out, 14)
    documentation_rows.rules(tmp_path / "names", tmp_path, out, 14)
    assert out.read_bytes() == whole
    documentation_rows.pack([out], packed)
    documentation_rows.rebuild(tmp_path, rows, packed)
    assert len(rows.read_text().splitlines()) == len(list(read_packed(packed))) >= 12


def test_a_reader_asks_about_numbered_passages(tmp_path: Path) -> None:
    """An answer from another passage than the one that the reader saw; earlier rows lost when rows are added."""
    write_package(tmp_path, "".join(f"<h2>Hall {n}</h2><p>{TEXT.replace('pumpd', f'pumpd{n}')}</p>" for n in range(6)))
    (tmp_path / "names").write_text(NAME)
    shown, asked, out, packed = (tmp_path / name for name in ("shown.jsonl", "asked.jsonl", "out.jsonl", "packed.gz"))
    documentation_rows.passages(tmp_path / "names", tmp_path, shown, 3)
    passages = list(map(json.loads, shown.read_text().splitlines()))
    assert [each["passage"] for each in passages] == [0, 1, 2] and all(each["tool"] in NAME for each in passages)
    questions = [{"passage": n, "question": f"Which lever ends a run, {n}?", "parts": [2]} for n in (0, 2)]
    questions.append({"passage": 2, "question": "Who built the halls?", "parts": []})
    for question in questions:
        asked.write_text(json.dumps(question) + "\n")
        documentation_rows.written(asked, tmp_path / "names", tmp_path, out)
        documentation_rows.pack([out], packed)
    found = {row.question: row.quote for row in restored(read_packed(packed), tmp_path)}
    assert found == {
        each["question"]: passages[each["passage"]]["parts"][1] if each["parts"] else "" for each in questions
    }


def test_the_committed_rows_keep_to_the_rule() -> None:
    """A package for evaluation among the trained ones, a row without a licence, or a file that outgrows the repository."""
    rows = list(read_packed(documentation_rows.PACKED))
    assert len(rows) > 15_000 and documentation_rows.PACKED.stat().st_size < 4 * 2**20
    for package in {row.file.package for row in rows}:
        check_package(package)
    for row in rows:
        is_inside = row.passage[0] <= row.quote[0] < row.quote[1] <= row.passage[1]
        assert row.file.licence and is_inside == (row.quote != (0, 0)) and not (is_inside and row.kind == UNANSWERABLE)


PUMP_PAGE = Path(__file__).with_name("pump_page.html").read_text()
QUESTIONS = json.loads(Path(__file__).with_name("pump_questions.json").read_text())
"""Of that page: what the rules ask, and the quotes."""


def write_pages(folder: Path, count: int) -> Path:
    for n in range(count):
        (folder / f"page{n}.html").write_text(PUMP_PAGE.format(n=n))
    return folder


def test_rules_ask_what_the_quote_answers(tmp_path: Path) -> None:
    """A rule that takes the wrong sentence, a quote without its term or its block, or a colon that announces nothing."""
    write_pages(tmp_path, 20)
    training = list(documentation_questions(tmp_path, evaluation=False))
    assert not any(is_for_evaluation(each.path) for each in training)
    n = training[0].path.removeprefix("page").removesuffix(".html")
    found = {each.question: each.quote for each in training if each.path == training[0].path}
    assert found == {question.format(n=n): quote.format(n=n) for question, quote in QUESTIONS.items()}


def test_evaluation_questions_repeat_and_name_their_distractors(tmp_path: Path) -> None:
    """Distractors that hold the answer, other questions every time, or unanswerable ones that are answered."""
    write_pages(tmp_path, 60)
    chosen = evaluation_questions(tmp_path, 30)
    assert chosen == evaluation_questions(tmp_path, 30)
    assert all(is_for_evaluation(each.path) for each in chosen)
    for each in chosen:
        assert each.quote in each.passage and each.passage not in each.others
        assert each.kind == UNANSWERABLE or not any(each.quote in other for other in each.others)


def test_the_first_sentence_of_a_docstring_begins_behind_its_signature() -> None:
    """A quote that begins inside the signature, or ends at a colon of the text."""
    for signature in ("", "()", "(a: int = 1) -> dict[str, int]", "(sep=')', end='(')", "(purpose=<Purpose: 'se...)"):
        text = f"m.f{signature}: Do it: now (or never): yes. Then rest."
        assert first_doc_sentence("m.f", text) == "Do it: now (or never): yes."


def test_misspelling_and_spacing() -> None:
    """The first letter stays, so that a misspelt word can still be found; spacing must be undone by joining alone."""
    import random

    rng = random.Random(0)
    assert all(misspell("grammar", rng)[0] == "g" for _ in range(50))
    assert tokenised("It was late.") == "It was late ."


SENTENCES = (
    "The pumpd daemon reads its settings from the file /etc/pumpd.conf when it starts.",
    "The option --speed sets the speed of the pump in turns a minute, and the default is 40.",
    "This is why the old pumps that nobody uses any more were removed from the hall last year.",
    "Whoever wants to see an old pump today may visit the garden of the museum, which shows three of them on Sundays.",
)
TEXT = " ".join(SENTENCES)
FILE = PackageFile("pump-doc", "1", "usr/share/doc/pump.html", "", "MIT")
DOCUMENT = Document("pump", TEXT, title="pumpd", blocks=(Block(0, len(TEXT), BlockKind.PARAGRAPH),))


def test_a_written_question_is_answered_by_neighbouring_parts() -> None:
    """A quote with the text between two parts in it that the reader did not choose, or an answer for a question without one."""
    (reading,) = readings_of(FILE, DOCUMENT)
    asked = "Where does the pumpd daemon read settings from?"
    for numbers, quote in (([2], SENTENCES[1]), ([1, 2], " ".join(SENTENCES[:2])), ([], "")):
        row = reading.row(asked, numbers)
        assert row is not None and TEXT[slice(*row.quote)] == quote and TEXT[slice(*row.passage)] == TEXT
    assert reading.row(asked, [1, 3]) is None and reading.row(asked, [0]) is None and reading.row(asked, [99]) is None


def test_questions_of_readers_are_drawn_apart_from_those_of_rules(tmp_path: Path) -> None:
    """A few thousand questions in users' words lost among ten times as many by rule; or an unanswerable one as answered."""
    row = TextRow("Asked by rule?", "", TEXT, SENTENCES[0], "option", "pump.html", "MIT")
    asked = [row, row._replace(question="Where?", kind=WRITTEN), row._replace(question="Who?", kind=WRITTEN, quote="")]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(each._asdict())}\n" for each in asked))
    written, by_rule = (row_paragraphs(tmp_path / "rows.jsonl", is_written=kind) for kind in (True, False))
    found = [([question.text for question in each.questions], each.absent) for each in (*written, *by_rule)]
    assert found == [(["Where?"], ["Who?"]), (["Asked by rule?"], [])]


def test_passages_with_little_to_ask_about_are_not_read() -> None:
    """Hours of reading over navigation and tables of contents."""
    assert [type(each.passage) for each in readings_of(FILE, DOCUMENT)] == [Passage]
    menu = Document("menu", "Home\n\nSearch\n\nIndex", blocks=(Block(0, 4, BlockKind.PARAGRAPH),))
    assert not list(readings_of(FILE, menu))

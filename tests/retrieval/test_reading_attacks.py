"""Files that are empty, broken or hostile end as documents or as an InputError with the file's name, and soon."""

import io
import itertools
import logging
import os
import random
import resource
import time
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import docx
import psutil
import pytest
from docx.oxml import parse_xml
from docx.oxml.ns import nsdecls
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from office_files import pdf_bytes, write_docx, write_pdf

from ragspec.core import Document
from ragspec.errors import InputError
from ragspec.retrieval.reading import SUFFIXES, parsed_file, read_file
from ragspec.retrieval.reading.bounded_reader import BoundedReader

MAX_S = 20
BINARY = (".docx", ".epub", ".odt", ".pdf", ".pptx", ".xlsx")
TAGS = [
    *"<p> <ul> <li> </li> <table> <tr> <td> </td> </tr> </table> <h1> </h1> <pre> </pre> <nav> </nav> </p> x <br/> </ul>".split(),
    *"<title> </title> <ol> </ol> <svg> </svg> <script> </script> <th> <dl> <dt> <dd> </dl>".split(),
    *("<p hidden>", "<div hidden>", "</div>", "<![if !x]>", "<!-- -->", " y "),
]


def tried(path: Path, name: str = "name") -> list[Document] | str:
    """The documents or the reason why there are none; anything else fails the test."""
    started_s = time.process_time()
    try:
        return list(read_file(path, name))
    except InputError as error:
        assert str(path) in str(error) and "\n" not in str(error)
        return str(error)
    finally:
        assert time.process_time() - started_s < MAX_S, "seconds of the processor: other load does not count"


def put(folder: Path, name: str, raw: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(raw.encode() if isinstance(raw, str) else raw)
    return path


@pytest.mark.parametrize("suffix", sorted(SUFFIXES))
def test_an_empty_file_and_white_space_hold_nothing(tmp_path: Path, suffix: str) -> None:
    """An empty document was indexed and found by every question."""
    for raw in (b"", b" \n\n\t", b"\xef\xbb\xbf"):
        found = tried(put(tmp_path, f"a{suffix}", raw))
        assert ("cannot be read" in found or f"no {suffix}" in found) if suffix in BINARY else found == []


@pytest.mark.parametrize("suffix", sorted(SUFFIXES))
def test_garbage_is_refused_or_read_but_never_breaks(
    tmp_path: Path, suffix: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A photograph named .txt stopped a build of a thousand files, and a parser's remarks filled the screen."""
    rng = random.Random(suffix)
    beginnings = (b"", b"%PDF-1.7\n", b"PK\x03\x04", b"<html>", b"\xff\xfe", b'{"text": "', b'a,"b\n')
    for number, beginning in enumerate(beginnings):
        tried(put(tmp_path, f"{number}{suffix}", beginning + rng.randbytes(5000)))
    assert capfd.readouterr() == ("", "") and not caplog.records


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from([".pdf", ".docx"]), cut=st.floats(0, 1), seed=st.integers(0, 2**32))
def test_damaged_files_never_break(tmp_path: Path, kind: str, cut: float, seed: int) -> None:
    """One flipped byte was a KeyError from inside the parser."""
    make: Callable[[Path], Path] = (
        write_docx if kind == ".docx" else lambda path: write_pdf(path, ["Some text."], ["More."])
    )
    raw = bytearray(make(tmp_path / f"good{kind}").read_bytes())
    rng = random.Random(seed)
    for _ in range(rng.randrange(20)):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    tried(put(tmp_path, f"bad{kind}", bytes(raw[: int(len(raw) * cut)] if seed % 2 else raw)))


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from([".html", ".md", ".rst", ".csv", ".jsonl"]),
    raw=st.one_of(
        st.text(st.sampled_from('#=-\n "`~,;\t<>/[](){}:|*_\\a1&!'), max_size=300),
        st.lists(st.sampled_from(TAGS), max_size=40).map("".join),
    ),
)
def test_any_text_is_read_or_refused(tmp_path: Path, kind: str, raw: str) -> None:
    """Tags closed in the wrong order popped a table that was never open."""
    found = tried(put(tmp_path, f"a{kind}", raw))
    for document in found if isinstance(found, list) else []:
        for heading in document.headings:
            assert 0 <= heading.start < len(document.text) and heading.text and 1 <= heading.level <= 9
            assert not document.text[heading.start].isspace() or kind == ".rst"
        assert list(document.headings) == sorted(document.headings)


FORMATS = (".txt", ".md", ".rst", ".html", ".csv", ".jsonl")
REPEATED = ("word ", "# ", "<b>", "[", "`", "* ", '"",', "a" * 50, "<!--", "&amp", "\n=\n", "<p>x", "![](", "<a ")


@pytest.mark.parametrize(
    ("suffix", "part"),
    [
        pytest.param(suffix, part, marks=[] if i == j % len(FORMATS) else pytest.mark.slow)
        for (i, suffix), (j, part) in itertools.product(enumerate(FORMATS), enumerate(REPEATED))
    ],
)
def test_five_megabytes_of_anything_take_seconds(tmp_path: Path, suffix: str, part: str) -> None:
    """A pattern that looks back at every sign takes hours for one long line."""
    size = 5_000_000 if part in ("word ", "# ") or (suffix != ".html" and "\n" not in part) else 500_000
    tried(put(tmp_path, f"a{suffix}", part * (size // len(part))))


@pytest.mark.parametrize(
    "markup",
    [
        "<div>" * 10_000 + "deep" + "</div>" * 10_000,
        "<p>text<b>" * 10_000 + "deep",
        "<table><tr><td>" * 10_000 + "deep",
        "<ul><li>" * 10_000 + "deep" + "</ul>" * 20_000,
        "<blockquote>" * 10_000 + "deep" + "</p></td></b>" * 10_000,
        "<table><tr>" + "<td rowspan=2>x" * 20_000 + "<tr>" * 4 + "</table>deep",
    ],
)
def test_ten_thousand_levels_of_a_web_page_are_read(tmp_path: Path, markup: str) -> None:
    """A walk that calls itself for every level ends in a RecursionError."""
    (document,) = tried(put(tmp_path, "a.html", markup))
    assert isinstance(document, Document) and document.text.rstrip(" |").endswith("deep")


@pytest.mark.parametrize(
    ("name", "raw", "reason"),
    [
        ("a.txt", "Größe".encode() + b"\xe9", "not UTF-8 text (byte 7)"),
        ("a.txt", "мельница".encode("cp1251"), "not UTF-8 text (byte 0)"),
        ("a.txt", "Text".encode("utf-16-le"), "NUL"),
        ("a.md", b"\xff\xfea", "not UTF-16"),
        ("a.jsonl", b"\n{oops", "line 2: not JSON"),
        ("a.jsonl", b'{"text": "\xe9"}', "line 1: not UTF-8"),
        ("a.jsonl", b'{"text": "\\ud800"}', "surrogate"),
        ("a.jsonl", b'{"text": "x", "x": ' + b"[" * 100_000, "line 1: nested too deeply"),
        ("a.jsonl", b'{"id": "x"}', "line 1: not an object with a string `text`"),
        ("a.jsonl", b'{"text": "x", "id": ""}', "`id`"),
        ("a.jsonl", b'{"text": "x", "id": true}', "`id`"),
        ("a.jsonl", b'{"text": "x", "owner": 3}', "`owner`"),
        ("a.jsonl", b'{"text": "x", "metadata": [1]}', "`metadata`"),
        ("a.csv", "id,text\n1,мельница\n".encode("cp1251"), "not UTF-8"),
        ("a.csv", b'id,text\n2,"never closed\n', "line 2: unexpected end of data"),
        ("a.csv", b"id,text\n1,a\0b\n", "NUL"),
        ("a.csv", b"id,text\n1,a,b\n", "line 2: 3 cells below 2 columns"),
        ("a.csv", b"id,Text,TEXT\n1,a,b\n", "line 1: two columns"),
        ("a.docx", b"\xd0\xcf\x11\xe0 an old Word file", "no .docx file"),
        ("a.pdf", b"%PDF-1.7 no more", "it is damaged"),
    ],
)
def test_the_reason_names_the_place(tmp_path: Path, name: str, raw: bytes, reason: str) -> None:
    """One bad line in a million, without its number, is not found again."""
    found = tried(put(tmp_path, name, raw))
    assert isinstance(found, str) and reason in found


def test_archives_that_unpack_to_more_than_the_memory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred kilobytes of Word file took a hundred gigabytes."""
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("word/document.xml", "w") as part:
        for _ in range(140):
            part.write(bytes(1024**2))
    found = tried(put(tmp_path, "a.docx", bomb.getvalue()))
    assert isinstance(found, str) and "unpacks to" in found
    monkeypatch.setattr(parsed_file, "MAX_BYTES", 100)
    for name, raw in (("a.pdf", pdf_bytes(["Text."])), ("a.html", b"<p>" + b"x" * 100), ("a.docx", bomb.getvalue())):
        assert "more than the 100" in tried(put(tmp_path, name, raw))


def test_a_long_table_of_word_is_read_row_by_row(tmp_path: Path) -> None:
    """Each row looked through all rows above it."""
    row = "<w:tr><w:trPr><w:tblHeader/></w:trPr><w:tc><w:p><w:r><w:t>x</w:t></w:r></w:p></w:tc></w:tr>"
    word = docx.Document()
    word.element.body.insert(0, parse_xml(f"<w:tbl {nsdecls('w')}>{row * 15_000}</w:tbl>"))
    word.save(str(tmp_path / "a.docx"))
    (document,) = tried(tmp_path / "a.docx")
    assert isinstance(document, Document) and document.text.count("---") == 1 and document.text.count("x") == 15_000


def test_remarks_of_the_parsers_stay_inside_and_their_loggers_as_they_were(tmp_path: Path) -> None:
    """Switching a library's log off for good hides what another part of the program wants to see."""
    logger = logging.getLogger("pypdf")
    logger.setLevel(logging.INFO)
    try:
        tried(put(tmp_path, "a.pdf", pdf_bytes(["Text."]).replace(b"startxref\n", b"startxref\n9")))
        assert logger.level == logging.INFO
    finally:
        logger.setLevel(logging.NOTSET)


def test_a_file_that_vanished_is_told(tmp_path: Path) -> None:
    """A file deleted between listing and reading was a traceback."""
    assert "cannot be read: No such file" in tried(tmp_path / "gone.txt")
    assert "cannot be read: No such file" in tried(tmp_path / "gone.pdf")


def test_files_are_read_ahead_as_they_are_when_asked_for(tmp_path: Path) -> None:
    """A file that changed after it was read ahead had its old text; a crash of the process took all files read ahead."""
    files = [(put(tmp_path, f"{n}.html", f"<p>Text {n}."), f"{n}.html") for n in range(12)]
    with BoundedReader() as reader:

        def text_of(file: tuple[Path, str]) -> str:
            try:
                return "".join(document.text for document in reader.documents(*file, []))
            except InputError as refusal:
                return str(refusal)

        reader.expect(files)
        assert text_of(files[0]) == "Text 0."
        put(tmp_path, "1.html", "<p>Other.")
        assert text_of(files[1]) == "Other."
        (child,) = psutil.Process().children()
        child.kill()
        child.wait()
        rest = [text_of(file) for file in files[2:]]
        assert [text_of(files[0]), text_of(files[0])] == ["Text 0."] * 2
    wrong = [text for n, text in enumerate(rest, 2) if text != f"Text {n}."]
    assert all("cannot be read: reading it took too much memory or time" in text for text in wrong) and len(wrong) <= 1


def test_files_are_read_beside_a_thousand_open_ones(tmp_path: Path) -> None:
    """A service with a thousand connections failed every upload."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit[0], 1200), limit[1]))
    try:
        with ExitStack() as opened, BoundedReader() as reader:
            for _ in range(1024):
                opened.enter_context(open(os.devnull))
            (document,) = reader.documents(put(tmp_path, "a.html", "<p>A mill."), "a.html", [])
            assert document.text == "A mill."
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)

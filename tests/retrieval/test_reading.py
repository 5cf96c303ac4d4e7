"""Files become documents: which ones, by which name, and where their titles stand."""

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from ragspec.config import ChunkingConfig
from ragspec.core import BlockKind, Document, Passage
from ragspec.errors import InputError
from ragspec.rag.quotable import quotable_runs
from ragspec.retrieval.chunking import chunk
from ragspec.retrieval.reading import Unread, find_files, passed_over, read_documents, read_file
from ragspec.retrieval.reading.markup import read_plain

FILES = Path(__file__).with_name("files")
TEXTS: dict[str, Any] = json.loads(Path(__file__).with_name("texts.json").read_text(encoding="utf-8"))


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """docs/ with b.md, sub/a.txt, sub/deep/c.rst, things that are hidden and one of no kind."""
    folder = tmp_path / "docs"
    (folder / "sub" / "deep").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "b.md").write_text("# The title\n\nBody.", encoding="utf-8")
    (folder / "sub" / "a.txt").write_text("\ufeffPlain.", encoding="utf-8")
    (folder / "sub" / "deep" / "c.rst").write_text("Deep.\n")
    (folder / ".hidden.txt").write_text("no")
    (folder / ".git" / "config.txt").write_text("no")
    (folder / "image.png").write_bytes(b"\x89PNG")
    return folder


def one(path: Path) -> Document:
    (document,) = read_file(path, path.name)
    for heading in document.headings:
        assert heading.text.split()[0] in document.text[: heading.start + 200]
    return document


def read_as(tmp_path: Path, name: str, text: str) -> Document:
    (tmp_path / name).write_text(text)
    return one(tmp_path / name)


def titles(document: Document) -> list[tuple[int, str]]:
    return [(heading.level, heading.text) for heading in document.headings]


def names(*inputs: str | Path) -> list[str]:
    return [name for _, name in find_files(inputs)]


def test_a_folder_gives_its_files_in_a_fixed_order(docs: Path) -> None:
    """Files read in the order of the disk give another index on every machine."""
    assert names(docs) == ["docs/b.md", "docs/sub/a.txt", "docs/sub/deep/c.rst"]
    found = list(read_documents([docs]))
    assert [(d.id, d.text, d.title, d.source) for d in found[:2]] == [
        ("docs/b.md", "# The title\n\nBody.", "The title", "docs/b.md"),
        ("docs/sub/a.txt", "Plain.", "a", "docs/sub/a.txt"),
    ]


def test_a_pattern_names_files_below_its_fixed_part(docs: Path) -> None:
    """A name that depends on where the command was run makes every document a new one."""
    assert names(f"{docs}/**/*.txt") == ["docs/sub/a.txt"]
    assert names(str(docs / "*" / "*")) == ["docs/sub/a.txt"]
    assert names(Path(f"{docs}/[bx].md")) == ["docs/b.md"]
    (docs / "odd[1].txt").write_text("A name with brackets.")
    assert names(docs / "odd[1].txt") == ["odd[1].txt"]


def test_a_file_given_twice_is_read_once(docs: Path) -> None:
    """The same text twice takes two of three places in every answer."""
    (docs / "link.txt").symlink_to(docs / "sub" / "a.txt")
    assert names(docs / "sub", docs) == ["sub/a.txt", "sub/deep/c.rst", "docs/b.md"]
    assert names(f"{docs}/**/*.md", docs / "b.md", docs / "b.md") == ["docs/b.md"]


def test_two_files_of_one_name_are_told_with_both_paths(docs: Path, tmp_path: Path) -> None:
    """The second silently replaced the first."""
    other = tmp_path / "elsewhere" / "docs"
    other.mkdir(parents=True)
    (other / "b.md").write_text("Another.")
    with pytest.raises(InputError) as caught:
        find_files([docs, other])
    assert str(docs / "b.md") in str(caught.value) and str(other / "b.md") in str(caught.value)


def test_links_in_a_circle_end(docs: Path) -> None:
    """A link to the folder above was followed for ever."""
    (docs / "sub" / "up").symlink_to(docs)
    (docs / "self.txt").symlink_to(docs / "self.txt")
    expected = ["docs/b.md", "docs/sub/a.txt", "docs/sub/deep/c.rst"]
    assert names(docs) == names(f"{docs}/**/*") == expected
    with pytest.raises(InputError, match="does not exist"):
        find_files([docs / "self.txt"])


def test_inputs_without_files_are_errors(docs: Path, tmp_path: Path) -> None:
    """A typing error in a path gave an index without documents; a named pipe waited for ever."""
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe.txt")
    for given, reason in (
        (tmp_path / "empty", "holds no file"),
        (docs / "none.txt", "does not exist"),
        (docs / "image.png", "no kind"),
        (f"{docs}/*.jsonl", "holds no file"),
        (f"{tmp_path}/none/*.txt", "holds no file"),
        (f"{docs}/**x/*.txt", "pattern|holds no file"),
        (tmp_path / "pipe.txt", "not a plain file"),
    ):
        with pytest.raises(InputError, match=reason):
            find_files([given])


def test_a_folder_that_may_not_be_entered_is_told(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without permission looked like an empty one: half of the manual was missing and nobody knew."""
    scan = os.scandir

    def refuse(folder: str) -> object:
        if Path(folder).name == "sub":
            raise PermissionError(13, "Permission denied", str(folder))
        return scan(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(InputError, match=r"docs/sub cannot be searched: Permission denied"):
        find_files([docs])
    with pytest.raises(InputError, match="cannot be searched: File name too long"):
        find_files(["x" * 5000])


MARKDOWN = (FILES / "manual.md").read_text()


def test_markdown_titles_stand_where_they_are_written(tmp_path: Path) -> None:
    """A comment in a code block became a title, and the text under the real one lost it."""
    document = read_as(tmp_path, "a.md", MARKDOWN)
    assert document.text == MARKDOWN.partition("---\n")[2].partition("---\n")[2] and document.title == "Intro"
    assert titles(document) == [(1, "Intro"), (1, "Guide for users"), (2, "Install it"), (2, "Second way")]
    starts = [document.text[heading.start :].split("\n")[0] for heading in document.headings]
    assert starts == ["Intro", "# Guide **for** [users](http://x.y) #", "## Install `it`", "Second way"]


def test_a_page_may_be_titled_by_its_settings(tmp_path: Path) -> None:
    """Every page of a web site's sources was called "_index"."""

    def page(source: str) -> tuple[str, dict[str, Any], str]:
        found = read_as(tmp_path, "_index.md", source)
        return found.title, dict(found.metadata), found.text

    settings, text = '---\nweight: 1\ntitle: "The concepts"\n---\n', "## Low\ntitle: no\n"
    assert page(settings + text) == ("The concepts", {"weight": 1}, text)
    assert titles(one(tmp_path / "_index.md")) == [(2, "Low")]
    assert page("title: no\n")[0] == "_index"
    for settings in ("---\ntitle: A\ndate: 2024-01-05\nx: {}\n---\n", "+++\ntitle = 'A'\ndate = 2024-01-05\n+++\n"):
        assert page(f"{settings}Text.\n") == ("A", {"date": "2024-01-05"}, "Text.\n")
    assert page("---\ntitle: A: b\n---\nText.\n") == ("A: b", {}, "Text.\n")  # damaged
    for text in ("---\nBetween two rules.\n---\n", "+++\nBetween two: marks.\n+++\n", "---\n- a\n---\n"):
        assert page(text)[2] == text
    settings = "---\ntitle: 3.10\nzip: 01067\nland: NO\nyear: 2020\nx: !!bool y\nz: {a: b}\n---\n"
    shown = {"zip": "01067", "land": "NO", "year": 2020, "x": "y"}
    assert page(f"{settings}Text.\n")[:2] == ("3.10", shown)


RST = (FILES / "manual.rst").read_text()


def test_rst_levels_follow_the_order_of_their_styles(tmp_path: Path) -> None:
    """The same sign means another level in another file; a table's rule is no underline."""
    document = read_as(tmp_path, "a.rst", RST)
    assert document.text == RST and document.title == "The manual"
    assert titles(document) == [(1, "The manual"), (2, "Install"), (3, "On Linux"), (2, "Remove")]
    assert document.text[document.headings[0].start :].startswith("====")


def test_line_ends_and_marks_do_not_show(tmp_path: Path) -> None:
    """Carriage returns hid every blank line, and a byte order mark the first title; UTF-16 was refused though it says so."""
    for encoding in ("utf-8-sig", "utf-16", "utf-32"):
        path = tmp_path / f"{encoding}.md"
        path.write_bytes("# Café\r\n\r\nText.".encode(encoding))
        assert (one(path).text, one(path).title) == ("# Café\n\nText.", "Café")


def test_rows_of_json_keep_their_fields(tmp_path: Path) -> None:
    """A row's owner lost on the way shows it to everybody."""
    path = tmp_path / "rows.jsonl"
    rows = [
        {"id": 7, "text": "Row.", "title": None, "year": 1900, "owner": "ann"},
        {"text": "Unnamed.", "source": "s"},
        {"text": " ", "title": " "},
    ]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(map(json.dumps, rows)).encode() + b"\n\n")
    assert list(read_file(path, "rows.jsonl")) == [
        Document("7", "Row.", metadata={"year": 1900}, owner="ann"),
        Document("rows.jsonl:2", "Unnamed.", source="s"),
        Document("rows.jsonl:3", " ", " "),
    ]


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_rows_of_csv_with_a_text_column(tmp_path: Path, delimiter: str) -> None:
    """A field with a line break shifts the numbers; a longer field than 128 KiB was an error."""
    long = "word " * 50_000
    rows = [
        ["ID", "Text", "title", "owner", "year"],
        ["a", f'"She said ""no"",\nthen left.{delimiter}"', "T", "ann", "1900"],
        ["", "", "no text", "", ""],
        ["", long, "", "", ""],
    ]
    path = tmp_path / "rows.csv"
    path.write_text("\ufeff" + "\n".join(map(delimiter.join, rows)), encoding="utf-8")
    first, second = read_file(path, "rows.csv")
    text = f'She said "no",\nthen left.{delimiter}'.strip()
    assert first == Document("a", text, "T", metadata={"year": "1900"}, owner="ann")
    assert second == Document("rows.csv:5", long.strip())


def test_rows_of_csv_without_a_text_column(tmp_path: Path) -> None:
    """A table of parts has no text, and yet questions are asked about it. No row shorter than a line could be quoted."""
    path = tmp_path / "parts.tsv"
    path.write_text("name\tweight\t\nbolt\t5 g\tsteel\n\t\t\nnut\t\t\n")
    rows = list(read_file(path, "p"))
    assert [(row.id, row.metadata) for row in rows] == [
        ("p:2", {"name": "bolt", "weight": "5 g", "column 3": "steel"}),
        ("p:4", {"name": "nut"}),
    ]
    assert [row.text for row in rows] == ["name: bolt\nweight: 5 g\ncolumn 3: steel", "name: nut"]
    for row in rows:
        passage = Passage(row.id, 0, row.text, 0, len(row.text), blocks=row.blocks)
        assert quotable_runs(passage) == [[(0, len(row.text))]]


@pytest.mark.parametrize(("source", "text"), TEXTS["Markdown"])
def test_markdown_reads_as_it_is_shown(tmp_path: Path, source: str, text: str) -> None:
    """Comments and struck words were found by questions, and 10 to the power of 6 was 106."""
    assert read_as(tmp_path, "a.md", source).text == text


def test_rst_has_its_numbers_and_scripts(tmp_path: Path) -> None:
    """A step was quoted as "#.", and the step after 5 as 1."""
    document = read_as(tmp_path, "a.rst", "10\\ :sup:`6` kg\n\n#. a\n#. b\n\n   #. c\n\n5. d\n#. e\n.. no\n   text\n")
    assert document.text == "10⁶ kg\n\n1. a\n2. b\n\n   1. c\n\n5. d\n6. e\n"
    assert [block.kind for block in document.blocks] == ["paragraph", *["list_item"] * 3]


ASCIIDOC = (FILES / "manual.adoc").read_text()


def test_asciidoc_is_read(tmp_path: Path) -> None:
    """The sources of a documentation were passed over."""
    document = read_as(tmp_path, "a.adoc", ASCIIDOC)
    assert document.text == (
        "The manual\n\nAuthor Name\n\nInstall\n\nWeighs 10⁶ kg of H₂O.\n\n4. unpack\n  1. turn\n5. start\n\n== no title"
    )
    assert titles(document) == [(1, "The manual"), (2, "Install")]
    assert [block.kind for block in document.blocks][-2:] == ["list_item", "code"]
    source = ":Name: Mill\n:long: {name} 2\n= The {long}\n:x: y\n:!x:\n\n{long} has {none} {x} \\{name}.\n\n----\n{name}\n----\n"
    assert read_as(tmp_path, "a.adoc", source).text == "The Mill 2\n\nMill 2 has {none} {x} \\{name}.\n\n{name}"


def test_letters_struck_twice_are_one_letter(tmp_path: Path) -> None:
    """`man ls > ls.txt` was indexed as "NNAAMMEE"."""
    assert read_as(tmp_path, "a.txt", "N\bNA\bA\n_\bf_\bi 1\b2\n").text == "NA\nfi 1\b2\n"


MANUAL = (FILES / "manual.txt").read_text()


def test_a_manual_page_has_titles_terms_and_prose(tmp_path: Path) -> None:
    """A default in a passage that names no option, or the wrong one; half a sentence that was quoted as a line of code."""
    document = read_as(tmp_path, "a.txt", MANUAL)
    assert document.text == MANUAL
    entries = [(1, "OPTIONS"), (2, "-k, --kill-after=N"), (2, "-v"), (1, "OPTIONS")]
    assert titles(document) == [(1, "NAME"), *entries, (1, "EXIT STATUS")]
    found = [(block.kind.value, document.text[block.start : block.end].split()[0]) for block in document.blocks]
    blocks = [("heading", "OPTIONS"), ("term", "-k,"), ("paragraph", "also"), ("term", "-v"), ("code", "say")]
    assert found[2:] == [*blocks, ("paragraph", "By"), ("heading", "EXIT"), ("code", "124")]
    passages = {passage.heading: passage for passage in chunk(document, ChunkingConfig())}
    default, option = passages["OPTIONS"], passages["OPTIONS > -v"]
    assert default.text.split() == "By default, nothing is sent.".split()
    quotes = [option.text[start:end].split() for run in quotable_runs(option) for start, end in run]
    assert quotes == [["say", "more"], ["-v", "say", "more"]]


@pytest.mark.parametrize("text", TEXTS["texts without titles"])
def test_lines_of_other_texts_are_no_titles(tmp_path: Path, text: str) -> None:
    """Glossaries, logs, mails and agendas of which only the second lines could be quoted."""
    document = read_as(tmp_path, "a.txt", 4 * text)
    assert not document.headings and document.blocks[0].kind.value == "paragraph"


@pytest.mark.parametrize(("text", "terms"), TEXTS["settings"])
def test_settings_and_records_are_lines(tmp_path: Path, text: str, terms: list[str]) -> None:
    """Four questions about one file got the same answer: its beginning, cut after 96 tokens."""
    document = read_as(tmp_path, "a.txt", text)
    assert all("\n" not in text[b.start : b.end] for b in document.blocks if b.kind.value != "code")
    found = [document.text[block.start : block.end] for block in document.blocks if block.kind.value == "term"]
    assert (found, document.headings) == (terms, ())


def test_prose_has_no_titles_but_those_that_are_underlined(tmp_path: Path) -> None:
    """The line above an indented example, taken for a title of all that follows."""
    prose = "A mill\n======\n\nGrind it like this\n\n    mill --start\n\nIt ends\nwhen it is stopped: wait.\n"
    document = read_as(tmp_path, "a.txt", prose)
    assert titles(document) == [(1, "A mill")]
    assert [block.kind.value for block in document.blocks] == [
        *("heading", "heading", "paragraph", "code", "paragraph")
    ]


@pytest.mark.parametrize(
    ("table", "texts"),
    [
        ("2,Ann,2024-01-05\n3,Bob,2023-02-01\n", ["column 1: 2\ncolumn 2: Ann\ncolumn 3: 2024-01-05", ANY]),
        ("a@b.de;Ann\nb@b.de;Bob\n", ["column 1: a@b.de\ncolumn 2: Ann", ANY]),
        ("Country,0.25\nPeru,5.1\n", ["Country: Peru\n0.25: 5.1"]),
        ("State,1/22/20\nPeru,5\n", ["State: Peru\n1/22/20: 5"]),
        ("a|b\n1|2\n", ["a: 1\nb: 2"]),
        ("text\nyes|no\n", ["yes|no"]),
    ],
)
def test_a_table_without_a_header_loses_no_row(tmp_path: Path, table: str, texts: list[str]) -> None:
    """The first customer became the names of the columns; or names of columns a row."""
    (tmp_path / "a.csv").write_text(table)
    assert [document.text for document in read_file(tmp_path / "a.csv", "a.csv")] == texts


def test_one_bad_row_costs_that_row(tmp_path: Path) -> None:
    """One badly quoted cell, or one broken line of JSON, refused a file of a million rows."""
    path = tmp_path / "rows.csv"
    path.write_text('sep=;\r\nSales of 2024;\nid;text\n1;"a" b\n2;"two\nlines"\n3;x;y\n4;"open\n5;five\n')
    unread: list[Unread] = []
    assert [(row.id, row.text) for row in read_file(path, "rows.csv", unread)] == [("2", "two\nlines"), ("5", "five")]
    assert [each.place for each in unread] == ["", "line 4", "line 7", "line 8"]
    assert str(unread[0]) == "line 2 stands above the names of the columns"
    path = tmp_path / "rows.jsonl"
    bad = [b'{"text": 3}', b'{"text": "\xe9"}', b"{oops", b'{"text": "\\u0000"}', b'{"id": "\\ud800", "text": "x"}']
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join([b'{"text": "good"}\n', *bad, *[b'{"text": "more"}'] * 5]))
    unread = []
    found = [row.id for row in read_file(path, "rows.jsonl", unread)]
    assert found == [f"rows.jsonl:{number}" for number in (1, *range(8, 13))]
    assert [each.place for each in unread] == [f"line {number}" for number in range(3, 8)]
    path.write_text('[\n{"text": "one"},\n{"text": "two"}\n]')
    with pytest.raises(InputError, match="line 1: not JSON"):
        list(read_file(path, "rows.jsonl"))


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_row_with_the_id_of_an_earlier_one_is_named(tmp_path: Path, kind: str) -> None:
    """One doubled id refused the whole file, or replaced the first row unsaid; or one row of a thousand was the file."""
    path = tmp_path / f"rows.{kind}"

    def write(*ids: str) -> None:
        rows = [(each, f"Row {number}.") for number, each in enumerate(ids, 1)]
        lines = [json.dumps({"id": each, "text": text}) for each, text in rows]
        path.write_text("\n".join(lines if kind == "jsonl" else ["id,text", *map(",".join, rows)]))

    write("a", "b", "a", "c")
    unread: list[Unread] = []
    assert [row.text for row in read_file(path, path.name, unread)] == ["Row 1.", "Row 2.", "Row 4."]
    line = 3 if kind == "jsonl" else 4
    assert [str(each) for each in unread] == [f"line {line}: an earlier row has its id, 'a'"]
    assert sum(each.is_doubled for each in unread) == 1
    if kind == "csv":
        path.write_text("id,text\na,\na,Row 2.\n")
        assert [row.text for row in read_file(path, path.name)] == ["Row 2."]
    write("a", "a", "a")
    with pytest.raises(InputError, match="an earlier row has its id, 'a'"):
        list(read_file(path, path.name))


def test_text_of_windows_is_read_and_named(tmp_path: Path) -> None:
    """A file of an old editor was refused for its first accent."""
    for name, raw in (("a.txt", b"caf\xe9 \x80 5"), ("a.csv", b"text\ncaf\xe9 \x80 5\n")):
        (tmp_path / name).write_bytes(raw)
        unread: list[Unread] = []
        assert [found.text for found in read_file(tmp_path / name, name, unread)] == ["café € 5"]
        assert "windows-1252" in str(unread[0])


def test_readmes_without_a_suffix_are_read_and_other_files_are_named(tmp_path: Path) -> None:
    """The one file that says what a folder is about was left out; nobody was told what else was."""
    for name in ("README", "NEWS.Debian", "logo.png", "sub/data.bin", ".hidden.png", "Makefile"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("The mill opens at nine.")
    (tmp_path / "lost.txt").symlink_to(tmp_path / "nothing.txt")
    (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
    found = find_files([tmp_path])
    assert [path.name for path, _ in found] == ["NEWS.Debian", "README"]
    assert [path.name for path in passed_over([tmp_path])] == [
        "Makefile",
        "logo.png",
        "loop.txt",
        "lost.txt",
        "data.bin",
    ]
    assert next(read_file(tmp_path / "README", "README")).text == "The mill opens at nine."


@pytest.mark.parametrize(
    "heading",
    [
        "4.18.2 / 2022-10-08",
        "v3.2.5",
        "1.11.0 (2022-03-14)",
        "Master (Unreleased)",
        "2.0.0 (March 2022)",
        "Version 1.2.3",
    ],
)
def test_a_release_is_no_title_of_all_changes(tmp_path: Path, heading: str) -> None:
    """Whoever asked in which version something changed was told the first one, below each quote."""
    text = f"## 1.11.20\n\nFixed the mill.\n\n# {heading}\n\nAdded the mill.\n"
    assert read_as(tmp_path, "HISTORY.md", text).title == "HISTORY"
    assert read_as(tmp_path, "one.md", f"# {heading}\n\nAdded the mill.\n").title == heading
    numbered = "# 3.14 The root directory\n\nIt is small.\n\n## 3.14.1 Purpose of 12 files\n\nThey boot."
    assert read_as(tmp_path, "root.md", numbered).title == "3.14 The root directory"


def test_settings_are_read_where_they_are_named(tmp_path: Path) -> None:
    """Passwords of a folder's settings that are indexed unasked; or settings that cannot be indexed at all."""
    for name in ("a.md", "b.ini", "sub/c.INI", "d.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("port = 25")
    assert [path.name for path, _ in find_files([tmp_path, tmp_path / "*"])] == ["a.md"]
    named = [tmp_path, tmp_path / "**" / "*.ini", tmp_path / "d.yaml"]
    assert {path.name for path, _ in find_files(named)} >= {"a.md", "b.ini", "d.yaml"}
    assert [path.name for path in passed_over(named, {str(path) for path, _ in find_files(named)})] == ["c.INI"]
    assert next(read_file(tmp_path / "b.ini", "b.ini")).text == "port = 25"


def test_the_comment_above_settings_is_their_title() -> None:
    """A comment that holds the question's words was quoted in place of the setting."""
    settings = "port: 1\nhost: a\n"
    for comment in ("# The bakery's service", "; The bakery", "// The bakery"):
        (title, *blocks) = read_plain(f"\n{comment}\n{settings}").blocks
        assert (title.kind, len(blocks)) == (BlockKind.HEADING, 1)
    for comment in ("# Owner: ann", "# one\n# two", "#port", "# In 1850"):
        assert BlockKind.HEADING not in [block.kind for block in read_plain(f"{comment}\n{settings}").blocks]


def test_the_header_and_footer_of_a_manual_page_are_left_out() -> None:
    """They were passages, and found before the options."""
    page = "NAME\n       tool - a tool\n\nOPTIONS\n       -a   all\n"
    for name, begin in (("TOOL(1)", ""), ("x+y.conf(5)", "\n\n")):
        whole = f"{begin}{name}   User Commands   {name}\n\n{page}\ntools 9.1   May 2022   {name}\n\n"
        assert read_plain(whole).text.strip() == page.strip()
    for other in (f"TOOL(1) says much.\n{page}", f"TOOL(1)  x  TOOL(1)\n{page}", f"TOOL(1) x TOOL(2)\n{page}9 TOOL(1)"):
        assert read_plain(other).text == other


def test_a_binary_file_with_the_name_of_a_text_is_refused(tmp_path: Path) -> None:
    """Noise that is encoded, indexed and quoted."""
    (tmp_path / "program.txt").write_bytes(bytes(range(1, 32)) * 8 + b"abc")
    with pytest.raises(InputError, match="is no text, whatever its name says"):
        list(read_file(tmp_path / "program.txt", "program.txt"))
    (tmp_path / "form.txt").write_text("Page one.\n\x0cPage two.")
    assert next(read_file(tmp_path / "form.txt", "form.txt")).text == "Page one.\n\x0cPage two."

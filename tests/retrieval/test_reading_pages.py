"""Web pages, PDF and Word files become plain text that reads like the page."""

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import docx
import pypdfium2
import pytest
from docx.oxml import parse_xml
from docx.oxml.ns import nsdecls
from office_files import RAW, form_pdf, pdf_bytes, unnamed_letters_pdf, write_docx, write_pdf
from pypdf import PdfWriter

from ragspec.core import Document
from ragspec.errors import ConfigError, InputError
from ragspec.retrieval.reading import Unread, read_file
from ragspec.retrieval.reading.bounded_reader import BoundedReader, check_ocr
from ragspec.retrieval.reading.parsed_file import MOST_GARBAGE, garbage_share


def one(path: Path) -> Document:
    (document,) = read_file(path, path.name)
    return document


def page(tmp_path: Path, markup: str | bytes) -> Document:
    path = tmp_path / "page.html"
    path.write_bytes(markup if isinstance(markup, bytes) else markup.encode())
    return one(path)


def titles(document: Document) -> list[tuple[int, str, int]]:
    return [(heading.level, heading.text, heading.start) for heading in document.headings]


PAGES: dict[str, list[Any]] = json.loads(Path(__file__).with_name("pages.json").read_text(encoding="utf-8"))
"""Markup of pages and blocks of Word files, with the text that they are read as."""
BODY = "The mill opens at nine on weekdays and closes when the wheel stands still. " * 4


@pytest.mark.parametrize("opening", ["<main>", '<div class="body" role="main">'])
def test_a_page_with_a_main_part_is_that_part(tmp_path: Path, opening: str) -> None:
    """Menus, permalinks and footers came back as answers."""
    closing = "</main>" if opening == "<main>" else "</div>"
    document = page(
        tmp_path,
        f"""<title>Hours</title><div class="sidebar"><ul><li>Home<li>Contact</ul></div>{opening}
        <div><h1>Hours<a class="anchor" href="#h" title="Permalink to this headline">#</a></h1><p>{BODY}</p></div>
        <blockquote>Open!<footer>The miller</footer></blockquote>{closing}<div>Copyright 1874</div><footer>All rights</footer>""",
    )
    assert document.text == f"Hours\n\n{BODY.strip()}\n\nOpen!\n\nThe miller"
    assert document.title == "Hours" and titles(document) == [(1, "Hours", 0)]


def test_a_main_part_with_hardly_any_text_is_not_all_of_a_page(tmp_path: Path) -> None:
    """A page whose text stands beside an empty main part was lost."""
    document = page(tmp_path, f"<main><p>Loading</p></main><p>{BODY}</p><footer>All rights</footer>")
    assert document.text == f"Loading\n\n{BODY.strip()}"


def test_a_web_page_reads_as_it_is_seen() -> None:
    """Menus and scripts were found in place of the text; words on both sides of a tag ran together or apart."""
    document = one(Path(__file__).with_name("files") / "page.html")
    assert document.text == (
        "Top\n\nHello world,\nnext & last.\n- one\n- two\n1. first\n2. second\n\n  if x:\n    y\n\n"
        "Down\n\nLoose text\n\nin a block"
    )
    assert document.title == "My page"
    assert titles(document) == [(1, "Top", 0), (3, "Down", document.text.index("Down"))]


def test_rows_of_a_table_are_lines(tmp_path: Path) -> None:
    """A table whose cells run into one another answers no question about a cell."""
    document = page(
        tmp_path,
        "<p>Before<table><thead><tr><th>Part<th>Weight</thead><tr><td>Disk<td><p>5</p> kg<tr><td><td></table>After"
        "<table><tr><td><nav>Menu</nav>Left<td><h2>Title</h2>Text<table><tr><td>in</table></table>",
    )
    assert (
        document.text
        == "Before\n\n| Part | Weight |\n|---|---|\n| Disk | 5 kg |\n\nAfter\n\nLeft\n\nTitle\n\nText\n\n| in |"
    )


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("<p>Größe €".encode(), "Größe €"),
        ("<p>Größe €".encode("utf-16"), "Größe €"),
        ('<meta charset="iso-8859-1"><p>Größe'.encode("latin-1"), "Größe"),
        ('<?xml version="1.0" encoding="shift_jis"?><p>日本語'.encode("shift_jis"), "日本語"),
        ('<meta charset="none-such"><p>Größe'.encode(), "Größe"),
        (b"no tags at all", "no tags at all"),
        (b'<meta charset="iso-8859-1"><p>5 \x80', "5 €"),
        (
            b"<?xml version='1.0' encoding='us-ascii'?><html xmlns='http://www.w3.org/1999/xhtml'><title/><p>\x93a\x94",
            "“a”",
        ),
        (b"<meta http-equiv=content-type content='text/html; charset=iso-8859-9'><p>\xfd\x80", "ı€"),
        (b"<meta charset=utf-16><p>plain.", "plain."),
        ('<meta charset="gb2312"><p>镕'.encode("gbk"), "镕"),
    ],
)
def test_a_web_page_may_be_written_in_any_encoding(tmp_path: Path, raw: bytes, text: str) -> None:
    """Pages of the last century were refused or came out as signs."""
    assert page(tmp_path, raw).text == text


def test_a_page_without_a_title_has_its_first_heading_or_its_file(tmp_path: Path) -> None:
    """Three hundred pages called "index"."""
    assert page(tmp_path, "<h2>Low</h2><h1>High</h1>x").title == "High"
    assert page(tmp_path, "<p>x").title == "page"


def test_a_word_file_reads_in_its_order(tmp_path: Path) -> None:
    """python-docx gives all paragraphs and then all tables; nobody finds the table's place again."""
    document = one(write_docx(tmp_path / "a.docx"))
    assert document.text == (
        "The manual\n\nInstall\n\nRun the installer. Then restart.\n- one disk\n- two hands\n\n"
        "| Part | Weight |\n|---|---|\n| Disk | 5 kg |\n\nOn Linux\n\nUse the package."
    )
    assert document.title == "The manual"
    assert titles(document) == [(1, "The manual", 0), (1, "Install", 12), (2, "On Linux", document.text.index("On"))]


def test_sentences_of_a_pdf_are_whole(tmp_path: Path) -> None:
    """Every line of a PDF was a sentence of its own, and "compu-" and "ter" were two words."""
    first, second, text = PAGES["sentences of a PDF"]
    path = write_pdf(
        tmp_path / "a.pdf", first, second, title="A paper", outline=[("Introduction", 0), ("Methods", 1), ("?", 1)]
    )
    document = one(path)
    assert document.text == text
    assert (document.title, document.metadata) == ("A paper", {"pages": 2})
    assert titles(document) == [(1, "Introduction", 0), (2, "Methods", document.text.index("Methods"))]


def test_a_pdf_is_read_without_running_titles_and_with_its_large_lines_as_headings(tmp_path: Path) -> None:
    """Page numbers and running titles stood inside sentences, and passages of a PDF without an outline had no heading."""
    *bodies, text = PAGES["large lines of a PDF"]
    pages = [["The Mill Company", *body, f"Page {n}"] for n, body in enumerate(bodies, 1)]
    document = one(write_pdf(tmp_path / "a.pdf", *pages))
    assert document.text == text
    assert titles(document) == [(1, "Opening hours", 0), (1, "Prices", document.text.index("Prices"))]


def test_rows_that_differ_in_their_numbers_are_no_running_titles(tmp_path: Path) -> None:
    """Three pages sufficed, and any numbers were page numbers: statements lost their balances, invoices their totals."""
    sums = [(1204, 55), (980, 61), (1733, 12), (640, 90)]
    statements = [
        [
            f"Balance on {n} May: {a}.{b}",
            *(f"Paid {a * k} to shop {k}." for k in range(1, 9)),
            f"Carried over: {a - b}",
            f"- {n} -",
        ]
        for n, (a, b) in enumerate(sums, 4)
    ]
    invoices = [[f"Invoice {b * 7}", f"Sum {a}.{b}", f"Due in {b} days"] for a, b in sums]
    letters = [[f"Text {'abcdefgh'[n]}.", "Kind regards" if n < 3 else f"See {'abcdefgh'[n]}."] for n in range(8)]
    for pages, dropped in ((statements, 1), (invoices, 0), (letters, 0)):
        shown = one(write_pdf(tmp_path / "a.pdf", *pages)).text.split()
        assert shown == " ".join(line for page in pages for line in page[: len(page) - dropped]).split()


def test_no_page_of_a_pdf_loses_all_its_lines(tmp_path: Path) -> None:
    """Lines from both edges of a page of three were the whole page, and a form filled in alike was an empty document."""
    pages = [["The Mill Company", "No sack was sold.", f"Page {n} of 4"] for n in range(1, 5)]
    assert one(write_pdf(tmp_path / "a.pdf", *pages)).text.count("No sack was sold.") == 4
    pages[2][1] = "One sack was sold."
    assert "One sack was sold." in (text := one(write_pdf(tmp_path / "a.pdf", *pages)).text) and "Page 3" not in text


def test_ligatures_and_turned_pages_are_read(tmp_path: Path) -> None:
    """A TeX font without names had "o ce"; lines of a page that is shown turned came from below."""
    writer = PdfWriter(clone_from=io.BytesIO(pdf_bytes(["one", RAW + r"o\036ce", "three"])))
    writer.pages[0].rotate(90)
    writer.write(tmp_path / "a.pdf")
    assert one(tmp_path / "a.pdf").text == "one office three"


@pytest.mark.parametrize("place", ["0 1 -1 0 300 72 Tm", "0 -1.5 1.5 0 72 700 Tm"])
def test_turned_pages_of_a_pdf_have_headings(tmp_path: Path, place: str) -> None:
    """Letters of a turned line had the size 0, and a table set across its page had no title."""
    lines = ["# Opening hours", "The mill opens at nine on every day of the week."]
    (tmp_path / "a.pdf").write_bytes(pdf_bytes(lines, place=place))
    assert titles(one(tmp_path / "a.pdf")) == [(1, "Opening hours", 0)]


def test_large_letters_alone_make_no_heading(tmp_path: Path) -> None:
    """A page of large letters was one heading, and where most of a text has no size every line was one."""
    quote = [f"# The quotation of {n} goes on in letters that are larger than all the others," for n in "abcde"]
    body = ["The mill opens at nine on every day of the week."] * 20
    for pages, size in (([quote, body], 11), ([["# Large letters of one line", *body]], 0)):
        (tmp_path / "a.pdf").write_bytes(pdf_bytes(*pages, size=size))
        assert "arge" in (document := one(tmp_path / "a.pdf")).text and not document.headings


def test_a_pdf_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    """A scanned or locked file was an empty document: the index lacked it and nobody knew."""
    for path, reason in (
        (write_pdf(tmp_path / "locked.pdf", ["Secret."], password="x"), "locked by a password"),
        (write_pdf(tmp_path / "empty.pdf", [], []), "its 2 pages hold no text"),
    ):
        with pytest.raises(InputError, match=f"{path.name} cannot be read: .*{reason}"):
            list(read_file(path, path.name))
    assert one(write_pdf(tmp_path / "open.pdf", ["Open."], title="untitled")).title == "open"


@pytest.mark.parametrize(("markup", "text"), PAGES["raised and struck text"])
def test_raised_and_struck_text_keeps_its_meaning(tmp_path: Path, markup: str, text: str) -> None:
    """The text "10<sup>6</sup> kg" was quoted as "106 kg"."""
    assert page(tmp_path, f"<p>{markup}</p>").text == text


@pytest.mark.parametrize(("markup", "text"), PAGES["formulas"])
def test_formulas_keep_their_meaning(tmp_path: Path, markup: str, text: str) -> None:
    """One half was read as 12, and the root of 16 as 16."""
    assert page(tmp_path, f"<p><math>{markup}</math></p>").text == text


@pytest.mark.parametrize(("rows", "lines"), PAGES["cells"])
def test_cells_stand_in_their_columns(tmp_path: Path, rows: str, lines: list[str]) -> None:
    """Below a cell over two rows the numbers of 2024 stood under 2023."""
    document = page(tmp_path, f"<table>{rows}</table>")
    assert document.text == "\n".join(f"| {line} |" for line in lines)
    assert [block.kind for block in document.blocks] == ["table"]


def test_a_table_of_nothing_but_spans_is_refused(tmp_path: Path) -> None:
    """A page of one megabyte became a text of a hundred."""
    rows = "<tr>" + "<td colspan=1000 rowspan=0>x" * 3 + "<tr><td>y" * 2000
    with pytest.raises(InputError, match="span too many rows"):
        page(tmp_path, f"<table>{rows}</table>")


@pytest.mark.parametrize(("markup", "text"), PAGES["buttons"])
def test_questions_in_buttons_are_read_and_tools_are_not(tmp_path: Path, markup: str, text: str) -> None:
    """The answers of a page of questions stood without their questions."""
    assert page(tmp_path, markup).text == text


@pytest.mark.parametrize(("markup", "text"), PAGES["lists"])
def test_items_of_lists_have_their_numbers(tmp_path: Path, markup: str, text: str) -> None:
    """Step five was quoted as step one."""
    assert page(tmp_path, markup).text == text


@pytest.mark.parametrize("rows", PAGES["code"])
def test_code_beside_its_line_numbers_keeps_its_lines(tmp_path: Path, rows: str) -> None:
    """Lines of code were joined with the numbers of all lines before them."""
    document = page(tmp_path, f"<table>{rows}</table>")
    assert document.text == "if x:\n    y" and [block.kind for block in document.blocks] == ["code"]


def test_blocks_are_spans_of_the_text(tmp_path: Path) -> None:
    """A passage of code was cut and shown as prose."""
    document = page(tmp_path, "<h1>T</h1><p>a<ul><li>b</ul><table><tr><td>c<td>d<tr><td>e</table><pre>f\n g</pre>")
    parts = [(block.kind.value, document.text[block.start : block.end]) for block in document.blocks]
    assert parts == [
        ("heading", "T"),
        ("paragraph", "a"),
        ("list_item", "- b"),
        ("table", "| c | d |\n| e |"),
        ("code", "f\n g"),
    ]


def pdf(tmp_path: Path, raw: bytes) -> tuple[Document, list[Unread]]:
    path = tmp_path / "page.pdf"
    path.write_bytes(raw)
    unread: list[Unread] = []
    (document,) = read_file(path, path.name, unread)
    return document, unread


DRAWN = "/AP << /N 7 0 R >>"


@pytest.mark.parametrize(("appearance", "second", "end"), [(DRAWN, "", ""), ("", "", ""), (DRAWN, DRAWN, " Ada")])
def test_values_of_a_pdf_form_stand_beside_their_labels(tmp_path: Path, appearance: str, second: str, end: str) -> None:
    """A filled form was read as an empty one, and the value of the second field stood beside the first field's label."""
    document, unread = pdf(tmp_path, form_pdf("Ada", appearance, second=second))
    assert (document.text, unread) == (f"Name: Ada\n\nSigned at the mill.{end}", [])


def test_a_page_of_letters_without_names_is_refused(tmp_path: Path) -> None:
    """The text "$HRSHQ" was indexed as text."""
    path = tmp_path / "page.pdf"
    path.write_bytes(unnamed_letters_pdf("The opening hours of the mill are from nine in the morning until late."))
    with pytest.raises(InputError, match="page 1: its text is garbage"):
        list(read_file(path, path.name))


def test_a_scanned_page_is_named(tmp_path: Path) -> None:
    """The page was gone without a word."""
    document, unread = pdf(tmp_path, pdf_bytes(["The mill opens at nine."], None))
    assert document.text == "The mill opens at nine." and [each.place for each in unread] == ["page 2"]
    assert "ocrmypdf" in unread[0].reason and [block.page for block in document.blocks] == [1]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("ocrmypdf") is None, reason="needs ocrmypdf")
def test_text_of_scanned_pages_is_recognised(tmp_path: Path) -> None:
    """A scan was named and left out, although the program that reads it was there."""
    with pypdfium2.PdfDocument(pdf_bytes(["# The mill opens at nine."])) as document:
        scan = document[0].render(scale=4).to_pil()
    scan.save(tmp_path / "scan.pdf")
    unread: list[Unread] = []
    with BoundedReader(ocr=True) as reader:
        (found,) = reader.documents(tmp_path / "scan.pdf", "scan.pdf", unread)
    assert found.text == "The mill opens at nine." and found.title == "scan" and not unread


def test_text_recognition_needs_its_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of hours ended with every scan left out."""
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="--ocr needs the program ocrmypdf"):
        check_ocr()


def test_raised_and_lowered_digits_of_a_pdf_are_signs(tmp_path: Path) -> None:
    """10 to the power of 6 was 106."""
    line = (
        "10) Tj /F1 7 Tf 4 Ts (-6) Tj /F1 11 Tf 0 Ts ( kg of H) Tj /F1 7 Tf -2 Ts (2) Tj /F1 11 Tf 0 Ts (O in the mill"
    )
    assert pdf(tmp_path, pdf_bytes([RAW + line]))[0].text == "10⁻⁶ kg of H₂O in the mill"


def test_words_that_are_set_apart_by_spacing_are_apart(tmp_path: Path) -> None:
    """A manual page set by groff had "anyerrors": PDFium took a space inside a string for spacing of letters."""
    lines = ["If an) Tj 2.75 Tc (ye) Tj 0 Tc [250 (rrors occur)] TJ (", ") Tj 4 Tc (OPENING) Tj 0 Tc ("]
    assert (
        pdf(tmp_path, pdf_bytes([RAW + line for line in lines]))[0].text.split()
        == "If any errors occur OPENING".split()
    )


def test_signs_that_a_producer_raises_far_are_superscripts(tmp_path: Path) -> None:
    """WeasyPrint's superscripts are hardly smaller, and "10^6 kg" was read as "106 kg"; TeX's and ReportLab's stood apart."""
    raised = "10) Tj /F1 9.8 Tf 5 Ts (6) Tj /F1 11 Tf 0 Ts ( kg) Tj 0 -30 Td (and x) Tj /F1 8 Tf 27 5 Td (2) Tj ("
    assert pdf(tmp_path, pdf_bytes([RAW + raised]))[0].text.split() == ["10⁶", "kg", "and", "x²"]


def test_garbage_is_told_from_words() -> None:
    """The words of a PDF of a TeX route were glued together, and indexed."""
    words = "The mill opens at nine in the morning; Straßenbahnhaltestelle, wrzesień, aujourd'hui, привет, 日本語の文書です。"
    assert garbage_share(words * 2) < 0.1
    for text in (
        "7KH RSHQLQJ KRXUV RI WKH PLOO DUH IURP QLQH",
        "Avirtualpackageisagenericnamethatapplies toanyoneofagroupofpackages",
        "\ue001\ue002\ue003 the",
    ):
        assert garbage_share(text * 3) > MOST_GARBAGE


MATH = "xmlns:m='http://schemas.openxmlformats.org/officeDocument/2006/math'"


def word(tmp_path: Path, *blocks: str, title: str = "") -> Document:
    """A Word file of these blocks; `{a text}` is a run."""
    document = docx.Document()
    for place, block in enumerate(blocks):
        markup = re.sub(r"\{(.*?)\}", r"<w:r><w:t xml:space='preserve'>\1</w:t></w:r>", block)
        declared = re.sub(r"^<w:\w+", rf"\g<0> {nsdecls('w')} {MATH}", markup)
        document.element.body.insert(place, parse_xml(declared))
    document.core_properties.title = title
    document.save(str(tmp_path / "a.docx"))
    return one(tmp_path / "a.docx")


def numbered(text: str, list_id: int = 7, level: int = 0) -> str:
    properties = f"<w:numPr><w:ilvl w:val='{level}'/><w:numId w:val='{list_id}'/></w:numPr>"
    return f"<w:p><w:pPr>{properties}</w:pPr>{{{text}}}</w:p>"


@pytest.mark.parametrize(("blocks", "text"), PAGES["Word"])
def test_word_keeps_what_stands_after_all_changes(tmp_path: Path, blocks: list[str], text: str) -> None:
    """Moved text and boxes were there twice, inserted text was lost, and an exponent became a digit."""
    assert word(tmp_path, *blocks).text == text


def test_an_outline_level_of_word_is_a_heading(tmp_path: Path) -> None:
    """A title without a style was a paragraph, and the title that the file states was not read."""
    document = word(tmp_path, "<w:p><w:pPr><w:outlineLvl w:val='2'/></w:pPr>{Title}</w:p>", title="Set")
    assert (document.title, titles(document)) == ("Set", [(3, "Title", 0)])


def test_cells_of_word_stand_in_their_columns(tmp_path: Path) -> None:
    """Below a merged cell the numbers of 2024 stood under 2023."""
    cell = "<w:tc><w:tcPr>{}</w:tcPr><w:p>{{{}}}</w:p></w:tc>"
    rows = (
        [("<w:vMerge w:val='restart'/>", "North"), ("", "2023"), ("", "5")],
        [("<w:vMerge/>", ""), ("", "2024"), ("", "8")],
        [("<w:gridSpan w:val='2'/>", "Sum"), ("", "13")],
    )
    lines = "".join(f"<w:tr>{''.join(cell.format(*each) for each in row)}</w:tr>" for row in rows)
    short = "<w:tr><w:trPr><w:gridBefore w:val='2'/></w:trPr>" + cell.format("", "end") + "</w:tr>"
    deleted = "<w:tr><w:trPr><w:del/></w:trPr>" + cell.format("", "gone") + "</w:tr>"
    assert word(tmp_path, f"<w:tbl>{lines}{short}{deleted}</w:tbl>").text == (
        "| North | 2023 | 5 |\n| North | 2024 | 8 |\n| Sum |  | 13 |\n|  |  | end |"
    )


def test_numbers_of_word_are_those_that_word_shows(tmp_path: Path) -> None:
    """Every item was a dash: step 5 of a manual was not found, or quoted as another."""
    document = docx.Document()
    numbering = document.part.numbering_part.element
    levels = "".join(
        f"<w:lvl w:ilvl='{n}'><w:start w:val='{start}'/><w:numFmt w:val='{style}'/><w:lvlText w:val='{pattern}'/></w:lvl>"
        for n, (start, style, pattern) in enumerate(
            [(5, "decimal", "%1."), (1, "lowerLetter", "%2)"), (1, "upperRoman", "%1-%3")]
        )
    )
    numbering.insert(0, parse_xml(f"<w:abstractNum {nsdecls('w')} w:abstractNumId='77'>{levels}</w:abstractNum>"))
    again = "<w:lvlOverride w:ilvl='0'><w:startOverride w:val='1'/></w:lvlOverride>"
    for list_id, override in ((7, ""), (8, again)):
        numbering.append(
            parse_xml(f"<w:num {nsdecls('w')} w:numId='{list_id}0'><w:abstractNumId w:val='77'/>{override}</w:num>")
        )
    items = zip("abcdefgh", [70] * 6 + [80] * 2, (0, 1, 1, 2, 0, 1, 0, 0), strict=True)
    for place, (text, list_id, level) in enumerate(items):
        markup = numbered(text, list_id, level).replace("{" + text + "}", f"<w:r><w:t>{text}</w:t></w:r>")
        document.element.body.insert(place, parse_xml(markup.replace("<w:p>", f"<w:p {nsdecls('w')}>", 1)))
    document.save(str(tmp_path / "a.docx"))
    found = one(tmp_path / "a.docx")
    assert found.text.split("\n") == ["5. a", "a) b", "b) c", "5-I d", "6. e", "a) f", "1. g", "2. h"]
    assert {block.kind for block in found.blocks} == {"list_item"}

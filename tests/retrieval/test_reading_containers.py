"""OpenDocument texts, workbooks, presentations, e-books, mails and notebooks become the text that they show."""

import json
import re
import zipfile
from datetime import date, timedelta
from email.message import EmailMessage
from pathlib import Path

import openpyxl
import pptx
import pytest
from pptx.chart.data import CategoryChartData
from pptx.enum.chart import XL_CHART_TYPE
from pptx.oxml.ns import qn
from pptx.util import Inches

from ragspec.core import Document
from ragspec.errors import InputError
from ragspec.retrieval.reading import Unread, odt, read_file

FILES = Path(__file__).with_name("files")


def read(path: Path, unread: list[Unread] | None = None) -> Document:
    (document,) = read_file(path, path.name, unread)
    for heading in document.headings:
        assert heading.text in document.text[heading.start :].split("\n")[0]
    assert all(document.text[block.start : block.end].strip() for block in document.blocks)
    return document


def test_a_text_of_libreoffice_reads_as_it_is_shown(tmp_path: Path) -> None:
    """Texts of LibreOffice were passed over; its lists, spans, notes and formulas have other names than Word's."""
    spaces = " ".join(f'xmlns:{name}="{uri}"' for name, uri in odt._NAMES.items())
    body = (FILES / "odt_body.xml").read_text()
    part = f"<office:document {spaces}><office:{{0}}>{{1}}</office:{{0}}></office:document>".format
    with zipfile.ZipFile(tmp_path / "a.odt", "w") as archive:
        archive.writestr("META-INF/manifest.xml", "<manifest/>")
        archive.writestr("styles.xml", part("styles", (FILES / "odt_styles.xml").read_text()))
        archive.writestr("meta.xml", part("meta", "<dc:title>Set</dc:title>"))
        archive.writestr("content.xml", part("body", f"<office:text>{body}</office:text>"))
        math = "<math xmlns='http://www.w3.org/1998/Math/MathML'><msup><mi>a</mi><mn>2</mn></msup></math>"
        archive.writestr("Formula/content.xml", math)
    unread: list[Unread] = []
    document = read(tmp_path / "a.odt", unread)
    assert document.text == (
        "A: Mill\n\n10⁶ kg  or more[1]\n5. cut\n\nbox\n5.i) left\n\nrest\n\nshape\n6. sew\n\n| h | h |\n|---|---|\n"
        "| N | 5 |\n| N | 8 |\n| 8 |\n\nx = a²\n\n[1] By hand."
    )
    assert document.title == "Set" and [str(each) for each in unread] == ["Chart: embedded objects are not read"]


def test_sheets_of_a_workbook_are_tables(tmp_path: Path) -> None:
    """Under a merged cell the numbers of 2024 stood under 2023; 12.5% was 0.125, and a date had a time."""
    book = openpyxl.Workbook()
    sheet = book.active
    sheet.title = "Sales"
    for row in (["Region", "Year", "Sum"], ["North", 2023, 5], [None, 2024, 8], [None, None, None], ["All", None, 13]):
        sheet.append(row)
    shown = {
        "0.0%": 0.125,
        "yyyy-mm-dd": date(2024, 5, 1),
        "[$€-407] #,##0.00": -1234.5,
        "0000": 42,
        '0.0 "kg"': 5,
        "x0": 1.5,
    }
    sheet.append(list(shown.values()))
    for cell, number_format in zip(sheet[6], shown, strict=True):
        cell.number_format = number_format
    sheet.append([timedelta(hours=30), True, "=B2"])
    sheet.merge_cells("A2:A3")
    sheet.merge_cells("A5:B5")
    book.create_sheet("Hidden").sheet_state = "hidden"
    book.save(tmp_path / "a.xlsx")
    unread: list[Unread] = []
    assert [
        re.sub(r"(?<=\|)(  \|)+$", "", line) for line in read(tmp_path / "a.xlsx", unread).text.split("\n")[2:]
    ] == [
        "| Region | Year | Sum |",
        "|---|---|---|---|---|---|",
        "| North | 2023 | 5 |",
        "| North | 2024 | 8 |",
        "| All |  | 13 |",
        "| 12.5% | 2024-05-01 | -€ 1,234.50 | 0042 | 5.0 kg | 1.5 |",
        "| 30:00:00 | TRUE |",
    ]
    assert "formulas without a stored value: 1" in str(unread[0])


def test_a_workbook_of_one_far_cell_is_refused(tmp_path: Path) -> None:
    """A file of five kilobytes took days."""
    book = openpyxl.Workbook()
    book.active["XFD1048576"] = 1
    book.save(tmp_path / "a.xlsx")
    with pytest.raises(InputError, match="has more than 5000000 cells"):
        read(tmp_path / "a.xlsx")


def test_slides_have_titles_texts_tables_and_numbers(tmp_path: Path) -> None:
    """A slide's table was lost, and nobody knew the slide of a quote."""
    presentation = pptx.Presentation()
    for title in ("Hours", "Prices"):
        slide = presentation.slides.add_slide(presentation.slide_layouts[1])
        slide.shapes.title.text, slide.placeholders[1].text = title, f"{title} of the mill"
    table = slide.shapes.add_table(2, 2, Inches(1), Inches(5), Inches(4), Inches(1)).table
    table.cell(0, 0).merge(table.cell(1, 0))
    for place, text in {(0, 0): "Sack", (0, 1): "9", (1, 1): "10"}.items():
        table.cell(*place).text = text
    slide.notes_slide.notes_text_frame.text = "Say it slowly."
    for text in ("cut", "sew"):
        paragraph = slide.placeholders[1].text_frame.add_paragraph()
        paragraph.text = text
        numbering = paragraph._p.get_or_add_pPr().makeelement(qn("a:buAutoNum"), type="romanLcParenR", startAt="4")
        paragraph._p.pPr.append(numbering)
    paragraph.runs[0].font._element.set("baseline", "30000")
    chart = CategoryChartData()
    chart.categories = ["a"]
    chart.add_series("b", [1])
    slide.shapes.add_chart(XL_CHART_TYPE.PIE, 0, 0, Inches(1), Inches(1), chart)
    presentation.slides.add_slide(presentation.slide_layouts[1]).element.set("show", "0")
    presentation.save(tmp_path / "a.pptx")
    unread: list[Unread] = []
    document = read(tmp_path / "a.pptx", unread)
    assert document.text == (
        "Hours\n\nHours of the mill\n\nPrices\n\nPrices of the mill\niv) cut\nv) ˢᵉʷ\n\n"
        "| Sack | 9 |\n| Sack | 10 |\n\nSay it slowly."
    )
    assert [each.place for each in unread] == ["slide 2", "slide 3"]
    assert [block.page for block in document.blocks][:4] == [1, 1, 2, 2]


def test_chapters_of_a_book_follow_its_order(tmp_path: Path) -> None:
    """The files of an archive stand in any order."""
    with zipfile.ZipFile(tmp_path / "a.epub", "w") as archive:
        archive.writestr("META-INF/container.xml", '<container><rootfile full-path="o/p.opf"/></container>')
        archive.writestr("o/b.xhtml", "<h1>Two</h1><p>10<sup>6</sup>")
        archive.writestr("o/a 1.xhtml", "<h1>One</h1><p>First.")
        archive.writestr(
            "o/p.opf",
            "<package><metadata><title>Book</title></metadata><manifest><item id='x' href='b.xhtml'/>"
            "<item id='y' href='a%201.xhtml'/></manifest><spine><itemref idref='y'/>"
            "<itemref idref='x'/><itemref idref='z'/></spine></package>",
        )
    unread: list[Unread] = []
    document = read(tmp_path / "a.epub", unread)
    assert [str(each) for each in unread] == ["o/z: the book does not hold it"]
    assert (document.title, document.text) == ("Book", "One\n\nFirst.\n\nTwo\n\n10⁶")
    assert [heading.text for heading in document.headings] == ["One", "Two"]


def test_a_mail_names_what_is_attached(tmp_path: Path) -> None:
    """The base64 of an attachment was indexed as text."""
    message = EmailMessage()
    message["Subject"], message["From"] = "Grüße", "ann@example.org"
    message.set_content("The mill opens at nine.\n")
    message.add_attachment("It closes at five.\n", disposition="inline")
    message.add_attachment(b"x" * 99, maintype="application", subtype="pdf", filename="plan.pdf")
    (tmp_path / "a.eml").write_bytes(message.as_bytes())
    unread: list[Unread] = []
    document = read(tmp_path / "a.eml", unread)
    text = "The mill opens at nine.\n\n\nIt closes at five.\n"
    assert document.text == f"Grüße\n\nFrom: ann@example.org\n\n{text}"
    assert [each.place for each in unread] == ["attachment plan.pdf"]
    head = b"Content-Type: text/plain; charset=iso-8859-1\nContent-Transfer-Encoding: 8bit\n\n"
    (tmp_path / "b.eml").write_bytes(head + b"It costs 5 \x80.\n")
    assert read(tmp_path / "b.eml").text == "It costs 5 \u20ac.\n"


def test_cells_of_a_notebook_are_text_and_code(tmp_path: Path) -> None:
    """The JSON of a notebook was passed over."""
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {"cell_type": "code", "source": "x = 1\ny = 2", "outputs": [{"text": ["\x1b[31m4", "2\n"]}, {"data": {}}]},
    ]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    document = read(tmp_path / "a.ipynb")
    assert [document.text[block.start : block.end] for block in document.blocks] == [
        *("# Title", "text", "x = 1\ny = 2", "42")
    ]
    (tmp_path / "b.ipynb").write_text("{}")
    with pytest.raises(InputError, match="no notebook"):
        read(tmp_path / "b.ipynb")

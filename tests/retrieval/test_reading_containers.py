"""Workbooks, presentations, e-books, mails and notebooks become the text that they show."""

from __future__ import annotations

import json
import zipfile
from email.message import EmailMessage
from pathlib import Path

import openpyxl
import pptx
import pytest
from pptx.util import Inches

from ragspec.core import Document
from ragspec.errors import InputError
from ragspec.retrieval.reading import Unread, read_file


def read(path: Path, unread: list[Unread] | None = None) -> Document:
    (document,) = read_file(path, path.name, unread)
    for heading in document.headings:
        assert heading.text in document.text[heading.start :].split("\n")[0]
    assert all(document.text[block.start : block.end].strip() for block in document.blocks)
    return document


def test_sheets_of_a_workbook_are_tables(tmp_path: Path) -> None:
    """Under a merged cell the numbers of 2024 stood under 2023."""
    book = openpyxl.Workbook()
    sheet = book.active
    sheet.title = "Sales"
    for row in (["Region", "Year", "Sum"], ["North", 2023, 5], [None, 2024, 8], [None, None, None], ["All", None, 13]):
        sheet.append(row)
    sheet.merge_cells("A2:A3")
    sheet.merge_cells("A5:B5")
    book.create_sheet("Hidden").sheet_state = "hidden"
    book.save(tmp_path / "a.xlsx")
    document = read(tmp_path / "a.xlsx")
    assert document.text == (
        "Sales\n\n| Region | Year | Sum |\n|---|---|---|\n| North | 2023 | 5 |\n| North | 2024 | 8 |\n| All |  | 13 |"
    )


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
    presentation.save(tmp_path / "a.pptx")
    document = read(tmp_path / "a.pptx")
    assert document.text == (
        "Hours\n\nHours of the mill\n\nPrices\n\nPrices of the mill\n\n| Sack | 9 |\n| Sack | 10 |\n\nSay it slowly."
    )
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
            "<item id='y' href='a%201.xhtml'/></manifest><spine><itemref idref='y'/><itemref idref='x'/></spine></package>",
        )
    document = read(tmp_path / "a.epub")
    assert (document.title, document.text) == ("Book", "One\n\nFirst.\n\nTwo\n\n10⁶")
    assert [heading.text for heading in document.headings] == ["One", "Two"]


def test_a_mail_names_what_is_attached(tmp_path: Path) -> None:
    """The base64 of an attachment was indexed as text."""
    message = EmailMessage()
    message["Subject"], message["From"] = "Grüße", "ann@example.org"
    message.set_content("The mill opens at nine.\n")
    message.add_attachment(b"x" * 99, maintype="application", subtype="pdf", filename="plan.pdf")
    (tmp_path / "a.eml").write_bytes(message.as_bytes())
    unread: list[Unread] = []
    document = read(tmp_path / "a.eml", unread)
    assert document.text.split("\n\n") == ["Grüße", "From: ann@example.org", "The mill opens at nine.\n"]
    assert [each.place for each in unread] == ["attachment plan.pdf"]


def test_cells_of_a_notebook_are_text_and_code(tmp_path: Path) -> None:
    """The JSON of a notebook was passed over."""
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {"cell_type": "code", "source": "x = 1\ny = 2"},
    ]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    document = read(tmp_path / "a.ipynb")
    assert [document.text[block.start : block.end] for block in document.blocks] == ["# Title", "text", "x = 1\ny = 2"]
    (tmp_path / "b.ipynb").write_text("{}")
    with pytest.raises(InputError, match="no notebook"):
        read(tmp_path / "b.ipynb")

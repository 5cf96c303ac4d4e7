"""Files that hold parts of other formats: e-books, mails, notebooks, workbooks and presentations.

>>> read_notebook("...").blocks
"""

from __future__ import annotations

import email
import email.policy
import json
import posixpath
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from lxml import etree

from ragspec.core import BlockKind
from ragspec.errors import InputError
from ragspec.retrieval.reading.html import parse_html
from ragspec.retrieval.reading.markup import read_markdown, read_plain
from ragspec.retrieval.reading.parsed_file import (
    WINDOWS,
    Cell,
    ParsedFile,
    Table,
    TextBuilder,
    Unread,
    check_archive,
    check_size,
)

_MAX_CELLS = 5_000_000
_MAX_XML_BYTES = 32 * 1024**2
"""Limit of one part of a workbook; its cells take about fifty times as much memory."""


def read_epub(path: Path) -> ParsedFile:
    """The chapters in the order of the book."""
    check_archive(path)
    builder = TextBuilder()
    with zipfile.ZipFile(path) as archive:
        container = _xml(archive.read("META-INF/container.xml"))
        (package_name, *_) = container.xpath("//@full-path")
        package = _xml(archive.read(package_name))
        hrefs = {item.get("id"): item.get("href") for item in package.iter("{*}item")}
        for item in package.iter("{*}itemref"):
            name = posixpath.join(posixpath.dirname(package_name), unquote(hrefs.get(item.get("idref")) or ""))
            builder.append(parse_html(archive.read(posixpath.normpath(name))))
        title = next((each.text for each in package.iter("{*}title") if each.text), "")
    return builder.build(title)


def read_mail(path: Path) -> ParsedFile:
    """The subject, the sender and the text; attachments are named as unread."""
    check_size(path)
    message: Any = email.message_from_bytes(path.read_bytes(), policy=email.policy.default)
    builder = TextBuilder()
    subject = str(message["subject"] or "")
    builder.add(subject, level=1)
    builder.add("\n".join(f"{name}: {message[name]}" for name in ("From", "To", "Date") if message[name]))
    body = message.get_body(("plain", "html"))
    if body is not None and body.get_content_type() == "text/html":
        builder.append(parse_html(_decoded(body)))
    elif body is not None:
        builder.append(read_plain(_decoded(body).replace("\r\n", "\n")))
    names = [part.get_filename() or part.get_content_type() for part in message.iter_attachments()]
    return builder.build(subject, unread=[Unread(f"attachment {name}", "attachments are not read") for name in names])


def _decoded(part: Any) -> str:
    """The text of a part of a mail, by the encoding that it names, by UTF-8 or by windows-1252: the first that fits."""
    raw: bytes = part.get_payload(decode=True) or b""
    for encoding in (part.get_content_charset("utf-8-sig"), "utf-8-sig"):
        try:
            return raw.decode(encoding)
        except (UnicodeDecodeError, LookupError):
            continue
    return raw.decode(WINDOWS, "replace")


def read_notebook(text: str) -> ParsedFile:
    """The texts and the code of a Jupyter notebook, without outputs. Raises: InputError."""
    builder = TextBuilder()
    if not text.strip():
        return builder.build()
    try:
        cells = json.loads(text)["cells"]
        sources = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    except (ValueError, KeyError, TypeError) as cause:
        raise InputError("it cannot be read: it is no notebook of Jupyter's format 4") from cause
    for kind, source in sources:
        if kind == "code":
            builder.add(source.strip("\n"), kind=BlockKind.CODE)
        else:
            builder.append(read_markdown(source))
    return builder.build()


def read_workbook(path: Path) -> ParsedFile:
    """Each sheet of a .xlsx file is a heading and a table, with the values of formulas as they were last shown."""
    import openpyxl  # Why here: it takes 0.2 s, and most folders hold no workbook

    check_archive(path, _MAX_XML_BYTES)
    builder = TextBuilder()
    book = openpyxl.load_workbook(path, data_only=True)
    for sheet in book.worksheets:
        if sheet.sheet_state != "visible":
            continue
        num_merged = sum(each.size["rows"] * each.size["columns"] for each in sheet.merged_cells.ranges)
        if sheet.max_row * sheet.max_column + num_merged > _MAX_CELLS:
            raise InputError(f"{path} cannot be read: the sheet {sheet.title!r} has more than {_MAX_CELLS} cells")
        spans = {(each.min_row, each.min_col): each.size for each in sheet.merged_cells.ranges}
        covered = {place for each in sheet.merged_cells.ranges for place in list(_places(each))[1:]}
        builder.add(sheet.title, level=1)
        table = Table(builder)
        for row in sheet.iter_rows():
            cells = [each for each in row if (each.row, each.column) not in covered]
            table.add([_sheet_cell(each.value, spans.get((each.row, each.column))) for each in cells], is_header=True)
    return builder.build(str(book.properties.title or ""))


def read_slides(path: Path) -> ParsedFile:
    """Each slide of a .pptx file: its title, its texts and tables, its notes. `page` of a block: the slide's number."""
    import pptx  # Why here: as above

    check_archive(path, _MAX_XML_BYTES)
    builder = TextBuilder()
    presentation = pptx.Presentation(str(path))
    for number, slide in enumerate(presentation.slides, 1):
        for shape in _shapes(slide.shapes):
            if shape.has_text_frame:
                level = 1 if slide.shapes.title is not None and shape.shape_id == slide.shapes.title.shape_id else 0
                for paragraph in shape.text_frame.paragraphs:
                    builder.add(paragraph.text.replace("\v", "\n"), level, page=number)
            elif getattr(shape, "has_table", False):
                table = Table(builder)
                for row in shape.table.rows:
                    cells = [each for each in row.cells if not each.is_spanned]
                    table.add([Cell(" ".join(each.text.split()), each.span_width, each.span_height) for each in cells])
        if slide.has_notes_slide:
            builder.add(slide.notes_slide.notes_text_frame.text, page=number)
    return builder.build(presentation.core_properties.title or "", {"pages": len(presentation.slides)})


def _xml(raw: bytes) -> Any:
    return etree.fromstring(raw, etree.XMLParser(resolve_entities=False))


def _places(merged: Any) -> Iterator[tuple[int, int]]:
    for row in range(merged.min_row, merged.max_row + 1):
        for column in range(merged.min_col, merged.max_col + 1):
            yield row, column


def _sheet_cell(value: Any, span: Any) -> Cell:
    text = "" if value is None else " ".join(str(value).split())
    return Cell(text, span["columns"], span["rows"]) if span else Cell(text)


def _shapes(shapes: Iterable[Any]) -> Iterator[Any]:
    """The shapes of a slide from above down, those of groups included."""
    for shape in sorted(shapes, key=lambda shape: (shape.top or 0, shape.left or 0)):
        if hasattr(shape, "shapes"):
            yield from _shapes(shape.shapes)
        else:
            yield shape

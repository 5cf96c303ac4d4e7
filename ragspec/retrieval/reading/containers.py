"""Files that hold parts of other formats: e-books, mails, notebooks, workbooks and presentations.

>>> read_notebook("...").blocks
"""

import datetime
import email
import email.policy
import json
import posixpath
import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from lxml import etree

from ragspec.core import BlockKind
from ragspec.errors import InputError
from ragspec.retrieval.reading.html import parse_html
from ragspec.retrieval.reading.inline import WORD_FORMULA, formula_text, scripted
from ragspec.retrieval.reading.markup import read_markdown, read_plain
from ragspec.retrieval.reading.office import ListCounter, ListLevel
from ragspec.retrieval.reading.parsed_file import (
    WINDOWS,
    Cell,
    ParsedFile,
    Table,
    TextBuilder,
    Unread,
    check_archive,
    check_size,
    decoded,
    python_encoding,
)

_EMPTY_FORMULA = re.compile(rb"</f>\s*(?:<v\s*/>|<v>\s*</v>)?\s*</c>")
_QUOTED = re.compile(r'"[^"]*"|\[[^\]]*\]')
_NUMBER_FORMAT = re.compile(
    r"""((?:"[^"]*"|\[\$[^\]]*\]|\\.|_.|[ $€£¥])*)((?:#,##)?0+)(?:\.(0+))?(%)?((?:"[^"]*"|\[\$[^\]]*\]|\\.|_.|\*.|[ $€£¥])*)"""
)
"""The positive part of a number format: signs, digits, decimals, per cent, signs. Any other shows the value as it is stored."""

_SLIDE_LISTS = {"alphaLc": "lowerLetter", "alphaUc": "upperLetter", "romanLc": "lowerRoman", "romanUc": "upperRoman"}
_TERMINAL_CODE = re.compile(r"\x1b\[[\d;]*[A-Za-z]")
_MAX_CELLS = 5_000_000
_MAX_XML_BYTES = 32 * 1024**2
"""Limit of one part of a workbook; its cells take about fifty times as much memory."""


def read_epub(path: Path) -> ParsedFile:
    """The chapters in the order of the book."""
    check_archive(path)
    builder, unread = TextBuilder(), list[Unread]()
    with zipfile.ZipFile(path) as archive:
        container = _xml(archive.read("META-INF/container.xml"))
        (package_name, *_) = container.xpath("//@full-path")
        package = _xml(archive.read(package_name))
        hrefs = {item.get("id"): item.get("href") for item in package.iter("{*}item")}
        present, locked = frozenset(archive.namelist()), _locked_parts(archive)
        for item in package.iter("{*}itemref"):
            href = unquote(hrefs.get(item.get("idref")) or item.get("idref", ""))
            name = posixpath.normpath(posixpath.join(posixpath.dirname(package_name), href))
            if name in present and name not in locked:
                builder.append(parse_html(archive.read(name)))
            else:
                unread.append(Unread(name, "it is encrypted" if name in present else "the book does not hold it"))
        title = next((each.text for each in package.iter("{*}title") if each.text), "")
    return builder.build(title, unread=unread)


def _locked_parts(archive: zipfile.ZipFile) -> frozenset[str]:
    name = "META-INF/encryption.xml"
    found = _xml(archive.read(name)).iter("{*}CipherReference") if name in archive.namelist() else ()
    return frozenset(unquote(each.get("URI", "")) for each in found)


def read_mail(path: Path) -> ParsedFile:
    """The subject, the sender and the text; attachments are named as unread."""
    check_size(path)
    message: Any = email.message_from_bytes(path.read_bytes(), policy=email.policy.default)
    builder = TextBuilder()
    subject = str(message["subject"] or "")
    builder.add(subject, level=1)
    builder.add("\n".join(f"{name}: {message[name]}" for name in ("From", "To", "Date") if message[name]))
    body = message.get_body(("plain", "html"))
    parts: list[Any] = [] if body is None else [body]
    others: list[Any] = []
    for part in message.iter_attachments():
        is_text = part.get_content_type() in ("text/plain", "text/html") and not part.is_attachment()
        (parts if is_text and not part.get_filename() else others).append(part)
    for part in parts:
        if part.get_content_type() == "text/html":
            builder.append(parse_html(_decoded(part)))
        else:
            builder.append(read_plain(_decoded(part).replace("\r\n", "\n")))
    names = [part.get_filename() or part.get_content_type() for part in others]
    return builder.build(subject, unread=[Unread(f"attachment {name}", "attachments are not read") for name in names])


def _decoded(part: Any) -> str:
    """The text of a part of a mail, by the encoding that it names, by UTF-8 or by windows-1252: the first that fits.

    Why windows-1252 for ISO-8859-1: as browsers do, because mail programs name the one and write the other.
    """
    named = python_encoding(part.get_content_charset(""))
    encodings = (WINDOWS if named == "iso8859-1" else named, "utf-8-sig")
    return decoded(part.get_payload(decode=True) or b"", encodings)


def read_notebook(text: str) -> ParsedFile:
    """The texts, the code and the written outputs of a Jupyter notebook. Raises: InputError."""
    builder = TextBuilder()
    if not text.strip():
        return builder.build()
    try:
        cells = json.loads(text)["cells"]
        sources = [(cell["cell_type"], "".join(cell["source"]), _outputs(cell)) for cell in cells]
    except (ValueError, KeyError, TypeError) as cause:
        raise InputError("it cannot be read: it is no notebook of Jupyter's format 4") from cause
    for kind, source, outputs in sources:
        if kind == "code":
            for text in (source, *outputs):
                builder.add(text.strip("\n"), kind=BlockKind.CODE)
        else:
            builder.append(read_markdown(source))
    return builder.build()


def _outputs(cell: Any) -> list[str]:
    """What a cell has written, its errors left out."""
    texts = [each.get("text") or each.get("data", {}).get("text/plain", "") for each in cell.get("outputs", ())]
    return [_TERMINAL_CODE.sub("", "".join(text)) for text in texts]


def read_workbook(path: Path) -> ParsedFile:
    """Each sheet of a .xlsx file is a heading and a table, with the values of formulas as they were last shown.

    Formulas without a stored value are named as unread.
    """
    import openpyxl  # Why here: it takes 0.2 s, and most folders hold no workbook

    check_archive(path, _MAX_XML_BYTES)
    builder, unread = TextBuilder(), list[Unread]()
    book = openpyxl.load_workbook(path, data_only=True)
    for sheet in book.worksheets:
        if sheet.sheet_state != "visible":
            continue
        num_merged = sum(each.size["rows"] * each.size["columns"] for each in sheet.merged_cells.ranges)
        if sheet.max_row * sheet.max_column + num_merged > _MAX_CELLS:
            raise InputError(f"{path} cannot be read: the sheet {sheet.title!r} has more than {_MAX_CELLS} cells")
        spans = {(each.min_row, each.min_col): each.size for each in sheet.merged_cells.ranges}
        covered = {place for each in sheet.merged_cells.ranges for place in list(each.cells)[1:]}
        builder.add(sheet.title, level=1)
        table = Table(builder)
        for row in sheet.iter_rows():
            cells = [each for each in row if (each.row, each.column) not in covered]
            table.add([_sheet_cell(each, spans.get((each.row, each.column))) for each in cells], is_header=True)
    if num_empty := _num_formulas_without_value(path):
        hint = "open the file in a spreadsheet program and save it"
        unread.append(Unread("", f"formulas without a stored value: {num_empty}; {hint}"))
    return builder.build(str(book.properties.title or ""), unread=unread)


def _num_formulas_without_value(path: Path) -> int:
    with zipfile.ZipFile(path) as archive:
        sheets = [name for name in archive.namelist() if name.startswith("xl/worksheets/") and name.endswith(".xml")]
        return sum(len(_EMPTY_FORMULA.findall(archive.read(name))) for name in sheets)


def read_slides(path: Path) -> ParsedFile:
    """Each shown slide of a .pptx file: its title, its texts and tables, its notes. `page` of a block: the slide's number.

    Charts and diagrams are named as unread.
    """
    import pptx  # Why here: as above

    check_archive(path, _MAX_XML_BYTES)
    builder, unread = TextBuilder(), list[Unread]()
    presentation = pptx.Presentation(str(path))
    for number, slide in enumerate(presentation.slides, 1):
        if slide.element.get("show") in ("0", "false"):
            unread.append(Unread(f"slide {number}", "it is hidden"))
            continue
        title = slide.shapes.title
        for shape in _shapes(slide.shapes):
            if shape.has_text_frame:
                is_title = title is not None and shape.shape_id == title.shape_id
                _read_frame(builder, shape.text_frame, int(is_title), number)
            elif getattr(shape, "has_table", False):
                table = Table(builder)
                for row in shape.table.rows:
                    cells = [each for each in row.cells if not each.is_spanned]
                    table.add([Cell(_cell_text(each), each.span_width, each.span_height) for each in cells])
            elif shape.element.tag.endswith("}graphicFrame"):
                unread.append(Unread(f"slide {number}", f"{shape.name!r} is a chart or a diagram, which is not read"))
        if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
            _read_frame(builder, slide.notes_slide.notes_text_frame, 0, number)
    return builder.build(presentation.core_properties.title or "", {"pages": len(presentation.slides)}, unread)


def _read_frame(builder: TextBuilder, frame: Any, level: int, page: int) -> None:
    """The paragraphs of a text frame, with the numbers of those that are numbered."""
    counter = ListCounter({})
    for paragraph in frame.paragraphs:
        found = paragraph._p.find("{*}pPr/{*}buAutoNum")
        marker = ""
        if found is None:
            counter = ListCounter({}) if not paragraph.level else counter
        else:
            counter.levels.setdefault(paragraph.level, _slide_level(found, paragraph.level))
            marker = counter.marker(paragraph.level)
        text = _slide_text(paragraph)
        if text.strip():
            kind = BlockKind.LIST_ITEM if marker else BlockKind.PARAGRAPH
            builder.add(marker + text, level, "\n" if marker else "\n\n", kind, page)


def _slide_level(numbering: Any, level: int) -> ListLevel:
    """Of numbers that are named such as "alphaLcParenR"."""
    kind = numbering.get("type", "")
    style = next((style for name, style in _SLIDE_LISTS.items() if kind.startswith(name)), "decimal")
    after = ")" if "Paren" in kind else "" if kind.endswith("Plain") else "."
    start = numbering.get("startAt", "1")
    pattern = f"{'(' * kind.endswith('Both')}%{level + 1}{after}"
    return ListLevel(style, pattern, int(start) if start.isdecimal() else 1)


def _cell_text(cell: Any) -> str:
    return " ".join(" ".join(map(_slide_text, cell.text_frame.paragraphs)).split())


def _slide_text(paragraph: Any) -> str:
    """The text of a paragraph, with superscripts, subscripts and formulas; without struck text."""
    found = ""
    for element in paragraph._p:
        if element.tag.endswith("}br"):
            found += "\n"
        elif formulas := list(element.iter(WORD_FORMULA)):
            found += "".join(map(formula_text, formulas))
        else:
            properties = {} if (each := element.find("{*}rPr")) is None else each.attrib
            text = "".join(element.xpath("./a:t/text()")) if properties.get("strike", "noStrike") == "noStrike" else ""
            shift = properties.get("baseline", "0").lstrip("+")
            script = "" if shift.startswith("0") else "subscript" if shift.startswith("-") else "superscript"
            found += scripted(text, found, script)
    return found


def _xml(raw: bytes) -> Any:
    return etree.fromstring(raw, etree.XMLParser(resolve_entities=False))


def _sheet_cell(cell: Any, span: Any) -> Cell:
    text = "" if cell.value is None else " ".join(_shown(cell.value, cell.number_format).split())
    return Cell(text, span["columns"], span["rows"]) if span else Cell(text)


def _shown(value: Any, number_format: str) -> str:
    """A value as its cell shows it: dates without a time, per cent, decimals, thousands and units."""
    if isinstance(value, datetime.datetime) and not re.search("[hHsS]", _QUOTED.sub("", number_format)):
        return value.date().isoformat()
    if isinstance(value, datetime.timedelta):
        minutes, seconds = divmod(round(value.total_seconds()), 60)
        return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
    if isinstance(value, bool):
        return str(value).upper()
    found = _NUMBER_FORMAT.fullmatch(number_format.split(";")[0])
    if not isinstance(value, int | float) or not found:
        return str(value)
    before, whole, decimals, percent, after = found.groups()
    number = value * 100 if percent else value
    width = 0 if "#" in whole else whole.count("0")
    comma = "," * ("," in whole)
    shown = f"{abs(number):0{width + bool(decimals) + len(decimals or '')}{comma}.{len(decimals or '')}f}"
    return "-" * (number < 0) + _literal(before) + shown + (percent or "") + _literal(after)


def _literal(text: str) -> str:
    """The characters of a part of a number format, without its marks."""
    text = re.sub(r"\[\$([^\]-]*)[^\]]*\]|_.|\*.", r"\1", text)
    return text.replace('"', "").replace("\\", "")


def _shapes(shapes: Iterable[Any]) -> Iterator[Any]:
    """The shapes of a slide from above down, those of groups included."""
    for shape in sorted(shapes, key=lambda shape: (shape.top or 0, shape.left or 0)):
        if hasattr(shape, "shapes"):
            yield from _shapes(shape.shapes)
        else:
            yield shape

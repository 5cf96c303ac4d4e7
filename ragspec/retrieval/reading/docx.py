"""Word files: paragraphs, list items and table rows in document order. Skips text that tracked changes delete.

>>> read_docx(Path("manual.docx")).headings
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docx
from docx.oxml.ns import qn
from docx.styles.style import BaseStyle, ParagraphStyle

from ragspec.errors import InputError
from ragspec.retrieval.reading.parsed_file import (
    MAX_BYTES,
    ParsedFile,
    TextBuilder,
    check_size,
    first_title,
    silence_logger,
)

_PARAGRAPH, _TABLE = qn("w:p"), qn("w:tbl")
_WRAPPERS = frozenset(map(qn, ("w:sdt", "w:sdtContent", "w:customXml", "w:ins", "w:moveTo", "w:smartTag")))
_WRITTEN = {qn("w:tab"): "\t", qn("w:br"): "\n", qn("w:cr"): "\n", qn("w:noBreakHyphen"): "-"}
_RUN_PARTS = " | ".join(f".//w:r/{part}" for part in ("w:t", "w:tab", "w:br", "w:cr", "w:noBreakHyphen"))
_FALLBACK = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"
_HEADING = re.compile(r"heading ([1-9])")
_MAX_XML_BYTES = 128 * 1024**2
"""Limit of one XML part; its tree takes about ten times as much memory."""

_MAX_BASES = 16


def read_docx(path: Path) -> ParsedFile:
    check_size(path)
    with open(path, "rb") as file, silence_logger("docx"):
        _check_archive(file, path)
        document = docx.Document(file)
    levels = {style.style_id: _style_level(style) for style in document.styles}
    builder = TextBuilder()
    for block in _blocks(document.element.body):
        if block.tag == _TABLE:
            for number, row in enumerate(_rows(block)):
                builder.add(row, gap="\n" if number else "\n\n")
        else:
            _add_paragraph(builder, block, levels)
    found = builder.build()
    return found._replace(title=(document.core_properties.title or "").strip() or first_title(found.headings))


def _check_archive(file: Any, path: Path) -> None:
    """Raises: InputError if the file is no archive, or too large to unpack in memory."""
    try:
        with zipfile.ZipFile(file) as archive:
            parts = archive.infolist()
    except zipfile.BadZipFile as cause:
        raise InputError(f"{path} is no .docx file, or it is damaged or locked by a password") from cause
    num_bytes = sum(part.file_size for part in parts)
    largest_xml = max((part.file_size for part in parts if part.filename.endswith((".xml", ".rels"))), default=0)
    if num_bytes > MAX_BYTES or largest_xml > _MAX_XML_BYTES:
        raise InputError(f"{path} unpacks to {num_bytes} bytes, more than is read at once")


def _style_level(style: BaseStyle) -> int:
    """1 to 9 for a heading style or a style based on it, else 0."""
    for _ in range(_MAX_BASES):
        name = (style.name or "").lower()
        found = _HEADING.fullmatch(name)
        if found or name == "title":
            return int(found[1]) if found else 1
        base = style.base_style if isinstance(style, ParagraphStyle) else None
        if base is None:
            break
        style = base
    return 0


def _blocks(body: Any) -> Iterator[Any]:
    """Paragraphs and tables, also inside content controls and tracked insertions."""
    open_elements = [iter(body)]
    while open_elements:
        element = next(open_elements[-1], None)
        if element is None:
            open_elements.pop()
        elif element.tag in (_PARAGRAPH, _TABLE):
            yield element
        elif element.tag in _WRAPPERS:
            open_elements.append(iter(element))


def _add_paragraph(builder: TextBuilder, paragraph: Any, levels: dict[str, int]) -> None:
    outline = paragraph.xpath("./w:pPr/w:outlineLvl/@w:val")
    style = paragraph.xpath("./w:pPr/w:pStyle/@w:val")
    level = levels.get(style[0], 0) if style else 0
    if outline and outline[0].isdigit():
        level = (int(outline[0]) + 1) % 10  # Why: level 9 means body text
    text = _text(paragraph)
    is_item = not level and (paragraph.xpath("./w:pPr/w:numPr") or (style and style[0].startswith("List")))
    builder.add(f"- {text}" if is_item and text else text, level, "\n" if is_item else "\n\n")


def _rows(table: Any) -> Iterator[str]:
    for number, row in enumerate(table.xpath("./w:tr")):
        cells = row.xpath("./w:tc | ./w:sdt/w:sdtContent/w:tc")
        texts = [" ".join(filter(None, map(_text, cell.xpath(".//w:p[not(ancestor::w:p)]")))) for cell in cells]
        if any(texts):
            is_header = number == 0 and row.xpath("./w:trPr/w:tblHeader")
            rule = f"\n|{'---|' * len(texts)}" if is_header else ""
            yield "| " + " | ".join(" ".join(text.split()) for text in texts) + " |" + rule


def _text(paragraph: Any) -> str:
    parts = paragraph.xpath(_RUN_PARTS)
    return "".join(_WRITTEN.get(part.tag, part.text or "") for part in parts if not _is_fallback(part)).strip()


def _is_fallback(part: Any) -> bool:
    """Word writes the text of a box twice, once for older programs."""
    return next(part.iterancestors(_FALLBACK), None) is not None

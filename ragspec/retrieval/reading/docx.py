"""Word files: the blocks of the body in its order, as "accept all changes" leaves them, with the numbers that Word shows.

>>> read_docx(Path("manual.docx")).blocks
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import docx
from docx.oxml import parse_xml
from docx.oxml.ns import nsmap, qn
from docx.styles.style import BaseStyle, ParagraphStyle
from lxml import etree

from ragspec.retrieval.reading.inline import WORD_FORMULA, formula_text
from ragspec.retrieval.reading.office import ListCounter, ListLevel, OfficeReader
from ragspec.retrieval.reading.parsed_file import REPEATED_CHARS, Cell, ParsedFile, Table, check_archive, silence_logger

_PARAGRAPH, _TABLE, _RUN, _TEXT, _BOX = map(qn, ("w:p", "w:tbl", "w:r", "w:t", "w:txbxContent"))
_SYMBOL, _RUBY, _FIELD = map(qn, ("w:sym", "w:ruby", "w:fldChar"))
_LEFT_OUT = {"{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"}
_LEFT_OUT |= {qn(f"w:{name}") for name in "del moveFrom rPr pPr instrText delText delInstrText tblPr sdtPr".split()}
"""Elements without text of the document. Why the fallback: Word writes a box twice, once for older programs."""

_SIGNS = {"tab": "\t", "ptab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-", "softHyphen": "\xad"}
_WRITTEN = {qn(f"w:{name}"): sign for name, sign in _SIGNS.items()}
_NOTES = {qn("w:footnoteReference"): "footnotes", qn("w:endnoteReference"): "endnotes"}
_ON = "[not(@w:val='0' or @w:val='false' or @w:val='off')]"
_UNSEEN = f"./w:rPr/w:vanish{_ON} | ./w:rPr/w:strike{_ON} | ./w:rPr/w:dstrike{_ON}"
_LEAST_SHIFT = 4
"""Half points. A run that is set higher is a superscript."""
_SYMBOL_LETTERS = dict(enumerate("ΑΒΧΔΕΦΓΗΙϑΚΛΜΝΟΠΘΡΣΤΥςΩΞΨΖ", ord("A")))
_SYMBOL_LETTERS |= dict(enumerate("αβχδεφγηιϕκλμνοπθρστυϖωξψζ", ord("a")))
_SYMBOL_LETTERS |= dict(
    zip(b"-\xa3\xa5\xae\xb0\xb1\xb3\xb4\xb5\xb6\xb8\xb9\xbb\xce\xd6\xe5\xf2", "−≤∞→°±≥×∝∂÷≠≈∈√∑∫", strict=True)
)
_WINGDINGS = {
    "Wingdings": dict(zip(b"ox\xa8\xfb\xfc\xfd\xfe\xe0", "☐☒☐✗✓☒☑→", strict=True)),
    "Wingdings 2": dict(zip(b"OPQRST\xa3", "✗✓☒☑☒☒☐", strict=True)),
}
"""Characters by their numbers in fonts of symbols."""

_HEADING = re.compile(r"heading ([1-9])")
_MAX_BASES = 16


class _Style(NamedTuple):
    """Of a paragraph or of a style. `level`: of a heading, or 0. `list_id` and `list_level`: of a list's item, or empty."""

    level: int = 0
    list_id: str = ""
    list_level: int = 0


def read_docx(path: Path) -> ParsedFile:
    check_archive(path)
    with open(path, "rb") as file, silence_logger("docx"):
        document = docx.Document(file)
    reader = _WordReader(document)
    reader.read(document.element.body)
    return reader.builder.build(document.core_properties.title or "")


class _WordReader(OfficeReader):
    left_out = frozenset(_LEFT_OUT)

    def __init__(self, document: Any) -> None:
        super().__init__()
        self._styles = {style.style_id: _style(style) for style in document.styles}
        raised = _find(document.styles.element, "./w:style[w:rPr/w:vertAlign]")
        self._scripts = {style.get(qn("w:styleId")): _find(style, "./w:rPr/w:vertAlign/@w:val")[0] for style in raised}
        self._lists = _Lists(document)
        self._notes_of = {kind: _notes(document, kind) for kind in _NOTES.values()}
        self._before = ""  # text of paragraphs whose end was deleted
        self._fields: list[bool] = []  # of each open field, outermost first: whether its result has begun

    def read_element(self, element: Any) -> bool:
        if element.tag == _TABLE and not self.is_flat:
            self._read_table(element)
        elif element.tag == _PARAGRAPH:
            self._read_paragraph(element)
        else:
            return False
        return True

    def _read_paragraph(self, paragraph: Any) -> None:
        text = self._before + self.text(paragraph)
        self._fields = [each for each in self._fields if each]  # Why: a field without an end would hide the rest
        is_end_deleted = bool(_find(paragraph, "./w:pPr/w:rPr/w:del"))
        self._before = text if is_end_deleted else ""
        if text.strip() and not is_end_deleted:
            style = self._style_of(paragraph)
            self.add_paragraph(text, style.level, self._lists.marker(style))
        self.read_boxes()

    def _read_table(self, table: Any) -> None:
        lines = Table(self.builder)
        above: dict[int, str] = {}
        for row in _find(table, "./w:tr[not(w:trPr/w:del)]"):
            cells: list[Cell] = []
            column = _number(row, "./w:trPr/w:gridBefore/@w:val", 0)
            if column:
                cells.append(Cell("", column))
            for cell in _find(row, "(./w:tc | ./w:sdt/w:sdtContent/w:tc)[not(w:tcPr/w:cellDel)]"):
                merge = _find(cell, "./w:tcPr/w:vMerge")
                continues = merge and merge[0].get(qn("w:val")) != "restart"
                text = above.get(column, "") if continues else self.flat_text(cell)
                above[column] = text if merge and len(text) <= REPEATED_CHARS else ""
                cells.append(Cell(text, _number(cell, "./w:tcPr/w:gridSpan/@w:val", 1)))
                column += cells[-1].columns
            lines.add(cells, is_header=bool(_find(row, "./w:trPr/w:tblHeader")))

    def _style_of(self, paragraph: Any) -> _Style:
        name = _find(paragraph, "./w:pPr/w:pStyle/@w:val")
        return _set_style(paragraph, self._styles.get(name[0] if name else "", _Style()))

    def pieces(self, parent: Any, script: str = "") -> Iterator[tuple[str, str]]:
        for element in parent:
            tag = element.tag
            if tag == _FIELD:
                yield self._field(element), ""
            elif tag == _BOX:
                self.boxes.append(element)
            elif tag == WORD_FORMULA:
                yield formula_text(element), ""
            elif tag == _RUN:
                if not _find(element, _UNSEEN):
                    yield from self.pieces(element, self._run_script(element))
            elif not all(self._fields):
                yield from self.pieces(element, script)
            elif tag == _TEXT:
                yield element.text or "", script
            elif tag in _WRITTEN:
                yield _WRITTEN[tag], script
            elif tag == _SYMBOL:
                yield _symbol(element.get(qn("w:char"), ""), element.get(qn("w:font"), "")), script
            elif tag == _RUBY:
                yield "".join(_find(element, "./w:rubyBase//w:t/text()")), script
                yield f"({''.join(_find(element, './w:rt//w:t/text()'))})", script
            elif tag in _NOTES:
                note = self._notes_of[_NOTES[tag]].get(element.get(qn("w:id")))
                yield "" if note is None else self.note_mark(note), ""
            elif tag not in _LEFT_OUT:
                yield from self.pieces(element, script)

    def _field(self, character: Any) -> str:
        """Follow the begin, middle or end of a field. Returns the value of an old form's field."""
        kind = character.get(qn("w:fldCharType"))
        if kind == "begin":
            self._fields.append(False)
        elif kind == "separate" and self._fields:
            self._fields[-1] = True
        elif self._fields:
            self._fields.pop()
        for box in _find(character, "./w:ffData/w:checkBox"):
            states = [*_find(box, "./w:default"), *_find(box, "./w:checked")]
            return "☒" if states and _find(states[-1], f"self::*{_ON}") else "☐"
        for entries in _find(character, "./w:ffData/w:ddList"):
            return "".join(_find(entries, "./w:listEntry/@w:val")[_number(entries, "./w:result/@w:val", 0) :][:1])
        return ""

    def _run_script(self, run: Any) -> str:
        own = _find(run, "./w:rPr/w:vertAlign/@w:val")
        style = _find(run, "./w:rPr/w:rStyle/@w:val")
        if own:
            return str(own[0])
        position = (_find(run, "./w:rPr/w:position/@w:val") or ["0"])[0]
        if position.lstrip("-").isdecimal() and abs(int(position)) >= _LEAST_SHIFT:
            return "subscript" if position.startswith("-") else "superscript"
        return self._scripts.get(style[0], "") if style else ""


class _Lists:
    """The numbers of list items, as Word counts them: lists of one abstract definition go on, unless they set their start."""

    def __init__(self, document: Any) -> None:
        related = [each.target_part for each in document.part.rels.values() if each.reltype.endswith("/numbering")]
        root = related[0].element if related else None
        self._abstract: dict[str, str] = {}
        self._starts: dict[tuple[str, int], int] = {}
        self._counters: dict[str, ListCounter] = {}
        for abstract in _find(root, "./w:abstractNum") if root is not None else ():
            levels = {_number(each, "./@w:ilvl", 0): _list_level(each) for each in _find(abstract, "./w:lvl")}
            self._counters[abstract.get(qn("w:abstractNumId"))] = ListCounter(levels)
        for each in _find(root, "./w:num") if root is not None else ():
            list_id = each.get(qn("w:numId"))
            self._abstract[list_id] = (_find(each, "./w:abstractNumId/@w:val") or [""])[0]
            for override in _find(each, "./w:lvlOverride[w:startOverride]"):
                start = _number(override, "./w:startOverride/@w:val", 1)
                self._starts[list_id, _number(override, "./@w:ilvl", 0)] = start

    def marker(self, style: _Style) -> str:
        """The number or dash of the next item of a list, with a space; empty outside lists."""
        counter = self._counters.get(self._abstract.get(style.list_id, ""))
        if counter is None:
            return "- " if style.list_id not in ("", "0") else ""
        return counter.marker(style.list_level, self._starts.pop((style.list_id, style.list_level), None))


def _symbol(code: str, font: str) -> str:
    """A character that is named by its number in a font of symbols. Empty for an ornament."""
    number = int(code, 16) & 0xFF if re.fullmatch("[0-9A-Fa-f]{1,6}", code) else 0
    if font == "Symbol":
        return _SYMBOL_LETTERS.get(number, chr(number) if 32 < number < 64 else "")
    return _WINGDINGS.get(font, {}).get(number, "")


def _list_level(level: Any) -> ListLevel:
    style, pattern = ("".join(_find(level, f"./w:{name}/@w:val")[:1]) for name in ("numFmt", "lvlText"))
    return ListLevel(style or "decimal", pattern, _number(level, "./w:start/@w:val", 0))


def _style(style: BaseStyle) -> _Style:
    """With the settings of the styles that it is based on."""
    bases = [style]
    while len(bases) < _MAX_BASES and isinstance(bases[-1], ParagraphStyle) and bases[-1].base_style is not None:
        bases.append(bases[-1].base_style)
    found = _Style()
    for each in reversed(bases):
        name = (each.name or "").lower()
        heading = _HEADING.fullmatch(name)
        if heading or name == "title":
            found = found._replace(level=int(heading[1]) if heading else 1)
        found = _set_style(each.element, found)
    return found


def _set_style(element: Any, style: _Style) -> _Style:
    """`style` with the settings of a paragraph or of a style's definition."""
    level = _number(element, "./w:pPr/w:outlineLvl/@w:val", -1)
    list_id = _find(element, "./w:pPr/w:numPr/w:numId/@w:val")
    return _Style(
        style.level if level < 0 else (level + 1) % 10,  # Why: level 9 means body text
        list_id[0] if list_id else style.list_id,
        _number(element, "./w:pPr/w:numPr/w:ilvl/@w:val", style.list_level),
    )


def _notes(document: Any, kind: str) -> dict[str, Any]:
    """The footnotes or endnotes by their ids."""
    parts = [each.target_part for each in document.part.rels.values() if each.reltype.endswith(f"/{kind}")]
    return {note.get(qn("w:id")): note for part in parts for note in parse_xml(part.blob)}


def _find(element: Any, path: str) -> list[Any]:
    """Why not `element.xpath`: python-docx gives namespaces to some elements only."""
    found: list[Any] = _compiled(path)(element)
    return found


@cache
def _compiled(path: str) -> Any:
    return etree.XPath(path, namespaces=nsmap)


def _number(element: Any, path: str, default: int) -> int:
    found = _find(element, path)
    return int(found[0]) if found and found[0].isdigit() else default

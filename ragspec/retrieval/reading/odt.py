"""OpenDocument texts: the blocks of the body in its order, without deleted text, with the numbers that are shown.

>>> read_odt(Path("manual.odt")).blocks
"""

import posixpath
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lxml import etree

from ragspec.errors import InputError
from ragspec.retrieval.reading.html import parse_html
from ragspec.retrieval.reading.office import ListCounter, ListLevel, OfficeReader
from ragspec.retrieval.reading.parsed_file import MAX_COLUMNS, Cell, ParsedFile, Table, Unread, check_archive

_OPEN_DOCUMENT = "urn:oasis:names:tc:opendocument:xmlns"
_NAMES = {name: f"{_OPEN_DOCUMENT}:{name}:1.0" for name in "office style table text".split()}
_NAMES |= {"svg": f"{_OPEN_DOCUMENT}:svg-compatible:1.0", "draw": f"{_OPEN_DOCUMENT}:drawing:1.0"}
_NAMES |= {"dc": "http://purl.org/dc/elements/1.1/", "xlink": "http://www.w3.org/1999/xlink"}
_SPACE = re.compile(r"[ \t\r\n]+")
_MAX_SPACES, _MAX_PARENTS, _MAX_REPEATED_ROWS = 1000, 16, 100


def _name(prefixed: str) -> str:
    prefix, _, local = prefixed.partition(":")
    return f"{{{_NAMES[prefix]}}}{local}"


_PARAGRAPH, _HEADING, _LIST, _TABLE = map(_name, ("text:p", "text:h", "text:list", "table:table"))
_SPACES, _TAB, _BREAK, _NOTE = map(_name, ("text:s", "text:tab", "text:line-break", "text:note"))
_BOX, _OBJECT, _RUBY, _STYLE = map(_name, ("draw:text-box", "draw:object", "text:ruby-text", "text:style-name"))
_WRITTEN = {_TAB: "\t", _BREAK: "\n"}
_SHAPES = frozenset(_name(f"draw:{shape}") for shape in "custom-shape rect ellipse circle caption polygon".split())
_LEFT_OUT = ("text:tracked-changes", "office:annotation", "office:forms", "svg:title", "svg:desc")


def read_odt(path: Path) -> ParsedFile:
    """Embedded formulas are read; other embedded objects are named as unread."""
    check_archive(path)
    with zipfile.ZipFile(path) as archive:
        if b"encryption-data" in archive.read("META-INF/manifest.xml"):
            raise InputError("it cannot be read: it is locked by a password")
        reader = _OdtReader(archive)
        for body in _find(reader.content, "/*/office:body/office:text"):
            reader.read(body)
        meta = archive.read("meta.xml") if "meta.xml" in archive.namelist() else b"<none/>"
    return reader.builder.build("".join(_find(_tree(meta), "//dc:title/text()")), unread=reader.unread)


class _OdtReader(OfficeReader):
    left_out = frozenset(map(_name, _LEFT_OUT))

    def __init__(self, archive: zipfile.ZipFile) -> None:
        super().__init__()
        self.unread: list[Unread] = []
        self._archive = archive
        self.content, office_styles = (_tree(archive.read(f"{name}.xml")) for name in ("content", "styles"))
        named = [style for tree in (office_styles, self.content) for style in _find(tree, "/*/*/*[@style:name]")]
        self._styles = {style.get(_name("style:name")): style for style in named}
        self._outline = ListCounter(_levels(_find(office_styles, "//text:outline-style/*")))
        self._counters: dict[str, ListCounter] = {}
        self._list_style, self._list_depth = "", -1
        self._item: Any = None  # the item of a list whose first paragraph comes next

    def read_element(self, element: Any) -> bool:
        if element.tag in (_PARAGRAPH, _HEADING):
            self._read_paragraph(element)
        elif element.tag == _LIST:
            self._read_list(element)
        elif element.tag == _TABLE and not self.is_flat:
            self._read_table(element)
        else:
            return bool(element.get(_name("text:display")) == "none")
        return True

    def _read_paragraph(self, paragraph: Any) -> None:
        text, marker, level = self.text(paragraph), "", 0
        if paragraph.tag == _HEADING:
            level = _number(paragraph, "text:outline-level", 1)
        elif "Title" in self._with_parents(paragraph.get(_STYLE)):
            level = 1
        if text.strip():
            item, self._item = self._item, None
            if item is not None:
                start = _number(item, "text:start-value", 0) or None
                marker = self._counters[self._list_style].marker(self._list_depth, start)
            elif paragraph.tag == _HEADING and paragraph.get(_name("text:is-list-header")) != "true":
                marker = self._outline.marker(level - 1).removeprefix("- ")
            self.add_paragraph(text, level, marker)
        self.read_boxes()

    def _read_list(self, element: Any) -> None:
        outer = self._list_style, self._list_depth
        self._list_style, self._list_depth = element.get(_STYLE) or self._list_style, self._list_depth + 1
        goes_on = element.get(_name("text:continue-numbering")) == "true" or element.get(_name("text:continue-list"))
        if self._list_style not in self._counters or not (self._list_depth or goes_on):
            style = self._styles.get(self._list_style)
            self._counters[self._list_style] = ListCounter(_levels(style if style is not None else ()))
        for item in element:
            self._item = item if item.tag == _name("text:list-item") else None
            self.read_blocks(item)
        self._item = None
        self._list_style, self._list_depth = outer

    def _read_table(self, table: Any) -> None:
        lines = Table(self.builder)
        rows = "./table:table-row | ./*[not(self::table:table)]/table:table-row | ./*/*/table:table-row"
        for row in _find(table, rows):
            cells: list[Cell] = []
            for cell in _find(row, "./table:table-cell"):
                columns = _number(cell, "table:number-columns-spanned", 1)
                text = self.flat_text(cell)
                repeated = min(_number(cell, "table:number-columns-repeated", 1), MAX_COLUMNS)
                cells += [Cell(text, columns, _number(cell, "table:number-rows-spanned", 1))] * repeated
            is_header = row.getparent().tag == _name("table:table-header-rows")
            for _ in range(min(_number(row, "table:number-rows-repeated", 1), _MAX_REPEATED_ROWS)):
                lines.add(cells[:MAX_COLUMNS], is_header)

    def pieces(self, parent: Any, script: str = "") -> Iterator[tuple[str, str]]:
        yield _SPACE.sub(" ", parent.text or ""), script
        for element in parent:
            tag = element.tag
            if tag in _WRITTEN:
                yield _WRITTEN[tag], script
            elif tag == _SPACES:
                yield " " * min(_number(element, "text:c", 1), _MAX_SPACES), script
            elif tag == _NOTE:
                yield self.note_mark(_find(element, "./text:note-body")[0]), ""
            elif tag == _BOX or tag in _SHAPES:
                self.boxes.append(element)
            elif tag == _OBJECT:
                yield self._formula(element.get(_name("xlink:href"), "")), ""
            elif tag == _RUBY:
                yield f"({''.join(element.itertext())})", script
            elif isinstance(tag, str) and tag not in self.left_out:
                properties = self._text_properties(element)
                if not _is_unseen(element.attrib) and not _is_unseen(properties):
                    yield from self.pieces(element, _script(properties.get(_name("style:text-position"))) or script)
            yield _SPACE.sub(" ", element.tail or ""), script

    def _formula(self, href: str) -> str:
        name = posixpath.join(posixpath.normpath(href), "content.xml")
        raw = self._archive.read(name) if name in self._archive.namelist() else b""
        if raw and _tree(raw).tag.endswith("}math"):
            return parse_html(raw).text
        self.unread.append(Unread(href.removeprefix("./"), "embedded objects are not read"))
        return ""

    def _with_parents(self, name: str | None) -> list[str]:
        """The name of a style, and of those that it is based on."""
        found = list[str]()
        while name and len(found) < _MAX_PARENTS:
            found.append(name)
            name = self._styles[name].get(_name("style:parent-style-name")) if name in self._styles else None
        return found

    def _text_properties(self, element: Any) -> dict[str, str]:
        found: dict[str, str] = {}
        for name in reversed(self._with_parents(element.get(_STYLE))):
            for properties in _find(self._styles[name], "./style:text-properties") if name in self._styles else ():
                found |= properties.attrib
        return found


def _levels(style: Any) -> dict[int, ListLevel]:
    """The levels of a list's style, or of the outline's."""
    found = {}
    for each in style:
        level = _number(each, "text:level", 1)
        if not each.tag.endswith(("-number", "outline-level-style")):
            found[level - 1] = ListLevel("bullet", "", 1)
            continue
        shown = _number(each, "text:display-levels", 1)
        numbers = ".".join(f"%{other}" for other in range(max(1, level - shown + 1), level + 1))
        pattern = each.get(_name("style:num-prefix"), "") + numbers + each.get(_name("style:num-suffix"), "")
        number_style = each.get(_name("style:num-format")) or "none"
        found[level - 1] = ListLevel(number_style, pattern, _number(each, "text:start-value", 1))
    return found


def _is_unseen(attributes: Mapping[str, str]) -> bool:
    """Whether a text is hidden or struck through."""
    is_hidden = attributes.get(_name("text:display")) == "none" or attributes.get(_name("text:is-hidden")) == "true"
    return is_hidden or attributes.get(_name("style:text-line-through-style"), "none") != "none"


def _script(position: str | None) -> str:
    """Of a text position such as "super 58%" or "-33% 58%"."""
    height = (position or "0%").split()[0]
    if height in ("super", "sub"):
        return f"{height}script"
    return "" if height.startswith("0") else "subscript" if height.startswith("-") else "superscript"


def _number(element: Any, name: str, default: int) -> int:
    found = element.get(_name(name), "")
    return int(found) if found.isdecimal() else default


def _tree(raw: bytes) -> Any:
    return etree.fromstring(raw, etree.XMLParser(resolve_entities=False, huge_tree=True))


def _find(element: Any, path: str) -> list[Any]:
    found: list[Any] = element.xpath(path, namespaces=_NAMES)
    return found

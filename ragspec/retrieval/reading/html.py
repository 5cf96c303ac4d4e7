"""Web pages: the blocks of their visible text; of a page that marks its main part, of that part alone.

Why no tree: libxml2 builds trees of 2,048 levels at most, and drops the text below them; its events have no limit.

    >>> read_html(Path("page.html")).blocks
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree.ElementTree import TreeBuilder

from lxml import etree

from ragspec.core import BlockKind
from ragspec.errors import InputError
from ragspec.retrieval.reading.inline import formula_text, list_number, scripted
from ragspec.retrieval.reading.parsed_file import (
    WINDOWS,
    Cell,
    ParsedFile,
    Table,
    TextBuilder,
    check_size,
    decoded,
    encoding_mark,
    one_line,
    python_encoding,
)

_HEADINGS = {f"h{level}": level for level in range(1, 7)}
_CELLS = frozenset({"td", "th"})
_BLOCKS = frozenset(
    "address article aside blockquote body caption center dd details div dl dt fieldset figcaption figure footer form header hr "
    "html legend li main menu ol p pre section summary table tbody tfoot thead tr ul".split()
).union(_HEADINGS, _CELLS)
_VOID = frozenset("area base br col embed hr img input link meta param source track wbr".split())
_HIDDEN = frozenset(
    "audio canvas datalist del iframe nav noscript object rp s script select strike style svg template textarea title "
    "video".split()
)
_HIDDEN_ROLES = frozenset({"banner", "contentinfo", "navigation", "search"})
_HIDDEN_CLASSES = frozenset(
    "anchorjs-link blob-num breadcrumb breadcrumbs cookie-banner gutter hash-link header-anchor headerlink heading-anchor "
    "hljs-ln-numbers linenodiv lineno linenos linenumber line-number MathJax "
    "MathJax_Display MathJax_Preview mw-editsection navbar permalink rouge-gutter skip-link "
    "sphinxsidebar".split()
)
_PERMALINK = re.compile(r"perma(?:nent )?link|link to this|skip to", re.IGNORECASE)
_FOOTER_OWNERS = ("article", "blockquote", "main", "section")
"""A footer inside them belongs to the text."""

_BUTTON_OWNERS = (*_HEADINGS, *"caption dt figcaption label legend p summary th".split())
"""A button inside them belongs to the text. Any other is read inside a line, or if it asks a question or opens a part."""

_OPENS = re.compile(r"accordion|collaps|disclosure|expand|faq|toggle", re.IGNORECASE)
_TOOL = re.compile(r"copy|share|perma|anchor|edit", re.IGNORECASE)
_LEAST_TITLE_WORDS = 3
_LEAST_MAIN_CHARS = 200
_INVISIBLE = re.compile(
    r"display\s*:\s*none|visibility\s*:\s*hidden|text-decoration[\w-]*\s*:[^;]*line-through", re.IGNORECASE
)
_RAISED = re.compile(r"vertical-align\s*:\s*(super|sub)", re.IGNORECASE)
_SHIFTED = re.compile(
    r"vertical-align\s*:\s*(-?)(?:(?:0?\.[2-9]\d*|1)(?:r?em|ex)|[3-9](?:\.\d+)?p[xt]|[2-9]\d(?:\.\d+)?%)", re.IGNORECASE
)
"""Icons and the like are shifted by less."""
_SCRIPT_TAGS = {"sup": "superscript", "sub": "subscript"}
_SCRIPT_CLASSES = {"sup": "superscript", "superscript": "superscript", "subscript": "subscript"}
_NOTE_CLASSES = frozenset("footnote-ref footnote-reference fnref noteref".split())
_FORMULA = re.compile(r"\b(?:equation|formula|latex|math|tex)\b", re.IGNORECASE)
_ROLE_TAGS = {"table": "table", "grid": "table", "row": "tr", "cell": "td", "gridcell": "td"}
_ROLE_TAGS |= {"columnheader": "th", "rowheader": "th"}
_DISPLAY_TAGS = {"block": "div", "flex": "div", "grid": "div", "table": "table", "table-row": "tr", "table-cell": "td"}
_DISPLAY = re.compile(r"display\s*:\s*([\w-]+)", re.IGNORECASE)
_LIST_STYLE = re.compile(r"list-style(?:-type)?\s*:\s*([^;]*)", re.IGNORECASE)
_LIST_NAMES = "arabic decimal loweralpha lowerlatin upperalpha upperlatin lowerroman upperroman"
_LIST_STYLES = dict(zip(_LIST_NAMES.split(), "11aaAAiI", strict=True)) | {"disc": "", "none": ""}
"""By the names of CSS, and by the classes of docutils."""

_TEXT_INPUTS = frozenset("date datetime-local email month number tel text time url week".split())
_TICKED = {"checkbox": "☐☑", "radio": "○◉"}
_TICKED_OWNERS = frozenset("dd dt label li p td th".split())
"""Elsewhere a box opens tabs or menus."""

_WRITTEN = {"br": "\n", "q": "“", "rt": "(", "script": "\\("}
_WRITTEN_AFTER = {"q": "”", "rt": ")", "script": "\\)"}
_EMPTY_ELEMENT = re.compile(r"<(\w+)((?:\s[^<>]*)?)/>")
_LINE_NUMBERS = re.compile(r"[\s\d.:]*")
_SPACE = re.compile(r"\s+")
_DECLARED = re.compile(
    rb"""<\?xml[^>]{0,99}?encoding\s*=\s*["']?([\w.:-]+)|<meta[^>]{0,999}?charset\s*=\s*["']?\s*([\w.:-]+)""", re.I
)
_HEAD_BYTES = 4096
_READ_AS = {
    "iso8859-1": WINDOWS,
    "ascii": WINDOWS,
    "utf-16": "utf-8",
    "utf-16-le": "utf-8",
    "utf-16-be": "utf-8",
    "iso8859-9": "cp1254",
    "iso8859-11": "cp874",
    "tis-620": "cp874",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
    "big5": "big5hkscs",
}
"""Encodings that browsers read as another, by Python's names. Source: WHATWG, Encoding, section 4.2."""

_CODE_CLASSES = frozenset("blob-code code hljs-ln-code rouge-code".split())
_MAX_ROWS = 65_534  # that a cell spans, in browsers; 0 stands for all
_MAX_LEVEL = 9
_PIECES_BEFORE = 4
"""Of the line, to the left of a superscript."""

_MAX_DEPTH = 40_000
_PART_CHARS = 2**16


class _Element:
    """An open element. `start`: how many pieces of the line stand before it. `script`: "superscript", "subscript" or empty."""

    def __init__(self, tag: str, script: str, start: int, num_links: int) -> None:
        self.tag = tag
        self.script = script
        self.start = start
        self.num_links = num_links
        self.level, self.anchor = 0, ""  # of a heading
        self.opens = self.expands = False  # of a button: by its class, by an attribute


class _List:
    """An open list. `style`: of its numbers; empty: it has none. `number`: of its next item."""

    def __init__(self, style: str, number: int = 1, step: int = 1) -> None:
        self.style = style
        self.number = number
        self.step = step
        self.num_items = 0

    def next_marker(self, value: str | None) -> str:
        self.num_items += 1
        if not self.style:
            return "- "
        number = _integer(value, self.number)
        self.number = number + self.step
        return f"{list_number(number, self.style)}. "


class _OpenTable:
    """An open table. `cells` None: outside a row, or the table is layout. `code`: numbers of the row's cells that are code."""

    def __init__(self, builder: TextBuilder) -> None:
        self.table = Table(builder)
        self.is_layout = False
        self.is_header = False  # whether the row has no cell but `th`
        self.had_code = False  # whether the row above was a line of code
        self.cells: list[Cell] | None = None
        self.code: set[int] = set()
        self.in_code = False  # whether the open cell is code
        self._span = (1, 1)

    def begin_row(self) -> None:
        self.cells, self.is_header = [], True
        self.code.clear()

    def begin_cell(self, attributes: Mapping[str, str]) -> None:
        rows = _integer(attributes.get("rowspan"), 1)
        self._span = (max(1, _integer(attributes.get("colspan"), 1)), rows if 0 < rows < _MAX_ROWS else _MAX_ROWS)
        self.in_code = not _CODE_CLASSES.isdisjoint(attributes.get("class", "").split())

    def end_cell(self, text: str, tag: str) -> None:
        assert self.cells is not None
        if self.in_code:
            self.code.add(len(self.cells))
        self.cells.append(Cell(text, *self._span))
        self.is_header &= tag == "th"
        self.in_code = False


def read_html(path: Path) -> ParsedFile:
    check_size(path)
    return parse_html(path.read_bytes())


def parse_html(raw: bytes | str) -> ParsedFile:
    """Raises: InputError if elements are nested too deeply."""
    markup = _decoded(raw) if isinstance(raw, bytes) else raw
    page = _parsed(markup, _Page())
    num_items = [each.num_items for each in page.reversed_lists]
    if num_items:
        page = _parsed(markup, _Page(num_items=num_items))
    found = page.finished()
    if not page.has_main:
        return found
    part = _parsed(markup, _Page(main_only=True, num_items=num_items)).finished()
    return part._replace(title=found.title) if len(part.text) >= _LEAST_MAIN_CHARS else found


def _parsed(markup: str, page: _Page) -> _Page:
    parser = etree.HTMLParser(target=page, huge_tree=True)
    markup = markup.replace("\0", " ").removeprefix("\ufeff")
    for start in range(0, len(markup), _PART_CHARS):
        parser.feed(markup[start : start + _PART_CHARS])
    if markup:
        parser.close()
    return page


def _decoded(raw: bytes) -> str:
    """Decodes by the byte order mark, the declared encoding or UTF-8, the first that fits; else by windows-1252."""
    declared = _DECLARED.search(raw[:_HEAD_BYTES])
    name = (declared[1] or declared[2]).decode("ascii", "replace") if declared else ""
    declared_encoding = python_encoding(name)
    read_as = _READ_AS.get(declared_encoding, declared_encoding)
    markup = decoded(raw, (encoding_mark(raw), read_as, "utf-8"))
    if "xhtml" in markup[:_HEAD_BYTES] or markup.startswith("<?xml"):
        markup = _EMPTY_ELEMENT.sub(_with_end_tag, markup)
    return markup


def _with_end_tag(element: re.Match[str]) -> str:
    return element[0] if element[1].lower() in _VOID else f"<{element[1]}{element[2]}></{element[1]}>"


class _Page:
    """Collects the text between the boundaries of blocks, from the events of a parser.

    `main_only`: of the element `main` or of the role alone. `num_items`: of each reversed list, as an earlier reading counted.
    """

    def __init__(self, main_only: bool = False, num_items: Sequence[int] = ()) -> None:
        self.has_main = False
        self.reversed_lists: list[_List] = []
        self._num_items = num_items
        self._main_only = main_only
        self._main_depth = 0  # number of open elements when the main part opened; 0: outside
        self._builder = TextBuilder()
        self._open: list[_Element] = []  # outermost first
        self._num_open: Counter[str] = Counter()
        self._hidden_depth = 0  # number of open elements when the hidden element opened; 0: text is visible
        self._button_depth = 0  # number of open elements when a button outside lines opened; 0: outside
        self._num_links = 0  # links to places in a page
        self._title: list[str] = []
        self._line: list[str] = []  # text since the last block boundary
        self._formula: TreeBuilder | None = None
        self._formula_depth = 0  # number of open elements of the formula
        self._pre_depth = 0  # number of open elements when the outermost `pre` opened; 0: outside
        self._lead, self._gap = "", "\n\n"  # the marker of the next block, and the separator before it
        self._anchor = ""  # the last one since the last block
        self._tables: list[_OpenTable] = []
        self._lists: list[_List] = []

    def finished(self) -> ParsedFile:
        self._end_block()
        return self._builder.build("".join(self._title))

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        if not self._hidden_depth and (self._formula or _is_formula(tag, attributes)):
            self._formula = self._formula or TreeBuilder()
            self._formula.start(tag, dict(attributes))
            self._formula_depth += 1
            return
        tag = _shown_tag(tag, attributes)
        script = _script(tag, attributes)
        self._open.append(_Element(tag, script, len(self._line), self._num_links))
        self._num_open[tag] += 1
        if len(self._open) > _MAX_DEPTH:
            raise InputError(f"it cannot be read: more than {_MAX_DEPTH} elements are nested")
        if self._hidden_depth:
            return
        if _is_hidden(tag, attributes) or self._is_apart(tag):
            self._hidden_depth = len(self._open)
            return
        self._open[-1].level = _level(tag, attributes)
        self._num_links += tag == "a" and "#" in attributes.get("href", "")
        if tag in _WRITTEN:
            self._line.append(_WRITTEN[tag])
        elif tag in ("img", "input"):
            self._line.append(self._replaced(tag, attributes))
        self._enter(tag, attributes)
        if tag == "pre":
            self._pre_depth = self._pre_depth or len(self._open)
        self._anchor = attributes.get("id") or (attributes.get("name") if tag == "a" else "") or self._anchor
        self._open[-1].anchor = self._anchor
        if not self._main_depth and (tag == "main" or attributes.get("role") == "main"):
            self.has_main, self._main_depth = True, len(self._open)

    def end(self, tag: str) -> None:
        if self._formula:
            self._formula.end(tag)
            self._formula_depth -= 1
            if not self._formula_depth:
                self._line.append(formula_text(self._formula.close()))
                self._formula = None
            return
        if not self._hidden_depth:
            self._leave(self._open[-1])
        elif len(self._open) == self._hidden_depth:
            self._hidden_depth = 0
        if len(self._open) == self._main_depth:
            self._end_block()
            self._main_depth = 0
        if len(self._open) == self._pre_depth:
            self._pre_depth = 0
        self._num_open[self._open.pop().tag] -= 1

    def data(self, data: str) -> None:
        if self._formula:
            self._formula.data(data)
        elif not self._hidden_depth:
            self._line.append(data if self._num_open["pre"] or self._in_code() else _SPACE.sub(" ", data))
        elif self._open and self._open[-1].tag == "title" and not self._num_open["svg"]:
            self._title.append(data)

    def close(self) -> None:
        pass

    def _replaced(self, tag: str, attributes: Mapping[str, str]) -> str:
        """The text that stands for an image of a formula, or for a field of a form."""
        kind = attributes.get("type", "text").lower()
        if tag == "img":
            return attributes.get("alt", "") if _FORMULA.search(attributes.get("class", "")) else ""
        if kind in _TICKED and len(self._open) > 1 and self._open[-2].tag in _TICKED_OWNERS:
            return f"{_TICKED[kind]['checked' in attributes]} "
        return f" {attributes.get('value', '')} " if kind in _TEXT_INPUTS else ""

    def _is_apart(self, tag: str) -> bool:
        """Whether the element is a footer of the page, or a button in code."""
        if tag == "footer":
            return not any(self._num_open[owner] for owner in _FOOTER_OWNERS)
        return tag == "button" and self._num_open["pre"] > 0

    def _enter(self, tag: str, attributes: Mapping[str, str]) -> None:
        if tag in _HEADINGS or tag == "table":
            self._unwrap_row()
        if tag in _BLOCKS:
            self._break()
        table = self._tables[-1] if self._tables else None
        if tag == "table":
            self._tables.append(_OpenTable(self._builder))
        elif tag in ("ol", "ul", "menu"):
            self._lists.append(self._new_list(tag, attributes))
        elif tag == "li":
            marker = self._lists[-1].next_marker(attributes.get("value")) if self._lists else "- "
            if self._in_row():
                self._line.append(marker)
            else:
                self._lead, self._gap = marker, "\n"
        elif tag == "tr" and table and not table.is_layout:
            table.begin_row()
        elif tag in _CELLS and table:
            table.begin_cell(attributes)
        elif tag == "button" and not self._is_inline_button():
            self._end_block()
            self._button_depth = self._button_depth or len(self._open)
            self._open[-1].opens = _OPENS.search(attributes.get("class", "")) is not None
            self._open[-1].expands = "aria-expanded" in attributes

    def _leave(self, element: _Element) -> None:
        tag, table = element.tag, self._tables[-1] if self._tables else None
        if element.script:
            self._write_script(element)
        if tag in _WRITTEN_AFTER:
            self._line.append(_WRITTEN_AFTER[tag])
        if table and table.cells is not None and tag in (*_CELLS, "pre", "tr"):
            if tag == "pre":
                table.code.add(len(table.cells))
            elif tag == "tr":
                self._end_row(table)
            else:
                table.end_cell("".join(self._line), tag)
                self._line.clear()
        elif len(self._open) == self._button_depth:
            self._end_button(element)
        elif self._pre_depth and len(self._open) > self._pre_depth:
            self._break() if tag in _BLOCKS else None
        elif tag in _BLOCKS:
            self._end_block(element.level, is_code=tag == "pre", anchor=element.anchor or self._anchor)
        if table and tag in ("tbody", "tfoot", "thead"):
            table.table.end_spans()
        elif tag == "table":
            self._tables.pop()
            self._gap = "\n\n"
        elif tag in ("ol", "ul", "menu"):
            self._lists.pop()
            self._lead = ""

    def _break(self) -> None:
        """End the block; inside `pre`, end the line."""
        if not self._pre_depth:
            self._end_block()
        elif self._line and not self._line[-1].endswith("\n"):
            self._line.append("\n")

    def _new_list(self, tag: str, attributes: Mapping[str, str]) -> _List:
        style, start = _list_style(tag, attributes), attributes.get("start")
        if "reversed" not in attributes:
            return _List(style, _integer(start, 1))
        place = len(self.reversed_lists)
        num_items = self._num_items[place] if place < len(self._num_items) else 0
        self.reversed_lists.append(_List(style, _integer(start, num_items), step=-1))
        return self.reversed_lists[-1]

    def _is_inline_button(self) -> bool:
        is_owned = any(self._num_open[owner] for owner in _BUTTON_OWNERS)
        return is_owned or any(map(str.strip, self._line)) or self._button_depth > 0

    def _end_button(self, button: _Element) -> None:
        """Why words are counted: "Menu" and "Search" open parts that are no text of the page."""
        self._button_depth = 0
        text = "".join(self._line[button.start :]).strip()
        is_long = len(text.split()) >= _LEAST_TITLE_WORDS
        if text.endswith(("?", "？")) or button.opens or (is_long and button.expands):
            self._end_block()
        else:
            del self._line[button.start :]

    def _write_script(self, element: _Element) -> None:
        before = "".join(self._line[max(0, element.start - _PIECES_BEFORE) : element.start])
        is_link = self._num_links > element.num_links or self._num_open["a"] > 0
        self._line[element.start :] = [scripted("".join(self._line[element.start :]), before, element.script, is_link)]

    def _in_code(self) -> bool:
        return bool(self._tables) and self._tables[-1].in_code

    def _in_row(self) -> bool:
        return bool(self._tables) and self._tables[-1].cells is not None

    def _end_row(self, table: _OpenTable) -> None:
        cells, table.cells = table.cells or [], None
        self._line.clear()
        if not self._shows():
            return
        numbers = {place for place, cell in enumerate(cells) if _LINE_NUMBERS.fullmatch(cell.text)}
        code = table.code - numbers
        if code and all(place < min(code) for place in numbers) and len(code | numbers) == len(cells):
            lines = "\n".join(cells[place].text.strip("\n") for place in sorted(code))
            self._builder.add(lines, kind=BlockKind.CODE, joins=table.had_code)
            table.had_code = True
        elif any("\n" in cells[place].text.strip() for place in code):
            for place, cell in enumerate(cells):
                is_code = place in code
                text = cell.text.strip("\n") if is_code else one_line(cell.text)
                self._builder.add(text, kind=_kind(is_code))
        else:
            table.table.add([cell._replace(text=one_line(cell.text)) for cell in cells], table.is_header)

    def _unwrap_row(self) -> None:
        """A table that holds headings or tables is layout, not data: its cells become blocks."""
        if self._in_row():
            table = self._tables[-1]
            cells, table.cells = table.cells or [], None
            table.is_layout = True
            for cell in cells if self._shows() else ():
                self._builder.add(one_line(cell.text))

    def _shows(self) -> bool:
        return self._main_depth > 0 or not self._main_only

    def _end_block(self, level: int = 0, is_code: bool = False, anchor: str = "") -> None:
        """Turn the line into a block; inside a row of data or a button add a space."""
        if self._in_row() or self._button_depth:
            self._line.append("\n")
            return
        text = "".join(self._line)
        self._line.clear()
        lines = [text.strip("\n")] if is_code else [" ".join(line.split()) for line in text.split("\n")]
        block = "\n".join(filter(None, lines))
        if block.strip() and self._shows():
            self._builder.add(self._lead + block, level, self._gap, _kind(is_code, bool(self._lead)), anchor=anchor)
            self._lead, self._gap, self._anchor = "", "\n\n", ""


def _kind(is_code: bool = False, is_item: bool = False) -> BlockKind:
    return BlockKind.CODE if is_code else BlockKind.LIST_ITEM if is_item else BlockKind.PARAGRAPH


def _level(tag: str, attributes: Mapping[str, str]) -> int:
    if attributes.get("role") == "heading":
        return min(max(1, _integer(attributes.get("aria-level"), 2)), _MAX_LEVEL)
    return _HEADINGS.get(tag, 0)


def _integer(text: str | None, default: int) -> int:
    found = re.match(r"\s*([+-]?\d{1,9})", text or "")
    return int(found[1]) if found else default


def _is_formula(tag: str, attributes: Mapping[str, str]) -> bool:
    return (tag == "math" or tag.endswith(":math")) and not _is_hidden(tag, attributes)


def _shown_tag(tag: str, attributes: Mapping[str, str]) -> str:
    """The tag that an element without a meaning of its own stands for, by its role or its style."""
    if tag not in ("div", "span") or not attributes:
        return tag
    display = _DISPLAY.search(attributes["style"]) if "style" in attributes else None
    found = _ROLE_TAGS.get(attributes.get("role", "")) or (_DISPLAY_TAGS.get(display[1].lower()) if display else "")
    return found or tag


def _script(tag: str, attributes: Mapping[str, str]) -> str:
    """The script of an element, by its tag, its style or its class; that of a footnote's mark."""
    if tag in _SCRIPT_TAGS or not attributes:
        return _SCRIPT_TAGS.get(tag, "")
    style, classes = attributes.get("style"), attributes.get("class", "")
    if style and (raised := _RAISED.search(style)):
        return f"{raised[1].lower()}script"
    if style and (shifted := _SHIFTED.search(style)):
        return "subscript" if shifted[1] else "superscript"
    is_note = attributes.get("role") == "doc-noteref" or attributes.get("epub:type") == "noteref"
    if is_note or (tag == "a" and not _NOTE_CLASSES.isdisjoint(classes.split())):
        return "superscript"
    return _SCRIPT_CLASSES.get(classes, "")


def _list_style(tag: str, attributes: Mapping[str, str]) -> str:
    """The style of a list's numbers; empty: it has none."""
    set_style = _LIST_STYLE.search(attributes.get("style", ""))
    names = f"{set_style[1] if set_style else ''} {attributes.get('class', '')}".lower().replace("-", "").split()
    found = [_LIST_STYLES[name] for name in names if name in _LIST_STYLES]
    return found[0] if found else (attributes.get("type") or "1") * (tag == "ol")


def _is_hidden(tag: str, attributes: Mapping[str, str]) -> bool:
    if tag in _HIDDEN:
        return not (tag == "script" and attributes.get("type", "").startswith("math/tex"))
    if not attributes:
        return False
    names = (
        " ".join(attributes.get(name, "") for name in ("title", "aria-label")).strip() if tag in ("a", "button") else ""
    )
    classes = attributes.get("class", "")
    return (
        (_is_invisible(attributes) and not _is_opened(tag, attributes))
        or attributes.get("role") in _HIDDEN_ROLES
        or not _HIDDEN_CLASSES.isdisjoint(classes.split())
        or (tag == "a" and _PERMALINK.match(names) is not None)
        or (tag == "button" and _TOOL.search(f"{classes} {names}") is not None)
    )


def _is_opened(tag: str, attributes: Mapping[str, str]) -> bool:
    """Whether a reader opens a hidden element, such as the answer to a question."""
    classes = attributes.get("class", "")
    return (
        attributes.get("role") in ("region", "tabpanel")
        or attributes.get("hidden") == "until-found"
        or (tag in _BLOCKS and _OPENS.search(classes) is not None)
        or "mathml" in classes
    )


def _is_invisible(attributes: Mapping[str, str]) -> bool:
    is_hidden = "hidden" in attributes or attributes.get("aria-hidden") == "true"
    return is_hidden or ("style" in attributes and _INVISIBLE.search(attributes["style"]) is not None)

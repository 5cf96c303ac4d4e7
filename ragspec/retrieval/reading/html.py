"""Web pages: their visible text, as blocks, list items and table rows; of a page that marks its main part, that part alone.

Why no tree: in old pages with unclosed paragraphs every paragraph nests in the previous one, and building such a tree takes time
quadratic in their number. Beautiful Soup detects the encoding.

    >>> read_html(Path("page.html")).title
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path

from bs4.dammit import EncodingDetector, UnicodeDammit

from ragspec.errors import InputError
from ragspec.retrieval.reading.parsed_file import ParsedFile, TextBuilder, check_size, first_title, silence_logger

_HEADINGS = {f"h{level}": level for level in range(1, 7)}
_CELLS = frozenset({"td", "th"})
_BLOCKS = frozenset(
    "address article aside blockquote body caption center dd details div dl dt fieldset figcaption figure footer form header hr "
    "html legend li main menu ol p pre section summary table tbody tfoot thead tr ul".split()
).union(_HEADINGS, _CELLS)
_EMPTY = frozenset("area base br col embed hr img input link meta param source track wbr".split())
_HIDDEN = frozenset(
    "audio button canvas datalist iframe nav noscript object script select style svg template textarea title video".split()
)
_APART = frozenset({"banner", "contentinfo", "navigation", "search"})
"""Roles of what is not the page's own text."""
_APART_CLASSES = frozenset(
    "anchorjs-link breadcrumb breadcrumbs cookie-banner hash-link header-anchor headerlink heading-anchor mw-editsection navbar "
    "permalink skip-link sphinxsidebar".split()
)
_PERMALINK = re.compile(r"perma(?:nent )?link|link to this|skip to", re.IGNORECASE)
_PARTS = frozenset({"article", "blockquote", "main", "section"})
"""A footer inside them belongs to the text."""
_LEAST_MAIN_CHARS = 200
_INVISIBLE = re.compile(r"display\s*:\s*none|visibility\s*:\s*hidden", re.IGNORECASE)
_SPACE = re.compile(r"\s+")

_ENDED_BY = {
    "li": frozenset({"li"}),
    **dict.fromkeys(("dt", "dd"), frozenset({"dt", "dd"})),
    **dict.fromkeys(_CELLS, _CELLS),
    "tr": frozenset({"tr"}),
    **dict.fromkeys(("thead", "tbody", "tfoot"), frozenset({"thead", "tbody", "tfoot"})),
}
"""The open tags that a tag closes implicitly. Every block also closes an open paragraph."""

_KEEPS_OPEN = frozenset({"ul", "ol", "menu", "dl", "table"})
"""A list or table inside an item or cell does not close the item or cell."""

_NEAREST = 100
"""How many open tags are searched for tags to close."""


def read_html(path: Path) -> ParsedFile:
    check_size(path)
    with silence_logger("bs4"):
        markup = _tame(_decoded(path))
    page = _Page()
    page.feed(markup)
    found = page.finished()
    if not page.has_main:
        return found
    main = _Page(main_only=True)
    main.feed(markup)
    part = main.finished()
    return part._replace(title=part.title or found.title) if len(part.text) >= _LEAST_MAIN_CHARS else found


def _decoded(path: Path) -> str:
    """Decodes by the byte order mark, the declared encoding, UTF-8 or a guess: the first that fits."""
    raw = path.read_bytes()
    declared = EncodingDetector.find_declared_encoding(raw, is_html=True)
    markup = UnicodeDammit(raw, user_encodings=[*filter(None, [declared]), "utf-8"], is_html=True).unicode_markup
    if markup is None:
        raise InputError(f"{path} is text of no known encoding")
    return markup


def _tame(markup: str) -> str:
    """Removes comments and escapes unterminated tags. Why: for each of them the parser scans the rest of the page."""
    parts: list[str] = []
    at = 0
    while (start := markup.find("<!--", at)) >= 0 and (end := markup.find("-->", start + 2)) >= 0:
        parts.append(markup[at:start])
        at = end + 3
    markup = "".join(parts) + markup[at:].replace("<!--", "")
    last = markup.rfind(">") + 1
    return markup[:last] + markup[last:].replace("<", "&lt;")


class _Page(HTMLParser):
    """Collects the text between the boundaries of blocks. `main_only`: of the element `main` or of the role alone."""

    def __init__(self, main_only: bool = False) -> None:
        super().__init__(convert_charrefs=True)
        self.has_main = False
        self._main_only = main_only
        self._main_depth = 0  # number of open tags when the main part opened; 0: outside
        self._builder = TextBuilder()
        self._open: list[str] = []  # tags, outermost first
        self._num_open: Counter[str] = Counter()
        self._hidden_depth = 0  # number of open tags when the hidden tag opened; 0: text is visible
        self._title: list[str] = []
        self._line: list[str] = []  # text since the last block boundary
        self._lead, self._gap = "", "\n\n"  # the marker of the next block, and the separator before it
        self._row: list[str] | None = None  # the finished cells of an open row, in a table of data
        self._is_header = False  # whether the open row has no cell but `th`
        self._is_layout: list[bool] = []  # for each open table
        self._items: list[int] = []  # for each open list: items so far, -1 if they are not numbered

    def finished(self) -> ParsedFile:
        self.close()
        self._close_to(0)
        self._end_block()
        found = self._builder.build("".join(self._title))
        return found if found.title else found._replace(title=first_title(found.headings))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._end_before(tag)
        if tag not in _EMPTY:
            self._open.append(tag)
            self._num_open[tag] += 1
        if self._hidden_depth:
            return
        if _is_hidden(tag, dict(attrs)) or (tag == "footer" and not any(self._num_open[part] for part in _PARTS)):
            self._hidden_depth = 0 if tag in _EMPTY else len(self._open)
        elif tag == "br":
            self._line.append("\n")
        else:
            self._enter(tag)
            if not self._main_depth and (tag == "main" or ("role", "main") in attrs):
                self.has_main, self._main_depth = True, len(self._open)

    def handle_endtag(self, tag: str) -> None:
        if self._num_open[tag]:
            depth = len(self._open) - 1
            while self._open[depth] != tag:
                depth -= 1
            self._close_to(depth)

    def handle_data(self, data: str) -> None:
        if not self._hidden_depth:
            self._line.append(data if self._num_open["pre"] else _SPACE.sub(" ", data))
        elif self._open[-1] == "title" and not self._num_open["svg"]:
            self._title.append(data)

    def _end_before(self, tag: str) -> None:
        """Close the tags that the opening `tag` closes implicitly."""
        ended = _ENDED_BY.get(tag, frozenset())
        if tag in _BLOCKS and self._num_open["p"]:
            ended |= {"p"}
        depth = len(self._open)
        outermost = depth
        for name in reversed(self._open[-_NEAREST:] if ended else ()):
            depth -= 1
            if name in ended:
                outermost = depth
            elif name in _KEEPS_OPEN:
                break
        self._close_to(outermost)

    def _close_to(self, depth: int) -> None:
        while len(self._open) > depth:
            if not self._hidden_depth:
                self._leave(self._open[-1])
            elif len(self._open) == self._hidden_depth:
                self._hidden_depth = 0
            if len(self._open) == self._main_depth:
                self._end_block()
                self._main_depth = 0
            self._num_open[self._open.pop()] -= 1

    def _enter(self, tag: str) -> None:
        if tag in _HEADINGS or tag == "table":
            self._unwrap_row()
        if tag in _BLOCKS:
            self._end_block()
        if tag == "table":
            self._is_layout.append(False)
        elif tag == "tr" and self._is_layout and not self._is_layout[-1]:
            self._row, self._is_header = [], True
        elif tag in ("ol", "ul"):
            self._items.append(0 if tag == "ol" else -1)
        elif tag == "li" and self._row is None:
            self._begin_item()

    def _leave(self, tag: str) -> None:
        if tag in _CELLS and self._row is not None:
            self._row.append(" ".join("".join(self._line).split()))
            self._is_header &= tag == "th"
            self._line.clear()
        elif tag == "tr" and self._row is not None:
            self._end_row(self._row)
        elif tag in _BLOCKS:
            self._end_block(_HEADINGS.get(tag, 0), verbatim=tag == "pre")
        if tag == "table":
            self._is_layout.pop()
            self._gap = "\n\n"
        elif tag in ("ol", "ul"):
            self._items.pop()

    def _add(self, block: str, level: int = 0, gap: str = "\n\n") -> None:
        if self._main_depth or not self._main_only:
            self._builder.add(block, level, gap)

    def _begin_item(self) -> None:
        is_numbered = bool(self._items) and self._items[-1] >= 0
        if is_numbered:
            self._items[-1] += 1
        self._lead, self._gap = f"{self._items[-1]}. " if is_numbered else "- ", "\n"

    def _end_row(self, cells: list[str]) -> None:
        self._row = None
        self._line.clear()
        if any(cells):
            rule = f"\n|{'---|' * len(cells)}" if self._is_header and self._gap != "\n" else ""
            self._add(f"| {' | '.join(cells)} |{rule}", gap=self._gap)
            self._gap = "\n"

    def _unwrap_row(self) -> None:
        """A table that holds headings or tables is layout, not data: its cells become blocks."""
        if self._row is not None:
            cells, self._row = self._row, None
            self._is_layout[-1] = True
            for cell in cells:
                self._add(cell)

    def _end_block(self, level: int = 0, verbatim: bool = False) -> None:
        """Turn the line into a block; inside a row of data add a space."""
        if self._row is not None:
            self._line.append(" ")
            return
        text = "".join(self._line)
        self._line.clear()
        lines = [text.strip("\n")] if verbatim else [" ".join(line.split()) for line in text.split("\n")]
        block = "\n".join(filter(None, lines))
        if block.strip():
            self._add(self._lead + block, level, self._gap)
            self._lead, self._gap = "", "\n\n"


def _is_hidden(tag: str, attributes: Mapping[str, str | None]) -> bool:
    names = " ".join(attributes.get(name) or "" for name in ("title", "aria-label")) if tag == "a" else ""
    return (
        tag in _HIDDEN
        or "hidden" in attributes
        or attributes.get("aria-hidden") == "true"
        or attributes.get("role") in _APART
        or not _APART_CLASSES.isdisjoint((attributes.get("class") or "").split())
        or _PERMALINK.match(names.strip()) is not None
        or bool(_INVISIBLE.search(attributes.get("style") or ""))
    )

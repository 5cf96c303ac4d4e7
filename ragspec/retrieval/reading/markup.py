"""Markdown, reStructuredText, AsciiDoc and plain text: the text as it is written, and its blocks.

Markdown is read without front matter, comments and HTML tags. The numbers of lists are those that a reader sees.
reStructuredText: titles are underlined or framed lines; the level of a title is the order in which its style first appears.

    >>> read_markdown("# The mill").title
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from markdown_it import MarkdownIt

from ragspec.core import Block, BlockKind, Heading
from ragspec.retrieval.reading.html import parse_html
from ragspec.retrieval.reading.inline import scripted
from ragspec.retrieval.reading.parsed_file import ParsedFile, TextBuilder, first_title, heading, numbered_lines

_MARKDOWN = MarkdownIt("commonmark").enable("table")
_MARKDOWN.core.ruler.enableOnly(["normalize", "block"])
_LEAVES = dict.fromkeys("heading_open paragraph_open html_block hr".split(), BlockKind.PARAGRAPH)
_LEAVES |= {"fence": BlockKind.CODE, "code_block": BlockKind.CODE, "table_open": BlockKind.TABLE}
_INLINE_HTML = re.compile(
    r"(?P<code>`[^`\n]*`)|<!--.*?-->|<(?P<script>su[pb])>(?P<text>[^<>]*)</(?P=script)>", re.DOTALL | re.IGNORECASE
)
_SCRIPTS = {"sup": "superscript", "sub": "subscript", "SUP": "superscript", "SUB": "subscript"}
_MAX_INLINE_CHARS = 100_000
_ATX = re.compile(r"[ \t]*#{1,6}(?=[ \t]|\Z)")
_SET_TITLE = re.compile(r"^title:(.*)$", re.MULTILINE)
_LINK = re.compile(r"!?\[([^\[\]]*)\](?:\([^()]*\)|\[[^\[\]]*\])")
_GIVEN_ANCHOR = re.compile(r"[ \t]\{#([^{}\s]+)[^{}]*\}[ \t#]*\Z")
_NO_SLUG = re.compile(r"[^\w\- ]")
_EMPHASIS = re.compile(r"\*\*|__|`+|[ \t]\{#[^{}]*\}\Z")

_RST_SCRIPT = re.compile(r"(?:\\ )?:(?P<script>sup|sub)(?:erscript|script)?:`(?P<text>[^`\n]+)`(?:\\ )?")
_RST_COMMENT = re.compile(
    r"^\.\.(?:[ \t]+(?![\w:+.-]+::|[_\[|])\S[^\n]*(?:\n|\Z)|\n(?=[ \t]+\S))(?:[ \t]+[^\n]*(?:\n|\Z)|\n+(?=[ \t]+\S))*",
    re.MULTILINE,
)
_RST_ITEM = re.compile(r"([ \t]*)#\.[ \t]+(?=\S)")
_ADOC_TITLE = re.compile(r"(={1,6})[ \t]+(\S.*)")
_ADOC_FENCE = re.compile(r"-{4,}|\.{4,}|/{4,}|\+{4,}|```\w*")
_ADOC_LEFT_OUT = re.compile(
    r"//(?!/)|:!?[\w-]+!?:(?:\s|\Z)|\[\[?[^\]\n]*\]?\]\s*\Z|(?:={4,}|\*{4,}|_{4,}|\|={3,}|--|\+)\s*\Z"
)
_ADOC_SCRIPT = re.compile(r"(?P<script>[\^~])(?P<text>[^\s^~`]{1,20})(?P=script)")
_ADOC_ITEM = re.compile(r"(\.{1,5})[ \t]+(?=\S)")
_SET_NUMBER = re.compile(r"([ \t]*)(\d{1,4})\.[ \t]|\[[^\]]*\bstart=(\d{1,4})[^\]]*\]\s*\Z")
"""An item with its number, or AsciiDoc's number of the next item."""
_CHARS_BEFORE = 20
_PARAGRAPH = re.compile(r"[^\n]*\S[^\n]*(?:\n[^\n]*\S[^\n]*)*")
_ITEM = re.compile(r"[ \t]*(?:[-*+•][ \t]|\(?(?:\d{1,4}|[A-Za-z])[.)][ \t])")

_RULE = re.compile(r"([!-/:-@\[-`{-~])\1*")
_ROLE = re.compile(r"(?::[\w.+-]+)*:(?=`)")
_INLINE_MARKUP = re.compile(r"\*\*|`+|[ \t]<[^<>]*>(?=`)")
_SURE_RULE = 4
"""A rule of this length underlines a title even if the title is longer."""


def read_markdown(text: str) -> ParsedFile:
    start = _front_matter_end(text)
    settings = _SET_TITLE.search(text, 0, start)
    lines = text[start:].split("\n")
    slugs = Counter[str]()
    builder, written = TextBuilder(), 0  # number of the lines that are written or left out
    for leaf in _leaves(lines):
        source = "\n".join(lines[leaf.start : leaf.end])
        block = source if leaf.kind is BlockKind.CODE else _shown_text(source, leaf.is_html)
        if block.strip():
            lead = block[: len(block) - len(block.lstrip())] if leaf.level else ""
            builder.skip("".join(f"{line}\n" for line in lines[written : leaf.start]) + lead)
            anchor = _anchor(source, slugs) if leaf.level else ""
            builder.add(block[len(lead) :], leaf.level, "", leaf.kind, title=_title(source), anchor=anchor)
            builder.skip("\n" if leaf.end < len(lines) else "")
        written = leaf.end
    builder.skip("\n".join(lines[written:]))
    return builder.build(first_title(builder.headings) or (settings[1].strip("\"' \t") if settings else ""))


class _Leaf(NamedTuple):
    """A block of Markdown, the lines `[start, end)`. `level`: of a heading, or 0."""

    start: int
    end: int
    kind: BlockKind
    level: int
    is_html: bool


def _leaves(lines: list[str]) -> Iterator[_Leaf]:
    """Writes the numbers of list items, as they are shown, into `lines`."""
    numbers: list[int | None] = []  # of the next item, for each open list
    is_item = False
    for token in _MARKDOWN.parse("\n".join(lines)):
        if token.type in ("ordered_list_open", "bullet_list_open"):
            numbers.append(int(token.attrGet("start") or 1) if token.type[0] == "o" else None)
        elif token.type in ("ordered_list_close", "bullet_list_close"):
            numbers.pop()
        elif token.type == "list_item_open" and token.map:
            is_item = True
            if (number := numbers[-1]) is not None:
                numbers[-1] = number + 1
                place = token.map[0]
                lines[place] = lines[place].replace(token.info + token.markup, f"{number}{token.markup}", 1)
        elif token.type in _LEAVES and token.map:
            level = int(token.tag[1]) if token.type == "heading_open" and not token.level else 0
            kind = BlockKind.LIST_ITEM if is_item and token.type == "paragraph_open" else _LEAVES[token.type]
            yield _Leaf(token.map[0], token.map[1], kind, level, token.type == "html_block")
            is_item = False


def _shown_text(source: str, is_html: bool) -> str:
    """Without comments and tags, with superscripts as signs. Code in the line stays."""
    if "<" not in source or len(source) > _MAX_INLINE_CHARS:
        return source
    if is_html:
        return parse_html(source).text
    found, end = "", 0
    for match in _INLINE_HTML.finditer(source):
        found += source[end : match.start()]
        if match["script"]:
            found += scripted(match["text"], found, _SCRIPTS[match["script"]])
        elif match["code"]:
            found += match["code"]
        end = match.end()
    return found + source[end:]


def _title(source: str) -> str:
    """The words of a heading in Markdown."""
    atx = _ATX.match(source)
    return _without_markup(_without_closing(source[atx.end() :]) if atx else source.rsplit("\n", 1)[0])


def _anchor(source: str, slugs: Counter[str]) -> str:
    """As the heading gives it, or else as GitHub makes it. `slugs`: how often each was made."""
    if given := _GIVEN_ANCHOR.search(source):
        return given[1]
    slug = _NO_SLUG.sub("", _title(source).lower()).replace(" ", "-")
    slugs[slug] += 1
    return f"{slug}-{slugs[slug] - 1}" if slugs[slug] > 1 else slug


def _front_matter_end(text: str) -> int:
    """Where the text begins behind the front matter, which stands between two lines of dashes."""
    if not text.startswith("---\n"):
        return 0
    end = text.find("\n---\n", 3)
    return 0 if end < 0 else end + len("\n---\n")


def _without_closing(line: str) -> str:
    """`Title ##` is `Title`; `C#` stays."""
    line = line.strip()
    opened = line.rstrip("#")
    return opened if not opened or opened[-1] in " \t" else line


def _without_markup(title: str) -> str:
    return _EMPHASIS.sub("", _LINK.sub(r"\1", title)) if len(title) < 1000 else title


def read_plain(text: str) -> ParsedFile:
    return ParsedFile(text, blocks=_paragraphs(text, ()))


def read_rst(text: str) -> ParsedFile:
    """Leaves out comments, and writes the numbers of lists."""
    text = _with_numbers(_RST_SCRIPT.sub(_scripted, _RST_COMMENT.sub("", text)), _RST_ITEM)
    headings = tuple(_rst_headings(text))
    return ParsedFile(text, headings, first_title(headings), blocks=_paragraphs(text, headings))


def read_asciidoc(text: str) -> ParsedFile:
    """Leaves out comments, attributes and the lines around blocks, and writes the numbers of lists."""
    builder = TextBuilder()
    fence = ""  # the line that ends the open block of code or comment
    lines: list[str] = []
    for line in text.split("\n"):
        if fence and line.rstrip() != fence:
            lines.append(line)
        elif fence:
            if fence[0] != "/":
                builder.add("\n".join(lines), kind=BlockKind.CODE)
            fence, lines = "", []
        elif _ADOC_FENCE.fullmatch(line.rstrip()):
            _add_asciidoc(builder, lines)
            fence, lines = line.rstrip(), []
        elif title := _ADOC_TITLE.match(line):
            _add_asciidoc(builder, lines)
            lines = []
            builder.add(_without_markup(title[2]), len(title[1]))
        elif _SET_NUMBER.match(line) or not _ADOC_LEFT_OUT.match(line):
            lines.append(line)
    _add_asciidoc(builder, lines)
    return builder.build()


def _add_asciidoc(builder: TextBuilder, lines: list[str]) -> None:
    text = _with_numbers(_ADOC_SCRIPT.sub(_scripted, "\n".join(lines)), _ADOC_ITEM)
    for block in _paragraphs(text, ()):
        builder.add(text[block.start : block.end], kind=block.kind)


def _with_numbers(text: str, item: re.Pattern[str]) -> str:
    """Writes the number of each item that its markup leaves open. `item`: its first group tells the level."""
    numbers: dict[str, int] = {}
    start = 1
    lines = text.split("\n")
    for place, line in enumerate(lines):
        match, given = item.match(line), _SET_NUMBER.match(line)
        if match:
            numbers = {level: number for level, number in numbers.items() if len(level) <= len(match[1])}
            numbers[match[1]] = numbers.get(match[1], start - 1) + 1
            start = 1
            indent = match[1] if match[1].isspace() else "  " * (len(match[1]) - 1)
            lines[place] = f"{indent}{numbers[match[1]]}. {line[match.end() :]}"
        elif given and given[3]:
            numbers, start, lines[place] = {}, int(given[3]), ""
        elif given:
            numbers = {level: number for level, number in numbers.items() if len(level) < len(given[1])}
            numbers[given[1]] = int(given[2])
        elif line and not line[0].isspace() and line != "+":
            numbers.clear()
    return "\n".join(lines)


def _scripted(match: re.Match[str]) -> str:
    before = match.string[max(0, match.start() - _CHARS_BEFORE) : match.start()]
    return scripted(match["text"], before, "superscript" if match["script"] in ("sup", "^") else "subscript")


def _paragraphs(text: str, headings: Sequence[Heading]) -> tuple[Block, ...]:
    """The blocks between blank lines."""
    starts = {heading.start for heading in headings}
    found: list[Block] = []
    for match in _PARAGRAPH.finditer(text):
        lines = match[0].split("\n")
        if match.start() in starts:
            kind = BlockKind.HEADING
        elif _ITEM.match(lines[0]):
            kind = BlockKind.LIST_ITEM
        else:
            kind = BlockKind.CODE if all(line[:1].isspace() for line in lines) else BlockKind.PARAGRAPH
        found.append(Block(match.start(), match.end(), kind))
    return tuple(found)


def _rst_headings(text: str) -> Iterator[Heading]:
    lines = list(numbered_lines(text))
    levels: dict[tuple[str, bool], int] = {}
    last = -1  # number of the previous title's underline
    for number in range(1, len(lines)):
        rule = _rule_of(lines[number][1])
        title = lines[number - 1][1].rstrip()
        if not rule or not title or _rule_of(title) or len(rule) < min(len(title.strip()), _SURE_RULE):
            continue
        above = lines[number - 2][1].rstrip() if number > 1 else ""
        framed = number - 2 > last and above == rule
        if not framed and (above or title[0].isspace() or title.startswith(".. ")):
            continue
        start = lines[number - 2 if framed else number - 1][0]
        yield from heading(start, levels.setdefault((rule[0], framed), len(levels) + 1), _without_roles(title))
        last = number


def _rule_of(line: str) -> str:
    line = line.rstrip()
    return line if _RULE.fullmatch(line) else ""


def _without_roles(title: str) -> str:
    return _INLINE_MARKUP.sub("", _ROLE.sub("", title)) if len(title) < 1000 else title

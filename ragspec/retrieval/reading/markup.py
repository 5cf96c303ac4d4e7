"""Markdown, reStructuredText, AsciiDoc and plain text: the text as it is written, and its blocks.

Markdown is read without comments and HTML tags; its front matter is metadata. The numbers of lists are those that a reader sees.
reStructuredText: titles are underlined or framed lines; the level of a title is the order in which its style first appears.

    >>> read_markdown("# The mill").title
"""

import datetime
import re
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import yaml
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
    r"(?P<code>`[^`\n]*`)|(?<!~)~~(?=[^\s~])[^~\n]*[^\s~]~~(?!~)[ ]?|<!--.*?-->"
    r"|<(?P<script>su[pb])>(?P<text>[^<>]*)</(?P=script)>",
    re.DOTALL | re.IGNORECASE,
)
_SCRIPTS = {"sup": "superscript", "sub": "subscript", "SUP": "superscript", "SUB": "subscript"}
_MAX_INLINE_CHARS = 100_000
_ATX = re.compile(r"[ \t]*#{1,6}(?=[ \t]|\Z)")
_SET_TITLE = re.compile(r"^title\s*[:=](.*)$", re.MULTILINE)
_FRONT_MATTER = re.compile(r"(---|\+\+\+)[ \t]*\n(|.*?\n)(?:\1|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL)
_SETTING = re.compile(r"[\w.-]+[ \t]*[:=]")
_INTEGER = re.compile(r"-?(?:0|[1-9]\d{0,14})")
_MAX_NUMBER = 1e15
_LINK = re.compile(r"!?\[([^\[\]]*)\](?:\([^()]*\)|\[[^\[\]]*\])")
_GIVEN_ANCHOR = re.compile(r"[ \t]\{#([^{}\s]+)[^{}]*\}[ \t#]*\Z")
_NO_SLUG = re.compile(r"[^\w\- ]")
_EMPHASIS = re.compile(r"~~[^~]+~~ ?|\*\*|__|`+|[ \t]\{#[^{}]*\}\Z")

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
_ADOC_SETTING = re.compile(r":(!?)([\w-]+)(!?):(?:[ \t]+(\S.*))?[ \t]*")
_ADOC_REFERENCE = re.compile(r"(?<!\\)\{([\w-]+)\}")
_MAX_VALUE_CHARS = 200
_ADOC_ITEM = re.compile(r"(\.{1,5})[ \t]+(?=\S)")
_SET_NUMBER = re.compile(r"([ \t]*)(\d{1,4})\.[ \t]|\[[^\]]*\bstart=(\d{1,4})[^\]]*\]\s*\Z")
"""An item with its number, or AsciiDoc's number of the next item."""
_OVERSTRIKE = re.compile(r"([^\n\x08])\x08(?=\1)|_\x08(?=[^\n\x08])")
_CHARS_BEFORE = 20
_RECORD = re.compile(
    r"\s*(?:#|//|;|[-\w./ \[\]\"']{1,40}(?:[:=](?:\s|\Z)|=)|\[[^\]]*\]|\W?\d{1,4}[-:./]\d{1,2}[-:./T ]\S"
    r"|[A-Z][a-z]{2} +\d{1,2} \d\d:)"
)
"""The beginning of a comment, a setting, a section of settings, a record of a log or a line of a dialogue."""
_NAMED = re.compile(r"\[[^\[\]]{1,60}\]|[\w.-]{1,40}:")
_MOST_RECORDS = 0.6
_PROSE_WORD = re.compile(r"[(\"'“]*[^\W\d_]+(?:['’-][^\W\d_]+)*[)\"'”.,;:!?]*")
_LEAST_PROSE, _LEAST_WRAPPED_CHARS = 0.6, 50
_LEAST_TITLES, _MOST_TITLES, _MAX_TITLE_CHARS, _LOWEST_LEVEL = 3, 0.5, 70, 6
_MAX_TITLE_WORDS, _MOST_CAPITALS = 4, 0.6
"""Of words with more than three letters. Longer titles have capitals."""
_DATED = re.compile(r"\W?\d{1,4}(?:[-:/]\d{1,2}|\.\d{1,2}\.\d{2,4}\b)")
_UNDERLINE = re.compile(r"\n[ \t]*([!-/:-@\[-`{-~])\1{2,}[ \t]*(?:\n|\Z)")
_SURE_TITLE = re.compile(r"[^a-z]+|\d+(?:\.\d+)*\.?[ \t]+\S.*|(?:#|;|//)[ \t].*")
"""Titles in capitals, with a number, or comments. Any other that stands directly above its text may be quoted with it."""
_FIRST_COMMENT = re.compile(r"\s*((?:#|;|//)[ \t]+[^\W\d_][^\n:@\d]*)\n(?!#|;|//)")
"""The line above settings that says what they are: as a title, it is not quoted, and its words count for all below."""
_PAGE_NAME = r"([\w.:+@-]+\(\d\w{0,4}\))"
_MANUAL_PAGE = re.compile(rf"\s*{_PAGE_NAME}[^\n]*[ \t]\1[ \t]*\n(.*\n)[ \t]*\n[^\n]*[ \t]\1\s*", re.DOTALL)
"""The header and the footer of a manual page, and the page between."""
_PARAGRAPH = re.compile(r"[^\n]*\S[^\n]*(?:\n[^\n]*\S[^\n]*)*")
_ITEM = re.compile(r"[ \t]*(?:[-*+•][ \t]|\(?(?:\d{1,4}|[A-Za-z])[.)][ \t])")

_RULE = re.compile(r"([!-/:-@\[-`{-~])\1*")
_ROLE = re.compile(r"(?::[\w.+-]+)*:(?=`)")
_INLINE_MARKUP = re.compile(r"\*\*|`+|[ \t]<[^<>]*>(?=`)")
_SURE_RULE = 4
"""A rule of this length underlines a title even if the title is longer."""


def read_markdown(text: str) -> ParsedFile:
    start, metadata = _front_matter(text)
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
    title = str(title) if isinstance(title := metadata.pop("title", ""), str | int) else ""
    return builder.build(first_title(builder.headings) or title, metadata)


def _front_matter(text: str) -> tuple[int, dict[str, Any]]:
    """Where the text begins behind front matter in YAML or TOML, and its values; of damaged front matter, the title alone."""
    match = _FRONT_MATTER.match(text)
    if not match:
        return 0, {}
    try:  # Why BaseLoader: YAML's rules make 567 of the postal code 01067 and False of NO
        found = tomllib.loads(match[2]) if match[1] == "+++" else yaml.load(match[2], yaml.BaseLoader)
    except (ValueError, yaml.YAMLError, RecursionError):
        title = _SET_TITLE.search(match[2])
        found = {"title": title[1].strip("\"' \t")} if title else {}
        lines = (line.strip() for line in match[2].split("\n"))
        if not _SETTING.match(next((line for line in lines if line and line[0] != "#"), "")):
            return 0, {}
    if not isinstance(found, dict):  # text between two rules
        return (0, {}) if found else (match.end(), {})
    return match.end(), {str(key): _plain(value) for key, value in found.items() if _plain(value) not in (None, "", [])}


def _plain(value: Any) -> Any:
    """A value of front matter: whole numbers, TOML's numbers and switches, else text; of lists such values; or else None."""
    if isinstance(value, str):
        return int(value) if _INTEGER.fullmatch(value) else value
    if isinstance(value, list):
        return [_plain(each) for each in value if not isinstance(each, list) and _plain(each) is not None]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    is_number = isinstance(value, int | float) and abs(value) < _MAX_NUMBER
    return value if is_number else None


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
    """Without comments, tags and struck text, with superscripts as signs. Code in the line stays."""
    if ("<" not in source and "~~" not in source) or len(source) > _MAX_INLINE_CHARS:
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


def _without_closing(line: str) -> str:
    """`Title ##` is `Title`; `C#` stays."""
    line = line.strip()
    opened = line.rstrip("#")
    return opened if not opened or opened[-1] in " \t" else line


def _without_markup(title: str) -> str:
    return _EMPHASIS.sub("", _LINK.sub(r"\1", title)) if len(title) < 1000 else title


def read_plain(text: str) -> ParsedFile:
    """Titles are underlined, or are short lines above text with a larger indent, as in manual pages and RFCs.

    Bold and underlined letters, which `man` writes with backspaces, become plain; its header and footer are left out.
    """
    text = _OVERSTRIKE.sub("", text)
    if page := _MANUAL_PAGE.fullmatch(text):
        text = page[2]
    underlined = list(_rst_headings(text))
    found = sorted([*underlined, *_outline(text, max((each.level for each in underlined), default=0))])
    headings = tuple(each for each in found if not _NAMED.fullmatch(each.text))  # settings stay in one section
    return ParsedFile(text, headings, blocks=tuple(_plain_blocks(text, found)))


def _outline(text: str, level: int) -> list[Heading]:
    """Lines that stand above text with a larger indent, with levels from `level` + 1 on by their indent.

    Behind a section, text with a smaller indent goes on under the title above: that title is repeated at the empty line before.

    None where few or most lines are such lines, which then may be anything.
    """
    lines = [(start, line.expandtabs()) for start, line in numbered_lines(text)]
    found: list[tuple[int, int, str]] = []  # indent, start, title
    open_titles: list[tuple[int, str]] = []  # indent, title
    before, is_title, num_titles, num_written = -1, False, 0, 0  # of the line above: its indent, -1 for an empty line
    for number, (start, line) in enumerate(lines):
        title, indent = line.strip(), _indent(line)
        if title:
            num_written += 1
            begins = before < 0 or before > indent or is_title or bool(_NAMED.fullmatch(title))
            below = [_indent(each) for _, each in lines[number + 1 : number + 3] if each.strip()][:1]
            is_above = bool(below) and (below[0] > indent + 1 or (title[0] == "[" and below[0] == indent))
            is_title = begins and is_above and _may_be_title(title, not lines[number + 1][1].strip())
            is_behind = bool(open_titles) and indent <= open_titles[-1][0] and not _NAMED.fullmatch(open_titles[-1][1])
            while open_titles and indent <= open_titles[-1][0]:
                open_titles.pop()
            if is_title:
                num_titles += 1
                open_titles.append((indent, title))
                found.append((indent, start, title))
            elif is_behind and before < 0:
                above = open_titles[-1] if open_titles else (0, "")
                found.append((above[0], lines[number - 1][0], above[1]))
        before = indent if title else -1
    if num_titles < _LEAST_TITLES or num_titles > _MOST_TITLES * num_written:
        return []
    indents = sorted({indent for indent, *_ in found})
    return [
        Heading(start, min(_LOWEST_LEVEL, level + 1 + indents.index(indent)), title) for indent, start, title in found
    ]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _may_be_title(line: str, is_apart: bool) -> bool:
    """Whether a line may be a title, from its words. `is_apart`: an empty line follows."""
    if _NAMED.fullmatch(line):  # of settings in YAML or INI
        return True
    if "   " in line or len(line) > _MAX_TITLE_CHARS or _DATED.match(line) or line[-1] in ".,;:?!{([\\":
        return False
    if not re.search(r"\w", line) or not (is_apart or not _ITEM.match(line)):
        return False
    words = [word for word in line.split() if len(word) > 3]
    num_capital = sum(not word[0].islower() for word in words)
    return len(words) <= _MAX_TITLE_WORDS or num_capital >= _MOST_CAPITALS * len(words)


def _plain_blocks(text: str, titles: Sequence[Heading]) -> Iterator[Block]:
    starts = {each.start for each in titles}
    if comment := _FIRST_COMMENT.match(text):
        starts.add(comment.start(1))
    begin, end, is_apart = -1, 0, False  # the open block, and whether it is a title or a rule
    for start, line in numbered_lines(text):
        stands_apart = start in starts or len(_rule_of(line)) > 2
        if begin >= 0 and (is_apart or stands_apart or not line.strip()):
            yield _plain_block(text, begin, end, starts)
            begin = -1
        if line.strip():
            begin = start if begin < 0 else begin
            end, is_apart = start + len(line), stands_apart
    if begin >= 0:
        yield _plain_block(text, begin, end, starts)


def _plain_block(text: str, start: int, end: int, titles: Collection[int]) -> Block:
    lines = text[start:end].split("\n")
    if len(lines) == 1 and (start in titles or len(_rule_of(lines[0])) > 2):
        is_apart = text[end : end + 2] in ("\n\n", "\n", "")
        is_sure = is_apart or start not in titles or _SURE_TITLE.fullmatch(lines[0]) or _UNDERLINE.match(text, end)
        kind = BlockKind.TERM if lines[0][0].isspace() or not is_sure else BlockKind.HEADING
        start += len(lines[0]) - len(lines[0].lstrip())
    elif _ITEM.match(lines[0]):
        kind = BlockKind.LIST_ITEM
    else:
        kind = BlockKind.CODE if _is_by_lines(lines) else BlockKind.PARAGRAPH
    return Block(start, end, kind)


def _is_by_lines(lines: Sequence[str]) -> bool:
    """Whether each line says something of its own: settings, records, a dialogue, code; not the lines of a paragraph."""
    if len(lines) > 1 and sum(bool(_RECORD.match(line)) for line in lines) > _MOST_RECORDS * len(lines):
        return True
    if not all(line[:1].isspace() for line in lines):
        return False
    words = " ".join(lines).split()
    num_words = sum(bool(_PROSE_WORD.fullmatch(word)) for word in words)
    is_long = len(lines) > 1 and len(lines[0].strip()) >= _LEAST_WRAPPED_CHARS
    return num_words < _LEAST_PROSE * len(words) or not (is_long or words[-1][-1] in ".:;!?")


def read_rst(text: str) -> ParsedFile:
    """Leaves out comments, and writes the numbers of lists."""
    text = _with_numbers(_RST_SCRIPT.sub(_scripted, _RST_COMMENT.sub("", text)), _RST_ITEM)
    headings = tuple(_rst_headings(text))
    return ParsedFile(text, headings, first_title(headings), blocks=_paragraphs(text, headings))


def read_asciidoc(text: str) -> ParsedFile:
    """Leaves out comments and the lines around blocks, writes the numbers of lists and the values of attributes."""
    builder, values = TextBuilder(), dict[str, str]()

    def with_values(line: str) -> str:
        return _ADOC_REFERENCE.sub(lambda match: values.get(match[1].lower(), match[0]), line)

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
        elif setting := _ADOC_SETTING.fullmatch(line):
            value = with_values(setting[4] or "")
            values.pop(setting[2].lower(), None)
            if not (setting[1] or setting[3]) and not value.endswith("\\") and len(value) <= _MAX_VALUE_CHARS:
                values[setting[2].lower()] = value
        elif title := _ADOC_TITLE.match(line):
            _add_asciidoc(builder, lines)
            lines = []
            builder.add(_without_markup(with_values(title[2])), len(title[1]))
        elif _SET_NUMBER.match(line) or not _ADOC_LEFT_OUT.match(line):
            lines.append(with_values(line))
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

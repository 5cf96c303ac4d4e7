"""Titles of Markdown and reStructuredText. The text itself stays as it is.

Markdown: `# ATX` and underlined titles, outside code fences and front matter. reStructuredText: underlined or framed
lines; the level of a title is the order in which its style first appears.

    >>> read_markdown("# The mill").title
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ragspec.core import Heading
from ragspec.retrieval.reading.parsed_file import ParsedFile, first_title, heading, numbered_lines

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_ATX = re.compile(r" {0,3}(#{1,6})(?=[ \t]|\Z)")
_UNDERLINE = re.compile(r" {0,3}(=+|-+)[ \t]*\Z")
_NO_PARAGRAPH = re.compile(r" {0,3}(?:[>|]|[-*+][ \t]|\d{1,9}[.)][ \t])| {4}|\t")
_SET_TITLE = re.compile(r"^title:(.*)$", re.MULTILINE)
_LINK = re.compile(r"!?\[([^\[\]]*)\](?:\([^()]*\)|\[[^\[\]]*\])")
_EMPHASIS = re.compile(r"\*\*|__|`+|[ \t]\{#[^{}]*\}\Z")

_RULE = re.compile(r"([!-/:-@\[-`{-~])\1*")
_ROLE = re.compile(r"(?::[\w.+-]+)*:(?=`)")
_INLINE_MARKUP = re.compile(r"\*\*|`+|[ \t]<[^<>]*>(?=`)")
_SURE_RULE = 4
"""A rule of this length underlines a title even if the title is longer."""


def read_markdown(text: str) -> ParsedFile:
    headings = tuple(_markdown_headings(text))
    settings = _SET_TITLE.search(text, 0, _front_matter_end(text))
    return ParsedFile(text, headings, first_title(headings) or (settings[1].strip("\"' \t") if settings else ""))


def _markdown_headings(text: str) -> Iterator[Heading]:
    fence = ""  # the fence that ends the code around the line; empty outside code
    paragraph: list[str] = []  # earlier lines of the line's paragraph
    for start, line in numbered_lines(text, _front_matter_end(text)):
        mark = _FENCE.match(line)
        atx, underline = _ATX.match(line), _UNDERLINE.match(line)
        if fence:
            fence = "" if mark and mark[1].startswith(fence) and not line[mark.end() :].strip() else fence
        elif mark and not (mark[1][0] == "`" and "`" in line[mark.end() :]):
            fence = mark[1]
        elif atx:
            yield from heading(start + atx.start(1), len(atx[1]), _without_markup(_without_closing(line[atx.end() :])))
        elif underline and len(paragraph) == 1:
            level = 1 if underline[1][0] == "=" else 2
            yield from heading(start - len(paragraph[0]) - 1, level, _without_markup(paragraph[0]))
        elif line.strip() and not _NO_PARAGRAPH.match(line):
            paragraph.append(line)
            continue
        paragraph.clear()


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


def read_rst(text: str) -> ParsedFile:
    headings = tuple(_rst_headings(text))
    return ParsedFile(text, headings, first_title(headings))


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

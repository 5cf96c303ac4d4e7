"""Titles of Markdown: `# ATX` and underlined ones, not those in code fences or in the front matter. The text stays as it is."""

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
_MARKS = re.compile(r"\*\*|__|`+|[ \t]\{#[^{}]*\}\Z")


def readable(text: str) -> ParsedFile:
    headings = tuple(_headings(text))
    settings = _SET_TITLE.search(text, 0, _front_matter_end(text))
    return ParsedFile(text, headings, first_title(headings) or (settings[1].strip("\"' \t") if settings else ""))


def _headings(text: str) -> Iterator[Heading]:
    fence = ""  # what closes the code that the line stands in
    paragraph: list[str] = []  # the lines above that belong to the same paragraph
    for start, line in numbered_lines(text, _front_matter_end(text)):
        mark = _FENCE.match(line)
        atx, underline = _ATX.match(line), _UNDERLINE.match(line)
        if fence:
            fence = "" if mark and mark[1].startswith(fence) and not line[mark.end() :].strip() else fence
        elif mark and not (mark[1][0] == "`" and "`" in line[mark.end() :]):
            fence = mark[1]
        elif atx:
            yield from heading(start + atx.start(1), len(atx[1]), _plain(_without_closing(line[atx.end() :])))
        elif underline and len(paragraph) == 1:
            level = 1 if underline[1][0] == "=" else 2
            yield from heading(start - len(paragraph[0]) - 1, level, _plain(paragraph[0]))
        elif line.strip() and not _NO_PARAGRAPH.match(line):
            paragraph.append(line)
            continue
        paragraph.clear()


def _front_matter_end(text: str) -> int:
    """Where the text begins after settings between two lines of dashes."""
    if not text.startswith("---\n"):
        return 0
    end = text.find("\n---\n", 3)
    return 0 if end < 0 else end + len("\n---\n")


def _without_closing(line: str) -> str:
    """`Title ##` is `Title`; `C#` stays."""
    line = line.strip()
    opened = line.rstrip("#")
    return opened if not opened or opened[-1] in " \t" else line


def _plain(title: str) -> str:
    return _MARKS.sub("", _LINK.sub(r"\1", title)) if len(title) < 1000 else title
